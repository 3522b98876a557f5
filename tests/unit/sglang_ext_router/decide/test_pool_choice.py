"""The class at and around a boundary, and when an estimate leaves it open."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import LengthClass, Role
from sglang_ext_router.decide.pool_choice import (
    EVERY_CLASS,
    FixedBoundary,
    FixedBounds,
    PoolChoice,
    ServedClasses,
    choose_decode_pool,
    classes_of_role,
    classify,
    is_in_doubt,
)
from sglang_ext_router.decide.pool_choice import choose_pool as choose_among


@dataclass(frozen=True)
class SlopedBoundary:
    """Shrinks with the cache, as a fitted one may."""

    def class_of(self, new_tokens: int, cached_tokens: int) -> int:
        return int(new_tokens > max(0, 512 - cached_tokens // 4))


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


def choose_pool(
    prompt_tokens: int, roles: list[Role], cached: list[int], boundary: FixedBoundary, allow_spill: bool
) -> tuple[LengthClass, tuple[int, ...], bool]:
    """Choose among instances of the two default classes."""
    choice = choose_among(prompt_tokens, [classes_of_role(role) for role in roles], cached, boundary, allow_spill)
    return list(LengthClass)[choice.class_number], choice.candidates, choice.is_spilled


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
    assert choose_pool(2000, [SHORT, SHORT], [0, 0], BOUNDARY, allow_spill=False)[1] == ()


def test_no_instances() -> None:
    assert choose_pool(2000, [], [], BOUNDARY, allow_spill=True)[1] == ()


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
    assert choice[1:] == (tuple(expected), False)


NARROW = FixedBounds((100, 1000, 5000))


@pytest.mark.parametrize(("new_tokens", "number"), [(1, 0), (100, 0), (101, 1), (1000, 1), (1001, 2), (5001, 3)])
def test_a_class_holds_its_upper_bound(new_tokens: int, number: int) -> None:
    assert NARROW.class_of(new_tokens, 0) == number
    served = [ServedClasses(own, own) for own in range(4)]
    assert choose_among(new_tokens, served, [0] * 4, NARROW, False) == PoolChoice(number, (number,), False)
    assert choose_decode_pool(number, served, False) == [number]


def test_of_many_classes_those_between_the_uncached_and_the_cached_one_take_a_later_turn() -> None:
    served = [ServedClasses(own, own) for own in (0, 1, 2, 3)]
    # 4,000 tokens, of which instance 0 has all but 50, and instance 1 half: too many are left there.
    assert choose_among(4000, served, [3950, 2000, 0, 0], NARROW, False) == PoolChoice(0, (0, 2), False)


def test_the_nearest_class_helps_out() -> None:
    served = [ServedClasses(0, 0), ServedClasses(2, 2), ServedClasses(3, 3)]
    assert choose_among(500, served, [0, 0, 0], NARROW, False).candidates == ()
    assert choose_among(500, served, [0, 0, 0], NARROW, True) == PoolChoice(1, (0, 1), True)
    assert choose_among(9000, served[:2], [0, 0], NARROW, True) == PoolChoice(3, (1,), True)
    assert choose_decode_pool(1, served, False) == []
    assert choose_decode_pool(3, served[:2], True) == [1]
    assert choose_decode_pool(3, [], True) == []


@given(
    limits=st.lists(st.integers(1, 3000), unique=True, max_size=5).map(sorted),
    tokens=st.integers(1, 4000),
    first=st.integers(0, 5),
    more=st.integers(0, 3),
    cached=st.integers(0, 3999),
)
def test_an_instance_is_a_candidate_if_it_serves_a_class_between(
    limits: list[int], tokens: int, first: int, more: int, cached: int
) -> None:
    bounds, cached = FixedBounds(tuple(limits)), min(cached, tokens - 1)
    served = [ServedClasses(first, first + more), EVERY_CLASS]
    choice = choose_among(tokens, served, [cached, 0], bounds, False)
    there = sum(limit < tokens - cached for limit in limits)
    uncached = sum(limit < tokens for limit in limits)
    between = set(range(there, uncached + 1)) & set(range(first, first + more + 1))
    assert choice.candidates == ((0, 1) if between else (1,))
    assert choice.class_number == there


@given(limit=st.integers(1, 1000), tokens=st.integers(1, 2000), cached=st.lists(st.integers(0, 1999), max_size=4))
def test_two_classes_are_short_and_long(limit: int, tokens: int, cached: list[int]) -> None:
    held = [min(one, tokens - 1) for one in cached]
    served = [classes_of_role((SHORT, LONG)[number % 2]) for number in range(len(held))]
    named = choose_among(tokens, served, held, FixedBoundary(limit), True)
    assert named == choose_among(tokens, served, held, FixedBounds((limit,)), True)
