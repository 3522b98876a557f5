"""Pipeline or ring: what each takes, which one is chosen, and the figures that were found by hand before."""

from __future__ import annotations

import pytest

from sglang_ext.costs.engine_profile import PipelineCosts
from sglang_ext.costs.flow_shop import Hop, Stages
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.packed_batch import stage_share
from sglang_ext.long_pool.decide.sp_cost import SpCost
from sglang_ext.long_pool.decide.table1 import fitted_cost
from sglang_ext.planner.sizing.pool_shape import (
    PoolShape,
    RingLinks,
    ShapeChoice,
    ShapeCosts,
    ShapeQuestion,
    choose_shape,
    measured_cost,
    ring_cost,
)

ALONE, PIPELINE, RING = PoolShape
TABLE1 = fitted_cost(1)
LINKS = RingLinks(131_072, 25e9, 0.0, 32)


def stages_of(cost: SpCost, count: int, hop: Hop) -> PipelineCosts:
    whole = CostCoefficients(cost.d_s_per_token2, cost.b_s_per_token, 0.0, cost.a_s)
    return PipelineCosts(Stages(count, hop), whole.times(1 / count), None)


def table1_choice(devices: int, chunk_s: float, chunk_tokens: int | None = None, tokens: int = 131_072) -> ShapeChoice:
    costs = ShapeCosts(
        devices,
        measured_cost(TABLE1),
        stages_of(TABLE1, devices, Hop(0.002)),
        measured_cost(fitted_cost(devices)),
    )
    return choose_shape(costs, ShapeQuestion(tokens, chunk_s, chunk_tokens))


@pytest.mark.parametrize(
    ("devices", "ratios"),
    [(2, (1.00, 0.96, 0.91, 0.83)), (4, (1.30, 1.04, 0.84, 0.65)), (8, (3.14, 1.77, 1.00, 0.57))],
)
def test_ring_over_pipeline_as_reckoned_by_hand(devices: int, ratios: tuple[float, ...]) -> None:
    """Table 1, 128K tokens, 2 ms a hop, chunks of 2K to 16K. By hand every chunk was given its hop's time in full."""
    for chunk_tokens, ratio in zip((2048, 4096, 8192, 16384), ratios, strict=True):
        times = table1_choice(devices, 1.0, chunk_tokens).times
        assert times[RING].prompt_s / times[PIPELINE].prompt_s == pytest.approx(ratio, rel=0.03)


def test_small_chunks_want_a_pipeline_and_large_ones_a_ring() -> None:
    assert [table1_choice(8, chunk_s).better for chunk_s in (0.1, 0.25, 1.0, 2.0)] == [PIPELINE, PIPELINE, RING, RING]
    fine, coarse = table1_choice(8, 0.1), table1_choice(8, 2.0)
    assert fine.times[PIPELINE].prompt_s < 0.2 * fine.times[RING].prompt_s
    assert coarse.times[RING].prompt_s < 0.7 * coarse.times[PIPELINE].prompt_s
    assert "chunks of the ring cost" in fine.reason
    assert "; its chunks, of 512 tokens at least, take up to " in fine.reason
    assert "at least" not in coarse.reason


def test_a_stage_gets_the_time_by_which_short_prompts_wait_as_long() -> None:
    choice = table1_choice(4, 0.5)
    assert choice.times[PIPELINE].longest_chunk_s == pytest.approx(0.5 * stage_share(4), rel=0.01)
    assert choice.times[RING].longest_chunk_s == pytest.approx(0.5, rel=0.01)


def test_of_two_that_are_alike_the_one_that_carries_more() -> None:
    choice = table1_choice(2, 0.5)
    ring, pipeline = choice.times[RING], choice.times[PIPELINE]
    assert ring.prompt_s < pipeline.prompt_s < 1.05 * ring.prompt_s
    assert choice.better is (RING if ring.prompts_per_s > pipeline.prompts_per_s else PIPELINE)
    assert choice.reason.startswith("alike within 5%, it carries more prompts")


def test_a_short_prompt_gains_nothing_by_either() -> None:
    choice = table1_choice(8, 0.5, tokens=100)
    assert choice.better is ALONE
    assert choice.reason.startswith("it is one chunk on one instance, and apart they carry")
    assert choice.times[ALONE].prompts_per_s == pytest.approx(8 / choice.times[ALONE].prompt_s)


def test_a_slow_link_is_the_rings_loss() -> None:
    """Keys and values of the whole prefix go round for every chunk; a pipeline hands activations on."""
    alone = SpCost(0.01, 2e-5, 2e-10, 1e-10)
    pipeline = stages_of(alone, 4, Hop.over_link(16_384, 1e10, 0.0))
    by_links = {
        gb_per_s: choose_shape(
            ShapeCosts(
                4, measured_cost(alone), pipeline, ring_cost(alone, 4, LINKS._replace(bytes_per_s=gb_per_s * 1e9))
            ),
            ShapeQuestion(131_072, 1.0),
        )
        for gb_per_s in (10, 1000)
    }
    assert by_links[10].better is PIPELINE
    assert by_links[10].times[RING].prompt_s > 2 * by_links[1000].times[RING].prompt_s


def test_a_ring_that_was_not_measured() -> None:
    alone = SpCost(0.01, 1e-5, 2e-8, 1e-8)
    hidden = ring_cost(alone, 4, LINKS._replace(bytes_per_s=1e15))
    assert hidden(8192, 0) == pytest.approx(0.01 + 8192 * (1e-5 + 1e-8 * 8192) / 4)
    bare = ring_cost(SpCost(0.01, 1e-5, 0.0, 0.0), 4, LINKS._replace(step_s=1e-5))
    round_s = 131_072 * 10_000 * 0.75 / 25e9 + 32 * 3 * 1e-5
    assert bare(2000, 8000) == pytest.approx(0.01 + 2000 * 1e-5 / 4 + round_s)
    assert ring_cost(alone, 1, LINKS)(500, 100) == pytest.approx(alone.predict_s(100, 500))


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="a pipeline or a ring has at least two devices, got 1"):
        table1_choice(1, 0.5)
    with pytest.raises(ValueError, match="chunk_s must be above 0, got 0"):
        table1_choice(2, 0.0)
