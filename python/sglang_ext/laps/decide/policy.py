"""One prefill instance's policy: which requests run together next, or until when nothing should.

Short prefills gather into batches (`wait_depth`, `short_batch`) on captured graphs (`graph_grid`); long ones fill what
a batch leaves of its time budget (`packed_choice`, `packed_batch`). All of it rests on what iterations cost
(`cost_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf, isfinite
from typing import Final, NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.laps.decide.instance_model import InstanceModel
from sglang_ext.laps.decide.options import Batching, LapsOptions
from sglang_ext.laps.decide.packed_choice import choose_packed
from sglang_ext.laps.decide.prefill_queue import Group, PrefillQueue, is_batched
from sglang_ext.laps.decide.round_plan import (
    ClassReport,
    InstanceLimits,
    LapsMode,
    LapsReport,
    PrefillBatch,
    PriorityClass,
    QueuedPrefill,
    RoundPlan,
    RoundSnapshot,
)
from sglang_ext.laps.decide.urgency import RankedPrefill, SlaDeviation
from sglang_ext.types import LengthClass

# Looking a member up in its class takes longer than comparing it.
_LONG_TOKENS: Final = 2048
_SHORT: Final = LengthClass.SHORT
_LONG: Final = LengthClass.LONG
_LOW: Final = PriorityClass.LOW
_TOKEN_MAX: Final = Batching.TOKEN_MAX
_ONLINE: Final = Group.WITH_DEADLINE


class TimeShare(NamedTuple):
    """The classes' shares of the time while a batch leaves."""

    has_longs: bool  # a long prefill waits
    short_share: float  # of the time, for short prefills
    round_s: float  # time budget of a round


class Composition(NamedTuple):
    """Decides what the batches of an instance hold. Both functions are given the queue, the time and the free KV."""

    choose: Callable[[InstanceModel, PrefillQueue, float, int], RoundPlan]
    time_share: Callable[[InstanceModel, PrefillQueue, float, int], TimeShare]


def _packed_time_share(model: InstanceModel, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> TimeShare:
    return TimeShare(queue.has_longs(), model.max_share(), model.round_s(now_s))


PACKED = Composition(choose_packed, _packed_time_share)


class Laps:
    """Times are seconds on one monotonic clock of the caller's.

    The queue is kept from round to round: `put` takes a request in and says what has become of it, `remove` takes it
    out, `record_dispatch` does both for those of a batch. `choose` changes nothing but the classes of requests that
    have waited long; `choose_of` decides on a queue that is given whole, and does not touch the kept one. `grid` is
    that of the engine's runner, which may leave shapes out of it between two decisions. A `composition` other than
    `PACKED` serves to compare with.
    """

    def __init__(
        self,
        options: LapsOptions,
        grid: GraphGrid,
        prior: CostCoefficients,
        limits: InstanceLimits,
        composition: Composition = PACKED,
    ) -> None:
        self._model = InstanceModel(options, grid, prior, limits)
        self._composition = composition
        self._deviation = {length_class: SlaDeviation() for length_class in LengthClass}
        self.queue = self._empty_queue()
        self._predictions = 0  # of the model, that those of the queue are
        self._free_kv_tokens = 0  # at the last decision

    @property
    def mode(self) -> LapsMode:
        return self._model.mode

    def switch_mode(self, mode: LapsMode) -> None:
        """Takes effect with the next decision; nothing that is queued or started is lost."""
        self._model.mode = mode

    def classify(self, new_tokens: int, cached_tokens: int) -> LengthClass:
        """The class of a prefill that arrives now; it keeps it."""
        return _SHORT if new_tokens <= self._model.boundary.tokens else _LONG

    def deadline_s(
        self,
        length_class: LengthClass,
        new_tokens: int,
        cached_tokens: int,
        arrival_s: float,
        ttft_slo_s: float | None,
        priority: PriorityClass = PriorityClass.NORMAL,
    ) -> float:
        """Return when its prefill should end (absolute): by its own objective, else by the option of its class.

        Infinite where it has none of its own and is offline work: of low priority, or with token-max batching.
        Raises ValueError for an objective that is not above 0.
        """
        if ttft_slo_s is not None:
            if not ttft_slo_s > 0:
                raise ValueError(f"the TTFT objective of a request must be above 0 s, got {ttft_slo_s:g}")
            return arrival_s + ttft_slo_s
        options = self._model.options
        if options.batching is _TOKEN_MAX or priority is _LOW:
            return inf
        short_slo_s = options.short_ttft_slo_ms / 1e3
        if length_class is _SHORT:
            return arrival_s + short_slo_s
        cost = self._model.cost
        ideal_s = cost.prefill_s(new_tokens, cached_tokens, self._model.idle_round_s(cached_tokens))
        return arrival_s + max(short_slo_s, options.long_slo_stretch * ideal_s)

    def record_arrival(
        self, now_s: float, length_class: LengthClass, new_tokens: int, cached_tokens: int, deadline_s: float
    ) -> None:
        """A request has been queued; the rate of short ones is what a window reckons with."""
        if length_class is _SHORT:
            self._model.rate.add(now_s)
        if isfinite(deadline_s):
            self._model.online_s = now_s
            self._model.record_work(now_s, length_class, new_tokens, cached_tokens)

    # -- the queue ------------------------------------------------------------------------------------------------

    def put(self, request: QueuedPrefill, now_s: float) -> None:
        """A request waits, or has changed: its prefix was matched again."""
        self._put(self.queue, request, now_s)

    def remove(self, key: int) -> None:
        """A request has left without being computed to its end. An unknown key is ignored."""
        if key in self.queue:
            self.queue.remove(key)

    def choose(self, now_s: float, free_kv_tokens: int) -> RoundPlan:
        """Return what should run next. Nothing more changes until `record_dispatch` records what did."""
        if self._predictions != self._model.predictions:
            self._predictions = self._model.predictions
            for ranked in list(self.queue):
                self._put(self.queue, self._classified(ranked.request), now_s)
        return self._choose(self.queue, now_s, free_kv_tokens)

    def record_dispatch(self, now_s: float, batch: PrefillBatch) -> None:
        """A batch of the plan leaves: its whole requests are gone from the queue, the cut one has less left."""
        self._learn_dispatch(self.queue, now_s, batch)
        queue = self.queue
        for key in batch.whole:
            queue.remove(key)
        if not batch.is_short:  # the long prefill that ran last is the current one
            for ranked in list(queue.started.values()):
                if ranked.request.is_current:
                    queue.replace(ranked.request.overtaken())
        if batch.cut is not None:
            self._put(queue, queue.get(batch.cut.key).request.after_chunk(batch.cut.tokens), now_s)

    def choose_of(self, snapshot: RoundSnapshot) -> RoundPlan:
        """Decide as `choose` does, about a queue that is given whole."""
        return self._choose(self._queue_of(snapshot), snapshot.now_s, snapshot.free_kv_tokens)

    def record_dispatch_of(self, snapshot: RoundSnapshot, batch: PrefillBatch) -> None:
        """Record as `record_dispatch` does, for a queue that is given whole."""
        self._learn_dispatch(self._queue_of(snapshot), snapshot.now_s, batch)

    # -- measurements ----------------------------------------------------------------------------------------------

    def predicted_s(self, new_tokens: Sequence[int], cached_tokens: Sequence[int]) -> float:
        """Seconds of a forward iteration over requests with these tokens, one number each."""
        work = sum(new * (new + 2 * cached) for new, cached in zip(new_tokens, cached_tokens, strict=True))
        return self._model.cost.iteration_s(work, sum(new_tokens), sum(cached_tokens), len(new_tokens))

    @property
    def measured_cost(self) -> CostCoefficients | None:
        """Return what iterations were found to take here; None before they determine what a token costs."""
        fit = self._model.fit
        return fit.fitted if fit.determined.token or fit.is_determined(_LONG_TOKENS) else None

    @property
    def has_measured_long(self) -> bool:
        """Return whether `measured_cost` holds for long prefills, too: its iterations determine their time."""
        return self._model.fit.is_determined(_LONG_TOKENS)

    @property
    def short_slo_s(self) -> float | None:
        """Return the objective of short prefills here; None where there are none, or none with a deadline."""
        model = self._model
        serves_short = model.mode is not LapsMode.LONG and model.options.batching is not Batching.TOKEN_MAX
        return model.short_slo_s if serves_short else None

    def short_per_s(self, now_s: float) -> float:
        """Return how many short prefills arrive in a second, recently."""
        return self._model.rate.per_s(now_s)

    def short_work_s(self, now_s: float) -> float:
        """Return the time that the short prefills of a second take, recently."""
        return self._model.short_offered.load(now_s).utilisation

    def record_iteration(self, sample: IterationSample) -> None:
        """A forward iteration has ended: the cost model learns from it. It may have cost the grid a shape."""
        self._model.record_iteration(sample)

    def record_first_token(self, now_s: float, length_class: LengthClass, arrival_s: float, deadline_s: float) -> None:
        """A prefill has ended. One without a deadline says nothing about how deadlines are kept."""
        if isfinite(deadline_s):
            self._deviation[length_class].add(now_s, arrival_s, deadline_s)

    def report(self, snapshot: RoundSnapshot) -> LapsReport:
        """Return the report for metrics and for the pool controller. Looks at the whole queue."""
        model, now_s = self._model, snapshot.now_s
        queue = self._queue_of(snapshot)
        rate_per_s = model.rate.per_s(now_s)
        window_s = model.awd.window_s(rate_per_s)
        arrivals_s = [ranked.request.arrival_s for ranked in queue if is_batched(ranked.request)]
        plan = self._composition.choose(model, queue, now_s, snapshot.free_kv_tokens)
        if arrivals_s and isfinite(plan.wake_s):
            window_s = max(0.0, plan.wake_s - min(arrivals_s))
        started = [ranked.request for ranked in queue.started.values()]
        current = next((request for request in started if request.is_current), None)
        share = self._composition.time_share(model, queue, now_s, snapshot.free_kv_tokens)
        return LapsReport(
            mode=model.mode,
            window_s=window_s,
            depth=model.awd.depth,
            short_rate_per_s=rate_per_s,
            short_share=model.account.short_share(),
            round_s=share.round_s,
            boundary_tokens=model.boundary.tokens,
            boundary_is_fitted=model.boundary.is_fitted,
            parked=len(started) - (current is not None),
            short=self._class_report(queue, now_s, LengthClass.SHORT),
            long=self._class_report(queue, now_s, LengthClass.LONG),
            fit=model.fit.report(),
        )

    # -- in detail -------------------------------------------------------------------------------------------------

    def _classified(self, request: QueuedPrefill) -> QueuedPrefill:
        """Return the request with the class that the boundary gives it now; its deadline stays."""
        length_class = self.classify(request.new_tokens, request.cached_tokens)
        is_new = length_class is not request.length_class and not request.is_started
        return request.of_class(length_class) if is_new else request

    def _empty_queue(self) -> PrefillQueue:
        return PrefillQueue(self._model.options.age_s, self._model.whole_limits())

    def _queue_of(self, snapshot: RoundSnapshot) -> PrefillQueue:
        queue = self._empty_queue()
        for request in snapshot.queue:
            self._put(queue, request, snapshot.now_s)
        return queue

    def _put(self, queue: PrefillQueue, request: QueuedPrefill, now_s: float) -> None:
        queue.put(request, now_s, self._model.cost, self._model.idle_round_s(0))

    def _choose(self, queue: PrefillQueue, now_s: float, free_kv_tokens: int) -> RoundPlan:
        self._free_kv_tokens = free_kv_tokens
        return self._composition.choose(self._model, queue, now_s, free_kv_tokens)

    def _learn_dispatch(self, queue: PrefillQueue, now_s: float, batch: PrefillBatch) -> None:
        """The account of the classes' time, and the depth of short batches."""
        model = self._model
        model.busy.add(now_s, batch.predicted_s)
        share = self._composition.time_share(model, queue, now_s, self._free_kv_tokens)
        if not batch.is_short:
            model.account.earn(batch.predicted_s, share.short_share, model.max_share(), share.round_s)
            return
        if share.has_longs:
            model.account.spend(batch.predicted_s, share.round_s)
        else:
            model.account.clear()
        model.learn_depth(now_s, batch.reason, [queue.get(key).request for key in batch.whole])

    def _class_report(self, queue: PrefillQueue, now_s: float, length_class: LengthClass) -> ClassReport:
        ranked: list[RankedPrefill] = [item for item in queue if item.request.length_class is length_class]
        requests: list[QueuedPrefill] = [item.request for item in ranked]
        backlog_s = sum(item.remaining_s for item in ranked)
        if length_class is LengthClass.SHORT and ranked:  # in batches, which share kappa
            kappa_s = self._model.cost.kappa_s
            backlog_s -= kappa_s * len(ranked)
            rounds = ceil(backlog_s / self._model.round_s(now_s))
            backlog_s += kappa_s * max(ceil(len(ranked) / self._model.max_requests), rounds)
        deviation = self._deviation[length_class]
        return ClassReport(
            requests=len(requests),
            new_tokens=sum(request.new_tokens for request in requests),
            backlog_s=backlog_s,
            oldest_wait_s=max((now_s - request.arrival_s for request in requests), default=0.0),
            slo_violation_rate=deviation.slo_violation_rate(now_s),
            tardiness=deviation.tardiness(now_s),
        )
