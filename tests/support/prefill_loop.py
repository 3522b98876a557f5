"""One prefill instance in simulated time: arrivals, a cost model for the truth, a policy for each iteration.

No engine and no clock; what a policy must never do is asserted at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import PACKED, Composition, Laps
from sglang_ext.laps.decide.round_plan import (
    InstanceLimits,
    PrefillBatch,
    PriorityClass,
    QueuedPrefill,
    RoundPlan,
    RoundSnapshot,
)
from sglang_ext.types import LengthClass
from support.graph_grids import full_grid

SHORT, LONG = LengthClass.SHORT, LengthClass.LONG
CPU = CostCoefficients(alpha_s=5e-9, token_s=4e-5, read_s=1e-7, kappa_s=2e-3)
GPU = CostCoefficients(alpha_s=2e-10, token_s=5e-6, read_s=1e-8, kappa_s=1e-2)
GRID = full_grid((8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64))
LIMITS = InstanceLimits(page_tokens=1, max_chunk_tokens=8192, max_batch_tokens=8192, max_requests=64)


class Arrival(NamedTuple):
    """A request of the workload."""

    at_s: float
    new_tokens: int
    cached_tokens: int = 0
    ttft_slo_s: float | None = None
    priority: PriorityClass = PriorityClass.NORMAL


@dataclass
class Ended:
    """A prefill that has ended."""

    length_class: LengthClass
    ttft_s: float
    is_late: bool
    total_tokens: int


@dataclass
class Step:
    """A batch that was carried out."""

    now_s: float
    batch: PrefillBatch
    snapshot: RoundSnapshot
    duration_s: float


@dataclass
class Outcome:
    """A finished run."""

    ended: list[Ended] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    end_s: float = 0.0

    def ttfts_s(self, length_class: LengthClass) -> list[float]:
        return sorted(item.ttft_s for item in self.ended if item.length_class is length_class)

    def ttft_s(self, length_class: LengthClass, quantile: float) -> float:
        ttfts_s = self.ttfts_s(length_class)
        return ttfts_s[min(int(quantile * len(ttfts_s)), len(ttfts_s) - 1)]

    def late(self) -> int:
        return sum(item.is_late for item in self.ended)


def policy(
    truth: CostCoefficients = CPU,
    grid: GraphGrid | None = None,
    limits: InstanceLimits = LIMITS,
    composition: Composition = PACKED,
    **options: object,
) -> Laps:
    chosen = LapsOptions(**{"boundary_tokens": 256} | options)  # type: ignore[arg-type]
    return Laps(chosen, grid or GraphGrid(), truth, limits, composition)


def mixed(random: Random, count: int, load: float, truth: CostCoefficients, long_share: float = 0.25) -> list[Arrival]:
    """Poisson arrivals of short and long prompts that keep the machine busy for this share of the time."""
    lengths = [
        int(2 ** random.uniform(8.5, 12)) if random.random() < long_share else int(2 ** random.uniform(3, 7.5))
        for _ in range(count)
    ]
    mean_s = sum(truth.chunk_s(length, 0) for length in lengths) / count
    now_s, arrivals = 0.0, []
    for length in lengths:
        now_s += random.expovariate(load / mean_s)
        arrivals.append(Arrival(now_s, length))
    return arrivals


def check_plan(snapshot: RoundSnapshot, plan: RoundPlan, limits: InstanceLimits = LIMITS) -> None:
    """What holds for every plan, whatever the policy had in mind."""
    queue = {request.key: request for request in snapshot.queue}
    for batch in plan.batches:
        assert batch.predicted_s > 0
        assert len(set(batch.keys)) == len(batch.keys) >= 1
        members = [queue[key] for key in batch.whole]
        whole_tokens = sum(member.new_tokens for member in members)
        shorts = members[: batch.short_requests]
        assert not any(short.is_started for short in shorts)
        longs = [member for member in shorts if member.length_class is LengthClass.LONG]
        assert all(snapshot.now_s - long.arrival_s >= 2 * (long.deadline_s - long.arrival_s) for long in longs)
        assert sum(queue[key].is_started for key in batch.keys) <= 1
        assert len(batch.keys) <= limits.max_requests
        assert batch.new_tokens <= limits.max_batch_tokens or len(batch.keys) == 1
        if batch.shape is not None:
            assert batch.is_short
            assert len(members) <= batch.shape.slots
            assert max(member.new_tokens for member in members) <= batch.shape.length_tokens
        if batch.cut is None:
            assert whole_tokens == batch.new_tokens
        else:
            cut = queue[batch.cut.key]
            assert 0 < batch.cut.tokens < cut.new_tokens
            assert batch.cut.tokens <= limits.max_chunk_tokens
            assert batch.cut.tokens % limits.page_tokens == 0
            assert whole_tokens + batch.cut.tokens == batch.new_tokens
    if not plan.batches:
        assert plan.wake_s > snapshot.now_s


def run_laps(
    laps: Laps,
    arrivals: Sequence[Arrival],
    truth: CostCoefficients,
    *,
    kv_tokens: int = 1_000_000,
    limits: InstanceLimits = LIMITS,
    noise: Callable[[], float] = lambda: 1.0,
    shape_is_padded: bool = True,
    max_steps: int = 1_000_000,
    is_compared: bool = False,
) -> Outcome:
    """Serve the arrivals to the end. A prefill holds KV from its first chunk to its end.

    `is_compared`: each decision is made on a new queue as well, and must be the same. No costs are learned then: a
    request's place in the kept queue depends on what it should have cost when it came.

    AssertionError when a plan breaks a rule, memory is exceeded, or nothing moves although something could.
    """
    outcome = Outcome()
    pending = sorted(enumerate(arrivals), key=lambda item: item[1].at_s, reverse=True)
    queue: dict[int, QueuedPrefill] = {}
    now_s = 0.0
    used_tokens = 0
    for _ in range(max_steps):
        while pending and pending[-1][1].at_s <= now_s:
            key, arrival = pending.pop()
            length_class = laps.classify(arrival.new_tokens, arrival.cached_tokens)
            deadline_s = laps.deadline_s(
                length_class,
                arrival.new_tokens,
                arrival.cached_tokens,
                arrival.at_s,
                arrival.ttft_slo_s,
                arrival.priority,
            )
            laps.record_arrival(arrival.at_s, length_class, arrival.new_tokens, arrival.cached_tokens, deadline_s)
            queue[key] = QueuedPrefill(
                key,
                length_class,
                arrival.new_tokens,
                arrival.cached_tokens,
                arrival.new_tokens,
                arrival.at_s,
                deadline_s,
                arrival.priority,
                is_started=False,
                is_current=False,
            )
            laps.put(queue[key], now_s)
        if not queue and not pending:
            outcome.end_s = now_s
            return outcome
        snapshot = RoundSnapshot(now_s, tuple(queue.values()), kv_tokens - used_tokens)
        assert {ranked.request.key: ranked.request for ranked in laps.queue} == queue, "what is kept is what waits"
        plan = laps.choose(now_s, kv_tokens - used_tokens)
        assert plan == laps.choose_of(snapshot) or not is_compared, "the queue that is kept decides as a new one"
        check_plan(snapshot, plan, limits)
        batch = next((batch for batch in plan.batches if batch.new_tokens <= kv_tokens - used_tokens), None)
        if batch is None:
            next_s = pending[-1][1].at_s if pending else inf
            wake_s = plan.wake_s if not plan.batches else inf
            assert min(next_s, wake_s) < inf, f"stuck at {now_s}: {snapshot}"
            now_s = max(now_s, min(next_s, wake_s))
            continue
        laps.record_dispatch(now_s, batch)
        sample = _features(batch, queue, truth, shape_is_padded)
        sample = sample._replace(duration_s=sample.duration_s * noise())
        outcome.steps.append(Step(now_s, batch, snapshot, sample.duration_s))
        now_s += sample.duration_s
        if not is_compared:
            laps.record_iteration(sample)
        if not batch.is_short:
            queue = {key: replace(request, is_current=False) for key, request in queue.items()}
        if batch.cut is not None:
            request, tokens = queue[batch.cut.key], batch.cut.tokens
            used_tokens += tokens
            queue[batch.cut.key] = replace(
                request,
                new_tokens=request.new_tokens - tokens,
                cached_tokens=request.cached_tokens + tokens,
                is_started=True,
                is_current=True,
            )
        for key in batch.whole:
            if queue[key].is_started:
                used_tokens -= queue[key].total_tokens - queue[key].new_tokens
        assert 0 <= used_tokens <= kv_tokens
        for key in batch.whole:
            request = queue.pop(key)
            laps.record_first_token(now_s, request.length_class, request.arrival_s, request.deadline_s)
            outcome.ended.append(
                Ended(request.length_class, now_s - request.arrival_s, now_s > request.deadline_s, request.total_tokens)
            )
    raise AssertionError(f"not done after {max_steps} steps, {len(queue)} waiting at {now_s}")


def _features(
    batch: PrefillBatch, queue: dict[int, QueuedPrefill], truth: CostCoefficients, shape_is_padded: bool
) -> IterationSample:
    lengths = [(queue[key].new_tokens, queue[key].cached_tokens) for key in batch.whole]
    if batch.cut is not None:
        lengths.append((batch.cut.tokens, queue[batch.cut.key].cached_tokens))
    attention_work = float(sum(new * (new + 2 * cached) for new, cached in lengths))
    new_tokens, cached_tokens = sum(new for new, _ in lengths), sum(cached for _, cached in lengths)
    if batch.shape is not None and shape_is_padded:
        new_tokens = batch.shape.tokens
    is_replayed = batch.shape is not None
    duration_s = truth.iteration_s(attention_work, new_tokens, cached_tokens, len(lengths), is_replayed)
    return IterationSample(attention_work, new_tokens, cached_tokens, len(lengths), duration_s, is_replayed)


# -- requests, and decisions about a queue that is given whole ----------------------------------------------------


def queued(key: int, new_tokens: int, **changes: object) -> QueuedPrefill:
    """A request of this length, with changes of its fields; its deadline is far."""
    length_class = SHORT if new_tokens <= 256 else LONG
    request = QueuedPrefill(key, length_class, new_tokens, 0, new_tokens, 0.0, 1e6, PriorityClass.NORMAL, False, False)
    return replace(request, **changes)  # type: ignore[arg-type]


def offline(key: int, new_tokens: int, **changes: object) -> QueuedPrefill:
    """The same without a deadline."""
    return queued(key, new_tokens, deadline_s=inf, priority=PriorityClass.LOW, **changes)


def first_action(laps: Laps, now_s: float, *queue: QueuedPrefill) -> PrefillBatch:
    """Return what would run first."""
    return laps.choose_of(RoundSnapshot(now_s, queue, 10**6)).batches[0]


def check_offline_chunks(laps: Laps, largest_s: float, yield_s: float) -> None:
    """Chunks without a deadline are large, at most `largest_s`, while no client is near, and else at most `yield_s`."""

    def chunk_s(now_s: float) -> float:
        batch = first_action(laps, now_s, offline(1, 20_000))
        assert not batch.is_short
        return batch.predicted_s

    large_s = chunk_s(100.0)
    assert first_action(laps, 100.0, queued(1, 20_000)).predicted_s < large_s <= largest_s
    laps.record_arrival(95.0, SHORT, 20, 0, 95.4)
    assert chunk_s(100.0) <= yield_s
    laps.record_arrival(99.0, SHORT, 20, 0, inf)
    assert chunk_s(100.0) <= yield_s
    assert abs(chunk_s(105.5) - large_s) <= 1e-9 * large_s
