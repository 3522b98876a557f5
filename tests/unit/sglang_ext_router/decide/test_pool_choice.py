"""The class at and around a boundary, and when an estimate leaves it open."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import LengthClass, Role
from sglang_ext_router.decide.pool_choice import FixedBoundary, choose_pool, classify, is_in_doubt


@dataclass(frozen=True)
class SlopedBoundary:
    """Shrinks with the cache, as a fitted one may."""

    def new_tokens_limit(self, cached_tokens: int) -> int:
        return max(0, 512 - cached_tokens // 4)


def test_the_limit_itself_is_short() -> None:
    assert classify(512, 0, FixedBoundary(512)) is LengthClass.SHORT
    assert classify(513, 0, FixedBoundary(512)) is LengthClass.LONG


def test_the_boundary_sees_the_cached_tokens() -> None:
    assert classify(400, 0, SlopedBoundary()) is LengthClass.SHORT
    assert classify(400, 1000, SlopedBoundary()) is LengthClass.LONG


@pytest.mark.parametrize("limit", [0, -5])
def test_a_boundary_without_short_prefills_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="limit_tokens must be at least 1"):
        FixedBoundary(limit)


@given(low=st.integers(0, 2000), width=st.integers(0, 500), cached=st.integers(0, 2000), limit=st.integers(1, 1000))
def test_in_doubt_means_that_the_ends_differ(low: int, width: int, cached: int, limit: int) -> None:
    boundary = FixedBoundary(limit)
    classes = {classify(tokens - cached, cached, boundary) for tokens in range(low, low + width + 1)}
    assert is_in_doubt(low, low + width, cached, boundary) == (len(classes) == 2)


BOUNDARY = FixedBoundary(512)
SHORT, LONG, BOTH = Role.SHORT, Role.LONG, Role.BOTH


@pytest.mark.parametrize(
    ("prompt_tokens", "length_class", "candidates"),
    [(512, LengthClass.SHORT, (0, 2)), (513, LengthClass.LONG, (1, 2))],
)
def test_without_a_cache_the_class_chooses(
    prompt_tokens: int, length_class: LengthClass, candidates: tuple[int, ...]
) -> None:
    choice = choose_pool(prompt_tokens, [SHORT, LONG, BOTH], [0, 0, 0], BOUNDARY, allow_spill=False)
    assert choice == (length_class, candidates, False)


def test_a_long_prompt_is_short_where_most_of_it_is_cached() -> None:
    choice = choose_pool(2000, [SHORT, SHORT, LONG], [1800, 0, 0], BOUNDARY, allow_spill=False)
    assert choice == (LengthClass.SHORT, (0, 2), False)


def test_a_short_re_prefill_may_run_on_the_long_instance_that_holds_the_prefix() -> None:
    choice = choose_pool(2000, [LONG], [1800], BOUNDARY, allow_spill=False)
    assert choice == (LengthClass.SHORT, (0,), False)


def test_a_holder_stays_a_candidate_beside_an_idle_instance_of_its_pool() -> None:
    choice = choose_pool(2000, [LONG, LONG], [1984, 0], BOUNDARY, allow_spill=False)
    assert choice == (LengthClass.SHORT, (0, 1), False)


def test_a_short_prompt_does_not_go_to_the_long_instance_that_holds_some_of_it() -> None:
    choice = choose_pool(500, [SHORT, LONG], [0, 400], BOUNDARY, allow_spill=False)
    assert choice == (LengthClass.SHORT, (0,), False)


def test_the_holders_help_out_rather_than_anybody() -> None:
    choice = choose_pool(4000, [SHORT, SHORT], [0, 1000], BOUNDARY, allow_spill=True)
    assert choice == (LengthClass.LONG, (1,), True)


def test_another_pool_helps_out_only_if_it_may() -> None:
    assert choose_pool(2000, [SHORT, SHORT], [0, 0], BOUNDARY, allow_spill=True) == (LengthClass.LONG, (0, 1), True)
    assert choose_pool(2000, [SHORT, SHORT], [0, 0], BOUNDARY, allow_spill=False).candidates == ()


def test_no_instances() -> None:
    assert choose_pool(2000, [], [], BOUNDARY, allow_spill=True).candidates == ()


@pytest.mark.slow
@given(
    instances=st.lists(st.tuples(st.sampled_from([SHORT, LONG, BOTH]), st.integers(0, 3000)), max_size=6),
    prompt_tokens=st.integers(1, 3000),
)
def test_without_spill_the_long_pool_takes_long_prompts_and_the_short_pool_what_is_short_there(
    instances: list[tuple[Role, int]], prompt_tokens: int
) -> None:
    roles = [role for role, _ in instances]
    cached = [min(tokens, prompt_tokens - 1) for _, tokens in instances]
    choice = choose_pool(prompt_tokens, roles, cached, BOUNDARY, allow_spill=False)
    is_long = classify(prompt_tokens, 0, BOUNDARY) is LengthClass.LONG
    expected = []
    for position, (role, held) in enumerate(zip(roles, cached, strict=True)):
        is_short_there = classify(prompt_tokens - held, held, BOUNDARY) is LengthClass.SHORT
        if role is BOTH or (role is LONG and is_long) or (role is SHORT and is_short_there):
            expected.append(position)
    assert choice.candidates == tuple(expected)
    assert not choice.is_spilled
