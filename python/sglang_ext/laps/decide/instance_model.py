"""Describes what the policy of one prefill instance knows: options, limits, measured costs, arrivals, the windows of
its batches.

`packed_choice` decides with it; `Laps` feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import Final

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.boundary import OBJECTIVE_SHARE, ClassBoundary, expected_boundary_tokens
from sglang_ext.laps.decide.cost_model import CostCoefficients, CostFit, IterationSample
from sglang_ext.laps.decide.options import Batching, LapsOptions
from sglang_ext.laps.decide.packed_batch import can_afford, loaded_round_s, packed_round_s
from sglang_ext.laps.decide.prefill_queue import WholeLimits
from sglang_ext.laps.decide.round_plan import (
    DispatchReason,
    InstanceLimits,
    LapsMode,
    PrefillBatch,
    QueuedPrefill,
)
from sglang_ext.laps.decide.short_batch import FormedBatch, apart_s, joined_s
from sglang_ext.laps.decide.urgency import RankedPrefill
from sglang_ext.laps.decide.wait_depth import (
    AdaptiveWaitDepth,
    ArrivalRate,
    BusyShare,
    GatheringBatch,
    LongWork,
    OfferedWork,
    Verdict,
    WindowLimits,
    break_even_gap_s,
    others_served,
)
from sglang_ext.types import LengthClass

# Looking a member up in its class takes longer than comparing it.
_SHORT: Final = LengthClass.SHORT
_SHORT_MODE: Final = LapsMode.SHORT
_LONG_MODE: Final = LapsMode.LONG
_SLA: Final = Batching.SLA
_TOKEN_MAX: Final = Batching.TOKEN_MAX
_ONLINE_FOR_S: Final = 10.0  # after a request with a deadline, others are expected
_YIELD_OF_SLO: Final = 1 / 16  # of the short prefills' objective that work without deadlines may hold one up
_TURN_SHARE: Final = 0.5  # of its turn in order of arrival: a late prefill that has waited longer is due
_OTHER_COSTS: Final = 1.5  # times what was predicted: what waits is predicted again
_MOST_SHARE: Final = 0.9  # under all options, a long prefill moves on
_REPORT_ROUNDS: Final = 20.0
_YIELD_OVERHEAD: Final = 0.3  # share of such work's time that may go to what every batch costs again


class InstanceModel:
    """State of one instance. `grid` is that of the engine's runner, which may leave shapes out of it meanwhile."""

    def __init__(self, options: LapsOptions, grid: GraphGrid, prior: CostCoefficients, limits: InstanceLimits) -> None:
        if min(limits[:4]) < 1:  # the numbers among them
            raise ValueError(f"the limits of an instance must be at least 1, got {limits}")
        self.options = options
        self.grid = grid
        self.limits = limits
        self.mode = options.mode
        self.fit = CostFit(prior)
        self._predicted_by = prior  # what waits
        self.predictions = 0  # how often what waits has been worth predicting again
        expected_tokens = expected_boundary_tokens(prior, options.short_ttft_slo_ms / 1e3, limits.max_batch_tokens)
        self.boundary = ClassBoundary(options.boundary_tokens, limits.max_batch_tokens, expected_tokens)
        self.rate = ArrivalRate()
        self.offered = OfferedWork()
        self.short_offered = OfferedWork()  # of it, by short prefills
        self._long_work = LongWork()
        self.account = TimeAccount()
        self.busy = BusyShare()
        self.online_s = -inf  # when a request with a deadline arrived last
        self.max_requests = min(options.depth_max, limits.max_requests)
        self._aimed_shapes = grid.shapes  # the shapes that the depths of the windows are from
        self.awd = AdaptiveWaitDepth(
            WindowLimits(
                options.w_min_ms / 1e3,
                options.w_max_ms / 1e3,
                options.t_max_ms / 1e3,
                options.sigma_ms / 1e3,
                options.delta_ms / 1e3,
            ),
            grid.depths(self.max_requests),
        )

    @property
    def cost(self) -> CostCoefficients:
        return self.fit.coefficients

    @property
    def short_slo_s(self) -> float:
        return self.options.short_ttft_slo_ms / 1e3

    def record_iteration(self, sample: IterationSample) -> None:
        """A forward iteration has ended: the cost model learns from it. It may have cost the grid a shape."""
        self.fit.add(sample)
        boundary_tokens = self.boundary.tokens
        self.boundary.record_iteration(self.fit, self.options.write_s, self.short_slo_s)
        fitted = self.fit.fitted
        if fitted is not self._predicted_by and self._differs(fitted):
            self._predicted_by = fitted
            for offered in (self.offered, self.short_offered, self._long_work):
                offered.predict_again(self._work_s)
            self.predictions += 1
        elif self.boundary.tokens != boundary_tokens:
            self.predictions += 1
        if self.grid.shapes is not self._aimed_shapes:
            self._aimed_shapes = self.grid.shapes
            self.awd.use_depths(self.grid.depths(self.max_requests))

    def is_online(self, now_s: float) -> bool:
        """Return whether clients with deadlines are near, though none waits."""
        return now_s <= self.online_s + _ONLINE_FOR_S

    def record_work(self, now_s: float, length_class: LengthClass, new_tokens: int, cached_tokens: int) -> None:
        """A request with a deadline has arrived: what it takes in the largest batches that there can be is offered."""
        work_s = self._work_s(new_tokens, cached_tokens)
        self.offered.add(now_s, work_s, new_tokens, cached_tokens)
        if length_class is _SHORT:
            self.short_offered.add(now_s, work_s, new_tokens, cached_tokens)
        else:
            self._long_work.add(work_s, new_tokens, cached_tokens)

    def _work_s(self, new_tokens: int, cached_tokens: int) -> float:
        cost = self.fit.coefficients
        share = min(1.0, max(new_tokens / self.limits.max_batch_tokens, 1 / self.max_requests))  # of a batch
        fixed_s = share * cost.kappa_s + (1 - share) * cost.request_s
        return cost.chunk_s(new_tokens, cached_tokens) - cost.kappa_s + fixed_s

    def _differs(self, fitted: CostCoefficients) -> bool:
        """Return whether a token or a chunk takes a very different time now than by the predictions of what waits."""
        for tokens in (1, self.limits.max_chunk_tokens):
            ratio = fitted.chunk_s(tokens, 0) / self._predicted_by.chunk_s(tokens, 0)
            if not 1 / _OTHER_COSTS < ratio < _OTHER_COSTS:
                return True
        return False

    def round_s(self, now_s: float, cached_tokens: int = 0) -> float:
        """Time budget of a round whose next chunk of a long prefill follows `cached_tokens`."""
        idle_s = self.idle_round_s(cached_tokens)
        if self.options.round_ms is not None or self.limits.stages > 1:  # whose stages wait for their longest chunk
            return idle_s
        cost = self.fit.coefficients
        longest_s = cost.chunk_s(self.limits.max_chunk_tokens, cached_tokens)
        load, long_s = self.offered.load(now_s), self._long_work.typical_s
        loaded_s = loaded_round_s(self._fixed_s(cached_tokens), self.short_slo_s, load, long_s)
        return max(idle_s, min(loaded_s, longest_s))

    def idle_round_s(self, cached_tokens: int) -> float:
        """Time budget of a round on an instance without load; the option fixes it, where it is given."""
        if self.options.round_ms is not None:
            return self.options.round_ms / 1e3
        return packed_round_s(self._fixed_s(cached_tokens), self.short_slo_s, self.limits.stages)

    def _fixed_s(self, cached_tokens: int) -> float:
        """Return what a chunk after these tokens costs besides its own tokens."""
        return self.fit.fixed_s() + self.fit.coefficients.read_s * cached_tokens

    def yield_s(self) -> float:
        """Time budget of work without deadlines while there are requests with some: these wait for its end."""
        if self.options.round_ms is not None:
            return inf
        return max(_YIELD_OF_SLO * self.short_slo_s, self.fit.coefficients.kappa_s / _YIELD_OVERHEAD)

    def margin(self) -> float:
        """Return by which share of the prediction a batch may exceed it until it ends.

        Through a pipeline it takes the predicted time on each stage.
        """
        return self.fit.typical_error() + self.limits.stages - 1

    def keeps_deadlines(self, now_s: float) -> bool:
        """Return whether one more batch within each objective is worth it: for requests that wait so that others are on
        time."""
        return self.can_afford(now_s, self.fit.coefficients.kappa_s, self.short_slo_s)

    def can_afford(self, now_s: float, extra_s: float, batch_s: float) -> bool:
        """Return whether deadlines are worth `extra_s` of fixed costs with every batch of `batch_s`."""
        return can_afford(self.offered.load(now_s), self.fit.coefficients.kappa_s, self.short_slo_s, extra_s, batch_s)

    def patience_s(self, now_s: float, waiting: int) -> float:
        """Return how long a late short prefill waits until it is due; `waiting` requests with deadlines are queued.

        Half of what these take in order of arrival if each takes as long as arriving ones do on average. Where
        clients wait for their answers, the whole is what requests take on average in any order (Little's law).
        """
        load = self.offered.load(now_s)
        if load.requests_per_s <= 0 or not isfinite(load.requests_per_s):
            return inf
        return _TURN_SHARE * waiting * load.mean_work_s + self.fit.coefficients.kappa_s

    def whole_limits(self) -> WholeLimits:
        """Return what a long prefill takes at most to go with short ones when it is due."""
        return WholeLimits(OBJECTIVE_SHARE * self.short_slo_s, self.limits.max_batch_tokens)

    def max_share(self) -> float:
        """The largest share of the time that shorts take while a long prefill that is late waits."""
        share = self.options.rho_max
        return 1 - share if self.mode is _SHORT_MODE else share

    def verdict(self, now_s: float, batch: FormedBatch, deadline_s: float, *, has_longs: bool) -> Verdict:
        """Return whether the short batch should leave: adaptive wait-depth, or at once on an instance for long
        prefills.

        `deadline_s`: the nearest one of all short prefills that wait.
        """
        if self.mode is _LONG_MODE:
            return Verdict(DispatchReason.SHARE if has_longs else DispatchReason.ALONE, now_s)
        cost = self.fit.coefficients
        depth = len(batch.members)
        oldest_s, newest_s = inf, -inf
        for member in batch.members:
            arrival_s = member.request.arrival_s
            if arrival_s < oldest_s:
                oldest_s = arrival_s
            if arrival_s > newest_s:
                newest_s = arrival_s
        arrivals_per_s = self.rate.per_s(now_s)
        others = others_served(arrivals_per_s, batch.predicted_s, self.busy.share)
        mean_alone_s = apart_s(batch.members, cost, self.grid) / depth
        gathering = GatheringBatch(
            depth=depth,
            new_tokens=batch.new_tokens,
            is_full=batch.is_full,
            oldest_arrival_s=oldest_s,
            newest_arrival_s=newest_s,
            latest_start_s=deadline_s - batch.predicted_s * (1 + self.margin()),
            break_even_gap_s=break_even_gap_s(
                depth, mean_alone_s, batch.predicted_s, joined_s(batch, cost, self.grid), others
            ),
        )
        is_offline = all(member.request.deadline_s == inf for member in batch.members)
        if is_offline or self.options.batching is _TOKEN_MAX:
            token_max = min(self.options.token_max, self.limits.max_batch_tokens)
            return self.awd.choose_token_max(now_s, gathering, token_max)
        return self.awd.choose(now_s, gathering, arrivals_per_s)

    def learn_depth(self, now_s: float, reason: DispatchReason, members: Sequence[QueuedPrefill]) -> None:
        """A short batch has left with these members."""
        if self.options.batching is not _SLA or not any(isfinite(member.deadline_s) for member in members):
            return
        arrivals_s = [member.arrival_s for member in members]
        depth = len(members)
        evidence = self.awd.evidence(reason, depth, self.rate.per_s(now_s))
        self.awd.learn(evidence, depth, max(arrivals_s) - min(arrivals_s))


def has_deadline(request: QueuedPrefill) -> bool:
    """Return whether a client waits for its answer."""
    return isfinite(request.deadline_s)


def batch_of_shorts(batch: FormedBatch, reason: DispatchReason) -> PrefillBatch:
    """Return a batch of only the short prefills."""
    keys = tuple([member.request.key for member in batch.members])
    return PrefillBatch(keys, None, reason, batch.shape, len(keys), batch.new_tokens, batch.predicted_s)


def nearest_deadline_s(shorts: Sequence[RankedPrefill]) -> float:
    """Return the nearest deadline of these requests, infinity without any."""
    nearest_s = inf
    for short in shorts:
        deadline_s = short.request.deadline_s
        if deadline_s < nearest_s:
            nearest_s = deadline_s
    return nearest_s


class TimeAccount:
    """Keeps the time that short prefills may use before the next long chunk, at the share x and at the largest share.

    A batch of only short prefills takes all of an iteration, so their share is kept over time: long work of t seconds
    earns them x / (1 - x) * t seconds, and what they use is taken off (Medha's space sharing, over time). Over any
    time that both classes wait, shorts use at most x / (1 - x) of what longs use, one round of balance and the batch
    that overdraws it.
    """

    __slots__ = ("_balance_s", "_max_balance_s", "long_s", "short_s")

    def __init__(self) -> None:
        self._balance_s: float | None = None  # None: a full round of any length
        self._max_balance_s: float | None = None
        self.short_s = 0.0  # used recently while both waited
        self.long_s = 0.0

    def can_run_short(self) -> bool:
        """Return whether the shorts are within their share."""
        return self._balance_s is None or self._balance_s > 0

    def can_run_urgent(self) -> bool:
        """Return whether shorts that are more urgent than the long prefill are within the largest share."""
        return self._max_balance_s is None or self._max_balance_s > 0

    def short_share(self) -> float:
        """Share of the time that shorts used recently while both classes waited; 0 before any."""
        used_s = self.short_s + self.long_s
        return self.short_s / used_s if used_s > 0 else 0.0

    def clear(self) -> None:
        """No long prefill waits: what shorts use is taken from none."""
        self._balance_s = self._max_balance_s = None

    def spend(self, short_s: float, round_s: float) -> None:
        """A short batch of this time runs while a long prefill waits. A debt of more than a round is forgiven."""
        balance_s = round_s if self._balance_s is None else self._balance_s
        max_s = round_s if self._max_balance_s is None else self._max_balance_s
        self._balance_s = max(balance_s - short_s, -round_s)
        self._max_balance_s = max_s - short_s
        self._report(short_s, 0.0, round_s)

    def earn(self, long_s: float, share: float, max_share: float, round_s: float) -> None:
        """A long chunk of this time runs. The balance is bounded by one round."""
        if self._balance_s is not None:
            share = min(share, _MOST_SHARE)
            self._balance_s = min(self._balance_s + share / (1 - share) * long_s, round_s)
        if self._max_balance_s is not None:
            max_share = min(max_share, _MOST_SHARE)
            self._max_balance_s = min(self._max_balance_s + max_share / (1 - max_share) * long_s, round_s)
        self._report(0.0, long_s, round_s)

    def _report(self, short_s: float, long_s: float, round_s: float) -> None:
        self.short_s += short_s
        self.long_s += long_s
        used_s = self.short_s + self.long_s
        if used_s > _REPORT_ROUNDS * round_s:
            scale = _REPORT_ROUNDS * round_s / used_s
            self.short_s *= scale
            self.long_s *= scale
