"""The class at and around a boundary, and when an estimate leaves it open."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.length_class import FixedBoundary, classify, is_in_doubt
from sglang_ext.types import LengthClass


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
