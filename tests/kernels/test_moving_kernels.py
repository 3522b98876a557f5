"""The Triton kernels that move: KV out of a pool and back, a batch into static tensors."""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels.block_attention import gather_kv, scatter_kv_
from sglang_ext_kernels.padded_batch import (
    PaddedBatch,
    RaggedBatch,
    allocate,
    fill_page_table_,
    pad_batch_,
    pad_batch_reference_,
)


def pools(generator: torch.Generator, slots: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(2, slots, heads, size, generator=generator, device=generator.device)
    return both[0], both[1]


@pytest.mark.parametrize(("heads", "size"), [(1, 16), (3, 64), (8, 128), (12, 128)])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_a_pool_to_a_block_to_another_pool(generator: torch.Generator, tokens: int, heads: int, size: int) -> None:
    keys, values = pools(generator, 100, heads, size)
    slots = torch.randperm(100, generator=generator, device=keys.device)[:tokens]
    packed = gather_kv(keys, values, slots)
    assert torch.equal(packed, torch.stack([keys[slots], values[slots]]))
    other_keys, other_values = torch.zeros_like(keys), torch.zeros_like(values)
    target = torch.randperm(100, generator=generator, device=keys.device)[:tokens]
    scatter_kv_(other_keys, other_values, target, packed)
    assert torch.equal(other_keys[target], keys[slots])
    assert torch.equal(other_values[target], values[slots])
    others = torch.ones(100, dtype=torch.bool, device=keys.device)
    others[target] = False
    assert not other_keys[others].any()
    assert not other_values[others].any()


def test_no_tokens(generator: torch.Generator) -> None:
    keys, values = pools(generator, 4, 2, 16)
    none = torch.empty(0, dtype=torch.int64, device=keys.device)
    packed = gather_kv(keys, values, none)
    scatter_kv_(keys, values, none, packed)
    assert packed.shape == (2, 0, 2, 16)


def test_half_precision_is_moved_bit_by_bit(generator: torch.Generator) -> None:
    keys, values = (x.bfloat16() for x in pools(generator, 10, 2, 16))
    slots = torch.tensor([3, 9], device=keys.device)
    assert torch.equal(gather_kv(keys, values, slots)[1], values[slots])


def test_a_block_of_another_shape_is_refused(generator: torch.Generator) -> None:
    keys, values = pools(generator, 10, 2, 16)
    with pytest.raises(ValueError, match="is not KV of 1 tokens"):
        scatter_kv_(keys, values, torch.tensor([1]), torch.zeros(2, 2, 2, 16))
    with pytest.raises(ValueError, match="not of one pool"):
        gather_kv(keys, values[:5], torch.tensor([1]))


@pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 1), (1, 3)])
def test_some_heads_of_a_pool_are_a_pool(generator: torch.Generator, first: int, count: int) -> None:
    keys, values = pools(generator, 40, 4, 64)
    slots = torch.randperm(40, generator=generator, device=keys.device)[:17]
    heads = slice(first, first + count)
    packed = gather_kv(keys[:, heads], values[:, heads], slots)
    assert torch.equal(packed, torch.stack([keys[slots, heads], values[slots, heads]]))
    other_keys, other_values = torch.zeros_like(keys), torch.zeros_like(values)
    scatter_kv_(other_keys[:, heads], other_values[:, heads], slots, packed)
    wanted = torch.zeros_like(keys)
    wanted[slots, heads] = keys[slots, heads]
    assert torch.equal(other_keys, wanted)
    assert torch.equal(other_values[slots, heads], values[slots, heads])


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
def test_a_padded_batch_is_its_reference(device: str, new: list[int], prefix: list[int], dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_the_pages_of_requests(generator: torch.Generator, page_tokens: int) -> None:
    device = generator.device
    order = torch.randperm(400, generator=generator, device=device)[:, None] * page_tokens
    slots = (order + torch.arange(page_tokens, device=device)).view(5, -1).int()  # 80 pages of each
    rows = torch.tensor([3, 0, 2, 0], device=device)
    lens = torch.tensor([70, 1, 33, 0], device=device)
    pages = torch.full((4, 80), -1, dtype=torch.int32, device=device)
    fill_page_table_(pages, slots, rows, lens, page_tokens)
    for number, (row, tokens) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        count = -(-tokens // page_tokens)
        assert (
            pages[number, :count].tolist() == (slots[row, : count * page_tokens : page_tokens] // page_tokens).tolist()
        )
        assert (pages[number, count:] == -1).all()
