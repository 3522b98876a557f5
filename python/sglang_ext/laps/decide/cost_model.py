"""Describes what a prefill iteration costs: LAPS's compute and memory terms, and their online fit to one instance's
iterations.

T = alpha * sum L(L + 2H) + (beta + gamma_w) * sum L + gamma_r * sum H + rho * (R - 1) + kappa, for L new tokens after
H cached ones of each of R requests (LAPS, section 2.1; kappa, the fixed cost of an iteration, and rho, that of each
further request, are ours). An iteration that replays a captured graph computes all tokens of its shape, and has
coefficients of its own.

The fit is least squares on relative error with non-negative coefficients. What is kept is stratified: a few of the
latest samples of each kind of iteration (powers of two of length, cache and batch), so that an hour of short batches
does not make the fit forget what a long chunk costs. A sample enters and leaves the normal equations in constant time.
Predictions follow the pace of the latest iterations, as a machine that others use is not equally fast at all times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from math import ceil, exp, inf, isfinite, log, sqrt
from statistics import median
from typing import Final, NamedTuple

from sglang_ext.laps.decide.nnls import (
    Matrix,
    Vector,
    inverse_diagonal,
    inverse_form,
    solve_non_negative,
)


class CostCoefficients(NamedTuple):
    """The coefficients of the cost model in seconds; none of them is negative."""

    alpha_s: float  # attention: per unit of L * (L + 2 H)
    token_s: float  # beta + gamma_w: per new token
    read_s: float  # gamma_r: per cached token
    kappa_s: float  # per iteration
    request_s: float = 0.0  # per request after the first
    replayed: CostCoefficients | None = None  # of iterations that replay a captured graph; None: the same

    @classmethod
    def from_throughput(cls, tokens_per_s: float, fixed_s: float) -> CostCoefficients:
        """A prior without measurements: this many new tokens per second, and a fixed cost. ValueError if it is none."""
        if not (tokens_per_s > 0 and fixed_s >= 0):
            raise ValueError(f"tokens_per_s must be above 0 and fixed_s at least 0, got {tokens_per_s} and {fixed_s}")
        return cls(0.0, 1.0 / tokens_per_s, 0.0, fixed_s)

    def times(self, factor: float) -> CostCoefficients:
        """Return the coefficients of a machine on which everything takes `factor` times as long."""
        alpha_s, token_s, read_s, kappa_s, request_s = (factor * value for value in self[:5])
        replayed = None if self.replayed is None else self.replayed.times(factor)
        return CostCoefficients(alpha_s, token_s, read_s, kappa_s, request_s, replayed)

    def iteration_s(
        self,
        attention_work: float,
        new_tokens: int,
        cached_tokens: int,
        requests: int = 1,
        is_replayed: bool = False,
    ) -> float:
        """Seconds of an iteration with these features: sum L(L + 2H), sum L, sum H, number of requests.

        Replayed, `new_tokens` are those of the captured shape, which are computed all; the rest is of the requests.
        """
        cost = self.replayed if is_replayed and self.replayed is not None else self
        return (
            cost.alpha_s * attention_work
            + cost.token_s * new_tokens
            + cost.read_s * cached_tokens
            + cost.request_s * (requests - 1)
            + cost.kappa_s
        )

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


_FEATURES: Final = 6
_ALPHA, _TOKEN, _READ, _REQUEST, _KAPPA = range(5)
_SECONDARY = (_READ, _REQUEST)  # held at the prior where the samples do not determine them
_GAP: Final = 5  # the feature that is not one of the sum: whether the iteration follows another one directly
_PER_KIND: Final = 16
_KINDS: Final = 256
_KEPT_SAMPLES = 20_000  # a kind that was not seen for this many samples is forgotten
_RECENT: Final = 128
_MIN_SAMPLES: Final = 8
_LEAST_CLIP: Final = 0.4  # of the logarithm: a factor of 1.5
_CHANGE_SAMPLES: Final = 64
_CHANGE: Final = 0.3  # of the logarithm: a factor of 1.35
_NOISE_FLOOR: Final = 0.005
_STANDARD_ERROR: Final = 0.3  # of a coefficient that is determined, relative to it
_PACE_SAMPLES: Final = 8  # the latest, by which predictions are scaled
_PACE_WEIGHT: Final = 0.7  # of what they show, as a logarithm
_MOST_PACE: Final = 4.0
_PACE_QUANTILES: Final = 10
_SOLVE_ALWAYS: Final = 64
_SOLVE_EVERY: Final = 8
# What the prior claims: the time of (new, cached) tokens of this many requests each.
_PRIOR_SHAPES = ((32, 0, 1), (256, 0, 1), (2048, 0, 1), (256, 4096, 1), (2048, 4096, 1), (32, 0, 8))


class IterationSample(NamedTuple):
    """One forward iteration as it was measured: the features of the cost model and its duration."""

    attention_work: float  # sum over requests of L * (L + 2 H)
    new_tokens: int  # sum of L; replayed, the tokens of the captured shape
    cached_tokens: int  # sum of H
    requests: int
    duration_s: float
    is_replayed: bool = False  # on a captured graph
    is_first: bool = False  # after idle time: what passes between two iterations of a busy instance is not in it


class FitReport(NamedTuple):
    """Describes what the online fit of the cost model knows."""

    samples: int  # taken in so far
    alpha_s: float
    token_s: float  # beta + gamma_w
    read_s: float  # gamma_r
    kappa_s: float
    request_s: float
    alpha_determined: bool  # whether the samples determine it; where not, it is the prior's
    token_determined: bool
    read_determined: bool
    kappa_determined: bool
    replayed_token_s: float | None  # per token of a captured shape; None where nothing was replayed
    replayed_kappa_s: float | None
    error_p50: float | None  # relative error of the latest predictions, before they were learned from
    error_p90: float | None
    # What the latest iterations took over what the fit expects: equally likely values in ascending order; None: few.
    pace_quantiles: tuple[float, ...] | None


class Determined(NamedTuple):
    """Describes whether the samples determine a coefficient: its standard error is below 30 % of it."""

    alpha: bool
    token: bool
    read: bool
    kappa: bool


_NOTHING_DETERMINED = Determined(False, False, False, False)


class _Kind:
    """The latest samples of one kind of iteration, and when it was last seen."""

    __slots__ = ("last_seen", "rows")

    def __init__(self) -> None:
        self.rows: deque[Vector] = deque()
        self.last_seen = 0


class _Equations:
    """The kept samples of iterations that run in one way, and the coefficients that explain them best.

    What they leave open follows the prior, scaled by the speed that they show.
    """

    __slots__ = (
        "_gram",
        "_moment",
        "_prior_gram",
        "_prior_moment",
        "_speeds",
        "gap_s",
        "kinds",
        "prior",
        "rows",
        "taken",
    )

    def __init__(self, prior: CostCoefficients) -> None:
        self.prior = prior
        self.gap_s = 0.0  # the part of kappa that passes between two iterations
        self._gram = _zeros()
        self._moment: Vector = [0.0] * _FEATURES
        self._prior_gram = _zeros()
        self._prior_moment: Vector = [0.0] * _FEATURES
        for new, cached, requests in _PRIOR_SHAPES:
            work = requests * new * (new + 2.0 * cached)
            features = _features(work, requests * new, requests * cached, requests, is_first=True)
            predicted_s = prior.iteration_s(work, requests * new, requests * cached, requests)
            _accumulate(self._prior_gram, self._prior_moment, _relative(features, predicted_s), 1)
        self.kinds: OrderedDict[tuple[int, int, int], _Kind] = OrderedDict()
        self.rows = 0  # in all kinds
        self.taken = 0
        self._speeds: deque[float] = deque(maxlen=33)  # log(measured / prior)

    def add(self, sample: IterationSample) -> None:
        """Keep one more, and forget what there is too much of."""
        work, new_tokens, cached_tokens, requests = sample[:4]
        features = _features(work, new_tokens, cached_tokens, requests, sample.is_first)
        self._speeds.append(log(sample.duration_s / self.prior.iteration_s(work, new_tokens, cached_tokens, requests)))
        self.taken += 1
        kinds = self.kinds
        kind = _kind(sample)
        if kind not in kinds:
            kinds[kind] = _Kind()
        kept = kinds[kind]
        kinds.move_to_end(kind)
        kept.last_seen = self.taken
        row = _relative(features, sample.duration_s)
        kept.rows.append(row)
        self._take_in(row, 1)
        if len(kept.rows) > _PER_KIND:
            self._take_in(kept.rows.popleft(), -1)
        oldest = next(iter(kinds))
        if len(kinds) > _KINDS or self.taken - kinds[oldest].last_seen > _KEPT_SAMPLES:
            for forgotten in kinds.pop(oldest).rows:
                self._take_in(forgotten, -1)

    def solve(self) -> tuple[CostCoefficients, Determined]:
        """The best coefficients for what is kept, which must be something, and which of them it determines.

        What a cached token or a further request costs is often seen in few samples. Where these do not determine it, it
        is held where the prior has it (unless that is more than two standard errors away), and the others are solved
        for again: noise in a handful of mixed batches is no finding.
        """
        slowness = exp(median(self._speeds))
        weight = 1.0 / (1 + self.rows)
        gram = [
            [real + weight * prior / slowness**2 for real, prior in zip(reals, priors, strict=True)]
            for reals, priors in zip(self._gram, self._prior_gram, strict=True)
        ]
        moment = [
            real + weight * prior / slowness for real, prior in zip(self._moment, self._prior_moment, strict=True)
        ]
        believed = _as_features(self.prior.times(slowness))
        held: dict[int, float] = {}
        solution = _solved_with(gram, moment, held)
        noise = self._noise(solution)
        errors = self._standard_errors(held, noise)
        is_determined = [error <= _STANDARD_ERROR * value for error, value in zip(errors, solution, strict=False)]
        for at in _SECONDARY:
            value, error = solution[at], errors[at]
            if (value > 0 and error <= _STANDARD_ERROR * value) or abs(believed[at] - value) > 2 * error:
                continue
            held[at] = believed[at]
            solution = _solved_with(gram, moment, held)
            errors = self._standard_errors(held, noise)
        determined = Determined(*(solution[at] > 0 and is_determined[at] for at in (_ALPHA, _TOKEN, _READ, _KAPPA)))
        alpha_s, token_s, read_s, request_s, alone_s, self.gap_s = solution
        kappa_s = alone_s + self.gap_s
        if token_s <= 0 and kappa_s <= 0:  # by that a lone request takes no time: the samples are only of batches
            self.gap_s = 0.0
            return self.prior.times(slowness)._replace(replayed=None), _NOTHING_DETERMINED
        return CostCoefficients(alpha_s, token_s, read_s, kappa_s, request_s), determined

    def prior_kappa_s(self) -> float:
        """Return kappa of the prior at the speed that the samples show."""
        return self.prior.kappa_s * exp(median(self._speeds)) if self._speeds else self.prior.kappa_s

    def _noise(self, solution: Sequence[float]) -> float:
        """One relative standard deviation of these samples from what this solution predicts."""
        squares = float(self.rows)
        for moment, value, line in zip(self._moment, solution, self._gram, strict=True):
            squares += value * (sum(other * entry for other, entry in zip(solution, line, strict=True)) - 2 * moment)
        return max(_NOISE_FLOOR, sqrt(max(0.0, squares) / max(1, self.rows - _FEATURES)))

    def _standard_errors(self, held: Mapping[int, float], noise: float) -> Vector:
        """The standard errors of the coefficients other than those held, by these samples; infinite where these have
        nothing of one, or are few."""
        free = [at for at in range(_GAP) if at not in held]
        errors = [inf] * _GAP
        if self.rows >= _MIN_SAMPLES:  # without the gap: on an instance that is never idle it is not apart from kappa
            variances = inverse_diagonal([[self._gram[i][j] for j in free] for i in free])
            for at, variance in zip(free, variances, strict=True):
                errors[at] = noise * sqrt(variance)
        return errors

    def error_s(self, features: Vector, noise: float) -> float:
        """Standard error of the fitted time of such an iteration, that follows another one."""
        if self.rows < _MIN_SAMPLES:
            return inf
        return noise * sqrt(inverse_form([line[:_GAP] for line in self._gram[:_GAP]], features[:_GAP]))

    def _take_in(self, row: Vector, sign: int) -> None:
        """Add a row to the normal equations, or take it away again."""
        self.rows += sign
        _accumulate(self._gram, self._moment, row, sign)


class CostFit:
    """The prior before the first sample, the measurements after many, a blend in between.

    Iterations that replay a captured graph have equations of their own, whose prior is what the others have shown.
    `fitted` are the coefficients that explain the samples best, `coefficients` the same at the present pace.
    Raises ValueError for a prior by which prefills take no time, or less than none.
    """

    __slots__ = (
        "_eager",
        "_errors",
        "_latest",
        "_logs",
        "_recent_errors",
        "_recent_excess",
        "_recent_logs",
        "_replayed",
        "_written",
        "coefficients",
        "determined",
        "fitted",
    )

    def __init__(self, prior: CostCoefficients) -> None:
        if min(prior[:5]) < 0 or not prior.chunk_s(1, 0) > 0:
            raise ValueError(f"the prior must give every prefill a time above 0, got {prior}")
        self.fitted = self.coefficients = prior
        self._written = 0  # samples taken in so far
        self._recent_logs: deque[float] = deque()
        self._logs: list[float] = []  # the same, sorted: |log(measured / predicted)|
        self._recent_errors: deque[float] = deque()
        self._errors: list[float] = []  # the same, sorted: |predicted - measured| / measured
        self._start_from(prior, None)

    def _start_from(self, eager: CostCoefficients, replayed: CostCoefficients | None) -> None:
        """Keep no samples, and believe this meanwhile."""
        self.determined = _NOTHING_DETERMINED
        self._eager = _Equations(eager)
        self._replayed = None if replayed is None else _Equations(replayed)
        self._recent_excess: deque[float] = deque(maxlen=_CHANGE_SAMPLES)  # log(measured / fitted)
        self._latest: deque[IterationSample] = deque(maxlen=_PACE_SAMPLES)

    def add(self, sample: IterationSample) -> None:
        """Learn from one iteration. One without new tokens or without a duration says nothing and is ignored."""
        duration_s = sample.duration_s
        if not (isfinite(duration_s) and duration_s > 0 and sample.new_tokens > 0):
            return
        sample = sample._replace(requests=max(1, sample.requests))
        equations = self._equations(sample.is_replayed)
        predicted_s = self._predicted_s(self.coefficients, sample)
        fitted_s = self._predicted_s(self.fitted, sample)
        excess = log(duration_s / fitted_s) if fitted_s > 0 else inf
        clip = self._clip() if equations.rows >= _MIN_SAMPLES else inf
        credible = sample
        if fitted_s > 0 and abs(excess) > clip:  # an outlier weighs no more than an odd sample
            credible = sample._replace(duration_s=fitted_s * exp(clip if excess > 0 else -clip))
        _push(self._recent_logs, self._logs, min(abs(excess), 1e3))
        _push(self._recent_errors, self._errors, abs(predicted_s - duration_s) / duration_s)
        self._recent_excess.append(excess)
        self._written += 1
        if self._is_another_machine():
            self._start_again()
            return
        equations.add(credible)
        self._latest.append(sample)
        if equations.taken <= _SOLVE_ALWAYS or self._written % _SOLVE_EVERY == 0:
            self._solve()
        self.coefficients = self.fitted.times(self._pace())

    def is_determined(self, new_tokens: float) -> bool:
        """Return whether the samples determine the time of a lone prefill of this length: its standard error is below
        30 %."""
        if not self._logs:
            return False
        features = [new_tokens * new_tokens, new_tokens, 0.0, 0.0, 1.0, 0.0]
        return self._eager.error_s(features, self._noise()) <= _STANDARD_ERROR * self.fitted.chunk_s(int(new_tokens), 0)

    def boundary_tokens(self, write_s: float | None, cached_tokens: int) -> float | None:
        """L_m(H), or None where the samples or an unknown gamma_w (`write_s`) leave it open.

        With kappa if the samples show that there is one, else in the paper's form.
        """
        determined = self.determined
        if write_s is None or not (determined.alpha and determined.token) or write_s > self.fitted.token_s:
            return None
        if cached_tokens > 0 and not determined.read:
            return None
        return boundary_tokens(self.fitted, write_s, cached_tokens, with_kappa=determined.kappa)

    def report(self) -> FitReport:
        errors, cost = self._errors, self.fitted
        return FitReport(
            samples=self._written,
            alpha_s=cost.alpha_s,
            token_s=cost.token_s,
            read_s=cost.read_s,
            kappa_s=cost.kappa_s,
            request_s=cost.request_s,
            alpha_determined=self.determined.alpha,
            token_determined=self.determined.token,
            read_determined=self.determined.read,
            kappa_determined=self.determined.kappa,
            replayed_token_s=None if cost.replayed is None else cost.replayed.token_s,
            replayed_kappa_s=None if cost.replayed is None else cost.replayed.kappa_s,
            error_p50=errors[len(errors) // 2] if errors else None,
            error_p90=errors[min(len(errors) * 9 // 10, len(errors) - 1)] if errors else None,
            pace_quantiles=self._pace_quantiles(),
        )

    def fixed_s(self) -> float:
        """Return kappa where the samples determine it, else at least that of the prior, at the speed that they show."""
        kappa_s = self.coefficients.kappa_s
        return kappa_s if self.determined.kappa else max(kappa_s, self._eager.prior_kappa_s())

    def typical_error(self) -> float:
        """Median relative error of the latest predictions, each made before its iteration; 0 before the first."""
        return self._errors[len(self._errors) // 2] if self._errors else 0.0

    def _equations(self, is_replayed: bool) -> _Equations:
        if not is_replayed:
            return self._eager
        if self._replayed is None:
            self._replayed = _Equations(self.fitted)
        return self._replayed

    def _predicted_s(self, cost: CostCoefficients, sample: IterationSample) -> float:
        work, new_tokens, cached_tokens, requests, _, is_replayed, is_first = sample
        predicted_s = cost.iteration_s(work, new_tokens, cached_tokens, requests, is_replayed)
        return predicted_s - self._equations(is_replayed).gap_s if is_first else predicted_s

    def _pace(self) -> float:
        """Return how much longer than fitted the latest iterations took, as far as they can be believed."""
        if len(self._latest) < _PACE_SAMPLES:
            return 1.0
        fitted_s = [self._predicted_s(self.fitted, sample) for sample in self._latest]
        ratios = [sample.duration_s / max(1e-9, one_s) for sample, one_s in zip(self._latest, fitted_s, strict=True)]
        return min(_MOST_PACE, max(1 / _MOST_PACE, exp(_PACE_WEIGHT * log(max(1e-9, median(ratios))))))

    def _pace_quantiles(self) -> tuple[float, ...] | None:
        """Return the 5th, 15th, … and 95th percentile of measured over fitted times of the latest iterations."""
        paces = sorted(exp(excess) for excess in self._recent_excess if excess < inf)
        if len(paces) < 2 * _PACE_QUANTILES:
            return None
        return tuple(paces[(2 * number + 1) * len(paces) // (2 * _PACE_QUANTILES)] for number in range(_PACE_QUANTILES))

    def _noise(self) -> float:
        """One robust standard deviation of the samples from what was fitted."""
        return max(_NOISE_FLOOR, 1.4826 * self._logs[len(self._logs) // 2])

    def _clip(self) -> float:
        """Return how far a sample may be from its prediction, as a logarithm: three robust standard deviations."""
        logs = self._logs
        if len(logs) < _MIN_SAMPLES:
            return inf
        return max(_LEAST_CLIP, 3 * 1.4826 * logs[len(logs) // 2])

    def _is_another_machine(self) -> bool:
        """Return whether most of the latest predictions were wrong by far and in the same direction: a clock was
        lowered, say, or a neighbour came. What was measured before then misleads."""
        excess = self._recent_excess
        return len(excess) == _CHANGE_SAMPLES and abs(median(excess)) > _CHANGE

    def _start_again(self) -> None:
        """Forget the samples; what they showed is the prior, where it says what a token costs."""
        eager, replayed = self.fitted._replace(replayed=None), self.fitted.replayed
        before = self._replayed
        self._start_from(
            eager if eager.token_s > 0 else self._eager.prior,
            replayed if before is None or replayed is None or replayed.token_s > 0 else before.prior,
        )

    def _solve(self) -> None:
        cost = self.fitted
        if self._eager.rows:
            cost, self.determined = self._eager.solve()
        if self._replayed is not None and self._replayed.rows:
            cost = cost._replace(replayed=self._replayed.solve()[0])
        self.fitted = cost


def _kind(sample: IterationSample) -> tuple[int, int, int]:
    """Samples of one kind differ by less than a factor of two in length, cache and batch."""
    requests = sample.requests
    return (
        (sample.new_tokens // requests).bit_length(),
        (sample.cached_tokens // requests).bit_length(),
        requests.bit_length(),
    )


def _features(attention_work: float, new_tokens: int, cached_tokens: int, requests: int, is_first: bool) -> Vector:
    gap = 0.0 if is_first else 1.0
    return [attention_work, float(new_tokens), float(cached_tokens), requests - 1.0, 1.0, gap]


def _as_features(cost: CostCoefficients) -> Vector:
    """Return the coefficients in the order of the features; the gap is a part of kappa."""
    return [cost.alpha_s, cost.token_s, cost.read_s, cost.request_s, cost.kappa_s]


def _solved_with(gram: Matrix, moment: Vector, held: Mapping[int, float]) -> Vector:
    """Return the best non-negative unknowns where some are held."""
    free = [at for at in range(_FEATURES) if at not in held]
    reduced = [[gram[i][j] for j in free] for i in free]
    target = [moment[i] - sum(gram[i][j] * value for j, value in held.items()) for i in free]
    solution = [0.0] * _FEATURES
    for at, value in zip(free, solve_non_negative(reduced, target), strict=True):
        solution[at] = value
    for at, value in held.items():
        solution[at] = max(0.0, value)
    return solution


def _relative(features: Vector, duration_s: float) -> Vector:
    return [feature / duration_s for feature in features]


def _zeros() -> Matrix:
    return [[0.0] * _FEATURES for _ in range(_FEATURES)]


def _accumulate(gram: Matrix, moment: Vector, row: Sequence[float], sign: int) -> None:
    """Add (or take away) a row whose target is 1."""
    for i in range(_FEATURES):
        value = sign * row[i]
        moment[i] += value
        line = gram[i]
        for j in range(_FEATURES):
            line[j] += value * row[j]


def _push(recent: deque[float], ordered: list[float], value: float) -> None:
    """Append to a bounded window and to its sorted copy."""
    if len(recent) == _RECENT:
        del ordered[bisect_left(ordered, recent.popleft())]
    recent.append(value)
    insort(ordered, value)
