"""Which points are measured, and which are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.planner.profiling.points import AskedPoints, Point, PointError, PointLimits, choose_points

LIMITS = PointLimits(chunk_tokens=256, prompt_tokens=5000, kv_tokens=20_000, page_tokens=1, requests=32)


def test_the_default_is_powers_within_one_iteration() -> None:
    points = choose_points(AskedPoints(), LIMITS)
    lone = [point for point in points if point.requests == 1]
    assert {point.cached_tokens for point in lone} == {0, 256, 1024, 4096}
    assert {point.new_tokens for point in lone} == {8, 16, 32, 64, 128, 256}
    batches = [point for point in points if point.requests > 1]
    assert Point(0, 8, 32) in batches
    assert Point(0, 128, 2) in batches
    assert Point(0, 128, 4) not in batches  # more than a chunk
    assert Point(0, 8, 64) not in batches  # more than run at a time
    assert points == lone + batches


@pytest.mark.slow
@given(
    st.integers(16, 10_000),
    st.integers(32, 200_000),
    st.integers(1, 300),
    st.sampled_from([1, 16, 64, 512]),
    st.booleans(),
)
def test_every_default_point_fits_the_instance(
    chunk: int, prompt: int, requests: int, page: int, has_chunk: bool
) -> None:
    limits = PointLimits(chunk if has_chunk else None, prompt, prompt + 100, page, requests)
    points = choose_points(AskedPoints(), limits)
    assert len(points) == len(set(points)) > 0
    for point in points:
        assert point.prompt_tokens <= prompt
        assert point.cached_tokens % page == 0
        assert point.requests <= requests or point.requests == 1
        assert point.requests == 1 or point.cached_tokens == 0
        assert not has_chunk or point.new_tokens * point.requests <= chunk


def test_what_is_asked_for_is_measured() -> None:
    asked = AskedPoints(new_tokens=[100, 50, 50], cached_tokens=[0, 300], batch_tokens=[10], batch_sizes=[1, 3])
    assert choose_points(asked, LIMITS) == [
        Point(0, 50),
        Point(0, 100),
        Point(300, 50),
        Point(300, 100),
        Point(0, 10, 3),
    ]
    assert choose_points(AskedPoints([50], [0], batch_sizes=[1]), LIMITS) == [Point(0, 50)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            AskedPoints([257]),
            "points.new_tokens 257: chunked prefill cuts it, --chunked-prefill-size of the instance is 256",
        ),
        (AskedPoints([0]), "points.new_tokens must be at least 1, got 0"),
        (AskedPoints([8], [-1]), "points.cached_tokens must be at least 0, got -1"),
        (AskedPoints([8], [5000]), "points.cached_tokens 5000 with 8 new ones: a prompt has at most 5000 tokens"),
        (AskedPoints(None, [5000]), "points.cached_tokens 5000 with 1 new ones: a prompt has at most 5000 tokens"),
        (
            AskedPoints(batch_tokens=[200], batch_sizes=[2]),
            "points.batch_sizes 2 of points.batch_tokens 200: chunked prefill",
        ),
        (AskedPoints(batch_tokens=[2], batch_sizes=[40]), "the instance runs at most 32 requests at a time"),
        (AskedPoints(batch_sizes=[0]), "points.batch_sizes must be at least 1, got 0"),
    ],
)
def test_what_the_instance_cannot_run_is_refused(asked: AskedPoints, message: str) -> None:
    with pytest.raises(PointError) as caught:
        choose_points(asked, LIMITS)
    assert message in str(caught.value)


def test_a_prefix_is_whole_pages() -> None:
    limits = LIMITS._replace(page_tokens=64)
    assert choose_points(AskedPoints([8], [128], batch_sizes=[1]), limits) == [Point(128, 8)]
    with pytest.raises(PointError, match=r"points.cached_tokens 100 is not a multiple of the page size, 64"):
        choose_points(AskedPoints([8], [100]), limits)
