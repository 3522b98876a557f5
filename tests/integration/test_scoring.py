"""Scores through the router, by prefill alone: those of Hugging Face, told as an undivided SGLang server tells them."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, PLAIN_SERVER, Engine, EngineSpec
from support.reference import greedy_reference, logprobs_reference, random_prompt
from support.router_cli import RunningRouter
from support.tiny_model import STANDARD_SHAPE

pytestmark = pytest.mark.integration

TOLERANCE = 1e-3
LENGTHS = (1, 2, 3, 17, 100, 256, 257, 600, 1500)


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    # Long prompts in chunks, between which they are parked.
    chunked = EngineSpec(Role.LONG, arguments=("--chunked-prefill-size", "256"), name="chunked")
    graphs = EngineSpec(Role.SHORT, worker_options=("--laps-graphs", "lazy"), name="graphs")
    return FLEET.get(graphs, chunked, EngineSpec(Role.DECODE))


@pytest.fixture(scope="module")
def plain(engines: list[Engine]) -> Engine:
    """One ordinary SGLang server: no disaggregation, no router."""
    return FLEET.get(PLAIN_SERVER)[0]


@pytest.fixture(autouse=True)
def _nothing_left_behind(router: RunningRouter, engines: list[Engine]) -> Iterator[None]:
    yield
    for engine in engines:
        engine.wait_idle()
    assert router.is_idle()


def scored(ids: Any, new_tokens: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        **more,
    }


def is_close(a: Any, b: Any) -> bool:
    """Equal but for rounding of numbers that are not whole."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(is_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= TOLERANCE
    return bool(a == b)


COMPARED = (
    *("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs", "output_token_logprobs"),
    *("output_top_logprobs", "finish_reason", "prompt_tokens", "completion_tokens"),
)


def assert_same(ours: Any, theirs: Any) -> None:
    for field in COMPARED:
        mine, others = ours["meta_info"].get(field), theirs["meta_info"].get(field)
        assert is_close(mine, others), (field, mine, others)
    assert (ours["text"], ours["output_ids"]) == (theirs["text"], theirs["output_ids"])


@pytest.mark.parametrize("length", LENGTHS)
def test_scores_are_those_of_hugging_face_and_of_a_plain_server(
    router: RunningRouter, engines: list[Engine], plain: Engine, length: int
) -> None:
    prompt = random_prompt(length, seed=5000 + length)
    body = scored(prompt, token_ids_logprob=[9, 700, 2000])
    reply, headers = router.call("POST", "/generate", body)
    assert reply.status == 200, reply.body
    assert headers["x-sglang-ext-prefill"] == engines[0 if length <= 256 else 1].url
    assert "x-sglang-ext-decode" not in headers
    assert_same(reply.body, plain.post("/generate", body).body)

    info, truth = reply.body["meta_info"], logprobs_reference(prompt)
    # SGLang calls the vocabulary's last token 0 there; the number is the right one's.
    last = STANDARD_SHAPE.vocabulary - 1
    assert [token for _, token, _ in info["input_token_logprobs"]] == [0 if t == last else t for t in prompt]
    for position in range(1, length):
        before = truth[position - 1]
        assert info["input_token_logprobs"][position][0] == pytest.approx(float(before[prompt[position]]), abs=1e-3)
        for value, token, _ in info["input_top_logprobs"][position] + info["input_token_ids_logprobs"][position]:
            assert value == pytest.approx(float(before[token]), abs=1e-3)
        best = float(before.max())
        assert info["input_top_logprobs"][position][0][0] == pytest.approx(best, abs=1e-3)
    assert reply.body["output_ids"] == greedy_reference(prompt, 1)


def test_what_is_cached_is_scored_anew_and_scoring_fills_the_cache(router: RunningRouter, plain: Engine) -> None:
    prompt = random_prompt(200, seed=61)
    generated = router.post(
        "/generate", {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    )
    assert generated.status == 200
    for ids in (prompt, prompt, prompt[:90] + random_prompt(50, seed=62)):
        assert_same(router.post("/generate", scored(ids)).body, plain.post("/generate", scored(ids)).body)
    # From a later start on, what lies before it may come from the cache.
    later = scored(prompt, logprob_start_len=150)
    assert_same(router.post("/generate", later).body, plain.post("/generate", later).body)


def test_no_new_token_is_as_good_as_one(router: RunningRouter, plain: Engine) -> None:
    body = scored(random_prompt(30, seed=63), new_tokens=0)
    ours, theirs = router.post("/generate", body).body, plain.post("/generate", body).body
    assert_same(ours, theirs)
    assert ours["output_ids"] == []


def test_a_stop_token_is_told(router: RunningRouter, plain: Engine) -> None:
    prompt = random_prompt(20, seed=64)
    (first,) = greedy_reference(prompt, 1)
    body = scored(prompt)
    body["sampling_params"]["stop_token_ids"] = [first]
    ours = router.post("/generate", body).body
    assert ours["meta_info"]["finish_reason"]["type"] == "stop"
    assert_same(ours, plain.post("/generate", body).body)


def test_many_at_once_in_batches_and_streams(router: RunningRouter, plain: Engine) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 900, 60, 300, 7, 1200, 31, 130)]
    bodies = [scored(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda body: router.post("/generate", body), bodies))
    alone = [plain.post("/generate", body).body for body in bodies]
    for reply, theirs in zip(replies, alone, strict=True):
        assert_same(reply.body, theirs)
    together = router.post("/generate", scored(prompts)).body
    for ours, theirs in zip(together, alone, strict=True):
        assert_same(ours, theirs)
    for body, theirs in zip(bodies[:2], alone, strict=False):
        request = urllib.request.Request(
            router.url + "/generate",
            json.dumps({**body, "stream": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            events = [line.decode().strip() for line in response if line.strip()]
        assert events[-1] == "data: [DONE]"
        assert_same(json.loads(events[-2].removeprefix("data: ")), theirs)


def test_as_many_alternatives_as_trainers_want(router: RunningRouter, plain: Engine) -> None:
    """More than the 128 that end a stock prefill instance; and with a decode instance they are refused."""
    body = scored(random_prompt(40, seed=65), top_logprobs_num=256)
    assert_same(router.post("/generate", body).body, plain.post("/generate", body).body)
    refused = router.post("/generate", scored(random_prompt(40, seed=65), new_tokens=4, top_logprobs_num=200))
    assert (refused.status, refused.body["error"]["param"]) == (400, "top_logprobs_num")


def test_an_instance_refuses_what_would_end_it(engines: list[Engine]) -> None:
    """Asked directly, beside any router."""
    body = {**scored([9, 10], new_tokens=4, top_logprobs_num=200), "bootstrap_host": "127.0.0.1"}
    for engine, more in ((engines[0], {"bootstrap_port": engines[0].bootstrap_port}), (engines[2], {})):
        reply = engine.post("/generate", {**body, "bootstrap_room": 77, **more}, timeout_s=20)
        assert reply.status == 400, reply.body
        assert "128" in json.dumps(reply.body)
        assert engine.is_alive


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_leaves_nothing_behind(
    router: RunningRouter, engines: list[Engine], is_stream: bool
) -> None:
    """At whatever moment; the fixture looks at the instances afterwards."""
    for number, delay_s in enumerate((0.0, 0.005, 0.02, 0.05, 0.1)):
        for length in (60, 1500):
            body = scored(random_prompt(length, seed=1000 * number + length), stream=is_stream)
            connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=30)
            connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
            time.sleep(delay_s)
            connection.close()
    for engine in engines:
        engine.wait_idle(10.0)
    prompt = random_prompt(40, seed=66)
    assert router.post("/generate", scored(prompt)).body["output_ids"] == greedy_reference(prompt, 1)


@pytest.mark.parametrize("new_tokens", [0, 1, 5])
def test_prompt_logprobs_of_completions(router: RunningRouter, new_tokens: int) -> None:
    prompts = [random_prompt(length, seed=70 + length) for length in (1, 12, 400)]
    body = {
        "model": "m",
        "prompt": prompts,
        "max_tokens": new_tokens,
        "temperature": 0,
        "prompt_logprobs": 4,
        "prompt_logprob_token_ids": [11, 12],
    }
    reply = router.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    assert [choice["index"] for choice in reply.body["choices"]] == [0, 1, 2]
    assert reply.body["usage"]["prompt_tokens"] == 413
    assert reply.body["usage"]["completion_tokens"] == 3 * new_tokens
    for prompt, choice in zip(prompts, reply.body["choices"], strict=True):
        entries, truth = choice["prompt_logprobs"], logprobs_reference(prompt)
        assert len(entries) == len(prompt)
        assert entries[0] is None
        for position in range(1, len(prompt)):
            entry, before = entries[position], truth[position - 1]
            assert {str(prompt[position]), "11", "12"} <= set(entry)
            for token, item in entry.items():
                assert item["logprob"] == pytest.approx(float(before[int(token)]), abs=1e-3)
            ranked = sorted((item["rank"], int(token)) for token, item in entry.items() if item["rank"])
            best = before.topk(4).indices.tolist()
            assert [token for rank, token in ranked if rank <= 4] == best


@pytest.mark.parametrize("new_tokens", [1, 5])
def test_echo_with_logprobs_is_as_on_a_plain_server(router: RunningRouter, plain: Engine, new_tokens: int) -> None:
    body = {
        "model": "m",
        "prompt": [random_prompt(30, seed=81), random_prompt(300, seed=82)],
        "max_tokens": new_tokens,
        "logprobs": 2,
        "echo": True,
        "temperature": 0,
    }
    ours, theirs = router.post("/v1/completions", body).body, plain.post("/v1/completions", body).body
    assert len(ours["choices"]) == 2
    for mine, other in zip(ours["choices"], theirs["choices"], strict=True):
        assert mine["text"] == other["text"]
        assert mine["finish_reason"] == other["finish_reason"]
        for field in ("tokens", "token_logprobs", "text_offset"):
            assert is_close(mine["logprobs"][field], other["logprobs"][field])
        for one, another in zip(mine["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True):
            assert (one is None) == (another is None)
            assert one is None or (list(one) == list(another) and is_close(list(one.values()), list(another.values())))
