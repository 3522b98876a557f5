"""How a prefill rank learns where a request's KV shall go: the decode rank invites it until it acknowledges.

An invitation says what this decode rank wants (tokens from the first that it has not cached, its heads, its layers)
and where its endpoint is. With several decode ranks a prefill rank gets one from each that it holds heads of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sglang_ext.identifiers import TransferId
from sglang_ext.policy.handshake.receive_request import Need
from sglang_ext.policy.handshake.shards import HeadLayout, KVShard

_MAX_TRANSFERS = 100_000


class DecodeRank(NamedTuple):
    """Which rank of its instance invites, and how that instance spreads its KV heads.

    From it a prefill rank knows which heads to send, and how many ranks will invite it.
    """

    rank: int
    heads: HeadLayout


class Invitation(NamedTuple):
    """Decode rank to prefill rank."""

    transfer_id: TransferId
    receiver: str
    whole: KVShard  # one span of tokens, or none when decode has them all
    withdrawn: str | None  # why nothing is wanted any more
    first_token: int = 0  # tokens before it are cached at decode
    decode_rank: DecodeRank | None = None  # None where the sender knows it otherwise


class InvitationSeen(NamedTuple):
    """Prefill rank to decode rank."""

    transfer_id: TransferId
    sender: str
    is_withdrawal: bool


class _SentInvitation:
    """An invitation, and the prefill ranks that have not acknowledged it."""

    def __init__(self, invitation: Invitation, addresses: Iterable[str], now_s: float) -> None:
        self.invitation = invitation
        self.addresses = set(addresses)
        self.unacknowledged = set(self.addresses)
        self.sent_s = now_s
        self.since_s = now_s


class SentInvitations:
    """The decode side. Not thread-safe."""

    def __init__(self, receiver: str, retry_s: float, give_up_s: float, decode_rank: DecodeRank | None = None) -> None:
        self._receiver = receiver
        self._decode_rank = decode_rank
        self._retry_s = retry_s
        self._give_up_s = give_up_s
        self._pending: dict[TransferId, _SentInvitation] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing will have to be retransmitted."""
        return not any(pending.unacknowledged for pending in self._pending.values())

    def invite(self, need: Need, addresses: Iterable[str], now_s: float) -> Iterator[tuple[str, Invitation]]:
        """Tell all addresses that the KV of a request may come."""
        invitation = Invitation(need.transfer_id, self._receiver, need.whole, None, need.first_token, self._decode_rank)
        pending = self._pending[need.transfer_id] = _SentInvitation(invitation, addresses, now_s)
        return self._send(pending, now_s)

    def withdraw(self, transfer_id: TransferId, reason: str, now_s: float) -> Iterator[tuple[str, Invitation]]:
        """Tell all invited ranks that nothing is wanted any more."""
        pending = self._pending.get(transfer_id)
        if pending is None or pending.invitation.withdrawn is not None:
            return iter(())
        pending.invitation = pending.invitation._replace(withdrawn=reason)
        pending.unacknowledged = set(pending.addresses)
        pending.since_s = now_s
        return self._send(pending, now_s)

    def seen(self, message: InvitationSeen) -> None:
        """A prefill rank acknowledges an invitation or a withdrawal."""
        pending = self._pending.get(message.transfer_id)
        if pending is not None and message.is_withdrawal == (pending.invitation.withdrawn is not None):
            pending.unacknowledged.discard(message.sender)
            if not pending.unacknowledged and message.is_withdrawal:
                del self._pending[message.transfer_id]

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

    @staticmethod
    def _send(pending: _SentInvitation, now_s: float) -> Iterator[tuple[str, Invitation]]:
        pending.sent_s = now_s
        return iter([(address, pending.invitation) for address in sorted(pending.unacknowledged)])


class ReceivedInvitations:
    """The prefill side: the newest of each transfer and decode rank, as long as it may be needed. Not thread-safe."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._by_transfer: dict[TransferId, dict[str, Invitation]] = {}
        self._since_s: dict[TransferId, float] = {}  # oldest first

    def note(self, invitation: Invitation, now_s: float) -> None:
        """An invitation, or its withdrawal, has arrived; a late invitation does not undo a withdrawal."""
        known = self._by_transfer.setdefault(invitation.transfer_id, {})
        self._since_s.setdefault(invitation.transfer_id, now_s)
        before = known.get(invitation.receiver)
        if before is None or before.withdrawn is None:
            known[invitation.receiver] = invitation
        while len(self._by_transfer) > _MAX_TRANSFERS:
            self.forget(next(iter(self._since_s)))

    def of(self, transfer_id: TransferId) -> tuple[Invitation, ...]:
        """What has arrived for a transfer."""
        return tuple(self._by_transfer.get(transfer_id, {}).values())

    def forget(self, transfer_id: TransferId) -> None:
        """This transfer will not be asked for any more."""
        self._by_transfer.pop(transfer_id, None)
        self._since_s.pop(transfer_id, None)

    def on_timer(self, now_s: float) -> None:
        """Forget transfers that were not asked for in time."""
        for transfer_id, since_s in list(self._since_s.items()):
            if now_s - since_s < self._keep_s:
                return
            self.forget(transfer_id)
