"""Describes where the pools of receivers lie: asked once per receiver, and again after it was restarted."""

from __future__ import annotations

import threading

from sglang_ext.transfer.decide.protocol import ControlRecord
from sglang_ext.transfer.pool_layout import PoolLayout
from sglang_ext.transfer.transports.transport import TransferError


class LayoutRequest(ControlRecord, frozen=True):
    """Sender to receiver: where does your pool lie?"""

    sender: str


class LayoutReply(ControlRecord, frozen=True):
    """Receiver to sender. The layout holds as long as permits bear this epoch."""

    receiver: str
    receiver_epoch: int
    transport: str
    transport_address: str
    layout: PoolLayout


class PeerLayouts:
    """The newest reply of each receiver. Thread-safe."""

    def __init__(self, mine: PoolLayout, transport: str) -> None:
        self._mine = mine
        self._transport = transport
        self._changed = threading.Condition()
        self._replies: dict[str, LayoutReply] = {}

    def is_known(self, receiver: str) -> bool:
        """Return whether nothing needs to be asked."""
        with self._changed:
            return receiver in self._replies

    def learn(self, reply: LayoutReply) -> None:
        """Take note of an answer."""
        with self._changed:
            self._replies[reply.receiver] = reply
            self._changed.notify_all()

    def layout_mismatch(self, receiver: str) -> str | None:
        """One line that says why KV cannot go from this rank to that one; None when it can, or is not known."""
        with self._changed:
            reply = self._replies.get(receiver)
        if reply is None:
            return None
        if reply.transport != self._transport:
            return f"{receiver} receives over {reply.transport}, this instance sends over {self._transport}"
        problem = self._mine.layout_mismatch(reply.layout)
        return None if problem is None else f"{receiver} cannot take this instance's KV: {problem}"

    def wait(self, receiver: str, epoch: int, timeout_s: float) -> LayoutReply:
        """The layout of this incarnation of a receiver. Raises TransferError when it does not come in time.

        An older one is forgotten, so that it is asked for again.
        """
        with self._changed:
            reply = self._replies.get(receiver)
            if reply is not None and reply.receiver_epoch != epoch:
                del self._replies[receiver]

            def is_here() -> bool:
                newest = self._replies.get(receiver)
                return newest is not None and newest.receiver_epoch == epoch

            if not self._changed.wait_for(is_here, timeout_s):
                raise TransferError(f"{receiver} has not sent the layout of its pool")
            return self._replies[receiver]
