"""The part of a long request's KV that one instance holds, and how it changes hands when the group grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from sglang_ext.long_pool.decide.kept_prompts import within
from sglang_ext.long_pool.decide.sharding import KvMove, KvSegment, Positions, count_tokens, head, positions_of, tail
from sglang_ext.long_pool.member.ring_attention import as_tensor
from sglang_ext.long_pool.mesh.mesh import Lane, Mesh, Pending
from sglang_ext.long_pool.step_clock import StepClock


class KvPoolFullError(RuntimeError):
    """The instance's KV pool has too few free slots for what was planned."""


class LayoutMismatchError(RuntimeError):
    """The coordinator believes that this instance holds something else than it does."""


_PIECE_TOKENS = 1024  # of KV that is put in order at once


class KvPool(Protocol):
    """An instance's KV memory. Slots are int64 [tokens]; KV of one layer is [2, tokens, KV heads, head size], with
    latent attention [1, tokens, 1, size of a row]."""

    layers: int
    page_tokens: int

    @property
    def device(self) -> torch.device:
        """Return where its memory and the slots that it hands out are."""

    @property
    def free_tokens(self) -> int:
        """Slots that could be taken now."""

    def allocate(self, tokens: int) -> torch.Tensor:
        """Slots in fresh pages. Raises KvPoolFullError, and has then taken nothing."""

    def free(self, slots: torch.Tensor) -> None:
        """Give whole pages back."""

    def count_freed(self, pages: torch.Tensor) -> int:
        """Return how many of these pages, int64, could be taken again at once if they were freed."""

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """A copy of one layer's KV, in one piece that can be sent."""

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store one layer's KV at slots of which none is twice there."""

    def empty_block(self, tokens: int) -> torch.Tensor:
        """An uninitialised block for one layer's KV."""


class HeldSegment(NamedTuple):
    """A segment and where it lies."""

    segment: KvSegment
    slots: torch.Tensor


class HeldRows(NamedTuple):
    """Positions of a prompt and the slots of their rows, int64, in the same order."""

    positions: Positions
    slots: torch.Tensor


class Shard:
    """Describes what this instance holds of one request. Not safe for threads: it belongs to the engine's loop.

    Chunks change it as transactions: what a chunk gave away stays where it is until the next chunk begins, which is
    when every member of the group is known to have done this one. So a chunk that failed for one member can be taken
    back by all of them.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._segments: list[HeldSegment] = []
        self._before: list[HeldSegment] = []  # as the last chunk found it
        self._given: list[HeldSegment] = []  # by the last chunk; their slots are still taken
        self._taken: list[torch.Tensor] = []  # slots that the last chunk has allocated

    @property
    def segments(self) -> tuple[KvSegment, ...]:
        return tuple(held.segment for held in self._segments)

    @property
    def positions(self) -> Positions:
        return positions_of(self.segments)

    @property
    def slots(self) -> torch.Tensor:
        """Return the slots of all positions, in their order."""
        slots = [held.slots for held in self._segments]
        return torch.cat(slots) if slots else self._no_slots()

    @property
    def owned_tokens(self) -> int:
        """Slots that this shard has taken from the pool, in whole pages: what the pool does not know to be used."""
        page = self._pool.page_tokens
        segments = (*self._segments, *self._given)
        return sum(-(-held.segment.tokens // page) * page for held in segments if not held.segment.is_borrowed)

    def borrow(self, positions: Positions, slots: torch.Tensor) -> None:
        """A prefix that the engine's cache holds, and keeps while it is locked there."""
        self._add(KvSegment(positions, is_borrowed=True), slots)

    def begin(self) -> None:
        """A chunk begins: the one before it is done everywhere, so what it gave away can be freed."""
        for held in self._given:
            self._free(held)
        self._before, self._given, self._taken = list(self._segments), [], []

    def roll_back(self) -> None:
        """Be as the last chunk found it; once only."""
        for slots in self._taken:
            self._pool.free(slots)
        self._segments, self._given, self._taken = list(self._before), [], []

    def extend(self, positions: Positions) -> torch.Tensor:
        """Take slots for further positions. Raises KvPoolFullError."""
        if not positions:
            return self._no_slots()
        slots = self._pool.allocate(count_tokens(positions))
        self._taken.append(slots)
        self._add(KvSegment(positions), slots)
        return slots

    def give(self, move: KvMove) -> torch.Tensor:
        """Take the end of a segment out of the shard; the slots of what was given. Raises LayoutMismatchError."""
        held = self._segments[move.segment] if move.segment < len(self._segments) else None
        if held is None or tail(held.segment.positions, held.segment.tokens, move.tokens) != move.positions:
            raise LayoutMismatchError(f"segment {move.segment} does not end with {move.positions}: {self.segments}")
        kept = held.segment.tokens - move.tokens
        given = HeldSegment(held.segment._replace(positions=move.positions), held.slots[kept:])
        self._given.append(given)
        self._segments[move.segment] = HeldSegment(
            held.segment._replace(positions=head(held.segment.positions, kept)), held.slots[:kept]
        )
        return given.slots

    def compact(self) -> None:
        """Forget segments of which nothing is left."""
        self._segments = [held for held in self._segments if held.segment.positions]

    def take_slots(self, start: int) -> torch.Tensor:
        """Hand over the slots of the positions from `start` on, in order, up to the first missing one.

        They are whole pages in which position follows position, as an engine's prefix cache wants them; `start` and
        the number of slots are multiples of the page size, the rest is freed. What does not lie in such a
        page is copied into one, piece by piece, so that little more room is needed than it has. Raises KvPoolFullError,
        with nothing changed, where there is not even that.
        """
        positions, slots = as_tensor(self.positions), self.slots
        order = torch.argsort(positions)
        ordered = order[torch.searchsorted(positions[order], start) :]
        is_next = positions[ordered] == torch.arange(start, start + ordered.numel())
        count = int(is_next.to(torch.int8).cumprod(0).sum())
        page = self._pool.page_tokens
        wanted = slots[ordered[: count - count % page]].clone()
        owned = [held.slots for held in (*self._segments, *self._given) if not held.segment.is_borrowed]
        mine = torch.unique(torch.cat([slots[:0], *owned]) // page)
        pages = wanted.view(-1, page)
        is_whole = (pages == pages[:, :1] + torch.arange(page, device=pages.device)).all(1) & (pages[:, 0] % page == 0)
        is_whole &= torch.isin(pages[:, 0] // page, mine)
        scattered = torch.nonzero(~is_whole).flatten()
        pieces = scattered.split(max(1, _PIECE_TOKENS // page))
        # In the order of positions, sources come free one after the other: each once its last row has been copied.
        spare = mine[~torch.isin(mine, pages[is_whole, 0] // page)]
        freed = [spare[~torch.isin(spare, pages[scattered] // page)]]
        for number, piece in enumerate(pieces):
            later = torch.cat([pages[:0].flatten(), *(pages[more].flatten() for more in pieces[number + 1 :])]) // page
            done = spare[torch.isin(spare, pages[piece] // page)]
            freed.append(done[~torch.isin(done, later)])
        self._check_room(
            [piece.numel() for piece in pieces], [self._pool.count_freed(segment_slots) for segment_slots in freed]
        )
        self._free_pages(freed[0])
        for piece, done in zip(pieces, freed[1:], strict=True):
            sources, fresh = pages[piece].flatten(), self._pool.allocate(piece.numel() * page)
            for layer in range(self._pool.layers):
                self._pool.write(layer, fresh, self._pool.read(layer, sources))
            pages[piece] = fresh.view(-1, page)
            self._free_pages(done)
        self._segments, self._before, self._given, self._taken = [], [], [], []
        return pages.flatten()

    def keep(self, start: int, end: int) -> HeldRows:
        """Hand over the rows of the positions from `start` to before `end`, with the pages that they lie in; free all
        else. Borrowed ones are copied. Raises KvPoolFullError, and has then freed everything."""
        kept, copies = [], []
        try:
            for segment, slots in self._segments:
                rows = rows_within(HeldRows(segment.positions, slots), start, end)
                if segment.is_borrowed and rows.positions:
                    copies.append(self._copy(rows.slots))
                    rows = rows._replace(slots=copies[-1])
                kept.append(rows)
        except KvPoolFullError:
            for slots in copies:
                self._pool.free(slots)
            self.drop()
            raise
        page = self._pool.page_tokens
        slots = torch.cat([self._no_slots(), *(rows.slots for rows in kept)])
        mine = [held.slots for held in (*self._segments, *self._given) if not held.segment.is_borrowed]
        pages = torch.unique(torch.cat([self._no_slots(), *mine]) // page)
        self._free_pages(pages[~torch.isin(pages, slots // page)])
        self._segments, self._before, self._given, self._taken = [], [], [], []
        return HeldRows(tuple(run for rows in kept for run in rows.positions), slots)

    def _copy(self, sources: torch.Tensor) -> torch.Tensor:
        """Return fresh slots with the same rows."""
        fresh = self._pool.allocate(sources.numel())
        pieces = zip(sources.split(_PIECE_TOKENS), fresh.split(_PIECE_TOKENS), strict=True)
        for piece, target in pieces:
            for layer in range(self._pool.layers):
                self._pool.write(layer, target, self._pool.read(layer, piece))
        return fresh

    def _check_room(self, taken: Sequence[int], freed: Sequence[int]) -> None:
        """Pages that are taken and come free in turn, something free first. Raises KvPoolFullError."""
        free = self._pool.free_tokens // self._pool.page_tokens + (freed[0] if freed else 0)
        for wanted, released in zip(taken, freed[1:], strict=True):
            if wanted > free:
                raise KvPoolFullError(f"{wanted} KV pages are wanted to put KV in order, {free} are free")
            free += released - wanted

    def _free_pages(self, pages: torch.Tensor) -> None:
        if pages.numel():
            page = self._pool.page_tokens
            self._pool.free((pages[:, None] * page + torch.arange(page, device=pages.device)).flatten())

    def drop(self) -> None:
        """Free everything."""
        for held in (*self._segments, *self._given):
            self._free(held)
        self._segments, self._before, self._given, self._taken = [], [], [], []

    def _no_slots(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self._pool.device)

    def _free(self, held: HeldSegment) -> None:
        if not held.segment.is_borrowed and held.slots.numel():
            self._pool.free(held.slots)

    def _add(self, segment: KvSegment, slots: torch.Tensor) -> None:
        if segment.tokens != slots.numel():
            raise ValueError(f"{slots.numel()} slots for {segment.tokens} positions")
        if segment.positions:
            self._segments.append(HeldSegment(segment, slots))


def rows_within(rows: HeldRows, start: int, end: int) -> HeldRows:
    """Return the rows of positions from `start` to before `end`."""
    positions = as_tensor(rows.positions, rows.slots.device)
    return HeldRows(within(rows.positions, start, end), rows.slots[(positions >= start) & (positions < end)])


class Rebalancing:
    """The moves before a chunk, layer by layer, so that a layer's KV travels while earlier layers compute."""

    def __init__(
        self,
        pool: KvPool,
        shard: Shard,
        moves: Sequence[KvMove],
        mesh: Mesh,
        instance: int,
        first_tag: int,
        clock: StepClock | None = None,
    ) -> None:
        """Takes slots for what comes (KvPoolFullError), cuts off what goes. Move i uses the tags first + i * layers."""
        self._pool = pool
        self._mesh = mesh
        self._clock = clock or StepClock()
        self._outgoing: list[_OutgoingRows] = []
        self._incoming: list[_IncomingRows] = []
        self._under_way: dict[int, list[tuple[Pending, torch.Tensor, _IncomingRows | None]]] = {}
        for number, move in enumerate(moves):
            tag = first_tag + number * pool.layers
            if move.source == instance:
                self._outgoing.append(_OutgoingRows(move.target, shard.give(move), tag))
            elif move.target == instance:
                self._incoming.append(_IncomingRows(move.source, shard.extend(move.positions), tag))
        shard.compact()

    def start(self, layer: int) -> None:
        """Send and receive one layer; a layer beyond the last, or a started one, changes nothing."""
        if layer >= self._pool.layers or layer in self._under_way:
            return
        began_s = self._clock.now_s()
        calls = self._under_way[layer] = []
        with self._mesh.batch(Lane.MOVES):
            for incoming in self._incoming:
                block = self._pool.empty_block(incoming.slots.numel())
                calls.append((self._mesh.receive(block, incoming.source, incoming.tag + layer), block, incoming))
            for outgoing in self._outgoing:
                block = self._pool.read(layer, outgoing.slots)
                calls.append((self._mesh.send(block, outgoing.target, outgoing.tag + layer), block, None))
        self._clock.rebalance_s += self._clock.now_s() - began_s

    def finish(self, layer: int) -> None:
        """Wait until one layer is here. Raises MeshError."""
        self.start(layer)
        if not self._under_way[layer]:
            return
        began_s = self._clock.now_s()
        for call, block, incoming in self._under_way[layer]:
            call.wait()
            if incoming is not None:
                self._pool.write(layer, incoming.slots, block)
        self._under_way[layer] = []
        self._clock.rebalance_s += self._clock.now_s() - began_s


class _OutgoingRows(NamedTuple):
    target: int
    slots: torch.Tensor
    tag: int


class _IncomingRows(NamedTuple):
    source: int
    slots: torch.Tensor
    tag: int
