"""One prefill instance's policy: which short batch or which long chunk runs next, or until when nothing should.

Short prefills gather into batches (`wait_depth`, `short_batch`) on captured graphs (`graph_grid`), long ones run in
chunks (`long_prefill`) in the order of their slack (`slack`), the two share the time (`time_sharing`), and all of it
rests on what iterations cost (`cost_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, isfinite
from typing import NamedTuple

from sglang_ext.policy.laps.boundary import ClassBoundary
from sglang_ext.policy.laps.cost_model import CostCoefficients, CostFit, IterationSample
from sglang_ext.policy.laps.graph_grid import GraphGrid
from sglang_ext.policy.laps.long_prefill import LongChoice, choose_chunk, choose_long
from sglang_ext.policy.laps.options import Batching, LapsOptions
from sglang_ext.policy.laps.round_plan import (
    ClassReport,
    DispatchReason,
    InstanceLimits,
    LapsMode,
    LapsReport,
    LongChunk,
    PriorityClass,
    QueuedPrefill,
    RoundPlan,
    RoundSnapshot,
    ShortBatch,
)
from sglang_ext.policy.laps.short_batch import (
    BatchBounds,
    FormedBatch,
    alone_s,
    form_batch,
    joined_s,
    lone_batch,
)
from sglang_ext.policy.laps.slack import RankedPrefill, SlaDeviation, rank
from sglang_ext.policy.laps.time_sharing import TimeAccount, automatic_round_s, choose_share
from sglang_ext.policy.laps.wait_depth import (
    AdaptiveWaitDepth,
    ArrivalRate,
    BusyShare,
    GatheringBatch,
    Verdict,
    WindowLimits,
    break_even_gap_s,
    others_served,
)
from sglang_ext.types import LengthClass

_ONLINE_FOR_S = 10.0  # after a request with a deadline, others are expected
_LONG_MODE_ROUNDS = 3.0  # an instance for long prefills runs chunks of so many rounds
_YIELD_OF_SLO = 1 / 16  # of the short prefills' objective that work without deadlines may hold one up
_YIELD_OVERHEAD = 0.3  # share of such work's time that may go to what every batch costs anew
_SPENT_SLACK = 0.8  # of the time to its deadline that a short prefill spends on waiting for more batch members


class _Round(NamedTuple):
    """What a decision is about: both queues in order of urgency, the batch and the long prefill that could run."""

    now_s: float
    round_s: float
    shorts: list[RankedPrefill]
    longs: list[RankedPrefill]
    batch: FormedBatch | None
    long: LongChoice | None
    share: float  # x: the shorts' share of the time
    short_is_more_urgent: bool  # than the long prefill
    free_kv_tokens: int
    offline_round_s: float  # time budget of a batch or chunk without a deadline
    is_offline: bool  # nothing that waits has a deadline, and nothing with one came lately


class Laps:
    """Times are seconds on one monotonic clock of the caller's. `choose`, `classify`, `deadline_s` and `report`
    change nothing; the `note_…` methods tell it what happened. `grid` is that of the engine's runner, which may leave
    shapes out of it between two decisions.
    """

    def __init__(self, options: LapsOptions, grid: GraphGrid, prior: CostCoefficients, limits: InstanceLimits) -> None:
        if min(limits) < 1:
            raise ValueError(f"the limits of an instance must be at least 1, got {limits}")
        self._options = options
        self._grid = grid
        self._limits = limits
        self._mode = options.mode
        self._fit = CostFit(prior)
        self._boundary = ClassBoundary(options.boundary_tokens, limits.max_batch_tokens)
        self._rate = ArrivalRate()
        self._busy = BusyShare()
        self._account = TimeAccount()
        self._online_s = -inf  # when a request with a deadline arrived last
        self._deviation = {length_class: SlaDeviation() for length_class in LengthClass}
        self._max_requests = min(options.depth_max, limits.max_requests)
        self._aimed_shapes = grid.shapes  # those that the depths of the windows are from
        self._awd = AdaptiveWaitDepth(
            WindowLimits(
                options.w_min_ms / 1e3,
                options.w_max_ms / 1e3,
                options.t_max_ms / 1e3,
                options.sigma_ms / 1e3,
                options.delta_ms / 1e3,
            ),
            grid.depths(self._max_requests),
        )

    @property
    def mode(self) -> LapsMode:
        return self._mode

    def switch_mode(self, mode: LapsMode) -> None:
        """Takes effect with the next decision; nothing that is queued or started is lost."""
        self._mode = mode

    def classify(self, new_tokens: int, cached_tokens: int) -> LengthClass:
        """The class of a prefill that arrives now; it keeps it."""
        return LengthClass.SHORT if new_tokens <= self._boundary.tokens else LengthClass.LONG

    def deadline_s(
        self,
        length_class: LengthClass,
        new_tokens: int,
        cached_tokens: int,
        arrival_s: float,
        ttft_slo_s: float | None,
        priority: PriorityClass = PriorityClass.NORMAL,
    ) -> float:
        """When its prefill should end (absolute): by its own objective, else by the option of its class.

        Infinite where it has none of its own and is offline work: of low priority, or with token-max batching.
        Raises ValueError for an objective that is not above 0.
        """
        if ttft_slo_s is not None:
            if not ttft_slo_s > 0:
                raise ValueError(f"the TTFT objective of a request must be above 0 s, got {ttft_slo_s:g}")
            return arrival_s + ttft_slo_s
        options = self._options
        if options.batching is Batching.TOKEN_MAX or priority is PriorityClass.LOW:
            return inf
        short_slo_s = options.short_ttft_slo_ms / 1e3
        if length_class is LengthClass.SHORT:
            return arrival_s + short_slo_s
        cost = self._fit.coefficients
        ideal_s = cost.prefill_s(new_tokens, cached_tokens, self._round_s(cached_tokens, 0.0))
        return arrival_s + max(short_slo_s, options.long_slo_stretch * ideal_s)

    def note_arrival(
        self, now_s: float, length_class: LengthClass, new_tokens: int, cached_tokens: int, deadline_s: float
    ) -> None:
        """A request has been queued; the rate of short ones is what a window reckons with."""
        if length_class is LengthClass.SHORT:
            self._rate.add(now_s)
        if isfinite(deadline_s):
            self._online_s = now_s

    def choose(self, snapshot: RoundSnapshot) -> RoundPlan:
        """What should run next. Nothing changes until `note_dispatch` tells what did."""
        state = self._survey(snapshot)
        if state.batch is None:
            return RoundPlan(self._last_resorts(state), state.now_s if snapshot.queue else inf)
        if state.long is None:
            verdict = self._verdict(state, state.batch)
            if verdict.reason is None:
                return RoundPlan((), verdict.wake_s)
            return RoundPlan((_short_action(state.batch, verdict.reason),), state.now_s)
        return self._choose_between(state, state.batch, state.long)

    def note_dispatch(self, snapshot: RoundSnapshot, action: ShortBatch | LongChunk) -> None:
        """An action of the plan for this snapshot is carried out."""
        self._busy.add(snapshot.now_s, action.predicted_s)
        if isinstance(action, LongChunk):
            state = self._survey(snapshot)
            self._account.earn(action.predicted_s, state.share, self._most_share(), state.round_s)
            return
        longs = tuple(request for request in snapshot.queue if not _is_batched(request))
        if longs:
            state = self._survey(snapshot._replace(queue=longs))
            self._account.spend(action.predicted_s, state.round_s)
        else:
            self._account.clear()
        keys = frozenset(action.keys)
        arrivals_s = [request.arrival_s for request in snapshot.queue if request.key in keys]
        is_online = any(isfinite(request.deadline_s) for request in snapshot.queue if request.key in keys)
        if is_online and self._options.batching is Batching.SLA:
            depth = len(arrivals_s)
            evidence = self._awd.evidence(action.reason, depth, self._rate.per_s(snapshot.now_s))
            self._awd.learn(evidence, depth, max(arrivals_s) - min(arrivals_s))

    def predicted_s(self, new_tokens: Sequence[int], cached_tokens: Sequence[int]) -> float:
        """Seconds of a forward iteration over requests with these tokens, one number each."""
        work = sum(new * (new + 2 * cached) for new, cached in zip(new_tokens, cached_tokens, strict=True))
        return self._fit.coefficients.iteration_s(work, sum(new_tokens), sum(cached_tokens), len(new_tokens))

    def note_iteration(self, sample: IterationSample) -> None:
        """A forward iteration has ended: the cost model learns from it. It may have cost the grid a shape."""
        self._fit.add(sample)
        options = self._options
        self._boundary.note_iteration(self._fit, options.write_s, options.short_ttft_slo_ms / 1e3)
        if self._grid.shapes is not self._aimed_shapes:
            self._aimed_shapes = self._grid.shapes
            self._awd.use_depths(self._grid.depths(self._max_requests))

    def note_first_token(self, now_s: float, length_class: LengthClass, arrival_s: float, deadline_s: float) -> None:
        """A prefill has ended. One without a deadline says nothing about how deadlines are kept."""
        if isfinite(deadline_s):
            self._deviation[length_class].add(now_s, arrival_s, deadline_s)

    def report(self, snapshot: RoundSnapshot) -> LapsReport:
        """For metrics and for the pool controller."""
        state = self._survey(snapshot)
        rate_per_s = self._rate.per_s(state.now_s)
        window_s = self._awd.window_s(rate_per_s)
        if state.batch is not None:
            wake_s = self._verdict(state, state.batch).wake_s
            window_s = max(0.0, wake_s - min(member.request.arrival_s for member in state.batch.members))
        started = sum(ranked.request.is_started for ranked in state.longs)
        current = sum(ranked.request.is_started and ranked.request.is_current for ranked in state.longs)
        return LapsReport(
            mode=self._mode,
            window_s=window_s,
            depth=self._awd.depth,
            short_rate_per_s=rate_per_s,
            short_share=self._account.short_share(),
            round_s=state.round_s,
            boundary_tokens=self._boundary.tokens,
            boundary_is_fitted=self._boundary.is_fitted,
            parked=started - current,
            short=self._class_report(state, LengthClass.SHORT),
            long=self._class_report(state, LengthClass.LONG),
            fit=self._fit.report(),
        )

    # -- the two queues ------------------------------------------------------------------------------------------

    def _survey(self, snapshot: RoundSnapshot) -> _Round:
        options = self._options
        cost = self._fit.coefficients
        now_s = snapshot.now_s
        chunk_s = self._round_s(0, 0.0)
        is_offline = now_s > self._online_s + _ONLINE_FOR_S and not any(map(_has_deadline, snapshot.queue))
        yield_s = self._yield_s() if options.round_ms is None else inf
        shorts: list[RankedPrefill] = []
        longs: list[RankedPrefill] = []
        for request in snapshot.queue:
            ranked = rank(request, now_s, cost, chunk_s, options.age_s, options.long_slo_stretch)
            is_cut = not is_offline and not _has_deadline(request) and ranked.remaining_s > yield_s
            (shorts if _is_batched(request) and not is_cut else longs).append(ranked)
        shorts.sort()
        longs.sort()
        choice = choose_long(longs, snapshot.free_kv_tokens, options.max_parked, options.preempt_margin)
        # Work without deadlines does not make the rounds longer that others wait for.
        backlog_s = sum(ranked.remaining_s for ranked in longs if is_offline or _has_deadline(ranked.request))
        round_s = self._round_s(0 if choice is None else choice.ranked.request.cached_tokens, backlog_s)
        offline_round_s = round_s
        if options.round_ms is None:
            offline_round_s = max(round_s, options.short_ttft_slo_ms / 1e3) if is_offline else min(round_s, yield_s)
        candidates, budget_s = shorts, offline_round_s
        if shorts and _has_deadline(shorts[0].request):  # nothing without a deadline joins, as it would take longer
            candidates, budget_s = [ranked for ranked in shorts if _has_deadline(ranked.request)], round_s
        bounds = BatchBounds(
            self._max_requests,
            self._limits.max_batch_tokens,
            snapshot.free_kv_tokens,
            self._limits.page_tokens,
            budget_s,
        )
        batch = form_batch(candidates, now_s, cost, self._grid, bounds)
        share, is_more_urgent = 0.0, True
        if shorts and choice is not None:
            share, is_more_urgent = self._compare(shorts[0], choice.ranked)
        return _Round(
            now_s,
            round_s,
            shorts,
            longs,
            batch,
            choice,
            share,
            is_more_urgent,
            snapshot.free_kv_tokens,
            offline_round_s,
            is_offline,
        )

    def _compare(self, short: RankedPrefill, long: RankedPrefill) -> tuple[float, bool]:
        """The shorts' share of the time against this long prefill, and whether the short one is more urgent.

        Ageing makes a long prefill at most equal to a short one: from there slack and shares decide, or else every
        long prefill would hold up the short ones once it has waited for some time.
        """
        options = self._options
        short_class = short.urgency.aged_class
        long_class = max(long.urgency.aged_class, min(int(long.request.priority), short_class))
        long_slack = long.urgency.relative_slack
        is_more_urgent = (short_class, short.urgency.relative_slack) < (long_class, long_slack)
        if self._mode is LapsMode.SHORT:
            is_pressing = long_slack <= 0 or long.urgency.aged_class < long.request.priority
            return (self._most_share() if is_pressing else 1.0), is_more_urgent
        if short_class != long_class:
            if short_class > long_class:
                return 0.0, is_more_urgent
            is_yielding = _has_deadline(short.request) and not _has_deadline(long.request)
            return (1.0 if is_yielding else options.rho_max), is_more_urgent
        return choose_share(long_slack, options.rho_min, options.rho_max), is_more_urgent

    def _choose_between(self, state: _Round, batch: FormedBatch, long: LongChoice) -> RoundPlan:
        """Both classes wait: the shorts go first while they are within their share, or more urgent."""
        verdict = self._verdict(state, batch)
        if state.share >= 1 and verdict.reason is None:
            return RoundPlan((), verdict.wake_s)
        chunk = self._long_action(state, long)
        if self._can_wait(state, batch, chunk):
            return RoundPlan((chunk, _short_action(batch, DispatchReason.SHARE)), state.now_s)
        is_within_share = state.share >= 1 or (state.share > 0 and self._account.can_run_short())
        if is_within_share or (state.short_is_more_urgent and self._account.can_run_urgent()):
            # with a long prefill at hand there is no idle waiting for a deeper batch
            reason = (verdict.reason or DispatchReason.SHARE) if is_within_share else DispatchReason.URGENT
            return RoundPlan((_short_action(batch, reason), chunk), state.now_s)
        return RoundPlan((chunk, _short_action(batch, DispatchReason.SHARE)), state.now_s)

    def _can_wait(self, state: _Round, batch: FormedBatch, chunk: LongChunk) -> bool:
        """Whether the shorts let one more chunk run, sharing the fixed cost of their batch with what arrives.

        That loses no time, for a long prefill uses it. It pays where time is scarce: several long prefills wait. A
        round whose length is an option is kept.
        """
        if batch.is_full:
            return False
        if self._options.round_ms is not None:
            return False
        if state.is_offline:  # dense batches are all that counts, but for decode, which is not to run dry
            oldest_s = min(member.request.arrival_s for member in batch.members)
            return state.now_s < oldest_s + self._options.short_ttft_slo_ms / 1e3
        if len(state.longs) < 2:
            return False
        if self._mode is LapsMode.SHORT:
            return False
        if state.shorts[0].urgency.aged_class < state.longs[0].urgency.aged_class:
            return False
        end_s = state.now_s + chunk.predicted_s + batch.predicted_s
        waiting = [member.request for member in batch.members]
        return all(end_s <= one.arrival_s + _SPENT_SLACK * (one.deadline_s - one.arrival_s) for one in waiting)

    def _last_resorts(self, state: _Round) -> tuple[ShortBatch | LongChunk, ...]:
        """No short batch: there is no short prefill, or no memory for the most urgent one."""
        actions: list[ShortBatch | LongChunk] = []
        if state.long is not None:
            actions.append(self._long_action(state, state.long))
        if state.shorts:
            alone = lone_batch(state.shorts[0], self._fit.coefficients, self._grid)
            actions.append(_short_action(alone, DispatchReason.FULL_SHAPE))
        return tuple(actions)

    def _verdict(self, state: _Round, batch: FormedBatch) -> Verdict:
        """Whether the batch should leave: adaptive wait-depth, or at once on an instance for long prefills."""
        if self._mode is LapsMode.LONG:
            return Verdict(DispatchReason.ALONE if state.long is None else DispatchReason.SHARE, state.now_s)
        cost = self._fit.coefficients
        depth = len(batch.members)
        arrivals_s = [member.request.arrival_s for member in batch.members]
        apart_s = sum(alone_s(member, cost, self._grid) for member in batch.members) / depth
        arrivals_per_s = self._rate.per_s(state.now_s)
        others = others_served(arrivals_per_s, batch.predicted_s, self._busy.share)
        gathering = GatheringBatch(
            depth=depth,
            new_tokens=batch.new_tokens,
            is_full=batch.is_full,
            oldest_arrival_s=min(arrivals_s),
            newest_arrival_s=max(arrivals_s),
            latest_start_s=min(ranked.request.deadline_s for ranked in state.shorts) - batch.predicted_s,
            break_even_gap_s=break_even_gap_s(
                depth, apart_s, batch.predicted_s, joined_s(batch, cost, self._grid), others
            ),
        )
        is_offline = all(member.request.deadline_s == inf for member in batch.members)
        if is_offline or self._options.batching is Batching.TOKEN_MAX:
            token_max = min(self._options.token_max, self._limits.max_batch_tokens)
            return self._awd.choose_token_max(state.now_s, gathering, token_max)
        return self._awd.choose(state.now_s, gathering, arrivals_per_s)

    def _long_action(self, state: _Round, long: LongChoice) -> LongChunk:
        """The next chunk of the long prefill, within the budget, the engine's limit and the free memory."""
        limits = self._limits
        cost = self._fit.coefficients
        request = long.ranked.request
        max_tokens = limits.max_chunk_tokens
        if not long.fits and state.free_kv_tokens >= limits.page_tokens:
            max_tokens = min(max_tokens, state.free_kv_tokens)
        budget_s = state.round_s
        if self._mode is LapsMode.LONG:
            budget_s *= _LONG_MODE_ROUNDS
        elif state.shorts:
            budget_s *= 1 - state.share
        if not _has_deadline(request) and self._options.round_ms is None:
            budget_s = max(budget_s, state.offline_round_s) if state.is_offline else state.offline_round_s
        tokens = choose_chunk(
            cost,
            request.new_tokens,
            request.cached_tokens,
            budget_s,
            limits.page_tokens,
            self._options.min_chunk_tokens,
            max_tokens,
        )
        if not state.shorts:
            reason = DispatchReason.ALONE
        else:
            reason = DispatchReason.SHARE if state.share > 0 else DispatchReason.URGENT
        return LongChunk(request.key, tokens, reason, cost.chunk_s(tokens, request.cached_tokens))

    # -- what follows from the cost model ------------------------------------------------------------------------

    def _round_s(self, cached_tokens: int, long_backlog_s: float) -> float:
        """Time budget of a round while so much long work waits and the next chunk follows `cached_tokens`."""
        options = self._options
        if options.round_ms is not None:
            return options.round_ms / 1e3
        cost = self._fit.coefficients
        return automatic_round_s(
            cost.kappa_s + cost.read_s * cached_tokens,
            long_backlog_s,
            options.short_ttft_slo_ms / 1e3,
            cost.chunk_s(self._boundary.tokens, 0),
        )

    def _yield_s(self) -> float:
        """Time budget of work without deadlines while there are requests with some: these wait for its end."""
        return max(
            _YIELD_OF_SLO * self._options.short_ttft_slo_ms / 1e3, self._fit.coefficients.kappa_s / _YIELD_OVERHEAD
        )

    def _most_share(self) -> float:
        """The largest share of the time that shorts take while a long prefill that is late waits."""
        rho_max = self._options.rho_max
        return 1 - rho_max if self._mode is LapsMode.SHORT else rho_max

    def _class_report(self, state: _Round, length_class: LengthClass) -> ClassReport:
        ranked = [item for item in (*state.shorts, *state.longs) if item.request.length_class is length_class]
        requests: list[QueuedPrefill] = [item.request for item in ranked]
        backlog_s = sum(item.remaining_s for item in ranked)
        if length_class is LengthClass.SHORT and ranked:  # in batches, which share kappa
            kappa_s = self._fit.coefficients.kappa_s
            backlog_s -= kappa_s * len(ranked)
            backlog_s += kappa_s * max(ceil(len(ranked) / self._max_requests), ceil(backlog_s / state.round_s))
        deviation = self._deviation[length_class]
        return ClassReport(
            requests=len(requests),
            new_tokens=sum(request.new_tokens for request in requests),
            backlog_s=backlog_s,
            oldest_wait_s=max((state.now_s - request.arrival_s for request in requests), default=0.0),
            slo_violation_rate=deviation.slo_violation_rate(state.now_s),
            tardiness=deviation.tardiness(state.now_s),
        )


def _has_deadline(request: QueuedPrefill) -> bool:
    return isfinite(request.deadline_s)


def _is_batched(request: QueuedPrefill) -> bool:
    """Whether it runs in a short batch. A short prefill that the engine has cut goes on as a long one."""
    return request.length_class is LengthClass.SHORT and not request.is_started


def _short_action(batch: FormedBatch, reason: DispatchReason) -> ShortBatch:
    keys = tuple(member.request.key for member in batch.members)
    return ShortBatch(keys, reason, batch.shape, batch.new_tokens, batch.predicted_s)
