"""Which instance holds which positions of a long prompt: chunks dealt out over a group, history kept even.

Every member of a group computes a part of each chunk and keeps the KV of what it computed. Positions are given as
ranges, so a prompt of a million tokens costs as little as one of ten. KV lies in pages that belong to one instance:
a segment is what was put into fresh pages together, and only whole pages change hands.

Tetris, sections 3.2 and 4.2 (cache balancing); zigzag as in context-parallel training, striped as in Striped Attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

Positions = tuple[range, ...]  # disjoint, each with a positive step; in the order in which the slots were filled


class Interleaving(StrEnum):
    """How a chunk is dealt out so that causal attention is equal work for all members."""

    ZIGZAG = "zigzag"  # 2 P pieces; member i takes piece i and piece 2 P - 1 - i
    STRIPED = "striped"  # every P-th token


class KvSegment(NamedTuple):
    """Positions whose KV was put into fresh pages of one instance, in this order."""

    positions: Positions
    is_borrowed: bool = False  # its pages are the prefix cache's: they may be read and copied, never freed

    @property
    def tokens(self) -> int:
        return count_tokens(self.positions)


class KvMove(NamedTuple):
    """KV that changes hands: the last `tokens` of one of `source`'s segments become the newest segment of `target`."""

    source: int  # instances
    target: int
    segment: int  # position among the source's segments before any move of the same rebalancing that empties one
    tokens: int
    positions: Positions


Holdings = Mapping[int, tuple[KvSegment, ...]]  # instance → what it holds, oldest first


class ChunkLayout(NamedTuple):
    """One chunk as it is executed: first the moves, then each member computes its new positions."""

    group: tuple[int, ...]  # in ring order
    moves: tuple[KvMove, ...]
    history: tuple[Positions, ...]  # by place in the ring: what the member holds when the chunk starts
    new: tuple[Positions, ...]  # by place in the ring; empty where a member gets no token of a small chunk

    @property
    def last_token_owner(self) -> int:
        """The instance that computes the chunk's last position, and so has its logits."""
        ends = [max((part[-1] for part in positions), default=-1) for positions in self.new]
        return self.group[ends.index(max(ends))]


def count_tokens(positions: Positions) -> int:
    """Tokens in them."""
    return sum(map(len, positions))


def split_chunk(
    start: int, tokens: int, members: int, interleaving: Interleaving, page_tokens: int = 1
) -> tuple[Positions, ...]:
    """Deal the positions [start, start + tokens) out to `members`; each member's are ascending.

    Zigzag pieces end at multiples of `page_tokens` where the chunk is long enough for it, so that what lies in one
    page of a member also lies in one page of its next holder. ValueError for numbers below 1 (start: below 0).
    """
    if start < 0 or tokens < 1 or members < 1 or page_tokens < 1:
        raise ValueError(f"cannot deal {tokens} tokens from {start} out to {members} in pages of {page_tokens}")
    end = start + tokens
    if members == 1:
        return ((range(start, end),),)
    if interleaving is Interleaving.STRIPED:
        return tuple(_non_empty(range(start + place, end, members)) for place in range(members))
    pieces = 2 * members
    cuts = [start + tokens * number // pieces for number in range(pieces + 1)]
    if tokens >= pieces * page_tokens:
        cuts[1:-1] = [max(start, cut - cut % page_tokens) for cut in cuts[1:-1]]
    parts = [range(cuts[number], cuts[number + 1]) for number in range(pieces)]
    return tuple(_joined(parts[place], parts[pieces - 1 - place]) for place in range(members))


def split_positions(
    positions: Positions, members: int, interleaving: Interleaving, page_tokens: int = 1
) -> tuple[Positions, ...]:
    """Deal ascending ranges out, each like a chunk: what has been lost is not always in one piece."""
    parts: list[Positions] = [()] * members
    for part in positions:
        dealt = split_chunk(part.start, len(part), members, interleaving, page_tokens)
        parts = [(*before, *more) for before, more in zip(parts, dealt, strict=True)]
    return tuple(parts)


def without(positions: Positions, taken: Positions) -> Positions:
    """Ascending runs of the positions that are not in `taken`."""
    left = sorted(set(_every(positions)) - set(_every(taken)))
    return _runs(left)


def rebalance(holdings: Holdings, group: Sequence[int], page_tokens: int = 1) -> tuple[KvMove, ...]:
    """The moves after which every member of `group` holds about as much as any other, in whole pages.

    Members with more than their share give what they got last; the order of the moves is the order in which both
    sides carry them out. Every holder is in `group` (ValueError otherwise): groups only grow.
    """
    strangers = [instance for instance, segments in holdings.items() if segments and instance not in group]
    if strangers:
        raise ValueError(f"instances {strangers} hold history and are not in the group {list(group)}")
    held = {instance: sum(segment.tokens for segment in holdings.get(instance, ())) for instance in group}
    base, rest = divmod(sum(held.values()), len(group))
    # The members that have more already keep the odd tokens.
    order = sorted(group, key=lambda instance: (-held[instance], group.index(instance)))
    share = {instance: base + (place < rest) for place, instance in enumerate(order)}
    wanting = [[instance, share[instance] - held[instance]] for instance in group if held[instance] < share[instance]]
    moves: list[KvMove] = []
    for source in group:
        surplus = held[source] - share[source]
        for number in reversed(range(len(holdings.get(source, ())))):
            segment = holdings[source][number]
            left = segment.tokens
            while left and wanting and surplus > 0:
                target, wanted = wanting[0]
                count = _whole_pages(left, min(surplus, wanted), page_tokens)
                if count == 0 or count > surplus + page_tokens // 2:
                    surplus = 0
                    break
                moves.append(KvMove(source, target, number, count, tail(segment.positions, left, count)))
                left -= count
                surplus -= count
                wanting[0][1] -= count
                if wanting[0][1] <= page_tokens // 2:
                    wanting.pop(0)
    return tuple(moves)


def after_moves(holdings: Holdings, moves: Sequence[KvMove]) -> dict[int, tuple[KvSegment, ...]]:
    """What each instance holds once the moves are done; segments that have become empty stay until `compacted`."""
    held = {instance: list(segments) for instance, segments in holdings.items()}
    for move in moves:
        segment = held[move.source][move.segment]
        kept = head(segment.positions, segment.tokens - move.tokens)
        held[move.source][move.segment] = segment._replace(positions=kept)
        held.setdefault(move.target, []).append(KvSegment(move.positions))
    return {instance: tuple(segments) for instance, segments in held.items()}


def compacted(holdings: Holdings) -> dict[int, tuple[KvSegment, ...]]:
    """The same without empty segments."""
    return {
        instance: tuple(segment for segment in segments if segment.positions) for instance, segments in holdings.items()
    }


def gather(holdings: Holdings, owner: int) -> tuple[KvMove, ...]:
    """The moves after which `owner` holds everything; each source's newest segment goes first."""
    return tuple(
        KvMove(source, owner, number, segments[number].tokens, segments[number].positions)
        for source, segments in holdings.items()
        if source != owner
        for number in reversed(range(len(segments)))
    )


def part_of_move(move: KvMove, tokens: int, page_tokens: int = 1) -> KvMove:
    """The end of a move of a whole segment, in whole pages: about `tokens`, at least a page, at most all of it."""
    wanted = max(tokens, min(page_tokens, move.tokens))
    count = _whole_pages(move.tokens, wanted, page_tokens) or move.tokens % page_tokens or page_tokens
    return move._replace(tokens=count, positions=tail(move.positions, move.tokens, count))


def lay_out(
    holdings: Holdings,
    positions: Positions,
    group: Sequence[int],
    interleaving: Interleaving,
    page_tokens: int = 1,
) -> tuple[ChunkLayout, dict[int, tuple[KvSegment, ...]]]:
    """A chunk of these ascending positions on `group`, and what each instance holds after it."""
    moves = rebalance(holdings, group, page_tokens)
    held = compacted(after_moves(holdings, moves))
    new = split_positions(positions, len(group), interleaving, page_tokens)
    history = tuple(positions_of(held.get(instance, ())) for instance in group)
    for instance, part in zip(group, new, strict=True):
        if part:
            held[instance] = (*held.get(instance, ()), KvSegment(part))
    return ChunkLayout(tuple(group), moves, history, new), held


def positions_of(segments: Sequence[KvSegment]) -> Positions:
    """All positions of some segments, in slot order."""
    return tuple(part for segment in segments for part in segment.positions)


def head(positions: Positions, tokens: int) -> Positions:
    """The first `tokens` of them, in slot order."""
    kept: list[range] = []
    for part in positions:
        if tokens <= 0:
            break
        kept.append(part[:tokens])
        tokens -= len(part)
    return tuple(kept)


def tail(positions: Positions, tokens: int, count: int) -> Positions:
    """The last `count` of the first `tokens`."""
    within = head(positions, tokens)
    skipped = tokens - count
    kept: list[range] = []
    for part in within:
        if skipped < len(part):
            kept.append(part[max(0, skipped) :])
        skipped -= len(part)
    return tuple(kept)


def _whole_pages(tokens: int, wanted: int, page_tokens: int) -> int:
    """How many tokens off the end of a segment of `tokens` are whole pages and nearest to `wanted`, at most all."""
    last_page = tokens % page_tokens or page_tokens
    if last_page >= tokens:
        return tokens
    pages = max(0, round((wanted - last_page) / page_tokens))
    return min(tokens, last_page + pages * page_tokens)


def _every(positions: Positions) -> Iterator[int]:
    return (position for part in positions for position in part)


def _runs(ascending: Sequence[int]) -> Positions:
    cuts = [0, *(i for i in range(1, len(ascending)) if ascending[i] != ascending[i - 1] + 1), len(ascending)]
    return tuple(range(ascending[a], ascending[b - 1] + 1) for a, b in pairwise(cuts) if a < b)


def _non_empty(part: range) -> Positions:
    return (part,) if part else ()


def _joined(first: range, second: range) -> Positions:
    """Two ascending pieces; one where they touch."""
    if first and second and first.stop == second.start:
        return (range(first.start, second.stop),)
    return (*_non_empty(first), *_non_empty(second))
