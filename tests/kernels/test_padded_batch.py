"""The static tensors of a captured shape after a ragged batch, whatever was in them before."""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch, allocate, pad_batch_, pad_batch_reference_


def batch(device: str, new: list[int], prefix: list[int], dtype: torch.dtype = torch.int64) -> RaggedBatch:
    tokens = sum(new)

    def whole(values: list[int] | range, kind: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=kind, device=device)

    return RaggedBatch(
        ids=whole(range(100, 100 + tokens)),
        positions=whole([p + i for n, p in zip(new, prefix, strict=True) for i in range(n)]),
        cache_slots=whole(range(500, 500 + tokens)),
        rows=whole(range(len(new), 0, -1)),
        new_lens=whole(new, dtype),
        prefix_lens=whole(prefix, dtype),
        table=torch.arange(1000, 1000 + 9 * 40, dtype=torch.int32, device=device).view(9, 40),
        longest_prefix_tokens=max(prefix),
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("new", "prefix"), [([1], [0]), ([3, 8, 1], [0, 0, 0]), ([3, 8, 1], [7, 0, 33]), ([2, 2, 2, 2], [1, 2, 3, 4])]
)
def test_it_is_the_reference(device: str, new: list[int], prefix: list[int], dtype: torch.dtype) -> None:
    static, wanted = allocate(32, 8, 100, device), allocate(32, 8, 100, device)
    for one in (static, wanted):
        for tensor in one:
            tensor.fill_(77)
    live = batch(device, new, prefix, dtype)
    pad_batch_(static, live)
    pad_batch_reference_(wanted, live)
    for name, got, expected in zip(PaddedBatch._fields, static, wanted, strict=True):
        assert torch.equal(got, expected), name


def test_by_hand(device: str) -> None:
    static = allocate(8, 4, 10, device).of(8, 4)
    pad_batch_(static, batch(device, [3, 2], [0, 4]))
    assert static.ids.tolist() == [100, 101, 102, 103, 104, 0, 0, 0]
    assert static.positions.tolist() == [0, 1, 2, 4, 5, 0, 0, 0]
    assert static.cache_slots.tolist() == [500, 501, 502, 503, 504, 0, 0, 0]
    assert static.rows.tolist() == [2, 1, 0, 0]
    assert static.new_lens.tolist() == [3, 2, 0, 0]
    assert static.total_lens.tolist() == [3, 6, 0, 0]
    assert static.starts.tolist() == [0, 3, 5, 5]
    assert static.qo_indptr.tolist() == [0, 3, 5, 5, 5]
    assert static.kv_indptr.tolist() == [0, 0, 4, 4, 4]
    assert static.kv_indices[:4].tolist() == [1040, 1041, 1042, 1043]


def test_a_smaller_shape_is_the_same_memory(device: str) -> None:
    whole = allocate(16, 4, 10, device)
    part = whole.of(4, 2)
    assert [x.data_ptr() for x in part] == [x.data_ptr() for x in whole]
    assert (part.ids.numel(), part.rows.numel(), part.qo_indptr.numel()) == (4, 2, 3)
