"""The examples of Tetris, section 2.4: 16 instances of LLaMA3-8B on two nodes, with Table 1's own entries."""

from __future__ import annotations

import pytest

from baselines.tetris_planner import CdspPlanner, CdspRequest, ChunkPlan, PlannerConfig
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from support.cdsp_cases import queue_delays_after, tabulated_candidates

K = 1024


def snapshot(delays_s: tuple[float, ...]) -> PrefillSnapshot:
    return PrefillSnapshot((0,) * 8 + (1,) * 8, delays_s, (10**6,) * 16)


def plan(
    tokens: int, delays_s: tuple[float, ...], rate: float, is_chunking: bool = True, sizes: tuple[int, ...] = ()
) -> ChunkPlan:
    candidates = tuple(one for one in tabulated_candidates() if not sizes or one.size in sizes)
    planner = CdspPlanner(PlannerConfig(candidates, is_chunking=is_chunking))
    made = planner.plan(snapshot(delays_s), CdspRequest(tokens), rate)
    assert isinstance(made, ChunkPlan)
    return made


@pytest.mark.parametrize(("rate", "first_s", "second_s"), [(0.0, 1.53, 1.84), (0.05, 1.58, 1.31)])
def test_32k_then_16k_after_a_second(rate: float, first_s: float, second_s: float) -> None:
    """Greedy expansion gives (1.53, 1.84); SP 8 for the 32k request, whose SP 16 gains only 3%, (1.58, 1.31)."""
    first = plan(32 * K, (1.0,) * 16, rate)
    second = plan(16 * K, queue_delays_after(first, (1.0,) * 16), rate)
    assert first.ttft_s == pytest.approx(first_s, abs=1e-9)
    assert second.ttft_s == pytest.approx(second_s, abs=1e-9)
    assert [len(chunk.instances) for chunk in first.chunks] == [16 if rate == 0 else 8]
    assert [len(chunk.instances) for chunk in second.chunks] == [8]
    if rate > 0:
        assert not set(first.chunks[0].instances) & set(second.chunks[0].instances)


def test_16k_before_128k_on_whole_requests() -> None:
    """SP 16 lets eight instances idle for 0.31 s; the eight idle ones alone take 1.34 s longer."""
    first = plan(16 * K, (0.0,) * 16, 0.05)
    assert len(first.chunks[0].instances) == 8
    assert first.ttft_s == pytest.approx(0.31, abs=1e-9)
    delays = queue_delays_after(first, (0.0,) * 16)

    wide = plan(128 * K, delays, 0.05, is_chunking=False)
    assert len(wide.chunks[0].instances) == 16
    assert wide.chunks[0].start_s == pytest.approx(0.31, abs=1e-9)
    narrow = plan(128 * K, delays, 0.05, is_chunking=False, sizes=(8,))
    assert narrow.chunks[0].start_s == 0.0
    assert narrow.ttft_s - wide.ttft_s == pytest.approx(1.34, abs=1e-9)


def test_16k_before_128k_in_chunks() -> None:
    """The idle eight do what Table 1 lets them do in 0.31 s, 16k tokens, then all sixteen go on without a wait."""
    delays = queue_delays_after(plan(16 * K, (0.0,) * 16, 0.05), (0.0,) * 16)
    chunked = plan(128 * K, delays, 0.05)
    assert [(chunk.start_token, chunk.tokens, len(chunk.instances)) for chunk in chunked.chunks] == [
        (0, 16 * K, 8),
        (16 * K, 112 * K, 16),
    ]
    assert chunked.chunks[0].start_s == 0.0
    assert chunked.chunks[0].compute_s == pytest.approx(0.31, abs=1e-9)
    assert chunked.chunks[1].start_s == pytest.approx(0.31, abs=1e-9)
    # T_16(16k, 112k) = T_16(0, 128k) - T_16(0, 16k) + T_16(0, 0), the last by continuing 4k and 8k.
    assert chunked.ttft_s == pytest.approx(0.31 + 2.31 - 0.46 + 0.35, abs=1e-9)
