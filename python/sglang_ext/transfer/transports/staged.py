"""Writes by way of staging memory: a sender fills it with rows, the receiver copies them to their places.

A connection has staging memory of its own, at the receiver or where both see it, and the receiver copies out of it
under a permit: a sender that has lost its right can damage nothing but what it has staged itself. How bytes come into
that memory is what transports differ in.

    `CopyRequest`      sender to receiver
    `LinkStatus`       receiver to sender

One half of the staging memory is filled while the receiver copies out of the other.
"""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy, cut_rows, group_by_slots
from sglang_ext.transfer.transports.connections import Inbound
from sglang_ext.transfer.transports.idle_links import IdleLinks
from sglang_ext.transfer.transports.link_records import (
    COPY_DECODER,
    REFUSALS,
    CopyRequest,
    LinkStatus,
    RecordError,
    pack,
    receive,
    slot_bytes,
)
from sglang_ext.transfer.transports.memory_regions import MemoryRegions, OutOfBoundsError
from sglang_ext.transfer.transports.permits import PermitError, Permits
from sglang_ext.transfer.transports.row_moves import Bytes, Piece, RowWindow, SlotIndex, open_rows
from sglang_ext.transfer.transports.socket_io import receive_exactly, shut
from sglang_ext.transfer.transports.transport import TransferError

logger = logging.getLogger(__name__)

HALVES = 2
_MAX_REQUEST_BYTES = 1 << 28


class StagedLink(ABC):
    """A sender's connection, and what it stages rows in. Its methods raise OSError when the peer has gone, and
    TransferError."""

    def __init__(self, connection: socket.socket, staging: Bytes) -> None:
        self.connection = connection
        self.staging = staging
        self._unanswered = 0  # requests

    @abstractmethod
    def make_room(self) -> None:
        """Return when the half of the staging memory may be filled whose turn it is."""

    @abstractmethod
    def send(self, request: CopyRequest, stop: int) -> None:
        """Send the half of the staging buffer that is filled from `request.staging_offset` to `stop`."""

    def drain(self) -> None:
        """Return when the receiver has stored all that was sent."""
        self._await_answers(0)

    def give_up(self) -> None:
        """Return, after a write has failed, when nothing of it is under way, as far as the peer still answers."""
        try:
            while self._unanswered:
                try:
                    self._await_answers(self._unanswered - 1)
                except TransferError:
                    pass
        except OSError:
            pass

    def close(self) -> None:
        """Drop it. Safe to call again."""
        shut(self.connection)

    def _request_copy(self, request: CopyRequest) -> None:
        self.connection.sendall(pack(request))
        self._unanswered += 1

    def _await_answers(self, left: int) -> None:
        """Wait until only `left` answers are missing, oldest first. Raises TransferError for a refusal."""
        while self._unanswered > left:
            status = receive_exactly(self.connection, 1)[0]
            self._unanswered -= 1
            if status != LinkStatus.DONE:
                raise TransferError(REFUSALS.get(status, f"the peer answered with the unknown status {status}"))


class StagedTransport(ABC):
    """Serves at a listening socket from construction to `close`."""

    name: str
    can_fence = True
    address: str

    def __init__(self, listener: socket.socket, staging_bytes: int) -> None:
        self._staging_bytes = staging_bytes
        self._regions = MemoryRegions()
        self._permits = Permits()
        self._idle: IdleLinks[StagedLink] = IdleLinks(StagedLink.close)
        self._inbound = Inbound(listener, f"kv-{self.name}", self._serve)

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        for buffer in buffers:
            self._regions.add(buffer.address, buffer.length_bytes)

    def allow(self, permit: int) -> None:
        self._permits.allow(permit)

    def revoke(self, permit: int) -> None:
        self._permits.revoke(permit)

    def close(self) -> None:
        self._inbound.close()
        self._idle.close()

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        half_bytes = self._staging_bytes // HALVES
        try:
            with self._link(to) as link:
                half = 0
                for part in cut_rows(copies, half_bytes):
                    for batch in group_by_slots(part):
                        link.make_room()
                        self._send(link, half * half_bytes, permit, batch)
                        half = (half + 1) % HALVES
                link.drain()
        except (OutOfBoundsError, RecordError, OSError) as error:
            raise TransferError(f"KV write to {to} failed: {error}") from error
        return sum(copy.total_bytes for copy in copies)

    # ---- what transports differ in ----

    @abstractmethod
    def _connect(self, to: str) -> StagedLink:
        """Raises OSError, or TransferError."""

    @abstractmethod
    def _staging_of(self, connection: socket.socket) -> AbstractContextManager[Bytes]:
        """Return where a sender that has just connected stages its rows, as this side sees it, until the connection's
        end. Raises OutOfBoundsError where the sender's greeting makes no sense, and OSError."""

    # ---- sending ----

    def _send(self, link: StagedLink, staging_offset: int, permit: int, batch: Sequence[RowCopy]) -> None:
        """Copies of the same slots."""
        first, stop = batch[0], staging_offset
        with open_rows(self._regions, [copy.source for copy in batch], SlotIndex(first.source_slots)) as windows:
            for piece in _pieces(windows, staging_offset):
                piece.gather(link.staging)
                stop = piece.stop
        targets = [copy.target for copy in batch]
        link.send(CopyRequest(permit, staging_offset, targets, slot_bytes(first.target_slots)), stop)

    @contextmanager
    def _link(self, to: str) -> Iterator[StagedLink]:
        link = self._idle.take(to) or self._connect(to)
        try:
            yield link
        except BaseException as error:
            if not isinstance(error, OSError):
                link.give_up()
            link.close()
            self._idle.drop_ended()
            raise
        self._idle.keep(to, link)

    # ---- receiving ----

    def _serve(self, connection: socket.socket) -> None:
        try:
            with self._staging_of(connection) as staging:
                while True:
                    connection.sendall(bytes([self._serve_request(connection, staging)]))
        except (OutOfBoundsError, RecordError) as error:
            logger.warning("refused a KV writer: %s", error)
        except OSError:
            pass  # it has gone

    def _serve_request(self, connection: socket.socket, staging: Bytes) -> LinkStatus:
        request = receive(connection, COPY_DECODER, _MAX_REQUEST_BYTES)
        try:
            with self._permits.use(request.permit, _nothing):
                self._scatter(staging, request)
        except PermitError:
            return LinkStatus.NOT_PERMITTED
        except OutOfBoundsError as error:
            logger.warning("refused a KV write: %s", error)
            return LinkStatus.OUT_OF_BOUNDS
        return LinkStatus.DONE

    def _scatter(self, staging: Bytes, request: CopyRequest) -> None:
        slots = request.row_slots
        if not len(slots):
            return
        with open_rows(self._regions, request.targets, SlotIndex(slots)) as windows:
            row_bytes = sum(target.length_bytes for target in request.targets)
            if request.staging_offset + row_bytes * len(slots) > len(staging):
                raise OutOfBoundsError("rows outside of the staging memory")
            for piece in _pieces(windows, request.staging_offset):
                piece.scatter(staging)


def _pieces(windows: Sequence[RowWindow], staging_offset: int) -> Iterator[Piece]:
    """All rows of each window, one after the other in staging memory."""
    for window in windows:
        piece = Piece(window, 0, window.count, staging_offset)
        yield piece
        staging_offset = piece.stop


def _nothing() -> None:
    """Copying waits for no peer, so there is nothing to interrupt."""
