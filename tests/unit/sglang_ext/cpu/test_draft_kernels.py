"""What the target keeps of a chain of drafts, and where drafts lie, against the definitions."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cpu import draft_kernels

TABLE = torch.arange(100, 140).view(4, 10)


def test_slots_behind_each_request_are_taken_in_order() -> None:
    slots = torch.empty(5, dtype=torch.int64)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([3, 0]), torch.tensor([6, 2])
    draft_kernels.assign_extend_cache_locs_cpu(rows, TABLE, starts, ends, slots, 10)
    assert slots.tolist() == [123, 124, 125, 100, 101]
    slots = torch.empty(6, dtype=torch.int64)
    draft_kernels.assign_draft_cache_locs_contiguous_cpu(rows, TABLE, torch.tensor([3, 1]), slots, 10, 1, 3)
    assert slots.tolist() == [123, 124, 125, 101, 102, 103]


def chain(requests: int, length: int) -> tuple[torch.Tensor, ...]:
    """Positions, places in the batch, the next draft and the next sibling of a batch of chains."""
    positions = torch.empty(requests * length, dtype=torch.int64)
    others = [torch.full((requests, length), -7) for _ in range(3)]
    lengths = torch.arange(5, 5 + requests)
    nothing = torch.empty(0)
    draft_kernels.build_tree_kernel_efficient_cpu(
        nothing, nothing, lengths, nothing, positions, others[0], others[1], others[2], 1, length - 1, length, 1
    )
    return (positions, *others)


def test_a_chain_goes_from_each_token_to_the_next() -> None:
    positions, places, following, siblings = chain(2, 3)
    assert positions.tolist() == [5, 6, 7, 6, 7, 8]
    assert places.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1]] * 2
    assert siblings.tolist() == [[-1] * 3] * 2


def test_a_tree_is_refused() -> None:
    nothing = torch.empty(0)
    with pytest.raises(ValueError, match="drafts in trees"):
        draft_kernels.build_tree_kernel_efficient_cpu(
            nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, 2, 3, 4, 1
        )


@given(st.integers(1, 4), st.integers(2, 5), st.data())
def test_drafts_stay_up_to_the_first_that_is_not_the_target_s_choice(
    requests: int, length: int, data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(0, 2), min_size=requests * length, max_size=requests * length)
    candidates, choices = (torch.tensor(data.draw(numbers)).view(requests, length) for _ in range(2))
    _, places, following, siblings = chain(requests, length)
    predicts = torch.zeros(requests * length, dtype=torch.int32)
    accepted = torch.full((requests, length), -1, dtype=torch.int32)
    drafts = torch.empty(requests, dtype=torch.int32)
    draft_kernels.verify_tree_greedy_cpu(predicts, accepted, drafts, candidates, places, following, siblings, choices)
    bonus = torch.empty(requests, dtype=torch.int32)
    draft_kernels.fill_bonus_tokens_cpu(predicts[accepted.long()].flatten(), drafts + 1, bonus, length)
    for row in range(requests):
        kept = 0
        while kept < length - 1 and candidates[row, kept + 1] == choices[row, kept]:
            kept += 1
        first = row * length
        assert drafts[row] == kept
        assert accepted[row].tolist() == [*range(first, first + kept + 1), *[-1] * (length - kept - 1)]
        assert predicts[first : first + kept + 1].tolist() == choices[row, : kept + 1].tolist()
        assert bonus[row] == choices[row, kept]


def test_rows_are_copied_in_every_buffer_also_where_they_overlap() -> None:
    buffers = [ctypes.create_string_buffer(bytes(range(start, start + 12)), 12) for start in (0, 50)]
    addresses = torch.tensor([ctypes.addressof(buffer) for buffer in buffers])
    draft_kernels.copy_all_layer_kv_cache_cpu(
        addresses, torch.tensor([3, 4]), torch.tensor([1, 2]), torch.tensor([0, 1])
    )
    assert list(buffers[0].raw) == [0, 1, 2, 0, 1, 2, 3, 4, 5, 9, 10, 11]
    assert list(buffers[1].raw) == [50, 51, 52, 53, 50, 51, 52, 53, 54, 55, 56, 57]
