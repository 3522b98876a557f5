"""SGLang's description of a KV pool (`KVArgs`) as the handshake's: rows are token slots, not pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.kv_transfer.pool_layout import ItemBuffer, LayerBuffers, PoolLayout, Slots
from sglang_ext.policy.handshake.shards import HeadLayout


class PoolArguments(Protocol):
    """The fields of `KVArgs` that say where a pool of keys and values lies.

    Buffers of keys come first, one per layer, then those of values. Their `kv_item_lens` are bytes per page.
    """

    kv_cache_dtype_str: str
    page_size: int
    kv_data_ptrs: Sequence[int]
    kv_data_lens: Sequence[int]
    kv_item_lens: Sequence[int]
    aux_data_ptrs: Sequence[int]
    aux_data_lens: Sequence[int]
    aux_item_lens: Sequence[int]


def pool_layout(arguments: PoolArguments, heads: HeadLayout, rank: int) -> PoolLayout:
    """Where a rank's KV and metadata lie. Raises ValueError when the pool does not hold the rank's heads."""
    kv_token_bytes = [item_bytes // arguments.page_size for item_bytes in arguments.kv_item_lens]
    kv = _buffers(arguments.kv_data_ptrs, arguments.kv_data_lens, kv_token_bytes)
    layers = len(kv) // 2
    return PoolLayout(
        arguments.kv_cache_dtype_str,
        0,
        tuple(map(LayerBuffers, kv[:layers], kv[layers:])),
        heads.first_head(rank),
        heads.heads_per_rank,
        tuple(_buffers(arguments.aux_data_ptrs, arguments.aux_data_lens, arguments.aux_item_lens)),
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
