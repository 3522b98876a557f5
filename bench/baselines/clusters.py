"""A sequence-parallel cluster that plans a prompt once: CDSP, its parts, and what it is compared with.

`PlannedCluster` plans on arrival, first come first served, behind what is committed already; `IdleCluster` as
LoongServe does, on the instances that are idle. A plan is for the snapshot that it was made from, as
`sglang_ext.long_pool.decide` has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baselines.tetris_planner import (
    CdspPlanner,
    CdspRequest,
    ChunkPlan,
    NoPlan,
    NoPlanReason,
    PlannedChunk,
    PlannerConfig,
)
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec, Failure
from sglang_ext.planner.simulation.events import (
    BusyInterval,
    EventLoop,
    PlannedChunks,
    PrefillListener,
    ServedPrefill,
    SimRequest,
)

GREEDY_RATE = 0.0


class ClusterPolicy(Protocol):
    """Plans a prompt. Only `record_arrival` changes something."""

    def record_arrival(self, now_s: float) -> None:
        """A request has arrived that is to be planned."""
        ...

    def plan(self, snapshot: PrefillSnapshot, request: CdspRequest) -> ChunkPlan | NoPlan: ...


class CdspPolicy:
    """Tetris: Algorithms 1-3; without chunking, only Algorithm 2."""

    def __init__(
        self,
        candidates: Sequence[SpCandidate],
        improvement_rate: float,
        *,
        is_chunking: bool = True,
        min_chunk_tokens: int = 512,
    ) -> None:
        self.planner = CdspPlanner(
            PlannerConfig(tuple(candidates), min_chunk_tokens=min_chunk_tokens, is_chunking=is_chunking)
        )
        self._improvement_rate = improvement_rate

    def record_arrival(self, now_s: float) -> None:
        """The load does not matter."""

    def plan(self, snapshot: PrefillSnapshot, request: CdspRequest) -> ChunkPlan | NoPlan:
        return self.planner.plan(snapshot, request, self._improvement_rate)


def greedy_esp(candidates: Sequence[SpCandidate]) -> CdspPolicy:
    """LoongServe's prefill scheduler with one request per batch, disaggregated (Tetris, sections 2.4 and 7.1).

    The size with the lowest time to first token of this request, queues counted, however small the gain: Algorithm 2
    with an improvement rate of 0. So it takes SP 16 in the example of section 2.4, as printed there.
    """
    return CdspPolicy(candidates, GREEDY_RATE, is_chunking=False)


class FixedSp:
    """Independent groups of a fixed size, consecutive instances; the one with the lowest queue delay (section 7.1).

    Instances that do not fill a group stay idle. ValueError for a size that has no cost.
    """

    def __init__(self, candidates: Sequence[SpCandidate], size: int) -> None:
        costs = {candidate.size: candidate.cost for candidate in candidates}
        if size not in costs:
            raise ValueError(
                f"SP size {size} has no cost; there are {', '.join(str(known) for known in sorted(costs))}"
            )
        self.size = size
        self._cost = costs[size]

    def record_arrival(self, now_s: float) -> None:
        """The load does not matter."""

    def plan(self, snapshot: PrefillSnapshot, request: CdspRequest) -> ChunkPlan | NoPlan:
        size = self.size
        delays_s = snapshot.queue_delays_s
        if len(delays_s) < size:
            return NoPlan(NoPlanReason.TOO_FEW_INSTANCES)
        share_tokens = -(-(request.cached_tokens + request.new_tokens) // size)
        choices = [
            _Group(max(delays_s[first : first + size]), first)
            for first in range(0, len(delays_s) - size + 1, size)
            if min(snapshot.free_kv_tokens[first : first + size]) >= share_tokens
        ]
        if not choices:
            return NoPlan(NoPlanReason.KV_CAPACITY)
        delay_s, first = min(choices)
        compute_s = self._cost.predict_s(request.cached_tokens, request.new_tokens)
        if compute_s == float("inf"):
            return NoPlan(NoPlanReason.COST_UNKNOWN)
        members = tuple(range(first, first + size))
        chunk = PlannedChunk(request.cached_tokens, request.new_tokens, members, delay_s, compute_s)
        return ChunkPlan((chunk,), delay_s + compute_s)


class _Group(NamedTuple):
    delay_s: float
    first: int


class _KeptKv:
    """Describes what instances hold of prompts that have ended and are not with decode yet."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.free_tokens = [spec.kv_tokens] * spec.instances
        self.is_wanted = False  # else a prompt's KV is gone when it has ended
        self._held: dict[int, tuple[tuple[int, ...], int]] = {}  # by request: instances, tokens of each

    def __bool__(self) -> bool:
        return bool(self._held)

    def keep(self, request: SimRequest, group: tuple[int, ...]) -> None:
        if self.is_wanted:
            self._held[request.key] = group, -(-request.prompt_tokens // len(group))
            self._add(group, -self._held[request.key][1])

    def free(self, request: SimRequest) -> None:
        held = self._held.pop(request.key, None)
        if held is not None:
            self._add(*held)

    def _add(self, group: tuple[int, ...], tokens: int) -> None:
        for instance in group:
            self.free_tokens[instance] += tokens


@dataclass(slots=True, eq=False)
class _Committed:
    """A plan that is being carried out; `instances` of its chunks are ids of instances, not positions."""

    request: SimRequest
    planned_s: float
    end_s: float
    chunks: tuple[PlannedChunk, ...]
    is_lost: bool = False


class PlannedCluster:
    """Plans every request on arrival and keeps the plan."""

    def __init__(
        self, loop: EventLoop, spec: ClusterSpec, policy: ClusterPolicy, listener: PrefillListener, is_recorded: bool
    ) -> None:
        self._loop = loop
        self._policy = policy
        self._listener = listener
        self._spec = spec
        self._free_s = [0.0] * spec.instances  # end of the last reservation
        self._nodes = [instance // spec.instances_per_node for instance in range(spec.instances)]
        self._alive = list(range(spec.instances))
        self._view_nodes = tuple(self._nodes)
        self._kept = _KeptKv(spec)
        self._committed: dict[int, _Committed] = {}
        self._waiting: dict[int, SimRequest] = {}  # no plan while instances are down, or hold too much
        self._is_recorded = is_recorded
        self.timeline: list[BusyInterval] = []
        self.plans: list[PlannedChunks] = []

    def arrive(self, request: SimRequest) -> None:
        self._policy.record_arrival(self._loop.now_s)
        self._plan(request)

    def _plan(self, request: SimRequest) -> None:
        now_s = self._loop.now_s
        free_s = self._free_s
        delays_s = [free_s[instance] - now_s if free_s[instance] > now_s else 0.0 for instance in self._alive]
        if not delays_s:
            self._waiting[request.key] = request
            return
        free_tokens: Sequence[int] = self._kept.free_tokens
        if len(self._alive) < self._spec.instances:
            free_tokens = [free_tokens[instance] for instance in self._alive]
        plan = self._policy.plan(
            PrefillSnapshot(self._view_nodes, delays_s, free_tokens),
            CdspRequest(request.prompt_tokens - request.cached_tokens, request.cached_tokens),
        )
        if isinstance(plan, NoPlan):
            if len(self._alive) == self._spec.instances and not self._kept:
                self._listener.on_refused(request)
            else:
                self._waiting[request.key] = request
            return
        self._commit(request, plan, now_s)

    def schedule_failure(self, failure: Failure) -> None:
        """ValueError for an instance that does not exist."""
        if not 0 <= failure.instance < self._spec.instances:
            raise ValueError(f"instance {failure.instance} does not exist, there are {self._spec.instances}")
        self._loop.schedule(failure.at_s, self._fail, failure)

    def unfinished(self) -> Iterable[SimRequest]:
        return [*(one.request for one in self._committed.values()), *self._waiting.values()]

    def keep_until_transferred(self) -> None:
        """Hold the KV of an ended prompt until `transferred`, from now on."""
        self._kept.is_wanted = True

    def transferred(self, request: SimRequest) -> None:
        """Decode has the KV of a prompt that has ended."""
        self._kept.free(request)
        self._plan_waiting()

    def _commit(self, request: SimRequest, plan: ChunkPlan, now_s: float) -> None:
        chunks = plan.chunks
        if len(self._alive) < self._spec.instances:
            alive = self._alive
            chunks = tuple(
                chunk._replace(instances=tuple(alive[position] for position in chunk.instances)) for chunk in chunks
            )
        end_s = now_s + plan.ttft_s
        committed = _Committed(request, now_s, end_s, chunks)
        for instance in chunks[-1].instances:
            self._free_s[instance] = end_s
        self._committed[request.key] = committed
        self._loop.schedule(end_s, self._end, committed)

    def _end(self, committed: _Committed) -> None:
        if committed.is_lost:
            return
        request = committed.request
        del self._committed[request.key]
        if self._is_recorded:
            self._record(committed, committed.end_s)
        self._kept.keep(request, committed.chunks[-1].instances)
        start_s = committed.planned_s + committed.chunks[0].start_s
        self._listener.on_first_token(ServedPrefill(request, start_s, committed.end_s))

    def _record(self, committed: _Committed, until_s: float) -> None:
        key = committed.request.key
        left = tuple((chunk.tokens, chunk.instances) for chunk in committed.chunks)
        self.plans.append(PlannedChunks(committed.planned_s, key, left))
        for number, chunk in enumerate(committed.chunks, 1):
            start_s = committed.planned_s + chunk.start_s
            if start_s < until_s:
                self.plans.append(PlannedChunks(start_s, key, left[number:]))
            end_s = min(start_s + chunk.compute_s, until_s)
            if start_s < end_s:
                self.timeline += [
                    BusyInterval(
                        instance, start_s, end_s, committed.request.key, tokens=chunk.tokens, group=chunk.instances
                    )
                    for instance in chunk.instances
                ]

    def _fail(self, failure: Failure) -> None:
        if failure.instance not in self._alive:
            return
        now_s = self._loop.now_s
        self._set_alive([instance for instance in self._alive if instance != failure.instance])
        lost = [one for one in self._committed.values() if failure.instance in one.chunks[-1].instances]
        for committed in lost:
            committed.is_lost = True
            if self._is_recorded:
                self._record(committed, now_s)
                self.plans.append(PlannedChunks(now_s, committed.request.key, ()))
            del self._committed[committed.request.key]
        self._free_s = [now_s] * self._spec.instances
        for committed in self._committed.values():
            for instance in committed.chunks[-1].instances:
                self._free_s[instance] = max(self._free_s[instance], committed.end_s)
        for committed in sorted(lost, key=lambda one: (one.request.arrival_s, one.request.key)):
            self._plan(committed.request)
        self._loop.schedule(now_s + failure.down_s, self._recover, failure.instance)

    def _recover(self, instance: int) -> None:
        self._set_alive(sorted([*self._alive, instance]))
        self._plan_waiting()

    def _plan_waiting(self) -> None:
        waiting = sorted(
            self._waiting.values(), key=lambda waiting_prompt: (waiting_prompt.arrival_s, waiting_prompt.key)
        )
        self._waiting.clear()
        for request in waiting:
            self._plan(request)

    def _set_alive(self, alive: list[int]) -> None:
        self._alive = alive
        self._view_nodes = tuple(self._nodes[instance] for instance in alive)


class IdleCluster:
    """First come, first served; the size with the lowest latency among the idle instances; never preempted."""

    def __init__(
        self,
        loop: EventLoop,
        spec: ClusterSpec,
        candidates: Sequence[SpCandidate],
        listener: PrefillListener,
        is_recorded: bool,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._policy = greedy_esp(candidates)
        self._listener = listener
        self._idle = list(range(spec.instances))
        self._queue: deque[SimRequest] = deque()
        self._running: dict[int, SimRequest] = {}
        self._kept = _KeptKv(spec)
        self._is_recorded = is_recorded
        self.timeline: list[BusyInterval] = []

    def arrive(self, request: SimRequest) -> None:
        self._queue.append(request)
        self._start_heads()

    def unfinished(self) -> Iterable[SimRequest]:
        return [*self._running.values(), *self._queue]

    def keep_until_transferred(self) -> None:
        """Hold the KV of an ended prompt until `transferred`, from now on."""
        self._kept.is_wanted = True

    def transferred(self, request: SimRequest) -> None:
        """Decode has the KV of a prompt that has ended."""
        self._kept.free(request)
        self._start_heads()

    def _start_heads(self) -> None:
        now_s = self._loop.now_s
        spec = self._spec
        while self._queue and self._idle:
            request = self._queue[0]
            idle = self._idle
            snapshot = PrefillSnapshot(
                [instance // spec.instances_per_node for instance in idle],
                [0.0] * len(idle),
                [self._kept.free_tokens[instance] for instance in idle],
            )
            plan = self._policy.plan(snapshot, CdspRequest(request.new_tokens, request.cached_tokens))
            if isinstance(plan, NoPlan):
                if len(idle) < spec.instances or self._kept:
                    return
                self._queue.popleft()
                self._listener.on_refused(request)
                continue
            self._queue.popleft()
            group = tuple(idle[position] for position in plan.chunks[0].instances)
            end_s = now_s + plan.ttft_s
            members = set(group)
            self._idle = [instance for instance in idle if instance not in members]
            self._running[request.key] = request
            if self._is_recorded:
                self.timeline += [
                    BusyInterval(instance, now_s, end_s, request.key, tokens=request.new_tokens, group=group)
                    for instance in group
                ]
            self._loop.schedule(end_s, self._end, (ServedPrefill(request, now_s, end_s), group))

    def _end(self, ended: tuple[ServedPrefill, tuple[int, ...]]) -> None:
        served, group = ended
        del self._running[served.request.key]
        self._idle = sorted([*self._idle, *group])
        self._kept.keep(served.request, group)
        self._listener.on_first_token(served)
        self._start_heads()
