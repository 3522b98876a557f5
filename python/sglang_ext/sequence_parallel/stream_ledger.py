"""What a coordinator knows of the KV that members send straight to decode: who is told where, and what has been sent.

As long as everything goes well, members send each chunk as they compute it, and the request's own instance the rest.
With the first chunk that fails, or member that is lost, nothing more of this request is sent in this way: its own
instance sends everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_ext.policy.cdsp.coordination import RunChunk
from sglang_ext.sequence_parallel.destination import Destination
from sglang_ext.sequence_parallel.exchange_records import Outgoing
from sglang_ext.sequence_parallel.messages import OfferMessage, Streamed


@dataclass(slots=True)
class _Entry:
    owner: int
    destinations: tuple[Destination, ...]
    end_tokens: int
    is_intact: bool = True
    members: set[int] = field(default_factory=set)  # who has been told to send


class StreamLedger:
    """All requests that are in the pool."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._out: list[Outgoing] = []

    def offered(self, owner: int, message: OfferMessage) -> None:
        """A request has come into the pool."""
        if message.destinations:
            self._entries[message.request] = _Entry(owner, message.destinations, message.cached_tokens)

    def ordered(self, order: RunChunk) -> tuple[Destination, ...]:
        """A chunk is ordered; where its members send it. The request's own instance is told first (`take_messages`)."""
        entry = self._entries.get(order.request)
        if entry is None or not entry.is_intact:
            return ()
        entry.members.update(order.layout.group)
        entry.end_tokens = 1 + max(part[-1] for positions in order.layout.new for part in positions)
        self._say(order.request, entry)
        return entry.destinations

    def broken(self, request: int) -> None:
        """A chunk has failed."""
        entry = self._entries.get(request)
        if entry is not None and entry.is_intact:
            entry.is_intact = False
            if entry.members:
                self._say(request, entry)

    def lost(self, instance: int) -> None:
        """A member has gone, with what it had not sent yet."""
        for request, entry in self._entries.items():
            if instance in entry.members:
                self.broken(request)

    def ended(self, request: int) -> None:
        """A request has left the pool."""
        self._entries.pop(request, None)

    def take_messages(self) -> list[Outgoing]:
        """What is to be said before anything else."""
        out, self._out = self._out, []
        return out

    def _say(self, request: int, entry: _Entry) -> None:
        self._out.append(Outgoing(entry.owner, Streamed(request, entry.end_tokens, entry.is_intact)))
