"""A ragged prefill batch in the static tensors that a captured graph reads.

Tokens stay packed at the front, so the batch keeps its order and the tail of the forward pass runs on the batch
itself. Padded tokens have id 0 and position 0 and write to slot 0 of the KV pool, which no request has; padded
requests have no tokens and no prefix, so attention does nothing for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ext_kernels import triton_support


class RaggedBatch(NamedTuple):
    """A prefill batch as the engine has it, T tokens of R requests, and what of it the CPU knows."""

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    cache_slots: torch.Tensor  # [T], where in the KV pool each token goes
    rows: torch.Tensor  # [R], of the table
    new_lens: torch.Tensor  # [R], tokens to compute
    prefix_lens: torch.Tensor  # [R], tokens before them
    table: torch.Tensor  # [rows, longest request] int32: KV slot of each position
    longest_prefix_tokens: int


class PaddedBatch(NamedTuple):
    """Static tensors for up to T tokens of up to B requests; int64 unless noted."""

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    cache_slots: torch.Tensor  # [T]
    rows: torch.Tensor  # [B]
    new_lens: torch.Tensor  # [B]
    prefix_lens: torch.Tensor  # [B]
    total_lens: torch.Tensor  # [B]
    starts: torch.Tensor  # [B], first token of each request
    qo_indptr: torch.Tensor  # [B + 1], running sum of new_lens
    kv_indptr: torch.Tensor  # [B + 1] int32, running sum of prefix_lens
    kv_indices: torch.Tensor  # [prefix tokens at most], KV slots of all prefixes one after the other

    def of(self, tokens: int, requests: int) -> PaddedBatch:
        """The leading part of each, for a smaller shape: the same memory."""
        lengths = (tokens,) * 3 + (requests,) * 5 + (requests + 1,) * 2 + (self.kv_indices.numel(),)
        return PaddedBatch._make(x[:length] for x, length in zip(self, lengths, strict=True))


class Prefixes(NamedTuple):
    """The cached tokens that a layer reads for the requests of a batch, by their slots in the layer's KV pool."""

    indptr: torch.Tensor  # [B + 1] int32, where each request's slots begin
    indices: torch.Tensor  # [tokens at most] int64, request by request; undefined behind the last


def prefixes_in_window(batch: PaddedBatch, window: int) -> Prefixes:
    """Return the last `window` cached tokens of each request. Shapes depend on those of `batch` only, and nothing is
    read back from a device, so a captured pass computes it again."""
    indptr = torch.zeros_like(batch.kv_indptr)
    torch.cumsum(batch.prefix_lens.clamp(max=window), 0, dtype=indptr.dtype, out=indptr[1:])
    requests, slots = batch.rows.numel(), batch.kv_indices.numel()
    places = torch.arange(min(requests * window, slots), dtype=indptr.dtype, device=indptr.device)
    request = torch.searchsorted(indptr, places, right=True).sub_(1).clamp_(max=requests - 1)
    sources = (batch.kv_indptr[1:] - indptr[1:])[request] + places  # both lists of a request end with its last token
    return Prefixes(indptr, batch.kv_indices[sources.clamp_(max=slots - 1)])


def allocate(tokens: int, requests: int, prefix_tokens: int, device: torch.device | str) -> PaddedBatch:
    """Static tensors of zeros: an empty batch."""

    lengths = (tokens,) * 3 + (requests,) * 5 + (requests + 1,) * 2 + (max(1, prefix_tokens),)
    dtypes = [torch.int32 if name == "kv_indptr" else torch.int64 for name in PaddedBatch._fields]
    return PaddedBatch._make(
        torch.zeros(length, dtype=dtype, device=device) for length, dtype in zip(lengths, dtypes, strict=True)
    )


def pad_batch_(padded: PaddedBatch, batch: RaggedBatch) -> None:
    """Fill `padded`, in place, with `batch` and padding. Reads nothing back from a device.

    `padded` must hold the batch, its prefixes included: that is the caller's to check, from lengths on the CPU.
    """
    if triton_support.runs_on(padded.ids):
        from sglang_ext_kernels.on_gpu import moving_kernels as kernel

        kernel.pad_batch(tuple(batch[:7]), tuple(padded), batch.longest_prefix_tokens)
    else:
        pad_batch_reference_(padded, batch)


def pad_batch_reference_(padded: PaddedBatch, batch: RaggedBatch) -> None:
    """The same in plain torch, for the CPU and for tests."""
    tokens, requests = batch.ids.numel(), batch.rows.numel()
    for static, live in zip(padded[:3], batch[:3], strict=True):
        static[:tokens] = live
        static[tokens:] = 0
    for static, live in zip(padded[3:6], batch[3:6], strict=True):
        static[:requests] = live
        static[requests:] = 0
    torch.add(padded.new_lens, padded.prefix_lens, out=padded.total_lens)
    padded.qo_indptr[0] = padded.kv_indptr[0] = 0
    padded.qo_indptr[1:] = padded.new_lens.cumsum(0)
    padded.kv_indptr[1:] = padded.prefix_lens.cumsum(0)
    padded.starts[:] = padded.qo_indptr[:-1]
    for row, prefix, first in zip(
        batch.rows.tolist(), batch.prefix_lens.tolist(), padded.kv_indptr.tolist()[:requests], strict=True
    ):
        padded.kv_indices[first : first + prefix] = batch.table[row, :prefix]


def fill_page_table_(
    pages: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, page_size: int
) -> None:
    """Write to `pages` [R, pages at most] int32, in place, the pages of each request in their order.

    `table` [rows, longest request] int32 is the KV slot of each position, `rows` and `lens` [R] int64 say where a
    request stands in it and how many tokens it has, no more than `pages` holds. A page is `page_size` slots that follow
    each other. What lies behind a request's last page stays as it is. Reads nothing back from a device.
    """
    if triton_support.runs_on(pages):
        from sglang_ext_kernels.on_gpu import moving_kernels as kernel

        kernel.fill_page_table(pages, table, rows, lens, page_size)
    else:
        for number, (row, tokens) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
            slots = table[row, :tokens:page_size]
            pages[number, : slots.numel()] = slots // page_size
