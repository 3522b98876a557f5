"""Decides which instance holds which positions of a long prompt: chunks dealt out over a group, history kept even.

Every member of a group computes a part of each chunk and keeps the KV of what it computed. Positions are given as
ranges, so a prompt of a million tokens costs as little as one of ten. KV lies in pages that belong to one instance:
a segment is what was put into fresh pages together, and only whole pages change hands.

Tetris, sections 3.2 and 4.2 (cache balancing); zigzag as in context-parallel training, striped as in Striped Attention.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

Positions = tuple[range, ...]  # disjoint, each with a positive step; in the order in which the slots were filled


class Interleaving(StrEnum):
    """Describes how a chunk is dealt out so that causal attention is equal work for all members."""

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


def split_positions(
    positions: Positions, members: int, interleaving: Interleaving, page_tokens: int = 1
) -> tuple[Positions, ...]:
    """Deal ascending ranges out as if they were one chunk: what has been lost is not always in one piece.

    Takes time in proportion to the ranges, times the members where they are long.
    """
    dealt = [_Runs() for _ in range(members)]
    pieces = 2 * members
    cuts = [] if interleaving is Interleaving.STRIPED else _cuts(positions, pieces, page_tokens)
    piece = offset = 0
    for part in positions:
        if interleaving is Interleaving.STRIPED:
            for first in range(min(members, len(part))):
                dealt[(offset + first) % members].append(part[first::members])
        else:
            at = 0
            while at < len(part):
                while cuts[piece + 1] <= offset + at:
                    piece += 1
                stop = min(len(part), cuts[piece + 1] - offset)
                dealt[min(piece, pieces - 1 - piece)].append(part[at:stop])
                at = stop
        offset += len(part)
    return tuple(tuple(share.ranges) for share in dealt)


def _cuts(positions: Positions, pieces: int, page_tokens: int) -> list[int]:
    """Return where the pieces of this many tokens begin and end, as counts of tokens."""
    tokens = count_tokens(positions)
    cuts = [tokens * number // pieces for number in range(pieces + 1)]
    if tokens >= pieces * page_tokens:
        ends = list(accumulate(map(len, positions)))
        for number, cut in enumerate(cuts[1:-1], start=1):
            place = bisect_right(ends, cut)
            part, within = positions[place], cut - ends[place] + len(positions[place])
            if part.step == 1:
                cuts[number] -= min(within, part[within] % page_tokens)
    return cuts


class _Runs:
    """Ascending positions as ranges, joined wherever two that follow each other are one."""

    __slots__ = ("ranges",)

    def __init__(self) -> None:
        self.ranges: list[range] = []

    def append(self, part: range) -> None:
        if not part:
            return
        if self.ranges:
            last = self.ranges[-1]
            step = part.start - last[-1]
            if step > 0 and (len(last) == 1 or last.step == step) and (len(part) == 1 or part.step == step):
                self.ranges[-1] = range(last.start, part[-1] + 1, step)
                return
        self.ranges.append(part)


def without(positions: Positions, taken: Positions) -> Positions:
    """Ascending runs, possibly with a stride, of the positions that are not in `taken`."""
    end = max((part[-1] + 1 for part in positions if part), default=0)
    left = bytearray(end)
    for part in positions:
        left[part.start : part.stop : part.step] = b"\1" * len(part)
    for part in taken:
        inside = part[: max(0, -(-(end - part.start) // part.step))]
        left[inside.start : inside.stop : inside.step] = bytes(len(inside))
    runs = _Runs()
    start = left.find(1)
    while start >= 0:
        stop = left.find(0, start)
        run = range(start, end if stop < 0 else stop)
        if len(run) == 1:
            run = _strided_run(left, start)
        runs.append(run)
        start = left.find(1, run[-1] + 1)
    return tuple(runs.ranges)


def _strided_run(marks: bytearray, start: int) -> range:
    """The longest run of marks from `start` on that are equally far from each other; galloping."""
    second = marks.find(1, start + 1)
    if second < 0:
        return range(start, start + 1)
    step = second - start

    def is_run(count: int) -> bool:
        stop = start + step * (count - 1) + 1
        return marks.count(1, start, stop) == count == marks[start:stop:step].count(1)

    known, most = 2, (len(marks) - 1 - start) // step + 1
    too_many = most + 1
    while 2 * known <= most:
        if not is_run(2 * known):
            too_many = 2 * known
            break
        known *= 2
    while too_many - known > 1:
        middle = (known + too_many) // 2
        if is_run(middle):
            known = middle
        else:
            too_many = middle
    return range(start, start + step * (known - 1) + 1, step)


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
    """Return what each instance holds once the moves are done; segments that have become empty stay until
    `compacted`."""
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
    """Return how many tokens off the end of a segment of `tokens` are whole pages and nearest to `wanted`, at most
    all."""
    last_page = tokens % page_tokens or page_tokens
    if last_page >= tokens:
        return tokens
    pages = max(0, round((wanted - last_page) / page_tokens))
    return min(tokens, last_page + pages * page_tokens)
