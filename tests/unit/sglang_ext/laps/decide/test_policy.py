"""What the whole policy decides for a snapshot: order, fallbacks, modes, classes, deadlines and the report."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.laps.decide.options import Batching
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import (
    DispatchReason,
    LapsMode,
    PriorityClass,
    RoundSnapshot,
)
from support.prefill_loop import (
    CPU,
    GPU,
    GRID,
    LIMITS,
    LONG,
    SHORT,
    Arrival,
    check_offline_chunks,
    mixed,
    offline,
    queued,
    run_laps,
)
from support.prefill_loop import policy as policy_of


def policy(truth: CostCoefficients = CPU, grid: GraphGrid | None = None, **options: object) -> Laps:
    return policy_of(truth, grid, **options)


def test_an_idle_instance_has_nothing_to_do() -> None:
    plan = policy().choose_of(RoundSnapshot(1.0, (), 1000))
    assert plan.batches == ()
    assert plan.wake_s == inf


def test_a_lone_short_on_a_linear_machine_leaves_at_once() -> None:
    (action,) = policy().choose_of(RoundSnapshot(0.0, (queued(7, 100),), 1000)).batches
    assert action.is_short
    assert action.keys == (7,)
    assert action.reason is DispatchReason.NO_GAIN


def test_a_lone_long_runs_in_chunks_of_a_round() -> None:
    laps = policy(round_ms=50.0)
    (action,) = laps.choose_of(RoundSnapshot(0.0, (queued(7, 4000),), 10_000)).batches
    assert not action.is_short
    assert action.reason is DispatchReason.ALONE
    assert action.predicted_s == pytest.approx(0.05, rel=0.01)
    assert CPU.chunk_s(action.new_tokens + 1, 0) > 0.05


def test_choosing_changes_nothing() -> None:
    laps = policy()
    snapshot = RoundSnapshot(0.0, (queued(1, 4000), queued(2, 100), queued(3, 30)), 10_000)
    plans = [laps.choose_of(snapshot) for _ in range(3)]
    assert plans[0] == plans[1] == plans[2]
    assert laps.report(snapshot) == laps.report(snapshot)


def test_order_in_the_snapshot_does_not_matter() -> None:
    random = Random(1)
    queue = [queued(key, random.choice([20, 100, 900, 5000]), arrival_s=-random.random()) for key in range(20)]
    plans = set()
    for _ in range(5):
        random.shuffle(queue)
        plans.add(policy().choose_of(RoundSnapshot(1.0, tuple(queue), 100_000)))
    assert len(plans) == 1


def test_priority_comes_before_slack() -> None:
    real_time = queued(1, 4000, priority=PriorityClass.REAL_TIME)
    first = policy().choose_of(RoundSnapshot(0.0, (real_time, queued(2, 100)), 10_000)).batches[0]
    assert not first.is_short
    low = queued(1, 4000, priority=PriorityClass.LOW, arrival_s=-5.0, deadline_s=-1.0)
    first = policy().choose_of(RoundSnapshot(0.0, (low, queued(2, 100)), 10_000)).batches[0]
    assert first.is_short


def test_an_aged_long_prefill_does_not_shut_the_shorts_out() -> None:
    aged = queued(1, 4000, arrival_s=-1000.0, deadline_s=-900.0)
    first = policy().choose_of(RoundSnapshot(0.0, (aged, queued(2, 100)), 10_000)).batches[0]
    assert first.is_short


def test_memory_refuses_a_short_so_the_long_goes_on() -> None:
    started = queued(1, 500, total_tokens=4000, cached_tokens=3500, is_started=True, is_current=True)
    actions = policy().choose_of(RoundSnapshot(0.0, (started, queued(2, 200)), 100)).batches
    assert not actions[0].is_short
    assert actions[0].new_tokens == 100
    assert actions[1].is_short


def test_a_prompt_larger_than_the_memory_is_offered_all_the_same() -> None:
    (action,) = policy().choose_of(RoundSnapshot(0.0, (queued(1, 5000),), 1000)).batches
    assert not action.is_short
    assert action.new_tokens <= 1000
    (action,) = policy().choose_of(RoundSnapshot(0.0, (queued(1, 100),), 0)).batches
    assert action.is_short


def test_a_short_that_was_chunked_goes_on_as_a_long_one() -> None:
    started = queued(1, 50, total_tokens=200, cached_tokens=150, is_started=True, is_current=True)
    (action,) = policy().choose_of(RoundSnapshot(0.0, (started,), 1000)).batches
    assert not action.is_short
    assert action.new_tokens == 50


# -- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LapsMode)
def test_every_mode_serves_everything(mode: LapsMode) -> None:
    outcome = run_laps(policy(mode=mode), mixed(Random(5), 300, 0.8, CPU), CPU)
    assert len(outcome.ended) == 300


def test_switching_under_load_loses_nothing() -> None:
    random = Random(6)
    laps = policy()

    def switch() -> float:
        laps.switch_mode(random.choice(list(LapsMode)))
        return 1.0

    outcome = run_laps(laps, mixed(random, 400, 0.8, CPU), CPU, noise=switch)
    assert len(outcome.ended) == 400


# -- classes, deadlines, report --------------------------------------------------------------------------------------


def test_the_boundary_is_the_option_or_what_takes_half_of_the_objective() -> None:
    assert policy(boundary_tokens=100).classify(101, 0) is LONG
    random = Random(15)
    laps = policy(boundary_tokens=None, short_ttft_slo_ms=200.0)
    assert laps.classify(1536, 0) is SHORT, "what the prior expects, until there are samples"
    assert laps.classify(1537, 0) is LONG
    slow = policy(CPU.times(100.0), boundary_tokens=None, short_ttft_slo_ms=200.0)
    assert slow.classify(512, 0) is SHORT, "and 512 if it expects less"
    assert slow.classify(513, 0) is LONG
    for _ in range(300):
        new, cached = int(2 ** random.uniform(3, 12)), random.choice([0, int(2 ** random.uniform(4, 12))])
        laps.record_iteration(
            IterationSample(float(new * (new + 2 * cached)), new, cached, 1, CPU.chunk_s(new, cached))
        )
    report = laps.report(RoundSnapshot(0.0, (), 1000))
    limit = report.boundary_tokens
    assert report.boundary_is_fitted
    assert CPU.chunk_s(limit, 0) <= 0.1 < CPU.chunk_s(3 * limit // 2, 0)
    assert laps.classify(limit, 4096) is SHORT
    assert laps.classify(limit + 1, 4096) is LONG


def test_what_waits_is_predicted_again_once_costs_are_known() -> None:
    """Its times, its class and the load are by the prior when it comes, which may be wrong by far."""
    laps = policy(CPU.times(50.0), boundary_tokens=None)
    assert laps.classify(1000, 0) is LONG
    for key, new in enumerate((1000, 4000)):
        laps.record_arrival(0.1 * key, LONG, new, 0, 100.0)
        laps.put(queued(key, new, length_class=LONG), 0.0)
    before = laps.queue.get(1)
    assert before.remaining_s > 20 * CPU.chunk_s(4000, 0)
    for new in [32, 64, 512, 4000] * 16:
        laps.record_iteration(IterationSample(float(new * new), new, 0, 1, CPU.chunk_s(new, 0)))
    assert laps.choose(1.0, 10**6).batches
    after = laps.queue.get(1)
    assert after.remaining_s == pytest.approx(CPU.chunk_s(4000, 0), rel=0.3)
    assert after.request == before.request
    assert laps.queue.get(0).request.length_class is SHORT
    assert laps._model.offered.load(1.0).utilisation < 1
    assert laps._model._long_work.typical_s < 2 * CPU.chunk_s(4000, 0)


def test_deadlines() -> None:
    laps = policy(round_ms=1e6)
    assert laps.deadline_s(SHORT, 100, 0, 10.0, None) == pytest.approx(10.4)
    assert laps.deadline_s(LONG, 4000, 100, 10.0, None) == pytest.approx(10 + 5 * CPU.chunk_s(4000, 100))
    assert laps.deadline_s(LONG, 300, 0, 10.0, None) == pytest.approx(10.4)
    assert laps.deadline_s(LONG, 4000, 0, 10.0, 0.25) == pytest.approx(10.25)
    assert policy(batching=Batching.TOKEN_MAX).deadline_s(SHORT, 100, 0, 10.0, None) == inf


def test_low_priority_has_no_deadline_of_its_own() -> None:
    laps = policy()
    assert laps.deadline_s(SHORT, 100, 0, 10.0, None, PriorityClass.LOW) == inf
    assert laps.deadline_s(LONG, 4000, 0, 10.0, None, PriorityClass.LOW) == inf
    assert laps.deadline_s(SHORT, 100, 0, 10.0, 0.25, PriorityClass.LOW) == pytest.approx(10.25)


YIELD_S = 0.4 / 16  # the least that work without deadlines runs at a time while clients are near


def test_offline_shorts_wait_for_a_dense_batch_and_not_beyond_a_pause() -> None:
    laps = policy(token_max=300, w_max_ms=20.0)
    two = (offline(1, 100), offline(2, 100, arrival_s=0.005))
    assert laps.choose_of(RoundSnapshot(0.01, two, 10_000)) == laps.choose_of(RoundSnapshot(0.01, two, 10_000))
    assert laps.choose_of(RoundSnapshot(0.01, two, 10_000)).batches == ()
    assert laps.choose_of(RoundSnapshot(0.01, two, 10_000)).wake_s == pytest.approx(0.025)
    (paused,) = laps.choose_of(RoundSnapshot(0.026, two, 10_000)).batches
    assert paused.is_short
    assert paused.reason is DispatchReason.WINDOW
    three = (*two, offline(3, 100, arrival_s=0.009))
    (dense,) = laps.choose_of(RoundSnapshot(0.01, three, 10_000)).batches
    assert dense.is_short
    assert (dense.reason, dense.keys) == (DispatchReason.TOKENS, (1, 2, 3))


def test_an_online_short_makes_the_batch_leave_as_online_ones_do() -> None:
    laps = policy(token_max=300, w_max_ms=20.0)
    mixed_queue = (offline(1, 100), queued(2, 100, arrival_s=0.005))
    (action,) = laps.choose_of(RoundSnapshot(0.006, mixed_queue, 10_000)).batches
    assert action.is_short
    assert action.reason is DispatchReason.NO_GAIN
    assert action.keys[0] == 2, "the online one is the more urgent"


def test_offline_prefills_do_not_hide_that_online_ones_are_late() -> None:
    laps = policy()
    laps.record_first_token(2.0, SHORT, 0.0, 1.0)
    for _ in range(99):
        laps.record_first_token(2.0, SHORT, 0.0, inf)
    assert laps.report(RoundSnapshot(2.0, (), 1000)).short.slo_violation_rate == 1.0


def test_all_that_runs_beside_clients_without_a_deadline_is_brief() -> None:
    laps = policy(short_ttft_slo_ms=400.0, boundary_tokens=256)
    laps.record_arrival(99.0, SHORT, 20, 0, 99.4)
    shorts = tuple(offline(key, 250) for key in range(8))
    for queue in (shorts, (*shorts, offline(9, 5000)), tuple(offline(key, 12) for key in range(64))):
        for action in laps.choose_of(RoundSnapshot(100.0, queue, 100_000)).batches:
            assert action.predicted_s <= YIELD_S


@pytest.mark.parametrize("is_online", [False, True])
def test_a_round_that_is_given_holds_for_work_without_deadlines_too(is_online: bool) -> None:
    laps = policy(round_ms=100.0, boundary_tokens=256)
    if is_online:
        laps.record_arrival(99.9, SHORT, 20, 0, 100.3)
    short = (offline(1, 200, arrival_s=99.0),)
    (alone,) = laps.choose_of(RoundSnapshot(100.0, short, 100_000)).batches
    assert alone.is_short, "a short prefill is not cut"
    (chunk,) = laps.choose_of(RoundSnapshot(100.0, (offline(2, 20_000),), 100_000)).batches
    (ordinary,) = laps.choose_of(RoundSnapshot(100.0, (queued(2, 20_000),), 100_000)).batches
    assert not chunk.is_short
    assert not ordinary.is_short
    assert chunk.new_tokens == ordinary.new_tokens
    assert chunk.predicted_s <= 0.1


def test_nothing_without_a_deadline_joins_a_batch_of_those_with_one() -> None:
    laps = policy()
    queue = (*(offline(key, 10) for key in range(5)), queued(7, 20), queued(8, 30))
    action = laps.choose_of(RoundSnapshot(0.1, queue, 10_000)).batches[0]
    assert action.is_short
    assert set(action.keys) == {7, 8}


def test_work_without_deadlines_makes_no_ones_rounds_longer() -> None:
    laps = policy()
    online = queued(1, 20_000)
    alone = laps.choose_of(RoundSnapshot(0.1, (online,), 10**6)).batches[0]
    beside = laps.choose_of(
        RoundSnapshot(0.1, (online, *(offline(key, 20_000) for key in range(2, 30))), 10**6)
    ).batches[0]
    assert not beside.is_short
    assert beside == alone


def test_an_online_short_goes_before_offline_longs_whatever_shorts_have_used() -> None:
    laps = policy()
    longs = (offline(1, 20_000), offline(2, 20_000))
    for turn in range(50):
        snapshot = RoundSnapshot(0.1 * turn, (*longs, queued(10 + turn, 100, arrival_s=0.1 * turn)), 10**6)
        action = laps.choose_of(snapshot).batches[0]
        assert action.is_short
        laps.record_dispatch_of(snapshot, action)


def test_shorts_in_no_hurry_are_served_beside_bursts_of_long_ones() -> None:
    arrivals = [Arrival(20.0 * burst + 0.001 * number, 6000) for burst in range(2) for number in range(30)]
    arrivals += [Arrival(0.05 + 0.5 * number, 50, ttft_slo_s=60.0) for number in range(60)]
    outcome = run_laps(policy_of(CPU, t_max_ms=100.0), arrivals, CPU)
    waits_s = outcome.ttfts_s(SHORT)
    assert waits_s[int(0.9 * len(waits_s))] < 1.0


@pytest.mark.parametrize("mode", list(LapsMode))
def test_dense_batches_of_a_job_wait_for_one_objective_at_most(mode: LapsMode) -> None:
    laps = policy(short_ttft_slo_ms=400.0)
    laps.switch_mode(mode)
    queue = (offline(1, 20_000), offline(2, 20_000), offline(3, 20, arrival_s=99.9))
    first = laps.choose_of(RoundSnapshot(100.0, queue, 10**6)).batches[0]
    late = laps.choose_of(RoundSnapshot(100.4, queue, 10**6)).batches
    assert not first.is_short or mode is LapsMode.SHORT
    assert any(action.is_short for action in late)


@pytest.mark.parametrize("slo_s", [0.0, -1.0, float("nan")])
def test_an_impossible_objective_is_refused(slo_s: float) -> None:
    with pytest.raises(ValueError, match="TTFT objective of a request must be above 0 s"):
        policy().deadline_s(SHORT, 100, 0, 0.0, slo_s)


def test_limits_that_admit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="limits of an instance"):
        policy(limits=LIMITS._replace(max_requests=0))


def test_the_report_has_the_window_of_the_batch_that_gathers() -> None:
    laps = policy(GPU, GRID)
    for index in range(64):
        laps.record_arrival(-0.064 + 0.001 * index, SHORT, 20, 0, 9.0)
    snapshot = RoundSnapshot(0.0, (queued(1, 20, arrival_s=-0.002), queued(2, 20, arrival_s=-0.001)), 10_000)
    plan = laps.choose_of(snapshot)
    assert plan.batches == ()
    assert laps.report(snapshot).window_s == pytest.approx(plan.wake_s + 0.002)
    assert laps.report(RoundSnapshot(0.0, (), 10_000)).window_s > plan.wake_s + 0.002, "that of a batch to come"


def test_the_report() -> None:
    laps = policy(round_ms=50.0)
    laps.record_arrival(0.0, SHORT, 100, 0, 9.0)
    laps.record_arrival(0.5, SHORT, 100, 0, 9.0)
    laps.record_first_token(0.9, LONG, 0.0, 0.6)
    laps.record_first_token(0.9, LONG, 0.0, 1.0)
    snapshot = RoundSnapshot(
        1.0,
        (
            queued(1, 100),
            queued(2, 100, arrival_s=0.5),
            queued(3, 3000, total_tokens=4000, cached_tokens=1000, is_started=True, is_current=True),
            queued(4, 2000, total_tokens=4000, cached_tokens=2000, is_started=True),
        ),
        10_000,
    )
    report = laps.report(snapshot)
    assert report.mode is LapsMode.BOTH
    assert report.parked == 1
    assert report.depth == 64
    assert report.short_rate_per_s == pytest.approx(1.0)
    assert (report.short.requests, report.short.new_tokens) == (2, 200)
    assert report.short.oldest_wait_s == pytest.approx(1.0)
    assert report.short.backlog_s == pytest.approx(CPU.iteration_s(20_000.0, 200, 0))
    assert (report.long.requests, report.long.new_tokens) == (2, 5000)
    assert report.long.backlog_s > CPU.chunk_s(3000, 1000) + CPU.chunk_s(2000, 2000)
    assert report.long.slo_violation_rate == 0.5
    assert report.long.tardiness == pytest.approx(0.25)
    assert report.short.slo_violation_rate == 0.0
    assert report.round_s == 0.05
    assert report.fit.samples == 0


def test_offline_longs_run_in_large_chunks_while_no_client_is_near() -> None:
    check_offline_chunks(policy(short_ttft_slo_ms=400.0), 1.5 * 0.4, 1.5 * YIELD_S)


def test_short_iterations_say_what_a_token_costs_before_a_long_one_says_the_rest() -> None:
    laps, random = policy(), Random(0)

    def run(new_tokens: int) -> None:
        took_s = (0.03 + 5e-4 * new_tokens + 1e-7 * new_tokens**2) * random.uniform(0.8, 1.25)
        laps.record_iteration(IterationSample(float(new_tokens**2), new_tokens, 0, 1, took_s))

    assert laps.measured_cost is None
    for new_tokens in (20, 200, 60, 120) * 20:
        run(new_tokens)
    assert laps.measured_cost is not None
    assert laps.measured_cost.token_s == pytest.approx(5e-4, rel=0.2)
    assert not laps.has_measured_long
    for new_tokens in (2000, 4000, 1000) * 5:
        run(new_tokens)
    assert laps.has_measured_long
