"""Requests that wait for a batch, run in chunks or are parked can be ended in every way, and leave nothing behind."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import inf
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec, Reply
from support.laps import DECODE, LONG_TOKENS, NEW_TOKENS, SHAPE, Pair, Prefill
from support.laps_checks import Counters, clean_pair, is_aborted, were_aborted
from support.pd import with_room
from support.reference import random_prompt

pytestmark = pytest.mark.integration

FILLER_TOKENS = 1800
SHORT_TOKENS = 24
ROOM_TOKENS = 6  # fit in a batch of 32 tokens besides
# A held short leaves after this, or before its own deadline.
WINDOW_S = 10.0
NO_HURRY_MS = 60_000
# A front end looks for its clients once a second, and gives a stream two seconds more.
NOTICE_S, STREAM_NOTICE_S = 2.2, 3.5
WAITING_TIMEOUT_S = 6
RUNNING_TIMEOUT_S = 8
ABORT_LIMIT_S = 3.0
# An option stands among the engine's own arguments, as a cluster file has them.
PREFILL = EngineSpec(
    Role.BOTH,
    shape=SHAPE,
    arguments=("--chunked-prefill-size", "32", "--laps-boundary-tokens", "64"),
    worker_options=(
        *("--set", "laps.min_chunk_tokens=16"),
        *("--set", f"laps.w_min_ms={WINDOW_S * 1e3}", "--set", f"laps.w_max_ms={WINDOW_S * 1e3 + 500}"),
        *("--set", f"laps.t_max_ms={WINDOW_S * 1e3 + 1000}"),
    ),
    environment=(
        ("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "1"),
        ("SGLANG_REQ_WAITING_TIMEOUT", str(WAITING_TIMEOUT_S)),
        ("SGLANG_REQ_RUNNING_TIMEOUT", str(RUNNING_TIMEOUT_S)),
    ),
)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as executor:
        yield executor


@pytest.fixture
def pair(threads: ThreadPoolExecutor) -> Iterator[Pair]:
    prefill, decode = FLEET.get(PREFILL, DECODE)
    yield from clean_pair(Pair(prefill, decode, threads))


class Connection:
    """A request of which the prefill leg is a bare socket that can be closed; the decode leg waits for its KV."""

    def __init__(self, pair: Pair, threads: ThreadPoolExecutor, length_tokens: int, seed: int, *, stream: bool) -> None:
        body = with_room(
            {
                "input_ids": random_prompt(length_tokens, seed=length_tokens + seed),
                "stream": stream,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": NEW_TOKENS,
                    "ignore_eos": True,
                    "custom_params": {"sglang_ext_priority": "low", "sglang_ext_ttft_slo_ms": NO_HURRY_MS},
                },
            },
            pair.prefill,
        )
        self.decode: Future[Reply] = threads.submit(pair.decode.post, "/generate", {**body, "stream": False})
        self._socket = socket.create_connection(("127.0.0.1", pair.prefill.port))
        data = json.dumps(body).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        self._socket.sendall(head.encode() + b"\r\n\r\n" + data)

    def close(self) -> None:
        self._socket.close()


def is_seen(pair: Pair, victim: Connection, stage: Callable[[dict[str, Any]], bool]) -> bool:
    """Return whether the queues are in this stage before the victim is answered."""
    while not victim.decode.done():
        if stage(pair.status()):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("stage", "stream"),
    [("waiting", False), ("chunking", False), ("parked", False), ("parked", True)],
    ids=["waiting", "chunking", "parked", "parked stream"],
)
def test_client_that_goes_away(pair: Pair, threads: ThreadPoolExecutor, stage: str, stream: bool) -> None:
    ended_at: list[float] = []
    for attempt in range(10):  # on a busy machine a stage may be over before it is seen
        before = Counters.of(pair.prefill)
        length_tokens = SHORT_TOKENS if stage == "waiting" else LONG_TOKENS
        victim = Connection(pair, threads, length_tokens, 1000 * attempt, stream=stream)
        others: list[Prefill] = []
        sent_at = 0.0
        ended_at.clear()
        if stage == "waiting":
            is_there = is_seen(pair, victim, lambda status: status["short"]["requests"] == 1)
        else:
            is_there = is_seen(pair, victim, lambda status: 0 < status["long"]["tokens"] < LONG_TOKENS)
        if stage == "parked" and is_there:
            sent_at = time.monotonic()
            others.append(pair.send(FILLER_TOKENS, seed=1 + attempt, priority="real-time"))
            others[0].replies.add_done_callback(lambda _: ended_at.append(time.monotonic()))
            is_there = is_seen(pair, victim, lambda status: status["parked"] == 1)
        if is_there:
            break
        victim.close()
        assert all(other.is_exact() for other in others)
    else:
        raise AssertionError(f"never {stage}")
    with pair.prefill.frozen_scheduler():
        # However fast the machine is: the stage lasts until the front end has noticed.
        victim.close()
        time.sleep(STREAM_NOTICE_S if stream else NOTICE_S)
    resumed_at = time.monotonic()
    assert is_aborted(victim.decode.result(timeout=10))
    assert time.monotonic() - resumed_at < ABORT_LIMIT_S
    for other in others:
        if any(is_aborted(reply) for reply in other.replies.result(timeout=60)):
            # While the scheduler stood still, and on a machine that is busy otherwise, its waiting timeout ran.
            while not ended_at:
                time.sleep(0.001)
            assert ended_at[0] - sent_at > WAITING_TIMEOUT_S - 1
        else:
            assert other.is_exact()
    if stage == "waiting":
        assert Counters.of(pair.prefill).since(before)("batch_requests_count") == 0


def test_abort_while_waiting_for_a_batch(pair: Pair) -> None:
    victim = pair.send(SHORT_TOKENS, seed=10, rid="held", slo_ms=NO_HURRY_MS)
    pair.wait_for(lambda status: status["short"]["requests"] == 1)
    pair.abort("held")
    aborted_at = time.monotonic()
    assert were_aborted(victim)
    assert time.monotonic() - aborted_at < ABORT_LIMIT_S


def test_a_batch_fills_until_a_deadline_is_near(pair: Pair) -> None:
    assert pair.send(SHORT_TOKENS, seed=20).is_exact()
    for attempt in range(5):
        before = Counters.of(pair.prefill)
        shorts = []
        for number in range(4):
            # All of them fit into the 32 tokens that this engine computes at once.
            shorts.append(pair.send(6 + number, seed=100 * attempt + 21 + number, slo_ms=4000))
            time.sleep(0.02)
        assert all(short.is_exact() for short in shorts)
        change = Counters.of(pair.prefill).since(before)
        waited_s = change("dispatch_wait_seconds_sum", length_class="short") / 4
        # An instance that has become slow meanwhile has less time for it, and the deadline is near sooner; one that
        # stood still when the time had come was late.
        if change("batch_requests_count") == 1 and waited_s < 4.0:
            break
    assert (change("batch_requests_count"), change("batch_requests_sum")) == (1, 4)
    assert change("dispatches_total", length_class="short", reason="slack") == 1
    assert change("dispatch_wait_seconds_count", length_class="short") == 4
    # Of 4 s; the prefill itself and the margins take the rest.
    assert 1.3 < waited_s < 4.0


def test_waiting_timeout_ends_a_held_request_and_no_other(pair: Pair) -> None:
    sent_at = time.monotonic()
    victim = pair.send(SHORT_TOKENS, seed=30, slo_ms=NO_HURRY_MS)
    pair.wait_for(lambda status: status["short"]["requests"] == 1)
    time.sleep(2)
    # There is room for both in a batch, and it has time: how long a batch takes is known badly where earlier ones were
    # frozen in the middle.
    other = pair.send(ROOM_TOKENS, seed=31, slo_ms=NO_HURRY_MS)
    prefill_reply, decode_reply = victim.replies.result(timeout=20)
    assert time.monotonic() - sent_at > WAITING_TIMEOUT_S - 1
    assert prefill_reply.status == 503
    assert "waiting timeout" in str(prefill_reply.body)
    assert is_aborted(decode_reply)
    # Before its own time is up it leaves with one that cannot wait.
    assert pair.send(SHORT_TOKENS, seed=32, slo_ms=1).is_exact()
    assert other.is_exact()


@pytest.mark.full
def test_running_timeout_ends_a_parked_request_and_no_other(pair: Pair) -> None:
    """More urgent long prefills, one after the other, leave it no turn."""
    victim = pair.send(LONG_TOKENS, seed=40, priority="low")
    pair.wait_for(lambda status: 0 < status["long"]["tokens"] < LONG_TOKENS)
    started_at = time.monotonic()
    urgent: list[Prefill] = []
    took_s: dict[int, float] = {}

    def send_urgent() -> None:
        number, sent_at = len(urgent), time.monotonic()
        urgent.append(pair.send(FILLER_TOKENS, seed=41 + number, priority="real-time"))
        urgent[-1].replies.add_done_callback(lambda _: took_s.setdefault(number, time.monotonic() - sent_at))

    send_urgent()
    pair.wait_for(lambda status: status["parked"] == 1)
    while not victim.replies.done():
        assert time.monotonic() - started_at < 3 * RUNNING_TIMEOUT_S
        # Several ahead: one is computed within a fraction of the time that a client takes to send the next.
        if pair.status()["long"]["requests"] < 6:
            send_urgent()
        time.sleep(0.02)
    assert time.monotonic() - started_at > RUNNING_TIMEOUT_S - 1
    assert were_aborted(victim)
    wait([request.replies for request in urgent], timeout=120)
    # On a machine that is busy with other programs one of them may reach a timeout, too.
    limit_s = min(WAITING_TIMEOUT_S, RUNNING_TIMEOUT_S) - 1
    in_time = [request for number, request in enumerate(urgent) if took_s.get(number, inf) < limit_s]
    assert all(request.is_exact() for request in in_time)
