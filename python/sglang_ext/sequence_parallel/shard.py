"""The part of a long request's KV that one instance holds, and how it changes hands when the group grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from sglang_ext.policy.cdsp.sharding import Lot, Move, Positions, count_tokens, head, positions_of
from sglang_ext.sequence_parallel.mesh import Mesh, Pending


class NoRoomError(RuntimeError):
    """The instance's KV pool cannot hold what was planned for it."""


class KvPool(Protocol):
    """An instance's KV memory. Slots are int64 [tokens]; K and V are [tokens, KV heads, head size]."""

    layers: int
    page_tokens: int

    def allocate(self, tokens: int) -> torch.Tensor:
        """Slots in fresh pages. Raises NoRoomError, and has then taken nothing."""

    def free(self, slots: torch.Tensor) -> None:
        """Give whole pages back."""

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V of one layer."""

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V of one layer."""

    def empty_block(self, tokens: int) -> torch.Tensor:
        """Room for K and V of one layer: [2, tokens, KV heads, head size]."""


class HeldLot(NamedTuple):
    """A lot and where it lies."""

    lot: Lot
    slots: torch.Tensor


class Shard:
    """What this instance holds of one request. Not safe for threads: it belongs to the engine's loop."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._lots: list[HeldLot] = []

    @property
    def lots(self) -> tuple[Lot, ...]:
        return tuple(held.lot for held in self._lots)

    @property
    def positions(self) -> Positions:
        return positions_of(self.lots)

    @property
    def slots(self) -> torch.Tensor:
        """Of all positions, in their order."""
        slots = [held.slots for held in self._lots]
        return torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)

    @property
    def owned_tokens(self) -> int:
        """Slots that this shard has taken from the pool, in whole pages: what the pool does not know to be used."""
        page = self._pool.page_tokens
        return sum(-(-held.lot.tokens // page) * page for held in self._lots if not held.lot.is_borrowed)

    def borrow(self, positions: Positions, slots: torch.Tensor) -> None:
        """A prefix that the engine's cache holds, and keeps while it is locked there."""
        self._add(Lot(positions, is_borrowed=True), slots)

    def extend(self, positions: Positions) -> torch.Tensor:
        """Take slots for further positions. Raises NoRoomError."""
        slots = self._pool.allocate(count_tokens(positions))
        self._add(Lot(positions), slots)
        return slots

    def give(self, move: Move) -> torch.Tensor:
        """Take the end of a lot out of the shard; its slots stay valid until `release`."""
        held = self._lots[move.lot]
        kept = held.lot.tokens - move.tokens
        given = held.slots[kept:]
        positions = head(held.lot.positions, kept)
        self._lots[move.lot] = HeldLot(held.lot._replace(positions=positions), held.slots[:kept])
        return given

    def release(self, slots: torch.Tensor, is_borrowed: bool) -> None:
        """Free slots that have been given away, unless they are the cache's."""
        if not is_borrowed and slots.numel():
            self._pool.free(slots)

    def compact(self) -> None:
        """Forget lots of which nothing is left."""
        self._lots = [held for held in self._lots if held.lot.positions]

    def drop(self) -> None:
        """Free everything."""
        for held in self._lots:
            self.release(held.slots, held.lot.is_borrowed)
        self._lots = []

    def hand_over(self) -> list[HeldLot]:
        """Everything, to somebody else who frees it."""
        lots, self._lots = self._lots, []
        return lots

    def _add(self, lot: Lot, slots: torch.Tensor) -> None:
        if lot.tokens != slots.numel():
            raise ValueError(f"{slots.numel()} slots for {lot.tokens} positions")
        if lot.positions:
            self._lots.append(HeldLot(lot, slots))


class Rebalancing:
    """The moves before a chunk, layer by layer, so that a layer's KV travels while earlier layers compute."""

    def __init__(
        self, pool: KvPool, shard: Shard, moves: Sequence[Move], mesh: Mesh, instance: int, first_tag: int
    ) -> None:
        """Takes room for what comes (NoRoomError) and cuts off what goes. Move i uses the tags first + i * layers."""
        self._pool = pool
        self._shard = shard
        self._mesh = mesh
        self._outgoing: list[_Outgoing] = []
        self._incoming: list[_Incoming] = []
        self._under_way: dict[int, list[tuple[Pending, torch.Tensor, _Incoming | None]]] = {}
        for number, move in enumerate(moves):
            tag = first_tag + number * pool.layers
            if move.source == instance:
                is_borrowed = shard.lots[move.lot].is_borrowed
                self._outgoing.append(_Outgoing(move.target, shard.give(move), is_borrowed, tag))
            elif move.target == instance:
                self._incoming.append(_Incoming(move.source, shard.extend(move.positions), tag))
        shard.compact()

    def start(self, layer: int) -> None:
        """Send and receive one layer; a layer beyond the last, or one that was started, changes nothing."""
        if layer >= self._pool.layers or layer in self._under_way:
            return
        calls = self._under_way[layer] = []
        for incoming in self._incoming:
            block = self._pool.empty_block(incoming.slots.numel())
            calls.append((self._mesh.receive(block, incoming.source, incoming.tag + layer), block, incoming))
        for outgoing in self._outgoing:
            block = torch.stack(self._pool.read(layer, outgoing.slots))
            calls.append((self._mesh.send(block, outgoing.target, outgoing.tag + layer), block, None))

    def finish(self, layer: int) -> None:
        """Wait until one layer is here. Raises MeshError."""
        self.start(layer)
        for call, block, incoming in self._under_way[layer]:
            call.wait()
            if incoming is not None:
                self._pool.write(layer, incoming.slots, block[0], block[1])
        self._under_way[layer] = []

    def close(self) -> None:
        """Free what has gone, once all layers have, or have been given up."""
        for outgoing in self._outgoing:
            self._shard.release(outgoing.slots, outgoing.is_borrowed)
        self._outgoing = []


class _Outgoing(NamedTuple):
    target: int
    slots: torch.Tensor
    is_borrowed: bool
    tag: int


class _Incoming(NamedTuple):
    source: int
    slots: torch.Tensor
    tag: int
