"""Which part of a request's KV a sender holds: token positions × KV heads × layers."""

from __future__ import annotations

from collections.abc import Iterable
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
    """What one sender writes under one grant. Heads are the model's (global) KV heads.

    `has_aux` says that the request's metadata (first output token and the like) come with it. A shard that
    brings nothing else has no tokens.
    """

    tokens: tuple[TokenSpan, ...]
    first_head: int
    head_count: int
    first_layer: int
    layer_count: int
    has_aux: bool = False

    @property
    def token_count(self) -> int:
        return sum(span.token_count for span in self.tokens)

    @property
    def cells(self) -> int:
        """Its volume in tokens × heads × layers."""
        return self.token_count * self.head_count * self.layer_count


def can_overlap(one: TokenSpan, other: TokenSpan) -> bool:
    """Whether two spans share a position (Chinese remainder theorem)."""
    low, high = max(one.start, other.start), min(one.stop, other.stop)
    distance, divisor = other.start - one.start, gcd(one.step, other.step)
    if low >= high or distance % divisor:
        return False
    modulus = other.step // divisor
    steps = distance // divisor * pow(one.step // divisor, -1, modulus) % modulus
    shared = one.start + one.step * steps
    period = lcm(one.step, other.step)
    return shared + max(0, -(-(low - shared) // period)) * period < high


def are_disjoint(one: KVShard, other: KVShard) -> bool:
    """Whether no token of any head of any layer is in both."""
    if one.first_head + one.head_count <= other.first_head or other.first_head + other.head_count <= one.first_head:
        return True
    if one.first_layer + one.layer_count <= other.first_layer:
        return True
    if other.first_layer + other.layer_count <= one.first_layer:
        return True
    return not any(can_overlap(left, right) for left in one.tokens for right in other.tokens)


def why_malformed(shard: KVShard) -> str | None:
    """One line that says why a shard makes no sense, or None."""
    if shard.first_head < 0 or shard.first_layer < 0 or shard.head_count < 0 or shard.layer_count < 0:
        return "a range of heads or layers is negative"
    for span in shard.tokens:
        if span.start < 0 or span.step < 1 or span.stop <= span.start:
            return f"the token span {tuple(span)} is empty or negative"
    if any(can_overlap(left, right) for left, right in combinations(shard.tokens, 2)):
        return "its token spans overlap"
    if not shard.cells and not (shard.has_aux and not shard.tokens):
        return "it is empty"
    return None


def why_unwanted(shard: KVShard, whole: KVShard, accepted: Iterable[KVShard]) -> str | None:
    """One line that says why a shard is no part of `whole` (a single span of step 1), or None.

    A request is complete when the volumes of its shards add up to the whole's; that holds because no two of
    them overlap.
    """
    problem = why_malformed(shard)
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
