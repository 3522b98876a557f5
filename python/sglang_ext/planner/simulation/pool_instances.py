"""Instances of one pool in simulation: what each does and holds, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.long_pool.decide.orders import RunChunk
from sglang_ext.long_pool.decide.sharding import KvMove
from sglang_ext.long_pool.decide.sp_cost import SpCost, TabulatedCost
from sglang_ext.planner.simulation.iteration_policies import Iteration, LapsPolicy, WorkItem


@dataclass(frozen=True, slots=True)
class OnePoolOptions:
    """Settings of the pool besides the instances' costs. ValueError naming a time, factor or bandwidth that is not
    above 0."""

    slo_s: float = 1.0  # TTFT objective of a shared prompt, or
    slo_stretch: float = 5.0  # this many times its time on an idle pool if that is more
    short_slo_s: float = 0.4  # TTFT objective of a short prompt; infinity: chunks are as long as they like
    min_chunk_tokens: int = 512
    chunk_s: float | None = None  # longest time of a chunk, also where short prompts would let it take longer
    cross_node_factor: float = 1.1  # of a group over more nodes than it needs; infinity: there is none
    per_node: int = 8  # instances
    keeps_rows: bool = True  # rows of a shared prompt stay where they were computed, as a prefix cache
    pulls_rows: bool = True  # they may be brought to one instance
    gathers_rows: bool = True  # and are, before the next turn comes
    kv_bytes_per_token: int = 131_072
    link_bytes_per_s: float = 50e9  # from one instance to others
    # What a batch or chunk may take over what it is expected to take, equally likely each; none: it takes that.
    paces: tuple[float, ...] = ()
    seed: int = 0  # of which it takes

    def __post_init__(self) -> None:
        for name in ("slo_s", "slo_stretch", "short_slo_s", "chunk_s", "per_node", "link_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value} is not above 0")
        if not all(0 < pace < math.inf for pace in self.paces):
            raise ValueError(f"paces: {self.paces} are not all finite numbers above 0")


@dataclass(slots=True, eq=False)
class OrderedChunk:
    """A chunk that is ordered, until it has ended."""

    order: RunChunk
    compute_s: float
    missing: set[int]  # members that are not ready for it
    held_before: dict[int, int]  # of its request, by member
    ready_s: dict[int, float] = field(default_factory=dict)  # since when each of the others waits
    waited_s: float = 0.0  # by members that computed a batch meanwhile
    start_s: float = math.inf
    is_void: bool = False

    @property
    def is_running(self) -> bool:
        return self.start_s < math.inf

    @property
    def end_s(self) -> float:
        return self.start_s + self.compute_s


@dataclass(slots=True, eq=False)
class RunningBatch:
    """An iteration of ordinary work that runs."""

    iteration: Iteration
    sample: IterationSample
    start_s: float
    end_s: float
    is_void: bool = False


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """One instance of the pool: its queue, and what it is doing."""

    number: int
    policy: LapsPolicy
    free_tokens: int  # of KV
    items: list[WorkItem] = field(default_factory=list)
    batch: RunningBatch | None = None
    chunk: OrderedChunk | None = None
    owes_batch: bool = False  # a chunk has ended, and this turn's batch has not run yet
    computed_tokens: int = 0
    generation: int = 0  # a wake-up of an earlier one means nothing
    is_alive: bool = False

    def turn_end_s(self) -> float:
        """Return when the batch or the chunk that runs has ended; 0 where none runs. Orders are followed behind it."""
        if self.batch is not None:
            return self.batch.end_s
        return self.chunk.end_s if self.chunk is not None and self.chunk.is_running else 0.0


class KvHoldings:
    """The KV tokens that each request holds on each instance."""

    def __init__(self, members: Sequence[SimulatedMember]) -> None:
        self._members = members
        self._held: dict[int, dict[int, int]] = {}  # by request and instance

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def of(self, key: int) -> Mapping[int, int]:
        """Return what a request holds, by instance."""
        return self._held.get(key, {})

    def take(self, key: int, member: SimulatedMember, tokens: int) -> None:
        """Take `tokens` more slots of an instance for a request, or give them back where `tokens` is negative."""
        held = self._held.setdefault(key, {})
        held[member.number] = held.get(member.number, 0) + tokens
        member.free_tokens -= tokens

    def free(self, key: int) -> list[SimulatedMember]:
        """Give back all that a request holds; return the instances that it was on, which may have waited for it."""
        freed = []
        for number, tokens in self._held.pop(key, {}).items():
            self._members[number].free_tokens += tokens
            freed.append(self._members[number])
        return freed

    def lose(self, member: SimulatedMember) -> None:
        """Forget what was on an instance that has failed."""
        for held in self._held.values():
            held.pop(member.number, None)


class PoolTimes:
    """How long work takes in the pool. `costs`: of chunks, by the size of their group."""

    def __init__(
        self,
        options: OnePoolOptions,
        costs: Mapping[int, SpCost | TabulatedCost],
        own_costs: CostCoefficients,
        boundary_tokens: int,
    ) -> None:
        self._options = options
        self._costs = costs
        self._own = own_costs
        self._boundary_tokens = boundary_tokens
        self._draws = Random(f"paces {options.seed}")

    def draw_pace(self) -> float:
        """Return by how much longer than expected the next batch or chunk takes; each call draws."""
        return self._draws.choice(self._options.paces) if self._options.paces else 1.0

    def item_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Return how long new tokens of a prompt take in a batch, without what the batch itself costs."""
        own = self._own
        return own.alpha_s * new_tokens * (new_tokens + 2 * cached_tokens) + own.token_s * new_tokens

    def queued_s(self, member: SimulatedMember, holdings: KvHoldings, max_new_tokens: float = math.inf) -> float:
        """Return how long an instance's ordinary work takes, without the batch that runs.

        Prompts that have not begun and are longer than `max_new_tokens` are left out.
        """
        running = {} if member.batch is None else {id(item): tokens for item, tokens in member.batch.iteration.slices}
        work_s = 0.0
        for item in member.items:
            done = running.get(id(item), 0)
            if item.new_tokens > done and (item.new_tokens <= max_new_tokens or item.request.key in holdings):
                work_s += self.item_s(item.new_tokens - done, item.cached_tokens + done)
        return work_s + self._own.kappa_s if work_s else 0.0

    def shorts_s(self, member: SimulatedMember) -> float:
        """Return how long the short prompts take that wait at an instance."""
        waiting = [item for item in member.items if item.start_s is None and item.new_tokens <= self._boundary_tokens]
        work_s = sum(self.item_s(item.new_tokens, item.cached_tokens) for item in waiting)
        return work_s + self._own.kappa_s if waiting else 0.0

    def chunk_s(self, group: Sequence[int], cached_tokens: int, new_tokens: int) -> float:
        """Return how long a chunk takes on a group."""
        options = self._options
        compute_s = self._costs[len(group)].predict_s(cached_tokens, new_tokens)
        nodes = {number // options.per_node for number in group}
        if len(nodes) > 1 and len(group) <= options.per_node and options.cross_node_factor < math.inf:
            compute_s *= options.cross_node_factor
        return compute_s

    def move_s(self, moves: Iterable[KvMove]) -> float:
        """Return how long history is on its way: every instance sends over a link of its own, and receives over one."""
        options = self._options
        by_link: dict[tuple[str, int], int] = {}
        for move in moves:
            for link in (("out", move.source), ("in", move.target)):
                by_link[link] = by_link.get(link, 0) + move.tokens
        return max(by_link.values(), default=0) * options.kv_bytes_per_token / options.link_bytes_per_s
