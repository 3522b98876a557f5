"""One prefill instance in simulated time: arrivals, a cost model for the truth, a policy for each iteration.

No engine and no clock; what a policy must never do is asserted at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import NamedTuple

from sglang_ext.policy.laps.cost_model import CostCoefficients, IterationSample
from sglang_ext.policy.laps.graph_grid import GraphGrid
from sglang_ext.policy.laps.options import LapsOptions
from sglang_ext.policy.laps.policy import Laps
from sglang_ext.policy.laps.round_plan import (
    InstanceLimits,
    LongChunk,
    PriorityClass,
    QueuedPrefill,
    RoundPlan,
    RoundSnapshot,
    ShortBatch,
)
from sglang_ext.types import LengthClass

SHORT, LONG = LengthClass.SHORT, LengthClass.LONG
CPU = CostCoefficients(alpha_s=5e-9, token_s=4e-5, read_s=1e-7, kappa_s=2e-3)
GPU = CostCoefficients(alpha_s=2e-10, token_s=5e-6, read_s=1e-8, kappa_s=1e-2)
GRID = GraphGrid.from_product((8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64))
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
    """An action that was carried out."""

    now_s: float
    action: ShortBatch | LongChunk
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
    truth: CostCoefficients = CPU, grid: GraphGrid | None = None, limits: InstanceLimits = LIMITS, **options: object
) -> Laps:
    chosen = LapsOptions(**{"boundary_tokens": 256} | options)  # type: ignore[arg-type]
    return Laps(chosen, grid or GraphGrid(), truth, limits)


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
    for action in plan.actions:
        assert action.predicted_s > 0
        if isinstance(action, ShortBatch):
            assert len(set(action.keys)) == len(action.keys) >= 1
            members = [queue[key] for key in action.keys]
            assert all(member.length_class is LengthClass.SHORT for member in members)
            assert sum(member.new_tokens for member in members) == action.new_tokens
            assert len(members) <= limits.max_requests
            assert action.new_tokens <= limits.max_batch_tokens or len(members) == 1
            if action.shape is not None:
                assert len(members) <= action.shape.slots
                assert max(member.new_tokens for member in members) <= action.shape.length_tokens
        else:
            remaining_tokens = queue[action.key].new_tokens
            assert 0 < action.chunk_tokens <= remaining_tokens
            assert action.chunk_tokens <= limits.max_chunk_tokens
            assert action.chunk_tokens == remaining_tokens or action.chunk_tokens % limits.page_tokens == 0
    if not plan.actions:
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
) -> Outcome:
    """Serve the arrivals to the end. A prefill holds KV from its first chunk to its end.

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
            laps.note_arrival(arrival.at_s, length_class, arrival.new_tokens, arrival.cached_tokens, deadline_s)
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
        if not queue and not pending:
            outcome.end_s = now_s
            return outcome
        snapshot = RoundSnapshot(now_s, tuple(queue.values()), kv_tokens - used_tokens)
        plan = laps.choose(snapshot)
        check_plan(snapshot, plan, limits)
        action = next((action for action in plan.actions if _tokens(action) <= kv_tokens - used_tokens), None)
        if action is None:
            next_s = pending[-1][1].at_s if pending else inf
            wake_s = plan.wake_s if not plan.actions else inf
            assert min(next_s, wake_s) < inf, f"stuck at {now_s}: {snapshot}"
            now_s = max(now_s, min(next_s, wake_s))
            continue
        laps.note_dispatch(snapshot, action)
        sample = _features(action, queue, truth, shape_is_padded)
        sample = sample._replace(duration_s=sample.duration_s * noise())
        outcome.steps.append(Step(now_s, action, snapshot, sample.duration_s))
        now_s += sample.duration_s
        laps.note_iteration(sample)
        ended = action.keys if isinstance(action, ShortBatch) else ()
        if isinstance(action, LongChunk):
            queue = {key: request._replace(is_current=False) for key, request in queue.items()}
            request = queue[action.key]
            used_tokens += action.chunk_tokens
            queue[action.key] = request._replace(
                new_tokens=request.new_tokens - action.chunk_tokens,
                cached_tokens=request.cached_tokens + action.chunk_tokens,
                is_started=True,
                is_current=True,
            )
            if queue[action.key].new_tokens == 0:
                ended = (action.key,)
                used_tokens -= request.total_tokens
        assert 0 <= used_tokens <= kv_tokens
        for key in ended:
            request = queue.pop(key)
            laps.note_first_token(now_s, request.length_class, request.arrival_s, request.deadline_s)
            outcome.ended.append(
                Ended(request.length_class, now_s - request.arrival_s, now_s > request.deadline_s, request.total_tokens)
            )
    raise AssertionError(f"not done after {max_steps} steps, {len(queue)} waiting at {now_s}")


def _tokens(action: ShortBatch | LongChunk) -> int:
    return action.new_tokens if isinstance(action, ShortBatch) else action.chunk_tokens


def _features(
    action: ShortBatch | LongChunk, queue: dict[int, QueuedPrefill], truth: CostCoefficients, shape_is_padded: bool
) -> IterationSample:
    if isinstance(action, LongChunk):
        lengths = [(action.chunk_tokens, queue[action.key].cached_tokens)]
    else:
        lengths = [(queue[key].new_tokens, queue[key].cached_tokens) for key in action.keys]
    attention_work = float(sum(new * (new + 2 * cached) for new, cached in lengths))
    new_tokens, cached_tokens = sum(new for new, _ in lengths), sum(cached for _, cached in lengths)
    is_replayed = isinstance(action, ShortBatch) and action.shape is not None
    if isinstance(action, ShortBatch) and action.shape is not None and shape_is_padded:
        new_tokens = action.shape.tokens
    duration_s = truth.iteration_s(attention_work, new_tokens, cached_tokens, len(lengths), is_replayed)
    return IterationSample(attention_work, new_tokens, cached_tokens, len(lengths), duration_s, is_replayed)
