"""The cost model adds up over chunks, and the boundary is where its two sides are equal."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.cost_model import CostCoefficients, CostFit, Determined, IterationSample, boundary_tokens
from sglang_ext.laps.decide.nnls import inverse_diagonal, inverse_form, solve_non_negative

COST = CostCoefficients(alpha_s=3e-8, token_s=2e-5, read_s=1e-7, kappa_s=4e-3)


def test_an_iteration_is_the_sum_of_its_terms() -> None:
    assert COST.iteration_s(1000.0, 20, 300) == pytest.approx(3e-5 + 4e-4 + 3e-5 + 4e-3)
    assert COST.chunk_s(20, 300) == pytest.approx(COST.iteration_s(20 * (20 + 600), 20, 300))
    many = COST._replace(request_s=2e-3)
    assert many.iteration_s(1000.0, 20, 300, 4) == pytest.approx(COST.iteration_s(1000.0, 20, 300) + 6e-3)
    assert many.chunk_s(20, 300) == COST.chunk_s(20, 300)


def test_a_slower_machine() -> None:
    cost = COST._replace(request_s=2e-3, replayed=CostCoefficients(0.0, 1e-6, 0.0, 1e-3))
    slower = cost.times(3)
    for is_replayed in (False, True):
        features = (1000.0, 20, 300, 4, is_replayed)
        assert slower.iteration_s(*features) == pytest.approx(3 * cost.iteration_s(*features))


def test_a_replayed_iteration_has_costs_of_its_own() -> None:
    both = COST._replace(replayed=CostCoefficients(0.0, 1e-6, 0.0, 1e-3))
    assert both.iteration_s(1000.0, 64, 300, is_replayed=True) == pytest.approx(64e-6 + 1e-3)
    assert both.iteration_s(1000.0, 64, 300) == COST.iteration_s(1000.0, 64, 300)
    assert COST.iteration_s(1000.0, 64, 300, is_replayed=True) == COST.iteration_s(1000.0, 64, 300)


def test_a_prior_from_throughput() -> None:
    prior = CostCoefficients.from_throughput(10_000, 0.005)
    assert prior.chunk_s(1000, 0) == pytest.approx(0.105)


@pytest.mark.parametrize(("tokens_per_s", "fixed_s"), [(0.0, 0.1), (-1.0, 0.1), (100.0, -0.1)])
def test_a_prior_that_is_none_is_refused(tokens_per_s: float, fixed_s: float) -> None:
    with pytest.raises(ValueError, match="tokens_per_s must be above 0"):
        CostCoefficients.from_throughput(tokens_per_s, fixed_s)


def test_a_prompt_within_the_budget_is_one_chunk() -> None:
    assert COST.prefill_s(100, 50, 1.0) == COST.chunk_s(100, 50)


@given(chunk=st.integers(200, 3000), chunks=st.integers(2, 12), cached=st.integers(0, 20_000))
def test_the_closed_form_is_near_the_sum_over_chunks(chunk: int, chunks: int, cached: int) -> None:
    total = chunk * chunks
    summed_s = sum(COST.chunk_s(chunk, cached + index * chunk) for index in range(chunks))
    whole_s = COST.chunk_s(total, cached)
    assert summed_s > whole_s
    predicted_s = COST.prefill_s(total, cached, whole_s / chunks * 1.0001)
    assert predicted_s == pytest.approx(summed_s, rel=0.01)


@given(
    alpha=st.floats(1e-9, 1e-6),
    token=st.floats(1e-6, 1e-3),
    read=st.floats(0, 1e-5),
    kappa=st.floats(0, 0.1),
    write_share=st.floats(0, 1),
    cached=st.integers(0, 100_000),
    with_kappa=st.booleans(),
)
def test_at_the_boundary_compute_equals_memory(
    alpha: float, token: float, read: float, kappa: float, write_share: float, cached: int, with_kappa: bool
) -> None:
    write_s = write_share * token
    limit = boundary_tokens(CostCoefficients(alpha, token, read, kappa), write_s, cached, with_kappa=with_kappa)
    assert limit is not None
    compute_s = alpha * limit * (limit + 2 * cached) + (token - write_s) * limit
    memory_s = write_s * limit + read * cached + (kappa if with_kappa else 0.0)
    assert compute_s == pytest.approx(memory_s, rel=1e-6, abs=1e-12)


def test_the_papers_forms() -> None:
    cost = CostCoefficients(alpha_s=1e-7, token_s=5e-5, read_s=4e-6, kappa_s=0.0)
    gamma_w, beta = 4e-5, 1e-5
    assert boundary_tokens(cost, gamma_w, 0, with_kappa=False) == pytest.approx((gamma_w - beta) / 1e-7)
    assert boundary_tokens(cost, gamma_w / 4, 0, with_kappa=False) == 0.0
    far = boundary_tokens(cost, gamma_w, 10**9, with_kappa=False)
    assert far == pytest.approx(4e-6 / (2 * 1e-7), rel=1e-3)  # gamma_r / 2 alpha


def test_memory_bound_for_ever_has_no_boundary() -> None:
    assert boundary_tokens(CostCoefficients(0.0, 1e-5, 0.0, 0.0), 9e-6, 0, with_kappa=True) is None


TRUTH = CostCoefficients(alpha_s=3e-7, token_s=2.6e-3, read_s=2e-5, kappa_s=0.07, request_s=0.02)
PRIOR = CostCoefficients.from_throughput(5000, 0.01)  # ten times too fast
ALL = Determined(True, True, True, True)


def iteration(random: Random, truth: CostCoefficients = TRUTH, *, with_cache: bool = True) -> IterationSample:
    new_tokens = int(2 ** random.uniform(3, 11))
    requests = random.choice([1, 1, 2, 4]) if new_tokens <= 256 else 1
    cached_tokens = random.choice([0, int(2 ** random.uniform(0, 12))]) if with_cache else 0
    work = float(requests * new_tokens * (new_tokens + 2 * cached_tokens))
    duration_s = truth.iteration_s(work, requests * new_tokens, requests * cached_tokens, requests)
    return IterationSample(
        work, requests * new_tokens, requests * cached_tokens, requests, duration_s * random.lognormvariate(0, 0.05)
    )


def test_without_samples_the_prior_holds() -> None:
    fit = CostFit(PRIOR)
    assert fit.coefficients == PRIOR
    assert fit.report().error_p50 is None
    assert fit.report().pace_quantiles is None
    assert fit.boundary_tokens(1e-3, 0) is None


def test_a_prior_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        CostFit(CostCoefficients(0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_it_finds_the_truth(outliers: float) -> None:
    random = Random(1)
    fit = CostFit(PRIOR)
    for _ in range(500):
        sample = iteration(random)
        if random.random() < outliers:
            sample = sample._replace(duration_s=100 * sample.duration_s)
        fit.add(sample)
    assert fit.fitted[:4] == pytest.approx(TRUTH[:4], rel=0.1)
    assert fit.fitted.request_s == pytest.approx(TRUTH.request_s, rel=0.25)
    assert fit.determined == ALL
    report = fit.report()
    assert report.samples == 500
    assert report.error_p50 is not None
    assert report.error_p50 < 0.06
    assert report.error_p90 is not None
    assert report.error_p90 < 0.2


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_one_outlier_does_not_move_a_prediction(factor: float) -> None:
    random = Random(2)
    fit = CostFit(PRIOR)
    for _ in range(50):
        fit.add(iteration(random))
    before_s = fit.coefficients.chunk_s(256, 0)
    sample = iteration(random)
    fit.add(sample._replace(duration_s=factor * sample.duration_s))
    assert fit.coefficients.chunk_s(256, 0) == pytest.approx(before_s, rel=0.1)


def test_the_first_iteration_may_be_absurdly_slow() -> None:
    random = Random(3)
    fit = CostFit(PRIOR)
    sample = iteration(random)
    fit.add(sample._replace(duration_s=100 * sample.duration_s))
    for _ in range(10):
        fit.add(iteration(random))
    assert fit.coefficients.chunk_s(256, 0) == pytest.approx(TRUTH.chunk_s(256, 0), rel=0.3)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    random = Random(4)
    fit = CostFit(PRIOR)
    slower = TRUTH.times(3)
    for _ in range(300):
        fit.add(iteration(random))
    for _ in range(1500):
        fit.add(iteration(random, slower))
    assert fit.coefficients.chunk_s(512, 0) == pytest.approx(slower.chunk_s(512, 0), rel=0.15)


def test_an_hour_of_short_batches_does_not_forget_long_chunks() -> None:
    random = Random(5)
    fit = CostFit(PRIOR)
    for _ in range(200):
        fit.add(iteration(random))
    for _ in range(3000):
        fit.add(IterationSample(64 * 64, 64, 0, 1, TRUTH.chunk_s(64, 0) * random.lognormvariate(0, 0.05)))
    assert fit.coefficients.chunk_s(2048, 2048) == pytest.approx(TRUTH.chunk_s(2048, 2048), rel=0.1)


def test_what_was_never_seen_is_not_determined() -> None:
    random = Random(6)
    fit = CostFit(PRIOR)
    for _ in range(200):
        fit.add(iteration(random, with_cache=False))
    assert fit.determined == Determined(alpha=True, token=True, read=False, kappa=True)
    assert fit.boundary_tokens(1e-3, 1000) is None
    assert fit.boundary_tokens(None, 0) is None
    assert fit.boundary_tokens(1e-3, 0) == pytest.approx(boundary_tokens(TRUTH, 1e-3, 0, with_kappa=True), rel=0.1)


def test_one_shape_determines_nothing_but_its_own_time() -> None:
    random = Random(7)
    fit = CostFit(PRIOR)
    for _ in range(200):
        fit.add(IterationSample(64 * 64, 64, 0, 1, TRUTH.chunk_s(64, 0) * random.lognormvariate(0, 0.05)))
    assert fit.determined == Determined(False, False, False, False)
    assert fit.coefficients.chunk_s(64, 0) == pytest.approx(TRUTH.chunk_s(64, 0), rel=0.1)
    assert fit.coefficients.chunk_s(1024, 0) == pytest.approx(TRUTH.chunk_s(1024, 0), rel=0.5)  # the prior, scaled


def test_what_is_kept_is_bounded_and_adds_up() -> None:
    random = Random(8)
    fit = CostFit(PRIOR)
    for _ in range(3000):
        fit.add(iteration(random)._replace(cached_tokens=random.randrange(2**20), requests=random.randrange(1, 60)))
    kept = fit._eager
    rows = [row for kind in kept.kinds.values() for row in kind.rows]
    assert len(rows) == kept.rows
    assert len(kept.kinds) <= 256
    assert max(len(kind.rows) for kind in kept.kinds.values()) <= 16
    for i in range(6):
        for j in range(6):
            assert kept._gram[i][j] == pytest.approx(sum(row[i] * row[j] for row in rows), rel=1e-6)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_sample_that_says_nothing_is_ignored(duration_s: float) -> None:
    fit = CostFit(PRIOR)
    fit.add(IterationSample(100.0, 10, 0, 1, duration_s))
    fit.add(IterationSample(0.0, 0, 0, 0, 1.0))
    assert fit.report().samples == 0
    assert fit.coefficients == PRIOR


def test_samples_that_no_model_explains() -> None:
    """A fit can end with the cached tokens alone; a change of the machine then starts from the prior before it."""
    fit = CostFit(PRIOR)
    for duration_s in [6.0, 2.0, 9.0, 17.0, 10.0, 35.0] * 30:
        fit.add(IterationSample(0.0, 1, 1000, 1, duration_s))
    fit.fitted = CostCoefficients(0.0, 0.0, 1e-9, 0.0)
    for _ in range(100):
        fit.add(IterationSample(4096.0, 64, 0, 1, 1.0))
    assert fit.coefficients.chunk_s(64, 0) == pytest.approx(1.0, rel=0.2)


def replays_beside_eager_batches(random: Random, count: int) -> list[IterationSample]:
    """Short batches on graphs of 64 tokens and up to 8 requests, and eager long chunks, with 3% of noise."""
    samples = []
    for _ in range(count):
        noise = random.lognormvariate(0, 0.03)
        if random.random() < 0.7:
            requests = random.choice([1, 2, 4, 8])
            work = float(sum(random.randint(20, 64) ** 2 for _ in range(requests)))
            duration_s = (0.003 + 9e-6 * 64 * requests) * noise
            samples.append(IterationSample(work, 64 * requests, 0, requests, duration_s, is_replayed=True))
        else:
            new = random.choice([1024, 2048, 4096, 8192])
            duration_s = (0.012 + 28e-6 * new + 2e-10 * new * new) * noise
            samples.append(IterationSample(float(new * new), new, 0, 1, duration_s))
    return samples


def test_replays_and_eager_batches_are_told_apart() -> None:
    fit = CostFit(CostCoefficients.from_throughput(20_000, 0.01))
    for sample in replays_beside_eager_batches(Random(9), 400):
        fit.add(sample)
    report = fit.report()
    assert report.error_p50 is not None
    assert report.error_p50 < 0.05
    assert report.error_p90 is not None
    assert report.error_p90 < 0.12
    cost = fit.coefficients
    assert cost.chunk_s(300, 0) == pytest.approx(0.012 + 28e-6 * 300, rel=0.15)
    assert cost.iteration_s(3000.0, 128, 0, 2, is_replayed=True) == pytest.approx(0.003 + 9e-6 * 128, rel=0.05)
    assert report.replayed_kappa_s == pytest.approx(0.003, rel=0.1)
    assert report.kappa_s == pytest.approx(0.012, rel=0.2)


def test_what_passes_between_two_iterations_is_part_of_kappa() -> None:
    """The first one after idle time is shorter by it, and predicted so."""
    random = Random(11)
    fit = CostFit(PRIOR)
    for _ in range(400):
        sample, is_first = iteration(random), random.random() < 0.5
        gap_s = 0.0 if is_first else 0.04
        fit.add(sample._replace(duration_s=sample.duration_s + gap_s, is_first=is_first))
    assert fit.fitted.kappa_s == pytest.approx(TRUTH.kappa_s + 0.04, rel=0.1)
    assert fit.determined.kappa
    report = fit.report()
    assert report.error_p50 is not None
    assert report.error_p50 < 0.06


def test_the_report_says_how_the_latest_iterations_vary() -> None:
    random = Random(13)
    fit = CostFit(PRIOR)
    for _ in range(300):
        fit.add(iteration(random))
    for number in range(64):  # one in four is half as fast
        sample = iteration(random)
        fit.add(sample._replace(duration_s=sample.duration_s * (1 + (number % 4 == 0))))
    paces = fit.report().pace_quantiles
    assert paces is not None
    assert len(paces) == 10
    assert list(paces) == sorted(paces)
    assert [0.9 < pace < 1.1 for pace in paces[1:7]] == [True] * 6
    assert [1.7 < pace < 2.3 for pace in paces[8:]] == [True] * 2


def test_predictions_follow_the_pace_of_the_machine() -> None:
    """A neighbour that comes for a while is seen after a few iterations, and is no other machine."""
    random = Random(12)
    fit = CostFit(PRIOR)
    for _ in range(300):
        fit.add(iteration(random))
    before = fit.fitted
    for _ in range(12):
        sample = iteration(random)
        fit.add(sample._replace(duration_s=1.3 * sample.duration_s))
    assert fit.coefficients.chunk_s(512, 0) > 1.12 * TRUTH.chunk_s(512, 0)
    assert fit.fitted.chunk_s(512, 0) == pytest.approx(before.chunk_s(512, 0), rel=0.15)
    for _ in range(12):
        fit.add(iteration(random))
    assert fit.coefficients.chunk_s(512, 0) == pytest.approx(TRUTH.chunk_s(512, 0), rel=0.1)


def test_the_first_replays_are_believed() -> None:
    """They take a fifth of what eager batches let expect, which is no outlier."""
    random = Random(10)
    fit = CostFit(PRIOR)
    for _ in range(200):
        fit.add(iteration(random))
    for _ in range(3):
        fit.add(IterationSample(4096.0, 64, 0, 1, TRUTH.chunk_s(64, 0) / 5, is_replayed=True))
    assert fit.coefficients.iteration_s(4096.0, 64, 0, is_replayed=True) == pytest.approx(TRUTH.chunk_s(64, 0) / 5, 0.1)
    assert fit.coefficients.chunk_s(64, 0) == pytest.approx(TRUTH.chunk_s(64, 0), rel=0.1)


@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.integers(0, 8192), st.integers(1, 64), st.floats(1e-6, 1e3), st.booleans()),
        max_size=60,
    )
)
def test_whatever_comes_predictions_stay_positive_and_finite(samples: list[tuple[int, int, int, float, bool]]) -> None:
    fit = CostFit(PRIOR)
    for new_tokens, cached_tokens, requests, duration_s, is_replayed in samples:
        work = float(new_tokens * (new_tokens + 2 * cached_tokens))
        fit.add(IterationSample(work, new_tokens, cached_tokens, requests, duration_s, is_replayed))
        cost = fit.coefficients
        assert min(cost[:5]) >= 0
        assert cost.replayed is None or min(cost.replayed[:5]) >= 0
        assert 0 < cost.chunk_s(100, 100) < 1e9
        assert 0 < cost.iteration_s(1e4, 100, 100, 1, is_replayed=True) < 1e9


@pytest.mark.slow
@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=12),
    st.lists(st.floats(-10, 10), min_size=12, max_size=12),
)
def test_the_solution_is_the_best_non_negative_one(rows: list[list[float]], targets: list[float]) -> None:
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(4)] for i in range(4)]
    moment = [sum(row[i] * target for row, target in zip(rows, targets, strict=False)) for i in range(4)]
    solution = solve_non_negative(gram, moment)
    assert min(solution) >= 0

    def objective(x: list[float]) -> float:
        return sum(
            (sum(a * b for a, b in zip(row, x, strict=True)) - target) ** 2
            for row, target in zip(rows, targets, strict=False)
        )

    best = objective(solution)
    slack = 1e-3 * (1 + sum(target**2 for target in targets[: len(rows)]))
    for index in range(4):
        for step in (0.1, -0.1):
            other = list(solution)
            other[index] = max(0.0, other[index] + step)
            assert best <= objective(other) + slack


def test_the_inverse_diagonal_by_hand() -> None:
    assert inverse_diagonal([[4.0, 0.0], [0.0, 0.0]]) == [pytest.approx(0.25), float("inf")]
    variances = inverse_diagonal([[2.0, 1.0], [1.0, 2.0]])
    assert variances == pytest.approx([2 / 3, 2 / 3])


def test_the_inverse_form_by_hand() -> None:
    gram = [[2.0, 1.0], [1.0, 2.0]]
    assert inverse_form(gram, [1.0, 0.0]) == pytest.approx(2 / 3)
    assert inverse_form(gram, [1.0, 1.0]) == pytest.approx(2 / 3 - 2 / 3 + 2 / 3)
    assert inverse_form([[4.0, 0.0], [0.0, 0.0]], [1.0, 1.0]) == float("inf")
    assert inverse_form([[4.0, 0.0], [0.0, 0.0]], [2.0, 0.0]) == pytest.approx(1.0)


def test_what_lies_between_samples_is_determined_and_what_lies_far_beyond_is_not() -> None:
    """Whether it is alpha or tokens that take the time need not be known for the first."""
    random = Random(13)
    fit = CostFit(PRIOR)
    assert not fit.is_determined(64)
    for _ in range(60):
        new = random.randrange(16, 128)
        fit.add(IterationSample(float(new * new), new, 0, 1, TRUTH.chunk_s(new, 0) * random.lognormvariate(0, 0.1)))
    assert fit.is_determined(100)
    assert not fit.is_determined(100_000)


def test_a_fixed_cost_that_the_samples_do_not_show_is_at_least_the_priors() -> None:
    fit = CostFit(CostCoefficients(0.0, 1e-3, 0.0, 0.02))
    assert fit.fixed_s() == 0.02
    for tokens in (100, 1000) * 20:
        fit.add(IterationSample(float(tokens * tokens), tokens, 0, 1, 1e-3 * tokens))
    assert not fit.determined.kappa
    assert fit.coefficients.kappa_s < 0.005
    assert 0.015 < fit.fixed_s() < 0.025


def test_a_handful_of_mixed_batches_says_nothing_about_a_further_request() -> None:
    """Their noise, of a busy machine, is not taken for a cost: the prior knows of none."""
    truth = CostCoefficients(1e-7, 3.7e-3, 0.0, 0.09)
    for seed in range(10):
        random = Random(seed)
        fit = CostFit(PRIOR)
        for number in range(120):
            requests, new = (2, 2 * random.randint(16, 64)) if number % 30 == 7 else (1, random.randint(16, 1024))
            duration_s = truth.iteration_s(float(new * new), new, 0, requests) * random.lognormvariate(0, 0.3)
            fit.add(IterationSample(float(new * new), new, 0, requests, duration_s))
        assert fit.fitted.request_s == 0
        assert fit.fitted.chunk_s(500, 0) == pytest.approx(truth.chunk_s(500, 0), rel=0.3)


def test_a_further_request_that_only_comes_with_tokens_is_not_told_apart_from_them() -> None:
    """Batches of equal prompts: requests and tokens are collinear, and the time of such a batch is right."""
    random = Random(4)
    fit = CostFit(PRIOR)
    for _ in range(200):
        requests = random.choice([1, 2, 3, 4])
        work = float(requests * 64 * 64)
        duration_s = TRUTH.iteration_s(work, 64 * requests, 0, requests) * random.lognormvariate(0, 0.05)
        fit.add(IterationSample(work, 64 * requests, 0, requests, duration_s))
    assert fit.fitted.request_s == 0
    for requests in (1, 2, 4):
        features = (requests * 64.0 * 64, 64 * requests, 0, requests)
        assert fit.fitted.iteration_s(*features) == pytest.approx(TRUTH.iteration_s(*features), rel=0.1)


def test_a_neighbour_that_slows_the_host_for_a_while_does_not_spoil_predictions() -> None:
    """Twice as slow in the middle, with 10% of noise throughout: nine of ten predictions are within a quarter."""
    random = Random(5)
    fit = CostFit(PRIOR)
    errors = []
    for number in range(900):
        sample = iteration(random)
        slowness = 1.8 if 400 <= number < 600 else 1.0
        sample = sample._replace(duration_s=sample.duration_s * slowness * random.lognormvariate(0, 0.1))
        if number >= 200:
            predicted_s = fit.coefficients.iteration_s(*sample[:4])
            errors.append(abs(predicted_s - sample.duration_s) / sample.duration_s)
        fit.add(sample)
    errors.sort()
    assert errors[len(errors) * 9 // 10] < 0.25
