"""The cached tokens that a layer with a sliding window reads for a padded batch."""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch, allocate, pad_batch_, prefixes_in_window


def test_the_last_tokens_of_each_prefix() -> None:
    prefixes = [5, 0, 3, 9]
    for window in (1, 3, 4, 9, 100):
        batch = allocate(8, 6, 40, "cpu")
        _pad(batch, prefixes)
        indptr, indices = prefixes_in_window(batch, window)
        seen = [min(prefix, window) for prefix in prefixes] + [0, 0]
        assert indptr.dtype == batch.kv_indptr.dtype
        assert indptr.tolist() == [sum(seen[:count]) for count in range(7)]
        wanted = [
            100 * row + position
            for row, prefix in enumerate(prefixes)
            for position in range(max(0, prefix - window), prefix)
        ]
        assert indices[: len(wanted)].tolist() == wanted


@pytest.mark.parametrize(("window", "slots"), [(2, 12), (100, 40)])
def test_its_size_is_that_of_the_shape(window: int, slots: int) -> None:
    """Not that of the batch, as a captured pass computes it for each."""
    batch = allocate(8, 6, 40, "cpu")
    assert prefixes_in_window(batch, window).indices.numel() == slots
    _pad(batch, [1, 2])
    assert prefixes_in_window(batch, window).indices.numel() == slots


def test_a_full_buffer() -> None:
    batch = allocate(8, 2, 10, "cpu")
    _pad(batch, [6, 4])
    assert prefixes_in_window(batch, 5).indices[:9].tolist() == [1, 2, 3, 4, 5, 100, 101, 102, 103]


def _pad(batch: PaddedBatch, prefixes: list[int]) -> None:
    """A token for each request, whose prefix has the slots 100, 101, … times its row."""
    lens = torch.tensor(prefixes)
    table = torch.arange(len(prefixes))[:, None] * 100 + torch.arange(20)
    ones = torch.ones_like(lens)
    ragged = RaggedBatch(ones, ones, ones, torch.arange(len(prefixes)), ones, lens, table.int(), max(prefixes))
    pad_batch_(batch, ragged)
