"""SGLang's description of its pool, as rows of token slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.kv_transfer.pool_layout import ItemBuffer, LayerBuffers
from sglang_ext.policy.handshake.shards import HeadLayout
from sglang_ext.sglang_plugin.handshake.pools import pool_layout, token_slots


def arguments(page_size: int, token_bytes: int = 64, tokens: int = 160) -> Any:
    return SimpleNamespace(
        kv_cache_dtype_str="float32",
        page_size=page_size,
        kv_data_ptrs=[1000, 2000, 3000, 4000],  # K of two layers, then V
        kv_data_lens=[token_bytes * tokens] * 4,
        kv_item_lens=[token_bytes * page_size] * 4,
        aux_data_ptrs=[7000, 8000],
        aux_data_lens=[8 * 16, 8 * 64],
        aux_item_lens=[16, 64],
    )


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_are_tokens_whatever_the_page(page_size: int) -> None:
    layout = pool_layout(arguments(page_size), HeadLayout(3, 2, 4), rank=1)
    assert layout.layers == (
        LayerBuffers(ItemBuffer(1000, 64, 160), ItemBuffer(3000, 64, 160)),
        LayerBuffers(ItemBuffer(2000, 64, 160), ItemBuffer(4000, 64, 160)),
    )
    assert (layout.first_head, layout.head_count, layout.first_layer) == (2, 2, 0)
    assert layout.aux == (ItemBuffer(7000, 16, 8), ItemBuffer(8000, 64, 8))


def test_a_pool_that_cannot_hold_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold 3 equal heads"):
        pool_layout(arguments(1), HeadLayout(3, 1, 3), rank=0)


@pytest.mark.parametrize(
    ("pages", "page_size", "slots"),
    [([5, 2, 9], 1, [5, 2, 9]), ([3, 0], 4, [12, 13, 14, 15, 0, 1, 2, 3]), ([], 16, [])],
)
def test_slots_of_pages(pages: list[int], page_size: int, slots: list[int]) -> None:
    found = token_slots(np.array(pages, np.int32), page_size)
    assert found.tolist() == slots
    assert found.dtype == np.uint32
