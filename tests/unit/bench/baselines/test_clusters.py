"""Clusters that share prompts: every system by hand, and what holds for all of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.clusters import CdspPolicy, FixedSp, greedy_esp
from baselines.prefill_orders import edf, fcfs, lars, srpt
from baselines.systems import ClusterSystem, SystemOptions, build_cluster
from baselines.tetris_planner import CdspRequest, ChunkPlan, NoPlan
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.decide.table1 import fitted_candidates
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec, Failure
from sglang_ext.planner.simulation.events import EventLoop, SimRequest
from sglang_ext.planner.simulation.long_pool import OrderFactory
from sglang_ext.planner.simulation.run import Outcome, RunOptions, simulate
from support.cdsp_cases import tabulated_candidates
from support.examples import examples

# One instance computes 1,000 tokens in 1 s, two together in 0.6 s.
PAIR = (SpCandidate(1, SpCost(0.0, 1e-3, 0.0, 0.0)), SpCandidate(2, SpCost(0.1, 0.5e-3, 0.0, 0.0)))
ALONE = PAIR[:1]
K = 1024


def serve(
    requests: list[tuple[float, int]],
    options: SystemOptions,
    instances: int,
    candidates: tuple[SpCandidate, ...] = PAIR,
    failures: tuple[Failure, ...] = (),
    kv_tokens: int = 1_000_000,
) -> Outcome:
    """Serve (arrival, tokens) to the end."""
    workload = [SimRequest(key, at_s, tokens, 1) for key, (at_s, tokens) in enumerate(requests)]
    spec = ClusterSpec(instances, kv_tokens=kv_tokens)
    return simulate(
        workload,
        lambda loop, listener: build_cluster(options, loop, spec, candidates, listener, is_recorded=True),
        RunOptions(failures=failures),
    )


def ttfts_s(outcome: Outcome) -> list[float]:
    return [one.ttft_s for one in sorted(outcome.served, key=lambda one: one.request.key)]


def system(name: ClusterSystem | OrderFactory, **options: float) -> SystemOptions:
    """A system, or the pool in another order."""
    if isinstance(name, ClusterSystem):
        return SystemOptions(name, min_chunk_tokens=1, **options)  # type: ignore[arg-type]
    return SystemOptions(ClusterSystem.POOL, min_chunk_tokens=1, order=name, **options)  # type: ignore[arg-type]


# ---- section 2.4 of Tetris, with its own table ----


def plan_in_turn(policy: CdspPolicy, tokens: tuple[int, ...]) -> list[float]:
    """Times to first token of requests that arrive together while 16 instances have 1 s to do."""
    delays_s = [1.0] * 16
    found = []
    for new_tokens in tokens:
        plan = policy.plan(PrefillSnapshot([0] * 8 + [1] * 8, delays_s, [10**6] * 16), CdspRequest(new_tokens))
        assert isinstance(plan, ChunkPlan)
        for instance in plan.chunks[-1].instances:
            delays_s[instance] = plan.ttft_s
        found.append(plan.ttft_s)
    return found


def test_loongserve_is_greedy_as_the_paper_prints_it() -> None:
    assert plan_in_turn(greedy_esp(tabulated_candidates()), (32 * K, 16 * K)) == pytest.approx([1.53, 1.84])


def test_an_improvement_rate_leaves_half_of_the_instances_to_the_next() -> None:
    single = CdspPolicy(tabulated_candidates(), 0.05, is_chunking=False)
    assert plan_in_turn(single, (32 * K, 16 * K)) == pytest.approx([1.58, 1.31])


# ---- by hand ----


def test_fixed_groups_take_the_group_with_the_lowest_delay() -> None:
    fixed = system(ClusterSystem.FIXED_SP, sp_size=1)
    assert ttfts_s(serve([(0, 1000), (0, 2000), (0, 500), (0, 500)], fixed, 2)) == pytest.approx([1.0, 2.0, 1.5, 2.0])
    fixed = system(ClusterSystem.FIXED_SP, sp_size=2)
    assert ttfts_s(serve([(0, 1000), (0, 1000), (0, 1000)], fixed, 4)) == pytest.approx([0.6, 0.6, 1.2])


def test_fixed_sp_leaves_what_does_not_fill_a_group_and_refuses_what_cannot_be() -> None:
    fixed = FixedSp(PAIR, 2)
    plan = fixed.plan(PrefillSnapshot([0] * 3, [1.0, 1.0, 0.0], [100] * 3), CdspRequest(100))
    assert isinstance(plan, ChunkPlan)
    assert plan.chunks[0].instances == (0, 1)
    assert isinstance(fixed.plan(PrefillSnapshot([0], [0.0], [100]), CdspRequest(100)), NoPlan)
    assert isinstance(fixed.plan(PrefillSnapshot([0, 0], [0.0, 0.0], [49, 50]), CdspRequest(100)), NoPlan)
    with pytest.raises(ValueError, match=r"^SP size 4 has no cost; there are 1, 2$"):
        FixedSp(PAIR, 4)


def test_loongserve_plans_behind_queues_and_its_idle_form_waits_for_idle_instances() -> None:
    # 0 s: both instances, 0.6 s. 0.1 s: behind it, both again, 1.2 s.
    requests = [(0.0, 1000), (0.1, 1000)]
    assert ttfts_s(serve(requests, system(ClusterSystem.LOONGSERVE), 2)) == pytest.approx([0.6, 1.1])
    assert ttfts_s(serve(requests, system(ClusterSystem.LOONGSERVE_IDLE), 2)) == pytest.approx([0.6, 1.1])
    # 100 tokens are fastest alone (0.1 s). The next prompt: both after 0.1 s would end at 0.7 s, one now at 1.0 s.
    requests = [(0.0, 100), (0.0, 1000)]
    assert ttfts_s(serve(requests, system(ClusterSystem.LOONGSERVE), 2)) == pytest.approx([0.1, 0.7])
    assert ttfts_s(serve(requests, system(ClusterSystem.LOONGSERVE_IDLE), 2)) == pytest.approx([0.1, 1.0])


def test_an_idle_queue_is_first_come_first_served() -> None:
    idle = system(ClusterSystem.LOONGSERVE_IDLE)
    outcome = serve([(0.0, 1000), (0.0, 3000), (0.0, 10)], idle, 1, ALONE)
    assert ttfts_s(outcome) == pytest.approx([1.0, 4.0, 4.01])
    assert [one.wait_s for one in outcome.served] == pytest.approx([0.0, 1.0, 4.0])


def test_chunks_use_the_time_until_the_others_are_free() -> None:
    # Instance 0 has 0.1 s to do. In one chunk: 0.7 s. In two: 100 tokens on the idle one in 0.1 s, then 900 on both.
    requests = [(0.0, 100), (0.0, 1000)]
    single = serve(requests, system(ClusterSystem.TETRIS_SINGLE, improvement_rate=0.05), 2)
    assert ttfts_s(single) == pytest.approx([0.1, 0.7])
    chunked = serve(requests, system(ClusterSystem.TETRIS, improvement_rate=0.05), 2)
    assert ttfts_s(chunked) == pytest.approx([0.1, 0.1 + 0.1 + 0.45])


REPLANNED = [(0.0, 1000), (0.1, 4000), (0.2, 500), (0.9, 100)]


def test_a_pool_in_order_of_arrival_by_hand() -> None:
    options = system(fcfs)
    assert ttfts_s(serve(REPLANNED, options, 1, ALONE)) == pytest.approx([1.0, 4.9, 5.3, 4.7])


def test_a_pool_in_order_of_slack_by_hand() -> None:
    # Twice the own time is allowed. At 1 s the slack of 4000 is (8.1 - 1 - 4) / 4 = 0.8, that of 500
    # (1.2 - 1 - 0.5) / 0.5 = -0.6, that of 100 is 0: 500 from 1 s on. At 1.5 s that of 100 is -5: it is next.
    options = system(lars, slo_s=1e-6, slo_stretch=2.0)
    assert ttfts_s(serve(REPLANNED, options, 1, ALONE)) == pytest.approx([1.0, 5.5, 1.3, 0.7])


def test_behind_a_queue_as_the_paper_has_it() -> None:
    # A is on both until 0.6 s. B (600) is faster behind it on both (0.4 s) than on one (0.6 s).
    options = system(ClusterSystem.TETRIS, improvement_rate=0.0)
    assert ttfts_s(serve([(0, 1000), (0, 600)], options, 2)) == pytest.approx([0.6, 1.0])


# ---- chunks that are cut ----


@pytest.mark.parametrize(
    ("name", "expected_s"),
    [
        (fcfs, [4.0, 3.8]),
        (edf, [4.1, 0.8]),
        (srpt, [4.1, 0.8]),
        (lars, [4.1, 1.8]),  # slack at 1 s: 1 of the long one, 10 of the other; at 2 s: 1 and 0
    ],
)
def test_a_short_prompt_gets_in_between_the_chunks_of_a_long_one(name: OrderFactory, expected_s: list[float]) -> None:
    options = system(name, slo_s=1.8, slo_stretch=2.0, chunk_s=1.0)
    assert ttfts_s(serve([(0, 4000), (0.3, 100)], options, 1, ALONE)) == pytest.approx(expected_s)


def test_a_chunk_is_not_cut_below_four_times_its_overhead() -> None:
    # At most 0.4 s. Half of 0.79 s, the short prompt, then half of 0.495 s and what is left.
    costs = (SpCandidate(1, SpCost(0.1, 1e-3, 0.0, 0.0)),)
    outcome = serve([(0, 690), (0.3, 100)], system(srpt, chunk_s=0.1), 1, costs)
    assert ttfts_s(outcome) == pytest.approx([1.19, 0.295])
    assert [busy.end_s for busy in outcome.timeline] == pytest.approx([0.395, 0.595, 0.842, 1.19])


def test_chunks_shrink_as_the_prefix_grows() -> None:
    costs = (SpCandidate(1, SpCost(0.0, 1e-4, 1e-6, 0.5e-6)),)
    outcome = serve([(0, 5000)], system(lars, chunk_s=1.0), 1, costs)
    # Each takes its part of what is left in as few equal ones as take at most a second (a token takes up to 5 ms), and
    # nothing is lost by cutting: c = 2d.
    all_s = 1e-4 * 5000 + 0.5e-6 * 5000**2
    for busy in outcome.timeline:
        left_s = all_s - busy.start_s
        assert busy.end_s - busy.start_s == pytest.approx(left_s / math.ceil(left_s - 1e-9), abs=0.01)
        assert busy.end_s - busy.start_s <= 1.0
    tokens = [busy.tokens or 0 for busy in outcome.timeline]
    assert all(later < before for before, later in pairwise(tokens))
    assert len(tokens) <= math.ceil(all_s) + 1
    assert ttfts_s(outcome) == pytest.approx([all_s])


# ---- failures ----


def test_a_failed_instance_takes_its_plans_along() -> None:
    # Both run alone. At 0.5 s instance 0 is lost: A starts again on instance 1 behind B.
    fixed = system(ClusterSystem.FIXED_SP, sp_size=1)
    outcome = serve([(0, 1000), (0, 1000)], fixed, 2, failures=(Failure(0, 0.5, 10.0),))
    assert ttfts_s(outcome) == pytest.approx([2.0, 1.0])
    lost = [busy for busy in outcome.timeline if busy.instance == 0]
    assert [(busy.start_s, busy.end_s) for busy in lost] == [(0.0, 0.5)]


@pytest.mark.parametrize("name", [ClusterSystem.TETRIS, fcfs])
def test_a_prompt_on_two_instances_goes_on_with_one(name: ClusterSystem | OrderFactory) -> None:
    # 1,000 tokens on both end at 0.6 s; at 0.5 s one is lost, and all is computed again on the other: 1.5 s.
    outcome = serve([(0, 1000)], system(name, improvement_rate=0.05), 2, failures=(Failure(1, 0.5, 10.0),))
    assert ttfts_s(outcome) == pytest.approx([1.5])


@pytest.mark.parametrize("name", [ClusterSystem.TETRIS, lars])
def test_without_any_instance_requests_wait_for_the_recovery(name: ClusterSystem | OrderFactory) -> None:
    outcome = serve([(0, 1000), (1.0, 1000)], system(name), 1, ALONE, failures=(Failure(0, 0.5, 2.0),))
    assert sorted(ttfts_s(outcome)) == pytest.approx([3.5, 3.5])
    assert not outcome.unfinished


def test_a_failure_of_an_instance_that_does_not_exist_is_an_error() -> None:
    systems: tuple[ClusterSystem | OrderFactory, ...] = (ClusterSystem.TETRIS, fcfs)
    for name in systems:
        with pytest.raises(ValueError, match=r"^instance 2 does not exist, there are 2$"):
            serve([(0, 1)], system(name), 2, failures=(Failure(2, 0.0, 1.0),))
    with pytest.raises(ValueError, match="not simulated with this policy"):
        serve([(0, 1)], system(ClusterSystem.LOONGSERVE_IDLE), 2, failures=(Failure(0, 0.0, 1.0),))
    with pytest.raises(ValueError, match="at 0 s or later and lasts"):
        Failure(0, 1.0, 0.0)


# ---- what holds for all ----


@pytest.mark.parametrize("name", list(ClusterSystem))
def test_a_prompt_without_room_is_refused(name: ClusterSystem) -> None:
    outcome = serve([(0, 300), (0, 100)], system(name, sp_size=2), 2, kv_tokens=100)
    assert [request.key for request in outcome.refused] == [0]
    assert [one.request.key for one in outcome.served] == [1]


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    name=st.sampled_from(list(ClusterSystem)),
    gaps_s=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=25),
    tokens=st.lists(st.integers(600, 150_000), min_size=25, max_size=25),
    failures=st.lists(st.tuples(st.integers(0, 15), st.floats(0, 20), st.floats(0.1, 30)), max_size=3),
    chunk_s=st.none() | st.floats(0.1, 5.0),
)
def test_every_request_is_served_once_and_no_instance_does_two_things_at_a_time(
    name: ClusterSystem,
    gaps_s: list[float],
    tokens: list[int],
    failures: list[tuple[int, float, float]],
    chunk_s: float | None,
) -> None:
    candidates = fitted_candidates()
    requests, now_s = [], 0.0
    for gap_s, length in zip(gaps_s, tokens, strict=False):
        now_s += gap_s
        requests.append((now_s, length))
    down = tuple(Failure(*one) for one in failures) if SystemOptions(name).system.can_fail else ()
    options = SystemOptions(name, sp_size=4, improvement_rate=0.3, chunk_s=chunk_s)
    outcome = serve(requests, options, 16, candidates, down)
    assert sorted(one.request.key for one in outcome.served) == list(range(len(requests)))
    assert not outcome.refused
    assert not outcome.unfinished
    for one in outcome.served:
        assert one.start_s >= one.request.arrival_s - 1e-9
        fastest_s = min(candidate.cost.predict_s(0, one.request.new_tokens) for candidate in candidates)
        assert one.first_token_s - one.start_s >= fastest_s - 1e-6
    by_instance: dict[int, list[tuple[float, float]]] = {}
    for busy in outcome.timeline:
        by_instance.setdefault(busy.instance, []).append((busy.start_s, busy.end_s))
    for intervals in by_instance.values():
        for (_, end_s), (start_s, _) in pairwise(sorted(intervals)):
            assert start_s >= end_s - 1e-6


@pytest.mark.slow
def test_equal_input_gives_equal_outcome() -> None:
    requests = [(0.05 * number, 700 * (number % 9 + 1)) for number in range(60)]
    for name in ClusterSystem:
        first, second = (serve(requests, system(name, sp_size=1), 2) for _ in range(2))
        assert first.served == second.served
        assert first.events == second.events


def test_sizes_beyond_the_cluster_are_left_out() -> None:
    spec, loop = ClusterSpec(1), EventLoop()
    with pytest.raises(ValueError, match=r"^the engine's smallest SP size is 2, the cluster has 1 instances$"):
        build_cluster(SystemOptions(ClusterSystem.TETRIS), loop, spec, PAIR[1:], None)  # type: ignore[arg-type]
    assert ttfts_s(serve([(0, 1000)], system(ClusterSystem.LOONGSERVE), 1)) == pytest.approx([1.0])
    with pytest.raises(ValueError, match=r"^instances: 0 is less than 1$"):
        ClusterSpec(0)
