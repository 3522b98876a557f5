"""Room in a long pool: who waits for it, and what is kept only as long as nothing else wants it.

A prompt that went straight to decode is in no prefix cache. Its KV can still come to its owner's, in short steps
between all others (`PrefixKeeping`); until that is done the memory that it takes counts as free, and is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.orders import Collect, Order
from sglang_ext.long_pool.decide.pool_members import PoolMembers
from sglang_ext.long_pool.decide.pool_requests import (
    AnnouncedPrompt,
    RunningStep,
    SharedPrefill,
    StepNumbers,
    promised_tokens,
)
from sglang_ext.long_pool.decide.sharding import KvSegment, after_moves, compacted, gather, part_of_move

Held = dict[int, tuple[KvSegment, ...]]
_FIRST_STEP_TOKENS = 1024
_LEAST_STEP_TOKENS = 64


class PoolRoom:
    """Describes what fits, and what is worth waiting for."""

    def __init__(self, members: PoolMembers, settings: CoordinationSettings) -> None:
        self._members = members
        self._settings = settings
        self.freed_s = 0.0  # when what a request held was dropped; infinity since the last plan

    def fits_at_its_end(self, prefill: SharedPrefill, others: Iterable[SharedPrefill]) -> bool:
        """Return whether it can be handed back once it is computed: what has to come to its owner must fit there."""
        return prefill.is_streamed or (prefill.offer.fits_owner and self.fits_owner_now(prefill, others))

    def fits_owner_now(self, prefill: SharedPrefill, others: Iterable[SharedPrefill]) -> bool:
        """Return whether all of it, and all that has been promised to others, fits its owner."""
        owner = prefill.offer.owner
        promised = prefill.promised_tokens + promised_tokens(other for other in others if other is not prefill).get(
            owner, 0
        )
        return promised <= self._members[owner].free_tokens

    def may_come(
        self,
        prefill: SharedPrefill | AnnouncedPrompt,
        others: Iterable[SharedPrefill],
        now_s: float,
        *,
        is_working: bool,
    ) -> bool:
        """Return whether something runs that may make room for it, and it has not waited too long where it fits one
        alone.

        `is_working`: a step runs somewhere.
        """
        prefill.no_room_s = now_s if prefill.no_room_s is None else prefill.no_room_s
        is_known = prefill.fastest_s < math.inf
        is_sent = any(other.is_finishing for other in others)
        works = any(self._members[instance].backlog_s(now_s) > 0 for instance in self._members)
        # A member whose processor is short of time reports late, and what it has free is known only then. A member
        # that never reports again is lost.
        newer_s = max(prefill.no_room_s, self.freed_s) + self._settings.report_timeout_s
        is_report_due = not prefill.fits_owner and self._members.oldest_report_s() < newer_s
        is_busy = is_working or is_sent or works or is_report_due
        waits_on = (
            now_s <= prefill.no_room_s + self._settings.room_timeout_s or prefill.tokens > self._members.max_tokens()
        )
        return is_known and is_busy and waits_on


class PrefixKeeping:
    """Prompts that have gone to decode, on their way to the prefix cache of their owner; all others come first.

    A step moves as much as has taken `keep_step_s` recently. What fails is dropped.
    """

    def __init__(
        self,
        requests: Mapping[int, SharedPrefill],
        members: PoolMembers,
        settings: CoordinationSettings,
        numbers: StepNumbers,
        run: Callable[[SharedPrefill, Collect, Held, float], None],
        forget: Callable[[SharedPrefill], list[Order]],
    ) -> None:
        """`run` notes that a step is ordered, what is held after it and when; `forget` ends a request."""
        self._requests = requests
        self._members = members
        self._settings = settings
        self._numbers = numbers
        self._run = run
        self._forget = forget
        self.step_tokens = _FIRST_STEP_TOKENS

    def begin(self, prefill: SharedPrefill, room: PoolRoom, now_s: float) -> bool:
        """Return whether a request that is at decode is kept from now on: wherever that is wanted, and its owner has
        room."""
        is_wanted = self._settings.keeps_prefixes and prefill.is_finishing and not prefill.is_cancelled
        if not (is_wanted and prefill.offer.fits_owner and room.fits_owner_now(prefill, self._requests.values())):
            return False
        prefill.kept_s, prefill.is_finishing = now_s, False
        return True

    def held_tokens(self) -> dict[int, int]:
        """Return what is kept on each instance: free for everything else."""
        held: dict[int, int] = {}
        for prefill in self._kept():
            for instance in prefill.held:
                held[instance] = held.get(instance, 0) + _owned_tokens(prefill, instance)
        return held

    def displace(self, instances: Collection[int]) -> tuple[list[Order], bool]:
        """Drop what is kept there: something else needs the memory. And whether all of it is dropped at once."""
        orders: list[Order] = []
        is_free = True
        for prefill in [
            prefill for prefill in self._kept() if any(_owned_tokens(prefill, instance) for instance in instances)
        ]:
            if prefill.running is None:
                orders += self._forget(prefill)
            else:
                prefill.is_cancelled, is_free = True, False
        return orders, is_free

    def plan(self, now_s: float) -> list[Order]:
        """Order what can move now; drop what is in the way."""
        orders: list[Order] = []
        for prefill in [prefill for prefill in self._kept() if prefill.running is None]:
            if self._is_in_the_way(prefill, now_s):
                orders += self._forget(prefill)
            else:
                orders += self._step(prefill, now_s)
        return orders

    def end_step(self, prefill: SharedPrefill, running: RunningStep, order: Collect, now_s: float) -> list[Order]:
        """All that took part have answered, or are lost."""
        if running.has_failed or order.is_last or prefill.is_cancelled:
            return self._forget(prefill)
        assert prefill.kept_s is not None
        tokens, took_s = sum(move.tokens for move in order.moves), now_s - prefill.kept_s
        if took_s > self._settings.keep_step_s:
            self.step_tokens = max(_LEAST_STEP_TOKENS, tokens // 2)
        elif took_s < self._settings.keep_step_s / 2 and tokens >= self.step_tokens // 2:
            self.step_tokens *= 2
        prefill.held, prefill.kept_s = running.after, now_s
        return []

    def _kept(self) -> Iterator[SharedPrefill]:
        return (request for request in self._requests.values() if request.kept_s is not None)

    def _is_in_the_way(self, prefill: SharedPrefill, now_s: float) -> bool:
        """Return whether it has waited for too long, or ordinary work may want the memory that it takes."""
        assert prefill.kept_s is not None
        if now_s > prefill.kept_s + self._settings.keep_timeout_s:
            return True
        return any(
            self._members[instance].backlog_s(now_s) > self._members.short_backlog_s
            and self._members[instance].free_tokens < _owned_tokens(prefill, instance)
            for instance in prefill.held
        )

    def _step(self, prefill: SharedPrefill, now_s: float) -> list[Order]:
        """The next part of it; nothing while the members that it needs have something else to do."""
        owner, cached_tokens = prefill.offer.owner, prefill.offer.cached_tokens
        # Its cached prefix is still in the owner's cache, also where others hold a copy.
        moves = [move for move in gather(prefill.held, owner) if move.positions[-1][-1] >= cached_tokens]
        part = part_of_move(moves[0], self.step_tokens, self._settings.page_tokens) if moves else None
        members = (owner,) if part is None else (owner, part.source)
        if not all(self._is_idle(instance, now_s) for instance in members):
            return []
        parts = () if part is None else (part,)
        tag = self._numbers.tags(self._settings.layers * len(parts))
        request, is_last = prefill.offer.request, len(parts) == len(moves) and [*parts] == moves
        order = Collect(self._numbers.sequence(), request, owner, members, parts, tag, is_last)
        self._members[owner].claim(order.sequence, request, sum(move.tokens for move in parts))
        prefill.kept_s = now_s
        self._run(prefill, order, compacted(after_moves(prefill.held, parts)), now_s)
        return [order]

    def _is_idle(self, instance: int, now_s: float) -> bool:
        member = self._members[instance]
        works = member.step is not None or member.backlog_s(now_s) > self._members.short_backlog_s
        return not works and now_s >= member.shunned_until_s


def _owned_tokens(prefill: SharedPrefill, instance: int) -> int:
    """Tokens of it that the instance would have free without it: those of a prefix cache are not."""
    return sum(segment.tokens for segment in prefill.held.get(instance, ()) if not segment.is_borrowed)
