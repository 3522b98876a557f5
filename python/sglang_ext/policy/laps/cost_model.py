"""What a prefill iteration costs: LAPS's compute and memory terms, and their online fit to one instance's iterations.

T = alpha * sum L(L + 2H) + (beta + gamma_w) * sum L + gamma_r * sum H + kappa, for L new tokens after H cached
ones of each request (LAPS, section 2.1; kappa, the fixed cost of an iteration, is ours).

The fit is least squares on relative error with non-negative coefficients. What is kept is stratified: a few of the
latest samples of each kind of iteration (powers of two of length, cache and batch), so that an hour of short batches
does not make the fit forget what a long chunk costs. A sample enters and leaves the normal equations in constant time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from math import ceil, exp, inf, isfinite, log, sqrt
from statistics import median
from typing import NamedTuple

from sglang_ext.policy.nnls import (
    Matrix,
    Vector,
    inverse_diagonal,
    solve_non_negative,
)


class CostCoefficients(NamedTuple):
    """The coefficients of the cost model in seconds; none of them is negative."""

    alpha_s: float  # attention: per unit of L * (L + 2 H)
    token_s: float  # beta + gamma_w: per new token
    read_s: float  # gamma_r: per cached token
    kappa_s: float  # per iteration

    @classmethod
    def from_throughput(cls, tokens_per_s: float, fixed_s: float) -> CostCoefficients:
        """A prior without measurements: so many new tokens per second, and a fixed cost. ValueError if it is none."""
        if not (tokens_per_s > 0 and fixed_s >= 0):
            raise ValueError(f"tokens_per_s must be above 0 and fixed_s at least 0, got {tokens_per_s} and {fixed_s}")
        return cls(0.0, 1.0 / tokens_per_s, 0.0, fixed_s)

    def iteration_s(self, attention_work: float, new_tokens: int, cached_tokens: int) -> float:
        """Seconds of an iteration with these features: sum L(L + 2H), sum L, sum H."""
        return self.alpha_s * attention_work + self.token_s * new_tokens + self.read_s * cached_tokens + self.kappa_s

    def chunk_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Seconds of an iteration that computes `new_tokens` of one request after `cached_tokens`."""
        return (
            new_tokens * (self.alpha_s * (new_tokens + 2 * cached_tokens) + self.token_s)
            + self.read_s * cached_tokens
            + self.kappa_s
        )

    def prefill_s(self, new_tokens: int, cached_tokens: int, chunk_budget_s: float) -> float:
        """Seconds to prefill a prompt in chunks of about `chunk_budget_s` on an idle instance.

        Medha (appendix A.3) looks this up in a table of simulated prefills. Here sum L(L + 2H) over the chunks of
        a prompt is that of the whole prompt, so only the cached tokens that are read again and kappa depend on the
        number of chunks, and a closed form serves.
        """
        whole_s = self.chunk_s(new_tokens, cached_tokens)
        if whole_s <= chunk_budget_s:
            return whole_s
        chunks = min(ceil(whole_s / chunk_budget_s), new_tokens)
        read_again_s = self.read_s * (cached_tokens + 0.5 * new_tokens)
        return whole_s + (chunks - 1) * (self.kappa_s + read_again_s)


def boundary_tokens(
    coefficients: CostCoefficients, write_s: float, cached_tokens: int, *, with_kappa: bool
) -> float | None:
    """L_m(H): new tokens at which compute time equals memory time; None where it never gets that far.

    Compute is alpha L(L + 2H) + beta L, memory is gamma_w L + gamma_r H (LAPS, section 2.1), plus kappa if asked.
    `write_s` is gamma_w: total times give only beta + gamma_w. The result is the positive root of
    alpha L^2 + (2 alpha H + beta - gamma_w) L - (gamma_r H + kappa) = 0, which at H = 0 and without kappa is the
    paper's max(0, (gamma_w - beta) / alpha).
    """
    alpha_s = coefficients.alpha_s
    linear = 2 * alpha_s * cached_tokens + coefficients.token_s - 2 * write_s
    constant = coefficients.read_s * cached_tokens + (coefficients.kappa_s if with_kappa else 0.0)
    root = sqrt(linear * linear + 4 * alpha_s * constant)
    if linear > 0:  # the same root, without subtracting nearly equal numbers
        return 2 * constant / (linear + root)
    return (root - linear) / (2 * alpha_s) if alpha_s > 0 else None


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


class IterationSample(NamedTuple):
    """One forward iteration as it was measured: the features of the cost model and its duration."""

    attention_work: float  # sum over requests of L * (L + 2 H)
    new_tokens: int  # sum of L
    cached_tokens: int  # sum of H
    requests: int
    duration_s: float


class FitReport(NamedTuple):
    """What the online fit of the cost model knows."""

    samples: int  # taken in so far
    alpha_s: float
    token_s: float  # beta + gamma_w
    read_s: float  # gamma_r
    kappa_s: float
    alpha_determined: bool  # whether the samples determine it; where not, it is the prior's
    token_determined: bool
    read_determined: bool
    kappa_determined: bool
    error_p50: float | None  # relative error of the latest predictions, before they were learned from
    error_p90: float | None


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
