"""Instances that compute prompts alone: SGLang's orders and routers by hand, LAPS on the same queue, pool moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, LapsMode
from sglang_ext.planner.simulation.cluster_spec import Failure
from sglang_ext.planner.simulation.events import SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import (
    ChunkedPrefill,
    Iteration,
    IterationPolicy,
    LapsPolicy,
    QueueOrder,
    Slice,
    WorkItem,
)
from sglang_ext.planner.simulation.run import Outcome, RunOptions, simulate
from sglang_ext.types import Role
from sglang_ext_router.decide.instance_pressure import PressureSettings

COSTS = CostCoefficients(alpha_s=0.0, token_s=1e-3, read_s=0.0, kappa_s=0.1)
LIMITS = InstanceLimits(page_tokens=1, max_chunk_tokens=1000, max_batch_tokens=1000, max_requests=64)
BOTH = (Role.BOTH,)


def chunked(order: QueueOrder) -> Callable[[Role], IterationPolicy]:
    return lambda _: ChunkedPrefill(order, 1000)


def laps(role: Role) -> IterationPolicy:
    return LapsPolicy(Laps(LapsOptions(mode=LapsMode(role.value)), GraphGrid(), COSTS, LIMITS))


def serve(
    requests: list[tuple[float, int]],
    policy: Callable[[Role], IterationPolicy],
    roles: tuple[Role, ...] = BOTH,
    router: str = "round_robin",
    kv_tokens: int = 1_000_000,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
) -> Outcome:
    """Serve (arrival, tokens) to the end."""
    workload = [SimRequest(key, at_s, tokens, 1) for key, (at_s, tokens) in enumerate(requests)]
    spec = InstancesSpec(roles, COSTS, kv_tokens)
    return simulate(
        workload,
        lambda loop, listener: InstancePool(loop, spec, router_policy(router), policy, listener, 0, True),
        options,
    )


def ttfts_s(outcome: Outcome) -> list[float]:
    return [one.ttft_s for one in sorted(outcome.served, key=lambda one: one.request.key)]


# ---- orders ----


def test_fcfs_fills_the_chunk_behind_a_cut_prompt() -> None:
    # 1000 in 1.1 s, 1000 in 1.1 s, then 500 + 300 in 0.9 s.
    outcome = serve([(0, 2500), (0, 300)], chunked(QueueOrder.FCFS))
    assert ttfts_s(outcome) == pytest.approx([3.1, 3.1])
    assert [busy.end_s for busy in outcome.timeline] == pytest.approx([1.1, 2.2, 3.1])


def test_shortest_prefill_first_takes_its_room_from_a_cut_prompt() -> None:
    # 1000, then 700 + the 300, then 800.
    assert ttfts_s(serve([(0, 2500), (0, 300)], chunked(QueueOrder.SHORTEST_PREFILL_FIRST))) == pytest.approx(
        [3.1, 2.2]
    )


def test_shortest_prefill_first_cuts_the_next_once_the_cut_prompt_is_complete() -> None:
    # 1000 of A; the other 500, all of C (400) and 100 of B; the rest of B.
    requests = [(0, 1500), (0.1, 900), (0.2, 400)]
    outcome = serve(requests, chunked(QueueOrder.SHORTEST_PREFILL_FIRST))
    assert [busy.end_s for busy in outcome.timeline] == pytest.approx([1.1, 2.2, 3.1])
    assert ttfts_s(outcome) == pytest.approx([2.2, 3.0, 2.0])


def test_hrrn_orders_by_tokens_waited_over_own_tokens() -> None:
    # While 1000 are computed, 900 and 200 wait: ratios 1.11 and 5. So 200 + 800 of the 900, then the last 100.
    requests = [(0, 1000), (0.1, 900), (0.2, 200)]
    assert ttfts_s(serve(requests, chunked(QueueOrder.HRRN))) == pytest.approx([1.1, 2.3, 2.0])
    assert ttfts_s(serve(requests, chunked(QueueOrder.FCFS))) == pytest.approx([1.1, 2.1, 2.2])


# ---- routers ----


def test_round_robin_takes_turns_and_least_loaded_looks() -> None:
    requests = [(0, 1000), (0, 10), (0, 10)]
    assert ttfts_s(serve(requests, chunked(QueueOrder.FCFS), BOTH * 2))[2] == pytest.approx(1.21)
    assert ttfts_s(serve(requests, chunked(QueueOrder.FCFS), BOTH * 2, "least_loaded"))[2] == pytest.approx(0.22)


@pytest.mark.slow
def test_predicted_wait_counts_what_a_running_iteration_has_done() -> None:
    """Behind `least_loaded` an instance that is about to end a large batch looks busier than one that has begun."""
    draw = Random(3)
    requests, now_s = [], 0.0
    for _ in range(2000):
        now_s += draw.expovariate(18)
        requests.append((now_s, draw.randint(20, 300)))

    def mean_s(router: str) -> float:
        return fmean(ttfts_s(serve(requests, chunked(QueueOrder.FCFS), BOTH * 4, router)))

    assert mean_s("predicted_wait") < 0.95 * mean_s("least_loaded")


def test_a_router_sends_short_and_long_prompts_to_their_pools() -> None:
    outcome = serve([(0, 100), (0, 900), (0, 100), (0, 900)], laps, (Role.SHORT, Role.LONG), "least_loaded")
    assert {(busy.instance, busy.key % 2) for busy in outcome.timeline} == {(0, 0), (1, 1)}


def test_unknown_routers_and_pools_without_an_instance_for_a_class_are_errors() -> None:
    with pytest.raises(ValueError, match=r"^unknown router 'best'; choose one of predicted_wait, "):
        router_policy("best")
    with pytest.raises(ValueError, match=r"^roles: no instance serves long prompts$"):
        InstancesSpec((Role.SHORT,), COSTS)
    with pytest.raises(ValueError, match=r"^roles: one prefill role for each instance"):
        InstancesSpec((), COSTS)
    with pytest.raises(ValueError, match=r"^chunk_tokens must be at least 1, got 0$"):
        ChunkedPrefill(QueueOrder.FCFS, 0)


# ---- LAPS ----


def test_laps_serves_a_short_prompt_between_the_chunks_of_a_long_one() -> None:
    requests = [(0.0, 8000), (0.5, 50)]
    fcfs, ours = (serve(requests, policy) for policy in (chunked(QueueOrder.FCFS), laps))
    assert ttfts_s(fcfs)[1] > 7
    assert ttfts_s(ours)[1] < 2


def test_laps_computes_every_token_once() -> None:
    requests = [(0.02 * number, 40 if number % 5 else 1500) for number in range(100)]
    outcome = serve(requests, laps)
    assert len(outcome.served) == 100
    busy_s = sum(busy.end_s - busy.start_s for busy in outcome.timeline)
    assert busy_s == pytest.approx(1e-3 * sum(tokens for _, tokens in requests) + 0.1 * len(outcome.timeline))


# ---- memory, failures, invariants ----


def test_a_prompt_larger_than_the_memory_is_refused_and_others_are_served() -> None:
    outcome = serve([(0, 501), (0, 400), (0, 400)], chunked(QueueOrder.FCFS), kv_tokens=500)
    assert [request.key for request in outcome.refused] == [0]
    assert ttfts_s(outcome) == pytest.approx([0.5, 1.0])


def test_a_failed_instance_gives_its_requests_back_to_the_router() -> None:
    options = RunOptions(failures=(Failure(0, 0.5, 5.0),))
    outcome = serve([(0, 900), (0, 900)], chunked(QueueOrder.FCFS), BOTH * 2, options=options)
    assert ttfts_s(outcome) == pytest.approx([2.0, 1.0])


def test_requests_wait_when_no_instance_is_there() -> None:
    options = RunOptions(failures=(Failure(0, 0.5, 2.0),))
    outcome = serve([(0, 900), (1.0, 400)], chunked(QueueOrder.FCFS), options=options)
    # From 2.5 s on, 900, and the 400 that came meanwhile: 900 + 100, then 300. Or each as it was handed over.
    assert len(outcome.served) == 2
    assert ttfts_s(outcome)[0] == pytest.approx(3.5)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from([*QueueOrder, "laps"]),
    requests=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 3000)), min_size=1, max_size=25),
    failures=st.lists(st.tuples(st.integers(0, 1), st.floats(0, 6), st.floats(0.1, 4)), max_size=2),
)
def test_every_prompt_is_served_once(
    kind: QueueOrder | str, requests: list[tuple[float, int]], failures: list[tuple[int, float, float]]
) -> None:
    policy = chunked(kind) if isinstance(kind, QueueOrder) else laps
    options = RunOptions(failures=tuple(Failure(*one) for one in failures))
    outcome = serve(sorted(requests), policy, BOTH * 2, "least_loaded", 5000, options)
    assert sorted(one.request.key for one in outcome.served) == list(range(len(requests)))
    for one in outcome.served:
        assert one.first_token_s - one.start_s >= 1e-3 * one.request.new_tokens + 0.1 - 1e-9


# ---- pool moves ----


@pytest.mark.slow
def test_the_controller_moves_instances_to_the_pool_that_is_pressed() -> None:
    requests = [(0.25 * number, 900) for number in range(600)]  # four instances' worth, all long
    roles = (Role.SHORT,) * 4 + (Role.LONG,) * 2
    still = serve(requests, laps, roles, "least_loaded")
    options = RunOptions(pressure=PressureSettings())
    moved = serve(requests, laps, roles, "least_loaded", options=options)
    sizes = moved.pool_sizes
    assert (sizes[0].short, sizes[0].long) == (4, 2)
    assert all(size.short + size.long == 6 and size.short >= 1 for size in sizes)
    assert sizes[-1].long > 2
    assert max(ttfts_s(moved)) < max(ttfts_s(still))


def test_pool_moves_need_pools_of_one_class() -> None:
    options = RunOptions(pressure=PressureSettings())
    with pytest.raises(ValueError, match="need instances of short and long pools with the laps policy"):
        serve([(0, 1)], laps, options=options)


class OnOneGraph(ChunkedPrefill):
    """Runs everything that waits on one captured graph."""

    def __init__(self, requests: int, tokens: int) -> None:
        super().__init__(QueueOrder.FCFS, 1000)
        self._shape = requests, tokens
        self.samples: list[IterationSample] = []

    def choose(self, items: Sequence[WorkItem], free_kv_tokens: int, computed_tokens: int, now_s: float) -> Iteration:
        slices = tuple(Slice(item, item.new_tokens) for item in items)
        return Iteration(slices, float("inf"), *self._shape)

    def note_end(self, sample: IterationSample, ended: Sequence[WorkItem], now_s: float) -> None:
        self.samples.append(sample)


@pytest.mark.parametrize(
    ("tokens", "computed"),
    [
        ((30, 20), [64, 64, 64, 64]),  # empty seats are computed too
        ((10, 20, 30, 40, 50), [10, 20, 30, 40, 50, 106]),  # more and shorter ones than the graph has seats
    ],
)
def test_a_captured_graph_computes_its_padding(tokens: tuple[int, ...], computed: list[int]) -> None:
    """The engine notes what the requests are, and all tokens of the shape."""
    costs = COSTS._replace(alpha_s=1e-6, replayed=CostCoefficients(1e-6, 1e-4, 0.0, 0.01))
    policy = OnOneGraph(4, 64)
    # The first one arrives alone, and what comes meanwhile runs together.
    workload = [SimRequest(0, 0.0, 64, 1), *(SimRequest(1 + at, 0.001, one, 1) for at, one in enumerate(tokens))]
    simulate(
        workload,
        lambda loop, listener: InstancePool(
            loop, InstancesSpec(BOTH, costs), router_policy("round_robin"), lambda _: policy, listener, 0, False
        ),
        RunOptions(),
    )
    _, sample = policy.samples
    assert (sample.new_tokens, sample.requests, sample.is_replayed) == (256, len(tokens), True)
    assert sample.attention_work == sum(one * one for one in tokens)
    assert sample.duration_s == pytest.approx(0.01 + 256e-4 + 1e-6 * sum(one * one for one in computed))
