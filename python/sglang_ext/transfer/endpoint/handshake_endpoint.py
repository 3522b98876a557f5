"""One process's end of the handshake: runs the state machines over a control channel and a transport, in threads.

    scheduler thread ──expect, offer, part──▶ ┌──────────────┐ ──Send─────▶ outbox ─▶ control thread ─▶ peers
    control thread ────messages, timers─────▶ │ the machines │ ──WritePart▶ write threads ─▶ the receiver's slots
    write threads ─────on_written───────────▶ └─one lock─────┘ ──Fence────▶ fence threads

A prefill rank opens senders, a decode rank expects requests; one endpoint can do both.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from sglang_ext.identifiers import TransferId
from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.peer_watch import PeerWatches
from sglang_ext.transfer.decide.protocol import (
    Allow,
    Failing,
    Fence,
    PeerAlive,
    PeerProbe,
    Ready,
    Received,
    ReceiverAbort,
    ReceiverActions,
    ReceiverClosed,
    ReceiveRecord,
    ReceiverReport,
    Released,
    Retire,
    Send,
    SendEnded,
    SenderActions,
    SenderReport,
    SenderStopped,
    ToSender,
    TransferOutcome,
    UseGrant,
    WritePart,
)
from sglang_ext.transfer.decide.receive_request import Need, ReceivePhase
from sglang_ext.transfer.decide.receiver import PERMIT_EPOCH_SHIFT, Receiver
from sglang_ext.transfer.decide.sender import Sender
from sglang_ext.transfer.endpoint.control_channel import ControlLoop, ControlMessage
from sglang_ext.transfer.endpoint.invitations import (
    DecodeRank,
    Invitation,
    InvitationSeen,
    ReceivedInvitations,
    SentInvitations,
    SlotCall,
)
from sglang_ext.transfer.endpoint.outgoing_transfer import DeviceEvent, OutgoingTransfer
from sglang_ext.transfer.endpoint.peer_layouts import LayoutReply, LayoutRequest, PeerLayouts
from sglang_ext.transfer.endpoint.transfer_status import EndpointTotals, SendResult, Stage, TransferStatus
from sglang_ext.transfer.pool_layout import PoolLayout, RowCopy, cut_rows
from sglang_ext.transfer.transports.transport import TransferError, Transport
from sglang_ext.waker import Waker

logger = logging.getLogger(__name__)

_MAX_RECORDS = 10_000
_LAYOUT_TIMEOUT_S = 10.0
# Of one part, before others have their turn: some milliseconds, and the cost of a turn does not count.
_TURN_BYTES = 16 << 20
_GIVEN_UP = "given up before it was written"


class HandshakeEndpoint:
    """Listens on `host` from construction to `close`; `layout` and everything that it names stay where they are.

    `write_threads` bounds the parts that are written at a time; others have their turn after at most 16 MiB of each.
    `decode_rank` goes with invitations. Thread-safe.
    """

    def __init__(
        self,
        host: str,
        transport: Transport,
        layout: PoolLayout,
        options: HandshakeOptions | None = None,
        *,
        decode_rank: DecodeRank | None = None,
        write_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
        prepare_thread: Callable[[], object] | None = None,
    ) -> None:
        """`prepare_thread` is called in every thread that waits for a device or moves its memory."""
        self._options = options = options or HandshakeOptions()
        self._clock = clock
        self._transport = transport
        self._layout = layout
        transport.register(layout.buffers)
        self._loop = ControlLoop(
            host,
            self._options.retry_s / 2,
            on_message=self._on_message,
            on_tick=self._on_tick,
            is_idle=self._is_idle,
        )
        self.address = self._loop.address
        self.waker = Waker()  # notified when an invitation has come, or a transfer has ended
        self._epoch = secrets.randbits(31)
        self._lock = threading.RLock()
        self._receiver = Receiver(self.address, self._epoch, self._options)
        self._received: dict[TransferId, TransferStatus] = {}
        self._outgoing: dict[tuple[TransferId, str], OutgoingTransfer] = {}
        self._sent_invitations = SentInvitations(
            self.address, options.retry_s, options.lease_s, decode_rank, self._epoch
        )
        self._received_invitations = ReceivedInvitations(2 * options.stall_timeout_s)
        self._peers = PeerLayouts(layout, transport.name)
        self._watches = PeerWatches(options)
        self._records: deque[ReceiveRecord | SendResult] = deque(maxlen=_MAX_RECORDS)
        self._written_bytes = self._writes = self._failed_writes = 0
        self._closing = False
        self._writers = ThreadPoolExecutor(write_threads, "kv-handshake-write", prepare_thread)
        # Fences wait for writes of others and must not wait behind this process's own.
        self._fencers = ThreadPoolExecutor(2, "kv-handshake-fence", prepare_thread)
        # One after the other is the order in which the device comes to them.
        self._holder = ThreadPoolExecutor(1, "kv-handshake-hold", prepare_thread)
        self._loop.start()

    @property
    def stall_timeout_s(self) -> float:
        """Return how long a request in which nothing moves is waited for."""
        return self._options.stall_timeout_s

    # ---- decode side ----

    def expect(
        self,
        need: Need,
        invite: Iterable[str] = (),
        last: Iterable[str] = (),
        *,
        unused: DeviceEvent | None = None,
    ) -> None:
        """Slots are ready for a request; the prefill endpoints at the addresses `invite` are invited, those of them
        that are `last` when all others have acknowledged.

        Until `unused` has passed, work that is under way on the device may still write to the slots: senders shake
        hands, and none may write. Raises ValueError when its transfer id is in use or has been.
        """
        with self._lock:
            now_s, invited = self._clock(), tuple(invite)
            actions = self._receiver.expect(need, now_s, is_held=unused is not None)
            self._received[need.transfer_id] = TransferStatus(Stage.WAITING, None, "", False)
            for address in invited:
                self._watches.need(address, now_s)
            self._send_all(self._sent_invitations.invite(need, invited, now_s, last=last))
            self._carry_out(actions)
        if unused is not None:
            self._submit(self._holder, partial(self._await_unused, need.transfer_id, unused))

    def announce(self, need: Need, addresses: Iterable[str], last: Iterable[str] = ()) -> None:
        """Invite the prefill endpoints at `addresses` to a request that has no slots yet, `last` as for `expect`:
        `slot_call` reports when it needs them, and `expect` follows. `cancel` and `expect` without slots end it, as any
        that is not expected."""
        with self._lock:
            now_s, invited = self._clock(), tuple(addresses)
            for address in invited:
                self._watches.need(address, now_s)
            self._send_all(self._sent_invitations.invite(need, invited, now_s, has_slots=False, last=last))

    def slot_call(self, transfer_id: TransferId) -> SlotCall | None:
        """The answer to `announce`; None while the request only waits in prefill's queue."""
        with self._lock:
            return self._sent_invitations.call_of(transfer_id)

    def cancel(self, transfer_id: TransferId, reason: str) -> None:
        """The request is not wanted any more; its slots are free once its status is `is_released`."""
        with self._lock:
            self._carry_out(self._receiver.cancel(transfer_id, reason, self._clock()))

    def receive_status(self, transfer_id: TransferId) -> TransferStatus | None:
        """Return how far an expected request is; None for a transfer never expected, or forgotten."""
        return self._received.get(transfer_id)

    def forget(self, transfer_id: TransferId) -> None:
        """Drop the status of a request that has ended."""
        with self._lock:
            status = self._received.get(transfer_id)
            if status is not None and status.is_released:
                del self._received[transfer_id]

    # ---- prefill side ----

    def invitations(self, transfer_id: TransferId) -> tuple[Invitation, ...]:
        """Return the invitations for a request; a withdrawn invitation has the reason."""
        with self._lock:
            return self._received_invitations.of(transfer_id)

    def call_for_slots(self, transfer_id: TransferId, given_up: str | None = None) -> None:
        """Answer all invitations without slots to a request: its turn is near, or it has been given up."""
        with self._lock:
            self._send_all(self._received_invitations.call(SlotCall(transfer_id, self.address, given_up)))

    def forget_invitations(self, transfer_id: TransferId) -> None:
        """The request has ended here."""
        with self._lock:
            self._received_invitations.forget(transfer_id)

    def open_sender(
        self,
        transfer_id: TransferId,
        receiver: str,
        sender_count: int | None = None,
        *,
        is_helper: bool = False,
        may_have_helpers: bool = False,
    ) -> OutgoingTransfer:
        """Shake hands for a request with the decode rank at `receiver`. Raises ValueError when that is under way.

        `is_helper`: the request is another instance's, which sends all of it where this instance fails;
        `may_have_helpers`: it is this instance's, and others may send parts of it.
        """
        with self._lock:
            if self._closing or (transfer_id, receiver) in self._outgoing:
                raise ValueError(
                    f"transfer {transfer_id} is being sent to {receiver} already, or this endpoint is closed"
                )
            now_s = self._clock()
            machine = Sender(
                *(transfer_id, self.address, receiver, self._epoch, self._options, now_s, sender_count),
                is_helper=is_helper,
                may_have_helpers=may_have_helpers,
            )
            outgoing = OutgoingTransfer(machine, self._lock, self._clock, self._carry_out_sender)
            self._outgoing[transfer_id, receiver] = outgoing
            self._carry_out_sender(outgoing, machine.start(now_s))
            self._ask_layout(receiver)
            self._abort_if_unlike(receiver)
            return outgoing

    def loss_reason(self, receiver: str, waited_s: float, epoch: int | None) -> str | None:
        """One line that says why a decode rank will not ask for anything any more, or None; call it again and again.

        `waited_s`: how long its message has been awaited; `epoch`: which incarnation of it is meant, where known.
        """
        with self._lock:
            now_s = self._clock()
            problem = self._watches.loss_reason(receiver, now_s - waited_s, now_s, epoch)
            self._probe(now_s)
            return problem

    # ---- both ----

    def drain_records(self) -> list[ReceiveRecord | SendResult]:
        """Records of what has ended since the last call, oldest first."""
        with self._lock:
            records = list(self._records)
            self._records.clear()
            return records

    def totals(self) -> EndpointTotals:
        """Counters and gauges."""
        with self._lock:
            counts = self._receiver.request_counts
            return EndpointTotals(
                self._written_bytes,
                self._writes,
                self._failed_writes,
                self._loop.dropped_messages,
                self._loop.malformed_messages,
                len(self._outgoing),
                counts[ReceivePhase.OPEN] + counts[ReceivePhase.CLOSING],
                counts[ReceivePhase.EARLY],
                self._receiver.unsettled_permits,
                self._receiver.backends.free_count,
                self._watches.silent_count(self._clock()),
            )

    def close(self) -> None:
        """Abort what is under way, notify the peers, and stop. Safe to call again."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            now_s, reason = self._clock(), "the instance shuts down"
            for outgoing in list(self._outgoing.values()):
                self._carry_out_sender(outgoing, outgoing.machine.abort(reason, now_s))
            for transfer_id in list(self._received):
                self._carry_out(self._receiver.cancel(transfer_id, reason, now_s))
        # Peers are notified that this side has stopped once its writes have ended.
        self._writers.shutdown(wait=True)
        self._fencers.shutdown(wait=True)
        self._holder.shutdown(wait=True)
        self._loop.close()
        self._transport.close()
        self.waker.close()

    # ---- called by the control loop ----

    def _is_idle(self) -> bool:
        with self._lock:
            is_quiet = self._receiver.is_idle and self._sent_invitations.is_idle and self._watches.is_idle
            return is_quiet and not self._outgoing

    def _on_tick(self) -> None:
        with self._lock:
            now_s = self._clock()
            self._carry_out(self._receiver.on_timer(now_s))
            self._send_all(self._sent_invitations.on_timer(now_s))
            self._received_invitations.on_timer(now_s)
            for outgoing in list(self._outgoing.values()):
                self._carry_out_sender(outgoing, outgoing.machine.on_timer(now_s))
            for receiver in {receiver for _, receiver in self._outgoing}:
                self._ask_layout(receiver)
            for transfer_id, address, since_s in list(self._sent_invitations.awaited()):
                reason = self._watches.loss_reason(address, since_s, now_s)
                if reason is None:
                    continue
                if self._sent_invitations.on_call(SlotCall(transfer_id, address, reason)):
                    self.waker.notify()
                else:
                    self._carry_out(self._receiver.on_peer_lost(transfer_id, address, reason, now_s))
            self._probe(now_s)
            for address, is_silent in self._watches.changes(now_s):
                logger.warning("the rank at %s %s", address, "does not answer" if is_silent else "answers again")

    def _on_message(self, message: ControlMessage) -> None:
        with self._lock:
            now_s = self._clock()
            if isinstance(message, SenderReport):
                self._carry_out(self._receiver.on_report(message, now_s))
            elif isinstance(message, SenderStopped):
                self._bar_stopped(message, now_s)
            elif isinstance(message, LayoutRequest):
                reply = LayoutReply(
                    self.address, self._epoch, self._transport.name, self._transport.address, self._layout
                )
                self._loop.send(message.sender, reply)
            elif isinstance(message, LayoutReply):
                self._peers.learn(message)
                self._abort_if_unlike(message.receiver)
            elif isinstance(message, Invitation):
                self._watches.need(message.receiver, now_s)
                seen = InvitationSeen(
                    message.transfer_id, self.address, message.withdrawn is not None, message.has_slots
                )
                self._loop.send(message.receiver, seen)
                call = self._received_invitations.record(message, now_s)
                if call is not None:
                    self._loop.send(message.receiver, call)
                self.waker.notify()
            elif isinstance(message, InvitationSeen):
                self._send_all(self._sent_invitations.seen(message, now_s))
            elif isinstance(message, SlotCall):
                if self._sent_invitations.on_call(message):
                    self.waker.notify()
            elif isinstance(message, PeerProbe):
                self._loop.send(message.sender, PeerAlive(self.address, self._epoch))
            elif isinstance(message, PeerAlive):
                self._watches.on_alive(message.peer, message.epoch, now_s)
            else:
                self._on_answer(message, now_s)

    def _bar_stopped(self, message: SenderStopped, now_s: float) -> None:
        """A sender writes no more; what it has written may still be on its way, where it did not wait for the end."""
        permit = self._receiver.permit_of(message.transfer_id, message.sender)
        if permit is not None and self._transport.can_fence:
            self._submit(self._fencers, partial(self._take_stopped, message, permit))
        else:
            self._carry_out(self._receiver.on_stopped(message, now_s))

    def _on_answer(self, message: ToSender, now_s: float) -> None:
        outgoing = self._outgoing.get((message.transfer_id, message.receiver))
        if outgoing is None:
            if isinstance(message, ReceiverAbort):
                stopped = SenderStopped(
                    message.transfer_id, self.address, message.sender_epoch, "nothing of it is sent here"
                )
                self._loop.send(message.receiver, stopped)
        elif isinstance(message, ReceiverReport):
            self._carry_out_sender(outgoing, outgoing.machine.on_report(message, now_s))
        elif isinstance(message, ReceiverAbort):
            self._carry_out_sender(outgoing, outgoing.machine.on_abort(message, now_s))
        elif isinstance(message, ReceiverClosed):
            self._carry_out_sender(outgoing, outgoing.machine.on_closed(message, now_s))

    def _probe(self, now_s: float) -> None:
        self._send_all((address, PeerProbe(self.address)) for address in self._watches.on_timer(now_s))

    def _ask_layout(self, receiver: str) -> None:
        if not self._peers.is_known(receiver):
            self._loop.send(receiver, LayoutRequest(self.address))

    def _abort_if_unlike(self, receiver: str) -> None:
        problem = self._peers.layout_mismatch(receiver)
        if problem is not None:
            for (_, to), outgoing in list(self._outgoing.items()):
                if to == receiver:
                    self._carry_out_sender(outgoing, outgoing.machine.abort(problem, self._clock()))

    def _send_all(self, messages: Iterable[tuple[str, ControlMessage]]) -> None:
        for to, message in messages:
            self._loop.send(to, message)

    # ---- carrying out; called with the lock held ----

    def _carry_out(self, actions: ReceiverActions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._loop.send(action.to, action.message)
            elif isinstance(action, Allow):
                self._transport.allow(action.permit)
                self._received[action.transfer_id] = TransferStatus(Stage.TRANSFERRING, None, "", False)
            elif isinstance(action, Retire):
                self._submit(self._fencers, partial(self._transport.revoke, action.permit))
            elif isinstance(action, Fence):
                self._submit(self._fencers, partial(self._fence, action.permit))
            elif isinstance(action, Ready):
                self._received[action.transfer_id] = TransferStatus(Stage.COMPLETE, TransferOutcome.COMPLETE, "", True)
                self.waker.notify()
                self._sent_invitations.finish(action.transfer_id)
            elif isinstance(action, Failing):
                self._received[action.transfer_id] = TransferStatus(Stage.FAILED, action.outcome, action.reason, False)
                self.waker.notify()
                if action.outcome is TransferOutcome.RESTARTED:
                    # Senders that have shaken hands are notified; others are invited to the next attempt.
                    self._sent_invitations.finish(action.transfer_id)
                else:
                    self._send_all(self._sent_invitations.withdraw(action.transfer_id, action.reason, self._clock()))
            elif isinstance(action, Released):
                self._received[action.transfer_id] = self._received[action.transfer_id]._replace(is_released=True)
                self.waker.notify()
            elif isinstance(action, Received):
                self._records.append(action.record)

    def _carry_out_sender(self, outgoing: OutgoingTransfer, actions: SenderActions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._loop.send(action.to, action.message)
            elif isinstance(action, UseGrant):
                outgoing.use_grant(action.grant)
            elif isinstance(action, WritePart):
                self._submit(self._writers, partial(self._write, outgoing, action))
            elif isinstance(action, SendEnded):
                self._records.append(outgoing.end(action.record))
                self.waker.notify()
        if outgoing.machine.is_over:
            self._outgoing.pop((outgoing.machine.transfer_id, outgoing.machine.receiver), None)

    def _submit(self, executor: ThreadPoolExecutor, task: Callable[[], None]) -> bool:
        """Let a thread do it once those before it are done; False when this endpoint is being closed."""
        try:
            executor.submit(task)
        except RuntimeError:
            logger.debug("a task came after the end")
            return False
        return True

    # ---- other threads ----

    def _take_stopped(self, message: SenderStopped, permit: int) -> None:
        self._transport.revoke(permit)
        with self._lock:
            self._carry_out(self._receiver.on_stopped(message, self._clock()))

    def _await_unused(self, transfer_id: TransferId, unused: DeviceEvent) -> None:
        try:
            unused.synchronize()
        except RuntimeError as error:  # of the device
            self.cancel(transfer_id, str(error).partition("\n")[0])
            return
        with self._lock:
            self._carry_out(self._receiver.on_slots_unused(transfer_id, self._clock()))

    def _fence(self, permit: int) -> None:
        self._transport.revoke(permit)
        if self._transport.can_fence:
            with self._lock:
                self._carry_out(self._receiver.on_fenced(permit, self._clock()))

    def _write(self, outgoing: OutgoingTransfer, todo: WritePart) -> None:
        """Begin a part: find out where it goes, and write the first of it."""
        try:
            if outgoing.machine.outcome is not None:
                raise TransferError(_GIVEN_UP)
            receiver = outgoing.machine.receiver
            peer = self._peers.wait(receiver, todo.permit >> PERMIT_EPOCH_SHIFT, _LAYOUT_TIMEOUT_S)
            with self._lock:
                rows = outgoing.rows(todo.chunk, todo.part, self._layout, peer.layout)
                computed = outgoing.computed(todo.chunk, todo.part)
            if computed is not None:
                computed.synchronize()
        except (TransferError, ValueError) as error:
            self._end_write(outgoing, todo, 0, str(error))
            return
        total_bytes = sum(copy.total_bytes for copy in rows)
        turn = _Turn(outgoing, todo, peer.transport_address, total_bytes, cut_rows(rows, _TURN_BYTES))
        self._write_turn(turn, next(turn.rest, None))

    def _write_turn(self, turn: _Turn, rows: list[RowCopy] | None) -> None:
        """Write `rows` (None: there is nothing to write), then let other parts have their turn before the next ones."""
        while rows is not None:
            try:
                if turn.outgoing.machine.outcome is not None:
                    raise TransferError(_GIVEN_UP)
                self._transport.write(turn.address, turn.todo.permit, rows)
            except TransferError as error:
                self._end_write(turn.outgoing, turn.todo, 0, str(error))
                return
            rows = next(turn.rest, None)
            if rows is not None and self._submit(self._writers, partial(self._write_turn, turn, rows)):
                return
        self._end_write(turn.outgoing, turn.todo, turn.total_bytes, None)

    def _end_write(self, outgoing: OutgoingTransfer, todo: WritePart, written_bytes: int, problem: str | None) -> None:
        """Report the end of a part to the machine; `problem`: why it has failed."""
        machine = outgoing.machine
        with self._lock:
            now_s = self._clock()
            if problem is None:
                self._writes += 1
                self._written_bytes += written_bytes
                outgoing.record_written(todo.chunk, todo.part, written_bytes, now_s)
                actions = machine.on_written(todo.chunk, todo.part, now_s)
            else:
                self._failed_writes += 1
                actions = machine.on_write_failed(todo.chunk, todo.part, problem, now_s)
            self._carry_out_sender(outgoing, actions)


class _Turn(NamedTuple):
    """A part that is being written, some of it at a time."""

    outgoing: OutgoingTransfer
    todo: WritePart
    address: str  # of the receiver's transport
    total_bytes: int
    rest: Iterator[list[RowCopy]]
