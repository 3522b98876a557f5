"""Attention of a CPU layer with a window, a cap and sinks, in blocks of queries, against all scores at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.cpu.layer_attention import attend_
from sglang_ext_kernels import block_attention


def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cap: float,
    window: int | None,
    sinks: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """The definition: every score of every head."""
    new, known, groups = query.shape[0], keys.shape[0], query.shape[1] // keys.shape[1]
    keys, values = (one.repeat_interleave(groups, 1) for one in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.5
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if is_causal:
        for row in range(new):
            place = known - new + row
            scores[:, row, place + 1 :] = -torch.inf
            if window is not None:
                scores[:, row, : max(0, place - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, new, 1)], -1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1)[..., :known], values)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(0, 20),
    st.sampled_from([(2, 2), (4, 2), (6, 2)]),
    st.sampled_from([0.0, 1.5]),
    st.sampled_from([None, 0, 1, 5, 40]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_blocks_of_queries_attend_to_what_all_at_once_would(
    new: int,
    before: int,
    heads: tuple[int, int],
    cap: float,
    window: int | None,
    has_sinks: bool,
    is_causal: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    known = before + new
    query = torch.randn(new, heads[0], 8, generator=generator)
    keys = torch.randn(known, heads[1], 8, generator=generator)
    values = torch.randn(known, heads[1], 6, generator=generator)
    sinks = torch.randn(heads[0], generator=generator) if has_sinks else None
    output = torch.empty(new, heads[0], 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "_ROWS", 5)
        # Only what the window needs is read of what came before.
        needed = known if window is None or not is_causal else min(known, new + window)
        attend_(
            *(output, query, keys[known - needed :], values[known - needed :], 0.5),
            cap=cap,
            window=window,
            sinks=sinks,
            is_causal=is_causal,
        )
    torch.testing.assert_close(output, attended(query, keys, values, cap, window, sinks, is_causal), atol=1e-5, rtol=0)
