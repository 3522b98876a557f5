"""Decides which instances compute which part of which prompt next: group sizes by what an instance-second costs the
others.

An instance-second that a prompt takes delays the prompts behind it and the prompts that arrive before the queue is
empty. So a prompt takes the group, of all sizes, that minimises

    end + price * instance-seconds,    price = (prompts waiting behind + arrivals until the queue has gone) / N

on N instances, which is a larger size than the cheapest one only where the gain of its own is worth more than that.
Nothing is kept from one decision to the next: a prompt that waits for its group reserves it, others fill the gap where
they end in time, and every prompt that has not started is decided again at the next event. The last prompt of the queue
may also begin on a few idle instances until the larger group is free.

The search is written twice: in C++ (`native/price.hpp`), which serves where it is built, and in Python (`PlainSearch`),
which lists every choice and takes the first of the best. A test compares the two.

Tetris has an improvement rate in the place of the price, searched offline for each load (`planner.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.long_pool.decide.sp_cost import SpCandidate, check_candidates, core_candidates

try:
    from sglang_ext.long_pool.decide._core import PricePlanner as NativePricePlanner

    IS_NATIVE = True
except ImportError:  # without the C++ core the search in Python serves
    IS_NATIVE = False

_MAX_TOKENS = 1 << 40  # keeps every sum of tokens exact in a double
_MAX_NODES = 1 << 20


@dataclass(frozen=True, slots=True)
class PriceOptions:
    """Describes what does not change from decision to decision. ValueError naming the field."""

    candidates: tuple[SpCandidate, ...]  # in any order
    min_chunk_tokens: int = 512  # where a prompt grows, its chunk and what is left are at least this long
    page_tokens: int = 1  # KV slots are taken in pages of this size on each instance
    # A group over more nodes than it needs takes this many times as long; inf: none does.
    cross_node_factor: float = 1.1
    tardiness_weight: float = 1000.0  # a second after the deadline counts as this many
    min_price: float = 0.01  # of an instance-second, in seconds: what an idle pool does not share for less
    max_considered: int = 64  # prompts in a decision: more hardly start now, and count as arrivals

    def __post_init__(self) -> None:
        check_candidates(self.candidates)
        for name in ("min_chunk_tokens", "page_tokens", "max_considered"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if not self.cross_node_factor >= 1:
            raise ValueError(f"cross_node_factor: {self.cross_node_factor} is less than 1")
        for name in ("tardiness_weight", "min_price"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} is not a finite number of at least 0")


class PrefillSnapshot(NamedTuple):
    """The prefill instances at the moment of a decision: three lists or tuples of one length.

    A delay is the time until the instance has done all it is committed to. Free KV is what will be free by then; what
    the request itself already holds there counts as free.
    """

    node_ids: Sequence[int]  # instances of one node share a number; at least 0, below 2**20
    queue_delays_s: Sequence[float]
    free_kv_tokens: Sequence[int]


class Holder(NamedTuple):
    """An instance that holds KV of a prompt: every group of the prompt contains it."""

    instance: int  # position in the snapshot
    tokens: int


class WaitingPrompt(NamedTuple):
    """Describes what is left of a prompt of which nothing runs."""

    new_tokens: int  # L, at least 1
    cached_tokens: int  # C: cached, or computed before
    due_s: float  # of its first token, from now; negative once it is late, infinity where there is no deadline
    owner: int = -1  # position of the instance that will have all KV, first among equals; -1: there is none
    holders: tuple[Holder, ...] = ()  # in the order of the last group


class Placement(NamedTuple):
    """The next chunk of a prompt. Times count from now; it starts now where `start_s` is 0, else it is reserved."""

    prompt: int  # position among the waiting
    tokens: int  # of the chunk: fewer than are left where it grows afterwards
    group: tuple[int, ...]  # positions in the snapshot: the holders first
    start_s: float
    compute_s: float  # of the chunk
    end_s: float  # of the prompt


class PricePlanner:
    """Decides for all waiting prompts at once; keeps nothing. Equal inputs give equal decisions."""

    def __init__(self, options: PriceOptions, *, is_native: bool = IS_NATIVE) -> None:
        """Search in C++ or in Python. ImportError where the C++ core is wanted and not built."""
        self.options = options
        self._core = _native_planner(options) if is_native else None

    def place(
        self, snapshot: PrefillSnapshot, waiting: Sequence[WaitingPrompt], others_price: float
    ) -> list[Placement]:
        """Return, in the order of `waiting`, what starts now and what is reserved, until no instance is idle.

        A delay of the snapshot is the time until an instance has done what it is committed to; free KV is what no
        prompt holds. `others_price`: prompts that will have arrived before the queue is empty. A prompt that no group
        can hold now has a placement without a group.

        ValueError names the field that is wrong, as `CdspPlanner.plan`; TypeError where a sequence is missing.
        """
        if self._core is None:
            _check_input(snapshot, waiting, others_price)
            return PlainSearch(self.options, snapshot).place(waiting, others_price)
        placed: list[Placement] = self._core.place(*snapshot, waiting, others_price)
        return placed


def _native_planner(options: PriceOptions) -> NativePricePlanner:
    if not IS_NATIVE:
        raise ImportError("the C++ core of the planner is not built; `make compiled` builds it in a checkout")
    return NativePricePlanner(
        *core_candidates(options.candidates),
        options.min_chunk_tokens,
        options.page_tokens,
        options.cross_node_factor,
        options.tardiness_weight,
        options.min_price,
        options.max_considered,
        Placement,
    )


def _check_input(snapshot: PrefillSnapshot, waiting: Sequence[WaitingPrompt], others_price: float) -> None:
    """Raise what the C++ core raises for bad input: ValueError or TypeError with the field's name."""
    if not 0 <= others_price < math.inf:
        raise ValueError("others_price: a finite number of at least 0 is needed")
    for name, column in zip(PrefillSnapshot._fields, snapshot, strict=True):
        if not isinstance(column, list | tuple):
            raise TypeError(f"{name}: a sequence is needed")
    count = len(snapshot.node_ids)
    if count == 0:
        raise ValueError("node_ids: at least one instance is needed")
    for name in ("queue_delays_s", "free_kv_tokens"):
        if len(getattr(snapshot, name)) != count:
            raise ValueError(f"{name}: one entry per entry of node_ids is needed")
    for position, (node, delay_s, tokens) in enumerate(zip(*snapshot, strict=True)):
        if not _is_integer(node, 0, _MAX_NODES):
            raise ValueError(f"node_ids[{position}]: a number of at least 0 and below 2**20 is needed")
        if not isinstance(delay_s, int | float) or not 0 <= delay_s < math.inf:
            raise ValueError(f"queue_delays_s[{position}]: a finite number of seconds of at least 0 is needed")
        if not _is_integer(tokens, 0, _MAX_TOKENS):
            raise ValueError(f"free_kv_tokens[{position}]: a whole number of at least 0 and below 2**40 is needed")
    for position, prompt in enumerate(waiting):
        _check_prompt(position, prompt, count)


def _check_prompt(position: int, prompt: WaitingPrompt, instances: int) -> None:
    if len(prompt) != len(WaitingPrompt._fields):
        raise ValueError(f"prompts[{position}]: five fields are needed")
    if not _is_integer(prompt.new_tokens, 1, _MAX_TOKENS):
        raise ValueError(f"new_tokens[{position}]: at least 1 is needed")
    if not _is_integer(prompt.cached_tokens, 0, _MAX_TOKENS):
        raise ValueError(f"cached_tokens[{position}]: a whole number of at least 0 is needed")
    if not isinstance(prompt.due_s, float) or math.isnan(prompt.due_s):
        raise ValueError(f"due_s[{position}]: a number is needed")
    if not _is_integer(prompt.owner, -1, instances):
        raise ValueError(f"owner[{position}]: the position of an instance or -1 is needed")
    are_right = all(
        len(pair) == 2 and _is_integer(pair[0], 0, instances) and _is_integer(pair[1], 0, _MAX_TOKENS)
        for pair in prompt.holders
    )
    if not are_right or len({pair[0] for pair in prompt.holders}) < len(prompt.holders):
        raise ValueError(
            f"holders[{position}]: pairs of the position of an instance, named once, and its tokens are needed"
        )


def _is_integer(value: object, minimum: int, limit: int) -> bool:
    return isinstance(value, int) and minimum <= value < limit


# ---------------------------------------------------------------- the search in Python

_ANYWHERE = None  # a group over several nodes


class _Choice(NamedTuple):
    """One way to place a prompt."""

    score: float
    kind: str  # wait, gap, grow
    size: int
    first_size: int  # of the chunk that starts now
    node: int | None
    tokens: int
    start_s: float
    first_s: float
    end_s: float


@dataclass
class _Instance:
    number: int
    node: int
    free_s: float
    room_tokens: int
    gap_s: float = math.inf  # when its first reservation starts
    is_idle: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_idle = self.free_s == 0.0

    def is_free_until(self, until_s: float) -> bool:
        return self.is_idle and self.gap_s >= until_s


class PlainSearch:
    """One decision: for each prompt in turn, every choice is listed and the first of the best is taken."""

    def __init__(self, options: PriceOptions, snapshot: PrefillSnapshot) -> None:
        self._options = options
        self._candidates = sorted(options.candidates, key=lambda candidate: candidate.size)
        self._instances = [_Instance(number, *row) for number, row in enumerate(zip(*snapshot, strict=True))]
        self._nodes: dict[int, list[_Instance]] = {}
        for instance in self._instances:
            self._nodes.setdefault(instance.node, []).append(instance)
        self._largest_node = max(map(len, self._nodes.values()))

    def place(self, waiting: Sequence[WaitingPrompt], others_price: float) -> list[Placement]:
        """See `PricePlanner.place`."""
        placed = []
        for number, prompt in enumerate(waiting[: self._options.max_considered]):
            if not any(instance.is_idle for instance in self._instances):
                break
            behind = len(waiting) - number - 1
            price = max(self._options.min_price, (behind + others_price) / len(self._instances))
            choices = self._choices(prompt, price, is_last=behind == 0)
            best = min(choices, key=lambda choice: choice.score, default=None)
            if best is None or best.score == math.inf:
                placed.append(Placement(number, 0, (), 0.0, 0.0, 0.0))
            else:
                placed.append(self._take(number, prompt, best))
        return placed

    def _choices(self, prompt: WaitingPrompt, price: float, *, is_last: bool) -> Iterator[_Choice]:
        def score(end_s: float, work_s: float) -> float:
            late_s = end_s - prompt.due_s
            return end_s + price * work_s + (self._options.tardiness_weight * late_s if late_s > 0 else 0.0)

        holders = self._holders(prompt)
        held_tokens = {holder.instance: holder.tokens for holder in prompt.holders}
        for candidate in self._candidates:
            size = candidate.size
            if size < len(holders) or size > len(self._instances):
                continue
            share_tokens = self._share_tokens(prompt, size)
            for node, factor in self._places(prompt, size):
                compute_s = candidate.cost.predict_s(prompt.cached_tokens, prompt.new_tokens) * factor
                others = self._fitting(prompt, node, size)
                wanted = size - len(holders)
                if compute_s == math.inf or len(others) < wanted:
                    continue
                if any(holder.room_tokens + held_tokens[holder.number] < share_tokens for holder in holders):
                    continue
                chosen_s = sorted(instance.free_s for instance in others)[:wanted]
                start_s = max([0.0, *chosen_s, *(holder.free_s for holder in holders)])
                work_s = size * compute_s
                in_gap = sum(instance.is_free_until(compute_s) for instance in others)
                if start_s > 0 and all(holder.is_free_until(compute_s) for holder in holders) and in_gap >= wanted:
                    gap = (size, size, node, prompt.new_tokens, 0.0, compute_s, compute_s)
                    yield _Choice(score(compute_s, work_s), "gap", *gap)
                    continue
                end_s = start_s + compute_s
                whole = (size, size, node, prompt.new_tokens, start_s, compute_s, end_s)
                yield _Choice(score(end_s, work_s), "wait", *whole)
                if start_s > 0 and is_last and all(holder.is_free_until(start_s) for holder in holders):
                    yield from self._grown(prompt, candidate, node, factor, start_s, score)

    def _grown(
        self,
        prompt: WaitingPrompt,
        candidate: SpCandidate,
        node: int | None,
        factor: float,
        start_s: float,
        score: Callable[[float, float], float],
    ) -> Iterator[_Choice]:
        """A chunk on idle instances now, the rest on the candidate's size once that group is free."""
        held_tokens = {holder.instance: holder.tokens for holder in prompt.holders}
        fitting = self._fitting(prompt, node, candidate.size)
        idle = [instance for instance in fitting if instance.is_free_until(start_s)]
        page, minimum = self._options.page_tokens, self._options.min_chunk_tokens
        members = (*self._holders(prompt), *idle)
        rooms = [member.room_tokens + held_tokens.get(member.number, 0) for member in members]
        room_tokens = min([_MAX_TOKENS, *rooms]) // page * page
        for first in self._candidates:
            joining = first.size - len(prompt.holders)
            if first.size >= candidate.size or joining < 0 or joining > len(idle):
                continue
            is_spread = node is _ANYWHERE and first.size <= self._largest_node
            first_factor = self._options.cross_node_factor if is_spread else factor
            limit = min(prompt.new_tokens - minimum, room_tokens * first.size - prompt.cached_tokens)
            tokens = _tokens_within(first, prompt.cached_tokens, start_s / first_factor, limit)
            if tokens < minimum:
                continue
            first_s = first.cost.predict_s(prompt.cached_tokens, tokens) * first_factor
            rest_s = candidate.cost.predict_s(prompt.cached_tokens + tokens, prompt.new_tokens - tokens) * factor
            end_s = start_s + rest_s
            yield _Choice(
                score(end_s, first.size * first_s + candidate.size * rest_s),
                "grow",
                *(candidate.size, first.size, node, tokens, start_s, first_s, end_s),
            )

    def _places(self, prompt: WaitingPrompt, size: int) -> Iterator[tuple[int | None, float]]:
        """Yield where a group of this size may be, a node or several, and by how much it is slower there."""
        homes = {holder.node for holder in self._holders(prompt)}
        if len(homes) <= 1 and size <= self._largest_node:
            owner = [] if prompt.owner < 0 else [self._instances[prompt.owner].node]
            for node in list(homes) or [*owner, *sorted({*self._nodes} - {*owner})]:
                yield node, 1.0
        if size > self._largest_node:
            yield _ANYWHERE, 1.0
        elif len(self._nodes) > 1 and self._options.cross_node_factor < math.inf:
            yield _ANYWHERE, self._options.cross_node_factor

    def _share_tokens(self, prompt: WaitingPrompt, size: int) -> int:
        page = self._options.page_tokens
        each = -(-(prompt.cached_tokens + prompt.new_tokens) // size)
        return -(-each // page) * page

    def _fitting(self, prompt: WaitingPrompt, node: int | None, size: int) -> list[_Instance]:
        """Return the instances with room for their share that may join the holders."""
        holders = {holder.instance for holder in prompt.holders}
        share_tokens = self._share_tokens(prompt, size)
        members = self._instances if node is _ANYWHERE else self._nodes[node]
        return [member for member in members if member.number not in holders and member.room_tokens >= share_tokens]

    def _holders(self, prompt: WaitingPrompt) -> list[_Instance]:
        return [self._instances[holder.instance] for holder in prompt.holders]

    def _take(self, number: int, prompt: WaitingPrompt, best: _Choice) -> Placement:
        """Reserve what the choice needs. Equal instances join in order of position, the owner first."""
        holders, share_tokens = self._holders(prompt), self._share_tokens(prompt, best.size)
        others = self._fitting(prompt, best.node, best.size)
        held_tokens = {holder.instance: holder.tokens for holder in prompt.holders}

        def first_of(count: int, among: list[_Instance], key: Callable[[_Instance], float]) -> list[_Instance]:
            return sorted(among, key=lambda candidate: (key(candidate), candidate.number != prompt.owner))[:count]

        ready = [instance for instance in others if instance.free_s <= best.start_s]
        later: list[_Instance] = []
        if best.kind == "grow":
            idle = [instance for instance in others if instance.is_free_until(best.start_s)]
            group = [*holders, *first_of(best.first_size - len(holders), idle, lambda candidate: 0)]
            rest = [instance for instance in ready if instance not in group]
            later = first_of(best.size - best.first_size, rest, lambda candidate: -candidate.free_s)
        elif best.kind == "gap":
            idle = [instance for instance in others if instance.is_free_until(best.first_s)]
            group = [*holders, *first_of(best.size - len(holders), idle, lambda candidate: candidate.gap_s)]
        else:
            group = [*holders, *first_of(best.size - len(holders), ready, lambda candidate: -candidate.free_s)]
        start_s = best.start_s if best.kind == "wait" else 0.0
        for member in group:
            if start_s == 0.0:
                member.is_idle = False
                member.room_tokens -= share_tokens - held_tokens.get(member.number, 0)
            elif member.gap_s == math.inf:
                member.gap_s = start_s
            if best.kind != "gap" or member.gap_s == math.inf:
                member.free_s = best.end_s
        for member in later:
            if member.gap_s == math.inf:
                member.gap_s = best.start_s
            member.free_s = best.end_s
        instances = tuple(member.number for member in group)
        return Placement(number, best.tokens, instances, start_s, best.first_s, best.end_s)


def _tokens_within(candidate: SpCandidate, cached_tokens: int, budget_s: float, limit_tokens: int) -> int:
    """Return the largest number of tokens of at most `limit_tokens` whose time is within the budget, or 0."""
    low, high = 0, max(0, limit_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if candidate.cost.predict_s(cached_tokens, middle) <= budget_s:
            low = middle
        else:
            high = middle - 1
    return low
