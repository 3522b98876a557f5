"""The time of a prompt on each SP size where its chunks are bounded.

A chunk of c seconds has a fixed cost of k: launching it, and half of the time until its members have met, as the last
one does not wait. The rest of it, c - k, computes the prompt. A prompt whose computing takes W seconds beyond the fixed
cost takes

    k + W c / (c - k)

in such chunks. Groups meet, and a single instance does not: without this a size that computes a little faster looks
better than it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from sglang_ext.long_pool.decide.price_planner import Placement, PrefillSnapshot, PricePlanner, WaitingPrompt
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost

_WAITS = 0.5  # of a meeting, a member in the mean
_LEAST_SHARE = 0.5  # of a chunk that computes the prompt, even where its bound is shorter
_LEAST_CHANGE = 0.05


class ChunkBound(NamedTuple):
    """Chunks of one SP size."""

    longest_s: float  # infinity: they may be as long as they like
    meeting_s: float  # until the last of the members has come


def in_chunks(cost: SpCost | TabulatedCost, bound: ChunkBound) -> SpCost | TabulatedCost:
    """Return what a prompt takes in such chunks, where `cost` is that of a chunk without a meeting."""
    launch_s = cost.predict_s(0, 0)
    fixed_s = launch_s + _WAITS * bound.meeting_s
    share = max(_LEAST_SHARE, 1.0 - fixed_s / bound.longest_s) if fixed_s else 1.0
    if isinstance(cost, TabulatedCost):
        durations_s = tuple(max(0.0, fixed_s + (duration_s - launch_s) / share) for duration_s in cost.duration_s)
        return TabulatedCost(cost.prompt_tokens, durations_s)
    return SpCost(fixed_s, cost.b_s_per_token / share, cost.c_s_per_token2 / share, cost.d_s_per_token2 / share)


class ChunkedPlanner:
    """A planner that expects prompts to take what they take in chunks of bounded length."""

    def __init__(self, planner: PricePlanner) -> None:
        """`planner`: with the costs of chunks."""
        self._of_chunks = planner
        self._bounds: Mapping[int, ChunkBound] = {}
        self._planner = planner
        self._chunk_costs = {candidate.size: candidate.cost for candidate in planner.options.candidates}

    @property
    def of_chunks(self) -> PricePlanner:
        """Return the planner with the costs of chunks."""
        return self._of_chunks

    @property
    def candidates(self) -> Sequence[SpCandidate]:
        """Return what prompts take."""
        return self._planner.options.candidates

    def bound(self, bounds: Mapping[int, ChunkBound]) -> None:
        """Expect chunks of these bounds, by SP size, from now on."""
        if all(_are_alike(bound, self._bounds.get(size)) for size, bound in bounds.items()):
            return
        self._bounds = dict(bounds)
        options = self._of_chunks.options
        costs = tuple(SpCandidate(one.size, in_chunks(one.cost, bounds[one.size])) for one in options.candidates)
        self._planner = PricePlanner(replace(options, candidates=costs))

    def place(
        self, snapshot: PrefillSnapshot, waiting: Sequence[WaitingPrompt], others_price: float
    ) -> list[Placement]:
        """Return the places of `PricePlanner.place`; their `compute_s` leaves out what chunks cost again."""
        placements = self._planner.place(snapshot, waiting, others_price)
        if self._planner is self._of_chunks:
            return placements
        expected = {candidate.size: candidate.cost for candidate in self.candidates}
        placed = []
        for placement in placements:
            size, tokens = len(placement.group), placement.tokens
            if size:
                cached = waiting[placement.prompt].cached_tokens
                expected_s = expected[size].predict_s(cached, tokens)
                share = self._chunk_costs[size].predict_s(cached, tokens) / expected_s if expected_s else 1.0
                placement = placement._replace(compute_s=placement.compute_s * share)
            placed.append(placement)
        return placed


def _are_alike(one: ChunkBound, other: ChunkBound | None) -> bool:
    if other is None:
        return False
    return all(
        first == second or (max(first, second) < math.inf and abs(first - second) <= _LEAST_CHANGE * max(first, second))
        for first, second in zip(one, other, strict=True)
    )
