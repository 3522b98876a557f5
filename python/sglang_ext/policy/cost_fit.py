"""The cost model's coefficients, fitted online from the iterations of one instance.

Least squares on relative error with non-negative coefficients. What is kept is stratified: a few of the latest
samples of each kind of iteration (powers of two of length, cache and batch), so that an hour of short batches does
not make the fit forget what a long chunk costs. A sample enters and leaves the normal equations in constant time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from math import exp, inf, isfinite, log, sqrt
from statistics import median
from typing import NamedTuple

from sglang_ext.policy.laps_records import FitReport, IterationSample
from sglang_ext.policy.non_negative import Matrix, Vector, inverse_diagonal, solve_non_negative
from sglang_ext.policy.prefill_cost import CostCoefficients, boundary_tokens

_COEFFICIENTS = 4
_PER_KIND = 16
_KINDS = 256
_KEPT_SAMPLES = 20_000  # a kind that was not seen for so many samples is forgotten
_RECENT = 128
_MIN_SAMPLES = 8
_LEAST_CLIP = 0.4  # of the logarithm: a factor of 1.5
_CHANGE_SAMPLES = 64
_CHANGE = 0.3  # of the logarithm: a factor of 1.35
_NOISE_FLOOR = 0.005
_STANDARD_ERROR = 0.3  # of a coefficient that is determined, relative to it
_SOLVE_ALWAYS = 64
_SOLVE_EVERY = 8
# What the prior claims: the time of prompts of (new, cached) tokens.
_PRIOR_SHAPES = ((32, 0), (256, 0), (2048, 0), (256, 4096), (2048, 4096))

_Row = tuple[float, float, float, float]


class Determined(NamedTuple):
    """Whether the samples determine a coefficient: its standard error is below 30 % of it."""

    alpha: bool
    token: bool
    read: bool
    kappa: bool


class _Kind:
    """The latest samples of one kind of iteration, and when it was last seen."""

    __slots__ = ("last_seen", "rows")

    def __init__(self) -> None:
        self.rows: deque[_Row] = deque()
        self.last_seen = 0


class CostFit:
    """The prior before the first sample, the measurements after many, a blend in between.

    What the samples leave open follows the prior, scaled by the speed that they show. Raises ValueError for a prior
    by which prefills take no time, or less than none.
    """

    __slots__ = (
        "_errors",
        "_gram",
        "_kinds",
        "_logs",
        "_moment",
        "_prior",
        "_prior_gram",
        "_prior_moment",
        "_recent_errors",
        "_recent_excess",
        "_recent_logs",
        "_recent_speeds",
        "_rows",
        "_written",
        "coefficients",
        "determined",
    )

    def __init__(self, prior: CostCoefficients) -> None:
        if min(prior) < 0 or not prior.chunk_s(1, 0) > 0:
            raise ValueError(f"the prior must give every prefill a time above 0, got {prior}")
        self.coefficients = prior
        self._written = 0  # samples taken in so far
        self._recent_logs: deque[float] = deque()
        self._logs: list[float] = []  # the same, sorted: |log(measured / predicted)|
        self._recent_errors: deque[float] = deque()
        self._errors: list[float] = []  # the same, sorted: |predicted - measured| / measured
        self._start_from(prior)

    def _start_from(self, prior: CostCoefficients) -> None:
        """Keep no samples, and believe this meanwhile."""
        self._prior = prior
        self.determined = Determined(False, False, False, False)
        self._gram: Matrix = [[0.0] * _COEFFICIENTS for _ in range(_COEFFICIENTS)]
        self._moment: Vector = [0.0] * _COEFFICIENTS
        self._prior_gram: Matrix = [[0.0] * _COEFFICIENTS for _ in range(_COEFFICIENTS)]
        self._prior_moment: Vector = [0.0] * _COEFFICIENTS
        for new_tokens, cached_tokens in _PRIOR_SHAPES:
            features = (new_tokens * (new_tokens + 2.0 * cached_tokens), float(new_tokens), float(cached_tokens), 1.0)
            predicted_s = prior.chunk_s(new_tokens, cached_tokens)
            _accumulate(self._prior_gram, self._prior_moment, _relative(features, predicted_s), 1)
        self._kinds: OrderedDict[tuple[int, int, int], _Kind] = OrderedDict()
        self._rows = 0  # in all kinds
        self._recent_speeds: deque[float] = deque(maxlen=33)  # log(measured / prior)
        self._recent_excess: deque[float] = deque(maxlen=_CHANGE_SAMPLES)  # log(measured / predicted)

    def add(self, sample: IterationSample) -> None:
        """Learn from one iteration. One without new tokens or without a duration says nothing and is ignored."""
        duration_s = sample.duration_s
        if not (isfinite(duration_s) and duration_s > 0 and sample.new_tokens > 0):
            return
        features = (sample.attention_work, float(sample.new_tokens), float(sample.cached_tokens), 1.0)
        predicted_s = self.coefficients.iteration_s(features[0], sample.new_tokens, sample.cached_tokens)
        excess = log(duration_s / predicted_s) if predicted_s > 0 else inf
        clip = self._clip()
        credible_s = duration_s
        if predicted_s > 0 and abs(excess) > clip:  # an outlier weighs no more than an odd sample
            credible_s = predicted_s * exp(clip if excess > 0 else -clip)
        _push(self._recent_logs, self._logs, min(abs(excess), 1e3))
        _push(self._recent_errors, self._errors, abs(predicted_s - duration_s) / duration_s)
        prior_s = self._prior.iteration_s(features[0], sample.new_tokens, sample.cached_tokens)
        self._recent_speeds.append(log(credible_s / prior_s))
        self._recent_excess.append(excess)
        self._written += 1
        if self._is_another_machine():
            self._start_from(self.coefficients if self.coefficients.token_s > 0 else self._prior)
            return
        self._keep(sample, _relative(features, credible_s))
        if self._written <= _SOLVE_ALWAYS or self._written % _SOLVE_EVERY == 0:
            self._solve()

    def boundary_tokens(self, write_s: float | None, cached_tokens: int) -> float | None:
        """L_m(H), or None where the samples or an unknown gamma_w (`write_s`) leave it open.

        With kappa if the samples show that there is one, else in the paper's form.
        """
        determined = self.determined
        if write_s is None or not (determined.alpha and determined.token) or write_s > self.coefficients.token_s:
            return None
        if cached_tokens > 0 and not determined.read:
            return None
        return boundary_tokens(self.coefficients, write_s, cached_tokens, with_kappa=determined.kappa)

    def report(self) -> FitReport:
        errors = self._errors
        return FitReport(
            self._written,
            *self.coefficients,
            *self.determined,
            errors[len(errors) // 2] if errors else None,
            errors[min(len(errors) * 9 // 10, len(errors) - 1)] if errors else None,
        )

    def _clip(self) -> float:
        """How far a sample may be from its prediction, as a logarithm: three robust standard deviations."""
        logs = self._logs
        if len(logs) < _MIN_SAMPLES:
            return inf
        return max(_LEAST_CLIP, 3 * 1.4826 * logs[len(logs) // 2])

    def _is_another_machine(self) -> bool:
        """Whether most of the latest predictions were wrong by far and in the same direction: a clock was lowered,
        say, or a neighbour came. What was measured before then misleads.
        """
        excess = self._recent_excess
        return len(excess) == _CHANGE_SAMPLES and abs(median(excess)) > _CHANGE

    def _keep(self, sample: IterationSample, row: _Row) -> None:
        requests = max(1, sample.requests)
        kind = (
            (sample.new_tokens // requests).bit_length(),
            (sample.cached_tokens // requests).bit_length(),
            requests.bit_length(),
        )
        kinds = self._kinds
        if kind not in kinds:
            kinds[kind] = _Kind()
        kept = kinds[kind]
        kinds.move_to_end(kind)
        kept.last_seen = self._written
        kept.rows.append(row)
        self._take_in(row, 1)
        if len(kept.rows) > _PER_KIND:
            self._take_in(kept.rows.popleft(), -1)
        oldest = next(iter(kinds))
        if len(kinds) > _KINDS or self._written - kinds[oldest].last_seen > _KEPT_SAMPLES:
            for forgotten in kinds.pop(oldest).rows:
                self._take_in(forgotten, -1)

    def _take_in(self, row: _Row, sign: int) -> None:
        """Add a row to the normal equations, or take it away again."""
        self._rows += sign
        _accumulate(self._gram, self._moment, row, sign)

    def _solve(self) -> None:
        slowness = exp(median(self._recent_speeds))
        weight = 1.0 / (1 + self._rows)
        gram = [
            [real + weight * prior / slowness**2 for real, prior in zip(reals, priors, strict=True)]
            for reals, priors in zip(self._gram, self._prior_gram, strict=True)
        ]
        moment = [
            real + weight * prior / slowness for real, prior in zip(self._moment, self._prior_moment, strict=True)
        ]
        solution = solve_non_negative(gram, moment)
        self.coefficients = CostCoefficients(*solution)
        noise = max(_NOISE_FLOOR, 1.4826 * self._logs[len(self._logs) // 2])
        is_enough = self._rows >= _MIN_SAMPLES
        self.determined = Determined(
            *(
                is_enough and value > 0 and noise * sqrt(variance) <= _STANDARD_ERROR * value
                for value, variance in zip(solution, inverse_diagonal(self._gram), strict=True)
            )
        )


def _relative(features: _Row, duration_s: float) -> _Row:
    return (
        features[0] / duration_s,
        features[1] / duration_s,
        features[2] / duration_s,
        features[3] / duration_s,
    )


def _accumulate(gram: Matrix, moment: Vector, row: _Row, sign: int) -> None:
    """Add (or take away) a row whose target is 1."""
    for i in range(_COEFFICIENTS):
        value = sign * row[i]
        moment[i] += value
        line = gram[i]
        for j in range(_COEFFICIENTS):
            line[j] += value * row[j]


def _push(recent: deque[float], ordered: list[float], value: float) -> None:
    """Append to a bounded window and to its sorted copy."""
    if len(recent) == _RECENT:
        del ordered[bisect_left(ordered, recent.popleft())]
    recent.append(value)
    insort(ordered, value)
