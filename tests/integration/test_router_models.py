"""Two models of real SGLang behind one router: each request is answered by its own, and a misfit gets none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.handshake_process import wait_until
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router
from support.tiny_model import STANDARD_SHAPE, TinyModelShape, tiny_model

pytestmark = pytest.mark.integration

OTHER_SHAPE = TinyModelShape(seed=1, vocabulary=1024)
NAMED = ("--served-model-name", "other")
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(
        EngineSpec(Role.SHORT),
        EngineSpec(Role.DECODE),
        EngineSpec(Role.SHORT, shape=OTHER_SHAPE, arguments=NAMED),
        EngineSpec(Role.DECODE, shape=OTHER_SHAPE, arguments=NAMED),
    )


@pytest.fixture(scope="module")
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    alias = f"tiny={tiny_model()}"
    with running_router(engines, "--model-alias", alias, strict_models=True) as running:
        yield running


def test_each_model_answers_for_itself(router: RunningRouter) -> None:
    for seed, length in enumerate((1, 40, 300)):
        for name, shape in (("tiny", STANDARD_SHAPE), ("other", OTHER_SHAPE), (str(tiny_model()), STANDARD_SHAPE)):
            prompt = random_prompt(length, seed, shape)
            body = {
                "model": name,
                "input_ids": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            }
            reply = router.post("/generate", body)
            assert reply.status == 200, reply.body
            assert reply.body["output_ids"] == greedy_reference(prompt, NEW_TOKENS, shape)
    chat = {"model": "other", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert router.post("/v1/chat/completions", chat).body["model"] == "other"


def test_other_names_are_refused(router: RunningRouter) -> None:
    for path, body in (
        ("/v1/chat/completions", {"model": "gpt-4", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"model": "gpt-4", "prompt": "hi"}),
        ("/generate", {"model": "gpt-4", "text": "hi"}),
    ):
        reply = router.post(path, body)
        assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")
    assert router.post("/generate", {"text": "hi"}).status == 400
    listed = router.call("GET", "/v1/models")[0].body["data"]
    assert [one["id"] for one in listed] == [str(tiny_model()), "other", "tiny"]


@pytest.mark.full
def test_an_instance_with_other_pages_is_refused(router: RunningRouter, engines: list[Engine]) -> None:
    (misfit,) = FLEET.get(EngineSpec(Role.DECODE, arguments=("--page-size", "16")))
    reply = router.admin("POST", "/workers", {"url": misfit.url, "role": "decode"})
    assert reply.status == 409
    message = reply.body["error"]["message"]
    assert "page size 16" in message
    assert misfit.url in message
    assert engines[0].url in message
    facts = router.workers()[engines[0].url]
    assert (facts["page_size"], facts["transfer_backend"]) == (1, "sglang_ext_tcp")


def test_what_an_instance_tells_of_itself(engines: list[Engine]) -> None:
    told = [engine.get("/server_info").body["sglang_ext"] for engine in engines]
    assert told[0]["architecture"] == told[1]["architecture"]
    assert told[0]["architecture"].startswith("LlamaForCausalLM, layers 2, ")
    assert "vocabulary 1024" in told[2]["architecture"]
    assert {one["kv_element_type"] for one in told} == {"float32"}
    assert [one["length_boundary_tokens"] for one in told] == [None] * 4
    assert [one["fits_length_boundary"] for one in told] == [True, False, True, False]


def test_where_short_ends_is_one_number_for_router_and_instance(engines: list[Engine]) -> None:
    """Nothing says where: the instance finds it after some iterations, and the router follows."""
    prefill = engines[0]
    with running_router(engines[:2], "--health-check-interval-secs", "0.3") as router:
        for seed in range(400):
            body = {"input_ids": random_prompt(8 + 36 * (seed % 41), seed), "sampling_params": {"max_new_tokens": 1}}
            assert router.post("/generate", body).status == 200
            if seed % 16 == 15 and prefill.get("/laps").body["boundary_is_fitted"]:
                break
        found = prefill.get("/laps").body
        assert found["boundary_is_fitted"], (found["boundary_tokens"], found["fit"])

        def shown() -> list[int]:
            pools = router.call("GET", "/pools")[0].body
            (member,) = pools["pools"]["short"]["members"]
            return [pools["length_boundary_tokens"], member["length_boundary_tokens"]]

        wait_until(lambda: shown() == [found["boundary_tokens"]] * 2, what="the router following")
