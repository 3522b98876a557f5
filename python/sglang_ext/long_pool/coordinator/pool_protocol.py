"""The coordinator's side of the pool protocol, without I/O: messages in, messages out, and which members are lost.

Between the members' messages and the coordinator's events and orders: names become numbers, a chunk gets the ids of
its tokens and the addresses of its members, and missing heartbeats, hung engines and stuck steps become lost members.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sglang_ext.identifiers import BootstrapRoom, instance_of, pool_ticket, room_of
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.coordinator.pool_history import (
    MemberStatus,
    Outcome,
    PoolHistory,
    PoolStatus,
    PrefillEnd,
    PrefillRecord,
)
from sglang_ext.long_pool.coordinator.pool_progress import OpenStep, StreamLedger
from sglang_ext.long_pool.coordinator.pool_settings import Identity, PoolSettings, new_coordinator, planner_of
from sglang_ext.long_pool.coordinator.tickets import Announcement, BoundPrompt, OpenTickets, TicketError, TicketProblem
from sglang_ext.long_pool.decide.coordinator import Coordinator
from sglang_ext.long_pool.decide.kept_prompts import hash_blocks
from sglang_ext.long_pool.decide.orders import (
    Bind,
    Borrow,
    Collect,
    Decline,
    DropKept,
    Finish,
    Offer,
    Order,
    PromptTicket,
    RunChunk,
)
from sglang_ext.long_pool.decide.price_planner import PricePlanner
from sglang_ext.long_pool.decide.row_pulls import Pull
from sglang_ext.long_pool.decide.sharding import Positions, count_tokens
from sglang_ext.long_pool.messages import (
    AddressedMessage,
    Alive,
    CancelMessage,
    ChunkOrder,
    CollectOrder,
    Computed,
    DeclineMessage,
    Heartbeat,
    Hello,
    KeptLost,
    Message,
    OfferMessage,
    Peers,
    Pulled,
    PullFailed,
    PullOrder,
    Refusal,
    ReportMessage,
    StepDone,
    StepFailed,
    StreamFailed,
    Transferred,
)
from sglang_ext.long_pool.step_clock import StepTimes

# An engine that has done nothing for this long is not counted upon; an idle engine looks around more often.
SILENT_S = 2.0
# A member whose engine hangs may hold KV of others' prompts, or be waited for: this many times what it was believed to
# do takes longer than it ever should.
_HUNG_AFTER = 2.0


MakePlanner = Callable[[PoolSettings, Identity, PoolCosts], PricePlanner]


class PoolProtocolError(ValueError):
    """A member's message makes no sense: its connection has to end."""


class NewMember(NamedTuple):
    """A member's number."""

    instance: int


class Lost(NamedTuple):
    """A member that has been given up."""

    instance: int
    reason: str


@dataclass(slots=True)
class Events:
    """Describes what has happened, for logs and the store."""

    lost: list[Lost] = field(default_factory=list)
    failed: list[Lost] = field(default_factory=list)  # parts of steps, and why
    ended: list[PrefillRecord] = field(default_factory=list)
    bound: list[BoundPrompt] = field(default_factory=list)  # announced prompts whose turn has come
    unserved: list[BootstrapRoom] = field(default_factory=list)  # announced prompts that no member is left for


@dataclass(slots=True)
class Peer:
    """A member as it described itself, recently."""

    hello: Hello
    last_message_s: float
    silent_s: float = 0.0  # of its engine, at its last heartbeat
    beaten_s: float = -math.inf  # that was then

    def idle_s(self, now_s: float) -> float:
        """Return how long its engine has done nothing that can be seen."""
        return self.silent_s + now_s - self.beaten_s if self.silent_s > 0 else 0.0


@dataclass(slots=True)
class _Pool:
    """The facts that all members share, from the first member to the last: all serve the same model."""

    identity: Identity
    coordinator: Coordinator


class PoolProtocol:
    """One long pool. Methods take what has happened and return what is to be sent, in order; see also `events`."""

    def __init__(self, settings: PoolSettings, costs: PoolCosts, make_planner: MakePlanner = planner_of) -> None:
        """`make_planner` is asked when the first member comes, and whenever costs have changed."""
        self._make_planner = make_planner
        self._settings = settings
        self._costs = costs
        self._pool: _Pool | None = None
        self._peers: dict[int, Peer] = {}
        self._nodes: dict[str, int] = {}
        self._token_ids: dict[int, array[int]] = {}  # by request
        self._logits: dict[int, array[float]] = {}  # by request, of its last row
        self._steps: dict[int, OpenStep] = {}  # by sequence
        self._streams = StreamLedger()
        self._next_instance = 0
        self._beat_s = -math.inf
        self._events = Events()
        self.history = PoolHistory()
        self.tickets = OpenTickets()

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of all that belong to the pool: any other connection has to end."""
        return tuple(self._peers)

    def take_events(self) -> Events:
        """Return what has happened since the last call."""
        events, self._events = self._events, Events()
        return events

    # -- members -----------------------------------------------------------------------------------------------------

    def greet(self, hello: Hello) -> NewMember | Refusal:
        """The number of a new member, or why it cannot be one; changes nothing but the next number."""
        identity = Identity.of(hello)
        if self._pool is not None and self._others(hello.name) and identity != self._pool.identity:
            return Refusal(f"the pool serves {self._pool.identity}, {hello.name} serves {identity}")
        self._next_instance += 1
        return NewMember(self._next_instance - 1)

    def join(self, instance: int, hello: Hello, now_s: float) -> list[AddressedMessage]:
        """A member has been welcomed. An earlier member of its name has gone."""
        out: list[AddressedMessage] = []
        for other in [other for other, peer in self._peers.items() if peer.hello.name == hello.name]:
            out += self.lose(other, "has come again", now_s)
        if self._pool is None:
            identity = Identity.of(hello)
            planner = self._make_planner(self._settings, identity, self._costs)
            self._pool = _Pool(identity, new_coordinator(self._settings, identity, planner))
        self._peers[instance] = Peer(hello, now_s)
        node = self._nodes.setdefault(hello.node, len(self._nodes))
        return [*out, *self._carry_out(self._pool.coordinator.join(instance, node, hello.report, now_s), now_s)]

    def lose(self, instance: int, reason: str, now_s: float) -> list[AddressedMessage]:
        """A member's connection has ended, or has to."""
        pool = self._pool
        peer = self._peers.pop(instance, None)
        if peer is None or pool is None:
            return []
        self._events.lost.append(Lost(instance, reason))
        self.history.record_lost(instance, peer.hello.name, reason, now_s)
        self._streams.lost(instance)
        self._costs.forget(instance)
        for step in [step for step in self._steps.values() if instance in step.record.members]:
            step.record_failure(now_s)
            self._record_step(pool.coordinator, step, now_s, gone=instance)
        out = self._carry_out(pool.coordinator.lose(instance, now_s), now_s)
        if not self._peers:
            self._pool = None
            self._events.unserved += self.tickets.end_all()
        return out

    # -- messages ----------------------------------------------------------------------------------------------------

    def take(self, instance: int, message: Message, now_s: float) -> list[AddressedMessage]:
        """A message of a member. PoolProtocolError where it makes no sense."""
        peer, pool = self._peers.get(instance), self._pool
        if peer is None or pool is None:
            return []
        peer.last_message_s = now_s
        return self._carry_out(self._event(pool.coordinator, instance, message, now_s), now_s)

    def _event(self, core: Coordinator, instance: int, message: Message, now_s: float) -> list[Order]:
        match message:
            case ReportMessage(report, begun_step):
                self._peers[instance].hello = self._peers[instance].hello._replace(report=report)
                core.report(instance, report, now_s, begun_step)
                if self._costs.learn(instance, report.cost, now_s):
                    self._plan_with_costs(core)
                return core.plan(now_s) if core.waits_for_shorts else []
            case OfferMessage():
                return self._offer(core, instance, message, now_s)
            case CancelMessage(request):
                self._check_owner(request, instance)
                if request in self.history.running:
                    self.history.running[request].is_cancelled = True
                return core.cancel(request, now_s)
            case StepDone(sequence, times, free_kv_tokens, logits):
                self._answered(core, sequence, instance, now_s, times, logits)
                return core.done(instance, sequence, now_s, free_kv_tokens, times.total_s)
            case StepFailed(sequence, reason, unreachable, is_out_of_memory, free_kv_tokens, is_unsent):
                self._events.failed.append(Lost(instance, f"step {sequence}: {reason} ({free_kv_tokens} tokens free)"))
                self._answered(core, sequence, instance, now_s, None, is_unsent=is_unsent)
                if is_out_of_memory:
                    core.out_of_memory(instance, sequence)
                return core.failed(instance, sequence, now_s, unreachable, free_kv_tokens, is_unsent=is_unsent)
            case Alive(silent_s):
                return self._record_alive(core, instance, silent_s, now_s)
            case Transferred(request, transfer_s, exposed_s):
                self._check_owner(request, instance)
                self.history.record_transferred(request, transfer_s, exposed_s)
                return core.transferred(request, now_s)
            case KeptLost(prompts):
                return core.kept_lost(instance, prompts, now_s)
            case Pulled(pull):
                self.history.record_pull_end(pull, is_done=True)
                return core.pulled(instance, pull, now_s)
            case PullFailed(pull):
                return core.pull_failed(pull, now_s)
            case StreamFailed(request):
                self._check_owner(request, instance)
                self._streams.broken(request)
                return core.stream_failed(request, now_s)
        raise PoolProtocolError(f"{type(message).__name__} is no message of a member")

    def _record_alive(self, core: Coordinator, instance: int, silent_s: float, now_s: float) -> list[Order]:
        peer = self._peers[instance]
        peer.silent_s, peer.beaten_s = silent_s, now_s
        if silent_s >= SILENT_S:
            # Until the next heartbeats have come, or failed to.
            core.shun(instance, now_s + self._settings.member_timeout_s / 2)
        return []

    def _offer(self, core: Coordinator, instance: int, message: OfferMessage, now_s: float) -> list[Order]:
        self._check_owner(message.request, instance)
        if message.request in self._token_ids:
            raise PoolProtocolError(f"request {message.request} is offered twice")
        arrival_s = now_s - message.waited_s
        deadline_s = math.inf if message.slack_s is None else now_s + message.slack_s
        tokens, room = len(message.token_ids), message.room
        lengths = (tokens, message.cached_tokens)
        is_streamed = bool(message.destinations) and not (self._settings.collects and message.fits_owner)
        blocks = None
        if message.namespace is not None and self._pool is not None:
            block_tokens = math.lcm(self._settings.block_tokens, self._pool.identity.page_tokens)
            blocks = hash_blocks(message.token_ids, block_tokens, message.namespace)
        offer = Offer(
            *(message.request, instance, *lengths, arrival_s, deadline_s, is_streamed, message.fits_owner, blocks)
        )
        try:
            self._token_ids[message.request] = message.token_ids
            # As an offer, where no router has announced it.
            orders = core.offer(offer, now_s) if room is None else core.claim(pool_ticket(room), offer, now_s)
        except (ValueError, OverflowError) as error:
            self._token_ids.pop(message.request, None)
            raise PoolProtocolError(str(error)) from None
        record = PrefillRecord(message.request, instance, tokens, message.cached_tokens, now_s, room)
        record.ticket = None if room is None else self.tickets.claim(room, now_s)
        if record.ticket is not None and room is not None:
            self._events.bound.append(BoundPrompt(room, self._peers[instance].hello.name))
        self.history.running[message.request] = record
        self._streams.offered(instance, message)
        return orders

    def _check_owner(self, request: int, instance: int) -> None:
        if instance_of(request) != instance:
            raise PoolProtocolError(f"request {request} does not belong to instance {instance}")

    # -- prompts that no member has yet ------------------------------------------------------------------------------

    def announce(self, announcement: Announcement, now_s: float) -> list[AddressedMessage]:
        """A router has a long prompt; which member shall get it becomes known by `Events.bound`. TicketError."""
        pool = self._pool
        if pool is None:
            raise TicketError(TicketProblem.NO_POOL, "the pool has no members")
        new_tokens, least = (
            announcement.tokens - announcement.cached_tokens,
            max(peer.hello.min_tokens for peer in self._peers.values()),
        )
        if new_tokens < least:
            raise TicketError(TicketProblem.TOO_SHORT, f"{new_tokens} new tokens: members share {least} or more")
        self.tickets.open(announcement.room, now_s)
        deadline_s = None if announcement.is_online else math.inf
        if announcement.slack_s is not None:
            deadline_s = now_s + announcement.slack_s
        ticket = PromptTicket(
            pool_ticket(announcement.room),
            announcement.tokens,
            announcement.cached_tokens,
            now_s - announcement.waited_s,
            deadline_s,
            announcement.text,
        )
        try:
            orders = pool.coordinator.announce(ticket, now_s)
        except ValueError as error:
            self.tickets.withdraw(announcement.room)
            raise TicketError(TicketProblem.BAD, str(error)) from None
        return self._carry_out(orders, now_s)

    def withdraw(self, room: BootstrapRoom, now_s: float) -> list[AddressedMessage]:
        """An announced prompt will not be offered: its client has gone, or its router goes another way with it."""
        if not self.tickets.withdraw(room) or self._pool is None:
            return []
        return self._carry_out(self._pool.coordinator.withdraw(pool_ticket(room), now_s), now_s)

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[AddressedMessage]:
        """Time has passed; call it about ten times a second."""
        out: list[AddressedMessage] = []
        for instance, reason in self._overdue(now_s):
            out += self.lose(instance, reason, now_s)
        pool = self._pool
        if pool is None:
            return out
        if pool.coordinator.requests or pool.coordinator.tickets:
            out += self._carry_out(pool.coordinator.plan(now_s), now_s)
        if now_s >= self._beat_s + self._settings.member_timeout_s / 4:
            self._beat_s = now_s
            out += [AddressedMessage(instance, Heartbeat()) for instance in self._peers]
        return out

    def _overdue(self, now_s: float) -> list[Lost]:
        settings = self._settings
        silent = [
            Lost(instance, f"has sent nothing for {settings.member_timeout_s:g} s")
            for instance, peer in self._peers.items()
            if now_s > peer.last_message_s + settings.member_timeout_s
        ]
        stuck = [
            Lost(instance, f"has not answered for a step that failed {settings.stuck_s:g} s ago")
            for instance in self._stuck(now_s - settings.stuck_s)
        ]
        return [*silent, *stuck, *self._hung(now_s)]

    def _stuck(self, failed_before_s: float) -> list[int]:
        """Members that have not answered for steps in which another one failed before this time."""
        if self._pool is None:
            return []
        found: list[int] = []
        for sequence, step in self._steps.items():
            running = self._pool.coordinator.running_step(sequence)
            if running is not None and step.failed_s is not None and step.failed_s < failed_before_s:
                found += sorted(running.waiting)
        return found

    def _hung(self, now_s: float) -> list[Lost]:
        """Connected members whose engine does nothing while others need it: they wait in a step, or for KV there."""
        if self._pool is None:
            return []
        core, settings = self._pool.coordinator, self._settings
        hung = []
        for instance, peer in self._peers.items():
            idle_s = peer.idle_s(now_s)
            if idle_s < settings.member_timeout_s:
                continue
            busy_s = core.busy_s(instance)
            timeout_s = settings.stuck_s if busy_s is None else settings.member_timeout_s + _HUNG_AFTER * busy_s
            if idle_s > min(timeout_s, settings.stuck_s):
                hung.append(Lost(instance, f"hangs: its engine has done nothing for {idle_s:.1f} s"))
        return hung

    # -- orders ------------------------------------------------------------------------------------------------------

    def _carry_out(self, orders: Sequence[Order], now_s: float) -> list[AddressedMessage]:
        out: list[AddressedMessage] = []
        declined: dict[int, Outcome] = {}
        for order in orders:
            if isinstance(order, RunChunk | Collect):
                record = self.history.record_order(order, now_s)
                self._steps[order.sequence] = OpenStep(order, record)
            if isinstance(order, RunChunk):
                out += self._chunk_orders(order)
            elif isinstance(order, Finish):
                self.history.running[order.request].computed_s = now_s
                out.append(AddressedMessage(order.owner, Computed(order.request, self._logits.get(order.request))))
            elif isinstance(order, Collect):
                peers = self._addresses(order.members)
                out += [AddressedMessage(instance, CollectOrder(order, peers)) for instance in order.members]
            elif isinstance(order, Pull):
                self.history.record_pull(order.pull, order.tokens)
                pull = PullOrder(order, self._peers[order.target].hello.receivers)
                out += [AddressedMessage(instance, pull) for instance in order.members]
            elif isinstance(order, Decline):
                declined[order.request] = order.reason
                waited_s = max(0.0, now_s - order.arrival_s)
                out.append(AddressedMessage(order.owner, DeclineMessage(order.request, order.reason, waited_s)))
            elif isinstance(order, Bind):
                room = room_of(order.ticket)
                self.tickets.bind(room, now_s)
                members = tuple(self._peers[instance].hello.name for instance in order.members)
                name = self._peers[order.owner].hello.name
                self._events.bound.append(BoundPrompt(room, name, members, order.chunk_s))
            else:
                if isinstance(order, Borrow):
                    self.history.record_borrow(order)
                elif isinstance(order, DropKept):
                    self.history.record_pull_end(order.request, is_done=False)
                out += [AddressedMessage(instance, order) for instance in order.members]
        self._record_ends(declined, now_s)
        return [message for message in (*self._streams.take_messages(), *out) if message.instance in self._peers]

    def _chunk_orders(self, order: RunChunk) -> list[AddressedMessage]:
        ids, destinations = self._token_ids[order.request], self._streams.ordered(order)
        peers = self._addresses(order.layout.group)
        return [
            AddressedMessage(instance, ChunkOrder(order, _of_positions(ids, positions), destinations, peers))
            for instance, positions in zip(order.layout.group, order.layout.new, strict=True)
        ]

    def _addresses(self, members: Sequence[int]) -> Peers:
        return tuple(self._peers[instance].hello.addresses for instance in members)

    def _answered(
        self,
        core: Coordinator,
        sequence: int,
        instance: int,
        now_s: float,
        times: StepTimes | None,
        logits: array[float] | None = None,
        *,
        is_unsent: bool = False,
    ) -> None:
        """A member answers for a step; without times it has failed, and has possibly sent nothing of it.

        The coordinator has not been informed yet. Ignored: an answer that is late, comes twice or from a member that
        was not asked.
        """
        running, step = core.running_step(sequence), self._steps.get(sequence)
        if running is None or step is None or instance not in running.waiting:
            return
        is_done = times is not None
        if times is None:
            step.record_failure(now_s)
        else:
            step.record.record_times(instance, times, now_s)
        order = step.order
        if logits is not None:
            self._logits[order.request] = logits
        if step.record.has_failed and isinstance(order, RunChunk):
            if not (running.is_unsent and is_unsent):
                self._streams.broken(order.request)
            elif running.waiting == {instance}:
                self._streams.taken_back(order.request)
        is_collected = isinstance(order, Collect) and order.owner == instance and is_done
        record = self.history.running.get(order.request)
        if is_collected and record is not None:
            outcome = PrefillEnd.CANCELLED if record.is_cancelled else PrefillEnd.COLLECTED
            self._end(order.request, outcome, now_s)
        self._record_step(core, step, now_s, gone=instance)

    def _record_step(self, core: Coordinator, step: OpenStep, now_s: float, gone: int) -> None:
        """Record the end of a step once only the member `gone`, which has answered or left, was awaited."""
        record, order = step.record, step.order
        running = core.running_step(order.sequence)
        if running is not None and not running.waiting <= {gone}:
            return
        del self._steps[order.sequence]
        record.ended_s = now_s
        self.history.record_step_end(record)
        if isinstance(order, Collect) or record.has_failed or self._pool is None:
            return
        cached_tokens = sum(map(count_tokens, order.layout.history))
        if self._costs.observe(len(record.members), cached_tokens, record.new_tokens, record.together_s, now_s):
            self._plan_with_costs(self._pool.coordinator)

    def _plan_with_costs(self, core: Coordinator) -> None:
        """They have changed."""
        assert self._pool is not None
        core.use_planner(self._make_planner(self._settings, self._pool.identity, self._costs))

    def _record_ends(self, declined: dict[int, Outcome], now_s: float) -> None:
        """Requests that the coordinator knows no more."""
        known = set(self._pool.coordinator.requests) if self._pool is not None else set()
        for request in [request for request in self._token_ids if request not in known]:
            del self._token_ids[request]
            self._logits.pop(request, None)
            record = self.history.running.get(request)
            if record is not None:
                is_lost = record.owner not in self._peers
                gone = PrefillEnd.OWNER_LOST if is_lost else PrefillEnd.CANCELLED
                if record.transfer_s is not None:
                    gone = PrefillEnd.STREAMED
                self._end(request, declined.get(request, gone), now_s)

    def _end(self, request: int, outcome: Outcome, now_s: float) -> None:
        self._streams.ended(request)
        self._events.ended.append(self.history.note_end(request, outcome, now_s))

    # -- what is so --------------------------------------------------------------------------------------------------

    def status(self, now_s: float) -> PoolStatus:
        """The pool, for people."""
        core = self._pool.coordinator if self._pool is not None else None
        history = self.history
        members = tuple(
            MemberStatus(
                instance,
                peer.hello.name,
                peer.hello.node,
                peer.hello.report.backlog_s,
                peer.hello.report.free_kv_tokens,
                core.held_by(instance) if core is not None else 0,
                core.kept.tokens_on(instance) if core is not None else 0,
                now_s - peer.last_message_s,
                core is not None and core.is_ready(instance, now_s),
            )
            for instance, peer in self._peers.items()
        )
        return PoolStatus(
            now_s,
            str(self._pool.identity) if self._pool is not None else None,
            members,
            tuple(
                record if core is None else replace(record, planned=core.planned(record.request))
                for record in history.running.values()
            ),
            tuple(history.ended),
            history.outcomes[PrefillEnd.COLLECTED],
            history.outcomes[PrefillEnd.STREAMED],
            sum(count for outcome, count in history.outcomes.items() if not isinstance(outcome, PrefillEnd)),
            history.members_lost,
            self._costs.scale,
            core.arrivals_per_s(now_s) if core is not None else 0.0,
            tuple(history.former_members),
            self.tickets.waiting,
            0 if core is None else len(core.kept),
            history.pulls_done,
            self._costs.candidates,
        )

    def _others(self, name: str) -> bool:
        return any(peer.hello.name != name for peer in self._peers.values())


def _of_positions(token_ids: array[int], positions: Positions) -> array[int]:
    ids = array("i")
    for part in positions:
        ids += token_ids[part.start : part.stop : part.step]
    return ids
