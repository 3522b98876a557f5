"""Describes how a prefill rank learns where a request's KV shall go: the decode rank invites it until it acknowledges.

An invitation says what this decode rank wants (tokens from the first that it has not cached, its heads, its layers)
and where its endpoint is. With several decode ranks a prefill rank gets one from each that it holds heads of.

Of an instance in pipeline stages the first one is invited when all others have acknowledged: they can send all that it
begins.

A long prompt comes without slots at first, so that decode holds no room for what waits in prefill's queue. The prefill
instance calls for them shortly before its turn, and is invited again.

    decode rank                                            prefill rank
      invitation without slots, repeated ────────────────▶   the request waits in prefill's queue
      ◀──────────────────────────────── call for slots       its turn is near
      takes slots, looks its cached prefix up
      invitation ────────────────────────────────────────▶   handshake
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from sglang_ext.identifiers import TransferId
from sglang_ext.transfer.decide.protocol import ControlRecord
from sglang_ext.transfer.decide.receive_request import Need
from sglang_ext.transfer.decide.shards import HeadLayout, KVShard

_MAX_TRANSFERS = 100_000


class DecodeRank(NamedTuple):
    """Describes which rank of its instance invites, and how that instance spreads its KV heads.

    From it a prefill rank knows which heads to send, and how many ranks will invite it.
    """

    rank: int
    heads: HeadLayout


class Invitation(ControlRecord, frozen=True):
    """Decode rank to prefill rank."""

    transfer_id: TransferId
    receiver: str
    whole: KVShard  # one span of tokens, or none when decode has them all
    withdrawn: str | None  # why nothing is wanted any more
    first_token: int = 0  # tokens before it are cached at decode
    decode_rank: DecodeRank | None = None  # None where the sender knows it otherwise
    has_slots: bool = True  # or decode waits to be called before it takes any
    epoch: int | None = None  # which incarnation of the receiver

    @property
    def awaits_call(self) -> bool:
        """Return whether decode takes slots, and invites again, once it is called."""
        return not self.has_slots and self.withdrawn is None


class InvitationSeen(ControlRecord, frozen=True):
    """Prefill rank to decode rank."""

    transfer_id: TransferId
    sender: str
    is_withdrawal: bool
    has_slots: bool = True


class SlotCall(ControlRecord, frozen=True):
    """Prefill rank to decode rank that has invited without slots: take them now, or the request has been given up."""

    transfer_id: TransferId
    sender: str
    given_up: str | None = None


class _SentInvitation:
    """An invitation, the prefill ranks that have not acknowledged it, and the ranks that get it after all others."""

    def __init__(self, invitation: Invitation, addresses: Iterable[str], last: Iterable[str], now_s: float) -> None:
        self.invitation = invitation
        self.addresses = set(addresses)
        self.last = set(last)
        self.unacknowledged = set(self.addresses)
        self.sent_s = now_s
        self.since_s = now_s
        self.call: SlotCall | None = None

    @property
    def next_addresses(self) -> set[str]:
        """Return the members that are to get it now. A withdrawal goes to all at once."""
        if self.invitation.withdrawn is not None:
            return self.unacknowledged
        return self.unacknowledged - self.last or self.unacknowledged


class SentInvitations:
    """The decode side. Not thread-safe.

    An invitation without slots is repeated every half `give_up_s` even when it was acknowledged: a prefill rank forgets
    what is not repeated, and answers each time once it has called.
    """

    def __init__(
        self,
        receiver: str,
        retry_s: float,
        give_up_s: float,
        decode_rank: DecodeRank | None = None,
        epoch: int | None = None,
    ) -> None:
        self._receiver = receiver
        self._decode_rank = decode_rank
        self._epoch = epoch
        self._retry_s = retry_s
        self._give_up_s = give_up_s
        self._pending: dict[TransferId, _SentInvitation] = {}

    @property
    def is_idle(self) -> bool:
        """Return whether nothing will have to be retransmitted."""
        return not any(pending.unacknowledged or pending.invitation.awaits_call for pending in self._pending.values())

    def invite(
        self, need: Need, addresses: Iterable[str], now_s: float, *, has_slots: bool = True, last: Iterable[str] = ()
    ) -> Iterator[tuple[str, Invitation]]:
        """Invite all addresses to send the KV of a request, or to call for slots before they do. The `last` addresses
        are invited when all others have acknowledged (`seen`)."""
        invitation = Invitation(
            *(need.transfer_id, self._receiver, need.whole, None, need.first_token, self._decode_rank),
            has_slots=has_slots,
            epoch=self._epoch,
        )
        pending = self._pending[need.transfer_id] = _SentInvitation(invitation, addresses, last, now_s)
        return self._send(pending, now_s)

    def on_call(self, message: SlotCall) -> bool:
        """A prefill rank calls for slots, or has given the request up; whether that was awaited. The first call of any
        rank counts, and a call that gives up counts for more."""
        pending = self._pending.get(message.transfer_id)
        if pending is None or not pending.invitation.awaits_call:
            return False
        if pending.call is None or pending.call.given_up is None:
            pending.call = message
        return True

    def call_of(self, transfer_id: TransferId) -> SlotCall | None:
        """Return prefill's answer to an invitation without slots."""
        pending = self._pending.get(transfer_id)
        return None if pending is None else pending.call

    def withdraw(self, transfer_id: TransferId, reason: str, now_s: float) -> Iterator[tuple[str, Invitation]]:
        """Withdraw the invitation: notify all invited ranks that nothing is wanted any more."""
        pending = self._pending.get(transfer_id)
        if pending is None or pending.invitation.withdrawn is not None:
            return iter(())
        pending.invitation = msgspec.structs.replace(pending.invitation, withdrawn=reason)
        pending.unacknowledged = set(pending.addresses)
        pending.since_s = now_s
        return self._send(pending, now_s)

    def seen(self, message: InvitationSeen, now_s: float) -> Iterator[tuple[str, Invitation]]:
        """A prefill rank acknowledges an invitation or a withdrawal; return what is sent then to the last ranks."""
        pending = self._pending.get(message.transfer_id)
        if (
            pending is None
            or message.has_slots != pending.invitation.has_slots
            or message.is_withdrawal != (pending.invitation.withdrawn is not None)
            or message.sender not in pending.unacknowledged
        ):
            return iter(())
        pending.unacknowledged.discard(message.sender)
        if not pending.unacknowledged and message.is_withdrawal:
            del self._pending[message.transfer_id]
        if message.is_withdrawal or not pending.last or pending.unacknowledged != pending.last:
            return iter(())
        return self._send(pending, now_s)

    def finish(self, transfer_id: TransferId) -> None:
        """The request is complete: neither invitation nor withdrawal is retransmitted."""
        self._pending.pop(transfer_id, None)

    def awaited(self) -> Iterator[tuple[TransferId, str, float]]:
        """Transfers whose KV may come, the prefill ranks that were invited, and since when."""
        for transfer_id, pending in self._pending.items():
            if pending.invitation.withdrawn is None:
                for address in pending.addresses:
                    yield transfer_id, address, pending.since_s

    def on_timer(self, now_s: float) -> Iterator[tuple[str, Invitation]]:
        """Retransmit what has not been acknowledged; a withdrawal only for a while."""
        for transfer_id, pending in list(self._pending.items()):
            if pending.invitation.withdrawn is not None and now_s - pending.since_s >= self._give_up_s:
                del self._pending[transfer_id]
            elif pending.unacknowledged and now_s - pending.sent_s >= self._retry_s:
                yield from self._send(pending, now_s)
            elif pending.invitation.awaits_call and now_s - pending.sent_s >= self._give_up_s / 2:
                pending.unacknowledged = set(pending.addresses)
                yield from self._send(pending, now_s)

    @staticmethod
    def _send(pending: _SentInvitation, now_s: float) -> Iterator[tuple[str, Invitation]]:
        pending.sent_s = now_s
        return iter([(address, pending.invitation) for address in sorted(pending.next_addresses)])


class ReceivedInvitations:
    """The prefill side: the newest of each transfer and decode rank, as long as it may be needed. Not thread-safe."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._by_transfer: dict[TransferId, dict[str, Invitation]] = {}
        self._since_s: dict[TransferId, float] = {}  # oldest first
        self._calls: dict[TransferId, SlotCall] = {}

    def record(self, invitation: Invitation, now_s: float) -> SlotCall | None:
        """An invitation, or its withdrawal, has arrived; a late invitation does not undo a withdrawal, and one without
        slots not one with them. The answer, where slots have been called for."""
        transfer_id = invitation.transfer_id
        known = self._by_transfer.setdefault(transfer_id, {})
        if not invitation.has_slots:
            self._since_s.pop(transfer_id, None)  # it is repeated as long as it holds
        self._since_s.setdefault(transfer_id, now_s)
        before = known.get(invitation.receiver)
        if before is None or (before.withdrawn is None and (invitation.has_slots or not before.has_slots)):
            known[invitation.receiver] = invitation
        while len(self._by_transfer) > _MAX_TRANSFERS:
            self.forget(next(iter(self._since_s)))
        return self._calls.get(transfer_id) if invitation.awaits_call else None

    def call(self, call: SlotCall) -> list[tuple[str, SlotCall]]:
        """Answer every decode rank that has invited without slots, now and whenever it does so again."""
        known = self._by_transfer.get(call.transfer_id, {})
        if known:
            self._calls[call.transfer_id] = call
        return [(receiver, call) for receiver, invitation in known.items() if invitation.awaits_call]

    def of(self, transfer_id: TransferId) -> tuple[Invitation, ...]:
        """Return the invitations that have arrived for a transfer."""
        return tuple(self._by_transfer.get(transfer_id, {}).values())

    def forget(self, transfer_id: TransferId) -> None:
        """This transfer will not be asked for any more."""
        self._by_transfer.pop(transfer_id, None)
        self._since_s.pop(transfer_id, None)
        self._calls.pop(transfer_id, None)

    def on_timer(self, now_s: float) -> None:
        """Forget transfers that were not asked for in time."""
        for transfer_id, since_s in list(self._since_s.items()):
            if now_s - since_s < self._keep_s:
                return
            self.forget(transfer_id)
