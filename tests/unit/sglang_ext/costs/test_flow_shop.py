"""The flow-shop formula against the longest path through all chunks and stages, and chunks of equal time."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.costs.flow_shop import (
    NO_HOP,
    Chunk,
    Hop,
    Stages,
    completions_s,
    equal_time_chunks,
    even_chunks,
    prompts_per_s,
)
from support.flow_shop import hop_stall_s, makespan_s

TIMES_S = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=6)
RELATIVE = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4)


def longest_path_s(chunks: list[Chunk], stages: Stages) -> float:
    """By trying every order in which the last chunk's way through the stages can be held up.

    A path takes each of the P - 1 hops with some chunk, of which the numbers never fall; on a stage it goes through
    all chunks between the two hops.
    """
    last = len(chunks) - 1
    longest_s = 0.0
    for hops in combinations_with_replacement(range(len(chunks)), stages.count - 1):
        total_s, first = 0.0, 0
        for stage, share in enumerate(stages.shares):
            end = hops[stage] if stage < len(hops) else last
            total_s += sum(chunk.time_s for chunk in chunks[first : end + 1]) * share
            if stage < len(hops):
                total_s += stages.hop.time_s(chunks[end].tokens)
            first = end
        longest_s = max(longest_s, total_s)
    return longest_s


def recurrence_s(chunks: list[Chunk], stages: Stages) -> list[float]:
    """Cell by cell, with no more chunks under way than stages."""
    done_s: list[list[float]] = []
    for number, chunk in enumerate(chunks):
        row: list[float] = []
        for stage, share in enumerate(stages.shares):
            left_s = done_s[number - stages.count][-1] if stage == 0 and number >= stages.count else 0.0
            before_s = row[-1] + stages.hop.time_s(chunk.tokens) if row else left_s
            free_s = done_s[-1][stage] if done_s else 0.0
            row.append(max(before_s, free_s) + chunk.time_s * share)
        done_s.append(row)
    return [row[-1] for row in done_s]


def of(times_s: list[float]) -> list[Chunk]:
    return [Chunk(time_s, 100 + 7 * number) for number, time_s in enumerate(times_s)]


@pytest.mark.slow
@given(TIMES_S, st.integers(1, 4), st.floats(0.0, 0.5), st.floats(0.0, 1e-3))
def test_equal_stages_take_the_sum_and_the_dearest_chunk_on_each_further_stage(
    times_s: list[float], count: int, fixed_s: float, token_s: float
) -> None:
    stages = Stages(count, Hop(fixed_s, token_s))
    assert makespan_s(of(times_s), stages) == pytest.approx(longest_path_s(of(times_s), stages))


@pytest.mark.slow
@given(TIMES_S, RELATIVE, st.floats(0.0, 0.5))
def test_unequal_stages_take_the_longest_path(times_s: list[float], relative: list[float], fixed_s: float) -> None:
    slowest = max(relative)
    stages = Stages(len(relative), Hop(fixed_s), tuple(one / slowest for one in relative))
    assert makespan_s(of(times_s), stages) == pytest.approx(longest_path_s(of(times_s), stages))


@pytest.mark.slow
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12), st.integers(1, 4), st.floats(0.0, 0.5))
def test_one_chunk_for_each_stage_under_way_costs_hops_alone(growth_s: list[float], count: int, hop_s: float) -> None:
    """Of chunks that grow with their prefix; without hops it costs nothing."""
    times_s = [0.1 + sum(growth_s[: number + 1]) for number in range(len(growth_s))]
    chunks, stages = of(times_s), Stages(count, Hop(hop_s))
    whole_s = completions_s(chunks, stages)[-1]
    assert makespan_s(chunks, stages) <= whole_s + 1e-9
    assert whole_s <= makespan_s(chunks, stages) + hop_stall_s(chunks, stages) + 1e-9
    assert completions_s(chunks, Stages(count))[-1] == pytest.approx(makespan_s(chunks, Stages(count)))


@pytest.mark.slow
@given(TIMES_S, RELATIVE, st.floats(0.0, 0.5))
def test_completions_follow_the_recurrence(times_s: list[float], relative: list[float], hop_s: float) -> None:
    slowest = max(relative)
    stages = Stages(len(relative), Hop(hop_s), tuple(one / slowest for one in relative))
    chunks = of(times_s) * 3
    assert completions_s(chunks, stages) == pytest.approx(recurrence_s(chunks, stages))
    assert makespan_s(chunks, stages) <= completions_s(chunks, stages)[-1] + 1e-9


@pytest.mark.slow
@given(TIMES_S, RELATIVE)
def test_prompts_behind_each_other_take_the_slowest_stages_time(times_s: list[float], relative: list[float]) -> None:
    slowest = max(relative)
    stages = Stages(len(relative), NO_HOP, tuple(one / slowest for one in relative))
    chunks = of(times_s)
    prompts = 40
    unlimited_s = makespan_s(chunks * prompts, stages) - makespan_s(chunks * (prompts // 2), stages)
    assert prompts_per_s(chunks) == pytest.approx((prompts - prompts // 2) / unlimited_s)


def test_equal_chunks_by_hand() -> None:
    chunks = [Chunk(2.0, 10)] * 5
    assert makespan_s(chunks, Stages(3, Hop(0.5, 0.01))) == pytest.approx(7 * 2.0 + 2 * 0.6)
    assert Stages(3, Hop(0.5), (0.5, 1.0, 0.25)).passage_s(Chunk(2.0, 10)) == pytest.approx(3.5 + 1.0)
    assert makespan_s([], Stages(3)) == 0.0
    assert hop_stall_s(chunks, Stages(2, Hop(0.5))) == pytest.approx(2 * 0.5)
    assert completions_s(chunks, Stages(2, Hop(0.5))) == pytest.approx([4.5, 6.5, 9.0, 11.0, 13.5])
    # A dear chunk and three cheap ones: the first stage waits for the dear one to leave.
    mixed = [Chunk(4.0, 10), *[Chunk(1.0, 10)] * 3] * 10
    assert makespan_s(mixed, Stages(4)) == pytest.approx(10 * 7.0 + 12.0)
    assert completions_s(mixed, Stages(4))[-1] > 160.0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((0,), "a pipeline has at least one stage, got 0"),
        ((2, Hop(-1.0)), "the time of a hop must be at least 0"),
        ((2, NO_HOP, (1.0,)), "relative times of 2 stages are as many numbers"),
        ((2, NO_HOP, (0.5, 0.9)), "the largest 1"),
    ],
)
def test_what_is_no_pipeline(stages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stages(*stages)
    with pytest.raises(ValueError, match="bytes_per_s must be above 0, got 0"):
        Hop.over_link(1, 0, 0)


# ---- chunks ----


def growing_s(new_tokens: int, cached_tokens: int) -> float:
    return 0.01 + new_tokens * (1e-4 + 1e-7 * cached_tokens + 5e-8 * new_tokens)


@pytest.mark.slow
@given(st.integers(1, 60_000), st.floats(0.02, 2.0), st.integers(1, 64), st.integers(1, 200))
def test_chunks_of_equal_time(prompt_tokens: int, budget_s: float, page_tokens: int, min_tokens: int) -> None:
    chunks = equal_time_chunks(
        growing_s, prompt_tokens, budget_s, page_tokens=page_tokens, min_tokens=min_tokens, max_tokens=5000
    )
    assert sum(chunk.tokens for chunk in chunks) == prompt_tokens
    least_tokens = -(-min_tokens // page_tokens) * page_tokens
    done = 0
    for number, chunk in enumerate(chunks):
        assert chunk.time_s == growing_s(chunk.tokens, done)
        assert chunk.time_s <= budget_s or chunk.tokens <= least_tokens
        if number < len(chunks) - 1:
            assert chunk.tokens % page_tokens == 0
            more = chunk.tokens + page_tokens
            assert growing_s(more, done) > budget_s or more > 5000 or chunk.tokens == least_tokens
        done += chunk.tokens
    whole = [chunk.tokens for chunk in chunks[:-1]]
    assert whole == sorted(whole, reverse=True)


def test_even_chunks() -> None:
    chunks = even_chunks(growing_s, 2500, 1000)
    assert [chunk.tokens for chunk in chunks] == [1000, 1000, 500]
    assert [chunk.time_s for chunk in chunks] == [growing_s(1000, 0), growing_s(1000, 1000), growing_s(500, 2000)]
    with pytest.raises(ValueError, match="must be at least 1"):
        even_chunks(growing_s, 0, 10)
