"""What the prefill side holds of a request that it sends to one receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_ext.kv_transfer.outgoing import Outgoing, PartRows, SourceChunk
from sglang_ext.kv_transfer.pool_layout import Slots
from sglang_ext.kv_transfer.transfer_status import SendResult, TransferStatus

if TYPE_CHECKING:
    from sglang_ext.kv_transfer.endpoint import HandshakeEndpoint


class SendHandle:
    """Made by `HandshakeEndpoint.open_sender`. Thread-safe."""

    def __init__(self, endpoint: HandshakeEndpoint, outgoing: Outgoing) -> None:
        self._endpoint = endpoint
        self._outgoing = outgoing

    @property
    def status(self) -> TransferStatus:
        """How far it is; `is_released` says that the source slots may be used for something else."""
        return self._endpoint.send_status(self._outgoing)

    @property
    def stored_chunks(self) -> int:
        """The first so many chunks are in the receiver's memory: nobody reads their source slots any more."""
        return self._endpoint.stored_chunks(self._outgoing)

    @property
    def result(self) -> SendResult | None:
        """Its record, once it has ended."""
        return self._outgoing.result

    def offer(self, chunk: SourceChunk, *, is_last: bool = False) -> int:
        """A chunk will be computed; returns its index. Raises ValueError when it makes no sense."""
        return self._endpoint.offer(self._outgoing, chunk, is_last)

    def part(
        self,
        chunk: int,
        rows: PartRows,
        slots: Slots | None = None,
        state_slots: tuple[Slots, ...] | None = None,
    ) -> None:
        """A part of a chunk is in its source slots: `slots`, where the chunk did not say them, one per token.

        `state_slots` likewise, per kind of extra state, with the metadata. Ignored once the transfer has ended.
        Raises ValueError when it is more than the chunk has, or its slots are not known.
        """
        self._endpoint.part_ready(self._outgoing, chunk, rows, slots, state_slots)

    def close(self) -> None:
        """No further chunk will be offered; not needed after the last one was offered as such."""
        self._endpoint.end_sending(self._outgoing, None)

    def abort(self, reason: str) -> None:
        """Give the transfer up, on both sides. Ignored once it has ended."""
        self._endpoint.end_sending(self._outgoing, reason)

    def restart(self, reason: str) -> None:
        """End this attempt on both sides: the receiver invites to the next one. Ignored once it has ended."""
        self._endpoint.restart_sending(self._outgoing, reason)
