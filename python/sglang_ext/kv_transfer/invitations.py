"""How a prefill rank learns where a request's KV shall go: the decode rank invites it, by room, until it has heard.

An invitation says what this decode rank wants (tokens from the first that it has not cached, its heads, its layers)
and where its endpoint is. With several decode ranks a prefill rank gets one from each that it holds heads of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sglang_ext.policy.handshake.receive_request import Need
from sglang_ext.policy.handshake.rooms import Room
from sglang_ext.policy.handshake.shards import HeadLayout, KVShard

_MAX_ROOMS = 100_000


class DecodeRank(NamedTuple):
    """Which rank of its instance invites, and how that instance spreads its KV heads.

    A prefill rank tells from it which heads to send, and how many ranks will invite it.
    """

    rank: int
    heads: HeadLayout


class Invitation(NamedTuple):
    """Decode rank to prefill rank."""

    room: Room
    receiver: str
    whole: KVShard  # one span of tokens, or none when decode has them all
    withdrawn: str | None  # why nothing is wanted any more
    first_token: int = 0  # tokens before it are cached at decode
    decode_rank: DecodeRank | None = None  # None where the sender knows it otherwise


class InvitationSeen(NamedTuple):
    """Prefill rank to decode rank."""

    room: Room
    sender: str
    is_withdrawal: bool


class _Pending:
    """An invitation that somebody has not heard of."""

    def __init__(self, invitation: Invitation, addresses: Iterable[str], now_s: float) -> None:
        self.invitation = invitation
        self.addresses = set(addresses)
        self.unheard = set(self.addresses)
        self.said_s = now_s
        self.since_s = now_s


class SentInvitations:
    """The decode side. Not thread-safe."""

    def __init__(self, receiver: str, retry_s: float, give_up_s: float, decode_rank: DecodeRank | None = None) -> None:
        self._receiver = receiver
        self._decode_rank = decode_rank
        self._retry_s = retry_s
        self._give_up_s = give_up_s
        self._pending: dict[Room, _Pending] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing will have to be said again."""
        return not any(pending.unheard for pending in self._pending.values())

    def invite(self, need: Need, addresses: Iterable[str], now_s: float) -> Iterator[tuple[str, Invitation]]:
        """Say to all addresses that the KV of a request may come."""
        invitation = Invitation(need.room, self._receiver, need.whole, None, need.first_token, self._decode_rank)
        pending = self._pending[need.room] = _Pending(invitation, addresses, now_s)
        return self._say(pending, now_s)

    def withdraw(self, room: Room, reason: str, now_s: float) -> Iterator[tuple[str, Invitation]]:
        """Say to all who were invited that nothing is wanted any more."""
        pending = self._pending.get(room)
        if pending is None or pending.invitation.withdrawn is not None:
            return iter(())
        pending.invitation = pending.invitation._replace(withdrawn=reason)
        pending.unheard = set(pending.addresses)
        pending.since_s = now_s
        return self._say(pending, now_s)

    def seen(self, message: InvitationSeen) -> None:
        """Somebody has heard."""
        pending = self._pending.get(message.room)
        if pending is not None and message.is_withdrawal == (pending.invitation.withdrawn is not None):
            pending.unheard.discard(message.sender)
            if not pending.unheard and message.is_withdrawal:
                del self._pending[message.room]

    def finish(self, room: Room) -> None:
        """The request is complete: nobody needs to be told anything."""
        self._pending.pop(room, None)

    def on_timer(self, now_s: float) -> Iterator[tuple[str, Invitation]]:
        """Say again what has not been heard; a withdrawal only for a while."""
        for room, pending in list(self._pending.items()):
            if pending.invitation.withdrawn is not None and now_s - pending.since_s >= self._give_up_s:
                del self._pending[room]
            elif pending.unheard and now_s - pending.said_s >= self._retry_s:
                yield from self._say(pending, now_s)

    @staticmethod
    def _say(pending: _Pending, now_s: float) -> Iterator[tuple[str, Invitation]]:
        pending.said_s = now_s
        return iter([(address, pending.invitation) for address in sorted(pending.unheard)])


class ReceivedInvitations:
    """The prefill side: the newest of each room and decode rank, for as long as anybody may ask. Not thread-safe."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._rooms: dict[Room, dict[str, Invitation]] = {}
        self._since_s: dict[Room, float] = {}  # oldest first

    def note(self, invitation: Invitation, now_s: float) -> None:
        """An invitation, or its withdrawal, has arrived; a late invitation does not undo a withdrawal."""
        known = self._rooms.setdefault(invitation.room, {})
        self._since_s.setdefault(invitation.room, now_s)
        before = known.get(invitation.receiver)
        if before is None or before.withdrawn is None:
            known[invitation.receiver] = invitation
        while len(self._rooms) > _MAX_ROOMS:
            self.forget(next(iter(self._since_s)))

    def of(self, room: Room) -> tuple[Invitation, ...]:
        """What has arrived for a room."""
        return tuple(self._rooms.get(room, {}).values())

    def forget(self, room: Room) -> None:
        """Nobody will ask for this room any more."""
        self._rooms.pop(room, None)
        self._since_s.pop(room, None)

    def on_timer(self, now_s: float) -> None:
        """Forget rooms that nobody has asked for in time."""
        for room, since_s in list(self._since_s.items()):
            if now_s - since_s < self._keep_s:
                return
            self.forget(room)
