"""A cluster without reservations: the head of one queue takes the best of the instances that are idle now.

LoongServe's own scheduler gives a batch instances that are idle; this is that, with one request per batch. It is the
second form of that baseline (the other plans behind queues, `cluster_policies.greedy_esp`); neither is better on all
loads, so both are run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from sglang_ext.policy.cdsp.plan import CdspRequest, NoPlan, PrefillSnapshot
from sglang_ext.policy.cdsp.sp_cost import SpCandidate
from sglang_ext.simulation.cluster import ClusterSpec
from sglang_ext.simulation.cluster_policies import greedy_esp
from sglang_ext.simulation.event_loop import EventLoop
from sglang_ext.simulation.records import BusyInterval, PrefillListener, ServedPrefill, SimRequest


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
        self._is_recorded = is_recorded
        self.timeline: list[BusyInterval] = []

    def arrive(self, request: SimRequest) -> None:
        self._queue.append(request)
        self._start_heads()

    def unfinished(self) -> Iterable[SimRequest]:
        return [*self._running.values(), *self._queue]

    def _start_heads(self) -> None:
        now_s = self._loop.now_s
        spec = self._spec
        while self._queue and self._idle:
            request = self._queue[0]
            idle = self._idle
            snapshot = PrefillSnapshot(
                [instance // spec.instances_per_node for instance in idle],
                [0.0] * len(idle),
                [spec.kv_tokens] * len(idle),
            )
            plan = self._policy.plan(snapshot, CdspRequest(request.new_tokens, request.cached_tokens))
            if isinstance(plan, NoPlan):
                if len(idle) < spec.instances:
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
                self.timeline += [BusyInterval(instance, now_s, end_s, request.key) for instance in group]
            self._loop.schedule(end_s, self._end, (ServedPrefill(request, now_s, end_s), group))

    def _end(self, ended: tuple[ServedPrefill, tuple[int, ...]]) -> None:
        served, group = ended
        del self._running[served.request.key]
        self._idle = sorted([*self._idle, *group])
        self._listener.on_first_token(served)
        self._start_heads()
