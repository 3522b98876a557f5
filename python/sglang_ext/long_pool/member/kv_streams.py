"""Rows of a chunk go to decode from the members that compute them, layer by layer, while the chunk is computed.

    chunk begins ──offer: "these positions"──▶ decode grants ──layer 0, layer 1, …──▶ its slots

The request's own instance opens the transfer and sends what no helper computes (`transfer/endpoint/owner_transfer.py`);
the others are helpers. Where a helper fails, or a chunk has to be computed again, the transfer begins again and the
request's own instance sends everything: rows that have arrived twice, or not at all, do not matter then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sglang_ext.long_pool.decide.sharding import Positions
from sglang_ext.long_pool.member.chunk_step import LayerReady, StreamError
from sglang_ext.long_pool.member.ranks import SINGLE_RANK, Ranks
from sglang_ext.long_pool.member.shard import KvPool
from sglang_ext.long_pool.messages import Destination
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.endpoint.outgoing_transfer import DeviceEvent, OutgoingTransfer, PartRows, SourceChunk


class Target(NamedTuple):
    """A decode rank as one member sends to it."""

    handle: OutgoingTransfer
    first_head: int
    head_count: int
    first_token: int


OpenTarget = Callable[[Destination], Target | None]  # None where it wants no heads of this member; ValueError


class _Offered(NamedTuple):
    """A chunk towards one decode rank."""

    handle: OutgoingTransfer
    chunk: int
    tokens: int

    @property
    def is_read(self) -> bool:
        """Return whether its slots may still be read."""
        return self.handle.stored_chunks <= self.chunk and not self.handle.status.is_released


@dataclass(slots=True)
class Reading:
    """Slots of a chunk from its beginning to the end of its last transfer. Made by `KvStreams.announce`."""

    pins: list[Pin] = field(default_factory=list)
    offered: list[_Offered] = field(default_factory=list)
    has_begun: bool = False  # something of it may have been sent
    is_settled: bool = False  # its slots are not read any more, on any rank

    @property
    def is_over(self) -> bool:
        return not any(chunk.is_read for chunk in self.offered)


@dataclass(slots=True)
class _Stream:
    """All that this member sends of one request."""

    targets: tuple[Target, ...]
    is_own: bool  # its handles are the request's own instance's, which ends them
    is_closed: bool = False

    def restart(self, reason: str) -> None:
        self.is_closed = True
        for target in self.targets:
            target.handle.restart(reason)

    @property
    def has_ended(self) -> bool:
        return self.is_closed and all(target.handle.status.outcome is not None for target in self.targets)


class KvStreams:
    """Describes what a member sends, of all requests; outlives its membership. Belongs to the thread of the engine's
    loop.

    Of several ranks each sends its own heads, to other decode ranks, in its own time. All let go of slots in the same
    turn, as the engine's free slots must be the same on all of them.
    """

    def __init__(self, pool: KvPool, open_target: OpenTarget | None = None, ranks: Ranks = SINGLE_RANK) -> None:
        """`open_target`: None where KV does not travel in this way."""
        self.pool = PinnedPool(pool)
        self._open_target = open_target
        self._ranks = ranks
        self._reading: list[Reading] = []  # the same chunks on all ranks
        self._streams: dict[int, _Stream] = {}
        self._ending: list[_Stream] = []  # of memberships that are over: another one may give their numbers again

    @property
    def is_sending(self) -> bool:
        """Return whether slots are being read, or will be."""
        return bool(self._reading)

    def adopt(self, request: int, targets: Sequence[Target]) -> None:
        """The request is this instance's own: its rows go the way of everything else that it sends."""
        if targets:
            self._streams[request] = _Stream(tuple(targets), is_own=True)

    def announce(self) -> Reading:
        """A step is about to begin, on all ranks, of which something may be sent."""
        reading = Reading()
        self._reading.append(reading)
        return reading

    def begin(
        self,
        reading: Reading,
        request: int,
        destinations: Sequence[Destination],
        positions: Positions,
        slots: torch.Tensor,
    ) -> LayerReady:
        """The announced chunk begins, in which this member computes `positions` into `slots`.

        Call the result after each layer. Raises StreamError.
        """
        if not destinations or not positions:
            return _nothing
        reading.has_begun = True
        reading.pins.append(self.pool.pin(slots))
        chunks: list[_Offered] = []
        stream = self._streams.get(request) or self._open(request, destinations)
        for target in stream.targets:
            spans, kept = _wanted(positions, slots, target.first_token)
            if not spans:
                continue
            shard = KVShard(spans, target.first_head, target.head_count, 0, self.pool.layers)
            try:
                chunk = target.handle.offer(SourceChunk(shard, kept, None))
            except ValueError as error:
                target.handle.restart(str(error))
                continue
            chunks.append(_Offered(target.handle, chunk, len(kept)))
        reading.offered += chunks

        def is_ready(layer: int, computed: DeviceEvent | None) -> None:
            for handle, chunk, tokens in chunks:
                handle.part(chunk, PartRows(layer, 1, 0, tokens, False), computed=computed)

        return is_ready

    def send(
        self,
        reading: Reading,
        request: int,
        destinations: Sequence[Destination],
        positions: Positions,
        slots: torch.Tensor,
    ) -> None:
        """Send rows that are there, as a part of the announced chunk. Raises StreamError."""
        layer_ready = self.begin(reading, request, destinations, positions, slots)
        for layer in range(self.pool.layers):
            layer_ready(layer, None)

    def restart(self, request: int, reason: str) -> None:
        """Have the request's own instance send everything: the rows sent so far cannot be relied upon."""
        stream = self._streams.get(request)
        if stream is not None and not stream.is_closed:
            stream.restart(reason)

    def cancel(self, request: int, reason: str) -> None:
        """Send no more of a request or a pull, also where all of it has been computed."""
        stream = self._streams.get(request)
        if stream is not None:
            stream.restart(reason)

    def abandon(self, reason: str) -> None:
        """Restart all requests that are not closed, and cancel all pulls, whose numbers are below 0: their target has
        forgotten them, or never heard of them. New requests have numbers of their own."""
        for request, stream in self._streams.items():
            if not stream.is_closed or request < 0:
                stream.restart(reason)
        self._ending += self._streams.values()
        self._streams = {}

    def close(self, request: int) -> None:
        """No more of this request is computed here; what has been computed is still sent."""
        stream = self._streams.get(request)
        if stream is not None and not stream.is_closed:
            stream.is_closed = True
            if not stream.is_own:
                for target in stream.targets:
                    target.handle.close()

    def settle(self) -> bool:
        """Unpin slots that are not read any more; whether there were any. Call it often. Collective while anything is
        being sent."""
        before = len(self._reading)
        left = []
        for reading, is_over in zip(
            self._reading, self._ranks.all_of([reading.is_over for reading in self._reading]), strict=True
        ):
            if not is_over:
                left.append(reading)
            else:
                reading.is_settled = True
                for pin in reading.pins:
                    self.pool.unpin(pin)
        self._reading = left
        self._streams = {request: stream for request, stream in self._streams.items() if not stream.has_ended}
        self._ending = [stream for stream in self._ending if not stream.has_ended]
        return len(left) < before

    def _open(self, request: int, destinations: Sequence[Destination]) -> _Stream:
        if self._open_target is None:
            raise StreamError("this instance's transfer backend sends no KV of others' requests")
        stream = self._streams[request] = _Stream((), is_own=False)
        for destination in destinations:
            try:
                target = self._open_target(destination)
            except ValueError as error:
                raise StreamError(f"cannot send to {destination.receiver}: {error}") from None
            if target is not None:
                stream.targets = (*stream.targets, target)
        return stream


def _nothing(layer: int, computed: DeviceEvent | None) -> None:
    """This layer is not sent."""


def _wanted(
    positions: Positions, slots: torch.Tensor, first_token: int
) -> tuple[tuple[TokenSpan, ...], np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    """The positions from `first_token` on, and their slots, in the same order."""
    spans, kept, row = [], [], 0
    for part in positions:
        skipped = max(0, -(-(first_token - part.start) // part.step))
        left = part[skipped:]
        if left:
            spans.append(TokenSpan(left.start, left[-1] + 1, left.step))
            kept.append(slots[row + min(skipped, len(part)) : row + len(part)])
        row += len(part)
    rows = torch.cat(kept) if kept else slots[:0]
    return tuple(spans), rows.cpu().numpy().astype(np.uint32)


class Pin(NamedTuple):
    """Pages that are being read."""

    pages: tuple[int, ...]
    device: torch.device  # of the slots


class PinnedPool:
    """A `KvPool` whose slots stay taken while they are read: what is freed while it is pinned is free once unpinned."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.layers = pool.layers
        self.page_tokens = pool.page_tokens
        self._pins: Counter[int] = Counter()  # by page
        self._deferred: set[int] = set()

    @property
    def deferred_tokens(self) -> int:
        """Slots that were freed and are still read: the pool counts them as taken."""
        return len(self._deferred) * self.page_tokens

    @property
    def device(self) -> torch.device:
        return self._pool.device

    @property
    def free_tokens(self) -> int:
        return self._pool.free_tokens

    def pin(self, slots: torch.Tensor) -> Pin:
        """Keep the pages of these slots until `unpin`."""
        pin = Pin(tuple(torch.unique(slots // self.page_tokens).tolist()), slots.device)
        self._pins.update(pin.pages)
        return pin

    def unpin(self, pin: Pin) -> None:
        """They are not read any more; once for each pin."""
        self._pins.subtract(pin.pages)
        released = [page for page in pin.pages if self._pins[page] <= 0]
        for page in released:
            del self._pins[page]
        freed = [page for page in released if page in self._deferred]
        if freed:
            self._deferred.difference_update(freed)
            self._pool.free(self._slots(freed).to(pin.device))

    def allocate(self, tokens: int) -> torch.Tensor:
        return self._pool.allocate(tokens)

    def free(self, slots: torch.Tensor) -> None:
        if self._pins:
            pages = slots // self.page_tokens
            is_pinned = torch.isin(pages, torch.tensor(list(self._pins), dtype=pages.dtype, device=pages.device))
            self._deferred.update(pages[is_pinned].tolist())
            slots = slots[~is_pinned]
        if slots.numel():
            self._pool.free(slots)

    def count_freed(self, pages: torch.Tensor) -> int:
        pinned = torch.tensor(list(self._pins), dtype=pages.dtype, device=pages.device)
        return int((~torch.isin(pages, pinned)).sum())

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return self._pool.read(layer, slots)

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        self._pool.write(layer, slots, kv)

    def empty_block(self, tokens: int) -> torch.Tensor:
        return self._pool.empty_block(tokens)

    def _slots(self, pages: list[int]) -> torch.Tensor:
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_tokens
        return (first + torch.arange(self.page_tokens)).flatten()
