"""One request as the decode instance sees it: what must come, from which senders, and what has arrived."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import NamedTuple

from sglang_ext.identifiers import TransferId
from sglang_ext.transfer.decide.protocol import Grant, ReceiveRecord, ReceiverReport, SenderReport, TransferOutcome
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan, unwanted_reason


class Need(NamedTuple):
    """The KV that the decode instance wants, and where. Made by `needed`."""

    transfer_id: TransferId
    whole: KVShard  # one span of step 1, or none when every token is cached here
    slots: array[int]  # token slot of each position of the span
    aux_slot: int | None
    state_slots: tuple[bytes, ...]
    first_token: int = 0  # position of the first slot; without slots, how many tokens are cached here


def needed(
    transfer_id: TransferId,
    *,
    first_token: int,
    slots: array[int],
    first_head: int,
    head_count: int,
    first_layer: int,
    layer_count: int,
    aux_slot: int | None = None,
    state_slots: tuple[bytes, ...] = (),
) -> Need:
    """The KV of positions first_token, first_token + 1, … goes to `slots` (array of type 'I').

    A rank that holds padding heads only has a `head_count` of 0. Raises ValueError for ranges without sense.
    """
    if slots.typecode != "I":
        raise ValueError("slots must be an array of type 'I'")
    if min(first_token, first_head, head_count, first_layer) < 0 or layer_count < 1:
        raise ValueError("a range of tokens, heads or layers is empty or negative")
    tokens = (TokenSpan(first_token, first_token + len(slots)),) if len(slots) else ()
    whole = KVShard(tokens, first_head, head_count, first_layer, layer_count, aux_slot is not None)
    return Need(transfer_id, whole, slots, aux_slot, state_slots, first_token)


class ReceivePhase(Enum):
    """Describes where a request stands; ended ones are forgotten but for their outcome."""

    EARLY = "early"  # senders have shaken hands, slots are not known
    OPEN = "open"
    CLOSING = "closing"  # failed, but a write may be under way


class Outstanding(NamedTuple):
    """The one chunk of a sender that is granted and not stored."""

    permit: int
    backend: int | None


class SenderState:
    """The receiver's state of one sender. Its chunks are granted and stored in order, one at a time."""

    def __init__(self, address: str, epoch: int, sent_s: float, now_s: float, *, is_helper: bool = False) -> None:
        self.address = address
        self.epoch = epoch
        self.is_helper = is_helper
        self.last_report_s = now_s
        self.echoed_sent_s = sent_s
        self.shards: list[KVShard] = []
        self.offered_s: list[float] = []
        self.granted = 0
        self.stored = 0
        self.total: int | None = None  # chunks, once the last has been offered
        self.parts = 0
        self.outstanding: Outstanding | None = None
        self.waiting_since_s = now_s
        self.is_stopped = False

    @property
    def is_finished(self) -> bool:
        return self.total is not None and self.stored == self.total

    @property
    def is_live(self) -> bool:
        """Return whether it still has something to do, so that reports are to be expected."""
        return not self.is_finished and not self.is_stopped

    @property
    def wants_grant(self) -> bool:
        return self.outstanding is None and self.granted < len(self.shards) and not self.is_stopped


class ReceiveRequest:
    """The state of one request; the receiver decides, this keeps the books."""

    def __init__(self, transfer_id: TransferId, now_s: float) -> None:
        self.transfer_id = transfer_id
        self.phase = ReceivePhase.EARLY
        self.order: int | None = None  # by first handshake
        self.need: Need | None = None
        self.senders: dict[str, SenderState] = {}
        self.progress_s = now_s
        self.expected_s: float | None = None
        self.first_handshake_s: float | None = None
        self.first_grant_s: float | None = None
        self.backend_wait_s = 0.0
        self.repeated_reports = 0
        self.sender_count: int | None = None
        self.cells_stored = 0
        self.is_aux_stored = False
        self.outcome: tuple[TransferOutcome, str] | None = None
        self.abort_sent_s = now_s
        self.is_queued = False  # kept by the receiver
        self.is_held = False  # work of this instance may still write to its slots: nothing is granted

    @property
    def is_complete(self) -> bool:
        if self.need is None:
            return False
        # Pieces of states come behind rows; where no rows are wanted, they are missed by nothing but their senders.
        has_states = bool(self.need.whole.cells or not self.need.state_slots or not self.unfinished_senders)
        has_rows = self.cells_stored == self.need.whole.cells
        return has_rows and has_states and (self.is_aux_stored or self.need.aux_slot is None)

    @property
    def has_unsettled(self) -> bool:
        """Return whether a sender may still write to its slots."""
        return any(sender.outstanding is not None for sender in self.senders.values())

    @property
    def has_helper(self) -> bool:
        """Return whether helpers send of it: instances other than the request's own prefill instance."""
        return any(sender.is_helper for sender in self.senders.values())

    @property
    def unfinished_senders(self) -> int | None:
        """Senders that have something left to do, known and to come; None where no report says how many come."""
        if self.sender_count is None:
            return None
        return max(0, self.sender_count - sum(sender.is_finished for sender in self.senders.values()))

    def next_waiting(self) -> SenderState | None:
        """The sender that has waited longest for a grant; None while the slots are held."""
        if self.is_held:
            return None
        waiting = (sender for sender in self.senders.values() if sender.wants_grant)
        return min(waiting, key=lambda sender: sender.waiting_since_s, default=None)

    def expect(self, need: Need, now_s: float) -> str | None:
        """Its slots are known. Returns why what has been offered so far does not fit, or None."""
        self.need = need
        self.phase = ReceivePhase.OPEN
        self.expected_s = self.progress_s = now_s
        accepted: list[KVShard] = []
        for sender in self.senders.values():
            sender.waiting_since_s = now_s
            for shard in sender.shards:
                problem = unwanted_reason(shard, need.whole, accepted)
                if problem is not None:
                    return f"{sender.address} offers KV that does not fit: {problem}"
                accepted.append(shard)
        return None

    def accept(self, sender: SenderState, report: SenderReport, now_s: float) -> str | None:
        """Take note of new chunks. Returns why they do not fit, or None."""
        if report.sender_count is not None:
            self.sender_count = max(report.sender_count, self.sender_count or 0)
        for shard in report.chunks[max(0, len(sender.shards) - report.first_chunk) :]:
            if report.first_chunk > len(sender.shards) or sender.total is not None:
                return f"{sender.address} offers chunks out of order"
            if self.need is not None:
                others = (known for other in self.senders.values() for known in other.shards)
                problem = unwanted_reason(shard, self.need.whole, others)
                if problem is not None:
                    return f"{sender.address} offers KV that does not fit: {problem}"
            if not sender.wants_grant:
                sender.waiting_since_s = now_s
            sender.shards.append(shard)
            sender.offered_s.append(now_s)
            self.progress_s = now_s
        if report.is_last and report.offered == len(sender.shards):
            sender.total = report.offered
        if report.written_parts > sender.parts:
            sender.parts = report.written_parts
            self.progress_s = now_s
        return None

    def store(self, sender: SenderState, now_s: float) -> None:
        """The outstanding chunk of `sender` has arrived."""
        shard = sender.shards[sender.stored]
        sender.stored += 1
        sender.outstanding = None
        sender.waiting_since_s = self.progress_s = now_s
        self.cells_stored += shard.cells
        self.is_aux_stored |= shard.has_aux

    def grant(self, sender: SenderState, permit: int, backend: int | None, now_s: float) -> Grant:
        """Grant the next chunk of `sender`."""
        self.backend_wait_s += now_s - sender.waiting_since_s
        if self.first_grant_s is None:
            self.first_grant_s = now_s
        self.progress_s = now_s
        sender.granted += 1
        sender.outstanding = Outstanding(permit, backend)
        return self.grant_of(sender, sender.outstanding)

    def grant_of(self, sender: SenderState, outstanding: Outstanding) -> Grant:
        """The grant of the sender's outstanding chunk. Raises ValueError before the slots are known."""
        if self.need is None:
            raise ValueError(f"the slots of transfer {self.transfer_id} are not known")
        chunk = sender.granted - 1
        shard = sender.shards[chunk]
        first = self.need.whole.tokens[0].start if self.need.whole.tokens else 0
        slots = b"".join(
            self.need.slots[span.start - first : span.stop - first : span.step].tobytes() for span in shard.tokens
        )
        aux_slot = self.need.aux_slot if shard.has_aux else None
        state_slots = self.need.state_slots if shard.has_extras else ()
        return Grant(chunk, outstanding.permit, outstanding.backend, slots, aux_slot, state_slots)

    def report_to(self, sender: SenderState, seen: int, receiver: str, epoch: int) -> ReceiverReport:
        """The state of `sender`'s part, with the outstanding grant unless the sender has seen it."""
        grant = None
        if sender.outstanding is not None and self.phase is ReceivePhase.OPEN and seen < sender.granted:
            grant = self.grant_of(sender, sender.outstanding)
        return ReceiverReport(
            self.transfer_id,
            receiver,
            epoch,
            sender.epoch,
            len(sender.shards),
            sender.granted,
            grant,
            sender.stored,
            sender.total is not None,
            self.is_complete,
            sender.echoed_sent_s,
        )

    def record(self, outcome: TransferOutcome, reason: str, now_s: float) -> ReceiveRecord:
        """Return the record of the request, at its end."""
        handshake_wait_s = None
        if self.first_handshake_s is not None and self.expected_s is not None:
            handshake_wait_s = max(0.0, self.first_handshake_s - self.expected_s)
        return ReceiveRecord(
            self.transfer_id,
            outcome,
            reason,
            len(self.senders),
            sum(sender.stored for sender in self.senders.values()),
            len(self.need.slots) if self.need is not None else 0,
            handshake_wait_s,
            self.backend_wait_s,
            None if self.first_grant_s is None else now_s - self.first_grant_s,
            self.repeated_reports,
        )
