"""What an instance says of itself: plain JSON, and exactly what the router reads."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from sglang_ext.laps.decide.cost_model import IterationSample
from sglang_ext.laps.decide.options import Batching
from sglang_ext.laps.decide.round_plan import (
    Cut,
    DispatchReason,
    LapsMode,
    PrefillBatch,
    PriorityClass,
    QueuedPrefill,
    RoundSnapshot,
)
from sglang_ext.laps.sglang.instance import LapsInstance
from sglang_ext.laps.sglang.metrics import NoMetrics
from sglang_ext.laps.sglang.rank_agreement import SingleRankAgreement
from sglang_ext.laps.sglang.status import MODES, merge_statuses, mode_number, status_of
from sglang_ext.types import LengthClass
from sglang_ext_router.instances.laps_monitor import read_report
from support.prefill_loop import policy


def instance(**options: object) -> LapsInstance:
    return LapsInstance(policy(**options), SingleRankAgreement(), NoMetrics())  # type: ignore[arg-type]


def queued(key: int, new_tokens: int, *, arrival_s: float = 0.0, is_started: bool = False) -> QueuedPrefill:
    length_class = LengthClass.SHORT if new_tokens <= 256 else LengthClass.LONG
    return QueuedPrefill(
        key, length_class, new_tokens, 0, new_tokens, arrival_s, inf, PriorityClass.NORMAL, is_started, False
    )


def test_every_mode_has_a_number_of_its_own() -> None:
    assert [MODES[mode_number(mode)] for mode in LapsMode] == list(LapsMode)


def test_an_idle_instance() -> None:
    status = status_of(instance(), RoundSnapshot(5.0, (), 1000), locked_tokens=0)
    assert json.loads(json.dumps(status, allow_nan=False)) == status
    report = read_report(status)
    assert (report.mode, report.generation, report.parked, report.utilisation) == (LapsMode.BOTH, 0, 0, 0.0)
    assert (report.short.requests, report.long.requests) == (0, 0)
    assert status["kv"] == {"free_tokens": 1000, "locked_tokens": 0}
    assert status["fit"]["error_p50"] is None


def test_queues_and_parked_requests() -> None:
    queue = (queued(1, 100), queued(2, 50, arrival_s=3.0), queued(3, 4000, arrival_s=1.0, is_started=True))
    laps = instance()
    laps.clock.record_launch(3.0, LengthClass.SHORT, [100], [0])
    laps.clock.record_result(4.0)
    status = status_of(laps, RoundSnapshot(5.0, queue, 2000), locked_tokens=64)
    assert json.loads(json.dumps(status, allow_nan=False)) == status
    report = read_report(status)
    assert (report.short.requests, report.short.tokens, report.short.oldest_wait_s) == (2, 150, 5.0)
    assert (report.long.requests, report.long.tokens, report.long.oldest_wait_s) == (1, 4000, 4.0)
    assert report.long.backlog_s > report.short.backlog_s > 0
    assert report.parked == 1
    assert report.utilisation == pytest.approx(0.5)
    assert status["kv"] == {"free_tokens": 2000, "locked_tokens": 64}


@pytest.mark.parametrize("batching", list(Batching))
def test_queues_without_deadlines_are_finite_numbers_too(batching: Batching) -> None:
    laps = instance(batching=batching)
    laps.policy.record_iteration(IterationSample(100.0, 10, 0, 1, 0.01))
    status = status_of(laps, RoundSnapshot(5.0, (queued(1, 100, arrival_s=4.99),), 2000), locked_tokens=0)
    json.dumps(status, allow_nan=False)
    assert status["fit"]["samples"] == 1


def test_a_mode_switch_shows() -> None:
    laps = instance()
    for generation, mode in enumerate((LapsMode.LONG, LapsMode.LONG, LapsMode.SHORT), start=1):
        laps.switch_mode(mode)
        report = read_report(status_of(laps, RoundSnapshot(0.0, (), 10), locked_tokens=0))
        # One that changes nothing counts as well: the client sees that it was received.
        assert (report.mode, report.generation) == (mode, generation)


def test_the_ranks_of_an_instance_are_reported_together() -> None:
    first, second = instance(), instance()
    first.clock.record_launch(3.0, LengthClass.SHORT, [100], [0])
    first.clock.record_result(4.0)
    second.switch_mode(LapsMode.LONG)
    second.switch_mode(LapsMode.BOTH)
    first.parks = second.parks = 2
    busy = RoundSnapshot(5.0, (queued(1, 100), queued(2, 4000, arrival_s=1.0, is_started=True)), 2000)
    idle = RoundSnapshot(5.0, (queued(1, 50, arrival_s=4.0),), 3000)
    statuses = [status_of(first, busy, locked_tokens=64), status_of(second, idle, locked_tokens=1)]
    for rank, status in enumerate(statuses):
        status["rank"] = rank
    assert merge_statuses(statuses[:1]) == statuses[0]
    # They answer in any order.
    merged = merge_statuses([{**statuses[1], "work": {"cursor": 2}}, {**statuses[0], "work": {"cursor": 1}}])
    assert json.loads(json.dumps(merged, allow_nan=False)) == merged
    assert merged["ranks"] == statuses
    assert merged["work"] == {"cursor": 1}
    report = read_report(merged)
    assert (report.short.requests, report.short.tokens, report.long.tokens) == (2, 150, 4000)
    assert report.short.oldest_wait_s == 5.0
    assert report.short.backlog_s == statuses[0]["short"]["backlog_s"] > statuses[1]["short"]["backlog_s"]
    assert report.utilisation == statuses[0]["utilisation"] / 2 > 0
    assert report.generation == 0
    assert (merged["parks"], report.parked) == (4, 1)
    assert merged["kv"] == {"free_tokens": 5000, "locked_tokens": 65}


def test_parks_are_counted_once_for_each_interruption() -> None:
    """Two short batches in a row interrupt a long prefill once."""
    laps = instance()
    in_hand = replace(queued(1, 4000, is_started=True), is_current=True)
    between = (in_hand, queued(2, 10), queued(3, 10))
    for action, expected in (
        (_chunk(1), 0),
        (_batch(2), 1),
        (_batch(3), 1),
        (_chunk(1), 1),
        (_batch(3), 2),
    ):
        dispatch(laps, between, action)
        assert laps.parks == expected
    # Another long prefill takes its place.
    laps = instance()
    dispatch(laps, (in_hand, queued(4, 5000)), _chunk(4))
    assert (laps.parks, laps.current_key) == (1, 4)


def dispatch(laps: LapsInstance, queue: tuple[QueuedPrefill, ...], batch: PrefillBatch) -> None:
    for request in queue:
        laps.policy.put(request, 0.0)
    laps.record_dispatch(0.0, batch)


def _chunk(key: int) -> PrefillBatch:
    return PrefillBatch((), Cut(key, 256), DispatchReason.SHARE, None, 0, 256, 0.1)


def _batch(key: int) -> PrefillBatch:
    return PrefillBatch((key,), None, DispatchReason.SHARE, None, 1, 10, 0.01)
