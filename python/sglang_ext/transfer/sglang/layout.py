"""Describes where a rank's KV lies, and what of it which decode rank gets: pools, slots of pages, heads of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.transfer.decide.shards import HeadLayout, plan_head_moves
from sglang_ext.transfer.pool_layout import ItemBuffer, LayerBuffers, PoolLayout, Slots, StatePart
from sglang_ext.transfer.sglang.transfer_backend import RECURRENT, WINDOWS


class PoolArguments(Protocol):
    """The fields of `KVArgs` that say where a pool of keys and values lies.

    Buffers of keys come first, one per layer, then those of values; latent rows have one buffer per layer. The last
    `num_draft_entries` are a draft model's, for the same slots. Their `kv_item_lens` are bytes per page. Of each kind
    of extra state there is a list of buffers; of each buffer of recurrent states, the size of the axis that is divided
    over ranks, how many rows of an item come before that axis, and, where the axis holds several things of which each
    is divided by itself, their sizes on all ranks together.
    """

    kv_cache_dtype_str: str
    page_size: int
    num_draft_entries: int
    kv_data_ptrs: Sequence[int]
    kv_data_lens: Sequence[int]
    kv_item_lens: Sequence[int]
    aux_data_ptrs: Sequence[int]
    aux_data_lens: Sequence[int]
    aux_item_lens: Sequence[int]
    state_types: Sequence[object]
    state_data_ptrs: Sequence[Sequence[int]]
    state_data_lens: Sequence[Sequence[int]]
    state_item_lens: Sequence[Sequence[int]]
    state_dim_per_tensor: Sequence[Sequence[int]]
    state_slice_outer_counts: Sequence[Sequence[int]]
    state_conv_shard_groups: Sequence[Sequence[Sequence[int] | None]]


class Mamba2Convolution(NamedTuple):
    """Describes what a state of Mamba 2's convolution holds on all ranks together: inputs, and behind them B and C, for
    each group as many numbers as a head's state has."""

    inputs: int
    groups: int
    state_size: int

    def parts(self, ranks: int) -> list[tuple[int, bool]] | None:
        """Return for each part how many numbers a rank has and whether those of all ranks are the same: SGLang gives
        each rank a copy where there is one group. None where it does not divide them."""
        has_one_group = self.groups == 1
        if self.inputs % ranks or (self.groups % ranks and not has_one_group):
            return None
        of_groups = self.groups // (1 if has_one_group else ranks) * self.state_size
        return [(self.inputs // ranks, False), (of_groups, has_one_group), (of_groups, has_one_group)]


def pool_layout(
    arguments: PoolArguments,
    heads: HeadLayout,
    rank: int,
    first_layer: int = 0,
    *,
    is_latent: bool = False,
    convolution: Mamba2Convolution | None = None,
) -> PoolLayout:
    """Return where a rank's KV, metadata and extra states lie, from this layer of the model on. All buffers of a draft
    model are one layer behind the model's: they are written after all of these.

    Raises ValueError when the pool does not hold the rank's heads.
    """
    kv_token_bytes = [item_bytes // arguments.page_size for item_bytes in arguments.kv_item_lens]
    kv = _buffers(arguments.kv_data_ptrs, arguments.kv_data_lens, kv_token_bytes)
    count = model_layers(arguments, is_latent=is_latent)
    kv, draft = kv[: len(kv) - arguments.num_draft_entries], kv[len(kv) - arguments.num_draft_entries :]
    layers: list[LayerBuffers] = [tuple(kv[layer::count]) for layer in range(count)]
    layers += [tuple(draft)] if draft else []
    states: list[tuple[ItemBuffer, ...]] = []
    by_head = windows_by_head(arguments, heads)
    kinds = zip(arguments.state_data_ptrs, arguments.state_data_lens, arguments.state_item_lens, strict=True)
    for is_cut, (addresses, lengths, item_bytes) in zip(by_head, kinds, strict=True):
        token_bytes = [size_bytes // arguments.page_size for size_bytes in item_bytes] if is_cut else item_bytes
        states.append(tuple(_buffers(addresses, lengths, token_bytes)))
    return PoolLayout(
        arguments.kv_cache_dtype_str,
        first_layer,
        tuple(layers),
        heads.first_head(rank),
        heads.heads_per_rank,
        tuple(_buffers(arguments.aux_data_ptrs, arguments.aux_data_lens, arguments.aux_item_lens)),
        tuple(states),
        by_head if any(by_head) else (),
        states_in_parts(arguments, heads, convolution) if layers else (),
        rank,
        heads.tp_size,
        bool(draft),
    )


def model_layers(arguments: PoolArguments, *, is_latent: bool) -> int:
    """Return how many layers of the model itself have buffers here."""
    return (len(arguments.kv_data_ptrs) - arguments.num_draft_entries) // (1 if is_latent else 2)


def windows_by_head(arguments: PoolArguments, heads: HeadLayout) -> tuple[bool, ...]:
    """Return per kind of extra state whether ranks hold consecutive heads of its rows, as of those of other layers.

    So it is with sliding windows, unless their layers have a number of heads that does not go into that of the others.
    """
    unit = arguments.page_size * heads.heads_per_rank
    kinds = zip(arguments.state_types, arguments.state_item_lens, strict=True)
    return tuple(
        getattr(kind, "value", kind) == WINDOWS and all(size_bytes % unit == 0 for size_bytes in item_bytes)
        for kind, item_bytes in kinds
    )


def states_in_parts(
    arguments: PoolArguments, heads: HeadLayout, convolution: Mamba2Convolution | None
) -> tuple[tuple[tuple[StatePart, ...], ...], ...]:
    """Return per kind of extra state and buffer the parts of which each rank has an equal piece, or all; none at all
    unless ranks hold equal pieces of the KV heads, too: a rank sends its pieces together with its heads.

    `convolution`: what SGLang's arguments do not say of a model of Mamba 2.
    """
    if heads.kv_heads % heads.tp_size:
        return ()
    kinds = [
        _recurrent_parts(arguments, kind, heads.tp_size, convolution)
        if getattr(name, "value", name) == RECURRENT
        else ()
        for kind, name in enumerate(arguments.state_types)
    ]
    return tuple(kinds) if any(kinds) else ()


def _recurrent_parts(
    arguments: PoolArguments, kind: int, ranks: int, convolution: Mamba2Convolution | None
) -> tuple[tuple[StatePart, ...], ...]:
    sizes, groups = arguments.state_dim_per_tensor[kind], arguments.state_conv_shard_groups[kind]
    of_mamba2 = convolution.parts(ranks) if convolution is not None else None
    mamba2_size = sum(size for size, _ in of_mamba2 or ())
    if not all(sizes) or (not any(groups) and len(set(sizes)) > 1 and mamba2_size not in sizes):
        return ()
    buffers = []
    rows = arguments.state_slice_outer_counts[kind]
    for size, row_count, group, item_bytes in zip(sizes, rows, groups, arguments.state_item_lens[kind], strict=True):
        if any(whole % ranks for whole in group or ()):
            return ()
        if group is not None:
            parts = [(whole // ranks, False) for whole in group]
        else:
            parts = of_mamba2 if of_mamba2 and size == mamba2_size else [(size, False)]
        if sum(width for width, _ in parts) != size:
            return ()
        each_bytes = item_bytes // (size * row_count)
        buffers.append(tuple(_parts_of_rows(parts, row_count, each_bytes)))
    return tuple(buffers)


def _parts_of_rows(parts: Sequence[tuple[int, bool]], row_count: int, each_bytes: int) -> Iterator[StatePart]:
    """Yield the parts of each row, one behind the other: of each how many numbers, and whether all ranks have it."""
    offset_bytes = 0
    for width, is_on_all_ranks in [*parts] * row_count:
        yield StatePart(offset_bytes, width * each_bytes, is_on_all_ranks)
        offset_bytes += width * each_bytes


def state_slots(
    indices: Sequence[npt.NDArray[np.integer[npt.NBitBase]]], by_head: Sequence[bool], page_size: int
) -> tuple[Slots, ...]:
    """Return the slots of extra states, per kind: of tokens where rows are cut by heads, else items as SGLang has
    them."""
    if not indices:
        return ()
    return tuple(
        token_slots(kind, page_size) if is_cut else np.asarray(kind, np.uint32)
        for kind, is_cut in zip(indices, by_head, strict=True)
    )


def token_slots(pages: npt.NDArray[np.integer[npt.NBitBase]], page_size: int) -> Slots:
    """The slots of the tokens of these pages, in order; the last page counts as full."""
    first = np.asarray(pages, np.int64)[:, None] * page_size
    return (first + np.arange(page_size)).reshape(-1).astype(np.uint32)


def _buffers(addresses: Sequence[int], lengths: Sequence[int], item_bytes: Sequence[int]) -> list[ItemBuffer]:
    return [
        ItemBuffer(address, size_bytes, length // size_bytes)
        for address, length, size_bytes in zip(addresses, lengths, item_bytes, strict=True)
    ]


class Share(NamedTuple):
    """The share of one prefill rank for one decode rank: consecutive heads (none to a rank of padding only)."""

    decode_rank: int
    first_head: int
    head_count: int
    has_metadata: bool  # the first output token and the like come from exactly one prefill rank, of the first stage
    sender_count: int  # prefill ranks of one stage that send KV to this decode rank


def cpu_head_layout(kv_heads: int, tp_size: int) -> HeadLayout:
    """Return how SGLang's CPU engine spreads a model's heads: padded to a multiple of the ranks."""
    return HeadLayout(kv_heads, tp_size, -(-kv_heads // tp_size) * tp_size)


def latent_layout(tp_size: int) -> HeadLayout:
    """Return how latent rows (MLA) are spread: like the one KV head of a model, which every rank holds."""
    return HeadLayout(1, tp_size, 1)


def gpu_head_layout(kv_heads: int, tp_size: int) -> HeadLayout:
    """Return how SGLang spreads them over GPUs: with more ranks than heads, consecutive ranks hold the same one."""
    return HeadLayout(kv_heads, tp_size, kv_heads)


def is_spread_alike(draft: HeadLayout, model: HeadLayout) -> bool:
    """Return whether each rank holds the same part of a draft model's heads as of the model's, with whose rows its own
    are cut."""
    return all(
        draft_heads * model.stored_kv_heads == heads * draft.stored_kv_heads
        for draft_heads, heads in (
            (draft.heads_per_rank, model.heads_per_rank),
            *((draft.first_head(rank), model.first_head(rank)) for rank in range(model.tp_size)),
        )
    )


@lru_cache(maxsize=64)
def shares_of(prefill_rank: int, prefill: HeadLayout, decode: HeadLayout) -> tuple[Share, ...]:
    """Return what a prefill rank sends, by decode rank. Raises ValueError when the layouts are of different models."""
    moves = plan_head_moves(prefill, decode)
    shares = []
    for decode_rank in range(decode.tp_size):
        theirs = [move for move in moves if move.decode_rank == decode_rank]
        senders = list(dict.fromkeys(move.prefill_rank for move in theirs))
        metadata_sender = senders[0] if senders else decode_rank % prefill.tp_size
        mine = [move for move in theirs if move.prefill_rank == prefill_rank]
        if mine or metadata_sender == prefill_rank:
            shares.append(
                Share(
                    decode_rank,
                    mine[0].first_head if mine else decode.first_head(decode_rank),
                    sum(move.head_count for move in mine),
                    metadata_sender == prefill_rank,
                    max(1, len(senders)),
                )
            )
    return tuple(shares)
