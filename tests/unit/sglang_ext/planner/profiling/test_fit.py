"""Fits recover what the times were made of, and say how wrong they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.costs.engine_profile import FrontEnd, IterationCost, features
from sglang_ext.planner.profiling.fit import FitError, bad_forms, fit_measurements, fit_relative
from sglang_ext.planner.profiling.measured_points import MeasuredHandOver, MeasuredPoint, Measurements
from sglang_ext.planner.profiling.points import AskedPoints, Point, PointLimits, choose_points

POINTS = choose_points(AskedPoints(), PointLimits(2048, 30_000, 100_000, 1, 64))
FRONT_END = FrontEnd(0.003, 1e-6, 0.002, 2e-6)


def measured(cost: IterationCost, points: list[Point] = POINTS) -> Measurements:
    return Measurements(tuple(measured_point(point, cost.iteration_s(point.lengths)) for point in points), (), (), ())


def measured_point(point: Point, duration_s: float) -> MeasuredPoint:
    before_s = FRONT_END.entry_delay_s(point.prompt_tokens)
    after_s = FRONT_END.return_delay_s(point.prompt_tokens)
    return MeasuredPoint(point, (duration_s,) * 3, (before_s,) * 3, (after_s,) * 3)


COSTS = st.builds(
    IterationCost,
    st.floats(1e-3, 1e-1),
    st.floats(0, 2e-4),
    st.floats(2e-5, 1e-4),
    st.floats(0, 1e-6),
    st.floats(0, 1e-10),
    st.floats(1e-11, 1e-9),
    st.floats(1e-11, 1e-9),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(COSTS)
def test_the_full_form_recovers_every_time(cost: IterationCost) -> None:
    fit = fit_measurements(measured(cost))
    form = next(form for form in fit.forms if form.name == "iteration")
    assert form.error_max < 1e-4


def test_exact_papers_forms_are_recovered() -> None:
    alpha = 3e-10
    cost = IterationCost(0.02, 0.0, 4e-5, 0.0, 0.0, 2 * alpha, alpha)
    fit = fit_measurements(measured(cost))
    assert fit.prefill[:4] == pytest.approx((alpha, 4e-5, 0.0, 0.02), rel=1e-4, abs=1e-12)
    sp = fit.sp[1]
    assert (sp.a_s, sp.b_s_per_token, sp.c_s_per_token2, sp.d_s_per_token2) == pytest.approx(
        (0.02, 4e-5, 2 * alpha, alpha), rel=1e-4
    )
    assert max(form.error_max for form in fit.forms) < 1e-4
    assert bad_forms(fit, 0.01) == []


def test_a_form_that_lacks_a_term_is_bad_and_names_its_worst_point() -> None:
    cost = IterationCost(0.01, 0.004, 1e-5, 0.0, 5e-9, 1e-9, 5e-10)  # work per request and per C^2
    fit = fit_measurements(measured(cost))
    bad = {form.name: form for form in bad_forms(fit, 0.1)}
    assert set(bad) == {"sp 1", "prefill"}
    form = bad["prefill"]
    assert form.error_max == pytest.approx(abs(form.errors[form.worst]))
    assert form.error_p50 <= form.error_p90 <= form.error_max
    # Errors are of the prediction, relative to what was measured.
    point = form.worst
    predicted_s = fit.prefill.iteration_s(
        point.requests * point.new_tokens * (point.new_tokens + 2 * point.cached_tokens),
        point.requests * point.new_tokens,
        point.requests * point.cached_tokens,
    )
    assert form.errors[point] == pytest.approx(predicted_s / cost.iteration_s(point.lengths) - 1)


def test_without_cached_prefixes_attention_to_them_is_that_within_a_chunk() -> None:
    cost = IterationCost(0.01, 0.0, 1e-5, 0.0, 0.0, 0.0, 5e-9)
    fit = fit_measurements(measured(cost, [point for point in POINTS if point.cached_tokens == 0]))
    assert fit.iteration.cached_new_s == pytest.approx(1e-8, rel=1e-4)
    assert fit.sp[1].c_s_per_token2 == pytest.approx(1e-8, rel=1e-4)


def test_the_relative_error_is_what_counts() -> None:
    """Least squares on the absolute error would give (2 + 200) / 5 here, for x / 1 and 2 x / 100."""
    (x,) = fit_relative([(1.0,), (2.0,)], [1.0, 100.0])
    assert x == pytest.approx((1 + 0.02) / (1 + 0.02**2))


def test_no_coefficient_is_negative() -> None:
    """A time that falls with the cached tokens wants negative ones."""
    points = [Point(cached, new) for cached in (0, 512) for new in (8, 16, 32, 64)]
    measurements = tuple(
        measured_point(point, 0.01 + 1e-3 * point.new_tokens - 1e-5 * point.cached_tokens) for point in points
    )
    fit = fit_measurements(Measurements(measurements, (), (), ()))
    assert min(fit.iteration) >= 0
    assert min(fit.prefill[:4]) >= 0
    assert fit.prefill.read_s == fit.iteration.read_s == 0


def test_a_fit_by_which_tokens_are_free_is_refused() -> None:
    points = [Point(0, new) for new in (8, 16, 32, 64)]
    falling = tuple(measured_point(point, time_s) for point, time_s in zip(points, (4.0, 3.0, 2.0, 1.0), strict=True))
    with pytest.raises(FitError, match="by the fit of sp 1 a token costs nothing: measure longer chunks"):
        fit_measurements(Measurements(falling, (), (), ()))


def test_the_front_end_is_a_line_over_the_prompt() -> None:
    fit = fit_measurements(measured(IterationCost(0.01, 0.0, 1e-5, 0.0, 0.0, 2e-9, 1e-9)))
    assert fit.front_end == pytest.approx(FRONT_END, rel=1e-6)


def test_a_hand_over_is_what_clients_wait_for() -> None:
    measurements = measured(IterationCost(0.01, 0.0, 1e-5, 0.0, 0.0, 2e-9, 1e-9))
    hand_overs = tuple(MeasuredHandOver(tokens, (0.02,) * 2, (0.05 + 1e-5 * tokens,) * 2) for tokens in (16, 128, 1024))
    fit = fit_measurements(measurements._replace(hand_overs=hand_overs))
    assert fit.front_end.after_s == pytest.approx(0.05, rel=1e-6)
    assert fit.front_end.after_token_s == pytest.approx(1e-5, rel=1e-6)
    assert fit.front_end.before_s == pytest.approx(0.02, rel=1e-6)
    assert fit.front_end.before_token_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("points", [[], [Point(0, 8)] * 3, [Point(cached, 8) for cached in (0, 1, 2, 3, 4)]])
def test_too_few_points_are_refused(points: list[Point]) -> None:
    with pytest.raises(FitError, match="4 of two lengths at least"):
        fit_measurements(measured(IterationCost(1, 0, 0, 0, 0, 0, 0), points))


def test_features_are_sums_over_the_batch() -> None:
    assert features([(3, 10), (5, 0)]) == (1.0, 2.0, 8.0, 10.0, 100.0, 30.0, 34.0)
    cost = IterationCost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert cost.iteration_s([(3, 10), (5, 0)]) == 1 + 4 + 24 + 40 + 500 + 180 + 238
