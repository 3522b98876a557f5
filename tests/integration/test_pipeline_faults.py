"""A stage that is killed, or stopped while it computes, takes its instance with it; decode serves on with the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from support.engines import FLEET, Engine
from support.laps import LONG_TOKENS, Pair
from support.laps_checks import is_aborted
from support.pipeline import DECODE, SHAPE, STAGES
from support.stand_in_cluster import wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

# SGLang's watchdog ends an engine whose scheduler makes no progress with a batch: here the stage that waits for the
# stopped one.
VICTIM = replace(STAGES, arguments=(*STAGES.arguments, "--watchdog-timeout", "20"), name="victim")
ENDS_WITHIN_S = 120.0


@pytest.fixture
def victim() -> Iterator[Engine]:
    (engine,) = FLEET.get(VICTIM)
    yield engine
    engine.stop()


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "number"),
    [
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.full),
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_a_lost_stage_ends_its_instance_and_decode_serves_on(
    victim: Engine, stage: int, number: signal.Signals
) -> None:
    (decode,) = FLEET.get(DECODE)
    processes = victim.process_ids()
    (lost,) = victim.process_ids(f"sglang::scheduler_PP{stage}")
    with ThreadPoolExecutor(8) as threads:
        pair = Pair(victim, decode, threads, SHAPE)
        longs = [pair.send(LONG_TOKENS + more, seed=2000 + more) for more in range(3)]
        pair.wait_for(lambda status: 0 < status["long"]["tokens"] < len(longs) * LONG_TOKENS)
        os.kill(lost, number)
        victim.process.wait(ENDS_WITHIN_S)
        assert wait_until_gone(processes, 20) == []
        for long in longs:
            with pytest.raises((OSError, AssertionError)):  # of prefill's leg
                long.replies.result(timeout=60)
        decode.wait_idle(60)
        (replacement,) = FLEET.get(VICTIM)
        assert replacement.process.pid != victim.process.pid
        assert Pair(replacement, decode, threads, SHAPE).send(300, seed=2010).is_exact()
    replacement.stop()


@pytest.mark.full
def test_a_stage_that_was_stopped_for_a_while_goes_on(victim: Engine) -> None:
    (decode,) = FLEET.get(DECODE)
    (stopped,) = victim.process_ids("sglang::scheduler_PP1")
    with ThreadPoolExecutor(8) as threads:
        pair = Pair(victim, decode, threads, SHAPE)
        long = pair.send(LONG_TOKENS, seed=2020)
        pair.wait_for(lambda status: 0 < status["long"]["tokens"] < LONG_TOKENS)
        os.kill(stopped, signal.SIGSTOP)
        try:
            short = pair.send(24, seed=2021)
            with pytest.raises(TimeoutError):
                short.replies.result(timeout=2)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert short.is_exact()
        assert long.is_exact()
        assert not any(is_aborted(reply) for reply in long.replies.result())
