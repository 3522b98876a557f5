"""Two tensor-parallel ranks carry the same decisions out: tokens stay right through parks, aborts and windows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import DECODE, LONG_TOKENS, SHAPE, Pair
from support.laps_checks import Counters, clean_pair, were_aborted

pytestmark = pytest.mark.integration

BATCH_TOKENS = 32
TWO_RANKS = EngineSpec(
    Role.BOTH,
    shape=SHAPE,
    arguments=("--tp", "2", "--chunked-prefill-size", str(BATCH_TOKENS)),
    worker_options=(
        *("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16"),
        # A window lasts until a batch is full, however slowly its requests come, or until a deadline is near.
        *("--set", "laps.w_min_ms=20000", "--set", "laps.w_max_ms=20000", "--set", "laps.t_max_ms=30000"),
    ),
)
SHORT_TOKENS = 24
PARKED_TOKENS = LONG_TOKENS // 2  # 75 chunks, each of which both ranks compute
NO_HURRY_MS = 60_000
PRIORITIES = ("low", "normal", "high", "real-time")


@pytest.fixture
def pair() -> Iterator[Pair]:
    prefill, decode = FLEET.get(TWO_RANKS, DECODE)
    with ThreadPoolExecutor(20) as threads:
        yield from clean_pair(Pair(prefill, decode, threads))


def test_greedy_tokens_with_several_parked_and_shorts_between(pair: Pair) -> None:
    assert pair.prefill.get("/server_info").body["tp_size"] == 2
    parks_before = pair.status()["parks"]
    longs = []
    for number, priority in enumerate(PRIORITIES):
        longs.append(pair.send(PARKED_TOKENS + number, seed=1000 + number, priority=priority))
        pair.wait_for_running(parked=number)
    shorts = [pair.send(SHORT_TOKENS + number, seed=1010 + number) for number in range(5)]
    assert all(request.is_exact() for request in (*shorts, *longs))
    assert pair.status()["parks"] - parks_before >= len(PRIORITIES) - 1


def test_abort_while_parked(pair: Pair) -> None:
    victim = pair.send(LONG_TOKENS, seed=1020, rid="parked-on-two-ranks", priority="low")
    pair.wait_for(lambda status: status["long"]["requests"] == 1)
    other = pair.send(LONG_TOKENS, seed=1021, priority="real-time")
    pair.wait_for(lambda status: status["parked"] == 1)
    pair.abort("parked-on-two-ranks")
    assert were_aborted(victim)
    assert other.is_exact()


@pytest.mark.full
def test_modes_switch_under_load(pair: Pair) -> None:
    generation = pair.status()["generation"]
    requests = []
    for number, mode in enumerate(("short", "long", "both")):
        requests.append(pair.send(400 + number, seed=1030 + number))
        requests += [pair.send(SHORT_TOKENS + n, seed=1040 + 10 * number + n) for n in range(2)]
        reply = pair.prefill.post("/laps/mode", {"mode": mode})
        assert (reply.status, reply.body["mode"], reply.body["generation"]) == (200, mode, generation + number + 1)
    assert all(request.is_exact() for request in requests)


def test_a_window_fills_one_batch(pair: Pair) -> None:
    """Both ranks hold while the first decides to wait, and run what it then decides on."""
    assert pair.send(SHORT_TOKENS, seed=1049).is_exact()
    before = Counters.of(pair.prefill)
    shorts = []
    for number in range(4):
        shorts.append(pair.send(BATCH_TOKENS // 4, seed=1050 + number, slo_ms=NO_HURRY_MS))
        time.sleep(0.02)
    assert all(short.is_exact() for short in shorts)
    change = Counters.of(pair.prefill).since(before)
    assert change("batch_requests_sum") == 4
    assert change("batch_requests_count") == 1
