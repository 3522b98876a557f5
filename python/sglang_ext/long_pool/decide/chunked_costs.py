"""The time of a prompt on each SP size where its chunks are bounded: each is launched.

A chunk of c seconds takes k to launch, and computes the prompt in the rest, c - k. A prompt whose computing takes W
seconds beyond one launch takes

    k + W c / (c - k)

in such chunks. The launch of a group takes longer than that of one instance: without this a size that computes a
little faster looks better than it is. Members also meet before each chunk, which is not counted: they compute their own
batches until then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sglang_ext.long_pool.decide.price_planner import Placement, PrefillSnapshot, PricePlanner, WaitingPrompt
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost

_LEAST_CHANGE = 0.05


def in_chunks(cost: SpCost | TabulatedCost, longest_s: float) -> SpCost | TabulatedCost:
    """Return what a prompt takes in chunks of at most this long, where `cost` is that of a single chunk.

    `longest_s`: several times a launch, as `longest_chunk_s` has it.
    """
    launch_s = cost.predict_s(0, 0)
    share = 1.0 - launch_s / longest_s if launch_s else 1.0
    if isinstance(cost, TabulatedCost):
        durations_s = tuple(launch_s + max(0.0, duration_s - launch_s) / share for duration_s in cost.duration_s)
        return TabulatedCost(cost.prompt_tokens, durations_s)
    return SpCost(launch_s, cost.b_s_per_token / share, cost.c_s_per_token2 / share, cost.d_s_per_token2 / share)


class ChunkedPlanner:
    """A planner that expects prompts to take what they take in chunks of bounded length."""

    def __init__(self, planner: PricePlanner) -> None:
        """`planner`: with the costs of chunks."""
        self._of_chunks = planner
        self._longest_s: Mapping[int, float] = {}
        self._planner = planner
        self._chunk_costs = {candidate.size: candidate.cost for candidate in planner.options.candidates}

    @property
    def of_chunks(self) -> PricePlanner:
        """Return the planner with the costs of chunks."""
        return self._of_chunks

    def bound(self, longest_s: Mapping[int, float]) -> None:
        """Expect chunks of at most this long, by SP size, from now on; infinity: they have no bound."""
        if all(_are_alike(bound_s, self._longest_s.get(size)) for size, bound_s in longest_s.items()):
            return
        self._longest_s = dict(longest_s)
        if min(longest_s.values()) == math.inf:
            self._planner = self._of_chunks
            return
        options = self._of_chunks.options
        costs = tuple(SpCandidate(one.size, in_chunks(one.cost, longest_s[one.size])) for one in options.candidates)
        self._planner = PricePlanner(replace(options, candidates=costs))

    def place(
        self, snapshot: PrefillSnapshot, waiting: Sequence[WaitingPrompt], others_price: float
    ) -> list[Placement]:
        """Return the places of `PricePlanner.place`; their `compute_s` is that of a single chunk."""
        placements = self._planner.place(snapshot, waiting, others_price)
        if self._planner is self._of_chunks:
            return placements
        expected = {candidate.size: candidate.cost for candidate in self._planner.options.candidates}
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


def _are_alike(one_s: float, other_s: float | None) -> bool:
    if other_s is None or one_s == other_s:
        return other_s is not None
    return max(one_s, other_s) < math.inf and abs(one_s - other_s) <= _LEAST_CHANGE * max(one_s, other_s)
