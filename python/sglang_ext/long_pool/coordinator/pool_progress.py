"""Describes what a long pool has under way: records of ordered steps, and KV on its way straight to decode."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_ext.long_pool.coordinator.pool_history import StepRecord
from sglang_ext.long_pool.decide.orders import Collect, RunChunk
from sglang_ext.long_pool.messages import AddressedMessage, Destination, OfferMessage, Streamed


@dataclass(slots=True)
class OpenStep:
    """The record of an ordered step; who has answered for it is known to the coordinator (`RunningStep`)."""

    order: RunChunk | Collect
    record: StepRecord
    failed_s: float | None = None  # when the first member has failed

    def record_failure(self, now_s: float) -> None:
        """A member has failed, or has gone."""
        self.record.has_failed = True
        self.failed_s = now_s if self.failed_s is None else self.failed_s


@dataclass(slots=True)
class _Entry:
    owner: int
    destinations: tuple[Destination, ...]
    end_tokens: int
    end_before_tokens: int  # the last chunk
    is_intact: bool = True
    members: set[int] = field(default_factory=set)  # members that were ordered to send


class StreamLedger:
    """Records of all requests in the pool where members send their KV straight to decode, and the rows they have sent.

    As long as nothing fails, members send each chunk as they compute it, and the request's own instance the rest. With
    the first chunk that fails once something of it may have been sent, or member that is lost, nothing more of this
    request is sent in this way: its own instance sends everything.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._out: list[AddressedMessage] = []

    def offered(self, owner: int, message: OfferMessage) -> None:
        """A request has come into the pool."""
        if message.destinations:
            self._entries[message.request] = _Entry(owner, message.destinations, *2 * (message.cached_tokens,))

    def ordered(self, order: RunChunk) -> tuple[Destination, ...]:
        """A chunk is ordered; where its members send it. Its owner is notified first (`take_messages`)."""
        entry = self._entries.get(order.request)
        if entry is None or not entry.is_intact:
            return ()
        entry.members.update(order.layout.group)
        entry.end_before_tokens = entry.end_tokens
        entry.end_tokens = 1 + max(part[-1] for positions in order.layout.new for part in positions)
        self._notify_owner(order.request, entry)
        return entry.destinations

    def taken_back(self, request: int) -> None:
        """The last chunk has failed before anything of it was sent: all is as before it."""
        entry = self._entries.get(request)
        if entry is not None and entry.is_intact:
            entry.end_tokens = entry.end_before_tokens
            self._notify_owner(request, entry)

    def broken(self, request: int) -> None:
        """A chunk has failed of which something may have been sent."""
        entry = self._entries.get(request)
        if entry is not None and entry.is_intact:
            entry.is_intact = False
            if entry.members:
                self._notify_owner(request, entry)

    def lost(self, instance: int) -> None:
        """A member has gone, with what it had not sent yet."""
        for request, entry in self._entries.items():
            if instance in entry.members:
                self.broken(request)

    def ended(self, request: int) -> None:
        """A request has left the pool."""
        self._entries.pop(request, None)

    def take_messages(self) -> list[AddressedMessage]:
        """Return what is to be sent before anything else."""
        out, self._out = self._out, []
        return out

    def _notify_owner(self, request: int, entry: _Entry) -> None:
        self._out.append(AddressedMessage(entry.owner, Streamed(request, entry.end_tokens, entry.is_intact)))
