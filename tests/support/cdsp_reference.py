"""CDSP planning written down a second time, slowly and in exact fractions, to hold the planner against.

`enumerate_plans` follows Tetris literally: delays are updated by Eq. 2 before each recursion, groups are lists, chunks
are solved by counting up. `optimum_s` knows no algorithm at all: it tries every chain of instance sets and every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from math import ceil
from typing import NamedTuple

from baselines.tetris_planner import CdspRequest, PlannerConfig
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCost, TabulatedCost


class ReferenceChunk(NamedTuple):
    start_token: int
    tokens: int
    instances: tuple[int, ...]
    start_s: Fraction
    compute_s: Fraction


class ReferencePlan(NamedTuple):
    chunks: tuple[ReferenceChunk, ...]
    ttft_s: Fraction


def chunk_time_s(cost: SpCost | TabulatedCost, cached: int, new: int) -> Fraction | None:
    """T_s(C, L); None where a table ends."""
    if isinstance(cost, SpCost):
        a, b, c, d = (
            Fraction(value) for value in (cost.a_s, cost.b_s_per_token, cost.c_s_per_token2, cost.d_s_per_token2)
        )
        return a + b * new + c * cached * new + d * new * new
    if cached + new > cost.prompt_tokens[-1]:
        return None
    return _interpolate(cost, cached + new) - (
        _interpolate(cost, cached) - _interpolate(cost, 0) if cached else Fraction(0)
    )


def _interpolate(cost: TabulatedCost, tokens: int) -> Fraction:
    known = list(zip(cost.prompt_tokens, map(Fraction, cost.duration_s), strict=True))
    (x0, y0), (x1, y1) = next((low, high) for low, high in pairwise(known) if tokens <= high[0] or high is known[-1])
    return max(Fraction(0), y0 + (y1 - y0) * Fraction(tokens - x0, x1 - x0))


class Reference:
    """One planning problem. `plan` is Algorithm 1 from the start; None where there is no plan."""

    def __init__(self, config: PlannerConfig, snapshot: PrefillSnapshot, request: CdspRequest, rate: float) -> None:
        self.costs = {candidate.size: candidate.cost for candidate in config.candidates}
        self.config, self.snapshot, self.request, self.rate = config, snapshot, request, Fraction(rate)
        self.delays = tuple(Fraction(delay) for delay in snapshot.queue_delays_s)
        self.total = request.cached_tokens + request.new_tokens

    def plan(self) -> ReferencePlan | None:
        plan = self._plan(
            self.request.new_tokens, self.request.cached_tokens, self.request.group, tuple(sorted(self.costs)),
            self.delays, None, Fraction(self.request.waited_s),
        )  # fmt: skip
        return None if plan is None else _with_absolute_starts(plan)

    def share(self, tokens: int, size: int) -> int:
        """KV slots that each of `size` instances takes, in whole pages."""
        page = self.config.page_tokens
        return ceil(Fraction(ceil(Fraction(tokens, size)), page)) * page

    def eligible(self, size: int) -> frozenset[int]:
        """Instances that can hold their share of the whole request spread over `size`."""
        needed = self.share(self.total, size)
        return frozenset(i for i, free in enumerate(self.snapshot.free_kv_tokens) if free >= needed)

    def extend(
        self, group: tuple[int, ...], size: int, delays: Sequence[Fraction], eligible: frozenset[int]
    ) -> tuple[int, ...] | None:
        """Section 5.1, group extension. Of equal delays the one that was shorter before Eq. 2 goes first."""
        if size < len(group) or not set(group) <= eligible or len(eligible) < size:
            return None
        nodes = self.snapshot.node_ids

        def order(i: int) -> tuple[Fraction, Fraction, int]:
            return delays[i], self.delays[i], i

        free = sorted(eligible - set(group), key=order)
        chosen = list(group)
        used = {nodes[i] for i in group}
        chosen += [i for i in free if nodes[i] in used][: size - len(chosen)]
        by_node = {node: [i for i in free if nodes[i] == node] for node in {nodes[i] for i in free} - used}
        while len(chosen) < size:
            rest = size - len(chosen)
            fitting = [node for node, members in by_node.items() if len(members) >= rest]
            if fitting:
                node = min(fitting, key=lambda node: (*order(by_node[node][rest - 1])[:2], node))
            else:
                node = min(by_node, key=lambda node: (*order(by_node[node][-1])[:2], node))
            chosen += by_node.pop(node)[:rest]
        return tuple(chosen)

    def _single(
        self, left: int, cached: int, group: tuple[int, ...], sizes: Sequence[int], delays: Sequence[Fraction],
        eligible: frozenset[int] | None, waited_s: Fraction,
    ) -> ReferencePlan | None:  # fmt: skip
        """Algorithm 2."""
        best: ReferencePlan | None = None
        for size in sizes:
            members = self.extend(group, size, delays, self.eligible(size) if eligible is None else eligible)
            time_s = chunk_time_s(self.costs[size], cached, left)
            if members is None or time_s is None:
                continue
            wait_s = max(delays[i] for i in members)
            if best is None or waited_s + wait_s + time_s < (waited_s + best.ttft_s) * (1 - self.rate):
                best = ReferencePlan(
                    (ReferenceChunk(cached, left, members, wait_s, time_s),), wait_s + time_s
                )  # fmt: skip
        return best

    def _plan(
        self, left: int, cached: int, group: tuple[int, ...], sizes: Sequence[int], delays: Sequence[Fraction],
        eligible: frozenset[int] | None, waited_s: Fraction,
    ) -> ReferencePlan | None:  # fmt: skip
        """Algorithm 1; starts count from the end of the chunk before."""
        best = self._single(left, cached, group, sizes, delays, eligible, waited_s)
        if best is None or not self.config.is_chunking:
            return best
        within = [size for size in sizes if size <= len(best.chunks[0].instances)]
        for current, following in combinations(within, 2):
            allowed = self.eligible(following) if eligible is None else eligible
            members = self.extend(group, current, delays, allowed)
            extended = self.extend(members, following, delays, allowed) if members is not None else None
            if members is None or extended is None:
                continue
            wait_s = max(delays[i] for i in members)
            budget_s = max(delays[i] for i in extended) - wait_s
            tokens = self._chunk(left, cached, members, budget_s)
            if tokens < self.config.min_chunk_tokens or left - tokens < self.config.min_chunk_tokens:
                continue
            time_s = chunk_time_s(self.costs[current], cached, tokens)
            assert time_s is not None
            after = tuple(
                Fraction(0) if i in members else max(Fraction(0), delay - wait_s - time_s)
                for i, delay in enumerate(delays)
            )
            rest = self._plan(
                left - tokens, cached + tokens, members, [size for size in within if size >= following], after, allowed,
                Fraction(0),
            )  # fmt: skip
            if rest is not None and wait_s + time_s + rest.ttft_s < best.ttft_s:
                chunk = ReferenceChunk(cached, tokens, members, wait_s, time_s)
                best = ReferencePlan((chunk, *rest.chunks), wait_s + time_s + rest.ttft_s)
        return best

    def _chunk(self, left: int, cached: int, members: tuple[int, ...], budget_s: Fraction) -> int:
        """Algorithm 3: the most tokens that take no longer than the budget and fit into the KV pools."""
        if budget_s <= 0:
            return 0
        free_tokens = min(self.snapshot.free_kv_tokens[i] for i in members)

        def fits(tokens: int) -> bool:
            time_s = chunk_time_s(self.costs[len(members)], cached, tokens)
            fits = self.share(cached + tokens, len(members)) <= free_tokens
            return time_s is not None and time_s <= budget_s and fits

        return _largest(fits, left)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with_absolute_starts(plan: ReferencePlan) -> ReferencePlan:
    chunks, elapsed_s = [], Fraction(0)
    for chunk in plan.chunks:
        chunks.append(chunk._replace(start_s=elapsed_s + chunk.start_s))
        elapsed_s += chunk.start_s + chunk.compute_s
    return ReferencePlan(tuple(chunks), plan.ttft_s)


def optimum_s(config: PlannerConfig, snapshot: PrefillSnapshot, request: CdspRequest) -> Fraction:
    """The lowest TTFT over all nested instance sets of allowed sizes and all cuts, KV capacity apart."""
    costs = {candidate.size: candidate.cost for candidate in config.candidates}
    all_instances = range(len(snapshot.node_ids))

    def supersets(members: frozenset[int]) -> Iterator[frozenset[int]]:
        others = [i for i in all_instances if i not in members]
        for size in costs:
            if size > len(members):
                yield from (members | set(more) for more in combinations(others, size - len(members)))

    def finish_s(elapsed_s: Fraction, cached: int, left: int, members: frozenset[int]) -> Fraction | None:
        ends: list[Fraction] = []
        for group in supersets(members):
            start_s = max(elapsed_s, *(Fraction(snapshot.queue_delays_s[i]) for i in group))
            for tokens in range(1, left + 1):
                time_s = chunk_time_s(costs[len(group)], cached, tokens)
                assert time_s is not None
                end_s: Fraction | None = start_s + time_s
                if tokens < left:
                    end_s = finish_s(start_s + time_s, cached + tokens, left - tokens, group)
                if end_s is not None:
                    ends.append(end_s)
        return min(ends, default=None)

    best_s = finish_s(Fraction(0), request.cached_tokens, request.new_tokens, frozenset())
    assert best_s is not None
    return best_s
