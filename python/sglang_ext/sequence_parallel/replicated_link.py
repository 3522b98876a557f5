"""An instance's connection to the coordinator as each of its ranks sees it: the same messages in the same turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.sequence_parallel.membership import PoolLink
from sglang_ext.sequence_parallel.messages import FromMember, ToMember, Welcome
from sglang_ext.sequence_parallel.ranks import Ranks


class _News(NamedTuple):
    """What the first rank has heard since the last turn."""

    session: Welcome | None
    is_new_session: bool
    orders: Sequence[ToMember]


_NOTHING = _News(None, False, ())


class ReplicatedLink:
    """See `membership.PoolLink`. Every turn has to ask for the session exactly once: that is when news travels."""

    def __init__(self, ranks: Ranks, link: PoolLink | None) -> None:
        """`link` is the first rank's; the others have none."""
        self._ranks = ranks
        self._link = link
        self._session: Welcome | None = None
        self._heard: Welcome | None = None  # on the first rank: the session that all have been told of
        self._orders: list[ToMember] = []
        self.wake_descriptor = None if link is None else link.wake_descriptor

    def session(self) -> Welcome | None:
        news = self._ranks.share(self._hear)
        if news.is_new_session:
            # What came before belongs to a session that has ended.
            self._session, self._orders = news.session, []
        self._orders += news.orders
        return self._session

    def receive(self) -> list[ToMember]:
        orders, self._orders = self._orders, []
        return orders

    def send(self, message: FromMember) -> None:
        if self._link is not None:
            self._link.send(message)

    def wake(self) -> None:
        if self._link is not None:
            self._link.wake()

    def _hear(self) -> _News:
        assert self._link is not None, "only the first rank is asked, and it has a link"
        session = self._link.session()
        # Two sessions may be equal: after a restart the coordinator counts anew.
        is_new, self._heard = session is not self._heard, session
        orders = self._link.receive()
        if not is_new and not orders:
            return _NOTHING
        return _News(session if is_new else None, is_new, tuple(orders))
