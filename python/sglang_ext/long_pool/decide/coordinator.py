"""Decides which instances compute which chunk next: the coordinator of a long pool as a state machine.

Events come in (an instance joins, is lost, has done a chunk; a prompt is announced, a request offered, cancelled),
orders go out. Nothing waits here and nothing is sent: a driver does both, over a network or in a simulation.

- An instance has at most one chunk at a time, and a chunk is ordered from all its members at once. So no two instances
  can wait for each other: there is no deadlock to avoid.
- What has not been ordered is decided again at every event (`pool_schedule`).
- A prompt may be announced before any instance has it (a ticket): it is bound to one when its turn has come.
- After any failure, positions that a member holds are kept, and only lost ones are computed again. A request that keeps
  failing goes back to the instance that it came to, which computes it by itself, or cannot.
- A request whose KV leaves while it is computed is done with its last chunk; any other one is collected at its owner.

A failure concerns the members of its step, and a change of membership only what that member takes part
in: connections are made between two members that need one. An instance that others could not reach is left out of
groups for a while, the longer the more often.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from sglang_ext.long_pool.decide.chunk_length import NO_SHORT_LOAD
from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix, PromptText
from sglang_ext.long_pool.decide.orders import (
    Bind,
    Borrow,
    Collect,
    Decline,
    DeclineReason,
    Drop,
    Finish,
    GiveUp,
    Keep,
    MemberReport,
    Offer,
    Order,
    PromptTicket,
    RollBack,
    RunChunk,
)
from sglang_ext.long_pool.decide.pool_members import PoolMembers
from sglang_ext.long_pool.decide.pool_requests import (
    AnnouncedPrompt,
    NextChunk,
    RunningStep,
    SharedPrefill,
    StepNumbers,
    reserved_tokens,
    tokens_held,
    without_head,
)
from sglang_ext.long_pool.decide.pool_room import Held, PoolRoom
from sglang_ext.long_pool.decide.pool_schedule import OrdinaryWork, PlacedPrefill, PoolSchedule
from sglang_ext.long_pool.decide.price_planner import Placement, PrefillSnapshot, PricePlanner
from sglang_ext.long_pool.decide.row_reuse import RowReuse
from sglang_ext.long_pool.decide.sharding import (
    KvSegment,
    count_tokens,
    gather,
    head,
    lay_out,
    positions_of,
    without,
)
from sglang_ext.long_pool.decide.sp_cost import SpCandidate

_MEETING_SHARE = 1 / 5  # of what a chunk takes, that its members may need until they have met
_AHEAD_IF_BUSY = 20.0  # times `bind_ahead_s`: this early the next prompt goes to an instance that still computes


class Coordinator:
    """One long pool. Every method takes an event and returns the orders that follow from it, in their order."""

    def __init__(self, schedule: PoolSchedule, settings: CoordinationSettings) -> None:
        self._schedule = schedule
        self._settings = settings
        self._members = PoolMembers(settings.short_backlog_s)
        self._room = PoolRoom(self._members, settings)
        self._quiet_s = 0.0  # when the last step ended, or the first prefill came after it
        self._requests: dict[int, SharedPrefill] = {}
        self._announced: dict[int, AnnouncedPrompt] = {}  # by ticket
        self._steps: dict[int, SharedPrefill] = {}  # by sequence
        self._numbers = StepNumbers()
        self._rows = RowReuse(self._members, schedule, settings)
        self.kept = self._rows.kept

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._members)

    @property
    def requests(self) -> tuple[int, ...]:
        return tuple(self._requests)

    def arrivals_per_s(self, now_s: float) -> float:
        """Prefills offered and prompts announced in a second, recently."""
        return self._schedule.load.arrivals_per_s(now_s)

    @property
    def tickets(self) -> tuple[int, ...]:
        """Return the tickets of prompts that no instance has offered yet."""
        return tuple(self._announced)

    @property
    def waits_for_shorts(self) -> bool:
        """Return whether a begun prompt waits until its members have computed short ones: `plan` follows a report."""
        return self._schedule.waits_for_shorts and bool(self._requests)

    @property
    def waits_for_room(self) -> bool:
        """Return whether a request is left that no group could hold."""
        return any(
            request.no_room_s is not None and request.running is None for request in self._requests.values()
        ) or any(prompt.no_room_s is not None for prompt in self._announced.values())

    def use_planner(self, planner: PricePlanner) -> None:
        """Decide with other costs from now on."""
        self._schedule.planner = planner
        for request in self._requests.values():
            request.estimate(self._candidates)
        for announced in self._announced.values():
            announced.estimate(self._candidates, self._settings)

    def held_by(self, instance: int) -> int:
        """Tokens that requests hold there, as far as is known."""
        return sum(count_tokens(positions_of(request.held.get(instance, ()))) for request in self._requests.values())

    def planned(self, request: int) -> tuple[NextChunk, ...]:
        """Chunks of a request that are planned and not begun."""
        prefill = self._requests.get(request)
        return () if prefill is None or prefill.planned is None else (prefill.planned,)

    def running_step(self, sequence: int) -> RunningStep | None:
        """Return an ordered step that not all of its members have answered for; None where it has ended."""
        prefill = self._steps.get(sequence)
        return None if prefill is None else prefill.running

    # -- membership --------------------------------------------------------------------------------------------------

    def join(self, instance: int, node: int, report: MemberReport, now_s: float) -> list[Order]:
        """An instance has come, or has come back and knows nothing of what it held."""
        orders = [*self.lose(instance, now_s), *self._rows.lose(instance, now_s)]
        self._members.add(instance, node, report)
        return [*orders, *self.plan(now_s)]

    def lose(self, instance: int, now_s: float) -> list[Order]:
        """An instance has gone: killed, unreachable, or moved to another pool. What it held is lost."""
        if not self._members.remove(instance):
            return []
        orders = self._rows.lose(instance, now_s)
        for ticket in [ticket for ticket, announced in self._announced.items() if announced.owner == instance]:
            del self._announced[ticket]
        for request in list(self._requests.values()):
            running = request.running
            if instance in request.involved:
                request.stop_streaming()
            request.involved.discard(instance)
            if running is not None:
                running.lose(instance)
            if request.offer.owner == instance:
                request.is_cancelled = True
            else:
                request.held.pop(instance, None)
                request.group = tuple(member for member in request.group if member != instance)
            if running is None:
                orders += self._settle(request)
            elif not running.waiting:
                orders += self._end_step(request, now_s)
            elif running.has_failed:
                orders += self._give_up(running)
        return [*orders, *self.plan(now_s)]

    def report(self, instance: int, report: MemberReport, now_s: float, begun_step: int | None = None) -> None:
        """An instance's newest report, and the last step that it had begun when it sent it; None: all that were
        ordered. `plan` follows when it matters."""
        self._members.report(instance, report, now_s, begun_step)

    def shun(self, instance: int, until_s: float) -> None:
        """Something is wrong with it: it is in no new group until then."""
        self._members[instance].shunned_until_s = max(until_s, self._members[instance].shunned_until_s)

    def is_ready(self, instance: int, now_s: float) -> bool:
        """Return whether it may be in new groups."""
        return now_s >= self._members[instance].shunned_until_s

    def busy_s(self, instance: int) -> float | None:
        """Return how long what others wait for there was believed to take; None where no other instance does."""
        member = self._members[instance]
        if member.step is not None:
            return member.step_s + member.report.backlog_s
        holds = any(
            request.held.get(instance) and request.offer.owner != instance for request in self._requests.values()
        )
        return member.report.backlog_s if holds else None

    # -- requests ----------------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now_s: float) -> list[Order]:
        """A long prefill could be shared. ValueError for numbers that make no sense or a request that is there."""
        self._check(offer)
        return self._admit(offer, now_s, is_new=True)

    def announce(self, ticket: PromptTicket, now_s: float) -> list[Order]:
        """A long prompt has come to a router. ValueError for numbers that make no sense or a ticket that is there."""
        if ticket.ticket in self._announced or not 0 <= ticket.cached_tokens < ticket.tokens:
            raise ValueError(f"ticket {ticket.ticket} is announced twice, or with {ticket.cached_tokens} cached tokens")
        if not self._requests and not self._announced:
            self._quiet_s = now_s
        candidate = self._announced[ticket.ticket] = AnnouncedPrompt.of(ticket, self._candidates, self._settings)
        self._rows.match(candidate, self._members.snapshot(now_s).queue_delays_s, now_s)
        self._schedule.record_arrival(now_s, candidate.work_s)
        return self.plan(now_s)

    def claim(self, ticket: int, offer: Offer, now_s: float) -> list[Order]:
        """An announced prompt is offered by the instance that got it, with the arrival and deadline of its ticket.

        The instance's own deadline counts where the ticket has none. As `offer` where the ticket is not known: it has
        been withdrawn, or this coordinator is new.
        """
        prompt = self._announced.get(ticket)
        if prompt is None:
            return self.offer(offer, now_s)
        self._check(offer)
        del self._announced[ticket]
        deadline_s = prompt.deadline_s if prompt.deadline_s < math.inf else offer.deadline_s
        offer = offer._replace(arrival_s=prompt.ticket.arrival_s, deadline_s=deadline_s)
        return self._admit(offer, now_s, is_new=False, text=prompt.ticket.text)

    def withdraw(self, ticket: int, now_s: float) -> list[Order]:
        """The client of an announced prompt has gone, or its router goes another way with it."""
        return [] if self._announced.pop(ticket, None) is None else self.plan(now_s)

    def _check(self, offer: Offer) -> None:
        if offer.request in self._requests or not 0 <= offer.cached_tokens < offer.tokens:
            raise ValueError(f"request {offer.request} is offered twice, or with {offer.cached_tokens} cached tokens")

    def _admit(self, offer: Offer, now_s: float, *, is_new: bool, text: PromptText | None = None) -> list[Order]:
        if offer.owner not in self._members:
            return [Decline(offer.request, offer.owner, DeclineReason.NOT_A_MEMBER, offer.arrival_s)]
        if not self._requests and not self._announced:
            self._quiet_s = now_s
        prefix = None if offer.blocks is None else self.kept.match(offer.blocks, offer.tokens - 1)
        delays_s = self._members.snapshot(now_s).queue_delays_s
        if not self._rows.are_worth(prefix, offer.tokens, offer.cached_tokens, delays_s, now_s):
            prefix = None
        rows: Held = {}
        parts: tuple[KeptPrefix, ...] = ()
        orders: list[Order] = []
        if prefix is not None:
            rows, parts = self.kept.rows(prefix), self.kept.parts(prefix)
            self.kept.lock(parts)
            members = tuple(sorted({offer.owner, *rows}))
            orders = [Borrow(offer.request, members, parts, offer.cached_tokens)]
        candidate = self._requests[offer.request] = SharedPrefill.of(offer, self._candidates, parts, rows)
        candidate.text = text
        if is_new:
            self._schedule.record_arrival(now_s, candidate.work_s)
        return [*orders, *self.plan(now_s)]

    def cancel(self, request: int, now_s: float) -> list[Order]:
        """The client has gone, or the owner has given the request up."""
        prefill = self._requests.get(request)
        if prefill is None:
            return []
        prefill.is_cancelled = True
        return [*self._settle(prefill), *self.plan(now_s)] if prefill.running is None else []

    def stream_failed(self, request: int, now_s: float) -> list[Order]:
        """Something of a request did not get to where it is wanted, or its owner has not been able to rely on it."""
        prefill = self._requests.get(request)
        if prefill is None:
            return []
        prefill.stop_streaming()
        return self.plan(now_s)

    def transferred(self, request: int, now_s: float) -> list[Order]:
        """All of a request is where it is wanted: nothing of it is needed any more, but for a prefix cache."""
        prefill = self._requests.get(request)
        if prefill is not None and self._may_keep_rows(prefill):
            return [*self._keep_rows(prefill), *self.plan(now_s)]
        return self.cancel(request, now_s)

    def kept_lost(self, instance: int, prompts: Collection[int], now_s: float) -> list[Order]:
        """An instance has freed rows that it kept of these prompts: other work wanted the memory."""
        orders = self._rows.lose_rows(instance, prompts, now_s)
        for request in list(self._requests.values()):
            # Its order to read them may be on its way: what the instance has not is computed again.
            if request.lose_rows(instance, prompts) and request.running is None:
                orders += self._settle(request)
        return [*orders, *self.plan(now_s)]

    def pulled(self, instance: int, pull: int, now_s: float) -> list[Order]:
        """All rows of a pull have come to its target, `instance`, which keeps them."""
        return [*self._rows.pulled(instance, pull, now_s), *self.plan(now_s)]

    def pull_failed(self, pull: int, now_s: float) -> list[Order]:
        """The rows of a pull do not come: its target has no room, or a source no rows, or they could not be sent."""
        return [*self._rows.give_up((pull,), now_s), *self.plan(now_s)]

    def done(
        self,
        instance: int,
        sequence: int,
        now_s: float,
        free_kv_tokens: int | None = None,
        took_s: float | None = None,
    ) -> list[Order]:
        """A member has done its part of a step, and has this much free KV now. `took_s`: since it began."""
        self._members.record_free(instance, sequence, free_kv_tokens)
        step = self._steps.get(sequence)
        if took_s is not None and step is not None and step.running is not None:
            step.running.shortest_s = min(step.running.shortest_s, took_s)
        return self.done_together((instance,), sequence, now_s)

    def done_together(self, instances: Sequence[int], sequence: int, now_s: float) -> list[Order]:
        """The same for several members at once: what follows is decided once."""
        orders = [order for instance in instances for order in self._answer(instance, sequence, now_s, is_done=True)]
        return [*orders, *self.plan(now_s)]

    def out_of_memory(self, instance: int, sequence: int) -> None:
        """A member has none for its part of a step, besides KV; `failed` follows."""
        step = self._steps.get(sequence)
        if step is not None and step.running is not None and instance in step.running.waiting:
            self._members[instance].record_out_of_memory(step.running.new_tokens(instance))

    def failed(
        self,
        instance: int,
        sequence: int,
        now_s: float,
        unreachable: int | None = None,
        free_kv_tokens: int | None = None,
        *,
        is_unsent: bool = False,
    ) -> list[Order]:
        """A member is as before a step: its KV pool is full, or a peer, `unreachable` where it could not talk to it.

        `is_unsent`: it has sent nothing of it to where it is wanted.
        """
        self._members.record_free(instance, sequence, free_kv_tokens)
        step = self._steps.get(sequence)
        running = None if step is None else step.running
        is_first = running is not None and not running.has_failed and instance in running.waiting
        # The peer may say the same of this one: the first word counts.
        if is_first and unreachable is not None and unreachable != instance and unreachable in self._members:
            self._members[unreachable].record_unreachable(now_s)
        if running is not None and instance in running.waiting:
            running.is_unsent &= is_unsent
        return [*self._answer(instance, sequence, now_s, is_done=False), *self.plan(now_s)]

    def plan(self, now_s: float) -> list[Order]:
        """Order everything that can start now. Called by every event; call it also when reports have changed."""
        self._room.freed_s = min(self._room.freed_s, now_s)
        overdue = self._rows.give_up_overdue(now_s)
        orders = [*overdue, *self._rows.make_room(), *self._plan_prefills(now_s)]
        return [*orders, *self._rows.gather(self._promised(), now_s)] if self._rows.may_gather else orders

    def _plan_prefills(self, now_s: float) -> list[Order]:
        orders: list[Order] = []
        idle = [request for request in self._requests.values() if request.running is None]
        kept: dict[int, float] = {}  # they get no chunk until what they hold has been collected: when, as it seems
        for prefill in idle:
            if not prefill.todo:
                orders += self._hand_back(prefill, now_s)
                if prefill.running is None and not prefill.is_finishing and prefill.offer.request in self._requests:
                    holders = prefill.holders()
                    free_s = self._members.free_s(holders, now_s)
                    kept.update((instance, max(free_s, kept.get(instance, 0.0))) for instance in holders)
        pending = [prefill for prefill in idle if prefill.todo]
        self._forget_unclaimed(now_s)
        # Ordinary work may be followed by more of it for ever.
        ignores_backlog = not self._steps and now_s > self._quiet_s + self._settings.backlog_timeout_s
        if not (pending or self._announced) or not len(self._members):
            return orders
        groups = (*(prefill.kv_group for prefill in pending), *(one.kv_group for one in self._announced.values()))
        may_go_on = any(map(self._may_go_on, groups))
        if not (ignores_backlog or may_go_on or self._members.any_idle(now_s, kept)):
            return [*orders, *self._bind_next(pending, now_s)]
        promised = self._promised()
        snapshot = self._members.snapshot(now_s, kept, promised, counts_backlog=not ignores_backlog)
        turns = self._turns(pending, kept, promised, snapshot, now_s)
        # What no group can hold comes last, the least urgent first: without it there may be room for the others.
        nowhere = [turn for turn in turns if not turn.placement.group]
        for turn in (*(turn for turn in turns if turn.placement.group), *reversed(nowhere)):
            announced = self._announced.get(turn.key)
            if announced is not None:
                orders += self._rows.pull(announced, turn.placement, snapshot, now_s)
                orders += self._bind(announced, turn.placement, snapshot, now_s)
            elif turn.key in self._requests:
                orders += self._start(self._requests[turn.key], turn.placement, snapshot, now_s)
        return orders

    def _promised(self) -> dict[int, int]:
        """Return the memory that is promised to what has begun, by instance."""
        promised = reserved_tokens(self._requests.values(), self._settings.page_tokens)
        for instance, tokens in self._rows.pulls.room_tokens().items():
            promised[instance] = promised.get(instance, 0) + tokens
        return promised

    def _may_go_on(self, group: Sequence[int]) -> bool:
        return bool(group) and all(instance in self._members for instance in group) and self._members.are_ready(group)

    def _turns(
        self,
        pending: Sequence[SharedPrefill],
        kept: Mapping[int, float],
        promised: Mapping[int, int],
        snapshot: PrefillSnapshot,
        now_s: float,
    ) -> list[PlacedPrefill]:
        positions = self._members.positions
        waiting = [prompt.pending(positions, self._room.kept_for(prompt, promised)) for prompt in pending]
        for announced in self._announced.values():
            self._rows.match(announced, snapshot.queue_delays_s, now_s)
        waiting += [prompt.pending(positions) for prompt in self._announced.values() if prompt.pull is None]
        shorts = self._members.short_load(now_s)
        work = OrdinaryWork(self._members.begin_in_s(now_s, kept), self._members.shorts_s(now_s))
        return self._schedule.turns(now_s, snapshot, waiting, sum(snapshot.queue_delays_s), shorts, work)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _bind(
        self, prompt: AnnouncedPrompt, placement: Placement, snapshot: PrefillSnapshot, now_s: float
    ) -> list[Order]:
        """Return who gets the prompt, shortly before its turn. It is not asked for twice."""
        if prompt.owner is not None or prompt.pull is not None:
            return []
        if placement.start_s > max(self._settings.bind_ahead_s, self._may_meet_s(placement, snapshot)):
            return []
        members = tuple(self.members[position] for position in placement.group)
        if members:
            owner = members[0]
        elif self._may_get_room(prompt, now_s):
            return []
        else:
            owner = max(self._members, key=lambda instance: self._members[instance].report.free_kv_tokens)
        return self._give(prompt, owner, members or (owner,), now_s, self._first_chunk_s(prompt, placement, now_s))

    def _may_meet_s(self, placement: Placement, snapshot: PrefillSnapshot) -> float:
        """Return how soon a group that is reserved has to be free to begin now: its members end what they have begun,
        and meet.

        Where batches follow each other on all of them, there is hardly a moment at which a large group is idle. The end
        of a chunk is waited for, as until then another group may be better, and so is a prompt that has reserved some
        of them before.
        """
        group = [self.members[position] for position in placement.group]
        if len(group) < 2 or not self._members.are_ready(group):
            return 0.0
        if placement.start_s > max(snapshot.queue_delays_s[position] for position in placement.group):
            return 0.0
        return min(self._members.longest_meeting_s, _MEETING_SHARE * placement.compute_s)

    def _first_chunk_s(self, prompt: AnnouncedPrompt, placement: Placement, now_s: float) -> float:
        """Return how long the first chunk of a prompt takes there; 0 where batches of one instance compute it."""
        if not placement.group or (len(placement.group) == 1 and prompt.prefix is None):
            return 0.0
        shorts = self._members.short_load(now_s)
        _, chunk_s = self._schedule.cut(placement, prompt.cached_tokens, shorts, self._settings.chunk_s)
        return chunk_s

    def _bind_next(self, pending: Sequence[SharedPrefill], now_s: float) -> list[Order]:
        """While all instances compute, the prompt that comes next gets to one of them: it is there when the first ends.

        One at a time, and none while another that was brought there has not begun: the others may still go elsewhere.
        So may one behind kept rows, which may be brought to the instance that is free first.
        """
        if any(one.owner is not None for one in self._announced.values()) or not all(one.group for one in pending):
            return []
        delays_s = self._members.snapshot(now_s).queue_delays_s
        are_computing = all(self._members[instance].begins_in_s(now_s) > 0.0 for instance in self._members)
        if not are_computing or min(delays_s) >= _AHEAD_IF_BUSY * self._settings.bind_ahead_s:
            return []
        begun = {one.offer.request for one in pending}
        waiting = [ticket for ticket, one in self._announced.items() if one.pull is None]
        first = self._schedule.next_of({*begun, *waiting}, waiting)
        prompt = None if first is None else self._announced.get(first)
        if prompt is None:
            return []
        self._rows.match(prompt, delays_s, now_s)
        if prompt.holders:
            return []
        owner = self.members[delays_s.index(min(delays_s))]
        return self._give(prompt, owner, (owner,), now_s)

    def _give(
        self, prompt: AnnouncedPrompt, owner: int, members: tuple[int, ...], now_s: float, chunk_s: float = 0.0
    ) -> list[Order]:
        prompt.owner, prompt.bound_s, prompt.no_room_s = owner, now_s, None
        return [Bind(prompt.ticket.ticket, owner, members, chunk_s)]

    def _start(
        self, prefill: SharedPrefill, placement: Placement, snapshot: PrefillSnapshot, now_s: float
    ) -> list[Order]:
        """The next chunk of a request, if its turn has come and all it needs is there."""
        if not placement.group:
            return self._wait_for_room(prefill, now_s)
        group = tuple(self.members[position] for position in placement.group)
        prefill.planned = NextChunk(placement.tokens, group)
        if placement.start_s > self._may_meet_s(placement, snapshot):
            return []
        computed = prefill.offer.tokens - count_tokens(prefill.todo)
        chunk_s = self._settings.chunk_s
        if not self._room.fits_at_its_end(prefill, self._requests.values()):
            return self._wait_for_room(prefill, now_s)
        prefill.no_room_s = None
        if self._is_best_at_owner(prefill, placement, now_s):
            orders = self._collect_to_owner(prefill, DeclineReason.ALONE_IS_BEST, now_s)
            if orders:
                self._members[prefill.offer.owner].add_backlog(placement.compute_s, now_s)
            return orders
        if not self._members.are_ready(group):
            return []
        tokens, compute_s = self._schedule.cut(placement, computed, self._members.short_load(now_s), chunk_s)
        return self._order_chunk(prefill, tokens, compute_s, group, now_s)

    def _is_best_at_owner(self, prefill: SharedPrefill, placement: Placement, now_s: float) -> bool:
        """Return whether a prefill that one instance is to compute joins its owner's own batches.

        They let short prefills in between, where chunks make them wait. While short prefills arrive that is worth
        waiting for an owner which is free a little later than the chosen instance: for less time than the prompt takes.
        Own batches know nothing of kept rows, nor of bounds to a chunk.
        """
        offer, computed = prefill.offer, prefill.offer.tokens - count_tokens(prefill.todo)
        if len(placement.group) > 1 or prefill.is_shared or prefill.prefix or not offer.fits_owner:
            return False
        tokens, _ = self._schedule.cut(placement, computed, NO_SHORT_LOAD, self._settings.chunk_s)
        if tokens < count_tokens(prefill.todo):
            return False
        owner = self._members.positions[offer.owner]
        if placement.group == (owner,):
            return True
        has_shorts = self._members.short_load(now_s) != NO_SHORT_LOAD
        return has_shorts and self._members.snapshot(now_s).queue_delays_s[owner] <= placement.compute_s

    def _wait_for_room(self, prefill: SharedPrefill, now_s: float) -> list[Order]:
        """No group can hold it now, or its owner all of it."""
        if not (prefill.is_streamed or prefill.offer.fits_owner):
            return self._decline(prefill, DeclineReason.NO_ROOM)
        return (
            [] if self._may_get_room(prefill, now_s) else self._collect_to_owner(prefill, DeclineReason.NO_PLAN, now_s)
        )

    def _may_get_room(self, prefill: SharedPrefill | AnnouncedPrompt, now_s: float) -> bool:
        return self._room.may_come(prefill, self._requests.values(), now_s, is_working=bool(self._steps))

    def _order_chunk(
        self, prefill: SharedPrefill, tokens: int, compute_s: float, group: tuple[int, ...], now_s: float
    ) -> list[Order]:
        settings = self._settings
        largest = max(candidate.size for candidate in self._candidates)
        room_tokens = self._room.first_part_tokens(prefill, group, largest)
        if tokens < count_tokens(prefill.todo) and room_tokens < tokens:
            tokens, compute_s = room_tokens, compute_s * room_tokens / tokens
        if tokens < min(settings.page_tokens, count_tokens(prefill.todo)):
            return self._wait_for_room(prefill, now_s)
        tokens, compute_s = self._members.fit_chunk(group, tokens, compute_s, settings.page_tokens)
        layout, after = lay_out(
            prefill.held, head(prefill.todo, tokens), group, settings.interleaving, settings.page_tokens
        )
        more = {instance: tokens_held(after, instance) - tokens_held(prefill.held, instance) for instance in group}
        tags = settings.layers * (len(layout.group) + len(layout.moves))
        is_last = prefill.is_streamed and tokens == count_tokens(prefill.todo)
        left = 0 if prefill.planned is None else prefill.planned.new_tokens - tokens  # of a chunk that was cut
        prefill.planned = NextChunk(left, group) if left > 0 else None
        step = self._numbers
        order = RunChunk(step.sequence(), prefill.offer.request, layout, step.tags(tags), is_last)
        prefill.group = group
        for instance in group:
            self._members[instance].claim(order.sequence, order.request, max(0, more[instance]))
        dropped = self._rows.make_room()
        self._run(prefill, order, group, after, now_s, compute_s)
        return [*dropped, order]

    def _hand_back(self, prefill: SharedPrefill, now_s: float) -> list[Order]:
        """Nothing is left to compute: its owner goes on with it, with or without its KV."""
        if not prefill.is_streamed:
            return self._collect_to_owner(prefill, DeclineReason.NO_PLAN, now_s)
        was_told, prefill.is_finishing = prefill.is_finishing, True
        return [] if was_told else [Finish(prefill.offer.request, prefill.offer.owner)]

    def _collect_to_owner(self, prefill: SharedPrefill, reason: DeclineReason, now_s: float) -> list[Order]:
        """Nothing is left to compute here: what has been computed goes to the owner, once the holders are free."""
        if not prefill.offer.fits_owner:
            return self._decline(prefill, DeclineReason.NO_ROOM)
        if all(segment.is_borrowed for segments in prefill.held.values() for segment in segments):
            return self._decline(prefill, reason)
        owner = prefill.offer.owner
        # Its cached prefix is still in the owner's cache, also where others hold a copy.
        moves = tuple(
            move for move in gather(prefill.held, owner) if move.positions[-1][-1] >= prefill.offer.cached_tokens
        )
        members = (owner, *sorted({move.source for move in moves}))
        if not self._members.are_ready(members):
            return []
        tag = self._numbers.tags(self._settings.layers * len(moves))
        order = Collect(self._numbers.sequence(), prefill.offer.request, owner, members, moves, tag)
        self._run(prefill, order, members, {}, now_s, 0.0)
        return [order]

    def _run(
        self,
        prefill: SharedPrefill,
        order: RunChunk | Collect,
        members: Sequence[int],
        after: dict[int, tuple[KvSegment, ...]],
        now_s: float,
        compute_s: float,
    ) -> None:
        prefill.running = RunningStep(order, dict(prefill.held), after, set(members), now_s, compute_s)
        self._steps[order.sequence] = prefill
        prefill.involved.update(members)
        self._members.begin_step(order.sequence, members, now_s, compute_s)

    def _answer(self, instance: int, sequence: int, now_s: float, *, is_done: bool) -> list[Order]:
        step = self._steps.get(sequence)
        running = None if step is None else step.running
        if step is None or running is None or instance not in running.waiting:
            return []  # late, twice, or from before the instance was lost
        running.waiting.discard(instance)
        self._members[instance].end_step(now_s)
        if step.offer.owner == instance and is_done and isinstance(running.order, Collect):
            # From here on the request is its owner's again.
            step.is_cancelled = False
        if is_done:
            running.done.add(instance)
            running.is_unsent = False
        else:
            running.has_failed = True
        if not running.waiting:
            return self._end_step(step, now_s)
        return [] if is_done else self._give_up(running)

    def _give_up(self, running: RunningStep) -> list[Order]:
        """The others need not wait for what does not come."""
        return [GiveUp(running.order.sequence, tuple(sorted(running.waiting)))]

    def _end_step(self, prefill: SharedPrefill, now_s: float) -> list[Order]:
        running = prefill.running
        assert running is not None
        order = running.order
        prefill.running = None
        self._quiet_s = now_s
        del self._steps[order.sequence]
        group = order.layout.group if isinstance(order, RunChunk) else order.members
        self._members.end_step(order.sequence, group, now_s)
        if isinstance(order, Collect) and order.owner in running.done:
            # Copies of what the owner has got do not matter, nor how their holders fared.
            return self._forget(prefill)
        if not running.has_failed:
            assert isinstance(order, RunChunk)
            self._members.record_reached(order.layout.group)
            if len(order.layout.group) > 1:
                self._schedule.record_meeting(running.meeting_s(now_s))
            prefill.attempts = 0
            prefill.held = running.after
            prefill.todo = without_head(prefill.todo, sum(count_tokens(part) for part in order.layout.new))
            return self._settle(prefill)
        orders: list[Order] = []
        back = tuple(sorted(running.done))
        if back:
            orders.append(RollBack(order.sequence, order.request, back))
        prefill.held = running.before
        # Room is kept for a prompt where it holds a part: who holds none of it has room for all alike.
        prefill.group = tuple(instance for instance in prefill.group if prefill.held.get(instance))
        prefill.attempts += 1
        if isinstance(order, Collect) or not running.is_unsent:
            prefill.stop_streaming()
        return [*orders, *self._settle(prefill)]

    def _settle(self, prefill: SharedPrefill) -> list[Order]:
        """A request of which no step runs: end it, or find again what is left of it to compute."""
        if prefill.is_cancelled:
            return self._forget(prefill)
        if prefill.attempts >= self._settings.max_attempts:
            return self._decline(prefill, DeclineReason.FAILURES)
        held = tuple(part for segments in prefill.held.values() for part in positions_of(segments))
        expected = prefill.offer.tokens - count_tokens(prefill.todo)
        if count_tokens(held) != expected:
            prefill.todo = without((range(prefill.offer.tokens),), held)
        prefill.estimate(self._candidates)
        return []

    def _decline(self, prefill: SharedPrefill, reason: DeclineReason) -> list[Order]:
        offer = prefill.offer
        return [*self._forget(prefill), Decline(offer.request, offer.owner, reason, offer.arrival_s)]

    def _forget(self, prefill: SharedPrefill) -> list[Order]:
        # Also members that hold nothing any more: they may still be sending of it.
        del self._requests[prefill.offer.request]
        self.kept.unlock(prefill.prefix)
        self._room.freed_s = math.inf
        for instance in prefill.involved:
            if instance in self._members:
                self._members[instance].free_claimed(prefill.offer.request)
        members = tuple(instance for instance in self._members if instance in prefill.involved)
        return [Drop(prefill.offer.request, members)] if members else []

    # -- kept prompts ------------------------------------------------------------------------------------------------

    def _may_keep_rows(self, prefill: SharedPrefill) -> bool:
        settings, offer = self._settings, prefill.offer
        return (
            settings.keeps_rows
            and offer.blocks is not None
            and prefill.running is None
            and prefill.is_finishing
            and not prefill.is_cancelled
        )

    def _keep_rows(self, prefill: SharedPrefill) -> list[Order]:
        """A prompt that is at decode is forgotten, and its rows remain."""
        request, blocks = prefill.offer.request, prefill.offer.blocks
        assert blocks is not None
        # What it has borrowed is kept already, but for its owner's own prefix.
        held = {
            instance: tuple(
                run for segment in segments if not (segment.is_borrowed and prefill.prefix) for run in segment.positions
            )
            for instance, segments in prefill.held.items()
        }
        kept = self._rows.keep(request, blocks, held, prefill.text)
        dropped = self._forget(prefill)
        if not kept:
            return dropped
        end_tokens = len(blocks.hashes) * blocks.block_tokens
        start_tokens = min(run.start for rows in kept.values() for run in rows)
        rest = [
            drop._replace(members=tuple(member for member in drop.members if member not in kept))
            for drop in dropped
            if isinstance(drop, Drop)
        ]
        keep = Keep(request, tuple(sorted(kept)), start_tokens, end_tokens)
        return [keep, *(drop for drop in rest if drop.members), *self._rows.make_room()]

    # -- what is so --------------------------------------------------------------------------------------------------

    @property
    def _candidates(self) -> tuple[SpCandidate, ...]:
        return self._schedule.planner.options.candidates

    def _forget_unclaimed(self, now_s: float) -> None:
        timeout_s = self._settings.bind_timeout_s
        for ticket in [key for key, prefill in self._announced.items() if now_s > prefill.bound_s + timeout_s]:
            del self._announced[ticket]
