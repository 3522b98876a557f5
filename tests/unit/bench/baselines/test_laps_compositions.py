"""LAPS as printed and Medha's mixed batches: what each runs next, how long a round is, and that all are served."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.laps_compositions import MAX_SHARE, MEDHA, SEPARATE, Rules, automatic_round_s, choose_share
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import Batching
from sglang_ext.laps.decide.policy import Composition, Laps
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
    check_plan,
    first_action,
    mixed,
    queued,
    run_laps,
)
from support.prefill_loop import policy as policy_of

pytestmark = pytest.mark.slow
YIELD_S = 0.4 / 16  # the least that work without deadlines runs at a time while clients are near
COMPOSITIONS = {"separate": SEPARATE, "medha": MEDHA}


def policy(
    truth: CostCoefficients = CPU,
    grid: GraphGrid | None = None,
    composition: Composition = SEPARATE,
    **options: object,
) -> Laps:
    return policy_of(truth, grid, composition=composition, **{"rho_max": MAX_SHARE} | options)


def test_while_both_wait_the_chunk_leaves_the_shorts_their_share() -> None:
    laps = policy(round_ms=50.0)
    snapshot = RoundSnapshot(0.0, (queued(1, 4000), queued(2, 100)), 10_000)
    first, fallback = laps.choose_of(snapshot).batches
    assert first.is_short
    assert not fallback.is_short
    assert fallback.predicted_s == pytest.approx(0.6 * 0.05, rel=0.01)


def test_shorts_that_have_used_their_share_let_a_chunk_run() -> None:
    laps = policy(round_ms=50.0)
    snapshot = RoundSnapshot(0.0, (queued(1, 4000), queued(2, 100)), 10_000)
    turns = []
    for _ in range(200):
        action = laps.choose_of(snapshot).batches[0]
        laps.record_dispatch_of(snapshot, action)
        turns.append(action)
    short_s = sum(turn.predicted_s for turn in turns if turn.is_short)
    long_s = sum(turn.predicted_s for turn in turns if not turn.is_short)
    assert short_s / (short_s + long_s) == pytest.approx(0.4, abs=0.05)
    assert {turn.reason for turn in turns if not turn.is_short} == {DispatchReason.SHARE}
    assert laps.report(snapshot).short_share == pytest.approx(0.4, abs=0.08)


def test_medhas_rule_for_a_late_long_prefill() -> None:
    late = queued(1, 4000, arrival_s=-100.0, deadline_s=-50.0)
    laps = policy(composition=Rules(rho_min=0.0).composition())
    patient = queued(2, 100, deadline_s=1000.0)
    first = laps.choose_of(RoundSnapshot(0.0, (late, patient), 10_000)).batches[0]
    assert not first.is_short
    assert first.reason is DispatchReason.URGENT
    long_past = queued(2, 100, arrival_s=-100.0, deadline_s=-90.0)
    first = laps.choose_of(RoundSnapshot(0.0, (late, long_past), 10_000)).batches[0]
    assert first.is_short
    assert first.reason is DispatchReason.URGENT


def test_shorts_that_can_afford_it_wait_for_more_members_while_several_longs_wait() -> None:
    longs = queued(1, 4000), queued(2, 4000)
    patient = queued(3, 100, deadline_s=10.0)
    assert not first_action(policy(), 0.0, *longs, patient).is_short
    # One long prefill alone: time is not scarce.
    assert first_action(policy(), 0.0, longs[0], patient).is_short
    # Another chunk would take it beyond 80% of the time that it has.
    assert first_action(policy(), 7.99, *longs, patient).is_short
    assert first_action(policy(), 0.0, *longs, patient, queued(4, 10, deadline_s=0.05)).is_short
    assert first_action(policy(round_ms=50.0), 0.0, *longs, patient).is_short
    assert first_action(policy(depth_max=1), 0.0, *longs, patient, queued(4, 50)).is_short
    assert first_action(policy(mode=LapsMode.SHORT), 0.0, *longs, patient).is_short
    important = queued(3, 100, deadline_s=10.0, priority=PriorityClass.HIGH)
    assert first_action(policy(), 0.0, *longs, important).is_short


def test_an_instance_for_shorts_keeps_longs_for_idle_times_until_they_are_late() -> None:
    laps = policy(mode=LapsMode.SHORT, truth=GPU, grid=GRID)
    for index in range(64):
        laps.record_arrival(-0.064 + 0.001 * index, SHORT, 20, 0, 9.0)
    gathering = RoundSnapshot(0.0, (queued(1, 4000), queued(2, 20)), 10_000)
    plan = laps.choose_of(gathering)
    assert plan.batches == ()  # the window is open
    assert 0 < plan.wake_s <= 0.03
    late = queued(1, 4000, deadline_s=-1.0)
    turns = []
    for _ in range(1000):
        snapshot = RoundSnapshot(0.05, (late, queued(2, 20)), 10_000)
        action = laps.choose_of(snapshot).batches[0]
        laps.record_dispatch_of(snapshot, action)
        turns.append(action)
    short_s = sum(turn.predicted_s for turn in turns if turn.is_short)
    assert short_s / sum(turn.predicted_s for turn in turns) == pytest.approx(0.6, abs=0.05)


def test_an_instance_for_longs_runs_large_chunks_and_never_waits_for_shorts() -> None:
    laps = policy(mode=LapsMode.LONG, round_ms=20.0)
    first, chunk = laps.choose_of(RoundSnapshot(0.0, (queued(1, 8000), queued(2, 100)), 10_000)).batches
    assert first.is_short
    assert not chunk.is_short
    assert chunk.predicted_s == pytest.approx(0.06, rel=0.01)
    (alone,) = (
        policy(mode=LapsMode.LONG, truth=GPU, w_min_ms=20.0)
        .choose_of(RoundSnapshot(0.0, (queued(2, 100),), 10_000))
        .batches
    )
    assert alone.is_short
    assert alone.reason is DispatchReason.ALONE


def test_shorts_in_no_hurry_do_not_wait_beyond_t_max_beside_long_ones() -> None:
    longs = (queued(1, 8000), queued(2, 8000))
    patient = queued(3, 50, deadline_s=60.0)
    assert not first_action(policy(t_max_ms=100.0), 0.05, *longs, patient).is_short
    assert first_action(policy(t_max_ms=100.0), 0.11, *longs, patient).is_short


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 6000), st.integers(0, 5000), st.floats(0, 99), st.booleans(), st.integers(0, 3)),
        max_size=20,
    ),
    free=st.integers(0, 10_000),
    page=st.sampled_from([1, 16]),
    mode=st.sampled_from(LapsMode),
    batching=st.sampled_from(Batching),
)
def test_any_snapshot_has_a_sound_plan(
    requests: list[tuple[int, int, float, bool, int]], free: int, page: int, mode: LapsMode, batching: Batching
) -> None:
    queue = []
    for key, (new, done, arrival_s, is_started, priority) in enumerate(requests):
        is_started = is_started and done > 0
        queue.append(
            queued(
                key,
                new,
                cached_tokens=done,
                total_tokens=new + done if is_started else new,
                arrival_s=arrival_s,
                deadline_s=arrival_s + 1.0 if key % 3 else inf,
                priority=PriorityClass(priority),
                is_started=is_started,
                is_current=is_started and key == 0,
            )
        )
    snapshot = RoundSnapshot(100.0, tuple(queue), free)
    limits = LIMITS._replace(page_tokens=page)
    laps = policy(limits=limits, mode=mode, batching=batching)
    plan = laps.choose_of(snapshot)
    check_plan(snapshot, plan, limits)
    assert bool(plan.batches) == bool(queue)  # everybody has waited beyond any window
    for action in plan.batches:
        laps.record_dispatch_of(snapshot, action)


@pytest.mark.parametrize(("slack", "share"), [(5.0, 0.4), (0.25, 0.25), (0.0, 0.0), (-3.0, 0.0)])
def test_medhas_clip(slack: float, share: float) -> None:
    assert choose_share(slack, 0.0, 0.4) == share


def test_a_late_long_prefill_leaves_the_floor() -> None:
    assert choose_share(-3.0, 0.2, 0.4) == 0.2


def test_a_round_grows_with_the_backlog_between_its_bounds() -> None:
    def round_s(backlog_s: float) -> float:
        return automatic_round_s(0.005, backlog_s, short_slo_s=0.4, longest_short_s=0.05)

    assert round_s(0.0) == pytest.approx(0.1)  # a quarter of the objective; 20 times the fixed cost
    assert round_s(2.0) == pytest.approx((16 * 0.005 * 2.0) ** 0.5)
    assert round_s(1e6) == pytest.approx(1.2)
    assert round_s(1.0) <= round_s(2.0) <= round_s(4.0)


def test_a_slow_machine_has_rounds_that_its_fixed_cost_allows() -> None:
    assert automatic_round_s(0.1, 0.0, short_slo_s=0.4, longest_short_s=0.8) == pytest.approx(2.0)


# -- the whole policy in a loop with a machine ------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("mode", LapsMode)
def test_every_mode_serves_everything(name: str, mode: LapsMode) -> None:
    laps = policy(composition=COMPOSITIONS[name], mode=mode)
    assert len(run_laps(laps, mixed(Random(5), 300, 0.8, CPU), CPU).ended) == 300


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_longs_progress_at_their_share_against_any_number_of_shorts(name: str) -> None:
    arrivals = [Arrival(0.0, 10_000)] + [Arrival(0.005 * index, 200) for index in range(500)]
    (long_s,) = run_laps(policy(composition=COMPOSITIONS[name], round_ms=50.0), arrivals, CPU).ttfts_s(LONG)
    alone = run_laps(policy(composition=COMPOSITIONS[name], round_ms=50.0), arrivals[:1], CPU)
    assert long_s < alone.ttfts_s(LONG)[0] / (1 - MAX_SHARE) * 1.15 + 0.1


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_shorts_in_no_hurry_are_served_beside_bursts_of_long_ones(name: str) -> None:
    arrivals = [Arrival(20.0 * burst + 0.001 * number, 6000) for burst in range(2) for number in range(30)]
    arrivals += [Arrival(0.05 + 0.5 * number, 50, ttft_slo_s=60.0) for number in range(60)]
    outcome = run_laps(policy(composition=COMPOSITIONS[name], t_max_ms=100.0), arrivals, CPU)
    waits_s = outcome.ttfts_s(SHORT)
    assert waits_s[int(0.9 * len(waits_s))] < 1.0


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("seed", range(8))
def test_nothing_starves_within_capacity(name: str, seed: int) -> None:
    random = Random(seed)
    truth = random.choice([CPU, GPU])
    arrivals = [
        arrival._replace(
            priority=random.choice(list(PriorityClass)), ttft_slo_s=random.choice([None, None, 0.001, 0.5, 60.0])
        )
        for arrival in mixed(random, 150, random.uniform(0.1, 0.95), truth, random.random())
    ]
    limits = LIMITS._replace(page_tokens=random.choice([1, 16]))
    laps = policy(
        truth,
        GRID if truth is GPU else None,
        COMPOSITIONS[name],
        limits=limits,
        mode=random.choice(list(LapsMode)),
        batching=random.choice(list(Batching)),
    )
    kv_tokens = random.choice([4096, 9000, 1_000_000])
    assert len(run_laps(laps, arrivals, truth, kv_tokens=kv_tokens, limits=limits).ended) == 150


def test_offline_longs_run_in_large_chunks_while_no_client_is_near() -> None:
    check_offline_chunks(policy(short_ttft_slo_ms=400.0), 0.4, YIELD_S)
