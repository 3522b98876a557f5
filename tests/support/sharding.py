"""Chunks that are one range of positions."""

from __future__ import annotations

from sglang_ext.long_pool.decide.sharding import Interleaving, Positions, split_positions


def split_chunk(
    start: int, tokens: int, members: int, interleaving: Interleaving, page_tokens: int = 1
) -> tuple[Positions, ...]:
    """Deal the positions [start, start + tokens) out to `members`; each member's are ascending."""
    return split_positions((range(start, start + tokens),), members, interleaving, page_tokens)
