"""A decode rank, sender processes and a network that loses, repeats and reorders, around the handshake's machines.

Nothing runs by itself: a test calls what happens next. Whatever the machines do is carried out on a toy memory, and
every promise is checked where it could break.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from sglang_ext.identifiers import TransferAttempt, TransferId, next_attempt
from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import (
    Allow,
    Failing,
    Fence,
    Grant,
    Message,
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
    SendRecord,
    TransferOutcome,
    UseGrant,
    WritePart,
)
from sglang_ext.transfer.decide.receive_request import needed
from sglang_ext.transfer.decide.receiver import Receiver
from sglang_ext.transfer.decide.sender import Part, Sender, SenderPhase
from sglang_ext.transfer.decide.shards import KVShard

DECODE = "decode:1"
WRITE_LIMIT_S = 4.0  # a write ends within this, whatever happens to its process


def quick_options(backends: int | None, hold_idle_s: float | None = 0.5) -> HandshakeOptions:
    return HandshakeOptions(
        receive_backends=backends,
        hold_idle_s=hold_idle_s,
        retry_s=0.2,
        heartbeat_s=0.4,
        lease_s=2.0,
        quarantine_s=WRITE_LIMIT_S + 0.5,
        stall_timeout_s=8.0,
    )


class Cell(NamedTuple):
    transfer_id: TransferId
    token: int
    head: int
    layer: int


class WriteKey(NamedTuple):
    address: str
    transfer_id: TransferId
    chunk: int
    part: int


@dataclass
class Write:
    key: WriteKey
    permit: int
    grant: Grant
    shard: KVShard
    until_s: float


@dataclass
class Plan:
    """What a sender will offer for a transfer, and what it has done of it."""

    shards: list[KVShard]
    offered: int = 0
    ready: list[int] = field(default_factory=list)  # parts computed, per chunk


def parts_of(shard: KVShard) -> list[Part]:
    """One part per layer, and the metadata by themselves."""
    parts = [Part(shard.token_count * shard.head_count) for _ in range(shard.layer_count if shard.tokens else 0)]
    return [*parts, Part(0, has_aux=True)] if shard.has_aux else parts


@dataclass
class TransferState:
    """One request as the test knows it."""

    whole: KVShard
    senders: list[str]
    slots: list[int] | None = None
    order: int | None = None
    is_aux_written: bool = False
    # "ready", "failing", "released", "restarted" (released, and in use again), or "forgotten" with the receiver
    outcome: str | None = None
    owner: str | None = None  # the others are its helpers; None: no helpers
    fails_as: TransferOutcome | None = None


class Allowed(NamedTuple):
    """A permit as its action described it."""

    sender: str
    transfer_id: TransferId
    backend: int | None


@dataclass
class Told:
    """What the receiver knows of a sender's chunks, from the messages it was given and the actions it returned."""

    offered: int = 0
    granted: int = 0
    stored: int = 0


class SimulatedCluster:
    """One decode rank, any number of senders."""

    def __init__(self, options: HandshakeOptions, *, can_fence: bool, slot_count: int = 64) -> None:
        self.options = options
        self.can_fence = can_fence
        self.now_s = 100.0
        self.receiver = Receiver(DECODE, 1, options)
        self.network: list[tuple[str, Message]] = []
        self.transfers: dict[TransferId, TransferState] = {}
        self.machines: dict[tuple[str, TransferId], Sender] = {}
        self.plans: dict[tuple[str, TransferId], Plan] = {}
        self.grants: dict[tuple[str, TransferId, int], Grant] = {}
        self.writes: dict[WriteKey, Write] = {}
        self.orphans: list[Write] = []
        self.fences: list[int] = []
        self.allowed: dict[int, Allowed] = {}  # by permit
        self.held: dict[int, TransferId] = {}  # backend → transfer_id, as the grants tell
        self.free_slots = list(range(slot_count))
        self.slot_transfer: dict[int, TransferId] = {}
        self.memory: dict[tuple[int, int, int], Cell] = {}
        self.receive_records: list[ReceiveRecord] = []
        self.send_records: list[SendRecord] = []
        self.handshakes = 0
        self.crashed: set[str] = set()
        # What the receiver has been told, for the promise about order.
        self.received: dict[tuple[str, TransferId], Told] = {}

    # ---- what a test may do ----

    def add_request(
        self, transfer_id: TransferId, whole: KVShard, shards: dict[str, list[KVShard]], owner: str | None = None
    ) -> None:
        """Senders other than `owner` are helpers: where one fails, the owner sends everything in another attempt."""
        self.transfers[transfer_id] = TransferState(whole, list(shards), owner=owner)
        for address, chunks in shards.items():
            self.plans[address, transfer_id] = Plan(chunks)

    def start_sender(self, address: str, transfer_id: TransferId, epoch: int = 1, *, tells_count: bool = True) -> None:
        state = self.transfers[transfer_id]
        count = len(state.senders) if tells_count else None
        is_helper = state.owner is not None and address != state.owner
        machine = Sender(
            *(transfer_id, address, DECODE, epoch, self.options, self.now_s, count),
            is_helper=is_helper,
            may_have_helpers=address == state.owner and not isinstance(transfer_id, TransferAttempt),
        )
        self.machines[address, transfer_id] = machine
        self._carry_out_sender(machine, machine.start(self.now_s))

    def can_offer(self, address: str, transfer_id: TransferId) -> bool:
        plan, machine = self.plans[address, transfer_id], self.machines.get((address, transfer_id))
        return machine is not None and machine.phase is SenderPhase.OPEN and plan.offered < len(plan.shards)

    def offer(self, address: str, transfer_id: TransferId) -> None:
        plan, machine = self.plans[address, transfer_id], self.machines[address, transfer_id]
        shard = plan.shards[plan.offered]
        plan.offered += 1
        plan.ready.append(0)
        is_last = plan.offered == len(plan.shards)
        self._carry_out_sender(machine, machine.offer(shard, self.now_s, is_last=is_last))

    def can_compute(self, address: str, transfer_id: TransferId) -> bool:
        plan, machine = self.plans[address, transfer_id], self.machines.get((address, transfer_id))
        if machine is None or machine.phase is not SenderPhase.OPEN:
            return False
        return any(ready < len(parts_of(shard)) for ready, shard in zip(plan.ready, plan.shards, strict=False))

    def compute(self, address: str, transfer_id: TransferId) -> None:
        """The next part of the earliest chunk becomes ready."""
        plan, machine = self.plans[address, transfer_id], self.machines[address, transfer_id]
        for chunk, shard in enumerate(plan.shards[: plan.offered]):
            parts = parts_of(shard)
            if plan.ready[chunk] < len(parts):
                part = parts[plan.ready[chunk]]
                plan.ready[chunk] += 1
                self._carry_out_sender(machine, machine.part_ready(chunk, part, self.now_s))
                return

    def expect(self, transfer_id: TransferId) -> bool:
        """False when there are not enough slots."""
        state = self.transfers[transfer_id]
        count = state.whole.token_count
        if len(self.free_slots) < count:
            return False
        state.slots, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        state.slots.reverse()
        self._expect_in(transfer_id, state, state.slots)
        return True

    def _expect_in(self, transfer_id: TransferId, state: TransferState, slots: list[int]) -> None:
        if transfer_id not in self.receiver._requests:  # it has not heard of it, or forgotten what failed early
            self.received = {key: told for key, told in self.received.items() if key[1] != transfer_id}
            state.order = None
        self.slot_transfer.update(dict.fromkeys(slots, transfer_id))
        whole = state.whole
        need = needed(
            transfer_id,
            first_token=whole.tokens[0].start if whole.tokens else 0,
            slots=array("I", slots),
            first_head=whole.first_head,
            head_count=whole.head_count,
            first_layer=whole.first_layer,
            layer_count=whole.layer_count,
            aux_slot=_aux_slot(transfer_id) if whole.has_aux else None,
        )
        self._carry_out_receiver(self.receiver.expect(need, self.now_s))

    def cancel(self, transfer_id: TransferId) -> None:
        self._carry_out_receiver(self.receiver.cancel(transfer_id, "cancelled", self.now_s))
        if self.transfers[transfer_id].slots is None and self.transfers[transfer_id].outcome is None:
            self.transfers[transfer_id].outcome = "released"

    def can_begin_again(self) -> list[TransferAttempt]:
        """Attempts that decode waits for and whose owner, as far as it lives, has not begun them."""
        return [
            transfer_id
            for transfer_id, state in self.transfers.items()
            if isinstance(transfer_id, TransferAttempt)
            and state.outcome is None
            and state.owner is not None
            and (state.owner, transfer_id) not in self.plans
            and state.owner not in self.crashed
        ]

    def begin_again(self, transfer_id: TransferAttempt, epoch: int) -> None:
        """The owner has received the invitation."""
        state = self.transfers[transfer_id]
        assert state.owner is not None
        self.plans[state.owner, transfer_id] = Plan([state.whole])
        self.start_sender(state.owner, transfer_id, epoch)

    def restart_sender(self, address: str, transfer_id: TransferId) -> None:
        machine = self.machines[address, transfer_id]
        self._carry_out_sender(machine, machine.restart("restarted by a test", self.now_s))

    def abort_sender(self, address: str, transfer_id: TransferId) -> None:
        machine = self.machines[address, transfer_id]
        self._carry_out_sender(machine, machine.abort("aborted by a test", self.now_s))

    def end_write(self, key: WriteKey, *, is_failing: bool = False) -> None:
        write = self.writes.pop(key)
        is_stored = not is_failing and self._land(write)
        machine = self.machines[key.address, key.transfer_id]
        if is_stored:
            actions = machine.on_written(key.chunk, key.part, self.now_s)
        else:
            actions = machine.on_write_failed(key.chunk, key.part, "refused", self.now_s)
        self._carry_out_sender(machine, actions)

    def crash_sender(self, address: str) -> None:
        """Its process is gone; what it has posted to a network card may still be written."""
        self.crashed.add(address)
        self.machines = {key: machine for key, machine in self.machines.items() if key[0] != address}
        for key in [key for key in self.writes if key.address == address]:
            self.orphans.append(self.writes.pop(key))

    def land_orphan(self, index: int) -> None:
        self._land(self.orphans.pop(index))

    def crash_receiver(self) -> None:
        """Restarted with empty pools; it knows nothing of what it had promised."""
        self.receiver = Receiver(DECODE, self.receiver.epoch + 1, self.options)
        self.free_slots += list(self.slot_transfer)
        for state in self.transfers.values():
            if state.slots is not None and state.outcome in (None, "failing"):
                state.outcome = "forgotten"
            state.order = None
        self.slot_transfer, self.memory, self.allowed, self.held, self.received = {}, {}, {}, {}, {}
        self.fences = []

    def fence_done(self) -> None:
        permit = self.fences.pop(0)
        self._carry_out_receiver(self.receiver.on_fenced(permit, self.now_s))

    def deliver(self, index: int, *, is_kept: bool = False) -> None:
        to, message = self.network[index] if is_kept else self.network.pop(index)
        if isinstance(message, SenderReport | SenderStopped):
            if isinstance(message, SenderReport):
                self._note_report(message)
                actions = self.receiver.on_report(message, self.now_s)
            else:
                actions = self.receiver.on_stopped(message, self.now_s)
            self._carry_out_receiver(actions)
            return
        machine = self.machines.get((to, message.transfer_id))
        if machine is None:
            if isinstance(message, ReceiverAbort):
                stopped = SenderStopped(message.transfer_id, to, message.sender_epoch, "unknown here")
                self.network.append((DECODE, stopped))
        elif isinstance(message, ReceiverReport):
            self._carry_out_sender(machine, machine.on_report(message, self.now_s))
        elif isinstance(message, ReceiverAbort):
            self._carry_out_sender(machine, machine.on_abort(message, self.now_s))
        elif isinstance(message, ReceiverClosed):
            self._carry_out_sender(machine, machine.on_closed(message, self.now_s))

    def advance(self, seconds: float) -> None:
        """Time passes, timers run; a write that its process could not end in time has ended."""
        self.now_s += seconds
        for key in [key for key, write in self.writes.items() if write.until_s <= self.now_s]:
            self.end_write(key, is_failing=True)
        self.orphans = [write for write in self.orphans if write.until_s > self.now_s]
        self._carry_out_receiver(self.receiver.on_timer(self.now_s))
        for machine in list(self.machines.values()):
            self._carry_out_sender(machine, machine.on_timer(self.now_s))

    def settle(self, random: Random, loss: float = 0.0) -> None:
        """From now on everybody does its work; everything must end, and nothing may be left over."""
        for transfer_id, state in self.transfers.items():
            if state.slots is None and state.outcome is None:
                self.cancel(transfer_id)
        for step in range(1200):
            for transfer_id in self.can_begin_again():
                self.begin_again(transfer_id, random.getrandbits(30))
            for address, transfer_id in list(self.machines):
                while self.can_offer(address, transfer_id):
                    self.offer(address, transfer_id)
                while self.can_compute(address, transfer_id):
                    self.compute(address, transfer_id)
            for key in list(self.writes):
                if key in self.writes:
                    self.end_write(key)
            while self.fences:
                self.fence_done()
            for _ in range(len(self.network)):
                index = random.randrange(len(self.network))
                if random.random() < loss and step < 20:
                    self.network.pop(index)
                else:
                    self.deliver(index)
            is_over = all(machine.is_over for machine in self.machines.values())
            if is_over and self.receiver.is_idle and not self.network and not self.writes:
                break
            if not self.network and not self.writes:
                self.advance(self.options.retry_s / 2)
        else:
            raise AssertionError("it does not end")
        self.check_clean()

    def check_clean(self) -> None:
        """Nothing is held, allowed or occupied any more, and every request has one outcome."""
        backends = self.options.receive_backends
        assert self.receiver.backends.free_count == (backends or 0)
        assert self.receiver.unsettled_permits == 0
        assert not self.allowed
        assert not self.slot_transfer
        assert sorted(self.free_slots) == list(range(len(self.free_slots)))
        for transfer_id, state in self.transfers.items():
            assert state.outcome in ("ready", "released", "restarted", "forgotten"), (transfer_id, state.outcome)

    def check(self) -> None:
        """What must hold at every moment."""
        busy = [
            allowed.backend
            for permit, allowed in self.allowed.items()
            if allowed.backend is not None and permit in self.receiver._permits
        ]
        assert len(busy) == len(set(busy)), "a backend takes two chunks at a time"
        backends = self.options.receive_backends
        if backends is not None:
            held = [
                backend for transfer_id in self.transfers for backend in self.receiver.backends.held_by(transfer_id)
            ]
            assert len(held) + self.receiver.backends.free_count == backends
            assert len(held) == len(set(held))

    # ---- carrying out ----

    def _carry_out_receiver(self, actions: ReceiverActions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.network.append((action.to, action.message))
            elif isinstance(action, Allow):
                assert self.transfers[action.transfer_id].outcome is None, "granted to a request that has ended"
                self._check_order(action)
                self.allowed[action.permit] = Allowed(action.sender, action.transfer_id, action.grant.backend)
                self.received[action.sender, action.transfer_id].granted += 1
            elif isinstance(action, Fence):
                if self.can_fence:
                    del self.allowed[action.permit]
                    self.fences.append(action.permit)
            elif isinstance(action, Retire):
                used = self.allowed.pop(action.permit)
                self.received[used.sender, used.transfer_id].stored += 1
            elif isinstance(action, Ready):
                self._check_arrived(action.transfer_id)
                self._free(action.transfer_id, "ready")
            elif isinstance(action, Failing):
                assert self.transfers[action.transfer_id].outcome is None
                self.transfers[action.transfer_id].outcome = "failing"
                self.transfers[action.transfer_id].fails_as = action.outcome
            elif isinstance(action, Released):
                assert self.transfers[action.transfer_id].outcome == "failing"
                self._release(action.transfer_id)
            elif isinstance(action, Received):
                self.receive_records.append(action.record)

    def _carry_out_sender(self, machine: Sender, actions: SenderActions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.network.append((action.to, action.message))
            elif isinstance(action, UseGrant):
                self.grants[machine.address, machine.transfer_id, action.grant.chunk] = action.grant
            elif isinstance(action, WritePart):
                key = WriteKey(machine.address, machine.transfer_id, action.chunk, action.part)
                assert key not in self.writes
                grant = self.grants[machine.address, machine.transfer_id, action.chunk]
                shard = self.plans[machine.address, machine.transfer_id].shards[action.chunk]
                self.writes[key] = Write(key, action.permit, grant, shard, self.now_s + WRITE_LIMIT_S)
            elif isinstance(action, SendEnded):
                own = (machine.address, machine.transfer_id)
                assert not [key for key in self.writes if (key.address, key.transfer_id) == own], (
                    "source freed under a write"
                )
                self.send_records.append(action.record)
                if action.record.outcome is TransferOutcome.COMPLETE and machine.may_have_helpers:
                    state = self.transfers[machine.transfer_id]
                    assert state.outcome in ("ready", "forgotten"), "an owner has left before its helpers were done"

    def _land(self, write: Write) -> bool:
        """Put a part into memory; False when its permit does not hold."""
        if write.permit >> 32 != self.receiver.epoch:
            return False
        if write.permit not in self.allowed and self.can_fence:
            return False
        assert self.can_fence or write.permit in self.receiver._permits, "a write comes after its backend is free"
        key, shard, grant = write.key, write.shard, write.grant
        part = parts_of(shard)[key.part]
        if part.has_aux:
            assert grant.aux_slot == _aux_slot(key.transfer_id)
            self.transfers[key.transfer_id].is_aux_written = True
            return True
        layer = shard.first_layer + key.part
        positions = [token for span in shard.tokens for token in range(span.start, span.stop, span.step)]
        slots = array("I", grant.slots)
        for token, slot in zip(positions, slots, strict=True):
            assert self.slot_transfer.get(slot) == key.transfer_id, "written to a slot of another request"
            for head in range(shard.first_head, shard.first_head + shard.head_count):
                self.memory[slot, head, layer] = Cell(key.transfer_id, token, head, layer)
        return True

    # ---- promises ----

    def _note_report(self, report: SenderReport) -> None:
        state = self.transfers.get(report.transfer_id)
        if state is not None and state.order is None:
            state.order = self.handshakes
            self.handshakes += 1
        told = self.received.setdefault((report.sender, report.transfer_id), Told())
        told.offered = max(told.offered, report.offered)

    def _check_order(self, action: Allow) -> None:
        """A backend that the request did not hold goes to the earliest first handshake that could use one."""
        backend = action.grant.backend
        if backend is None or self.held.get(backend) == action.transfer_id:
            return
        self.held[backend] = action.transfer_id
        mine = self.transfers[action.transfer_id].order
        assert mine is not None
        for (_, transfer_id), told in self.received.items():
            state = self.transfers[transfer_id]
            is_open = state.slots is not None and state.outcome is None
            if is_open and state.order is not None and state.order < mine:
                assert told.offered == told.granted or told.granted > told.stored, "an older request was overtaken"

    def _check_arrived(self, transfer_id: TransferId) -> None:
        state = self.transfers[transfer_id]
        assert state.slots is not None
        whole = state.whole
        assert state.is_aux_written or not whole.has_aux
        first = whole.tokens[0].start if whole.tokens else 0
        for offset, slot in enumerate(state.slots):
            for head in range(whole.first_head, whole.first_head + whole.head_count):
                for layer in range(whole.first_layer, whole.first_layer + whole.layer_count):
                    assert self.memory.get((slot, head, layer)) == Cell(transfer_id, first + offset, head, layer)

    def _release(self, transfer_id: TransferId) -> None:
        """Free the slots, or wait for the next attempt in them."""
        state, attempt = self.transfers[transfer_id], next_attempt(transfer_id)
        restarts = state.fails_as is TransferOutcome.RESTARTED and attempt is not None
        if not restarts or attempt is None or state.slots is None:
            self._free(transfer_id, "released")
            return
        state.outcome = "restarted"
        self.allowed = {
            permit: allowed for permit, allowed in self.allowed.items() if allowed.transfer_id != transfer_id
        }
        self.memory = {key: cell for key, cell in self.memory.items() if cell.transfer_id != transfer_id}
        again = self.transfers[attempt] = TransferState(state.whole, [], state.slots, owner=state.owner)
        if state.owner is not None:
            again.senders.append(state.owner)
        self._expect_in(attempt, again, state.slots)

    def _free(self, transfer_id: TransferId, outcome: str) -> None:
        state = self.transfers[transfer_id]
        assert state.slots is not None
        assert state.outcome in (None, "failing")
        state.outcome = outcome
        self.allowed = {
            permit: allowed for permit, allowed in self.allowed.items() if allowed.transfer_id != transfer_id
        }
        for slot in state.slots:
            assert self.slot_transfer.pop(slot) == transfer_id
        self.memory = {key: cell for key, cell in self.memory.items() if cell.transfer_id != transfer_id}
        self.free_slots += state.slots


def _aux_slot(transfer_id: TransferId) -> int:
    return transfer_id.room if isinstance(transfer_id, TransferAttempt) else transfer_id


def outcomes(cluster: SimulatedCluster) -> list[TransferOutcome]:
    return [record.outcome for record in cluster.receive_records]
