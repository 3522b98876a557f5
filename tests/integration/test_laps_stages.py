"""LAPS over two pipeline stages: one decision, carried out by both, with several rounds under way.

Tokens stay right through parks, aborts and mode switches, and nothing is left behind on either stage: SGLang checks the
pools of each when it is idle, and a stage that kept a request would make no batch that the other makes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.engines import FLEET, EngineError, EngineSpec
from support.laps import LONG_TOKENS, Pair, Prefill
from support.laps_checks import clean_pair, were_aborted
from support.pipeline import (
    DECODE,
    DECODE_TP3,
    HANDSHAKE_DECODE,
    HANDSHAKE_DECODE_TP3,
    HANDSHAKE_STAGES,
    HANDSHAKE_STAGES_TP3,
    LENGTHS_TOKENS,
    SHAPE,
    STAGES,
    STAGES_TP3,
    TIMED_STAGES,
)

pytestmark = pytest.mark.integration

SHORT_TOKENS = 24
PARKED_TOKENS = LONG_TOKENS // 2  # 75 chunks, each of which both stages compute
ATTEMPTS = 8  # a machine that stalls may have computed all before the next prompt is sent
PRIORITIES = ("low", "normal", "high", "real-time")
ABORT_LIMIT_S = 20.0


def checked_pair(prefill_spec: EngineSpec, decode_spec: EngineSpec) -> Iterator[Pair]:
    """A pair that must be left as it was found."""
    prefill, decode = FLEET.get(prefill_spec, decode_spec)
    with ThreadPoolExecutor(20) as threads:
        yield from clean_pair(Pair(prefill, decode, threads, SHAPE))


@pytest.fixture(
    params=[
        pytest.param((STAGES, DECODE), id="decode-tp1", marks=pytest.mark.full),
        pytest.param((STAGES, DECODE_TP3), id="decode-tp3", marks=pytest.mark.full),
        pytest.param((STAGES_TP3, DECODE), id="stages-of-tp3", marks=pytest.mark.full),
        pytest.param((HANDSHAKE_STAGES, HANDSHAKE_DECODE), id="handshake"),
        pytest.param((HANDSHAKE_STAGES, HANDSHAKE_DECODE_TP3), id="handshake-decode-tp3", marks=pytest.mark.full),
        pytest.param((HANDSHAKE_STAGES_TP3, HANDSHAKE_DECODE), id="handshake-stages-of-tp3", marks=pytest.mark.full),
    ]
)
def any_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from checked_pair(*request.param)


@pytest.fixture(
    params=[
        pytest.param((STAGES, DECODE), id="tcp", marks=pytest.mark.full),
        pytest.param((HANDSHAKE_STAGES, HANDSHAKE_DECODE), id="handshake"),
    ]
)
def by_any_transfer(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from checked_pair(*request.param)


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield from checked_pair(STAGES, DECODE)


@pytest.fixture
def timed_pair() -> Iterator[Pair]:
    yield from checked_pair(TIMED_STAGES, DECODE)


@pytest.mark.full
def test_prompts_of_every_length(any_pair: Pair) -> None:
    assert any_pair.prefill.get("/server_info").body["pp_size"] == 2
    for length in LENGTHS_TOKENS:
        assert any_pair.send(length, seed=length).is_exact(), length


def test_greedy_tokens_with_several_parked_and_shorts_between(any_pair: Pair) -> None:
    for attempt in range(ATTEMPTS):
        parks_before = any_pair.status()["parks"]
        longs: list[Prefill] = []
        for number, priority in enumerate(PRIORITIES):
            longs.append(any_pair.send(PARKED_TOKENS + number, seed=1000 + 20 * attempt + number, priority=priority))
            if not any_pair.is_running(longs, parked=number):
                break
        shorts = [any_pair.send(SHORT_TOKENS + number, seed=1010 + 20 * attempt + number) for number in range(5)]
        assert all(request.is_exact() for request in (*shorts, *longs))
        if len(longs) == len(PRIORITIES) and any_pair.status()["parks"] - parks_before >= len(PRIORITIES) - 1:
            return
    raise AssertionError(f"several were never parked at once in {ATTEMPTS} attempts")


@pytest.mark.full
def test_four_at_once_that_share_a_prefix(by_any_transfer: Pair) -> None:
    prefix = by_any_transfer.send(700, seed=1020)
    assert prefix.is_exact()
    longs = [by_any_transfer.send(1500 + number, seed=1021 + number, prefix=prefix.prompt) for number in range(4)]
    shorts = [by_any_transfer.send(SHORT_TOKENS + number, seed=1030 + number) for number in range(4)]
    assert all(request.is_exact() for request in (*shorts, *longs))


@pytest.mark.parametrize("stage", ["chunking", "parked"])
def test_abort(by_any_transfer: Pair, stage: str) -> None:
    """Chunks of it are under way on both stages; what is left is not computed (SGLang's own loop would)."""
    pair = by_any_transfer
    before_tokens = pair.prefill.load()["total_prefill_uncached_tokens"]
    victim = pair.send(LONG_TOKENS, seed=1040, rid=f"in-stages-{stage}", priority="low")
    pair.wait_for(lambda status: 0 < status["long"]["tokens"] < LONG_TOKENS)
    others = []
    if stage == "parked":
        others.append(pair.send(LONG_TOKENS, seed=1041, priority="real-time"))
        pair.wait_for(lambda status: status["parked"] == 1)
    # Prefill alone: it tells decode, whose own abort would end the prefill as well.
    assert pair.prefill.post("/abort_request", {"rid": f"in-stages-{stage}"}).status == 200
    assert were_aborted(victim, ABORT_LIMIT_S)
    pair.wait_for(lambda status: status["long"]["requests"] <= len(others))
    assert all(other.is_exact() for other in others)
    pair.prefill.wait_idle()
    computed_tokens = pair.prefill.load()["total_prefill_uncached_tokens"] - before_tokens
    assert computed_tokens < (1 + len(others)) * LONG_TOKENS


@pytest.mark.full
def test_abort_of_everything_with_several_parked(by_any_transfer: Pair) -> None:
    longs = []
    for number, priority in enumerate(PRIORITIES[1:]):
        longs.append(by_any_transfer.send(LONG_TOKENS, seed=1050 + number, priority=priority))
        by_any_transfer.wait_for_running(parked=number)
    for engine in (by_any_transfer.prefill, by_any_transfer.decode):
        engine.post("/abort_request", {"rid": "", "abort_all": True})
    assert all(were_aborted(long, ABORT_LIMIT_S) for long in longs)
    assert by_any_transfer.send(LONG_TOKENS, seed=1060).is_exact()


@pytest.mark.full
def test_modes_switch_under_load(pair: Pair) -> None:
    generation = pair.status()["generation"]
    requests = []
    for number, mode in enumerate(("short", "long", "both")):
        requests.append(pair.send(700 + number, seed=1070 + number))
        requests += [pair.send(SHORT_TOKENS + n, seed=1080 + 10 * number + n) for n in range(2)]
        reply = pair.prefill.post("/laps/mode", {"mode": mode})
        assert (reply.status, reply.body["mode"], reply.body["generation"]) == (200, mode, generation + number + 1)
    assert all(request.is_exact() for request in requests)


@pytest.mark.full
def test_the_running_timeout_ends_a_prefill_on_both_stages(timed_pair: Pair) -> None:
    """By the clock of the first stage: the second is told."""
    pair = timed_pair
    victim = pair.send(LONG_TOKENS, seed=1090, priority="low", rid="times-out")
    pair.wait_for(lambda status: 0 < status["long"]["tokens"] < LONG_TOKENS)
    started_at, number = time.monotonic(), 0
    while not victim.replies.done():
        assert time.monotonic() - started_at < 120
        if pair.status()["long"]["requests"] < 6:
            pair.send(800, seed=1100 + number, priority="real-time")
            number += 1
        time.sleep(0.02)
    assert were_aborted(victim)


@pytest.mark.full
def test_prefills_for_a_decode_instance_that_has_died_end(pair: Pair) -> None:
    """The first stage notices what it cannot send, and both end the request in the same round."""
    (decode,) = FLEET.get(EngineSpec(DECODE.role, shape=SHAPE, name="dies"))
    with ThreadPoolExecutor(8) as threads:
        doomed = Pair(pair.prefill, decode, threads, SHAPE)
        longs = []
        for number, priority in enumerate(PRIORITIES[1:]):
            longs.append(doomed.send(LONG_TOKENS, seed=1500 + number, priority=priority))
            doomed.wait_for_running(parked=number)
        decode.kill()
        decode.stop()
        pair.wait_for(lambda status: status["long"]["requests"] == 0, timeout_s=60)
        for long in longs:
            with pytest.raises((OSError, EngineError)):
                long.replies.result(timeout=60)  # decode's leg
    assert pair.send(LONG_TOKENS, seed=1510).is_exact()
