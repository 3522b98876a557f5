"""Decides how prompts use the rows that a long pool keeps: in place, brought to one instance first, or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix, KeptPrompts, PromptBlocks, PromptText
from sglang_ext.long_pool.decide.orders import DropKept, Order
from sglang_ext.long_pool.decide.pool_members import PoolMembers
from sglang_ext.long_pool.decide.pool_requests import AnnouncedPrompt, tokens_held
from sglang_ext.long_pool.decide.pool_schedule import PoolSchedule
from sglang_ext.long_pool.decide.price_planner import Placement, PrefillSnapshot
from sglang_ext.long_pool.decide.row_pulls import Pull, RowPulls, cheapest_pull
from sglang_ext.long_pool.decide.sharding import KvSegment, Positions
from sglang_ext.long_pool.decide.sp_cost import SpCandidate


class RowReuse:
    """Holds what one pool keeps, and the pulls that are under way."""

    def __init__(self, members: PoolMembers, schedule: PoolSchedule, settings: CoordinationSettings) -> None:
        self.kept = KeptPrompts()
        self.pulls = RowPulls(settings.kv_token_bytes)
        self._members = members
        self._schedule = schedule
        self._settings = settings
        self._waiting: dict[int, AnnouncedPrompt] = {}  # by the pull that it waits for
        self._spread: dict[int, tuple[int, ...]] = {}  # who hold rows of kept prompts that are to be gathered

    @property
    def may_gather(self) -> bool:
        """Return whether there are kept prompts that `gather` looks at."""
        return bool(self._spread)

    # -- what is kept ------------------------------------------------------------------------------------------------

    def keep(
        self, request: int, blocks: PromptBlocks, held: Mapping[int, Positions], text: PromptText | None
    ) -> dict[int, Positions]:
        """As `KeptPrompts.keep`."""
        kept = self.kept.keep(request, blocks, held, text)
        whole = self.kept.whole(request)
        if whole is not None and self._settings.pulls_rows and self._settings.gathers_rows:
            holders = tuple(self.kept.rows(whole))
            if len(holders) > 1:
                self._spread[request] = holders
        return kept

    def lose(self, instance: int, now_s: float) -> list[Order]:
        """An instance has gone, with all rows that it kept."""
        given_up = self.give_up(self.pulls.needing(instance), now_s)
        return [*given_up, *self._forget(self.kept.lose((instance,)), now_s)]

    def lose_rows(self, instance: int, prompts: Collection[int], now_s: float) -> list[Order]:
        """An instance has freed the rows that it kept of these prompts."""
        given_up = self.give_up(self.pulls.needing(instance, prompts), now_s)
        return [*given_up, *self._forget(self.kept.lose_rows(instance, prompts), now_s)]

    def _forget(self, lost: Sequence[tuple[int, tuple[int, ...]]], now_s: float) -> list[Order]:
        """Drop what is left of prompts of which rows are gone, and give up the pulls that read it: a pull may read the
        beginning of a prompt whose end was somewhere else."""
        given_up = self.give_up(self.pulls.reading({prompt for prompt, _ in lost}), now_s)
        return [*given_up, *_drops(lost)]

    def make_room(self) -> list[Order]:
        """Drop kept rows where something else wants their memory."""
        orders: list[Order] = []
        if len(self.kept):
            for instance in self._members:
                member = self._members[instance]
                room = min(member.free_tokens, int(self._settings.kept_share * member.max_free_tokens))
                excess = self.kept.tokens_on(instance) - self.kept.locked_on(instance) - room
                if excess > 0:
                    orders += _drops(self.kept.drop_for(instance, excess))
        return orders

    # -- in place ----------------------------------------------------------------------------------------------------

    def are_worth(
        self,
        prefix: KeptPrefix | None,
        tokens: int,
        cached_tokens: int,
        delays_s: Sequence[float],
        now_s: float,
    ) -> bool:
        """Return whether a prompt had better begin behind a kept prefix, where `cached_tokens` are there anyway.

        It computes less, but takes a group of all holders: a larger one than it needs, perhaps, and one whose members
        end what they run at different times. `delays_s`: of all instances, see `PrefillSnapshot`.
        """
        if prefix is None or prefix.tokens <= cached_tokens:
            return False
        holders = self.kept.rows(prefix)
        if not all(instance in self._members for instance in holders):
            return False
        least = len(holders)
        in_place = [candidate for candidate in self._candidates if least <= candidate.size <= len(delays_s)]
        if not in_place:
            return False
        price = self._schedule.price
        any_s = sorted(delays_s)
        positions = {self._members.positions[instance] for instance in holders}
        joining_s = sorted(delay_s for position, delay_s in enumerate(delays_s) if position not in positions)
        begin_s = [self._members[instance].begins_in_s(now_s) for instance in holders]
        meet_s = max(begin_s)
        idle_s = sum(meet_s - one_s for one_s in begin_s)

        def cost_s(candidate: SpCandidate, wait_s: float, cached: int) -> float:
            return wait_s + (1 + price * candidate.size) * candidate.cost.predict_s(cached, tokens - cached)

        behind_s = price * idle_s + min(
            cost_s(candidate, max([meet_s, *joining_s[: candidate.size - least]]), prefix.tokens)
            for candidate in in_place
        )
        anywhere_s = min(
            cost_s(candidate, any_s[candidate.size - 1], cached_tokens)
            for candidate in self._candidates
            if candidate.size <= len(any_s)
        )
        return behind_s < anywhere_s

    def match(self, prompt: AnnouncedPrompt, delays_s: Sequence[float], now_s: float) -> None:
        """Decide again whether an announced prompt begins behind what is kept of it."""
        ticket = prompt.ticket
        if ticket.text is None:
            return
        if prompt.matched_version != self.kept.version:
            prompt.matched_version = self.kept.version
            prompt.matched = self.kept.match_text(ticket.text, ticket.tokens - 1)
        prefix = prompt.matched
        if not self.are_worth(prefix, ticket.tokens, ticket.cached_tokens, delays_s, now_s):
            prefix = None
        if prefix != prompt.prefix:
            prompt.prefix = prefix
            rows = {} if prefix is None else self.kept.rows(prefix)
            prompt.holders = tuple((instance, tokens_held(rows, instance)) for instance in sorted(rows))
            prompt.estimate(self._candidates, self._settings)

    # -- brought to one instance -------------------------------------------------------------------------------------

    def pull(
        self, prompt: AnnouncedPrompt, placement: Placement, snapshot: PrefillSnapshot, now_s: float
    ) -> list[Order]:
        """Have the rows that are kept of a prompt brought to one instance, where that is better than its place."""
        prefix, ticket, settings = prompt.matched, prompt.ticket, self._settings
        sizes = {candidate.size: candidate.cost for candidate in self._candidates}
        if (
            not settings.pulls_rows
            or prefix is None
            or prompt.matched_version != self.kept.version  # a chunk that was just ordered took the room
            or prompt.owner is not None
            or prompt.was_pulled
            or prefix.tokens <= ticket.cached_tokens
            or not placement.group
            or 1 not in sizes
        ):
            return []
        rows = self.kept.rows(prefix)
        if not self.pulls.may_join(rows):
            return []
        held = [tokens_held(rows, instance) for instance in self._members]
        price = self._schedule.price
        plan = cheapest_pull(
            prefix.tokens,
            sizes[1].predict_s(prefix.tokens, ticket.tokens - prefix.tokens),
            price,
            held,
            snapshot.queue_delays_s,
            [
                self.pulls.may_join((instance,))
                and free_tokens >= ticket.tokens
                and self._may_keep(instance, prefix.tokens)
                for instance, free_tokens in zip(self._members, snapshot.free_kv_tokens, strict=True)
            ],
            self.pulls,
        )
        placed_s = placement.end_s - placement.start_s
        if plan is None or plan.cost_s >= placement.end_s + price * len(placement.group) * placed_s:
            return []
        if now_s + placement.end_s <= prompt.deadline_s < now_s + plan.end_s:
            return []  # what others gain does not make it late
        order = self._begin_pull(prefix, rows, list(self._members)[plan.target], now_s)
        prompt.pull = order.pull
        self._waiting[order.pull] = prompt
        return [order]

    def gather(self, promised: Mapping[int, int], now_s: float) -> list[Order]:
        """Have kept prompts whose rows are spread brought to one of their holders, before their next turn comes.

        That turn takes neither a group nor a pull then. A prompt waits here while its holders take part in other pulls,
        and stays where it is where none has the room. `promised`: memory that others will need, by instance.
        """
        orders: list[Order] = []
        for prompt, holders in [*self._spread.items()]:
            if not self.pulls.may_join(holders):
                continue
            del self._spread[prompt]
            prefix = self.kept.whole(prompt)
            if prefix is None:
                continue
            rows = self.kept.rows(prefix)
            targets = [
                instance
                for instance in rows
                if self._may_keep(instance, prefix.tokens)
                and self._members[instance].free_tokens - promised.get(instance, 0) >= prefix.tokens
            ]
            if targets:
                orders.append(self._begin_pull(prefix, rows, min(targets, key=self.kept.tokens_on), now_s))
        return orders

    def _may_keep(self, instance: int, tokens: int) -> bool:
        """Return whether a member is large enough to keep a prefix by itself."""
        return tokens <= self._settings.kept_share * self._members[instance].max_free_tokens

    def _begin_pull(
        self, prefix: KeptPrefix, rows: Mapping[int, tuple[KvSegment, ...]], target: int, now_s: float
    ) -> Pull:
        parts = self.kept.parts(prefix)
        self.kept.lock(parts)
        return self.pulls.begin(target, sorted(rows), parts, prefix.tokens - tokens_held(rows, target), now_s)

    def pulled(self, instance: int, pull: int, now_s: float) -> list[Order]:
        """All rows of a pull have come to its target, `instance`, which keeps them."""
        order = self.pulls.end(pull, now_s, is_done=True)
        if order is None or order.target != instance:
            return [DropKept(pull, (instance,))]  # given up meanwhile
        self.kept.unlock(order.parts)
        dropped = _drops(self.kept.add_copy(pull, order.parts, instance))
        self._resume_pulled(pull)
        return dropped

    def give_up(self, pulls: Iterable[int], now_s: float) -> list[Order]:
        """Give up these pulls: a request that waits for one continues without it."""
        orders: list[Order] = []
        for pull in pulls:
            order = self.pulls.end(pull, now_s, is_done=False)
            if order is not None:
                self.kept.unlock(order.parts)
                self._resume_pulled(pull)
                members = tuple(instance for instance in order.members if instance in self._members)
                orders.append(DropKept(pull, members))
        return orders

    def give_up_overdue(self, now_s: float) -> list[Order]:
        """Give up the pulls that take far longer than they should."""
        return self.give_up(self.pulls.overdue(now_s), now_s) if len(self.pulls) else []

    def _resume_pulled(self, pull: int) -> None:
        """The prompt that has waited for a pull, if there is one, is planned again."""
        prompt = self._waiting.pop(pull, None)
        if prompt is not None:
            prompt.pull, prompt.was_pulled = None, True

    @property
    def _candidates(self) -> tuple[SpCandidate, ...]:
        return self._schedule.planner.options.candidates


def _drops(dropped: Sequence[tuple[int, tuple[int, ...]]]) -> list[Order]:
    return [DropKept(request, members) for request, members in dropped if members]
