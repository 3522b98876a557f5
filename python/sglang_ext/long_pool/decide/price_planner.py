"""Which instances compute which part of which prompt next: group sizes by what an instance-second costs the others.

An instance-second that a prompt takes delays those who wait behind it, and those who arrive before the queue has gone.
So a prompt takes the group, of all sizes, that minimises

    end + price * instance-seconds,    price = (prompts waiting behind + arrivals until the queue has gone) / N

on N instances, which is a larger size than the cheapest one only where the gain of its own is worth more than that.
Nothing is kept from one decision to the next: a prompt that waits for its group reserves it, others fill the gap where
they end in time, and all that has not started is decided anew at the next event. A prompt that has none behind it may
also begin on a few idle instances until the larger group is free. The search is in C++ (`native/price.hpp`).

Tetris has an improvement rate in the place of the price, searched offline for each load (`planner.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_ext.long_pool.decide.native_core import NativePricePlanner, core_candidates
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, check_candidates


@dataclass(frozen=True, slots=True)
class PriceOptions:
    """What does not change from decision to decision. ValueError naming the field."""

    candidates: tuple[SpCandidate, ...]  # in any order
    min_chunk_tokens: int = 512  # where a prompt grows, its chunk and what is left are at least this long
    page_tokens: int = 1  # KV slots are taken in pages of this size on each instance
    cross_node_factor: float = 1.1  # a group over more nodes than it needs takes so many times as long; inf: none does
    tardiness_weight: float = 1000.0  # a second after the deadline counts as so many
    least_price: float = 0.01  # of an instance-second, in seconds: what an idle pool does not share for less
    most_considered: int = 64  # prompts in a decision: more hardly start now, and count as arrivals

    def __post_init__(self) -> None:
        check_candidates(self.candidates)
        for name in ("min_chunk_tokens", "page_tokens", "most_considered"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if not self.cross_node_factor >= 1:
            raise ValueError(f"cross_node_factor: {self.cross_node_factor} is less than 1")
        for name in ("tardiness_weight", "least_price"):
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
    """What is left of a prompt of which nothing runs."""

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

    def __init__(self, options: PriceOptions) -> None:
        self.options = options
        self._core = NativePricePlanner(
            *core_candidates(options.candidates),
            options.min_chunk_tokens,
            options.page_tokens,
            options.cross_node_factor,
            options.tardiness_weight,
            options.least_price,
            options.most_considered,
            Placement,
        )

    def place(
        self, snapshot: PrefillSnapshot, waiting: Sequence[WaitingPrompt], others_price: float
    ) -> list[Placement]:
        """Return, in the order of `waiting`, what starts now and what is reserved, until no instance is idle.

        A delay of the snapshot is the time until an instance has done what it is committed to; free KV is what no
        prompt holds. `others_price`: prompts that will have arrived before the queue has gone. A prompt that no group
        can hold now has a placement without a group.

        ValueError names the field that is wrong, as `CdspPlanner.plan`; TypeError where something is no sequence.
        """
        node_ids, queue_delays_s, free_kv_tokens = snapshot
        placed: list[Placement] = self._core.place(node_ids, queue_delays_s, free_kv_tokens, waiting, others_price)
        return placed
