"""Among how many programs a prefix is divided."""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels.prefix_attention import MAX_SPLITS, PROGRAMS, SplitSizes, splits_of

QWEN_7B = (28, 4, 128, torch.bfloat16)


@pytest.mark.parametrize(
    ("length", "requests", "sizes"),
    [
        (8, 1, SplitSizes(32, 64, 64)),  # 56 rows: one tile of each of the 4 key heads
        (16, 1, SplitSizes(32, 64, 64)),
        (16, 4, SplitSizes(8, 64, 64)),
        (64, 4, SplitSizes(2, 64, 64)),
        (64, 8, SplitSizes(1, 64, 64)),
        (256, 64, SplitSizes(1, 64, 64)),
    ],
)
def test_of_a_7b_model(length: int, requests: int, sizes: SplitSizes) -> None:
    assert splits_of(length, requests, *QWEN_7B) == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_no_more_programs_than_multiprocessors_where_it_divides(size: int, dtype: torch.dtype) -> None:
    for length in (1, 8, 64, 256):
        for requests in (1, 3, 64):
            for heads, kv_heads in ((28, 4), (8, 8), (64, 1)):
                sizes = splits_of(length, requests, heads, kv_heads, size, dtype)
                tiles = -(-length * (heads // kv_heads) // sizes.rows)
                assert 1 <= sizes.splits <= MAX_SPLITS
                assert sizes.splits == 1 or tiles * requests * kv_heads * sizes.splits <= PROGRAMS
