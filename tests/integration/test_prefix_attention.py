"""Attention of a CPU engine's new tokens behind a cached prefix, against SGLang's own."""

from __future__ import annotations

from support.prefix_attention import Batch, differences

PREFIXED = [
    Batch(((63, 1),), 4, 4),
    Batch(((40, 24), (0, 7), (5, 1)), 6, 2),
    Batch(((1, 30), (100, 3)), 9, 3),
]


def test_it_is_what_sglang_computes() -> None:
    found = differences(PREFIXED)
    assert [one.was_asked for one in found] == [False] * len(PREFIXED)
    assert max(one.largest for one in found) < 1e-5


def test_half_precision_is_rounded_once() -> None:
    (found,) = differences([PREFIXED[1]._replace(dtype="bfloat16")])
    assert found.largest < 2e-2


def test_prompts_without_a_prefix_are_sglangs() -> None:
    (found,) = differences([Batch(((0, 20), (0, 3)), 4, 2)])
    assert found == (0.0, True)
