"""Aborts and crashes at each stage of a handshake leave neither a request nor a KV slot behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec, free_port
from support.pd import greedy, new_room, with_room
from support.reference import greedy_reference, random_prompt

pytestmark = pytest.mark.integration

HANDSHAKE = ("--transfer-backend", "handshake")
PREFILL = EngineSpec(Role.SHORT, worker_options=HANDSHAKE, name="handshake")
DECODE = EngineSpec(Role.DECODE, worker_options=HANDSHAKE, name="handshake")
PROMPT_TOKENS = 120
ABORT_LIMIT_S = 2.0
INVITED_LIMIT_S = 5.0  # with looking up the prefill instance for the first time
# A silent peer is given up after a lease of 10 s; the health of a dead prefill instance tells after about 4 s.
LOSS_LIMIT_S = 20.0


class Leg:
    """One request to one engine, in a thread, with the time of its end, whatever that is."""

    def __init__(self, threads: ThreadPoolExecutor, engine: Engine, body: dict[str, Any]) -> None:
        self.ended_at = float("inf")
        self._end: Future[None] = threads.submit(self._run, engine, body)

    def _run(self, engine: Engine, body: dict[str, Any]) -> None:
        try:
            engine.post("/generate", body)
        except (OSError, HTTPException):
            pass  # the engine was killed
        self.ended_at = time.monotonic()

    def ended_within(self, limit_s: float, since: float) -> bool:
        self._end.result(timeout=limit_s + 5)
        return self.ended_at - since < limit_s


@pytest.fixture
def pair() -> tuple[Engine, Engine]:
    prefill, decode = FLEET.get(PREFILL, DECODE)
    return prefill, decode


@pytest.fixture
def threads(pair: tuple[Engine, Engine]) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor
        for engine in pair:
            if engine.is_alive:
                engine.post("/abort_request", {"rid": "", "abort_all": True})
    for engine in pair:
        if engine.is_alive:
            engine.wait_idle()


def request_body(prefill: Engine, rid: str) -> dict[str, Any]:
    return with_room(
        {
            "rid": rid,
            "input_ids": random_prompt(PROMPT_TOKENS, seed=new_room()),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
        },
        prefill,
    )


def abort(engine: Engine, rid: str) -> float:
    """The moment of the abort."""
    now = time.monotonic()
    assert engine.post("/abort_request", {"rid": rid}).status == 200
    return now


def queued(queue: str) -> Callable[[dict[str, Any]], bool]:
    return lambda load: load["disaggregation"][f"{queue}_queue_reqs"] == 1


def check_that_it_serves(prefill: Engine, decode: Engine) -> None:
    prompt = random_prompt(40, seed=new_room())
    assert greedy(prefill, decode, prompt, 8) == greedy_reference(prompt, 8)


def test_prefill_aborted_before_decode_has_the_request(
    pair: tuple[Engine, Engine], threads: ThreadPoolExecutor
) -> None:
    prefill, decode = pair
    body = request_body(prefill, "early-abort")
    prefill_leg = Leg(threads, prefill, body)
    prefill.wait_for_load(queued("prefill_bootstrap"), 5)
    aborted_at = abort(prefill, "early-abort")
    assert prefill_leg.ended_within(ABORT_LIMIT_S, aborted_at)
    # Its invitation comes too late, and is answered.
    started_at = time.monotonic()
    assert Leg(threads, decode, body).ended_within(INVITED_LIMIT_S, started_at)
    assert decode.wait_idle() < ABORT_LIMIT_S


def test_decode_aborted_while_it_waits_for_an_unknown_prefill(
    pair: tuple[Engine, Engine], threads: ThreadPoolExecutor
) -> None:
    prefill, decode = pair
    leg = Leg(threads, decode, {**request_body(prefill, "no-prefill"), "bootstrap_port": free_port()})
    decode.wait_for_load(queued("decode_prealloc"), 5)
    assert leg.ended_within(ABORT_LIMIT_S, abort(decode, "no-prefill"))
    assert decode.wait_idle() < ABORT_LIMIT_S


def test_decode_aborted_before_prefill_has_the_request(
    pair: tuple[Engine, Engine], threads: ThreadPoolExecutor
) -> None:
    prefill, decode = pair
    body = request_body(prefill, "lonely-decode")
    leg = Leg(threads, decode, body)
    decode.wait_for_load(queued("decode_transfer"), 5)
    assert leg.ended_within(ABORT_LIMIT_S, abort(decode, "lonely-decode"))
    assert decode.wait_idle() < ABORT_LIMIT_S
    # The invitation has been withdrawn: a prefill leg that comes now does not wait for another.
    started_at = time.monotonic()
    assert Leg(threads, prefill, body).ended_within(INVITED_LIMIT_S, started_at)


@pytest.mark.parametrize("aborting", [0, 1], ids=["prefill", "decode"])
def test_one_leg_aborted_in_the_middle_ends_both(
    pair: tuple[Engine, Engine], threads: ThreadPoolExecutor, aborting: int
) -> None:
    prefill, decode = pair
    rid = f"middle-{aborting}"
    body = request_body(prefill, rid)
    with prefill.frozen_scheduler():
        legs = [Leg(threads, engine, body) for engine in pair]
        decode.wait_for_load(queued("decode_transfer"), 5)
        # The abort waits in the frozen scheduler's mailbox, behind the request; one that comes before the front
        # end knows the request is lost, and nothing shows from outside that it does.
        for _ in range(8 if aborting == 0 else 1):
            aborted_at = abort(pair[aborting], rid)
            time.sleep(0.25)
        if aborting == 1:
            # No write to its slots is under way, and decode knows that without a message from prefill.
            assert decode.wait_idle() < ABORT_LIMIT_S
    resumed_at = time.monotonic()
    assert all(leg.ended_within(ABORT_LIMIT_S, max(aborted_at, resumed_at)) for leg in legs)
    for engine in pair:
        assert engine.wait_idle() < ABORT_LIMIT_S
    check_that_it_serves(*pair)


def test_decode_aborted_while_it_decodes(pair: tuple[Engine, Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    body = request_body(prefill, "decoding")
    legs = [Leg(threads, engine, body) for engine in pair]
    decode.wait_for_load(lambda load: load["num_running_reqs"] == 1, 10)
    aborted_at = abort(decode, "decoding")
    assert all(leg.ended_within(ABORT_LIMIT_S, aborted_at) for leg in legs)
    assert decode.wait_idle() < ABORT_LIMIT_S


@pytest.mark.full
def test_prefill_killed_while_decode_waits_for_its_kv(pair: tuple[Engine, Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    body = request_body(prefill, "killed-prefill")
    with prefill.frozen_scheduler():
        legs = [Leg(threads, engine, body) for engine in pair]
        decode.wait_for_load(queued("decode_transfer"), 5)
        killed_at = time.monotonic()
        prefill.kill()
    assert all(leg.ended_within(LOSS_LIMIT_S, killed_at) for leg in legs)
    assert decode.wait_idle() < ABORT_LIMIT_S
    check_that_it_serves(*FLEET.get(PREFILL, DECODE))


@pytest.mark.full
def test_decode_killed_before_it_gets_kv(pair: tuple[Engine, Engine], threads: ThreadPoolExecutor) -> None:
    prefill, decode = pair
    check_that_it_serves(*pair)  # an invitation to a frozen process needs a connection that is there
    body = request_body(prefill, "killed-decode")
    with prefill.frozen_scheduler():
        legs = [Leg(threads, engine, body) for engine in pair]
        decode.wait_for_load(queued("decode_transfer"), 5)
        killed_at = time.monotonic()
        decode.kill()
    assert all(leg.ended_within(LOSS_LIMIT_S, killed_at) for leg in legs)
    assert prefill.wait_idle() < ABORT_LIMIT_S
    check_that_it_serves(*FLEET.get(PREFILL, DECODE))
