"""What a client asks for besides its prompt: a long pool answers as one instance of stock SGLang does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.long_pool import Coordinator
from support.pd import send_both
from support.reference import random_prompt
from support.served_pool import HANDSHAKE, long_member

pytestmark = pytest.mark.integration
LONG = 900
TOLERANCE = 1e-3
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


class Served:
    """Two members of a pool, an instance of no pool, and a decode instance for all of them."""

    def __init__(self, coordinator: Coordinator, engines: list[Engine]) -> None:
        self.coordinator = coordinator
        *self.members, self.stock, self.decode = engines

    def streamed(self) -> int:
        count: int = self.coordinator.settled()["requests_streamed"]
        return count

    def answers(self, body: dict[str, Any], path: str = "/generate") -> tuple[Any, Any]:
        """Of the pool, and of the instance that is in none."""
        bodies = []
        for prefill in (self.members[0], self.stock):
            prefill_reply, reply = send_both(prefill, self.decode, body, path=path)
            assert (prefill_reply.status, reply.status) == (200, 200), (prefill_reply.body, reply.body)
            bodies.append(reply.body)
        return bodies[0], bodies[1]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as coordinator:
        specs = [long_member(coordinator, f"answers{number}", (), HANDSHAKE) for number in range(2)]
        stock = EngineSpec(Role.LONG, worker_options=HANDSHAKE, name="answers-alone")
        engines = FLEET.get(*specs, stock, EngineSpec(Role.DECODE, worker_options=HANDSHAKE))
        coordinator.wait_for(lambda status: len(status["members"]) == 2)
        yield Served(coordinator, engines)
        for engine in engines:
            engine.stop()


def body_of(seed: int, sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
    prompt = random_prompt(LONG, seed=seed)
    return {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 12, **sampling}, **more}


@pytest.mark.parametrize(
    ("seed", "sampling"),
    list(
        enumerate(
            [
                {"json_schema": SCHEMA, "max_new_tokens": 40},
                {"regex": "(yes|no)[0-9]{3}"},
                {"frequency_penalty": 1.5, "ignore_eos": True},
                {"presence_penalty": 2.0, "min_new_tokens": 12},
                {"repetition_penalty": 1.8, "ignore_eos": True},
                {"temperature": 0.7, "top_k": 1, "min_p": 0.1, "sampling_seed": 11, "ignore_eos": True},
                {"logit_bias": {"7": 3.0, "9": -100.0}, "ignore_eos": True},
            ],
            400,
        )
    ),
    ids=lambda one: "" if isinstance(one, int) else next(iter(one)),
)
def test_a_streamed_prompt_is_answered_as_by_one_instance(served: Served, seed: int, sampling: dict[str, Any]) -> None:
    before = served.streamed()
    mine, stock = served.answers(body_of(seed, sampling))
    assert served.streamed() == before + 1
    assert (mine["output_ids"], mine["text"]) == (stock["output_ids"], stock["text"])
    for name in ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"):
        assert mine["meta_info"][name] == stock["meta_info"][name], name
    if "json_schema" in sampling:
        # It may spend all its tokens on spaces between those that mean something.
        assert mine["text"].startswith("{")


@pytest.mark.parametrize("place", [0, 1, 5])
def test_stop_strings_and_tokens_end_it_where_they_do_elsewhere(served: Served, place: int) -> None:
    mine, stock = served.answers(body_of(401, {"ignore_eos": True}))
    assert mine["output_ids"] == stock["output_ids"]
    token = stock["output_ids"][place]
    for stop in ({"stop_token_ids": [token]}, {"stop": [stock["text"][: 3 + place]]}):
        mine, stock_stopped = served.answers(body_of(401, stop))
        assert mine["output_ids"] == stock_stopped["output_ids"]
        assert (mine["text"], mine["meta_info"]["finish_reason"]) == (
            stock_stopped["text"],
            stock_stopped["meta_info"]["finish_reason"],
        )
        assert len(mine["output_ids"]) <= len(stock["output_ids"])


def test_several_samples(served: Served) -> None:
    mine, stock = served.answers(body_of(402, {"n": 3, "ignore_eos": True}))
    assert [one["output_ids"] for one in mine] == [one["output_ids"] for one in stock]
    assert len(mine) == 3


@pytest.mark.parametrize("start", [-1, 0, 850])
def test_logprobs(served: Served, start: int) -> None:
    """They want more of the prompt than its KV, and are computed as without a pool."""
    before = served.streamed()
    wanted = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": start}
    mine, stock = served.answers(body_of(403 + max(0, start), {"ignore_eos": True}, **wanted))
    assert served.streamed() == before
    assert mine["output_ids"] == stock["output_ids"]
    for name in ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs"):
        assert_close(mine["meta_info"].get(name), stock["meta_info"].get(name))


def test_a_chat_with_a_schema(served: Served) -> None:
    words = " ".join(str(number) for number in range(400))
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 40,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": json.loads(SCHEMA)}},
    }
    before = served.streamed()
    mine, stock = served.answers(body, path="/v1/chat/completions")
    assert served.streamed() == before + 1
    assert mine["choices"] == stock["choices"]
    assert mine["usage"] == stock["usage"]


def assert_close(mine: Any, stock: Any) -> None:
    """Nested lists in which numbers that are not whole are about the same."""
    if isinstance(stock, list):
        assert len(mine) == len(stock)
        for one, other in zip(mine, stock, strict=True):
            assert_close(one, other)
    elif isinstance(stock, float):
        assert mine == pytest.approx(stock, abs=TOLERANCE)
    else:
        assert mine == stock
