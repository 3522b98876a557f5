"""The order in which lines leave."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.batch.decide.line_order import PREFIX_BYTES, estimate_tokens, prefix_key, token_ranges
from sglang_ext.types import LengthClass


@given(st.binary(max_size=3000))
def test_the_key_is_bounded(prompt: bytes) -> None:
    assert len(prefix_key(prompt)) <= 20
    assert len(prefix_key(b"x" * 1_000_000)) == 20


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.binary(max_size=80)), max_size=40))
def test_prompts_that_share_leading_blocks_are_adjacent(parts: list[tuple[int, int, bytes]]) -> None:
    """Whatever the input's order: for every block length, prompts of the same first block are one run."""
    prompts = [bytes([system]) * 300 + bytes([example]) * 800 + tail for system, example, tail in parts]
    ordered = sorted(prompts, key=prefix_key)
    for size in PREFIX_BYTES[:3]:
        runs = [block for block, _ in groupby(prompt[:size] for prompt in ordered if len(prompt) >= size)]
        assert len(runs) == len(set(runs))


def test_a_prompt_is_as_long_as_its_tokens_or_a_quarter_of_its_bytes() -> None:
    assert estimate_tokens(0) == 1
    assert estimate_tokens(2048) == 512
    assert estimate_tokens(2049) == 513
    assert estimate_tokens(10, known_tokens=700) == 700


def test_classes_cover_every_length_once() -> None:
    assert token_ranges(None) == {None: (0, None)}
    ranges = token_ranges(512)
    assert ranges == {LengthClass.SHORT: (0, 513), LengthClass.LONG: (513, None)}
    with pytest.raises(ValueError, match="length_boundary_tokens"):
        token_ranges(-1)
