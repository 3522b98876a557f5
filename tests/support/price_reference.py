"""What the price planner has to decide, a second time: every choice listed, and the first of the best taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.long_pool.decide.price_planner import Placement, PrefillSnapshot, PriceOptions, WaitingPrompt
from sglang_ext.long_pool.decide.sp_cost import SpCandidate

EVERYWHERE = None


class Choice(NamedTuple):
    """One way to place a prompt."""

    score: float
    kind: str  # wait, gap, grow
    size: int
    first_size: int
    where: int | None  # a node
    tokens: int
    start_s: float
    first_s: float
    end_s: float


@dataclass
class Instance:
    number: int
    node: int
    free_s: float
    room: int
    gap_s: float = math.inf
    is_idle: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_idle = self.free_s == 0.0

    def is_free_until(self, until_s: float) -> bool:
        return self.is_idle and self.gap_s >= until_s


class PriceReference:
    """One decision."""

    def __init__(self, options: PriceOptions, snapshot: PrefillSnapshot) -> None:
        self.options = options
        self.candidates = sorted(options.candidates, key=lambda one: one.size)
        self.all = [Instance(i, *rest) for i, rest in enumerate(zip(*snapshot, strict=True))]  # type: ignore[arg-type]
        self.nodes = {one.node: [other for other in self.all if other.node == one.node] for one in self.all}
        self.largest_node = max(map(len, self.nodes.values()))

    def place(self, waiting: Sequence[WaitingPrompt], others: float) -> list[Placement]:
        placed = []
        for number, prompt in enumerate(waiting[: self.options.most_considered]):
            if not any(one.is_idle for one in self.all):
                break
            behind = len(waiting) - number - 1
            price = max(self.options.least_price, (behind + others) / len(self.all))
            choices = list(self.choices(prompt, price, is_last=behind == 0))
            best = min(choices, key=lambda one: one.score, default=None)
            if best is None or best.score == math.inf:
                placed.append(Placement(number, 0, (), 0.0, 0.0, 0.0))
            else:
                placed.append(self.take(number, prompt, best))
        return placed

    # -- what is possible --

    def members(self, where: int | None) -> list[Instance]:
        return self.all if where is EVERYWHERE else self.nodes[where]

    def share(self, prompt: WaitingPrompt, size: int) -> int:
        page = self.options.page_tokens
        each = -(-(prompt.cached_tokens + prompt.new_tokens) // size)
        return -(-each // page) * page

    def fitting(self, prompt: WaitingPrompt, where: int | None, size: int) -> list[Instance]:
        """Those that may join the holders."""
        holders = {one.instance for one in prompt.holders}
        share = self.share(prompt, size)
        return [one for one in self.members(where) if one.number not in holders and one.room >= share]

    def holders(self, prompt: WaitingPrompt) -> list[Instance]:
        return [self.all[one.instance] for one in prompt.holders]

    def places(self, prompt: WaitingPrompt, size: int) -> Iterator[tuple[int | None, float]]:
        homes = {one.node for one in self.holders(prompt)}
        if len(homes) <= 1 and size <= self.largest_node:
            owner = [] if prompt.owner < 0 else [self.all[prompt.owner].node]
            order = list(homes) or [*owner, *sorted({*self.nodes} - {*owner})]
            yield from ((node, 1.0) for node in order)
        if size > self.largest_node:
            yield EVERYWHERE, 1.0
        elif len(self.nodes) > 1 and self.options.cross_node_factor < math.inf:
            yield EVERYWHERE, self.options.cross_node_factor

    def choices(self, prompt: WaitingPrompt, price: float, *, is_last: bool) -> Iterator[Choice]:
        def score(end_s: float, work_s: float) -> float:
            late_s = end_s - prompt.due_s
            return end_s + price * work_s + (late_s > 0 and self.options.tardiness_weight * late_s)

        for candidate in self.candidates:
            size = candidate.size
            if size < len(prompt.holders) or size > len(self.all):
                continue
            for where, factor in self.places(prompt, size):
                compute_s = candidate.cost.predict_s(prompt.cached_tokens, prompt.new_tokens) * factor
                share, holders = self.share(prompt, size), self.holders(prompt)
                own = {one.instance: one.tokens for one in prompt.holders}
                others = self.fitting(prompt, where, size)
                wanted = size - len(holders)
                if compute_s == math.inf or any(one.room + own[one.number] < share for one in holders):
                    continue
                if len(others) < wanted:
                    continue
                chosen = sorted(one.free_s for one in others)[:wanted]
                start_s = max([0.0, *chosen, *(one.free_s for one in holders)])
                work_s = size * compute_s
                in_gap = [one for one in others if one.is_free_until(compute_s)]
                if start_s > 0 and all(one.is_free_until(compute_s) for one in holders) and len(in_gap) >= wanted:
                    yield Choice(
                        score(compute_s, work_s),
                        "gap",
                        *(size, size, where, prompt.new_tokens, 0.0, compute_s, compute_s),
                    )
                    continue
                end_s = start_s + compute_s
                whole = size, size, where, prompt.new_tokens, start_s, compute_s, end_s
                yield Choice(score(end_s, work_s), "wait", *whole)
                if start_s > 0 and is_last and all(one.is_free_until(start_s) for one in holders):
                    yield from self.grown(prompt, candidate, where, factor, start_s, score)

    def grown(
        self,
        prompt: WaitingPrompt,
        candidate: SpCandidate,
        where: int | None,
        factor: float,
        start_s: float,
        score: object,
    ) -> Iterator[Choice]:
        assert callable(score)
        own = {one.instance: one.tokens for one in prompt.holders}
        idle = [one for one in self.fitting(prompt, where, candidate.size) if one.is_free_until(start_s)]
        page, least = self.options.page_tokens, self.options.min_chunk_tokens
        rooms = [one.room + own.get(one.number, 0) for one in (*self.holders(prompt), *idle)]
        room = min([1 << 40, *rooms]) // page * page
        for first in self.candidates:
            joining = first.size - len(prompt.holders)
            if first.size >= candidate.size or joining < 0 or joining > len(idle):
                continue
            is_spread = where is EVERYWHERE and first.size <= self.largest_node
            first_factor = self.options.cross_node_factor if is_spread else factor
            most = min(prompt.new_tokens - least, room * first.size - prompt.cached_tokens)
            budget_s = start_s / first_factor
            tokens = 0
            low, high = 0, max(0, most)
            while low < high:
                middle = (low + high + 1) // 2
                if first.cost.predict_s(prompt.cached_tokens, middle) <= budget_s:
                    low = middle
                else:
                    high = middle - 1
            tokens = low
            if tokens < least:
                continue
            first_s = first.cost.predict_s(prompt.cached_tokens, tokens) * first_factor
            rest_s = candidate.cost.predict_s(prompt.cached_tokens + tokens, prompt.new_tokens - tokens) * factor
            end_s = start_s + rest_s
            yield Choice(
                score(end_s, first.size * first_s + candidate.size * rest_s),
                "grow",
                *(candidate.size, first.size, where, tokens, start_s, first_s, end_s),
            )

    # -- what it takes --

    def take(self, number: int, prompt: WaitingPrompt, best: Choice) -> Placement:
        holders, share = self.holders(prompt), self.share(prompt, best.size)
        others = self.fitting(prompt, best.where, best.size)
        own = {one.instance: one.tokens for one in prompt.holders}

        def first_of(count: int, among: list[Instance], key: object) -> list[Instance]:
            assert callable(key)
            return sorted(among, key=lambda one: (key(one), one.number != prompt.owner))[:count]

        ready = [one for one in others if one.free_s <= best.start_s]
        if best.kind == "grow":
            idle = [one for one in others if one.is_free_until(best.start_s)]
            group = [*holders, *first_of(best.first_size - len(holders), idle, lambda one: 0)]
        elif best.kind == "gap":
            idle = [one for one in others if one.is_free_until(best.first_s)]
            group = [*holders, *first_of(best.size - len(holders), idle, lambda one: one.gap_s)]
        else:
            group = [*holders, *first_of(best.size - len(holders), ready, lambda one: -one.free_s)]
        later: list[Instance] = []
        if best.kind == "grow":
            rest = [one for one in ready if one not in group]
            later = first_of(best.size - best.first_size, rest, lambda one: -one.free_s)
        start_s = best.start_s if best.kind == "wait" else 0.0
        for one in group:
            if start_s == 0.0:
                one.is_idle = False
            elif one.gap_s == math.inf:
                one.gap_s = start_s
            if best.kind != "gap" or one.gap_s == math.inf:
                one.free_s = best.end_s
            if start_s == 0.0:
                one.room -= share - own.get(one.number, 0)
        for one in later:
            if one.gap_s == math.inf:
                one.gap_s = best.start_s
            one.free_s = best.end_s
        instances = tuple(one.number for one in group)
        return Placement(number, best.tokens, instances, start_s, best.first_s, best.end_s)
