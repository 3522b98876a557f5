"""One instance of a long pool: takes part in chunks, one at a time, whenever the engine gives it a turn.

The engine calls `turn` between two of its own iterations. Orders that cost nothing are carried out at once; of those
that compute, one per turn, so that the engine's own batches and chunks alternate.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from sglang_ext.policy.cdsp.orders import (
    BuildMesh,
    Collect,
    Decline,
    DeclineReason,
    Drop,
    MemberReport,
    RollBack,
    RunChunk,
)
from sglang_ext.sequence_parallel.chunk_step import STEP_ERRORS, Engine, run_chunk, run_collect
from sglang_ext.sequence_parallel.kv_streams import KvStreams, OpenTarget, Reading, Target
from sglang_ext.sequence_parallel.mesh import Mesh, MeshError
from sglang_ext.sequence_parallel.messages import (
    CancelMessage,
    ChunkOrder,
    Destination,
    MeshBuilt,
    MeshFailed,
    OfferMessage,
    Report,
    StepDone,
    StepFailed,
    Streamed,
    ToMember,
    Transferred,
    Welcome,
)
from sglang_ext.sequence_parallel.pool_link import PoolLink
from sglang_ext.sequence_parallel.ranks import SINGLE_RANK, Ranks, together
from sglang_ext.sequence_parallel.shard import NoRoomError, Shard
from sglang_ext.sequence_parallel.step_clock import StepClock

logger = logging.getLogger(__name__)

_NEARLY_CONNECTED_S = 1.0

REPORT_INTERVAL_S = 0.2
_REQUESTS_OF_AN_INSTANCE = 2**32


class Declined(NamedTuple):
    """A request that was offered is its own instance's again, as it was."""

    request: int
    reason: DeclineReason
    streamed: Streamed | None = None  # what members have sent of it straight to decode; None: nothing


class Collected(NamedTuple):
    """A request that was offered is its own instance's again, with KV."""

    request: int
    slots: torch.Tensor  # of the positions behind the cached prefix, in order: whole pages, possibly not all of them
    streamed: Streamed | None = None


Outcome = Declined | Collected


class Member:
    """Belongs to the thread of the engine's loop; meshes are connected in threads of their own."""

    def __init__(
        self,
        engine: Engine,
        instance: int,
        link: PoolLink,
        connect: Callable[[int, tuple[int, ...]], Mesh],
        streams: KvStreams | None = None,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        """`connect(epoch, members)` returns the mesh of an epoch, or raises MeshError after a while.

        Of several `ranks` each has a member, whose link brings all of them the same orders in the same turn.
        """
        self._engine = engine
        self._streams = streams or KvStreams(engine.pool, ranks=ranks)
        self._streamed: dict[int, Streamed] = {}  # of requests that this member has offered
        self._instance = instance
        self._link = link
        self._connect = connect
        self._ranks = ranks
        self._shards: dict[int, Shard] = {}
        self._last_chunk: int | None = None  # its number; later steps moved KV alone
        self._cached_tokens: dict[int, int] = {}  # of requests that this member has offered
        self._steps: deque[ChunkOrder | Collect] = deque()
        self._meshes: dict[int, Mesh] = {}  # by epoch
        self._connected: deque[tuple[int, Mesh | MeshError]] = deque()  # by the connecting threads
        self._connecting: dict[int, threading.Thread] = {}  # by epoch

    @property
    def held_tokens(self) -> int:
        """KV slots that shards have taken from the engine's pool, also those that are only read any more."""
        owned = sum(shard.owned_tokens for shard in self._shards.values())
        return owned + self._streams.pool.condemned_tokens

    @property
    def is_busy(self) -> bool:
        """Whether it holds anything, or has something to do."""
        return bool(self._shards or self._steps)

    def offer(self, message: OfferMessage, prefix_slots: torch.Tensor, targets: Sequence[Target] = ()) -> None:
        """Offer a request; `prefix_slots` of its cached prefix must stay valid until its outcome.

        `targets`: the message's destinations as this member sends to them.
        """
        shard = self._shards[message.request] = Shard(self._streams.pool)
        self._streams.adopt(message.request, targets)
        if message.cached_tokens:
            shard.borrow((range(message.cached_tokens),), prefix_slots)
        self._cached_tokens[message.request] = message.cached_tokens
        self._link.send(message)

    def withdraw(self, request: int) -> None:
        """The request has ended; what other members hold of it is dropped by the coordinator."""
        self._cached_tokens.pop(request, None)
        self._streamed.pop(request, None)
        self._streams.close(request)
        self._link.send(CancelMessage(request))

    def turn(self) -> list[Outcome]:
        """Carry out what has been ordered, at most one computation; what has become of offered requests."""
        outcomes: list[Outcome] = []
        self._streams.settle()
        for order in self._link.receive():
            outcomes += self._take(order)
        self._take_meshes()
        if self._steps:
            outcomes += self._run(self._steps.popleft())
        return outcomes

    def abandon(self) -> list[Outcome]:
        """The coordinator has gone: drop everything, every offered request is its own instance's again."""
        for shard in self._shards.values():
            shard.drop()
        outcomes: list[Outcome] = [
            Declined(request, DeclineReason.NOT_A_MEMBER, self._streamed.pop(request, None))
            for request in self._cached_tokens
        ]
        self._streams.abandon("the pool's coordinator has gone")
        self._shards, self._cached_tokens, self._meshes = {}, {}, {}
        self._steps.clear()
        return outcomes

    def _take(self, order: ToMember) -> list[Outcome]:
        if isinstance(order, ChunkOrder | Collect):
            self._steps.append(order)
        elif isinstance(order, BuildMesh):
            thread = threading.Thread(target=self._build, args=(order,), name="cdsp-mesh", daemon=True)
            self._connecting[order.epoch] = thread
            thread.start()
        elif isinstance(order, Streamed):
            if order.request in self._cached_tokens:
                self._streamed[order.request] = order
            if not order.is_intact:
                self._streams.restart(order.request, "a member of the pool has failed")
        elif isinstance(order, RollBack):
            if order.sequence == self._last_chunk:
                self._streams.restart(order.request, "a chunk is computed again")
            if order.request in self._shards:
                self._shards[order.request].roll_back()
        elif isinstance(order, Drop):
            self._drop(order.request)
        elif isinstance(order, Decline):
            self._drop(order.request)
            if self._cached_tokens.pop(order.request, None) is not None:
                return [Declined(order.request, order.reason, self._streamed.pop(order.request, None))]
        return []

    def _build(self, order: BuildMesh) -> None:
        try:
            self._connected.append((order.epoch, self._connect(order.epoch, order.members)))
        except MeshError as error:
            self._connected.append((order.epoch, error))
        self._link.wake()

    def _take_meshes(self) -> None:
        while self._connected:
            epoch, mesh = self._connected.popleft()
            self._connecting.pop(epoch, None)
            if isinstance(mesh, MeshError):
                self._link.send(MeshFailed(epoch, str(mesh)))
            else:
                self._meshes[epoch] = mesh
                self._link.send(MeshBuilt(epoch))
        # A step that was ordered before the members changed still runs over the mesh of its own epoch.
        needed = {*(_of(step).epoch for step in self._steps), max(self._meshes, default=0)}
        self._meshes = {epoch: mesh for epoch, mesh in self._meshes.items() if epoch in needed}

    def _run(self, step: ChunkOrder | Collect) -> list[Outcome]:
        what = _of(step)
        clock = StepClock()
        # Before anything that may fail on one rank alone.
        reading = self._streams.announce()
        try:
            with together(self._ranks, MeshError):
                mesh = self._mesh_for(what)
            with mesh.step(what.sequence):
                outcomes = self._compute(step, mesh, clock, reading)
        except STEP_ERRORS as error:
            logger.warning("cdsp step %d of request %d failed: %s", what.sequence, what.request, error)
            if isinstance(step, ChunkOrder):
                self._streams.restart(what.request, f"a chunk has failed: {error}")
            # Its connections close with it, so that others need not wait in vain for their time.
            self._meshes.pop(what.epoch, None)
            self._link.send(StepFailed(what.sequence, str(error)))
            return []
        self._link.send(StepDone(what.sequence, clock.times()))
        return outcomes

    def _mesh_for(self, step: RunChunk | Collect) -> Mesh:
        thread = self._connecting.get(step.epoch)
        if thread is not None and step.epoch not in self._meshes:
            # The first rank has heard from the store that this one is connected, before its own thread has said so.
            thread.join(_NEARLY_CONNECTED_S)
            self._take_meshes()
        mesh = self._meshes.get(step.epoch)
        if mesh is None:
            raise MeshError(f"the mesh of epoch {step.epoch} is gone")
        return mesh

    def _compute(self, step: ChunkOrder | Collect, mesh: Mesh, clock: StepClock, reading: Reading) -> list[Outcome]:
        pool = self._streams.pool
        if isinstance(step, ChunkOrder):
            chunk, layout = step.chunk, step.chunk.layout
            self._last_chunk = chunk.sequence
            shard = self._shards.setdefault(chunk.request, Shard(pool))
            positions = layout.new[layout.group.index(self._instance)]
            run_chunk(
                *(self._engine, shard, layout, step.token_ids, mesh, self._instance, chunk.first_tag),
                is_overlapped=step.is_overlapped,
                clock=clock,
                sending=partial(self._streams.begin, reading, chunk.request, step.destinations, positions),
                ranks=self._ranks,
            )
            return []
        shard = self._shards.setdefault(step.request, Shard(pool))
        moves, first_tag = step.moves, step.first_tag
        run_collect(pool, shard, moves, mesh, self._instance, first_tag, clock=clock, ranks=self._ranks)
        if step.owner != self._instance:
            return []
        cached_tokens = self._cached_tokens.pop(step.request, None)
        if cached_tokens is None:
            return []  # withdrawn meanwhile; `Drop` follows
        try:
            slots = shard.surrender(cached_tokens)
        except NoRoomError:
            self._cached_tokens[step.request] = cached_tokens
            shard.roll_back()
            raise
        del self._shards[step.request]
        self._streams.close(step.request)
        return [Collected(step.request, slots, self._streamed.pop(step.request, None))]

    def _drop(self, request: int) -> None:
        self._streams.close(request)
        shard = self._shards.pop(request, None)
        if shard is not None:
            shard.drop()


def _of(step: ChunkOrder | Collect) -> RunChunk | Collect:
    return step.chunk if isinstance(step, ChunkOrder) else step


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
