"""Short rows packed into one piece, around a transport that writes each piece by itself.

A one-sided transport pays for every piece: pages of one token, or some heads of a row, are pieces of a kilobyte, and
hundreds of thousands of them a prompt. Here the device gathers them into a staging block, the block travels as one
piece into a block of the receiver's, and the receiver's device scatters them.

    sender                                             receiver
      `TransportGreeting`  ──────────────────────────▶   once per connection
      ◀───────────────────────────────── `BlockHome`     where its blocks are, and how they are reached
      `BorrowBlock`, once per write ─────────────────▶   a block, or none: then rows go as they are
      half of the block is gathered, and written
      `CopyRows`  ───────────────────────────────────▶   scatters that half, meanwhile the other one is gathered
      `ReturnBlock`  ────────────────────────────────▶   the block is another's

Long rows, and what lies in host memory, go by the transport itself. A block whose sender has gone in the middle may
still be written to, so it is used again only after a while. The receiver scatters under a permit.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy, count_runs, cut_rows, group_by_slots
from sglang_ext.transfer.transports.connections import Inbound, connect, listen, send_at_once
from sglang_ext.transfer.transports.idle_links import IdleLinks
from sglang_ext.transfer.transports.link_records import (
    REFUSALS,
    CopyRequest,
    LinkRecord,
    LinkStatus,
    RecordError,
    TransportGreeting,
    pack,
    receive,
    receive_greeting,
    slot_bytes,
)
from sglang_ext.transfer.transports.memory_regions import OutOfBoundsError
from sglang_ext.transfer.transports.permits import PermitError, Permits
from sglang_ext.transfer.transports.socket_io import receive_exactly, shut
from sglang_ext.transfer.transports.tensor_rows import TensorRows
from sglang_ext.transfer.transports.transport import TransferError, Transport

logger = logging.getLogger(__name__)

# Pieces that are shorter than this on average are packed: a copy between GPUs costs some 3 us at any length.
PACK_BELOW_BYTES = 1 << 16
_HALVES = 2
_MAX_RECORD_BYTES = 1 << 28
_MAX_HOME_BYTES = 1 << 20
_RETIRED_S = 60.0  # longer than a write may take
_ANSWER = struct.Struct("<Bq")  # status, and the offset of a block
_NO_BLOCK = -1

MakeMover = Callable[[ItemBuffer], Transport]


class BlockHome(LinkRecord, frozen=True):
    """Receiver to sender: where its staging blocks lie."""

    mover_address: str  # empty: it has none
    first_address: int
    block_bytes: int


class BorrowBlock(LinkRecord, frozen=True, tag="borrow"):
    """Sender to receiver: a block, for a write under this permit."""

    permit: int


class CopyRows(LinkRecord, frozen=True, tag="copy"):
    """Sender to receiver: rows are in the block."""

    request: CopyRequest


class ReturnBlock(LinkRecord, frozen=True, tag="give_back"):
    """Sender to receiver: nothing writes to the block any more."""


_Request: TypeAlias = BorrowBlock | CopyRows | ReturnBlock
_REQUESTS: msgspec.msgpack.Decoder[_Request] = msgspec.msgpack.Decoder(BorrowBlock | CopyRows | ReturnBlock)
_HOMES = msgspec.msgpack.Decoder(BlockHome)


class _Blocks:
    """Staging memory in equal blocks, taken from the device when the first one is wanted. Thread-safe."""

    def __init__(self, device: torch.device, block_bytes: int, count: int, make_mover: MakeMover) -> None:
        self._device, self.block_bytes, self._count = device, block_bytes, count
        self._make_mover = make_mover
        self._lock = threading.Lock()
        self._free: list[int] = [number * block_bytes for number in range(count)]
        self._retired: list[tuple[float, int]] = []
        self._memory: torch.Tensor | None = None
        self._mover: Transport | None = None
        self._has_failed = False

    def is_ready(self) -> bool:
        """Return whether there is memory for them: it is taken, and made known to a mover, when it is first wanted."""
        with self._lock:
            if self._mover is None and not self._has_failed:
                self._open()
            return self._mover is not None

    @property
    def memory(self) -> torch.Tensor:
        """Return all blocks; after `is_ready`."""
        assert self._memory is not None
        return self._memory

    @property
    def mover(self) -> Transport:
        """Return the transport that knows the blocks; after `is_ready`."""
        assert self._mover is not None
        return self._mover

    def take(self) -> int | None:
        """Return the offset of a free block, or None."""
        with self._lock:
            now_s = time.monotonic()
            self._free += [offset for until_s, offset in self._retired if until_s <= now_s]
            self._retired = [retired for retired in self._retired if retired[0] > now_s]
            return self._free.pop() if self._free else None

    def put_back(self, offset: int, keep_s: float = 0.0) -> None:
        """It may be taken again, after `keep_s`."""
        with self._lock:
            if keep_s:
                self._retired.append((time.monotonic() + keep_s, offset))
            else:
                self._free.append(offset)

    def close(self) -> None:
        with self._lock:
            if self._mover is not None:
                self._mover.close()

    def _open(self) -> None:
        try:
            self._memory = torch.empty(self._count * self.block_bytes, dtype=torch.uint8, device=self._device)
            buffer = ItemBuffer(self._memory.data_ptr(), self._count * self.block_bytes, 1)
            mover = self._make_mover(buffer)
            mover.register([buffer])
        except Exception as error:  # of the device, or of the library
            self._has_failed, self._memory = True, None
            reason = str(error).partition("\n")[0]
            logger.warning("no staging memory for KV, short rows go one by one: %s", reason)
        else:
            self._mover = mover


def _refusal(status: int) -> str:
    return REFUSALS.get(status, f"the peer answered with the unknown status {status}")


class _Link(NamedTuple):
    """A sender's connection."""

    connection: socket.socket
    home: BlockHome

    def borrow(self, permit: int) -> int:
        """Return the offset of a block, or `_NO_BLOCK`. Raises TransferError for a refusal, and OSError."""
        self.connection.sendall(pack(BorrowBlock(permit)))
        status, offset = self._answer()
        if status != LinkStatus.DONE:
            raise TransferError(_refusal(status))
        return offset

    def refusal(self, answers: int) -> str | None:
        """Await this number of answers; return the first refusal among them. Raises OSError."""
        statuses = [self._answer()[0] for _ in range(answers)]
        refused = [status for status in statuses if status != LinkStatus.DONE]
        return _refusal(refused[0]) if refused else None

    def _answer(self) -> tuple[int, int]:
        status, offset = _ANSWER.unpack(receive_exactly(self.connection, _ANSWER.size))
        return status, offset


class PackedTransport:
    """A transport whose short rows of device memory are packed. Listens on `host` from construction to `close`."""

    can_fence = False  # long rows are written by a transport that does not

    def __init__(
        self,
        direct: Transport,
        make_mover: MakeMover,
        host: str,
        device: torch.device,
        packable: Collection[ItemBuffer] | None,
        *,
        block_bytes: int = 16 << 20,
        blocks: int = 8,
        io_timeout_s: float = 30.0,
    ) -> None:
        """`direct` moves all buffers, and what `make_mover` returns a single one, the staging memory: `packable` are
        the buffers on the `device`, None: all. Raises OSError."""
        self.name = direct.name
        self._device = device
        self._direct = direct
        self._rows = TensorRows(device)
        self._packable = packable
        # Both ends of a process have blocks of their own: none waits for a peer with a block that a peer waits for.
        self._outgoing, self._incoming = (_Blocks(device, block_bytes, blocks, make_mover) for _ in range(2))
        self._io_timeout_s = io_timeout_s
        self._permits = Permits()
        self._idle: IdleLinks[_Link] = IdleLinks(lambda link: shut(link.connection))
        listener, self._place = listen(host)
        self._inbound = Inbound(listener, f"kv-{self.name}-packed", self._serve)
        self.address = f"{direct.address} {self._place}"
        self._inbound.start()

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        self._direct.register(buffers)
        self._rows.add([buffer for buffer in buffers if self._packable is None or buffer in self._packable])
        self.address = f"{self._direct.address} {self._place}"

    def allow(self, permit: int) -> None:
        self._permits.allow(permit)
        self._direct.allow(permit)

    def revoke(self, permit: int) -> None:
        self._permits.revoke(permit)
        self._direct.revoke(permit)

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        direct_to, _, place = to.partition(" ")
        runs: dict[tuple[int, int], int] = {}  # of slots, which most copies share
        short = [copy for copy in copies if place and self._is_short(copy, runs)]
        packed = bool(short) and self._write_packed(place, permit, short)
        others = [copy for copy in copies if not packed or not any(copy is other for other in short)]
        if others:
            self._direct.write(direct_to, permit, others)
        return sum(copy.total_bytes for copy in copies)

    def close(self) -> None:
        if self._inbound.is_closed:
            return
        self._inbound.close()
        self._idle.close()
        for blocks in (self._outgoing, self._incoming):
            blocks.close()
        self._direct.close()

    # ---- sending ----

    def _is_short(self, copy: RowCopy, runs: dict[tuple[int, int], int]) -> bool:
        """Return whether the pieces of a copy are several and short."""
        pieces = len(copy.source_slots)
        if pieces < 2 or copy.length_bytes >= PACK_BELOW_BYTES or not self._rows.holds(copy.source_address):
            return False
        if copy.length_bytes == copy.source_stride == copy.target_stride:
            key = id(copy.source_slots), id(copy.target_slots)
            if key not in runs:
                runs[key] = count_runs(copy.source_slots, copy.target_slots)
            pieces = runs[key]
        return pieces > 1 and copy.total_bytes < PACK_BELOW_BYTES * pieces

    def _write_packed(self, place: str, permit: int, copies: Sequence[RowCopy]) -> bool:
        """Return whether all of them have been stored; False where a side has no block for them."""
        block = self._outgoing.take() if self._outgoing.is_ready() else None
        if block is None:
            return False
        try:
            with self._link(place) as link:
                target = link.borrow(permit) if link.home.mover_address else _NO_BLOCK
                if target == _NO_BLOCK:
                    return False
                refusal = self._send(link, permit, copies, block, target)
                link.connection.sendall(pack(ReturnBlock()))
        except (OutOfBoundsError, RecordError, OSError) as error:
            raise TransferError(f"KV write to {place} failed: {error}") from error
        finally:
            self._outgoing.put_back(block)
        if refusal is not None:
            raise TransferError(refusal)
        return True

    def _send(self, link: _Link, permit: int, copies: Sequence[RowCopy], block: int, target: int) -> str | None:
        """Return why the peer has refused some of it; nothing is under way then. Raises what leaves that open."""
        half_bytes = min(self._outgoing.block_bytes, link.home.block_bytes) // _HALVES
        unanswered: deque[int] = deque()  # requests for each half that the peer may still read
        for number, part in enumerate(cut_rows(copies, half_bytes)):
            if len(unanswered) == _HALVES and (refusal := link.refusal(unanswered.popleft())) is not None:
                link.refusal(sum(unanswered))
                return refusal
            first = stop = block + number % _HALVES * half_bytes
            requests = []
            for batch in group_by_slots(part):
                there = target - block + stop
                slots = batch[0]
                stop = self._rows.gather(
                    [copy.source for copy in batch], slots.source_slots, self._outgoing.memory, stop
                )
                targets = [copy.target for copy in batch]
                requests.append(CopyRequest(permit, there, targets, slot_bytes(slots.target_slots)))
            self._move(link, first, target - block + first, stop - first)
            for request in requests:
                link.connection.sendall(pack(CopyRows(request)))
            unanswered.append(len(requests))
        return link.refusal(sum(unanswered))

    def _move(self, link: _Link, source: int, target: int, length_bytes: int) -> None:
        """Write one piece from this side's staging memory into the peer's."""
        slot = np.zeros(1, np.uint32)
        here, there = self._outgoing.memory.data_ptr() + source, link.home.first_address + target
        piece = RowCopy(here, length_bytes, slot, there, length_bytes, slot, length_bytes)
        self._outgoing.mover.write(link.home.mover_address, 0, [piece])

    @contextmanager
    def _link(self, place: str) -> Iterator[_Link]:
        link = self._idle.take(place) or self._connect(place)
        try:
            yield link
        except BaseException:
            shut(link.connection)
            self._idle.drop_ended()
            raise
        self._idle.keep(place, link)

    def _connect(self, place: str) -> _Link:
        connection = connect(place, self._io_timeout_s)
        try:
            connection.sendall(pack(TransportGreeting(self.name)))
            return _Link(connection, receive(connection, _HOMES, _MAX_HOME_BYTES))
        except BaseException:
            shut(connection)
            raise

    # ---- receiving ----

    def _serve(self, connection: socket.socket) -> None:
        lent: list[int] = []
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            send_at_once(connection)
            connection.settimeout(self._io_timeout_s)
            receive_greeting(connection, self.name)
            blocks = self._incoming
            home = BlockHome("", 0, 0)
            if blocks.is_ready():
                home = BlockHome(blocks.mover.address, blocks.memory.data_ptr(), blocks.block_bytes)
            connection.sendall(pack(home))
            connection.settimeout(None)  # a sender may pause for as long as it likes
            while True:
                self._answer(connection, receive(connection, _REQUESTS, _MAX_RECORD_BYTES), lent)
        except (RecordError, TransferError) as error:
            logger.warning("refused a KV writer: %s", error)
        except OSError:
            pass  # it has gone
        finally:
            for offset in lent:
                self._incoming.put_back(offset, _RETIRED_S)

    def _answer(self, connection: socket.socket, request: _Request, lent: list[int]) -> None:
        if isinstance(request, ReturnBlock):
            while lent:
                self._incoming.put_back(lent.pop())
            return
        status, offset = LinkStatus.DONE, _NO_BLOCK
        try:
            permit = request.permit if isinstance(request, BorrowBlock) else request.request.permit
            with self._permits.use(permit, _nothing):
                if isinstance(request, CopyRows):
                    self._scatter(request.request, lent)
                elif (taken := None if lent else self._incoming.take()) is not None:
                    lent.append(taken)
                    offset = taken
        except PermitError:
            status = LinkStatus.NOT_PERMITTED
        except OutOfBoundsError as error:
            logger.warning("refused a KV write: %s", error)
            status = LinkStatus.OUT_OF_BOUNDS
        connection.sendall(_ANSWER.pack(status, offset))

    def _scatter(self, request: CopyRequest, lent: list[int]) -> None:
        slots = request.row_slots
        stop = request.staging_offset + len(slots) * sum(target.length_bytes for target in request.targets)
        if not lent or request.staging_offset < lent[0] or stop > lent[0] + self._incoming.block_bytes:
            raise OutOfBoundsError("rows outside of the staging block")
        self._rows.scatter(request.targets, slots, self._incoming.memory, request.staging_offset)


def _nothing() -> None:
    """Copying waits for no peer, so there is nothing to interrupt."""
