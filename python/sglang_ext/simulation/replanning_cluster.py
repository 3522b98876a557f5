"""A sequence-parallel prefill cluster that plans again, at every arrival and failure, all that has not started.

The plans are those of `sglang_ext.policy.cdsp.replanning`. A chunk that runs is never touched; with a time budget a
longer one is cut when it starts, and all is planned again at its end. A begun request holds the KV of what it has
computed on its group until its end. Costs are exact, as in `cluster.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_ext.policy.cdsp.improvement_rate import ImprovementRateSource
from sglang_ext.policy.cdsp.plan import ChunkPlan, NoPlan, PlannedChunk, PlannerConfig, PrefillSnapshot
from sglang_ext.policy.cdsp.planner import CdspPlanner
from sglang_ext.policy.cdsp.replanning import PendingPrefill, ReplanMode, ideal_prefill_s, replan, tokens_within
from sglang_ext.policy.cdsp.sp_cost import SpCandidate
from sglang_ext.simulation.cluster import ClusterSpec, Failure
from sglang_ext.simulation.events import (
    BusyInterval,
    EventLoop,
    PrefillListener,
    ServedPrefill,
    SimRequest,
)


@dataclass(frozen=True, slots=True)
class ReplanOptions:
    """ValueError for a time or factor that is not above 0."""

    mode: ReplanMode
    slo_s: float = 1.0  # TTFT objective of a prompt, or
    slo_stretch: float = 5.0  # this many times its time on an idle cluster if that is more
    min_chunk_tokens: int = 512
    chunk_s: float | None = None  # longest time of a chunk, or
    chunk_overheads: float = 10.0  # this many times what every chunk on its group costs anew if that is more

    def __post_init__(self) -> None:
        if self.mode is ReplanMode.OFF:
            raise ValueError("mode: off is a PlannedCluster")
        for name in ("slo_s", "slo_stretch", "chunk_s", "chunk_overheads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value} is not above 0")


@dataclass(slots=True, eq=False)
class _Progress:
    """A request that has no first token yet."""

    request: SimRequest
    deadline_s: float
    ideal_s: float
    new_tokens: int
    cached_tokens: int
    group: tuple[int, ...] = ()  # ids of instances
    held_tokens: int = 0  # KV on each member of its group
    start_s: float | None = None
    chunk_end_s: float = 0.0
    is_lost: bool = False


class _Start:
    """A planned chunk: whose, on which instances (ids), from when (absolute)."""

    __slots__ = ("at_s", "chunk", "group", "progress")

    def __init__(self, at_s: float, progress: _Progress, chunk: PlannedChunk, group: tuple[int, ...]) -> None:
        self.at_s, self.progress, self.chunk, self.group = at_s, progress, chunk, group


class ReplanningCluster:
    """See the module."""

    def __init__(
        self,
        loop: EventLoop,
        spec: ClusterSpec,
        candidates: Sequence[SpCandidate],
        options: ReplanOptions,
        rates: ImprovementRateSource,
        listener: PrefillListener,
        is_recorded: bool,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._options = options
        self._rates = rates
        self._listener = listener
        self._planner = CdspPlanner(PlannerConfig(tuple(candidates), min_chunk_tokens=options.min_chunk_tokens))
        self._costs = {candidate.size: candidate.cost for candidate in candidates}
        self._busy_s = [0.0] * spec.instances  # end of the running chunk
        self._held_tokens = [0] * spec.instances
        self._alive = list(range(spec.instances))
        self._progress: dict[int, _Progress] = {}
        self._starts: list[_Start] = []  # planned, latest first
        self._generation = 0
        self._is_blocked = False  # a request has no plan
        self._is_recorded = is_recorded
        self.timeline: list[BusyInterval] = []

    def arrive(self, request: SimRequest) -> None:
        self._rates.note_arrival(self._loop.now_s)
        ideal_s = ideal_prefill_s(tuple(self._costs.values()), request.cached_tokens, request.new_tokens)
        objective_s = max(self._options.slo_s, self._options.slo_stretch * ideal_s)
        self._progress[request.key] = _Progress(
            request, request.arrival_s + objective_s, ideal_s, request.new_tokens, request.cached_tokens
        )
        self._plan_again()

    def schedule_failure(self, failure: Failure) -> None:
        """ValueError for an instance that does not exist."""
        if not 0 <= failure.instance < self._spec.instances:
            raise ValueError(f"instance {failure.instance} does not exist, there are {self._spec.instances}")
        self._loop.schedule(failure.at_s, self._fail, failure)

    def unfinished(self) -> Iterable[SimRequest]:
        return [progress.request for progress in self._progress.values()]

    # ---- planning ----

    def _plan_again(self) -> None:
        now_s = self._loop.now_s
        alive = self._alive
        self._generation += 1
        self._starts = []
        self._is_blocked = not alive
        waiting = [progress for progress in self._progress.values() if progress.new_tokens > 0]
        if not waiting or not alive:
            return
        position = {instance: index for index, instance in enumerate(alive)}
        pending = [
            PendingPrefill(
                progress.request.key,
                progress.new_tokens,
                progress.cached_tokens,
                tuple(position[instance] for instance in progress.group),
                progress.request.arrival_s,
                progress.deadline_s,
                progress.ideal_s,
            )
            for progress in waiting
        ]
        running = PrefillSnapshot(
            [instance // self._spec.instances_per_node for instance in alive],
            [max(0.0, self._busy_s[instance] - now_s) for instance in alive],
            [self._spec.kv_tokens - self._held_tokens[instance] for instance in alive],
        )
        mode, rate, is_cutting = self._options.mode, self._rates.current, self._options.chunk_s is not None
        for key, plan in replan(self._planner, mode, now_s, running, pending, rate, until_busy=is_cutting):
            if isinstance(plan, NoPlan):
                self._refuse_or_wait(self._progress[key])
            else:
                self._note_starts(self._progress[key], plan, now_s)
        self._starts.reverse()
        self._starts.sort(key=lambda start: -start.at_s)  # stable: of equal times, the first planned is last
        self._start_due(self._generation)

    def _note_starts(self, progress: _Progress, plan: ChunkPlan, now_s: float) -> None:
        alive = self._alive
        for chunk in plan.chunks:
            group = tuple(alive[index] for index in chunk.instances)
            self._starts.append(_Start(now_s + chunk.start_s, progress, chunk, group))

    def _refuse_or_wait(self, progress: _Progress) -> None:
        is_idle = len(self._alive) == self._spec.instances and not any(self._held_tokens)
        if is_idle and not progress.group:
            del self._progress[progress.request.key]
            self._listener.on_refused(progress.request)
        else:
            self._is_blocked = True

    # ---- carrying out ----

    def _start_due(self, generation: int) -> None:
        """Start what is due, unless the plan has changed since this was scheduled."""
        if generation != self._generation:
            return
        # Sums of times may differ from the ends they stand for in the last digits.
        due_s = self._loop.now_s + 1e-9
        while self._starts and self._starts[-1].at_s <= due_s:
            self._start(self._starts.pop())
        if self._starts:
            self._loop.schedule(self._starts[-1].at_s, self._start_due, generation)

    def _start(self, start: _Start) -> None:
        progress, chunk, group = start.progress, start.chunk, start.group
        start_s = max(start.at_s, self._loop.now_s, *(self._busy_s[instance] for instance in group))
        tokens, compute_s = self._cut(progress, chunk, len(group))
        end_s = start_s + compute_s
        if progress.start_s is None:
            progress.start_s = start_s
        self._hold(progress, (), 0)
        progress.new_tokens -= tokens
        progress.cached_tokens += tokens
        progress.chunk_end_s = end_s
        self._hold(progress, group, -(-progress.cached_tokens // len(group)))
        for instance in group:
            self._busy_s[instance] = end_s
        if self._is_recorded:
            key = progress.request.key
            self.timeline += [BusyInterval(instance, start_s, end_s, key) for instance in group]
        if progress.new_tokens == 0:
            self._loop.schedule(end_s, self._end, progress)
        elif self._options.chunk_s is not None:
            self._loop.schedule(end_s, self._end_part, progress)

    def _cut(self, progress: _Progress, chunk: PlannedChunk, size: int) -> tuple[int, float]:
        """Tokens and time of what is run of a chunk."""
        chunk_s = self._options.chunk_s
        if chunk_s is None or chunk.compute_s <= chunk_s:
            return chunk.tokens, chunk.compute_s
        cost = self._costs[size]
        budget_s = max(chunk_s, self._options.chunk_overheads * cost.predict_s(0, 0))
        if chunk.compute_s <= budget_s:
            return chunk.tokens, chunk.compute_s
        fitting = tokens_within(cost, progress.cached_tokens, chunk.tokens, budget_s)
        tokens = min(chunk.tokens, max(self._options.min_chunk_tokens, fitting))
        return tokens, cost.predict_s(progress.cached_tokens, tokens)

    def _hold(self, progress: _Progress, group: tuple[int, ...], tokens: int) -> None:
        for instance in progress.group:
            self._held_tokens[instance] -= progress.held_tokens
        progress.group, progress.held_tokens = group, tokens
        for instance in group:
            self._held_tokens[instance] += tokens

    def _end(self, progress: _Progress) -> None:
        if progress.is_lost:
            return
        self._hold(progress, (), 0)
        del self._progress[progress.request.key]
        assert progress.start_s is not None
        self._listener.on_first_token(ServedPrefill(progress.request, progress.start_s, progress.chunk_end_s))
        if self._is_blocked or self._options.chunk_s is not None:
            self._plan_again()

    def _end_part(self, progress: _Progress) -> None:
        if not progress.is_lost:
            self._plan_again()

    def _fail(self, failure: Failure) -> None:
        if failure.instance not in self._alive:
            return
        now_s = self._loop.now_s
        for key, progress in list(self._progress.items()):
            if failure.instance not in progress.group:
                continue
            # Part of its KV is gone: it starts again from its cached prefix.
            if progress.chunk_end_s > now_s:
                for instance in progress.group:
                    self._busy_s[instance] = now_s
                self._cut_timeline(key, now_s)
            self._hold(progress, (), 0)
            progress.is_lost = True
            request = progress.request
            self._progress[key] = _Progress(
                request, progress.deadline_s, progress.ideal_s, request.new_tokens, request.cached_tokens
            )
        self._alive = [instance for instance in self._alive if instance != failure.instance]
        self._loop.schedule(now_s + failure.down_s, self._recover, failure.instance)
        self._plan_again()

    def _cut_timeline(self, key: int, now_s: float) -> None:
        self.timeline = [
            busy._replace(end_s=now_s) if busy.key == key and busy.end_s > now_s else busy for busy in self.timeline
        ]

    def _recover(self, instance: int) -> None:
        self._alive = sorted([*self._alive, instance])
        self._busy_s[instance] = self._loop.now_s
        self._plan_again()
