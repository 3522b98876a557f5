"""Simulated instances of several stages: against the flow-shop formula, and what shorts, failures and drains see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.costs.engine_profile import PipelineCosts
from sglang_ext.costs.flow_shop import NO_HOP, Chunk, Hop, Stages, completions_s, even_chunks
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.packed_batch import stage_share
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, LapsMode
from sglang_ext.planner.simulation.cluster_spec import Failure
from sglang_ext.planner.simulation.events import SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, IterationPolicy, LapsPolicy, QueueOrder
from sglang_ext.planner.simulation.run import Outcome, RunOptions, simulate
from sglang_ext.types import Role
from support.flow_shop import hop_stall_s, makespan_s

WHOLE = CostCoefficients(alpha_s=2e-9, token_s=1e-5, read_s=0.0, kappa_s=0.002)  # of an instance of one stage
CHUNK_TOKENS = 2048


def pipeline(stages: Stages) -> PipelineCosts:
    return PipelineCosts(stages, WHOLE.times(1 / stages.count), None)


def chunked(_: Role) -> IterationPolicy:
    return ChunkedPrefill(QueueOrder.FCFS, CHUNK_TOKENS)


def laps(stages: Stages, options: LapsOptions = LapsOptions()) -> Callable[[Role], IterationPolicy]:  # noqa: B008
    limits = InstanceLimits(1, 65_536, 65_536, 64, stages=stages.count)
    costs = pipeline(stages)
    return lambda role: LapsPolicy(
        Laps(replace(options, mode=LapsMode(role.value)), GraphGrid(), costs.coefficients, limits)
    )


def serve(
    requests: list[tuple[float, int]],
    stages: Stages,
    policy: Callable[[Role], IterationPolicy] = chunked,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
    roles: tuple[Role, ...] = (Role.BOTH,),
    kv_tokens: int = 1_000_000,
) -> Outcome:
    workload = [SimRequest(key, at_s, tokens, 1) for key, (at_s, tokens) in enumerate(requests)]
    spec = InstancesSpec(roles, WHOLE, kv_tokens, pipelines={role: pipeline(stages) for role in roles})
    return simulate(
        workload,
        lambda loop, listener: InstancePool(loop, spec, router_policy("round_robin"), policy, listener, 0, True),
        options,
    )


def ttfts_s(outcome: Outcome) -> list[float]:
    return [one.ttft_s for one in sorted(outcome.served, key=lambda one: one.request.key)]


def chunks_of(tokens: int, stages: Stages) -> list[Chunk]:
    return even_chunks(pipeline(stages).stage_s, tokens, CHUNK_TOKENS)


@settings(deadline=None)
@given(st.integers(1, 60_000), st.integers(1, 8), st.floats(0.0, 0.01))
def test_one_prompt_takes_what_the_formula_says(tokens: int, count: int, hop_s: float) -> None:
    chunks = chunks_of(tokens, Stages(count))
    (alone_s,) = ttfts_s(serve([(0, tokens)], Stages(count)))
    assert alone_s == pytest.approx(makespan_s(chunks, Stages(count)))
    hops = Stages(count, Hop(hop_s))
    (alone_s,) = ttfts_s(serve([(0, tokens)], hops))
    min_s = makespan_s(chunks, hops)
    assert min_s - 1e-9 <= alone_s <= min_s + hop_stall_s(chunks, hops) + 1e-9


def test_stages_of_unequal_speed() -> None:
    for relative in ((1.0, 0.5, 0.5), (0.4, 1.0, 0.7), (0.2, 0.3, 1.0)):
        stages = Stages(3, NO_HOP, relative)
        (alone_s,) = ttfts_s(serve([(0, 20_000)], stages))
        assert alone_s == pytest.approx(makespan_s(chunks_of(20_000, stages), stages))


def test_prompts_follow_each_other_without_a_gap() -> None:
    """Eight prompts at once: the pipeline is filled once, not for each."""
    stages = Stages(4)
    served = serve([(0, CHUNK_TOKENS)] * 8, stages)
    assert max(ttfts_s(served)) == pytest.approx(makespan_s(chunks_of(CHUNK_TOKENS, stages) * 8, stages))
    # Chunks that become dearer with their prefix leave gaps, prompt after prompt.
    served = serve([(0, 8192)] * 8, stages)
    assert max(ttfts_s(served)) == pytest.approx(completions_s(chunks_of(8192, stages) * 8, stages)[-1])
    assert max(ttfts_s(served)) > 1.2 * makespan_s(chunks_of(8192, stages) * 8, stages)


def test_a_chunk_begins_while_the_one_before_is_on_a_later_stage() -> None:
    stages = Stages(2)
    served = serve([(0, 3 * CHUNK_TOKENS)], stages)
    times_s = [chunk.time_s for chunk in chunks_of(3 * CHUNK_TOKENS, stages)]
    starts_s = [busy.start_s for busy in served.timeline]
    assert starts_s == pytest.approx([0.0, times_s[0], times_s[0] + times_s[1]])
    assert [sum(busy.tokens or 0 for busy in served.timeline)] == [3 * CHUNK_TOKENS]


def test_laps_cuts_chunks_of_equal_time() -> None:
    """All but the last take their budget on a stage, fewer tokens as the prefix grows."""
    stages = Stages(4)
    served = serve([(0, 60_000)], stages, laps(stages))
    times_s = [busy.end_s - busy.start_s for busy in served.timeline]
    tokens = [busy.tokens or 0 for busy in served.timeline]
    assert len(times_s) > 4
    assert max(times_s[:-2]) <= 1.02 * min(times_s[:-2])
    assert tokens[:-2] == sorted(tokens[:-2], reverse=True)
    chunks = [Chunk(time_s, count) for time_s, count in zip(times_s, tokens, strict=True)]
    assert ttfts_s(served) == pytest.approx([completions_s(chunks, stages)[-1]])
    assert ttfts_s(served) == pytest.approx([makespan_s(chunks, stages)], rel=1e-3)


def test_a_round_of_a_pipeline_has_its_share_of_the_time() -> None:
    """As LAPS in service: of the fifth of the objective 5 / (2 + 3 P) on each of P stages, half as much again alone."""
    options = LapsOptions(short_ttft_slo_ms=300.0)
    for count in (2, 4):
        served = serve([(0, 100_000)], Stages(count), laps(Stages(count), options))
        median_s = median(busy.end_s - busy.start_s for busy in served.timeline)
        assert median_s == pytest.approx(1.5 * 0.06 * stage_share(count), rel=0.05)


def test_chunks_of_a_prompt_grow_while_nothing_else_comes() -> None:
    served = serve([(0, 100_000)], Stages(1), laps(Stages(1), LapsOptions(short_ttft_slo_ms=300.0)))
    times_s = [busy.end_s - busy.start_s for busy in served.timeline]
    # Beyond half of the objective, what is left runs whole where it takes a tenth more than a chunk may.
    assert times_s[-2] == max(times_s[:-1])
    assert times_s[-2] > 3 * times_s[0]
    assert times_s[-1] <= 1.1 * times_s[-2]
    assert sum(busy.tokens or 0 for busy in served.timeline) == 100_000


def test_shorts_between_the_chunks_of_a_long_prompt_keep_their_objective() -> None:
    stages = Stages(4, Hop(0.001))
    options = LapsOptions(boundary_tokens=256, short_ttft_slo_ms=300.0)
    shorts = [(0.05 + 0.11 * number, 100) for number in range(6)]
    served = serve([(0, 100_000), *shorts], stages, laps(stages, options))
    long_s, *short_s = ttfts_s(served)
    assert max(short_s) <= 0.3
    # The long prompt pays for what the shorts compute, and no more.
    (alone_s,) = ttfts_s(serve([(0, 100_000)], stages, laps(stages, options)))
    rounds = len(served.timeline)
    assert alone_s <= long_s <= alone_s + len(shorts) * WHOLE.chunk_s(100, 0) + 0.002 * rounds
    assert [sum(busy.tokens or 0 for busy in served.timeline)] == [100_000 + 600]


def test_as_many_iterations_are_under_way_as_there_are_stages() -> None:
    """With a hop of ten times a chunk, P chunks enter, then the first one has to leave."""
    stages = Stages(2, Hop(1.0))
    chunk_s = pipeline(stages).stage_s(CHUNK_TOKENS, 0)
    served = serve([(0, CHUNK_TOKENS)] * 3, stages)
    starts_s = [busy.start_s for busy in served.timeline]
    assert starts_s == pytest.approx([0.0, chunk_s, 2 * chunk_s + 1.0])


def test_a_lost_pipeline_loses_what_is_on_its_way() -> None:
    stages = Stages(3, Hop(0.2))
    chunk_s = pipeline(stages).stage_s(1000, 0)
    failing = RunOptions(failures=(Failure(0, chunk_s + 0.1, 5.0),))
    served = serve([(0, 1000), (0.0, 2000)], stages, options=failing)
    assert not served.unfinished
    assert min(ttfts_s(served)) > 5.0  # the first one had left the first stage
    (unfinished,) = serve([(0, 1000)], stages, options=replace(failing, until_s=1.0)).unfinished
    assert unfinished.key == 0


def test_memory_is_held_until_a_prompt_has_left_the_last_stage() -> None:
    stages = Stages(2, Hop(1.0))
    served = serve([(0, 2000), (0, 2000)], stages, kv_tokens=3000)
    first_s, second_s = ttfts_s(served)
    assert second_s >= first_s + 1.0
    measured = replace(
        InstancesSpec((Role.BOTH,), WHOLE, 3000), pipelines={Role.BOTH: pipeline(stages)._replace(kv_tokens=5000)}
    )
    assert measured.max_kv_tokens(Role.BOTH) == 5000
    assert measured.max_kv_tokens(Role.LONG) == 3000


def test_pools_of_different_stages() -> None:
    """Short prompts go to one stage, long ones to four."""
    workload = [SimRequest(0, 0.0, 100, 1), SimRequest(1, 0.0, 40_000, 1)]
    stages = Stages(4)
    spec = InstancesSpec((Role.SHORT, Role.LONG), WHOLE, pipelines={Role.LONG: pipeline(stages)})
    served = simulate(
        workload,
        lambda loop, listener: InstancePool(loop, spec, router_policy("round_robin"), chunked, listener, 0, False),
    )
    assert ttfts_s(served) == pytest.approx([WHOLE.chunk_s(100, 0), makespan_s(chunks_of(40_000, stages), stages)])
