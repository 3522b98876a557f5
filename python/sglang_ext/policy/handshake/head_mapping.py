"""Which KV heads travel from which prefill rank to which decode rank when the two differ in tensor parallelism.

SGLang gives a rank `heads / tp` consecutive KV heads; with more ranks than heads, consecutive ranks share one
(`QKVParallelLinear`: head = rank // replicas). Its CPU engine instead pads the heads to a multiple of the ranks
(`adjust_config_with_unaligned_cpu_tp`); padded heads hold nothing and do not travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How an instance spreads `kv_heads` over `tp_size` ranks.

    `stored_kv_heads` is the number that the engine counts with: `kv_heads`, or more where it pads.
    """

    kv_heads: int
    tp_size: int
    stored_kv_heads: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.tp_size < 1 or self.stored_kv_heads < self.kv_heads:
            raise ValueError(
                f"no layout of {self.kv_heads} KV heads (stored as {self.stored_kv_heads}) on {self.tp_size} ranks"
            )
        if self.stored_kv_heads % self.tp_size and self.tp_size % self.stored_kv_heads:
            raise ValueError(
                f"{self.stored_kv_heads} KV heads cannot be spread over tensor parallel size {self.tp_size}: "
                "one must be a multiple of the other"
            )

    @property
    def heads_per_rank(self) -> int:
        """Heads that a rank has memory for."""
        return max(1, self.stored_kv_heads // self.tp_size)

    @property
    def replicas(self) -> int:
        """Consecutive ranks that hold the same head."""
        return max(1, self.tp_size // self.stored_kv_heads)

    def first_head(self, rank: int) -> int:
        """The model's head that is the rank's head 0. Raises ValueError for a rank that there is not."""
        if not 0 <= rank < self.tp_size:
            raise ValueError(f"no rank {rank} in tensor parallel size {self.tp_size}")
        return rank // self.replicas * self.heads_per_rank

    def heads(self, rank: int) -> range:
        """The model's heads that a rank holds; empty where all of its heads are padding."""
        first = self.first_head(rank)
        return range(first, max(first, min(first + self.heads_per_rank, self.kv_heads)))


class HeadMove(NamedTuple):
    """`head_count` heads from `first_head` (the model's) on, which two ranks hold at different places."""

    prefill_rank: int
    decode_rank: int
    first_head: int
    head_count: int
    source_head: int  # index in the prefill rank's memory
    target_head: int  # index in the decode rank's memory


def plan_head_moves(prefill: HeadLayout, decode: HeadLayout) -> tuple[HeadMove, ...]:
    """Every decode rank gets each of its heads from exactly one prefill rank.

    Replicas share the work: a decode rank that is the i-th to hold a head asks the i-th prefill rank that does.
    Raises ValueError when the two layouts are of different models.
    """
    if prefill.kv_heads != decode.kv_heads:
        raise ValueError(f"prefill has {prefill.kv_heads} KV heads, decode {decode.kv_heads}")
    moves: list[HeadMove] = []
    for decode_rank in range(decode.tp_size):
        replica = decode_rank % decode.replicas % prefill.replicas
        for head in decode.heads(decode_rank):
            prefill_rank = head // prefill.heads_per_rank * prefill.replicas + replica
            source = head - prefill.first_head(prefill_rank)
            target = head - decode.first_head(decode_rank)
            last = moves[-1] if moves else None
            if last is not None and (last.prefill_rank, last.decode_rank) == (prefill_rank, decode_rank):
                moves[-1] = last._replace(head_count=last.head_count + 1)
            else:
                moves.append(HeadMove(prefill_rank, decode_rank, head, 1, source, target))
    return tuple(moves)
