"""Fits what was measured, by least squares on the relative error with coefficients of at least 0.

Three forms of one iteration: Tetris's Eq. 1 for each SP size (lone chunks), LAPS's sum of compute and memory terms (all
points), and `IterationCost`, which has every term (all points). Each is judged by its relative error at every point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from sglang_ext.costs.engine_profile import FrontEnd, IterationCost, PipelineCosts, features
from sglang_ext.costs.flow_shop import NO_HOP, Hop, Stages
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.nnls import solve_non_negative
from sglang_ext.long_pool.decide.sp_cost import ChunkSample, SpCost, fit_sp_cost
from sglang_ext.planner.profiling.measured_points import MeasuredPoint, Measurements
from sglang_ext.planner.profiling.points import Point
from sglang_ext_router.decide.instance_pressure import quantile

LEAST_POINTS = 4
_LEAST_RELATIVE = 0.01  # time of a stage over that of the slowest


class FitError(ValueError):
    """The measurements cannot be fitted; the text is one line for the user."""


class FormFit(NamedTuple):
    """Describes how well one form describes the points that it is for."""

    name: str
    errors: dict[Point, float]  # prediction over measurement, minus 1

    @property
    def error_p50(self) -> float:
        return quantile([abs(error) for error in self.errors.values()], 0.5)

    @property
    def error_p90(self) -> float:
        return quantile([abs(error) for error in self.errors.values()], 0.9)

    @property
    def worst(self) -> Point:
        return max(self.errors, key=lambda point: abs(self.errors[point]))

    @property
    def error_max(self) -> float:
        return abs(self.errors[self.worst])


class Fit(NamedTuple):
    """The coefficients of every form, and how well each fits."""

    sp: dict[int, SpCost]  # by SP size
    prefill: CostCoefficients
    iteration: IterationCost
    front_end: FrontEnd
    forms: tuple[FormFit, ...]


def fit_measurements(measurements: Measurements) -> Fit:
    """Fit all forms. FitError for too few points, or points by which a token costs nothing."""
    points = measurements.points
    lone = [measured_point for measured_point in points if measured_point.point.requests == 1]
    if len(lone) < LEAST_POINTS or len({measured_point.point.new_tokens for measured_point in lone}) < 2:
        raise FitError(f"{len(lone)} chunks were measured: {LEAST_POINTS} of two lengths at least are needed for a fit")
    first_size = min(measured_point.point.sp_size for measured_point in lone)
    single = [measured_point for measured_point in points if measured_point.point.sp_size == first_size]
    sp = {size: _fit_sp(lone, size) for size in sorted({measured_point.point.sp_size for measured_point in lone})}
    prefill = _fit_prefill(single)
    iteration = _fit_iteration(single)
    for name, per_token_s in (
        *((f"sp {size}", cost.b_s_per_token + cost.d_s_per_token2) for size, cost in sp.items()),
        ("prefill", prefill.token_s + prefill.alpha_s),
        ("iteration", iteration.token_s + iteration.new2_s),
    ):
        if not per_token_s > 0:
            raise FitError(f"by the fit of {name} a token costs nothing: measure longer chunks (points.new_tokens)")
    forms = [
        *(
            _judge(
                f"sp {size}",
                [measured_point for measured_point in lone if measured_point.point.sp_size == size],
                _by_sp(cost),
            )
            for size, cost in sp.items()
        ),
        _judge("prefill", single, lambda point: _prefill_s(prefill, point)),
        _judge("iteration", single, lambda point: iteration.iteration_s(point.lengths)),
    ]
    return Fit(sp, prefill, iteration, _fit_front_end(measurements), tuple(forms))


def pipeline_costs(measurements: Measurements, fit: Fit, stages: int, kv_tokens: int) -> PipelineCosts:
    """Return what a stage takes, from the passages that the forms were fitted to and the pace of results. FitError
    without it.

    The slowest stage takes the same share of every passage. Where the stages are alike what is left is hops, linear in
    the tokens; where it takes more than a passage divided by the stages, the others are faster, each by as much, and
    hops cannot be derived from that. The slowest is taken to be the last one, which has the head, and the longer part
    of layers that cannot be divided.
    """
    pace = measurements.pace
    if pace is None:
        raise FitError("the pace of the pipeline was not measured")
    share = pace.share
    relative: tuple[float, ...] = ()
    hop = NO_HOP
    if stages * share > 1:
        others = max(_LEAST_RELATIVE, (1 / share - 1) / (stages - 1))
        relative = (others,) * (stages - 1) + (1.0,)
    else:
        lone = [point for point in measurements.points if point.point.requests == 1 and point.point.cached_tokens == 0]
        left = (1 - stages * share) / (stages - 1)
        hop = Hop(
            *_line([(measured_point.point.new_tokens, left * measured_point.duration_s) for measured_point in lone])
        )
    return PipelineCosts(
        Stages(stages, hop, relative),
        fit.prefill.times(share),
        IterationCost(*(share * value for value in fit.iteration)),
        kv_tokens,
    )


def bad_forms(fit: Fit, max_error: float) -> list[FormFit]:
    """The forms of which the P90 of the relative error is above `max_error`."""
    return [form for form in fit.forms if form.error_p90 > max_error]


def fit_relative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The x >= 0 that minimises the sum of (row x / target - 1)^2; targets are above 0."""
    scaled = [[value / target for value in row] for row, target in zip(rows, targets, strict=True)]
    size = range(len(scaled[0]))
    gram = [[sum(row[i] * row[j] for row in scaled) for j in size] for i in size]
    return solve_non_negative(gram, [sum(row[i] for row in scaled) for i in size])


def _fit_sp(lone: Iterable[MeasuredPoint], size: int) -> SpCost:
    samples = [
        ChunkSample(measured_point.point.cached_tokens, measured_point.point.new_tokens, measured_point.duration_s)
        for measured_point in lone
        if measured_point.point.sp_size == size
    ]
    try:
        return fit_sp_cost(samples)
    except ValueError as error:
        raise FitError(f"SP size {size}: {error}") from None


def _fit_prefill(points: Sequence[MeasuredPoint]) -> CostCoefficients:
    rows = [_prefill_features(point.point) for point in points]
    alpha_s, token_s, read_s, kappa_s = fit_relative(rows, [point.duration_s for point in points])
    return CostCoefficients(alpha_s, token_s, read_s, kappa_s)


def _fit_iteration(points: Sequence[MeasuredPoint]) -> IterationCost:
    """Fit the iteration. Without cached tokens the cost of attending to them is that of Eq. 1 with c = 2d."""
    cost = IterationCost(
        *fit_relative([features(point.point.lengths) for point in points], [point.duration_s for point in points])
    )
    if all(point.point.cached_tokens == 0 for point in points):
        return cost._replace(cached_new_s=2 * cost.new2_s)
    return cost


def _fit_front_end(measurements: Measurements) -> FrontEnd:
    if measurements.hand_overs:
        before = [(over.prompt_tokens, median(over.before_s)) for over in measurements.hand_overs]
        after = [(over.prompt_tokens, median(over.after_s)) for over in measurements.hand_overs]
    else:
        lone = [point for point in measurements.points if point.point.requests == 1]
        before = [(measured_point.point.prompt_tokens, median(measured_point.before_s)) for measured_point in lone]
        after = [(measured_point.point.prompt_tokens, median(measured_point.after_s)) for measured_point in lone]
    return FrontEnd(*_line(before), *_line(after))


def _line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Constant and slope, neither below 0, of times against tokens. Times of 0 or less are ignored."""
    positive = [(tokens, time_s) for tokens, time_s in samples if time_s > 0]
    if not positive:
        return 0.0, 0.0
    constant, slope = fit_relative([(1.0, float(tokens)) for tokens, _ in positive], [time_s for _, time_s in positive])
    return constant, slope


def _prefill_features(point: Point) -> tuple[float, float, float, float]:
    new, cached = point.new_tokens, point.cached_tokens
    return (
        point.requests * new * (new + 2.0 * cached),
        float(point.requests * new),
        float(point.requests * cached),
        1.0,
    )


def _prefill_s(cost: CostCoefficients, point: Point) -> float:
    work = point.requests * point.new_tokens * (point.new_tokens + 2.0 * point.cached_tokens)
    return cost.iteration_s(work, point.requests * point.new_tokens, point.requests * point.cached_tokens)


def _by_sp(cost: SpCost) -> Callable[[Point], float]:
    return lambda point: cost.predict_s(point.cached_tokens, point.new_tokens)


def _judge(name: str, points: Iterable[MeasuredPoint], predict_s: Callable[[Point], float]) -> FormFit:
    return FormFit(name, {point.point: predict_s(point.point) / point.duration_s - 1 for point in points})
