"""Decode's slots for long prompts: taken when their turn in prefill is near, whatever becomes of them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from typing import Any, TypeAlias

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.pd import greedy, new_room, with_room
from support.pipeline import SHAPE
from support.reference import greedy_reference, random_prompt

pytestmark = pytest.mark.integration

Pair: TypeAlias = tuple[Engine, Engine]

HANDSHAKE = ("--transfer-backend", "handshake")
CHUNK = ("--chunked-prefill-size", "64")
CACHING = ("--disaggregation-decode-enable-radix-cache",)
# A prompt is called when nothing is left before it.
PREFILL = EngineSpec(Role.LONG, arguments=CHUNK, worker_options=(*HANDSHAKE, "--set", "transfer.late_slots_tokens=1"))
LATE = ("--set", "transfer.late_slots_tokens=200")
DECODE = EngineSpec(Role.DECODE, arguments=CACHING, worker_options=(*HANDSHAKE, *LATE))
STAGES_PREFILL = EngineSpec(
    Role.LONG, SHAPE, arguments=("--pp-size", "2", *CHUNK), worker_options=PREFILL.worker_options
)
DECODE_TP2 = EngineSpec(Role.DECODE, SHAPE, arguments=("--tp", "2"), worker_options=DECODE.worker_options)
PROMPT_TOKENS = 2000  # 32 chunks
COUNT = 8
NEW_TOKENS = 4
END_LIMIT_S = 30.0  # on a busy machine; SGLang's own limits are 300 s
LOSS_LIMIT_S = 40.0  # a lease of 10 s


@pytest.fixture(
    params=[(PREFILL, DECODE), pytest.param((STAGES_PREFILL, DECODE_TP2), marks=pytest.mark.full, id="stages, tp 2")]
)
def pair(request: pytest.FixtureRequest) -> Pair:
    prefill, decode = FLEET.get(*request.param)
    return prefill, decode


class Queue:
    """Long prompts that were sent at the same time. When it is made, they wait for their turn."""

    def __init__(self, pair: Pair, threads: ThreadPoolExecutor) -> None:
        self.pair = pair
        self.shape = pair[0].spec.shape
        self.prompts = [random_prompt(PROMPT_TOKENS, new_room(), self.shape) for _ in range(COUNT)]
        self.bodies = [
            with_room(
                {
                    "rid": f"late-{new_room()}",
                    "input_ids": prompt,
                    "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
                },
                pair[0],
            )
            for prompt in self.prompts
        ]
        self.legs: list[list[Future[Any]]] = []
        with pair[0].frozen_scheduler():  # or the first are through before the last are there, on a busy machine
            for body in self.bodies:
                self.legs.append([threads.submit(_post, engine, body) for engine in pair])
            pair[1].wait_for_load(lambda load: load["disaggregation"]["decode_prealloc_queue_reqs"] >= COUNT, 60)
        # Prefill has been invited to all of them when it has come to the second.
        pair[1].wait_for_load(lambda load: load["disaggregation"]["decode_prealloc_queue_reqs"] <= COUNT - 2, 60)

    def waiting(self) -> int:
        """How many have no slots at decode."""
        return int(self.pair[1].load()["disaggregation"]["decode_prealloc_queue_reqs"])

    def check_answers(self, indices: Sequence[int]) -> None:
        for index in indices:
            reply = self.legs[index][1].result(120)
            assert reply is not None
            assert reply.status == 200, reply.body
            assert reply.body["output_ids"] == greedy_reference(self.prompts[index], NEW_TOKENS, self.shape), index


def _post(engine: Engine, body: dict[str, Any]) -> Any:
    try:
        return engine.post("/generate", body)
    except (OSError, HTTPException):
        return None  # the engine was killed


@pytest.fixture
def threads(pair: Pair) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * COUNT) as executor:
        yield executor
    for engine in pair:
        if engine.is_alive:
            engine.wait_idle()


def test_prompts_that_queue_hold_no_room_at_decode(pair: Pair, threads: ThreadPoolExecutor) -> None:
    queue = Queue(pair, threads)
    load = pair[1].load()
    while (waiting := load["disaggregation"]["decode_prealloc_queue_reqs"]) >= COUNT - 5:
        assert load["num_used_tokens"] <= (COUNT - waiting) * (PROMPT_TOKENS + NEW_TOKENS + 1)
        load = pair[1].load()
    queue.check_answers(range(COUNT))


def test_what_decode_has_cached_is_found_when_its_slots_are_taken() -> None:
    prefill, decode = FLEET.get(PREFILL, DECODE)
    prompt = random_prompt(600, seed=new_room())
    for _ in range(2):
        assert greedy(prefill, decode, prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS)
    longer = [*prompt, *random_prompt(600, seed=new_room())]
    assert greedy(prefill, decode, longer, NEW_TOKENS) == greedy_reference(longer, NEW_TOKENS)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_while_it_waits(pair: Pair, threads: ThreadPoolExecutor, side: str) -> None:
    queue = Queue(pair, threads)
    engine = pair[("prefill", "decode").index(side)]
    assert queue.waiting() >= 2
    assert engine.post("/abort_request", {"rid": queue.bodies[-1]["rid"]}).status == 200
    for leg in queue.legs[-1]:
        leg.result(END_LIMIT_S)
    queue.check_answers(range(COUNT - 1))


@pytest.mark.full
@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_the_other_side_is_lost_while_they_wait(lost: str) -> None:
    specs = [
        replace(spec, name="lost") if side == lost else spec
        for side, spec in (("prefill", PREFILL), ("decode", DECODE))
    ]
    prefill, decode = FLEET.get(*specs)
    with ThreadPoolExecutor(2 * COUNT) as threads:
        queue = Queue((prefill, decode), threads)
        assert queue.waiting() >= 2
        victim, other = (prefill, decode) if lost == "prefill" else (decode, prefill)
        victim.kill()
        other.wait_idle(LOSS_LIMIT_S)
    pair = FLEET.get(PREFILL, DECODE)
    prompt = random_prompt(300, seed=new_room())
    assert greedy(pair[0], pair[1], prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS)
