"""Decides which part of a request's KV a rank holds (token positions × KV heads × layers), and which heads go to which
rank.

SGLang gives a rank `heads / tp` consecutive KV heads; with more ranks than heads, consecutive ranks share one
(`QKVParallelLinear`: head = rank // replicas). Its CPU engine instead pads the heads to a multiple of the ranks
(`adjust_config_with_unaligned_cpu_tp`); padded heads hold nothing and do not travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from math import gcd, lcm
from typing import NamedTuple


class TokenSpan(NamedTuple):
    """Positions start, start + step, …, below `stop`. A step above 1 is what striped interleaving gives a rank."""

    start: int
    stop: int
    step: int = 1

    @property
    def token_count(self) -> int:
        return len(range(self.start, self.stop, self.step))


class KVShard(NamedTuple):
    """The KV that one sender writes under one grant. Heads are the model's (global) KV heads.

    `has_aux` says that the request's metadata (first output token and the like) come with it, and `has_states` that its
    pieces of extra states do (sliding windows, recurrent states). A shard that brings nothing else has no tokens.
    """

    tokens: tuple[TokenSpan, ...]
    first_head: int
    head_count: int
    first_layer: int
    layer_count: int
    has_aux: bool = False
    has_states: bool = False

    @property
    def token_count(self) -> int:
        return sum(span.token_count for span in self.tokens)

    @property
    def cells(self) -> int:
        """Its volume in tokens × heads × layers."""
        return self.token_count * self.head_count * self.layer_count

    @property
    def has_extras(self) -> bool:
        """Return whether something comes behind its rows, in one part: metadata, extra states or both."""
        return self.has_aux or self.has_states


def can_overlap(first: TokenSpan, other: TokenSpan) -> bool:
    """Return whether two spans share a position (Chinese remainder theorem)."""
    low, high = max(first.start, other.start), min(first.stop, other.stop)
    distance, divisor = other.start - first.start, gcd(first.step, other.step)
    if low >= high or distance % divisor:
        return False
    modulus = other.step // divisor
    steps = distance // divisor * pow(first.step // divisor, -1, modulus) % modulus
    shared = first.start + first.step * steps
    period = lcm(first.step, other.step)
    return shared + max(0, -(-(low - shared) // period)) * period < high


def are_disjoint(first: KVShard, other: KVShard) -> bool:
    """Return whether no token of any head of any layer is in both."""
    if (
        first.first_head + first.head_count <= other.first_head
        or other.first_head + other.head_count <= first.first_head
    ):
        return True
    if first.first_layer + first.layer_count <= other.first_layer:
        return True
    if other.first_layer + other.layer_count <= first.first_layer:
        return True
    return not any(can_overlap(left, right) for left in first.tokens for right in other.tokens)


def shard_problem(shard: KVShard) -> str | None:
    """One line that says why a shard makes no sense, or None."""
    if shard.first_head < 0 or shard.first_layer < 0 or shard.head_count < 0 or shard.layer_count < 0:
        return "a range of heads or layers is negative"
    for span in shard.tokens:
        if span.start < 0 or span.step < 1 or span.stop <= span.start:
            return f"the token span {tuple(span)} is empty or negative"
    if any(can_overlap(left, right) for left, right in combinations(shard.tokens, 2)):
        return "its token spans overlap"
    if not shard.cells and not (shard.has_extras and not shard.tokens):
        return "it is empty"
    return None


def unwanted_reason(shard: KVShard, whole: KVShard, accepted: Iterable[KVShard]) -> str | None:
    """One line that says why a shard is no part of `whole` (a single span of step 1), or None.

    A request is complete when the volumes of its shards add up to the whole's; that holds because no two of
    them overlap.
    """
    problem = shard_problem(shard)
    if problem is not None:
        return problem
    if shard.tokens and not _is_within(shard, whole):
        return f"it lies outside of what was asked for: {describe(shard)}; asked for: {describe(whole)}"
    for other in accepted:
        if shard.has_aux and other.has_aux:
            return "the metadata are offered twice"
        if not are_disjoint(shard, other):
            return f"it overlaps another: {describe(shard)}; {describe(other)}"
    return None


def _is_within(shard: KVShard, whole: KVShard) -> bool:
    heads_fit = whole.first_head <= shard.first_head and (
        shard.first_head + shard.head_count <= whole.first_head + whole.head_count
    )
    layers_fit = whole.first_layer <= shard.first_layer and (
        shard.first_layer + shard.layer_count <= whole.first_layer + whole.layer_count
    )
    start, stop = (whole.tokens[0].start, whole.tokens[0].stop) if whole.tokens else (0, 0)
    return heads_fit and layers_fit and all(start <= span.start and span.stop <= stop for span in shard.tokens)


def describe(shard: KVShard) -> str:
    """A shard in a few words, for messages."""
    spans = ", ".join(
        f"{span.start}-{span.stop - 1}" + (f" step {span.step}" if span.step > 1 else "") for span in shard.tokens[:3]
    )
    more = f" and {len(shard.tokens) - 3} spans" if len(shard.tokens) > 3 else ""
    return (
        f"tokens {spans or 'none'}{more} × heads {shard.first_head}-{shard.first_head + shard.head_count - 1}"
        f" × layers {shard.first_layer}-{shard.first_layer + shard.layer_count - 1}"
    )


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Describes how an instance spreads `kv_heads` over `tp_size` ranks.

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
