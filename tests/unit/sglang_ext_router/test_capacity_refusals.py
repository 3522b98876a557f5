"""What one instance refuses because it cannot hold it is served by an instance that holds more, where there is one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_ext_router.request.routing import CapacityRefusal, capacity_refusal
from support.router_process import Cluster, cluster
from support.scripted_engine import DONE, OK, Script, ScriptedEngine, Turn, event, hang, reply, status, stream

SMALL, LARGE = 1000, 4000  # tokens that an instance holds
LENGTH = 1200  # what the prompt turns out to have; the router's estimate is far less
REFUSALS = [
    f"The input ({LENGTH} tokens) is longer than the model's context length ({SMALL} tokens).",
    f"Input length ({LENGTH} tokens) exceeds the maximum allowed length ({SMALL} tokens). Use a shorter input or enable"
    " --allow-auto-truncate.",
    f"Request 3f exceeds the maximum number of tokens: {LENGTH} > {SMALL}",
    f"Request prompt exceeds the KV memory budget: input_len={LENGTH}.",
    f"Request 3f exceeds the unified FULL/SWA KV byte budget: full={LENGTH}, swa=7",
    f"Request 3f requires too many SWA KV tokens for decode preallocation: {LENGTH} > {SMALL}",
    "Multimodal prompt is too long after expanding multimodal tokens. After expanding "
    f"len(req.origin_input_ids_unpadded)=12 => {LENGTH} >= {SMALL}.",
    f"Requested token count exceeds the model's maximum context length of {SMALL} tokens. You requested a total of 1300"
    f" tokens: {LENGTH} tokens from the input messages and 100 tokens for the completion. Please reduce the number",
]
BODY: dict[str, Any] = {"prompt": "some words", "max_tokens": 4}
TOO_LONG = status(400, REFUSALS[0])


@pytest.mark.parametrize("sentence", REFUSALS)
def test_sglangs_sentences_are_recognised(sentence: str) -> None:
    needed = 1300 if "1300" in sentence else LENGTH
    assert capacity_refusal(json.dumps({"message": sentence}).encode()) == CapacityRefusal(LENGTH, needed)


@pytest.mark.parametrize(
    "sentence",
    [
        "temperature must be non-negative",
        "the prompt is empty",
        "Input length must be positive",
        "max_tokens is too large",
    ],
)
def test_other_refusals_are_not(sentence: str) -> None:
    assert capacity_refusal(json.dumps({"message": sentence}).encode()) is None


def once_sent_to(*prefills: ScriptedEngine) -> Script:
    """Answer as decode does: not before one of these instances has the prompt."""

    async def play(turn: Turn) -> None:
        room = turn.request.room
        while not any(request.room == room for prefill in prefills for request in prefill.requests):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await reply()(turn)

    return play


async def sizes(served: Cluster, of: dict[ScriptedEngine, int]) -> None:
    """Let the instances hold this many tokens, and wait until the router knows."""
    for engine, tokens in of.items():
        assert isinstance(engine.info, dict)
        engine.info = {**engine.info, "context_length": tokens}
        served.worker(engine.url).has_info = False
    await served.until(lambda: all(served.worker(engine.url).max_prompt_tokens == of[engine] for engine in of))


@pytest.mark.parametrize("sentence", REFUSALS)
async def test_another_instance_of_the_pool_serves_it(sentence: str) -> None:
    async with cluster(short=2, long=0) as served:
        small, large = served.short
        await sizes(served, {small: SMALL, large: LARGE})
        small.script, served.decode[0].script = status(400, sentence), once_sent_to(large)
        for _ in range(4):
            answer = await served.ask("POST", "/v1/completions", BODY)
            assert (answer.status, answer.json) == (200, OK)
        assert len(large.requests) == 4
        assert served.worker(small.url).breaker.can_try(0.0)


async def test_the_only_larger_instance_is_in_the_other_pool() -> None:
    async with cluster(short=2, long=1, pool_spill=False) as served:
        await sizes(served, {served.short[0]: SMALL, served.short[1]: SMALL, served.long[0]: LARGE})
        served.decode[0].script = once_sent_to(served.long[0])
        for engine in served.short:
            engine.script = TOO_LONG
        answer = await served.ask("POST", "/v1/completions", BODY)
        assert answer.status == 200
        assert len(served.long[0].requests) == 1
        # An instance that is known not to hold it is not asked.
        assert sum(len(engine.requests) for engine in served.short) == 1


async def test_where_none_holds_it_the_client_gets_sglangs_refusal() -> None:
    async with cluster(short=2, long=1) as served:
        await sizes(served, {served.short[0]: SMALL, served.short[1]: SMALL, served.long[0]: SMALL})
        served.decode[0].script = hang()
        for engine in (*served.short, *served.long):
            engine.script = TOO_LONG
        answer = await served.ask("POST", "/v1/completions", BODY)
        assert answer.status == 400
        assert answer.error["message"] == REFUSALS[0]
        assert answer.error["code"] == "context_length_exceeded"
        assert sum(len(engine.requests) for engine in (*served.short, *served.long)) == 1


async def test_a_larger_instance_that_refuses_too_ends_it() -> None:
    async with cluster(short=2, long=0) as served:
        small, large = served.short
        await sizes(served, {small: SMALL, large: LARGE})
        small.script, served.decode[0].script = TOO_LONG, hang()
        large.script = status(400, f"Request x exceeds the maximum number of tokens: {LENGTH} > {SMALL}")
        answer = await served.ask("POST", "/v1/completions", BODY)
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
        assert len(large.requests) == 1


async def test_a_decode_instance_that_is_too_small() -> None:
    async with cluster(short=1, long=0, decode=2) as served:
        small, large = served.decode
        await sizes(served, {small: SMALL, large: LARGE})
        small.script = status(400, REFUSALS[2])
        for _ in range(4):
            assert (await served.ask("POST", "/v1/completions", BODY)).status == 200
        assert len(large.requests) == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_stream_that_begins_with_the_refusal(path: str) -> None:
    async with cluster(short=2, long=0, decode=1) as served:
        small, large = served.short
        await sizes(served, {small: SMALL, large: LARGE})
        error = {"error": {"message": REFUSALS[2], "type": "BadRequestError", "code": 400}}
        small.script, served.decode[0].script = stream(event(error), DONE), once_sent_to(large)
        body = {**BODY, "stream": True} if path != "/generate" else {"text": "some words", "stream": True}
        for _ in range(4):
            answer = await served.ask("POST", path, body)
            assert answer.status == 200
            assert b"exceeds the maximum" not in answer.body
        assert len(large.requests) == 4


async def test_scores_go_to_an_instance_that_holds_the_prompt() -> None:
    scores = {"choices": [{"index": 0, "text": "", "prompt_logprobs": [None, {"5": {"logprob": -1.0}}]}]}
    async with cluster(short=2, long=0) as served:
        small, large = served.short
        await sizes(served, {small: SMALL, large: LARGE})
        small.script = TOO_LONG
        large.script = reply(scores)
        for _ in range(4):
            await served.ask("POST", "/v1/completions", {**BODY, "prompt_logprobs": 1, "max_tokens": 0})
        assert len(large.requests) == 4


async def test_without_retries_the_refusal_is_the_answer() -> None:
    async with cluster(short=2, long=0, disable_retries=True) as served:
        small, large = served.short
        await sizes(served, {small: SMALL, large: LARGE})
        small.script = large.script = TOO_LONG
        served.decode[0].script = hang()
        assert (await served.ask("POST", "/v1/completions", BODY)).status == 400
        assert len(small.requests) + len(large.requests) == 1


async def test_another_refusal_is_an_answer_at_once() -> None:
    async with cluster(short=2, long=0) as served:
        small, large = served.short
        await sizes(served, {small: SMALL, large: LARGE})
        served.decode[0].script = hang()
        small.script = large.script = status(400, "temperature must be non-negative")
        answer = await served.ask("POST", "/v1/completions", BODY)
        assert (answer.status, answer.error["message"]) == (400, "temperature must be non-negative")
        assert len(small.requests) + len(large.requests) == 1
