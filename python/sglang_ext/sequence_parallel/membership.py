"""An instance's place in a long pool, whether or not the coordinator can be reached at the moment.

Without a coordinator nothing is offered and nothing held; when the connection ends, every request that was offered
comes back to its own instance, and the instance joins anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sglang_ext.policy.cdsp.coordination import MemberReport
from sglang_ext.sequence_parallel.chunk_step import Engine
from sglang_ext.sequence_parallel.destination import Destination
from sglang_ext.sequence_parallel.kv_streams import KvStreams, OpenTarget, Target
from sglang_ext.sequence_parallel.member import Link, Member, Outcome
from sglang_ext.sequence_parallel.mesh import Mesh
from sglang_ext.sequence_parallel.messages import OfferMessage, Report, Transferred, Welcome
from sglang_ext.sequence_parallel.ranks import SINGLE_RANK, Ranks

REPORT_INTERVAL_S = 0.2
_REQUESTS_OF_AN_INSTANCE = 2**32


class PoolLink(Link, Protocol):
    """A connection that is made anew whenever it ends."""

    @property
    def wake_descriptor(self) -> int | None:
        """Readable when there is something to receive, or the connection has ended; None where another rank listens."""

    def session(self) -> Welcome | None:
        """The coordinator's answer to the present connection's hello; None while there is no connection."""


Connect = Callable[[Welcome, int, tuple[int, ...]], Mesh]


class PoolMembership:
    """Belongs to the thread of the engine's loop."""

    def __init__(
        self,
        engine: Engine,
        link: PoolLink,
        connect: Connect,
        open_target: OpenTarget | None = None,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        """`connect(welcome, epoch, members)` returns the mesh of an epoch, or raises MeshError after a while.

        `open_target`: see `KvStreams`. Of several `ranks` each has a membership; all of them call the same methods in
        the same order.
        """
        self._engine = engine
        # What is being sent goes on when the coordinator does not.
        self._streams = KvStreams(engine.pool, open_target, ranks)
        self._link = link
        self._connect = connect
        self.ranks = ranks
        self._session: Welcome | None = None
        self._member: Member | None = None
        self._count = itertools.count(1)
        self._reported_s = float("-inf")

    @property
    def wake_descriptor(self) -> int | None:
        return self._link.wake_descriptor

    @property
    def is_joined(self) -> bool:
        return self._member is not None

    @property
    def is_busy(self) -> bool:
        """Whether it holds KV for anybody, has a chunk to compute, or sends what it has computed."""
        return self._streams.is_sending or (self._member is not None and self._member.is_busy)

    @property
    def held_tokens(self) -> int:
        return self._streams.pool.condemned_tokens if self._member is None else self._member.held_tokens

    def turn(self) -> list[Outcome]:
        """See `Member.turn`; joins and leaves with the connection."""
        outcomes: list[Outcome] = []
        session = self._link.session()
        if session is not self._session:
            if self._member is not None:
                outcomes += self._member.abandon()
            self._session, self._member = session, None
            if session is not None:
                connect = self._connector(session)
                self._member = Member(self._engine, session.instance, self._link, connect, self._streams, self.ranks)
        if self._member is not None:
            outcomes += self._member.turn()
        else:
            self._streams.settle()
        return outcomes

    def offer(
        self,
        token_ids: tuple[int, ...],
        cached_tokens: int,
        prefix_slots: torch.Tensor,
        *,
        waited_s: float,
        slack_s: float | None,
        destinations: tuple[Destination, ...] = (),
        targets: Sequence[Target] = (),
    ) -> int:
        """Offer a request; its number, which its outcome will bear. RuntimeError when not joined.

        `destinations`: where members send what they compute, `targets` the same for this member.
        """
        if self._member is None or self._session is None:
            raise RuntimeError("offered without a coordinator")
        number = self._session.instance * _REQUESTS_OF_AN_INSTANCE + next(self._count)
        message = OfferMessage(number, token_ids, cached_tokens, waited_s, slack_s, destinations)
        self._member.offer(message, prefix_slots, targets)
        return number

    def withdraw(self, request: int) -> None:
        """See `Member.withdraw`."""
        if self._member is not None:
            self._member.withdraw(request)

    def transferred(self, request: int, transfer_s: float, exposed_s: float) -> None:
        """All KV of a request that was offered is at decode; see `Transferred`."""
        session = self._session
        # A coordinator that has given this instance another number since knows nothing of it.
        if session is not None and request // _REQUESTS_OF_AN_INSTANCE == session.instance:
            self._link.send(Transferred(request, transfer_s, exposed_s))

    def is_report_due(self, now_s: float, silence_s: float = 0.0) -> bool:
        """Whether the coordinator should hear of this instance again: once an interval, and before a longer silence."""
        if self._member is None or now_s + silence_s < self._reported_s + REPORT_INTERVAL_S:
            return False
        self._reported_s = now_s
        return True

    def report(self, report: MemberReport) -> None:
        self._link.send(Report(report))

    def _connector(self, session: Welcome) -> Callable[[int, tuple[int, ...]], Mesh]:
        return lambda epoch, members: self._connect(session, epoch, members)
