"""An instance with LAPS beside one with SGLang's own scheduler: the same answers, and none of LAPS where it is off."""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.laps import Pair
from support.laps_checks import Counters, clean_pair
from support.pd import send_both, with_room
from support.reference import random_prompt

pytestmark = pytest.mark.integration

OURS = EngineSpec(Role.SHORT)
STOCK = EngineSpec(Role.SHORT, worker_options=("--laps-mode", "off"))
DECODE = EngineSpec(Role.DECODE)
# Around the boundary between short and long, and the chunk, both of 256 tokens.
LENGTHS = (1, 31, 255, 256, 257, 600, 1500)
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "count": {"type": "integer"}},
    "required": ["answer", "count"],
}
REGEX = "(yes|no)-[0-9]{3}"
GRAMMARS = {"regex": {"regex": REGEX}, "schema": {"json_schema": json.dumps(SCHEMA)}}


class Engines(NamedTuple):
    ours: Engine
    stock: Engine
    decode: Engine


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines(*FLEET.get(OURS, STOCK, DECODE))


@pytest.fixture(autouse=True)
def _flushed(engines: Engines) -> None:
    """Neither has anything cached that the other has not."""
    for engine in engines:
        engine.wait_idle()
        assert engine.post("/flush_cache", {}).status == 200


def body(prompt: list[int], **changes: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **changes.pop("sampling", {})}
    return {"input_ids": prompt, "sampling_params": sampling, **changes}


def both_answers(engines: Engines, content: dict[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """What prefill and decode answer, with our prefill instance and with the stock one."""
    answers = []
    for prefill in (engines.ours, engines.stock):
        prefill_reply, decode_reply = send_both(prefill, engines.decode, content)
        assert (prefill_reply.status, decode_reply.status) == (200, 200), (prefill_reply.body, decode_reply.body)
        answers.append((prefill_reply.body, decode_reply.body))
    return answers[0], answers[1]


@pytest.mark.parametrize("length_tokens", LENGTHS)
def test_greedy_tokens(engines: Engines, length_tokens: int) -> None:
    (_, ours), (_, stock) = both_answers(engines, body(random_prompt(length_tokens, seed=2000 + length_tokens)))
    assert ours["output_ids"] == stock["output_ids"]


def test_cached_prefixes(engines: Engines) -> None:
    prompt = random_prompt(400, seed=2100)
    for extra in (0, 0, 90, 300):
        prompt = prompt + random_prompt(extra, seed=2100 + extra)
        (our_prefill, ours), (stock_prefill, stock) = both_answers(engines, body(prompt))
        assert ours["output_ids"] == stock["output_ids"]
        cached_tokens = our_prefill["meta_info"]["cached_tokens"]
        assert cached_tokens == stock_prefill["meta_info"]["cached_tokens"]
    assert cached_tokens >= 490


@pytest.mark.parametrize("length_tokens", [40, 700])
@pytest.mark.parametrize("grammar", list(GRAMMARS))
def test_structured_output(engines: Engines, grammar: str, length_tokens: int) -> None:
    content = body(
        random_prompt(length_tokens, seed=2200),
        sampling={"max_new_tokens": 48, "ignore_eos": False, **GRAMMARS[grammar]},
    )
    (_, ours), (_, stock) = both_answers(engines, content)
    assert ours["output_ids"] == stock["output_ids"]
    if grammar == "regex":
        assert re.fullmatch(REGEX, ours["text"])
    else:
        # A random model may go on with spaces or digits for ever.
        assert ours["text"].lstrip().startswith("{")


@pytest.mark.parametrize("length_tokens", [40, 700])
def test_log_probabilities(engines: Engines, length_tokens: int) -> None:
    content = body(random_prompt(length_tokens, seed=2300), return_logprob=True, logprob_start_len=0)
    (our_prefill, ours), (stock_prefill, stock) = both_answers(engines, content)
    assert ours["output_ids"] == stock["output_ids"]
    for name, ours_of, stock_of in (
        ("input_token_logprobs", our_prefill, stock_prefill),
        ("output_token_logprobs", ours, stock),
    ):
        mine, theirs = ours_of["meta_info"][name], stock_of["meta_info"][name]
        assert len(mine) > 0
        assert [entry[1] for entry in mine] == [entry[1] for entry in theirs]
        # The first token of a prompt has none.
        assert [entry[0] or 0.0 for entry in mine] == pytest.approx([entry[0] or 0.0 for entry in theirs], abs=1e-3)


def test_streams(engines: Engines) -> None:
    ours, stock = (streamed_text(prefill, engines.decode) for prefill in (engines.ours, engines.stock))
    assert ours == stock
    assert ours


def streamed_text(prefill: Engine, decode: Engine) -> str:
    content = with_room(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "def main(argv):\n    return 0\n" * 40}],
            "temperature": 0,
            "max_tokens": 24,
            "stream": True,
        },
        prefill,
    )
    path = "/v1/chat/completions"
    with ThreadPoolExecutor(1) as leg:
        prefill_leg = leg.submit(prefill.post, path, content)
        request = urllib.request.Request(
            decode.url + path, json.dumps(content).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = [line[len(b"data: ") :] for line in response if line.startswith(b"data: ")]
        assert prefill_leg.result().status == 200
    assert lines[-1].strip() == b"[DONE]"
    deltas = [json.loads(line)["choices"] for line in lines[:-1]]
    return "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices)


def test_on_a_cpu_waiting_does_not_pay(engines: Engines) -> None:
    """The window finds out by itself: with default options, no short prefill is held."""
    with ThreadPoolExecutor(2) as threads:
        for pair in clean_pair(Pair(engines.ours, engines.decode, threads)):
            for number in range(8):
                assert pair.send(10 + 10 * number, seed=2400 + number).is_exact()
            before = Counters.of(engines.ours)
            for number in range(8):
                assert pair.send(24 + number, seed=2420 + number).is_exact()
            change = Counters.of(engines.ours).since(before)
            assert change("dispatches_total", length_class="short", reason="no_gain") >= 4
            # One that took longer than W to reach the queue leaves by its window, without being held either.
            assert change("dispatches_total", length_class="short", reason="window") <= 4
            assert change("batch_requests_count") == 8


def test_stock_scheduler_has_no_laps_endpoint(engines: Engines) -> None:
    assert engines.stock.get("/laps").status == 404
    assert engines.stock.post("/laps/mode", {"mode": "both"}).status == 404
    assert Counters.of(engines.stock).values == {}
    assert engines.ours.get("/laps").status == 200


def test_engine_argument_that_excludes_laps_is_one_clear_line() -> None:
    """SGLang's own arguments are known only when SGLang has read them."""
    engine = Engine.start(EngineSpec(Role.BOTH, arguments=("--schedule-policy", "lpm")))
    try:
        assert engine.process.wait(120) == 3
        assert engine.log_tail(1) == (
            "sglang-ext: --schedule-policy lpm does not go with --laps-mode (LAPS orders the queue itself); "
            "use --laps-mode off"
        )
        assert "Traceback" not in engine.log_path.read_text()
    finally:
        engine.stop()
