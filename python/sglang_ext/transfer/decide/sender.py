"""One request's way from a prefill rank to one decode rank: a state machine without I/O.

    open ──last chunk stored and known to be──▶ over
     │
     └──abort, refusal, lost receiver, failed write──▶ stopping ──no write under way──▶ stopped ──closed─▶ over

A chunk is what is offered and granted as a whole, usually while it is being computed; a part of it (a layer, a
range of tokens) is written as soon as it is ready and the chunk is granted. A chunk is stored when the cells
(tokens × heads × layers) of its written parts add up to its own.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from sglang_ext.identifiers import TransferId
from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import (
    Grant,
    ReceiverAbort,
    ReceiverClosed,
    ReceiverReport,
    Send,
    SendEnded,
    SenderAction,
    SenderActions,
    SenderReport,
    SenderStopped,
    SendRecord,
    TransferOutcome,
    UseGrant,
    WritePart,
)
from sglang_ext.transfer.decide.shards import KVShard, shard_problem


class SenderPhase(Enum):
    """Describes where a sender is."""

    OPEN = "open"
    STOPPING = "stopping"  # failed; a write is under way
    STOPPED = "stopped"  # nothing is under way; the receiver may not know it
    OVER = "over"


class Sender:
    """Events return what to do, in order; `on_timer` wants to be called at least every `retry_s / 2` until
    `is_over`. `epoch` differs after a restart of this process (31 random bits)."""

    def __init__(
        self,
        transfer_id: TransferId,
        address: str,
        receiver: str,
        epoch: int,
        options: HandshakeOptions,
        now_s: float,
        sender_count: int | None = None,
        *,
        is_helper: bool = False,
        may_have_helpers: bool = False,
    ) -> None:
        """`is_helper`: the request is another instance's, which sends all of it where this instance fails.

        `may_have_helpers`: others may send parts of it. A write may then fail because one of them has, and it is over
        only when the receiver has everything from all senders.
        """
        self.transfer_id = transfer_id
        self.is_helper = is_helper
        self.may_have_helpers = may_have_helpers
        self.address = address
        self.receiver = receiver
        self.epoch = epoch
        self.options = options
        self.sender_count = sender_count
        self._phase = SenderPhase.OPEN
        self._chunks: list[OfferedChunk] = []
        self._is_last_offered = False
        self._receiver_epoch: int | None = None
        self._accepted = self._grants_seen = self._stored = self._stored_known = 0
        self._is_last_known = False
        self._in_flight: set[tuple[int, int]] = set()
        self._written_parts = self._overlapped_parts = 0
        self._outcome = (TransferOutcome.COMPLETE, "")
        self._started_s = self._acknowledged_s = self._sent_s = now_s
        self._stopped_s = now_s
        self._first_answer_s: float | None = None
        self._first_grant_s: float | None = None
        self._grant_wait_s = self._exposed_wait_s = 0.0
        self._retransmissions = 0
        self._out: list[SenderAction] = []

    @property
    def phase(self) -> SenderPhase:
        return self._phase

    @property
    def is_over(self) -> bool:
        """Return whether it may be forgotten."""
        return self._phase is SenderPhase.OVER

    @property
    def outcome(self) -> tuple[TransferOutcome, str] | None:
        """Return how it ended and why; None while it is open."""
        return None if self._phase is SenderPhase.OPEN else self._outcome

    @property
    def chunk_count(self) -> int:
        """Chunks offered so far: the index of the next one."""
        return len(self._chunks)

    @property
    def receiver_epoch(self) -> int | None:
        """Return which incarnation of the receiver has answered."""
        return self._receiver_epoch

    @property
    def stored_chunks(self) -> int:
        """Chunks of which the receiver's memory has every byte: their source slots are read no more."""
        return self._stored

    @property
    def is_acknowledged(self) -> bool:
        """Return whether the receiver has answered."""
        return self._first_answer_s is not None

    # ---- events of this instance; ignored once it is not open ----

    def start(self, now_s: float) -> SenderActions:
        """Shake hands: the place of the request in the receiver's order is decided now."""
        if self._phase is SenderPhase.OPEN:
            self._report(now_s)
        return self._flush()

    def offer(self, shard: KVShard, now_s: float, *, is_last: bool = False) -> SenderActions:
        """A chunk will be computed here. Raises ValueError when it makes no sense or comes after the last."""
        problem = shard_problem(shard)
        if problem is None and self._is_last_offered:
            problem = "the last chunk has been offered"
        if problem is not None:
            raise ValueError(f"transfer {self.transfer_id}: cannot offer a chunk: {problem}")
        if self._phase is SenderPhase.OPEN:
            self._chunks.append(OfferedChunk(shard, now_s))
            self._is_last_offered = is_last
            self._report(now_s)
        return self._flush()

    def close(self, now_s: float) -> SenderActions:
        """No further chunk will be offered."""
        if self._phase is SenderPhase.OPEN and not self._is_last_offered:
            self._is_last_offered = True
            self._report(now_s)
            self._end_if_done(now_s)
        return self._flush()

    def part_ready(self, chunk: int, part: Part, now_s: float) -> SenderActions:
        """A part of a chunk has been computed; parts are numbered per chunk in the order of these calls.

        Raises ValueError when it is more than the chunk has.
        """
        if self._phase is not SenderPhase.OPEN or self._stop_if_lost(now_s):
            return self._flush()
        state = self._chunks[chunk]
        is_aux_surplus = part.has_aux and (state.is_aux_ready or not state.shard.has_extras)
        if part.cells < 0 or state.cells_ready + part.cells > state.shard.cells or is_aux_surplus:
            raise ValueError(f"transfer {self.transfer_id}: the parts of chunk {chunk} are more than the chunk")
        state.cells_ready += part.cells
        state.is_aux_ready |= part.has_aux
        if state.ready_s is None:
            state.ready_s = now_s
        state.parts.append(part)
        if state.grant is not None:
            self._write(chunk, len(state.parts) - 1, state.grant)
        return self._flush()

    def on_written(self, chunk: int, part: int, now_s: float) -> SenderActions:
        """The receiver's memory has every byte of a part."""
        if (chunk, part) not in self._in_flight:
            return ()
        self._in_flight.remove((chunk, part))
        if self._phase is SenderPhase.STOPPING:
            self._stop_when_still(now_s)
        elif self._phase is SenderPhase.OPEN:
            self._written_parts += 1
            state = self._chunks[chunk]
            self._overlapped_parts += state.cells_ready < state.shard.cells
            state.cells_written += state.parts[part].cells
            state.is_aux_written |= state.parts[part].has_aux
            if state.is_written:
                self._stored = chunk + 1
                self._report(now_s)
        return self._flush()

    def on_write_failed(self, chunk: int, part: int, reason: str, now_s: float) -> SenderActions:
        """A write has ended, and some of its bytes may be missing."""
        if (chunk, part) not in self._in_flight:
            return ()
        self._in_flight.remove((chunk, part))
        # Decode takes permits back before it asks for everything again.
        outcome = TransferOutcome.RESTARTED if self.may_have_helpers else TransferOutcome.WRITE_FAILED
        self._stop(self._own_failure(outcome), reason, now_s)
        self._stop_when_still(now_s)
        return self._flush()

    def abort(self, reason: str, now_s: float) -> SenderActions:
        """The request is not wanted any more, or its KV has been lost; a helper's end is no more than a restart."""
        self._stop(self._own_failure(TransferOutcome.ABORTED), reason, now_s)
        return self._flush()

    def restart(self, reason: str, now_s: float) -> SenderActions:
        """This attempt ends, on both sides; the receiver is ready for another one once no write is under way."""
        self._stop(TransferOutcome.RESTARTED, reason, now_s)
        return self._flush()

    # ---- messages ----

    def on_report(self, report: ReceiverReport, now_s: float) -> SenderActions:
        """The receiver reports what it knows and grants."""
        if self._phase is not SenderPhase.OPEN or not self._is_from_receiver(
            report.receiver_epoch, report.sender_epoch
        ):
            return self._flush()
        self._acknowledge(report.echoed_sent_s, now_s)
        if self._stop_if_lost(now_s):
            return self._flush()
        self._accepted = max(self._accepted, min(report.accepted, len(self._chunks)))
        self._stored_known = max(self._stored_known, min(report.stored, len(self._chunks)))
        self._is_last_known |= report.is_last_known and report.accepted >= len(self._chunks) and self._is_last_offered
        grant = report.grant
        if grant is not None and grant.chunk == self._grants_seen < len(self._chunks):
            self._use(grant, now_s)
        if report.is_complete and not self._in_flight:
            self._finish(now_s)
        else:
            self._end_if_done(now_s)
        return self._flush()

    def on_abort(self, message: ReceiverAbort, now_s: float) -> SenderActions:
        """The receiver wants nothing more, and wants to know when nothing is being written."""
        if message.sender_epoch != self.epoch or self._phase is SenderPhase.OVER:
            return ()
        if self._phase is SenderPhase.STOPPED:
            self._send_stopped(now_s)
        else:
            outcome = TransferOutcome.RESTARTED if message.restarts else TransferOutcome.REMOTE_ABORT
            self._stop(outcome, message.reason, now_s)
        return self._flush()

    def on_closed(self, message: ReceiverClosed, now_s: float) -> SenderActions:
        """The receiver knows that this sender has stopped."""
        if message.sender_epoch == self.epoch and self._phase is SenderPhase.STOPPED:
            self._phase = SenderPhase.OVER
            if self._outcome[0] is TransferOutcome.RESTARTED:
                if message.is_complete:
                    self._outcome = (TransferOutcome.COMPLETE, "")  # there is nothing to be sent again
                elif self._receiver_epoch not in (None, message.receiver_epoch):
                    self._outcome = (TransferOutcome.PEER_LOST, f"{self.receiver} has been started again")
        return ()

    def on_timer(self, now_s: float) -> SenderActions:
        """Repeat what was not answered, stay alive in the receiver's eyes, notice that the receiver is lost."""
        since_sent_s = now_s - self._sent_s
        if self._phase is SenderPhase.STOPPED:
            if now_s - self._stopped_s >= self.options.lease_s:
                self._phase = SenderPhase.OVER
                if self._outcome[0] is TransferOutcome.RESTARTED:
                    # The receiver, which could ask for it again, has not acknowledged.
                    self._outcome = (TransferOutcome.PEER_LOST, f"lost {self.receiver} at a restart")
            elif since_sent_s >= self.options.retry_s:
                self._retransmissions += 1
                self._send_stopped(now_s)
        elif self._phase is not SenderPhase.OVER and not self._stop_if_lost(now_s):
            is_unanswered = self._phase is SenderPhase.OPEN and self._has_unanswered()
            if is_unanswered and since_sent_s >= self.options.retry_s:
                self._retransmissions += 1
                self._report(now_s)
            elif since_sent_s >= self.options.heartbeat_s:
                self._report(now_s)
        return self._flush()

    # ---- what follows ----

    def _is_from_receiver(self, receiver_epoch: int, sender_epoch: int) -> bool:
        """Bind to the first incarnation of the receiver that answers; a message of another one means a restart."""
        if sender_epoch != self.epoch:
            return False
        if self._receiver_epoch is None:
            self._receiver_epoch = receiver_epoch
        return self._receiver_epoch == receiver_epoch

    def _has_unanswered(self) -> bool:
        return (
            self._first_answer_s is None
            or self._accepted < len(self._chunks)
            or self._stored_known < self._stored
            or self._is_last_known < self._is_last_offered
            # Whether the others have done their part is worth asking often.
            or (self.may_have_helpers and self._is_last_offered and self._stored == len(self._chunks))
        )

    def _use(self, grant: Grant, now_s: float) -> None:
        state = self._chunks[grant.chunk]
        state.grant = grant
        self._grants_seen += 1
        self._grant_wait_s += now_s - state.offered_s
        self._exposed_wait_s += 0.0 if state.ready_s is None else now_s - state.ready_s
        if self._first_grant_s is None:
            self._first_grant_s = now_s
        self._out.append(UseGrant(grant))
        for part in range(len(state.parts)):
            self._write(grant.chunk, part, grant)

    def _write(self, chunk: int, part: int, grant: Grant) -> None:
        self._in_flight.add((chunk, part))
        self._out.append(WritePart(chunk, part, grant.permit))

    def _end_if_done(self, now_s: float) -> None:
        is_done = self._is_last_offered and self._is_last_known and self._stored_known == len(self._chunks)
        if is_done and not self.may_have_helpers:
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        self._phase = SenderPhase.OVER
        self._out.append(SendEnded(self._record(now_s)))

    def _stop(self, outcome: TransferOutcome, reason: str, now_s: float) -> None:
        if self._phase is SenderPhase.OPEN:
            self._phase = SenderPhase.STOPPING
            self._outcome = (outcome, reason)
            self._stop_when_still(now_s)

    def _own_failure(self, outcome: TransferOutcome) -> TransferOutcome:
        return TransferOutcome.RESTARTED if self.is_helper else outcome

    def _stop_if_lost(self, now_s: float) -> bool:
        """Nothing may be written after the lease: the receiver may have given the slots to another request."""
        is_lost = self._phase is SenderPhase.OPEN and now_s - self._acknowledged_s >= self.options.lease_s
        if is_lost:
            reason = f"lost {self.receiver}: silent for {self.options.lease_s:g} s"
            self._stop(self._own_failure(TransferOutcome.PEER_LOST), reason, now_s)
        return is_lost

    def _stop_when_still(self, now_s: float) -> None:
        """Only now may the receiver use its slots, and this instance its own, for something else."""
        if self._phase is SenderPhase.STOPPING and not self._in_flight:
            self._phase = SenderPhase.STOPPED
            self._stopped_s = now_s
            self._send_stopped(now_s)
            self._out.append(SendEnded(self._record(now_s)))

    # ---- sending ----

    def _acknowledge(self, echoed_sent_s: float, now_s: float) -> None:
        """Count from when this side sent what the receiver has received: the lease that the receiver keeps for it
        ends later than its own, however long messages were under way."""
        self._acknowledged_s = max(self._acknowledged_s, echoed_sent_s)
        if self._first_answer_s is None:
            self._first_answer_s = now_s

    def _report(self, now_s: float) -> None:
        self._sent_s = now_s
        chunks = tuple(chunk.shard for chunk in self._chunks[self._accepted :])
        report = SenderReport(
            self.transfer_id,
            self.address,
            self.epoch,
            self.sender_count,
            self._accepted,
            chunks,
            self._is_last_offered,
            self._grants_seen,
            self._stored,
            self._written_parts,
            now_s,
            self.is_helper,
        )
        self._out.append(Send(self.receiver, report))

    def _send_stopped(self, now_s: float) -> None:
        self._sent_s = now_s
        outcome, reason = self._outcome
        stopped = SenderStopped(
            self.transfer_id, self.address, self.epoch, reason, restarts=outcome is TransferOutcome.RESTARTED
        )
        self._out.append(Send(self.receiver, stopped))

    def _record(self, now_s: float) -> SendRecord:
        return SendRecord(
            self.transfer_id,
            self.receiver,
            *self._outcome,
            self._stored,
            self._written_parts,
            self._overlapped_parts,
            None if self._first_answer_s is None else self._first_answer_s - self._started_s,
            self._grant_wait_s,
            self._exposed_wait_s,
            None if self._first_grant_s is None else now_s - self._first_grant_s,
            self._retransmissions,
        )

    def _flush(self) -> SenderActions:
        actions, self._out = tuple(self._out), []
        return actions


class Part(NamedTuple):
    """A piece of a chunk that is written at once. `cells` is 0 for metadata only."""

    cells: int
    has_aux: bool = False


class OfferedChunk:
    """A chunk offered."""

    def __init__(self, shard: KVShard, now_s: float) -> None:
        self.shard = shard
        self.offered_s = now_s
        self.ready_s: float | None = None
        self.parts: list[Part] = []
        self.cells_ready = self.cells_written = 0
        self.is_aux_ready = self.is_aux_written = False
        self.grant: Grant | None = None

    @property
    def is_written(self) -> bool:
        return self.cells_written == self.shard.cells and self.is_aux_written == self.shard.has_extras
