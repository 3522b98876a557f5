"""Which part of a request a prefill rank sends to each decode rank, from how the two instances spread KV heads."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sglang_ext.policy.handshake.shards import HeadLayout, plan_head_moves


class Share(NamedTuple):
    """What one prefill rank sends to one decode rank: consecutive heads (none to a rank of padding only)."""

    decode_rank: int
    first_head: int
    head_count: int
    has_metadata: bool  # the first output token and the like come from exactly one prefill rank
    sender_count: int  # prefill ranks that send KV to this decode rank


def cpu_head_layout(kv_heads: int, tp_size: int) -> HeadLayout:
    """How SGLang's CPU engine spreads a model's heads: padded to a multiple of the ranks."""
    return HeadLayout(kv_heads, tp_size, -(-kv_heads // tp_size) * tp_size)


@lru_cache(maxsize=64)
def shares_of(prefill_rank: int, prefill: HeadLayout, decode: HeadLayout) -> tuple[Share, ...]:
    """What a prefill rank sends, by decode rank. Raises ValueError when the layouts are of different models."""
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
