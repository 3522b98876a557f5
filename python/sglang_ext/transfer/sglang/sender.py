"""The prefill side of one request: shakes hands with every decode rank that invites, then sends chunk by chunk.

    [its turn is near] ──▶ invited by all ──▶ init: handshake, the whole request is offered ──send, …──▶ stored by all

An ordinary prefill instance offers the request as a whole, before it has computed any of it, so that its place in
the receivers' order is that of its arrival; each `send` then brings the slots of what has been computed. Layers of a
long chunk leave before (`layer_streams.py`).

A request that a long pool may compute is only announced at first. Where it is shared, every member sends what it
computes itself (`long_pool/member/kv_streams.py`), and this instance offers what is left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender

from sglang_ext.engine.request_traces import RequestTrace
from sglang_ext.identifiers import attempts_of, next_attempt
from sglang_ext.long_pool.member.kv_streams import Target
from sglang_ext.long_pool.messages import Destination
from sglang_ext.trace_keys import Key, SpanName
from sglang_ext.transfer.endpoint.invitations import Invitation
from sglang_ext.transfer.endpoint.outgoing_transfer import DeviceEvent
from sglang_ext.transfer.endpoint.owner_transfer import LayerStream, OwnerTransfer, Source
from sglang_ext.transfer.endpoint.part_times import layer_ranges
from sglang_ext.transfer.endpoint.transfer_status import Stage
from sglang_ext.transfer.pool_layout import Slots
from sglang_ext.transfer.sglang.layout import Share, shares_of, state_slots, token_slots

_GIVEN_UP = "the request was given up on the prefill instance"
_ABORTED = "the request was aborted on the prefill instance"
_WATCH_EVERY_S = 0.5  # of many prompts that wait, each is polled in every round of the scheduler


class _RankTransfer(NamedTuple):
    """The transfer to one decode rank."""

    transfer: OwnerTransfer
    share: Share
    invitation: Invitation


class HandshakeKVSender(CommonKVSender):  # type: ignore[misc]  # SGLang is untyped
    """The sender that SGLang's prefill scheduler polls and feeds."""

    # Host tensors of indices come in pinned memory behind a CUDA event, which a CPU engine does not have.
    supports_host_tensor_indices = False

    _transfer_start_time: float | None
    _early_send_wait_event: DeviceEvent | None = None  # SGLang sets it before `send`, and means only that one
    _shared_s: float | None = None  # when it was offered to a pool
    _computed_s: float | None = None  # when the last of it was there
    transfer_times: tuple[float, float] | None = None
    """Times of a shared request that is at decode, s: since it got there, and since the end of its computation."""

    trace: RequestTrace | None = None
    """Trace of the request, if it is traced."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kwargs: Any) -> None:
        self._outgoing: tuple[_RankTransfer, ...] | None = None  # None: no handshake yet
        for room in attempts_of(bootstrap_room):
            mgr.refused_rooms.forget(room)
        self._made_s = time.perf_counter()
        self._watched_s = float("-inf")  # when the ranks without slots were last checked
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)

    @property
    def waits_for_slots(self) -> bool:
        """Return whether a decode rank knows of the request and takes slots for it once it is called."""
        invitations = self.kv_mgr.endpoint.invitations(self.bootstrap_room)
        return self._outgoing is None and any(invitation.awaits_call for invitation in invitations)

    def pop_decode_prefix_len(self) -> int:
        """Tokens that decode has cached."""
        return next((invitation.first_token for _, invitation in self._invited() or ()), 0)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Shake hands for `num_kv_indices` pages. SGLang calls it once all invitations are here."""
        super().init(num_kv_indices, aux_index)
        invited = self._invited()
        self._outgoing = ()
        if invited is None:
            self.kv_mgr.fail(self.bootstrap_room, "decode's invitation has gone")
            return
        try:
            for share, invitation in invited:
                self._open(share, invitation)
        except ValueError as error:
            self.kv_mgr.fail(self.bootstrap_room, str(error))
            return
        # A later stage has not been polled: SGLang's limit for an invitation does not hold any more there, either.
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)
        if self.trace is not None:
            self.trace.record_handshake(self._made_s)
        if not self._may_be_shared:
            self.go_on_alone(())

    def send(
        self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, indices_event: Any = None
    ) -> None:
        """These pages have been computed: the next ones, in order."""
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        pages, index_slice, is_last, _ = self._prepare_send_indices(kv_indices, state_indices)
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        if is_last:
            self._computed_s = time.perf_counter()
        slots = token_slots(pages, self._page_size)
        states = state_slots(state_indices or (), self.kv_mgr.windows_by_head, self._page_size) if is_last else ()
        # A cached prefix leaves before its batch is computed, while the batch before may still be writing it.
        written, self._early_send_wait_event = self._early_send_wait_event, None
        for outgoing in self._outgoing or ():
            first_token = outgoing.invitation.first_token + index_slice.start * self._page_size
            outgoing.transfer.send(first_token, slots, has_aux=is_last, computed=written, state_slots=states)
        self._record_transfer_indices(pages, state_indices)
        if is_last and not self._outgoing:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)

    def may_stream(self, tokens: int) -> bool:
        """Return whether a chunk of this number of new tokens is long enough to leave by layer."""
        min_bytes: int | None = self.kv_mgr.stream_layer_bytes
        return min_bytes is not None and tokens * self.kv_mgr.layer_token_bytes >= min_bytes

    @property
    def leaves_with_batch(self) -> bool:
        """Return whether any chunk leaves once it is computed.

        `send` comes when the batch's result does, which on a pipeline stage is after the next batch.
        """
        return int(self.kv_mgr.pp_size) > 1

    def stream(self, first_token: int, slots: Slots) -> list[LayerStream]:
        """Positions from `first_token` on are about to be computed into `slots`; `send` follows. Notify them of every
        layer. What is left of a prompt's last page, which is never read, goes with it."""
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return []
        rest = -(first_token + len(slots)) % self._page_size
        if rest:
            slots = np.concatenate([slots, slots[-1] + np.arange(1, rest + 1, dtype=np.uint32)])
        streams = []
        for outgoing in self._outgoing or ():
            skipped = max(0, outgoing.invitation.first_token - first_token)
            streams.append(outgoing.transfer.stream(first_token + skipped, slots[skipped:]))
        return [stream for stream in streams if stream is not None]

    def poll(self) -> KVPoll:
        if self.conclude_state is None:
            self._advance()
        return super().poll()

    def poll_pp_consensus(self) -> KVPoll:
        """Asked on the first stage, which decode invites when all others have acknowledged."""
        return self.poll()

    def abort(self) -> None:
        super().abort()
        self._stop(_ABORTED)

    def refuse(self, reason: str) -> None:
        """Abort with a reason that decode's client gets."""
        super().abort()
        self._stop(reason)

    def clear(self) -> None:
        """The request has ended on this rank."""
        room = self.bootstrap_room
        if self.kv_mgr.request_status.get(room) != KVPoll.Success:
            self._stop(_GIVEN_UP)
        for attempt in attempts_of(room):
            self.kv_mgr.endpoint.forget_invitations(attempt)
        super().clear()

    # ---- called by a member of a long pool ----

    @property
    def can_be_shared(self) -> bool:
        """Return whether others may send of it: it is long enough, and the transfer is what it was at first."""
        return self._may_be_shared and all(entry.transfer.can_be_shared for entry in self._outgoing or ())

    def share(self, cached_tokens: int, prefix_slots: Any) -> tuple[tuple[Destination, ...], tuple[Target, ...]]:
        """The request is about to be offered to the pool: where this rank's KV of it shall go, for every member and
        for this one. Only where it `can_be_shared` on all ranks.

        The first `cached_tokens` are in `prefix_slots`, stay there, and are sent at once.
        """
        outgoing = [entry for entry in self._outgoing or () if entry.share.head_count and entry.invitation.whole.tokens]
        self._shared_s = time.perf_counter()
        slots = np.asarray(prefix_slots[:cached_tokens], np.uint32)
        for entry in outgoing:
            first = entry.invitation.first_token
            entry.transfer.offer_now(first, slots[first:])
        return (
            tuple(
                Destination(
                    self.bootstrap_room,
                    entry.invitation.receiver,
                    entry.share.decode_rank,
                    entry.invitation.decode_rank.heads,
                    entry.invitation.first_token,
                )
                for entry in outgoing
                if entry.invitation.decode_rank is not None
            ),
            tuple(
                Target(
                    entry.transfer.handle, entry.share.first_head, entry.share.head_count, entry.invitation.first_token
                )
                for entry in outgoing
            ),
        )

    def go_on_alone(self, sent: Sequence[range]) -> None:
        """The request is this instance's again; `sent` (ascending): positions that were offered since `share`, by
        whomever. Everything else is offered by this rank."""
        for outgoing in self._outgoing or ():
            outgoing.transfer.offer_rest(sent)

    @property
    def is_restarted(self) -> bool:
        """Return whether what others have sent cannot be relied upon any more, for one decode rank at least."""
        return any(entry.transfer.is_restarted for entry in self._outgoing or ())

    def send_metadata(self, end_tokens: int) -> None:
        """Others have sent the whole prompt, which is `end_tokens` long: what decode gets from here is its metadata,
        and the rest of its last page, which is never read."""
        self._computed_s = time.perf_counter()
        if self._transfer_start_time is None:
            self._transfer_start_time = self._computed_s
        rest = -end_tokens % self._page_size
        for outgoing in self._outgoing or ():
            outgoing.transfer.send_metadata(end_tokens, np.arange(rest, dtype=np.uint32))
        if not self._outgoing:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)

    def send_anew(self, reason: str) -> None:
        """Nothing of what others have sent can be relied upon: another attempt, in which this rank sends all."""
        for outgoing in self._outgoing or ():
            outgoing.transfer.restart(reason)

    # ---- internals ----

    @property
    def _page_size(self) -> int:
        page_size: int = self.kv_mgr.kv_args.page_size
        return page_size

    @property
    def _may_be_shared(self) -> bool:
        min_tokens: int | None = self.kv_mgr.shared_from_tokens
        return min_tokens is not None and self.num_kv_indices * self._page_size >= min_tokens

    def _invited(self) -> tuple[tuple[Share, Invitation], ...] | None:
        """Return what to send to whom, once every decode rank that wants something of this rank has invited it."""
        found = {
            invitation.decode_rank.rank: invitation
            for invitation in self.kv_mgr.endpoint.invitations(self.bootstrap_room)
            if invitation.decode_rank is not None and invitation.has_slots
        }
        first = next(iter(found.values()), None)
        if first is None or first.decode_rank is None:
            return None
        shares = shares_of(self.kv_mgr.attn_tp_rank, self.kv_mgr.heads, first.decode_rank.heads)
        if not all(share.decode_rank in found for share in shares):
            return None
        return tuple((share, found[share.decode_rank]) for share in shares)

    def _open(self, share: Share, invitation: Invitation) -> None:
        has_metadata = share.has_metadata and self.kv_mgr.pp_rank == 0
        has_rows = share.head_count > 0 and self.kv_mgr.layer_count > 0
        tokens = invitation.whole.tokens if has_rows else ()
        wanted_tokens = sum(span.token_count for span in tokens)
        if has_rows and wanted_tokens != self.num_kv_indices * self._page_size:
            raise ValueError(f"decode wants {wanted_tokens} tokens, prefill has {self.num_kv_indices} pages")
        has_states = any(self.kv_mgr.windows_by_head) or self.kv_mgr.divides_states
        if not tokens and not has_metadata and not has_states:
            return  # decode has every token cached and gets the metadata from another rank
        source = Source(
            tokens[0] if tokens else None,
            share.first_head,
            share.head_count,
            self.kv_mgr.layer_count,
            self.aux_index if has_metadata else None,
            self.kv_mgr.first_layer,
            has_states,
        )
        transfer = OwnerTransfer(
            *(self.kv_mgr.endpoint, self.bootstrap_room, invitation.receiver, source),
            share.sender_count * self.kv_mgr.pp_size if tokens or has_states else 1,
            may_have_helpers=self._may_be_shared,
        )
        if self.trace is not None:
            transfer.handle.keep_times()
        self._outgoing = (*(self._outgoing or ()), _RankTransfer(transfer, share, invitation))

    def _advance(self) -> None:
        room = self.bootstrap_room
        invitations = self.kv_mgr.endpoint.invitations(room)
        withdrawn = [invitation.withdrawn for invitation in invitations if invitation.withdrawn is not None]
        if self._outgoing is None:
            if withdrawn:
                self.kv_mgr.fail(room, f"decode has given the request up: {withdrawn[0]}")
            elif self._invited() is not None:
                self.kv_mgr.update_status(room, KVPoll.WaitingForInput)
            else:
                self._wait_for_slots([invitation for invitation in invitations if invitation.awaits_call])
            return
        statuses = [outgoing.transfer.poll() for outgoing in self._outgoing]
        failed = next((status for status in statuses if status.stage is Stage.FAILED), None)
        if failed is not None:
            self.kv_mgr.fail(room, failed.reason)
        elif withdrawn and not self._outgoing:
            self.kv_mgr.fail(room, f"decode has given the request up: {withdrawn[0]}")
        elif statuses and all(status.stage is Stage.COMPLETE for status in statuses):
            self.kv_mgr.update_status(room, KVPoll.Success)
            if self.trace is not None:
                self._trace_transfer(self.trace)
            if self._shared_s is not None and self._computed_s is not None:
                now_s = time.perf_counter()
                self.transfer_times = (now_s - self._shared_s, now_s - self._computed_s)
        elif any(status.stage in (Stage.TRANSFERRING, Stage.COMPLETE) for status in statuses):
            self.kv_mgr.update_status(room, KVPoll.Transferring)

    def _wait_for_slots(self, without_slots: Sequence[Invitation]) -> None:
        """Decode knows of the request and has no slots for it: it may wait as long as the decode ranks are there."""
        now_s = time.perf_counter()
        if not without_slots or now_s - self._watched_s < _WATCH_EVERY_S:
            return
        self._watched_s = now_s
        self.init_time = time.time()  # SGLang's limit for an invitation counts from its last sign
        for invitation in without_slots:
            problem = self.kv_mgr.endpoint.loss_reason(invitation.receiver, now_s - self._made_s, invitation.epoch)
            if problem is not None:
                self.kv_mgr.fail(self.bootstrap_room, problem)

    def _trace_transfer(self, trace: RequestTrace) -> None:
        """Everything that this rank sends is at decode. Of a later attempt, and of what others have sent, no ranges of
        layers are known."""
        now_s = time.perf_counter()
        offset_s = now_s - time.monotonic()  # from the endpoint's clock
        ranges = layer_ranges(part for entry in self._outgoing or () for part in entry.transfer.handle.part_times)
        starts_s = [layer_range.ready_s + offset_s for layer_range in ranges]
        if self._transfer_start_time is not None:
            starts_s.append(self._transfer_start_time)
        trace.add(
            SpanName.TRANSFER,
            min(starts_s, default=now_s),
            now_s,
            {Key.TRANSFER_TOKENS: self.num_kv_indices * self._page_size},
            [
                (
                    SpanName.LAYERS,
                    layer_range.ready_s + offset_s,
                    layer_range.written_s + offset_s,
                    {
                        Key.TRANSFER_TOKENS: layer_range.token_count,
                        Key.FIRST_LAYER: layer_range.first_layer,
                        Key.LAYER_COUNT: layer_range.layer_count,
                    },
                )
                for layer_range in ranges
            ],
        )

    def _stop(self, reason: str) -> None:
        """Send nothing more; notify every decode rank, also ranks that have not invited yet."""
        for outgoing in self._outgoing or ():
            outgoing.transfer.abort(reason)
        self.kv_mgr.refused_rooms.refuse(self.bootstrap_room, reason)
        # Decode may have begun another attempt that is not known here yet.
        for room in {next_attempt(outgoing.transfer.transfer_id) for outgoing in self._outgoing or ()}:
            if room is not None:
                self.kv_mgr.refused_rooms.refuse(room, reason)
