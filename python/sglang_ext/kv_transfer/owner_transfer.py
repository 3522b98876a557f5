"""What a request's own prefill instance sends to one decode rank, from the handshake to the last attempt.

    handshake ──offer_rest──▶ the rest ──────────────send, send, …──▶ stored
        │                                                  │
        └────────────── a helper has failed ───────────────┴──▶ invited again: everything from here

Other instances may send what they compute straight to decode (helpers). Where one of them fails, decode invites to
another attempt, and this instance sends all of it, from its own memory, beginning with what it has sent before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_ext.identifiers import TransferId, next_attempt
from sglang_ext.kv_transfer.endpoint import HandshakeEndpoint
from sglang_ext.kv_transfer.outgoing_transfer import OutgoingTransfer, PartRows, SourceChunk
from sglang_ext.kv_transfer.pool_layout import Slots
from sglang_ext.kv_transfer.transfer_status import Stage, TransferStatus
from sglang_ext.policy.handshake.protocol import TransferOutcome
from sglang_ext.policy.handshake.shards import KVShard, TokenSpan


class Source(NamedTuple):
    """What this rank holds of a request that the receiver wants."""

    tokens: TokenSpan | None  # of step 1; None where it wants metadata only
    first_head: int
    head_count: int
    layer_count: int
    aux_slot: int | None


class _Rows(NamedTuple):
    """Computed here: positions from `first_token` on, one slot each."""

    first_token: int
    slots: Slots
    has_aux: bool


class OwnerTransfer:
    """Belongs to the scheduler's thread."""

    def __init__(
        self,
        endpoint: HandshakeEndpoint,
        transfer_id: TransferId,
        receiver: str,
        source: Source,
        sender_count: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        may_have_helpers: bool = False,
    ) -> None:
        """Shakes hands. `sender_count`: how many ranks of this instance send to the receiver, this one among them.

        Raises ValueError when a transfer of this transfer to this receiver is under way.
        """
        self._clock = clock
        self._waits_since_s: float | None = None  # for the next attempt
        self._endpoint = endpoint
        self._transfer_id = transfer_id
        self._receiver = receiver
        self._source = source
        self._sender_count = sender_count
        # How many helpers will send is not known.
        count = None if may_have_helpers else sender_count
        self._handle = endpoint.open_sender(transfer_id, receiver, count, may_have_helpers=may_have_helpers)
        self._failure: TransferStatus | None = None
        self._is_first = True
        self._is_rest_wanted = False
        self._rest: tuple[TokenSpan, ...] | None = None  # of the present attempt, once it has been offered
        self._rest_chunk = 0
        self._rows: list[_Rows] = []  # all that has been sent, for another attempt

    @property
    def handle(self) -> OutgoingTransfer:
        """The present attempt's, or the last one's where the next has not begun."""
        return self._handle

    @property
    def transfer_id(self) -> TransferId:
        """With the number of the attempt."""
        return self._transfer_id

    @property
    def can_be_shared(self) -> bool:
        """Whether others may still offer parts of it: not once this rank has offered the rest, or sends all of it."""
        return self._is_first and not self._is_rest_wanted

    @property
    def is_restarted(self) -> bool:
        """Whether what others have sent of it is lost."""
        return not self._is_first or self._handle.status.outcome is TransferOutcome.RESTARTED

    def offer_now(self, first_token: int, slots: Slots) -> None:
        """These positions are here and will not be sent by any other instance; before `offer_rest`."""
        source = self._source
        if not self.can_be_shared or not len(slots) or not source.head_count:
            return
        span = TokenSpan(first_token, first_token + len(slots))
        shard = KVShard((span,), source.first_head, source.head_count, 0, source.layer_count)
        chunk = self._handle.offer(SourceChunk(shard, slots, None))
        self._handle.part(chunk, PartRows(0, source.layer_count, 0, len(slots), False))

    def offer_rest(self, elsewhere: Sequence[range] = ()) -> None:
        """This rank sends what remains; `elsewhere` (ascending): what has been offered already, here or by
        others. In a later attempt everything is offered."""
        if self._is_rest_wanted:
            return
        self._is_rest_wanted = True
        self._offer(_without(self._source.tokens, elsewhere if self._is_first else ()))

    def send(self, first_token: int, slots: Slots, *, has_aux: bool) -> None:
        """Positions from `first_token` on are in `slots`, and stay there until it has ended; `has_aux`: the metadata
        are in place, too."""
        self.offer_rest()
        rows = _Rows(first_token, slots if self._source.head_count else slots[:0], has_aux)
        self._rows.append(rows)
        self._deliver(rows)

    def send_metadata(self, first_token: int, slots: Slots) -> None:
        """Others have sent all that is wanted before `first_token`: the metadata are in place, and so is what is left,
        in `slots`. Good for this attempt alone."""
        self.offer_rest([range(first_token)])
        if self._is_first:
            self._deliver(_Rows(first_token, slots if self._source.head_count else slots[:0], True))

    def restart(self, reason: str) -> None:
        """What others send cannot be relied upon any more; ignored where they have not been relied upon."""
        if self._is_first:
            self._handle.restart(reason)

    def abort(self, reason: str) -> None:
        """Give the transfer up, on both sides."""
        self._handle.abort(reason)

    def poll(self) -> TransferStatus:
        """How far it is; begins the next attempt when decode has asked for it."""
        if self._failure is not None:
            return self._failure
        status = self._handle.status
        if status.outcome is not TransferOutcome.RESTARTED:
            return status
        transfer_id = next_attempt(self._transfer_id)
        if transfer_id is None:
            self._failure = status
            return status
        asked = [one for one in self._endpoint.invitations(transfer_id) if one.receiver == self._receiver]
        withdrawn = asked[0].withdrawn if asked else None
        if withdrawn is not None:
            self._failure = TransferStatus(Stage.FAILED, TransferOutcome.REMOTE_ABORT, withdrawn, True)
            return self._failure
        if asked and status.is_released:
            self._begin(transfer_id)
            return self._handle.status
        self._failure = self._why_in_vain() if status.is_released else None
        return self._failure or TransferStatus(Stage.TRANSFERRING, None, "", False)

    def _why_in_vain(self) -> TransferStatus | None:
        """Between two attempts: how it has failed where decode, which may have gone or been stopped, asks no more."""
        now_s, limit_s = self._clock(), self._endpoint.stall_timeout_s
        self._waits_since_s = now_s if self._waits_since_s is None else self._waits_since_s
        waited_s = now_s - self._waits_since_s
        lost = self._endpoint.why_lost(self._receiver, waited_s, self._handle.machine.receiver_epoch)
        if lost is not None:
            return TransferStatus(Stage.FAILED, TransferOutcome.PEER_LOST, lost, True)
        if waited_s >= limit_s:
            reason = f"{self._receiver} has not asked anew for {limit_s:g} s"
            return TransferStatus(Stage.FAILED, TransferOutcome.STALLED, reason, True)
        return None

    def _begin(self, transfer_id: TransferId) -> None:
        self._transfer_id, self._is_first, self._rest, self._waits_since_s = transfer_id, False, None, None
        self._handle = self._endpoint.open_sender(transfer_id, self._receiver, self._sender_count)
        if self._is_rest_wanted:
            self._offer(() if self._source.tokens is None else (self._source.tokens,))
            for rows in self._rows:
                self._deliver(rows)

    def _offer(self, spans: tuple[TokenSpan, ...]) -> None:
        source = self._source
        self._rest = spans if source.head_count else ()
        if not self._rest and source.aux_slot is None:
            self._handle.close()
            return
        shard = KVShard(
            self._rest, source.first_head, source.head_count, 0, source.layer_count, source.aux_slot is not None
        )
        self._rest_chunk = self._handle.offer(SourceChunk(shard, None, source.aux_slot), is_last=True)

    def _deliver(self, rows: _Rows) -> None:
        """The parts of what was offered that are among these rows."""
        layers, before = self._source.layer_count, 0
        stop = rows.first_token + len(rows.slots)
        for span in self._rest or ():
            low, high = max(span.start, rows.first_token), min(span.stop, stop)
            if low < high:
                part = PartRows(0, layers, before + low - span.start, high - low, False)
                self._handle.part(self._rest_chunk, part, rows.slots[low - rows.first_token : high - rows.first_token])
            before += span.token_count
        if rows.has_aux and self._source.aux_slot is not None:
            self._handle.part(self._rest_chunk, PartRows(0, layers, 0, 0, True))


def _without(span: TokenSpan | None, taken: Sequence[range]) -> tuple[TokenSpan, ...]:
    """What is left of a span of step 1 without these ascending ranges of step 1."""
    if span is None:
        return ()
    left, start = [], span.start
    for part in taken:
        stop = min(part.start, span.stop)
        if start < stop:
            left.append(TokenSpan(start, stop))
        start = max(start, part.stop)
    if start < span.stop:
        left.append(TokenSpan(start, span.stop))
    return tuple(left)
