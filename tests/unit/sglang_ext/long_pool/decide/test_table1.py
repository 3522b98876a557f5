"""The cost model's fit, on samples of a known cost and on Table 1."""

from __future__ import annotations

import pytest

from sglang_ext.long_pool.decide.sp_cost import ChunkSample, SpCost, fit_sp_cost
from sglang_ext.long_pool.decide.table1 import LATENCY_S, fitted_cost, samples
from support.cdsp_cases import tabulated_candidates


def test_a_fit_finds_the_cost_that_made_the_samples() -> None:
    true = SpCost(0.05, 2e-5, 3e-10, 1e-10)
    chunks = [(c, n) for c in (0, 1024, 30_000) for n in (512, 4096, 20_000)]
    fitted = fit_sp_cost([ChunkSample(c, n, true.predict_s(c, n)) for c, n in chunks])
    for name in ("a_s", "b_s_per_token", "c_s_per_token2", "d_s_per_token2"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=1e-6)


def test_without_a_cached_prefix_c_is_twice_d() -> None:
    fitted = fit_sp_cost(samples(4))
    assert fitted.c_s_per_token2 == 2 * fitted.d_s_per_token2 > 0


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    # Falls below a straight line: d alone would be negative.
    fitted = fit_sp_cost([ChunkSample(0, n, t) for n, t in ((1000, 1.0), (2000, 1.9), (4000, 3.0))])
    assert fitted.d_s_per_token2 == 0
    assert min(fitted.a_s, fitted.b_s_per_token) > 0


def test_bad_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^samples: 2 do not determine 3"):
        fit_sp_cost([ChunkSample(0, 1, 1.0)] * 2)
    with pytest.raises(ValueError, match=r"^samples: \(0, 10, 0.0\) is not"):
        fit_sp_cost([*samples(2), ChunkSample(0, 10, 0.0)])


def test_every_entry_of_table_1_is_within_seven_percent() -> None:
    errors = [
        fitted_cost(size).predict_s(sample.cached_tokens, sample.new_tokens) / sample.duration_s - 1
        for size in LATENCY_S
        for sample in samples(size)
    ]
    assert len(errors) == 34
    assert max(map(abs, errors)) < 0.065


def test_no_entry_for_sp_1_at_256k() -> None:
    by_size = {candidate.size: candidate.cost for candidate in tabulated_candidates()}
    assert by_size[1].prompt_tokens[-1] == 128 * 1024  # type: ignore[union-attr]
    assert by_size[2].prompt_tokens[-1] == 256 * 1024  # type: ignore[union-attr]


def test_beyond_the_table_overhead_doubles_and_work_halves() -> None:
    known, twice = fitted_cost(16), fitted_cost(32)
    assert twice.a_s == 2 * known.a_s
    assert twice.d_s_per_token2 == known.d_s_per_token2 / 2
    with pytest.raises(ValueError, match=r"^size: 12 is not"):
        fitted_cost(12)
