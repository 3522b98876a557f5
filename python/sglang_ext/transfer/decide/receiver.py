"""The receive manager of a decode rank: which senders may write into its slots, and when. A state machine without I/O.

    a request:  [early] ──expect──▶ open ──all of its KV is stored──▶ complete (remembered for a while)
                  │                  │
                  └──────────────────┴──abort, loss, stall, misfit──▶ closing ──no write can happen──▶ failed

Which request gets a backend (Tetris, section "CDSP Cache Transfer Management"; arXiv 2511.06247):

* A free backend goes to the request with the earliest *first handshake* among the requests with a chunk waiting.
  So a later sender of an old request overtakes younger requests, and none overtakes an older one.
* A request keeps the backends it got until it is complete or has failed, or has fewer senders left (where their
  number is known). Its senders take turns on them, chunk by chunk, longest waiting first: one backend is enough for
  any number of senders, so two requests that each hold some and want more cannot block each other.
* Only a backend that its request leaves idle for `hold_idle_s` goes to a request that waits. The request keeps its
  place in the order. This breaks the remaining circle: the holder cannot compute its next chunk because the
  prefill instance's memory is full of KV whose request waits for that very backend.

A request may come from helpers, too: instances other than its own prefill instance. Where one of them is lost, or has
stopped, or does not agree with the others, the attempt ends as `RESTARTED`, and its driver expects the next one in
the same slots once they are released. The loss of its own prefill instance is the end of the request.

Safety: a slot is used again (`Released`) only when no permit to write to it is unsettled. A permit settles when its
chunk is stored, its sender reports that it has stopped, the transport has barred it (`on_fenced`), or the sender has
been lost for `quarantine_s`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from sglang_ext.identifiers import TransferId
from sglang_ext.transfer.decide.backend_pool import BackendPool
from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import (
    Allow,
    Failing,
    Fence,
    Ready,
    Received,
    ReceiverAbort,
    ReceiverAction,
    ReceiverActions,
    ReceiverClosed,
    ReceiverReport,
    Released,
    Retire,
    Send,
    SenderReport,
    SenderStopped,
    TransferOutcome,
)
from sglang_ext.transfer.decide.receive_request import Need, ReceivePhase, ReceiveRequest, SenderState

PERMIT_EPOCH_SHIFT = 32  # permit = epoch << this | number: one of an earlier incarnation never holds


class _Ended(NamedTuple):
    """The part of an ended request that is remembered, so that late messages get a true answer."""

    outcome: TransferOutcome
    reason: str
    until_s: float


class Receiver:
    """All requests of one decode rank. Events return what to do, in order; `on_timer` wants to be called at least
    every `retry_s / 2` while `is_idle` is false. `epoch` differs after a restart (31 random bits)."""

    def __init__(self, address: str, epoch: int, options: HandshakeOptions) -> None:
        self.address = address
        self.epoch = epoch
        self.options = options
        self.backends = BackendPool(options.receive_backends, options.hold_idle_s)
        self._requests: dict[TransferId, ReceiveRequest] = {}
        self._ended: dict[TransferId, _Ended] = {}  # oldest first
        self._queue: list[tuple[int, TransferId]] = []  # order and id of open requests with a chunk waiting, sorted
        self._permits: dict[int, tuple[ReceiveRequest, SenderState]] = {}  # unsettled
        self._handshakes = 0
        self._grants = 0
        self._out: list[ReceiverAction] = []

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to wait for."""
        return not self._requests

    def permit_of(self, transfer_id: TransferId, sender: str) -> int | None:
        """The permit under which this sender may be writing."""
        request = self._requests.get(transfer_id)
        state = None if request is None else request.senders.get(sender)
        return None if state is None or state.outstanding is None else state.outstanding.permit

    @property
    def unsettled_permits(self) -> int:
        """Grants under which a sender may be writing."""
        return len(self._permits)

    @property
    def request_counts(self) -> dict[ReceivePhase, int]:
        """Return how many requests are in each phase."""
        phases = [request.phase for request in self._requests.values()]
        return {phase: phases.count(phase) for phase in ReceivePhase}

    # ---- events of this instance ----

    def expect(self, need: Need, now_s: float, *, is_held: bool = False) -> ReceiverActions:
        """The scheduler has slots for a request; while `is_held`, work that is under way here may still write to them,
        and senders only shake hands. Raises ValueError when its transfer id is in use."""
        ended = self._ended.get(need.transfer_id)
        if ended is not None and ended.outcome is TransferOutcome.COMPLETE:
            raise ValueError(f"transfer {need.transfer_id} has been used before")
        if ended is not None:
            return (Failing(need.transfer_id, ended.outcome, ended.reason), Released(need.transfer_id))
        request = self._requests.get(need.transfer_id)
        if request is None:
            request = self._requests[need.transfer_id] = ReceiveRequest(need.transfer_id, now_s)
        elif request.phase is not ReceivePhase.EARLY:
            raise ValueError(f"transfer {need.transfer_id} is in use")
        request.is_held = is_held
        problem = request.expect(need, now_s)
        if problem is not None:
            self._refuse(request, problem, now_s)
        elif request.is_complete:
            self._complete(request, now_s)
        return self._finish_event(request, now_s)

    def on_slots_unused(self, transfer_id: TransferId, now_s: float) -> ReceiverActions:
        """No work of this instance writes to the slots of a request any more, which were held."""
        request = self._requests.get(transfer_id)
        if request is None or not request.is_held:
            return ()
        request.is_held = False
        request.progress_s = now_s
        return self._finish_event(request, now_s)

    def cancel(self, transfer_id: TransferId, reason: str, now_s: float) -> ReceiverActions:
        """The request is not wanted any more, also when no sender of it is known yet."""
        if transfer_id in self._ended:
            return ()
        request = self._requests.get(transfer_id)
        if request is None:
            self._remember(transfer_id, TransferOutcome.ABORTED, reason, now_s)
            return ()
        self._fail(request, TransferOutcome.ABORTED, reason, now_s)
        return self._finish_event(request, now_s)

    def on_peer_lost(self, transfer_id: TransferId, address: str, reason: str, now_s: float) -> ReceiverActions:
        """End the request of an invited prefill rank that does not answer. After the handshake its lease counts."""
        request = self._requests.get(transfer_id)
        if request is None or request.phase is not ReceivePhase.OPEN or address in request.senders:
            return ()
        self._fail(request, TransferOutcome.PEER_LOST, reason, now_s)
        return self._finish_event(request, now_s)

    def on_fenced(self, permit: int, now_s: float) -> ReceiverActions:
        """The transport lets no sender write under this permit any more."""
        entry = self._permits.get(permit)
        if entry is None or entry[0].phase is not ReceivePhase.CLOSING:
            return ()
        self._settle(*entry)
        return self._finish_event(entry[0], now_s)

    # ---- messages ----

    def on_report(self, report: SenderReport, now_s: float) -> ReceiverActions:
        """A sender reports where it stands. Its first report is its handshake."""
        ended = self._ended.get(report.transfer_id)
        if ended is not None:
            return (Send(report.sender, self._answer_ended(report, ended)),)
        request = self._requests.get(report.transfer_id)
        if request is None:
            early = sum(other.phase is ReceivePhase.EARLY for other in self._requests.values())
            if early >= self.options.max_early_requests:
                return ()
            request = self._requests[report.transfer_id] = ReceiveRequest(report.transfer_id, now_s)
        sender = request.senders.get(report.sender)
        if request.phase is ReceivePhase.CLOSING and sender is None:
            return (Send(report.sender, self._abort_message(request, report.sender_epoch)),)
        if sender is not None and sender.epoch != report.sender_epoch:
            reason = f"another incarnation of {report.sender} sends this request"
            return (
                Send(
                    report.sender,
                    ReceiverAbort(report.transfer_id, self.address, self.epoch, report.sender_epoch, reason),
                ),
            )
        if sender is None:
            sender = SenderState(report.sender, report.sender_epoch, report.sent_s, now_s, is_helper=report.is_helper)
            request.senders[report.sender] = sender
            if request.order is None:
                request.order = self._handshakes
                request.first_handshake_s = request.progress_s = now_s
                self._handshakes += 1
        sender.last_report_s = now_s
        sender.echoed_sent_s = max(sender.echoed_sent_s, report.sent_s)
        before = (len(sender.shards), sender.total, sender.parts, sender.stored)
        problem = None if request.phase is ReceivePhase.CLOSING else request.accept(sender, report, now_s)
        self._record_stored(request, sender, report.stored, now_s)
        request.repeated_reports += before == (len(sender.shards), sender.total, sender.parts, sender.stored)
        if problem is not None:
            self._refuse(request, problem, now_s)
        elif request.phase is ReceivePhase.CLOSING:
            self._send_abort(request, sender)
        elif request.is_complete:
            self._complete(request, now_s)
            self._out.append(Send(report.sender, self._answer_ended(report, self._ended[request.transfer_id])))
        else:
            if request.unfinished_senders is not None:
                self.backends.trim(request.transfer_id, request.unfinished_senders)
            self._assign_after(request, now_s)
            self._out.append(
                Send(sender.address, request.report_to(sender, report.grants_seen, self.address, self.epoch))
            )
        return self._finish_event(request, now_s)

    def on_stopped(self, message: SenderStopped, now_s: float) -> ReceiverActions:
        """A sender writes no more, of its own accord or after an abort."""
        ended = self._ended.get(message.transfer_id)
        is_complete = ended is not None and ended.outcome is TransferOutcome.COMPLETE
        closed = ReceiverClosed(message.transfer_id, self.address, self.epoch, message.sender_epoch, is_complete)
        answer = Send(message.sender, closed)
        request = self._requests.get(message.transfer_id)
        reason = f"{message.sender} has stopped: {message.reason}"
        outcome = TransferOutcome.RESTARTED if message.restarts else TransferOutcome.REMOTE_ABORT
        if request is None:
            if ended is None:  # so that a request expected later fails at once
                self._remember(message.transfer_id, outcome, reason, now_s)
            return (answer,)
        sender = request.senders.get(message.sender)
        if sender is not None and sender.epoch != message.sender_epoch:
            return (answer,)
        self._out.append(answer)
        if sender is None:
            self._fail(request, outcome, reason, now_s)
        elif not sender.is_finished or message.restarts or request.has_helper:
            # What it has stored does not help where others have counted on it for the rest.
            sender.is_stopped = True
            if sender.outstanding is not None:
                self._settle(request, sender)
            self._fail(request, outcome, reason, now_s)
        return self._finish_event(request, now_s)

    def on_timer(self, now_s: float) -> ReceiverActions:
        """Leases, stalls, repeated aborts, idle backends, and forgetting."""
        for request in list(self._requests.values()):
            if request.phase is ReceivePhase.CLOSING:
                self._press_on(request, now_s)
            else:
                self._check_liveness(request, now_s)
            self._end_if_settled(request, now_s)
        self._assign(now_s)
        for transfer_id, ended in list(self._ended.items()):
            if ended.until_s > now_s:
                break
            del self._ended[transfer_id]
        return self._flush()

    # ---- granting ----

    def _assign_after(self, request: ReceiveRequest, now_s: float) -> None:
        self._update_queue(request)
        self._assign(now_s)

    def _assign(self, now_s: float) -> None:
        for _, transfer_id in list(self._queue):
            if not self.backends.has_spare:
                return
            request = self._requests[transfer_id]
            while (sender := request.next_waiting()) is not None and self.backends.can_take(transfer_id, now_s):
                self._grant(request, sender, now_s)
            self._update_queue(request)

    def _grant(self, request: ReceiveRequest, sender: SenderState, now_s: float) -> None:
        backend = self.backends.take(request.transfer_id, now_s)
        self._grants += 1
        permit = self.epoch << PERMIT_EPOCH_SHIFT | self._grants
        grant = request.grant(sender, permit, backend, now_s)
        self._permits[permit] = (request, sender)
        self._out.append(Allow(permit, request.transfer_id, sender.address, sender.shards[grant.chunk], grant))
        self._out.append(Send(sender.address, request.report_to(sender, grant.chunk, self.address, self.epoch)))

    def _record_stored(self, request: ReceiveRequest, sender: SenderState, stored: int, now_s: float) -> None:
        outstanding = sender.outstanding
        if outstanding is None or stored < sender.granted:
            return
        if request.phase is ReceivePhase.CLOSING:
            self._settle(request, sender)
            return
        del self._permits[outstanding.permit]
        request.store(sender, now_s)
        self.backends.put_back(outstanding.backend, now_s)
        self._out.append(Retire(outstanding.permit))

    def _update_queue(self, request: ReceiveRequest) -> None:
        is_waiting = request.phase is ReceivePhase.OPEN and request.next_waiting() is not None
        if request.order is None or is_waiting == request.is_queued:
            return
        entry = (request.order, request.transfer_id)
        if is_waiting:
            insort(self._queue, entry)
        else:
            del self._queue[bisect_left(self._queue, entry)]
        request.is_queued = is_waiting

    # ---- ending ----

    def _complete(self, request: ReceiveRequest, now_s: float) -> None:
        self._out.append(Ready(request.transfer_id))
        if request.has_helper:
            for sender in request.senders.values():
                report = request.report_to(sender, sender.granted, self.address, self.epoch)
                self._out.append(Send(sender.address, report))
        self._end(request, TransferOutcome.COMPLETE, "", now_s)

    def _fail(self, request: ReceiveRequest, outcome: TransferOutcome, reason: str, now_s: float) -> None:
        """Send all senders an abort; the request ends when no write can happen."""
        if request.phase is ReceivePhase.CLOSING:
            return
        if request.phase is ReceivePhase.OPEN:
            self._out.append(Failing(request.transfer_id, outcome, reason))
        request.phase = ReceivePhase.CLOSING
        self._update_queue(request)
        request.outcome = (outcome, reason)
        request.abort_sent_s = now_s
        self.backends.release(request.transfer_id)
        for sender in request.senders.values():
            if sender.is_live:
                self._send_abort(request, sender)
            if sender.outstanding is not None:
                self._out.append(Fence(sender.outstanding.permit))

    def _refuse(self, request: ReceiveRequest, problem: str, now_s: float) -> None:
        """Refuse what does not fit: where several senders disagree, the request's own sender can do it by itself."""
        outcome = TransferOutcome.RESTARTED if request.has_helper else TransferOutcome.REFUSED
        self._fail(request, outcome, problem, now_s)

    def _press_on(self, request: ReceiveRequest, now_s: float) -> None:
        """Retransmit aborts; a sender that has been lost for long enough cannot be writing any more."""
        if now_s - request.abort_sent_s >= self.options.retry_s:
            request.abort_sent_s = now_s
            for sender in request.senders.values():
                if sender.outstanding is not None:
                    self._send_abort(request, sender)
        for sender in request.senders.values():
            silent_s = now_s - sender.last_report_s
            if sender.outstanding is not None and silent_s >= self.options.lease_s + self.options.quarantine_s:
                self._settle(request, sender)

    def _check_liveness(self, request: ReceiveRequest, now_s: float) -> None:
        # The request's own instance first: its loss is the end, that of others is not.
        for sender in sorted(request.senders.values(), key=lambda sender: sender.is_helper):
            if sender.is_live and now_s - sender.last_report_s >= self.options.lease_s:
                reason = f"lost {sender.address}: silent for {self.options.lease_s:g} s"
                outcome = TransferOutcome.RESTARTED if sender.is_helper else TransferOutcome.PEER_LOST
                self._fail(request, outcome, reason, now_s)
                return
        # Without a grant of its own, a request that waits for a backend waits for others, whom this rule ends too.
        waits_for_others = request.is_queued and not request.has_unsettled
        if now_s - request.progress_s >= self.options.stall_timeout_s and not waits_for_others:
            reason = f"nothing has moved for {self.options.stall_timeout_s:g} s"
            self._fail(request, TransferOutcome.STALLED, reason, now_s)

    def _settle(self, request: ReceiveRequest, sender: SenderState) -> None:
        """No write under the sender's permit can happen any more, and what it wrote is void."""
        outstanding = sender.outstanding
        if outstanding is not None:
            del self._permits[outstanding.permit]
            sender.outstanding = None
            self.backends.drop(outstanding.backend)

    def _end_if_settled(self, request: ReceiveRequest, now_s: float) -> None:
        if request.phase is not ReceivePhase.CLOSING or request.outcome is None or request.has_unsettled:
            return
        if request.transfer_id in self._requests:
            if request.need is not None:
                self._out.append(Released(request.transfer_id))
            self._end(request, *request.outcome, now_s)

    def _end(self, request: ReceiveRequest, outcome: TransferOutcome, reason: str, now_s: float) -> None:
        del self._requests[request.transfer_id]
        self.backends.release(request.transfer_id)
        if request.is_queued and request.order is not None:
            del self._queue[bisect_left(self._queue, (request.order, request.transfer_id))]
        self._out.append(Received(request.record(outcome, reason, now_s)))
        self._remember(request.transfer_id, outcome, reason, now_s)

    def _remember(self, transfer_id: TransferId, outcome: TransferOutcome, reason: str, now_s: float) -> None:
        self._ended[transfer_id] = _Ended(outcome, reason, now_s + self.options.memory_s)

    # ---- sending ----

    def _finish_event(self, request: ReceiveRequest, now_s: float) -> ReceiverActions:
        self._end_if_settled(request, now_s)
        self._assign_after(request, now_s) if request.transfer_id in self._requests else self._assign(now_s)
        return self._flush()

    def _flush(self) -> ReceiverActions:
        actions, self._out = tuple(self._out), []
        return actions

    def _send_abort(self, request: ReceiveRequest, sender: SenderState) -> None:
        self._out.append(Send(sender.address, self._abort_message(request, sender.epoch)))

    def _abort_message(self, request: ReceiveRequest, sender_epoch: int) -> ReceiverAbort:
        outcome, reason = request.outcome or (TransferOutcome.ABORTED, "the request has failed")
        restarts = outcome is TransferOutcome.RESTARTED
        return ReceiverAbort(request.transfer_id, self.address, self.epoch, sender_epoch, reason, restarts)

    def _answer_ended(self, report: SenderReport, ended: _Ended) -> ReceiverReport | ReceiverAbort:
        if ended.outcome is not TransferOutcome.COMPLETE:
            restarts = ended.outcome is TransferOutcome.RESTARTED
            return ReceiverAbort(
                report.transfer_id, self.address, self.epoch, report.sender_epoch, ended.reason, restarts
            )
        return ReceiverReport(
            report.transfer_id,
            self.address,
            self.epoch,
            report.sender_epoch,
            report.offered,
            report.offered,
            None,
            report.offered,
            True,
            True,
            report.sent_s,
        )
