"""What the times of parts say of ranges of layers: nothing is lost, and there are not too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.endpoint.part_times import MAX_RANGES, MAX_RANGES_OF_TOKENS, PartTime, layer_ranges


def streamed(layers: int, chunk: int = 0, first_token: int = 0, tokens: int = 10, at_s: float = 0.0) -> list[PartTime]:
    """One part per layer, each ready a second after the one before, written half a second later."""
    return [PartTime(chunk, first_token, tokens, layer, 1, at_s + layer, at_s + layer + 0.5) for layer in range(layers)]


def test_a_part_of_all_layers_is_one_range() -> None:
    assert layer_ranges([PartTime(0, 0, 7, 0, 12, 1.0, 2.0)]) == [(7, 0, 12, 1.0, 2.0)]


def test_metadata_is_no_range() -> None:
    assert layer_ranges([PartTime(0, 0, 0, 0, 12, 1.0, 2.0)]) == []


def test_layers_that_came_one_by_one_are_joined() -> None:
    ranges = layer_ranges(streamed(16))
    assert ranges == [(10, 2 * number, 2, 2.0 * number, 2 * number + 1.5) for number in range(8)]


def test_the_rest_of_a_stream_is_a_part_beside_its_layers() -> None:
    ranges = layer_ranges([*streamed(2), PartTime(0, 0, 10, 2, 6, 5.0, 7.0)])
    assert [(one.first_layer, one.layer_count) for one in ranges] == [(0, 1), (1, 1), (2, 6)]


@pytest.mark.slow
@given(st.integers(1, 80), st.integers(1, 60))
def test_every_layer_of_all_tokens_is_in_one_range_and_there_are_few(layers: int, chunks: int) -> None:
    parts = [part for chunk in range(chunks) for part in streamed(layers, chunk, at_s=100.0 * chunk)]
    ranges = layer_ranges(parts)
    assert len(ranges) <= max(MAX_RANGES, chunks)
    assert len(ranges) <= MAX_RANGES_OF_TOKENS * chunks
    assert sum(one.layer_count for one in ranges) == layers * chunks
    assert [one.ready_s for one in ranges] == sorted(one.ready_s for one in ranges)
    assert min(one.ready_s for one in ranges) == 0.0
    assert max(one.written_s for one in ranges) == 100.0 * (chunks - 1) + layers - 0.5
