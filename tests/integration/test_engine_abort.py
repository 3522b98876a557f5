"""An abort frees the request and its KV slots in whatever stage it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec, Reply, free_port
from support.pd import new_room, with_room
from support.reference import random_prompt

pytestmark = pytest.mark.integration

PROMPT_TOKENS = 120
# From abort to answer and idle queues; one chunk of prefill may be in the way.
ABORT_LIMIT_S = 2.0
# Decode holds KV that a silent prefill may still write to for 5 s.
SILENT_PREFILL_LIMIT_S = 8.0


class Leg:
    """One request to one engine, in a thread, with the time of its answer."""

    def __init__(self, threads: ThreadPoolExecutor, engine: Engine, body: dict[str, object]) -> None:
        self.engine = engine
        self.ended_at = float("inf")
        self._reply: Future[Reply] = threads.submit(self._run, body)

    def _run(self, body: dict[str, object]) -> Reply:
        reply = self.engine.post("/generate", body)
        self.ended_at = time.monotonic()
        return reply

    def ended_within(self, limit_s: float, since: float) -> bool:
        self._reply.result(timeout=limit_s + 5)
        return self.ended_at - since < limit_s


@pytest.fixture(scope="module")
def pair() -> list[Engine]:
    return FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))


@pytest.fixture
def threads(pair: list[Engine]) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor
        # A failed test must not leave requests to the next one.
        for engine in pair:
            engine.post("/abort_request", {"rid": "", "abort_all": True})
    for engine in pair:
        engine.wait_idle()


def request_body(prefill: Engine, rid: str, *, new_tokens: int = 1500) -> dict[str, object]:
    return with_room(
        {
            "rid": rid,
            "input_ids": random_prompt(PROMPT_TOKENS, seed=new_room()),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        },
        prefill,
    )


def abort(engine: Engine, rid: str) -> float:
    """The moment of the abort."""
    now = time.monotonic()
    assert engine.post("/abort_request", {"rid": rid}).status == 200
    return now


def test_prefill_that_waits_for_decode(pair: list[Engine], threads: ThreadPoolExecutor) -> None:
    prefill, _ = pair
    leg = Leg(threads, prefill, request_body(prefill, "lonely-prefill"))
    prefill.wait_for_load(lambda load: load["disaggregation"]["prefill_bootstrap_queue_reqs"] == 1, 5)
    aborted_at = abort(prefill, "lonely-prefill")
    assert leg.ended_within(ABORT_LIMIT_S, aborted_at)
    assert prefill.wait_idle() < ABORT_LIMIT_S


def test_decode_that_waits_for_an_unknown_prefill(pair: list[Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    body = {**request_body(prefill, "no-prefill"), "bootstrap_port": free_port()}
    leg = Leg(threads, decode, body)
    decode.wait_for_load(lambda load: load["disaggregation"]["decode_prealloc_queue_reqs"] == 1, 5)
    aborted_at = abort(decode, "no-prefill")
    assert leg.ended_within(ABORT_LIMIT_S, aborted_at)
    assert decode.wait_idle() < ABORT_LIMIT_S


def test_decode_that_holds_kv_for_a_prefill_to_come(pair: list[Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    leg = Leg(threads, decode, request_body(prefill, "lonely-decode"))
    decode.wait_for_load(
        lambda load: (
            load["disaggregation"]["decode_transfer_queue_reqs"] == 1 and load["num_used_tokens"] >= PROMPT_TOKENS
        ),
        5,
    )
    aborted_at = abort(decode, "lonely-decode")
    assert leg.ended_within(ABORT_LIMIT_S, aborted_at)
    assert decode.wait_idle() < ABORT_LIMIT_S


@pytest.mark.parametrize("also_prefill", [True, False], ids=["both legs", "decode leg"])
def test_decoding(pair: list[Engine], threads: ThreadPoolExecutor, also_prefill: bool) -> None:
    prefill, decode = pair
    body = request_body(prefill, "decoding")
    legs = [Leg(threads, engine, body) for engine in pair]
    decode.wait_for_load(lambda load: load["num_running_reqs"] == 1, 10)
    if also_prefill:
        abort(prefill, "decoding")
    aborted_at = abort(decode, "decoding")
    assert all(leg.ended_within(ABORT_LIMIT_S, aborted_at) for leg in legs)
    assert decode.wait_idle() < ABORT_LIMIT_S


def test_abort_of_the_prefill_leg_alone_ends_decode(pair: list[Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    body = request_body(prefill, "prefill-only")
    with prefill.frozen_scheduler():
        legs = [Leg(threads, engine, body) for engine in pair]
        decode.wait_for_load(lambda load: load["disaggregation"]["decode_transfer_queue_reqs"] == 1, 5)
        # The abort waits in the frozen scheduler's mailbox, behind the request; one that comes before the front
        # end knows the request is lost, and nothing shows from outside that it does.
        for _ in range(8):
            aborted_at = abort(prefill, "prefill-only")
            time.sleep(0.25)
    assert all(leg.ended_within(ABORT_LIMIT_S, aborted_at) for leg in legs)
    assert decode.wait_idle() < ABORT_LIMIT_S


def test_decode_that_comes_after_the_abort_of_its_prefill_ends(pair: list[Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    body = request_body(prefill, "prefill-before-decode")
    prefill_leg = Leg(threads, prefill, body)
    prefill.wait_for_load(lambda load: load["disaggregation"]["prefill_bootstrap_queue_reqs"] == 1, 5)
    assert prefill_leg.ended_within(ABORT_LIMIT_S, abort(prefill, "prefill-before-decode"))
    sent_at = time.monotonic()
    decode_leg = Leg(threads, decode, body)
    assert decode_leg.ended_within(ABORT_LIMIT_S, sent_at)
    assert decode.wait_idle() < ABORT_LIMIT_S


def test_prefill_that_hangs_during_the_transfer(pair: list[Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    body = request_body(prefill, "hanging")
    with prefill.frozen_scheduler():
        legs = [Leg(threads, engine, body) for engine in pair]
        decode.wait_for_load(lambda load: load["disaggregation"]["decode_transfer_queue_reqs"] == 1, 5)
        aborted_at = abort(decode, "hanging")
        assert decode.wait_idle(SILENT_PREFILL_LIMIT_S) < SILENT_PREFILL_LIMIT_S
    assert legs[1].ended_within(SILENT_PREFILL_LIMIT_S, aborted_at)
    abort(prefill, "hanging")
    prefill.wait_idle()


def test_samples_and_batches_are_aborted_by_their_prefix(pair: list[Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    body = request_body(prefill, "family")
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True, "n": 3}
    legs = [Leg(threads, engine, body) for engine in pair]
    decode.wait_for_load(lambda load: load["num_running_reqs"] == 3, 10)
    aborted_at = abort(decode, "family")
    assert all(leg.ended_within(ABORT_LIMIT_S, aborted_at) for leg in legs)
    assert decode.wait_idle() < ABORT_LIMIT_S
