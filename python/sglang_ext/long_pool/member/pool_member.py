"""One instance of a long pool: takes part in chunks, one at a time, whenever the engine gives it a turn.

The engine calls `take_orders` and `compute` between two of its own iterations. Orders that cost nothing are carried
out at once; of those that compute, one per turn, so that the engine's own batches and chunks alternate.

Without a coordinator nothing is offered and nothing held: when the connection ends, every request that was offered
comes back to its own instance, and the instance joins again.
"""

from __future__ import annotations

import itertools
import logging
import select
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sglang_ext.identifiers import BootstrapRoom, instance_of, pool_request, room_of_pull
from sglang_ext.long_pool.decide.orders import (
    Borrow,
    Collect,
    DeclineReason,
    Drop,
    DropKept,
    GiveUp,
    Keep,
    MemberReport,
    RollBack,
    RunChunk,
)
from sglang_ext.long_pool.decide.sharding import Positions, count_tokens
from sglang_ext.long_pool.member.chunk_step import (
    Engine,
    LayerReady,
    StepContext,
    StreamError,
    WorkspaceError,
    run_chunk,
    run_collect,
    step_errors,
)
from sglang_ext.long_pool.member.incoming_rows import IncomingRows
from sglang_ext.long_pool.member.kept_rows import KeptRows
from sglang_ext.long_pool.member.kv_streams import KvStreams, OpenTarget, Reading, Target
from sglang_ext.long_pool.member.landing import Landing
from sglang_ext.long_pool.member.pool_link import PoolLink
from sglang_ext.long_pool.member.ranks import SINGLE_RANK, Ranks, all_ranks_or_raise
from sglang_ext.long_pool.member.shard import HeldRows, KvPoolFullError, Shard, rows_within
from sglang_ext.long_pool.mesh.device_streams import DeviceStreams
from sglang_ext.long_pool.mesh.mesh import Membership, Mesh, MeshError, Meshes
from sglang_ext.long_pool.messages import (
    CancelMessage,
    ChunkOrder,
    CollectOrder,
    Computed,
    DeclineMessage,
    Destination,
    KeptLost,
    OfferMessage,
    Pulled,
    PullFailed,
    PullOrder,
    ReportMessage,
    StepDone,
    StepFailed,
    Streamed,
    StreamFailed,
    ToMember,
    Transferred,
    Welcome,
)
from sglang_ext.long_pool.step_clock import StepClock

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.2
LONGEST_ROUND_TRIP_S = 0.01  # to the coordinator and back, that a member waits for
GIVEN_UP = "the step has been given up"


class Declined(NamedTuple):
    """A request that was offered is its own instance's again, as it was."""

    request: int
    reason: DeclineReason
    streamed: Streamed | None = None  # what members have sent of it straight to decode; None: nothing
    waited_s: float | None = None  # since the prompt came to a router; None: that is not known


class Collected(NamedTuple):
    """A request that was offered is its own instance's again, with KV."""

    request: int
    slots: torch.Tensor  # of the positions behind the cached prefix, in order: whole pages, possibly not all of them
    streamed: Streamed | None = None


class Sendable(NamedTuple):
    """All of a request that was offered has been computed, and is on its way to decode; the pool keeps it until
    `PoolMember.transferred`, or brings it after `PoolMember.stream_failed`."""

    request: int
    logits: torch.Tensor  # float32 [vocabulary], of its last row
    streamed: Streamed
    cached_tokens: int  # of it, that were not computed


class FollowUp(NamedTuple):
    """A prompt, of whichever instance, that this one has helped to compute in one step behind rows that were kept."""

    new_tokens: int
    cached_tokens: int


class Concluded(NamedTuple):
    """The pool needs nothing more of a request that went to decode: its cached prefix need not stay valid."""

    request: int


Outcome = Declined | Collected | Sendable | Concluded


class PoolMember:
    """Belongs to the thread of the engine's loop."""

    def __init__(
        self,
        engine: Engine,
        link: PoolLink,
        meshes: Meshes,
        open_target: OpenTarget | None = None,
        ranks: Ranks = SINGLE_RANK,
        streams: DeviceStreams | None = None,
        landing: Landing | None = None,
    ) -> None:
        """`meshes` connect this rank with those of other members.

        `open_target`: see `KvStreams`; `streams`: see `run_chunk`; `landing`: where kept rows of others come to. Of
        several `ranks` each has a member, whose link brings all of them the same sessions and orders in the same turn;
        all of them call the same methods in the same order.
        """
        self._engine = engine
        self._link = link
        self._meshes = meshes
        self.ranks = ranks
        self._device_streams = streams
        # What is being sent goes on when the coordinator does not.
        self._streams = KvStreams(engine.pool, open_target, ranks)
        self.kept = KeptRows(self._streams.pool, lambda prompts: link.send(KeptLost(prompts)))
        self._landing = landing
        self._incoming = IncomingRows(self._streams.pool, ranks)
        self._count = itertools.count(1)
        self._reported_s = float("-inf")
        self._session: Welcome | None = None
        self._begin_session(None)

    def _begin_session(self, session: Welcome | None) -> None:
        """Nothing is held, and nothing has been ordered."""
        self._session = session
        self._shards: dict[int, Shard] = {}
        self._streamed: dict[int, Streamed] = {}  # of requests that this member has offered
        self._cached_tokens: dict[int, int] = {}  # of requests that this member has offered
        self._at_decode: set[int] = set()  # such requests, until the pool needs nothing more of them
        self._borrowed_tokens: dict[int, int] = {}  # of requests that begin behind rows that the pool has kept
        self._unsent: dict[int, list[HeldRows]] = {}  # of these, what this member has to send
        self._sending: dict[int, list[Reading]] = {}  # by request, what this member is sending of it
        self._logits: dict[int, torch.Tensor] = {}  # of last rows of such requests that were computed here
        self._last_chunk: int | None = None  # its number; later steps moved only KV
        self._begun_step = 0  # the last one
        self._follow_ups: list[FollowUp] = []
        self._steps: deque[ChunkOrder | CollectOrder] = deque()
        self._meshes.enter(None if session is None else Membership(bytes.fromhex(session.pool_id), session.instance))

    @property
    def wake_descriptor(self) -> int | None:
        """See `PoolLink`."""
        return self._link.wake_descriptor

    @property
    def is_joined(self) -> bool:
        return self._session is not None

    @property
    def is_busy(self) -> bool:
        """Return whether it holds KV of any request, has a chunk to compute, or sends or receives rows."""
        return self._streams.is_sending or bool(self._shards or self._steps or self._incoming)

    @property
    def has_step(self) -> bool:
        """Return whether a step has been ordered that it has not taken part in."""
        return bool(self._steps)

    @property
    def free_tokens(self) -> int:
        """Return the number of KV slots that a request could take now."""
        return self._engine.pool.free_tokens

    @property
    def held_tokens(self) -> int:
        """KV slots that shards have taken from the engine's pool, also slots that are only read any more."""
        owned = sum(shard.owned_tokens for shard in self._shards.values())
        return owned + self._incoming.tokens + self._streams.pool.deferred_tokens

    def offer(
        self,
        token_ids: Sequence[int],
        cached_tokens: int,
        prefix_slots: torch.Tensor,
        *,
        waited_s: float,
        slack_s: float | None,
        destinations: tuple[Destination, ...] = (),
        targets: Sequence[Target] = (),
        room: BootstrapRoom | None = None,
        fits_owner: bool = True,
        namespace: str | None = None,
    ) -> int:
        """Offer a request; its number, which its outcome will bear. RuntimeError when not joined.

        `prefix_slots` of its cached prefix must stay valid until then. `destinations`: where members send what they
        compute, `targets` the same for this member. `room`: under which a router may have announced it. `fits_owner`:
        whether this instance could compute it by itself. `namespace`: see `OfferMessage`.
        """
        if self._session is None:
            raise RuntimeError("offered without a coordinator")
        request = pool_request(self._session.instance, next(self._count))
        shard = self._shards[request] = Shard(self._streams.pool)
        self._streams.adopt(request, targets)
        if cached_tokens:
            shard.borrow((range(cached_tokens),), prefix_slots)
        self._cached_tokens[request] = cached_tokens
        ids = array("i", np.asarray(token_ids, np.int32).tobytes())
        offer = OfferMessage(request, ids, cached_tokens, waited_s, slack_s, destinations, room, fits_owner)
        self._link.send(offer._replace(namespace=namespace))
        return request

    def withdraw(self, request: int) -> None:
        """The request has ended; what other members hold of it is dropped by the coordinator."""
        if self._is_known(request):
            self._forget(request)
            self._streams.close(request)
            self._link.send(CancelMessage(request))

    def stream_failed(self, request: int) -> None:
        """Collect an offered request here: the rows that members have sent of it cannot be relied upon."""
        if self._is_known(request):
            self._link.send(StreamFailed(request))

    def transferred(self, request: int, transfer_s: float, exposed_s: float) -> bool:
        """All KV of a request that was offered is at decode; see `Transferred`.

        Whether the pool still has it: then its cached prefix must stay valid until the outcome, which is `Concluded`.
        """
        was_offered = request in self._cached_tokens
        self._forget(request)
        self._streams.close(request)
        if not self._is_known(request):
            return False
        self._link.send(Transferred(request, transfer_s, exposed_s))
        if was_offered:
            self._at_decode.add(request)
        return was_offered

    def _is_known(self, request: int) -> bool:
        """A coordinator that has given this instance another number since knows nothing of it."""
        return self._session is not None and instance_of(request) == self._session.instance

    def is_report_due(self, now_s: float, busy_s: float = 0.0) -> bool:
        """Return whether a report is due: once an interval, and before `busy_s` in which none can be sent."""
        if self._session is None or now_s + busy_s < self._reported_s + REPORT_INTERVAL_S:
            return False
        self._reported_s = now_s
        return True

    def report(self, report: MemberReport) -> None:
        """Report this instance's load to the coordinator."""
        self._link.send(ReportMessage(report, self._begun_step))

    def take_follow_ups(self) -> list[FollowUp]:
        """Return those since the last call."""
        taken, self._follow_ups = self._follow_ups, []
        return taken

    def take_orders(self) -> list[Outcome]:
        """Carry out what has been ordered and computes nothing; what has become of offered requests.

        Joins and leaves with the connection. Call `compute` behind it, once the outcomes have been followed: a prompt
        that has been computed would have its first token a chunk later otherwise.
        """
        outcomes: list[Outcome] = []
        self._meshes.record_activity()
        session = self._link.session()
        if session is not self._session:
            outcomes += self._leave()
            self._begin_session(session)
        if self._streams.settle():
            self._settle_sending()
            self._report_soon()
        if self._landing is not None and self._incoming:
            self._settle_incoming(self._landing)
        if session is not None:
            for order in self._link.receive():
                outcomes += self._take(order)
        return outcomes

    def compute(self) -> list[Outcome]:
        """Take part in the next step that has been ordered, if there is one; what it makes of an offered request.

        Behind the last chunk of a prompt of this instance the coordinator's answer is waited for, which takes a round
        trip: the prompt would have its first token a batch of the engine later otherwise.
        """
        if not self._steps:
            return []
        step = self._steps.popleft()
        outcomes = self._run(step)
        if isinstance(step, ChunkOrder) and step.chunk.is_last and step.chunk.request in self._cached_tokens:
            request = step.chunk.request
            outcomes += self._await(lambda come: any(outcome.request == request for outcome in (*outcomes, *come)))
        return outcomes

    def await_step(self) -> list[Outcome]:
        """Wait for what the coordinator answers to an offer, but no longer than a round trip takes; what has become of
        offered requests meanwhile."""
        return self._await(lambda come: bool(self._steps or come))

    def _await(self, is_enough: Callable[[list[Outcome]], bool]) -> list[Outcome]:
        """Take orders until it is enough, but no longer than a round trip takes. On all ranks alike."""
        outcomes: list[Outcome] = []
        until_s = time.monotonic() + LONGEST_ROUND_TRIP_S
        while not is_enough(outcomes) and self.ranks.share(partial(self._wait_for_orders, until_s)):
            outcomes += self.take_orders()
        return outcomes

    def _wait_for_orders(self, until_s: float) -> bool:
        """Return whether something has come from the coordinator by then. On the first rank, which listens."""
        descriptor = self._link.wake_descriptor
        left_s = until_s - time.monotonic()
        return descriptor is not None and left_s > 0 and bool(select.select([descriptor], [], [], left_s)[0])

    def _leave(self) -> list[Outcome]:
        """The coordinator has gone: drop everything, every offered request is its own instance's again."""
        for shard in self._shards.values():
            shard.drop()
        self.kept.clear()
        self._incoming.abandon()
        if self._session is not None:
            self._streams.abandon("the pool's coordinator has gone")
        declined = [
            Declined(request, DeclineReason.NOT_A_MEMBER, self._streamed.get(request))
            for request in self._cached_tokens
        ]
        return [*declined, *map(Concluded, sorted(self._at_decode))]

    def _take(self, order: ToMember) -> list[Outcome]:
        if isinstance(order, ChunkOrder | CollectOrder):
            self._steps.append(order)
        elif isinstance(order, GiveUp):
            self._meshes.give_up(order.sequence, GIVEN_UP)
        elif isinstance(order, Streamed):
            if order.request in self._cached_tokens:
                self._streamed[order.request] = order
            if not order.is_intact:
                self._streams.restart(order.request, "a member of the pool has failed")
        elif isinstance(order, Computed):
            if order.request in self._cached_tokens:
                return self._sendable(order)
        elif isinstance(order, RollBack):
            if order.sequence == self._last_chunk:
                self._streams.restart(order.request, "a chunk is computed again")
            if order.request in self._shards:
                self._shards[order.request].roll_back()
        elif isinstance(order, Drop):
            self._drop(order.request)
            return self._release(order.request)
        elif isinstance(order, Keep):
            self._keep(order)
            return self._release(order.request)
        elif isinstance(order, Borrow):
            self._borrow(order)
        elif isinstance(order, PullOrder):
            self._pull(order)
        elif isinstance(order, DropKept):
            self.kept.drop(order.request)
            self._incoming.cancel(order.request)
            self._streams.cancel(order.request, "the pull has been given up")
        elif isinstance(order, DeclineMessage):
            self._drop(order.request)
            if order.request in self._cached_tokens:
                return [Declined(order.request, order.reason, self._forget(order.request), order.waited_s)]
        return []

    def _sendable(self, order: Computed) -> list[Outcome]:
        streamed, logits = self._streamed.get(order.request), self._logits.get(order.request)
        if order.logits is not None:
            logits = torch.frombuffer(order.logits, dtype=torch.float32)
        if logits is None or streamed is None:
            self._link.send(StreamFailed(order.request))
            return []
        cached_tokens = self._borrowed_tokens.get(order.request, self._cached_tokens[order.request])
        return [Sendable(order.request, logits, streamed, cached_tokens)]

    def _forget(self, request: int) -> Streamed | None:
        """It is not a request of the pool any more; what members have sent of it."""
        self._cached_tokens.pop(request, None)
        self._logits.pop(request, None)
        return self._streamed.pop(request, None)

    def _release(self, request: int) -> list[Outcome]:
        if request not in self._at_decode:
            return []
        self._at_decode.discard(request)
        return [Concluded(request)]

    def _keep(self, order: Keep) -> None:
        """The rows of a prompt that has ended remain here."""
        request = order.request
        self._streams.close(request)
        shard = self._shards.pop(request, Shard(self._streams.pool))
        try:
            rows = shard.keep(order.start_tokens, order.end_tokens)
        except KvPoolFullError:
            rows = HeldRows((), shard.slots)
        if rows.positions:
            self.kept.add(request, rows, self._sending.get(request, ()))
        else:
            self._link.send(KeptLost((request,)))
        self._drop(request)

    def _borrow(self, order: Borrow) -> None:
        """A request begins with rows that are here, in place of its owner's own cached prefix."""
        request, shard = order.request, Shard(self._streams.pool)
        rows = self.kept.borrow(request, order.parts)
        for part in rows:
            shard.borrow(*part)
        if rows or request in self._shards:
            self._shards[request] = shard
        self._borrowed_tokens[request] = order.parts[-1].tokens
        # Its owner has sent what it has cached itself.
        self._unsent[request] = [rows_within(part, order.cached_tokens, order.parts[-1].tokens) for part in rows]

    def _pull(self, order: PullOrder) -> None:
        """Rows that are kept here go to the target of a pull, and this instance gets ready for them if it is that."""
        assert self._session is not None
        pull, landing = order.pull, self._landing
        room = room_of_pull(self._session.pool_id, pull.pull)
        if landing is None:
            self._link.send(PullFailed(pull.pull))
            return
        try:
            # First what is read here: taking slots may evict what nothing reads.
            if self._session.instance in pull.sources:
                self._send_kept(landing, order, room)
            if self._session.instance == pull.target:
                self._incoming.begin(landing, pull.pull, room, pull.tokens)
        except (KvPoolFullError, MeshError, StreamError, ValueError) as error:
            logger.warning("cdsp: kept rows cannot be pulled: %s", error)
            self._link.send(PullFailed(pull.pull))

    def _send_kept(self, landing: Landing, order: PullOrder, room: BootstrapRoom) -> None:
        pull = order.pull
        destinations = (landing.destination(room, order.receivers),)
        reading = self._streams.announce()
        for rows in self.kept.borrow(pull.pull, pull.parts):
            self._streams.send(reading, pull.pull, destinations, *rows)
        self._streams.close(pull.pull)
        self.kept.give_back(pull.pull, (reading,))

    def _settle_incoming(self, landing: Landing) -> None:
        for pull, rows in self._incoming.settle(landing):
            if rows is None:
                self._link.send(PullFailed(pull))
            else:
                self.kept.add(pull, rows, ())
                self._link.send(Pulled(pull))
            self._report_soon()

    def _settle_sending(self) -> None:
        for request, readings in list(self._sending.items()):
            self._sending[request] = [reading for reading in readings if not reading.is_settled]
            if not self._sending[request]:
                del self._sending[request]
        self.kept.settle()

    def _run(self, step: ChunkOrder | CollectOrder) -> list[Outcome]:
        what = _of(step)
        self._begun_step = what.sequence
        members = what.layout.group if isinstance(what, RunChunk) else what.members
        addresses = {member: peer[self.ranks.rank] for member, peer in zip(members, step.peers, strict=True)}
        clock = StepClock()
        # Before anything that may fail only on one rank.
        reading = self._streams.announce()
        try:
            with ExitStack() as stack:
                with all_ranks_or_raise(self.ranks, MeshError):
                    mesh = stack.enter_context(self._meshes.step(what.sequence, addresses))
                if isinstance(step, ChunkOrder):
                    logits, outcomes = self._compute(step, mesh, clock, reading), []
                else:
                    logits, outcomes = None, self._collect(step.collect, mesh, clock)
        except step_errors(self.ranks) as error:
            logger.warning("cdsp step %d of request %d failed: %s", what.sequence, what.request, error)
            if isinstance(step, ChunkOrder) and reading.has_begun:
                self._streams.restart(what.request, f"a chunk has failed: {error}")
            shard = self._shards.get(what.request)
            if shard is not None and not shard.segments:
                del self._shards[what.request]
            unreachable = error.instance if isinstance(error, MeshError) else None
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError | WorkspaceError)
            free_tokens = self._engine.pool.free_tokens
            failed = StepFailed(what.sequence, str(error), unreachable, is_out_of_memory, free_tokens)
            self._link.send(failed._replace(is_unsent=not reading.has_begun))
            return []
        self._link.send(StepDone(what.sequence, clock.times(), self._engine.pool.free_tokens, logits))
        self._report_soon()
        return outcomes

    def _compute(self, step: ChunkOrder, mesh: Mesh, clock: StepClock, reading: Reading) -> array[float] | None:
        """The logits that the coordinator shall get: those of a prompt's last row, where it is another member's."""
        assert self._session is not None
        instance, chunk, layout = self._session.instance, step.chunk, step.chunk.layout
        self._last_chunk = chunk.sequence
        shard = self._shards.setdefault(chunk.request, Shard(self._streams.pool))
        positions = layout.new[layout.group.index(instance)]
        context = self._context(mesh, chunk.first_tag, clock)
        sending = None
        if step.destinations:
            self._sending.setdefault(chunk.request, []).append(reading)
            sending = partial(self._begin_sending, step, reading, positions)
        logits = run_chunk(context, self._engine, shard, layout, step.token_ids, sending)
        self._meshes.record_computed()
        cached_tokens = sum(map(count_tokens, layout.history))
        if chunk.is_last and cached_tokens == self._borrowed_tokens.get(chunk.request):
            self._follow_ups.append(FollowUp(sum(map(count_tokens, layout.new)), cached_tokens))
        if logits is None or not chunk.is_last:
            return None
        if instance_of(chunk.request) != instance:
            return array("f", logits.cpu().numpy().tobytes())
        if chunk.request in self._cached_tokens:
            self._logits[chunk.request] = logits
        return None

    def _begin_sending(
        self, step: ChunkOrder, reading: Reading, positions: Positions, slots: torch.Tensor
    ) -> LayerReady:
        """The chunk's new rows go to decode, and with the first chunk what the request has borrowed here."""
        request = step.chunk.request
        for rows in self._unsent.pop(request, ()):
            self._streams.send(reading, request, step.destinations, *rows)
        return self._streams.begin(reading, request, step.destinations, positions, slots)

    def _context(self, mesh: Mesh, first_tag: int, clock: StepClock) -> StepContext:
        assert self._session is not None
        return StepContext(
            *(mesh, self._session.instance, first_tag, clock, self.ranks),
            record_activity=self._meshes.record_activity,
            streams=self._device_streams,
        )

    def _collect(self, step: Collect, mesh: Mesh, clock: StepClock) -> list[Outcome]:
        assert self._session is not None
        pool, instance = self._streams.pool, self._session.instance
        shard = self._shards.setdefault(step.request, Shard(pool))
        run_collect(self._context(mesh, step.first_tag, clock), pool, shard, step.moves)
        if step.owner != instance:
            return []
        cached_tokens = self._cached_tokens.get(step.request)
        if cached_tokens is None:
            return []  # withdrawn meanwhile; `Drop` follows
        try:
            slots = shard.take_slots(cached_tokens)
        except KvPoolFullError:
            shard.roll_back()
            raise
        del self._shards[step.request]
        self._streams.close(step.request)
        return [Collected(step.request, slots, self._forget(step.request))]

    def _drop(self, request: int) -> None:
        self._streams.close(request)
        shard = self._shards.pop(request, None)
        if shard is not None:
            shard.drop()
        self.kept.give_back(request, self._sending.get(request, ()))
        self._borrowed_tokens.pop(request, None)
        self._unsent.pop(request, None)
        self._report_soon()

    def _report_soon(self) -> None:
        """More is free than has been reported, or other prompts wait: the coordinator may wait for that."""
        self._reported_s = float("-inf")


def _of(step: ChunkOrder | CollectOrder) -> RunChunk | Collect:
    return step.chunk if isinstance(step, ChunkOrder) else step.collect
