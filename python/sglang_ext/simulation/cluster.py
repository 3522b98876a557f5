"""A sequence-parallel prefill cluster whose plans are kept: a plan reserves its instances until it ends.

The time until an instance is free is the end of its last reservation, as in Tetris. What a plan says is what happens:
costs are exact. A failed instance takes the plans that use it along; those requests start again from their cached
prefix on what is left, in order of arrival, and instances that only waited for them are free earlier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_ext.policy.cdsp.plan import CdspRequest, ChunkPlan, NoPlan, PlannedChunk, PrefillSnapshot
from sglang_ext.simulation.cluster_policies import ClusterPolicy
from sglang_ext.simulation.event_loop import EventLoop
from sglang_ext.simulation.records import BusyInterval, PrefillListener, ServedPrefill, SimRequest


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Equal prefill instances. ValueError for a number below 1."""

    instances: int
    instances_per_node: int = 8
    kv_tokens: int = 1_000_000  # that one instance holds

    def __post_init__(self) -> None:
        for name in ("instances", "instances_per_node", "kv_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")


class Failure:
    """An instance is down for a while. Times are seconds of the simulation."""

    __slots__ = ("at_s", "down_s", "instance")

    def __init__(self, instance: int, at_s: float, down_s: float) -> None:
        if not (at_s >= 0 and down_s > 0):
            raise ValueError(f"a failure is at 0 s or later and lasts, got {at_s:g} s and {down_s:g} s")
        self.instance, self.at_s, self.down_s = instance, at_s, down_s


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
        self._view_kv_tokens = (spec.kv_tokens,) * spec.instances
        self._committed: dict[int, _Committed] = {}
        self._waiting: dict[int, SimRequest] = {}  # no plan while instances are down
        self._is_recorded = is_recorded
        self.timeline: list[BusyInterval] = []

    def arrive(self, request: SimRequest) -> None:
        self._policy.note_arrival(self._loop.now_s)
        self._plan(request)

    def _plan(self, request: SimRequest) -> None:
        now_s = self._loop.now_s
        free_s = self._free_s
        delays_s = [free_s[instance] - now_s if free_s[instance] > now_s else 0.0 for instance in self._alive]
        if not delays_s:
            self._waiting[request.key] = request
            return
        plan = self._policy.plan(
            PrefillSnapshot(self._view_nodes, delays_s, self._view_kv_tokens),
            CdspRequest(request.prompt_tokens - request.cached_tokens, request.cached_tokens),
        )
        if isinstance(plan, NoPlan):
            if len(self._alive) == self._spec.instances:
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
        start_s = committed.planned_s + committed.chunks[0].start_s
        self._listener.on_first_token(ServedPrefill(request, start_s, committed.end_s))

    def _record(self, committed: _Committed, until_s: float) -> None:
        for chunk in committed.chunks:
            start_s = committed.planned_s + chunk.start_s
            end_s = min(start_s + chunk.compute_s, until_s)
            if start_s < end_s:
                self.timeline += [
                    BusyInterval(instance, start_s, end_s, committed.request.key) for instance in chunk.instances
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
        waiting = sorted(self._waiting.values(), key=lambda one: (one.arrival_s, one.key))
        self._waiting.clear()
        for request in waiting:
            self._plan(request)

    def _set_alive(self, alive: list[int]) -> None:
        self._alive = alive
        self._view_nodes = tuple(self._nodes[instance] for instance in alive)
        self._view_kv_tokens = (self._spec.kv_tokens,) * len(alive)
