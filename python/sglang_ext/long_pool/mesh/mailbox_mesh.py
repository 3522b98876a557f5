"""A mesh over one-sided writes (NVSHMEM, and what is alike): every member has mailboxes for every other one.

A tensor travels in pieces. A piece is written into a mailbox of the receiver together with a rising count of arrivals;
the receiver copies it out and raises the sender's count of mailboxes that are free again. Pieces of all calls of a
batch are started in turn, each one's sending before its receiving, so that two members that send each other more
than their mailboxes hold do not wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from sglang_ext.long_pool.mesh.mesh import Lane, MeshError, Pending

_POLL_S = 0.0002


class MemoryMark(Protocol):
    """A place in the order of a memory's operations."""

    def wait(self) -> None:
        """Let what the caller computes next come behind it."""

    def is_reached(self) -> bool:
        """Return whether everything before it is done."""


class SymmetricMemory(Protocol):
    """Memory that has the same shape at every member. Operations are ordered, and done when their turn has come."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """A block, uint8, at every member: all of them allocate the same in the same order."""

    def signals(self, count: int) -> None:
        """Counters, all 0, at every member; once, before anything else is done."""

    def begin(self) -> None:
        """What follows comes behind what the caller has computed."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy within this member."""

    def put(self, target: torch.Tensor, source: torch.Tensor, member: int, signal: int, count: int) -> None:
        """Write a block's beginning at another member from a block's here, then set a counter there."""

    def set_signal(self, member: int, signal: int, count: int) -> None:
        """Set a counter at another member."""

    def wait_signal(self, signal: int, count: int) -> None:
        """Go on when this member's counter is at least `count`."""

    def mark(self) -> MemoryMark:
        """Return a mark behind all work so far."""

    def release(self) -> None:
        """Let every wait end, from any thread: the memory is of no use any more."""


class _Call(NamedTuple):
    tensor: torch.Tensor  # uint8
    member: int  # by place
    is_send: bool


class MailboxMesh:
    """See `mesh.Mesh`. Belongs to one thread; only `interrupt` may be called from others."""

    def __init__(
        self,
        memory: SymmetricMemory,
        members: Sequence[int],
        instance: int,
        timeout_s: float,
        piece_bytes: int = 2**24,
        mailboxes: int = 2,
    ) -> None:
        """All members do the same. `timeout_s` bounds every `settle`; each pair has `mailboxes` in each direction."""
        self.members = tuple(members)
        self._place = {member: place for place, member in enumerate(self.members)}
        self._own = self._place[instance]
        self._memory = memory
        self._timeout_s = timeout_s
        self._piece_bytes = piece_bytes
        self._batch: list[_Call] | None = None
        self._marks: list[MemoryMark] = []
        self._is_interrupted = False
        size = len(self.members)
        self._inbox = [[memory.allocate(piece_bytes) for _ in range(mailboxes)] for _ in range(size)]
        # A write has read its source when its turn is over: one block serves all of them.
        self._outbox = memory.allocate(piece_bytes)
        # Arrivals from each member, then free mailboxes at each member.
        memory.signals(2 * size)
        self._sent, self._received = [0] * size, [0] * size

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return self._start(_Call(_as_bytes(tensor), self._place[instance], is_send=True))

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return self._start(_Call(_as_bytes(tensor), self._place[instance], is_send=False))

    @contextmanager
    def batch(self, lane: Lane = Lane.RING) -> Iterator[None]:
        calls = self._batch = []
        pending = self._pending = _MailboxCall(self)
        try:
            yield
        finally:
            self._batch = None
        pending.tensors = [call.tensor for call in calls]
        pending.mark = self._run(calls) if calls else None

    def meet(self) -> None:
        word = torch.zeros(1, dtype=torch.uint8, device=self._outbox.device)
        with self.batch():
            for member in self.members:
                if self._place[member] != self._own:
                    self.receive(torch.empty_like(word), member, 0)
                    self.send(word, member, 0)
        self.settle()

    def settle(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        marks, self._marks = self._marks, []
        for mark in marks:
            while not mark.is_reached():
                if time.monotonic() > deadline_s:
                    self.interrupt()
                    raise MeshError(f"nothing has come for {self._timeout_s:g} s")
                time.sleep(_POLL_S)
        self.check()

    def interrupt(self) -> None:
        """End every wait; the mesh is of no use any more."""
        self._is_interrupted = True
        self._memory.release()

    def check(self) -> None:
        """Raises MeshError where the mesh is of no use any more: what has come may be nothing."""
        if self._is_interrupted:
            raise MeshError("the step has been given up")

    def _start(self, call: _Call) -> Pending:
        self.check()
        if self._batch is None:
            with self.batch():
                return self._start(call)
        self._batch.append(call)
        return self._pending

    def _run(self, calls: Sequence[_Call]) -> MemoryMark:
        self._memory.begin()
        in_turn = sorted(calls, key=lambda call: not call.is_send)
        pieces = [range(0, call.tensor.numel(), self._piece_bytes) for call in calls]
        for number in range(max(map(len, pieces))):
            for call in in_turn:
                piece = call.tensor[number * self._piece_bytes :][: self._piece_bytes]
                if piece.numel():
                    (self._send_piece if call.is_send else self._receive_piece)(piece, call.member)
        mark = self._memory.mark()
        self._marks.append(mark)
        return mark

    def _send_piece(self, piece: torch.Tensor, member: int) -> None:
        memory, number = self._memory, self._sent[member]
        self._sent[member] += 1
        mailboxes = len(self._inbox[member])
        if number >= mailboxes:
            memory.wait_signal(len(self.members) + member, number - mailboxes + 1)
        source = self._outbox[: piece.numel()]
        memory.copy(source, piece)
        memory.put(self._inbox[self._own][number % mailboxes], source, member, self._own, number + 1)

    def _receive_piece(self, piece: torch.Tensor, member: int) -> None:
        memory, number = self._memory, self._received[member]
        self._received[member] += 1
        memory.wait_signal(member, number + 1)
        memory.copy(piece, self._inbox[member][number % len(self._inbox[member])][: piece.numel()])
        memory.set_signal(member, len(self.members) + self._own, number + 1)


class _MailboxCall:
    """All calls of a batch are done together."""

    def __init__(self, mesh: MailboxMesh) -> None:
        self._mesh = mesh
        self.tensors: list[torch.Tensor] = []  # until they have been waited for
        self.mark: MemoryMark | None = None

    def wait(self) -> None:
        if self.mark is not None:
            self.mark.wait()
        self._mesh.check()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
