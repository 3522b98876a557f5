"""Functions of `sgl_kernel` for speculative decoding with chains of drafts, in torch.

A draft model proposes a chain of tokens per request; the target computes all of them at once, and the drafts that are
its own choice stay. SGLang calls these functions on a CPU with any attention. Trees of drafts
(`--speculative-eagle-topk` above 1) are refused: `unserved_models` says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots of columns `start_offset[i]` to `end_offset[i]` of each request's row to `out_cache_loc`, one
    request after the other."""
    del pool_len
    first = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        out_cache_loc[first : first + end - start] = req_to_token[row, start:end]
        first += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    """Write the `topk * steps` slots behind each request's tokens to `out_cache_loc`."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * steps, out_cache_loc, pool_len
    )


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Write the chain of each request's last token and drafts: positions, places in the batch, the next one of each.

    Raises ValueError for a tree of drafts. The mask, which causal attention to a chain does not need, stays as it is.
    """
    import torch

    del parent_list, selected_index, tree_mask, depth, tree_mask_mode
    if topk != 1:
        raise ValueError("drafts in trees are not computed on a CPU")
    places = torch.arange(draft_token_num)
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    positions.copy_((verified_seq_len.view(-1, 1) + places).flatten())
    retrieve_next_token.copy_(torch.where(places < draft_token_num - 1, places + 1, -1))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the drafts of each request's chain up to the first that is not the target's choice behind those before.

    `candidates` [requests, n] are the last token and the drafts, `target_predict` [requests, n] the target's choice
    behind each. `accept_index` gets the places of what stays, `accept_token_num` the number of drafts among it, and
    `predicts` the choice behind each of them.
    """
    del retrive_next_token, retrive_next_sibling
    is_chosen = candidates[:, 1:].eq(target_predict[:, :-1])[:, : accept_index.shape[1] - 1]
    for row, drafts in enumerate(is_chosen.long().cumprod(1).sum(1).tolist()):
        places = retrive_index[row, : drafts + 1]
        accept_index[row, : drafts + 1] = places.to(accept_index.dtype)
        predicts[places] = target_predict[row, : drafts + 1].to(predicts.dtype)
        accept_token_num[row] = drafts


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Write the last of each request's accepted tokens to `bonus_tokens`."""
    rows = accept_tokens.view(-1, accept_stride)
    bonus_tokens.copy_(rows.gather(1, (accept_lens.long() - 1).view(-1, 1)).view(-1))


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy rows `src_loc` to `tgt_loc` in each of the buffers at these addresses, whose rows have `strides` bytes."""
    pairs = list(zip(tgt_loc.tolist(), src_loc.tolist(), strict=True))
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * row_bytes, row_bytes) for _, source in pairs]
        for (target, _), row in zip(pairs, rows, strict=True):
            ctypes.memmove(address + target * row_bytes, row, row_bytes)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        assign_extend_cache_locs_cpu,
        assign_draft_cache_locs_contiguous_cpu,
        build_tree_kernel_efficient_cpu,
        verify_tree_greedy_cpu,
        fill_bonus_tokens_cpu,
        copy_all_layer_kv_cache_cpu,
    )
}
