"""The transfer of a request's own prefill instance to one decode rank, from the handshake to the last attempt.

    handshake ──offer_rest──▶ the rest ──────────────send, send, …──▶ stored
        │                                                  │
        └────────────── a helper has failed ───────────────┴──▶ invited again: everything from here

Other instances may send what they compute straight to decode (helpers). Where one of them fails, decode invites to
another attempt, and this instance sends all of it, from its own memory, beginning with what it has sent before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sglang_ext.identifiers import TransferId, next_attempt
from sglang_ext.transfer.decide.protocol import TransferOutcome
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.outgoing_transfer import DeviceEvent, OutgoingTransfer, PartRows, SourceChunk
from sglang_ext.transfer.endpoint.transfer_status import Stage, TransferStatus
from sglang_ext.transfer.pool_layout import Slots


class Source(NamedTuple):
    """The part of a request that this rank holds and the receiver wants."""

    tokens: TokenSpan | None  # of step 1; None where it wants metadata only
    first_head: int
    head_count: int
    layer_count: int
    aux_slot: int | None
    first_layer: int = 0  # of a pipeline's stage
    has_states: bool = False  # its heads of extra states come from this rank


class _Rows(NamedTuple):
    """Positions from `first_token` on, one slot each, which are in place once `computed` is reached."""

    first_token: int
    slots: Slots
    has_aux: bool
    computed: DeviceEvent | None = None
    state_slots: tuple[Slots, ...] = ()

    @property
    def stop(self) -> int:
        return self.first_token + len(self.slots)


class LayerStream:
    """Positions that are being computed, of one attempt: each layer leaves when it is there, in order.

    `send` gets the first of the layers that are there, their number, and what says that they are. Made by
    `OwnerTransfer.stream`, and used by the same thread.
    """

    def __init__(self, span: TokenSpan, layer_count: int, send: Callable[[int, int, DeviceEvent | None], None]) -> None:
        self.span = span
        self.sent_layers = 0
        self._layer_count = layer_count
        self._send: Callable[[int, int, DeviceEvent | None], None] | None = send

    def layer_ready(self, layer: int, computed: DeviceEvent | None = None) -> None:
        """Keys and values of a layer are there, or will be once `computed` is. Ignored after `close`, and unless it is
        the next one."""
        if self._send is not None and layer == self.sent_layers < self._layer_count:
            self.sent_layers += 1
            self._send(layer, 1, computed)

    def rest_ready(self, computed: DeviceEvent | None = None) -> None:
        """Keys and values of all layers that have not left are there, or will be. Ignored after `close`."""
        rest = self._layer_count - self.sent_layers
        if self._send is not None and rest:
            self._send(self.sent_layers, rest, computed)
            self.sent_layers = self._layer_count

    def close(self) -> None:
        """Send what has not left yet with the whole chunk."""
        self._send = None


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
        """Shakes hands. `sender_count`: how many ranks of this instance, of all its stages, send to the receiver, this
        one among them.

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
        self._streams: list[LayerStream] = []  # of the present attempt, ascending

    @property
    def handle(self) -> OutgoingTransfer:
        """The present attempt's, or the last one's where the next has not begun."""
        return self._handle

    @property
    def transfer_id(self) -> TransferId:
        """Return the transfer's id with the number of the attempt."""
        return self._transfer_id

    @property
    def can_be_shared(self) -> bool:
        """Return whether others may still offer parts of it: until this rank has offered the rest, or sends all."""
        return self._is_first and not self._is_rest_wanted

    @property
    def is_restarted(self) -> bool:
        """Return whether what others have sent of it is lost."""
        return not self._is_first or self._handle.status.outcome is TransferOutcome.RESTARTED

    def offer_now(self, first_token: int, slots: Slots) -> None:
        """These positions are here and will not be sent by any other instance; before `offer_rest`."""
        source = self._source
        if not self.can_be_shared or not len(slots) or not source.head_count:
            return
        span = TokenSpan(first_token, first_token + len(slots))
        first_layer = source.first_layer
        shard = KVShard((span,), source.first_head, source.head_count, first_layer, source.layer_count)
        chunk = self._handle.offer(SourceChunk(shard, slots, None))
        self._handle.part(chunk, PartRows(first_layer, source.layer_count, 0, len(slots), False))

    def offer_rest(self, elsewhere: Sequence[range] = ()) -> None:
        """This rank sends what remains; `elsewhere` (ascending): what has been offered already, here or by
        others. In a later attempt everything is offered."""
        if self._is_rest_wanted:
            return
        self._is_rest_wanted = True
        self._offer(_without(self._source.tokens, elsewhere if self._is_first else ()))

    def stream(self, first_token: int, slots: Slots) -> LayerStream | None:
        """Positions from `first_token` on are about to be computed into `slots`, and will be sent: their layers may
        leave before. None where they may not, or where nothing of them is wanted."""
        span = TokenSpan(first_token, first_token + len(slots))
        done = self._rows[-1].stop if self._rows else 0
        latest = max([done, *(stream.span.stop for stream in self._streams)])
        if not self._rest or first_token < latest:
            return None
        handle, chunk, pieces = self._handle, self._rest_chunk, list(self._in_rest(span.start, span.stop))
        if not pieces:
            return None

        first_layer = self._source.first_layer

        def send(layer: int, count: int, computed: DeviceEvent | None) -> None:
            for start, stop, place in pieces:
                part = PartRows(first_layer + layer, count, place, stop - start, False)
                handle.part(chunk, part, slots[start - first_token : stop - first_token], computed=computed)

        stream = LayerStream(span, self._source.layer_count, send)
        self._streams.append(stream)
        return stream

    def send(
        self,
        first_token: int,
        slots: Slots,
        *,
        has_aux: bool,
        computed: DeviceEvent | None = None,
        state_slots: tuple[Slots, ...] = (),
    ) -> None:
        """Positions from `first_token` on are in `slots`, or will be once `computed` is, and stay there until it has
        ended; `has_aux`: the metadata are in place, too, and the extra states in `state_slots`, one per kind. Streams
        of them end."""
        self.offer_rest()
        rows = _Rows(first_token, slots if self._source.head_count else slots[:0], has_aux, computed, state_slots)
        self._rows.append(rows)
        self._deliver(rows)

    def send_metadata(self, first_token: int, slots: Slots) -> None:
        """Others have sent all that is wanted before `first_token`: the metadata are in place, and so is what is left,
        in `slots`. Good only for this attempt."""
        self.offer_rest([range(first_token)])
        if self._is_first:
            self._deliver(_Rows(first_token, slots if self._source.head_count else slots[:0], True))

    def restart(self, reason: str) -> None:
        """Begin another attempt without helpers; ignored where no helper was relied upon."""
        if self._is_first:
            self._handle.restart(reason)

    def abort(self, reason: str) -> None:
        """Give the transfer up, on both sides."""
        self._handle.abort(reason)

    def poll(self) -> TransferStatus:
        """Return how far it is; begins the next attempt when decode has asked for it."""
        if self._failure is not None:
            return self._failure
        status = self._handle.status
        if status.outcome is not TransferOutcome.RESTARTED:
            return status
        transfer_id = next_attempt(self._transfer_id)
        if transfer_id is None:
            self._failure = status
            return status
        asked = [
            invitation
            for invitation in self._endpoint.invitations(transfer_id)
            if invitation.receiver == self._receiver
        ]
        withdrawn = asked[0].withdrawn if asked else None
        if withdrawn is not None:
            self._failure = TransferStatus(Stage.FAILED, TransferOutcome.REMOTE_ABORT, withdrawn, True)
            return self._failure
        if asked and status.is_released:
            self._begin(transfer_id)
            return self._handle.status
        self._failure = self._peer_failure() if status.is_released else None
        return self._failure or TransferStatus(Stage.TRANSFERRING, None, "", False)

    def _peer_failure(self) -> TransferStatus | None:
        """Return how the transfer has failed where decode, gone or stopped between two attempts, asks no more."""
        now_s, limit_s = self._clock(), self._endpoint.stall_timeout_s
        self._waits_since_s = now_s if self._waits_since_s is None else self._waits_since_s
        waited_s = now_s - self._waits_since_s
        lost = self._endpoint.loss_reason(self._receiver, waited_s, self._handle.machine.receiver_epoch)
        if lost is not None:
            return TransferStatus(Stage.FAILED, TransferOutcome.PEER_LOST, lost, True)
        if waited_s >= limit_s:
            reason = f"{self._receiver} has not asked again for {limit_s:g} s"
            return TransferStatus(Stage.FAILED, TransferOutcome.STALLED, reason, True)
        return None

    def _begin(self, transfer_id: TransferId) -> None:
        self._transfer_id, self._is_first, self._rest, self._waits_since_s = transfer_id, False, None, None
        self._handle = self._endpoint.open_sender(transfer_id, self._receiver, self._sender_count)
        self._streams = []  # they belong to the attempt before: everything is sent from the rows
        if self._is_rest_wanted:
            self._offer(() if self._source.tokens is None else (self._source.tokens,))
            for rows in self._rows:
                self._deliver(rows)

    def _offer(self, spans: tuple[TokenSpan, ...]) -> None:
        source = self._source
        self._rest = spans if source.head_count else ()
        if not self._rest and source.aux_slot is None and not self._brings_states:
            self._handle.close()
            return
        shard = KVShard(
            self._rest,
            source.first_head,
            source.head_count,
            source.first_layer,
            source.layer_count,
            source.aux_slot is not None,
            self._brings_states,
        )
        self._rest_chunk = self._handle.offer(SourceChunk(shard, None, source.aux_slot), is_last=True)

    def _deliver(self, rows: _Rows) -> None:
        """The parts of what was offered that are among these rows."""
        first_layer, layers = self._source.first_layer, self._source.layer_count
        for low, high, sent_layers in self._not_streamed(rows.first_token, rows.stop):
            for start, stop, place in self._in_rest(low, high):
                part = PartRows(first_layer + sent_layers, layers - sent_layers, place, stop - start, False)
                slots = rows.slots[start - rows.first_token : stop - rows.first_token]
                self._handle.part(self._rest_chunk, part, slots, computed=rows.computed)
        if rows.has_aux and (self._source.aux_slot is not None or self._brings_states):
            self._handle.part(self._rest_chunk, PartRows(first_layer, layers, 0, 0, True), state_slots=rows.state_slots)

    @property
    def _brings_states(self) -> bool:
        """Return whether its pieces of extra states are offered: behind rows, or where decode has all rows cached."""
        return self._source.has_states and (bool(self._rest) or self._source.tokens is None)

    def _in_rest(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Return the part of positions low to high that this rank offers: from, to, and place in the offered chunk."""
        before = 0
        for span in self._rest or ():
            start, stop = max(span.start, low), min(span.stop, high)
            if start < stop:
                yield start, stop, before + start - span.start
            before += span.token_count

    def _not_streamed(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Positions low to high, in pieces: from, to, and how many layers have left."""
        for stream in self._streams:
            stop = min(stream.span.stop, high)
            if stop <= low or stream.span.start >= high:
                continue
            stream.close()
            if low < stream.span.start:
                yield low, stream.span.start, 0
            if stream.sent_layers < self._source.layer_count:
                yield max(low, stream.span.start), stop, stream.sent_layers
            low = stop
        if low < high:
            yield low, high, 0


def _without(span: TokenSpan | None, taken: Sequence[range]) -> tuple[TokenSpan, ...]:
    """Return the rest of a span of step 1 without these ascending ranges of step 1."""
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
