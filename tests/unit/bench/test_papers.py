"""The figures that the papers' experiments report, from runs made up by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from sglang_ext.planner.simulation.events import ServedPrefill, SimRequest
from support import papers_medha, papers_tetris_run
from support.papers_tetris import FLUID, CriticalLoad, Measured, Trace, Ttft

TRACE = Trace("short", ((1000, 1),), bound_per_s=10.0, light_s=0.5, limit_s=12.5)
CRITICAL_PER_S = {
    FLUID: (4.0, 5.0),
    "pool": (5.0, 5.0),
    "pool-round-robin": (2.0, 5.0),
    "pool-noise-5": (4.0, 4.0),
    "pool-noise-10": (3.0, 4.0),
    "fixed-sp16": (1.0, 1.0),
    "fixed-sp8": (2.0, 3.0),
    "loongserve": (3.0, 1.0),
    "fixed-sp2": (4.0, 4.0),
    "loongserve-idle": (1.0, 2.0),
    "tetris-single": (3.0, 3.0),
    "tetris": (3.0, 3.5),
}


def served(key: int, ttft_s: float) -> ServedPrefill:
    return ServedPrefill(SimRequest(key, 5.0, 10, 1), 5.0, 5.0 + ttft_s)


def critical() -> dict[str, Measured]:
    return {name: Measured(name, None, rates) for name, rates in CRITICAL_PER_S.items()}


def times(**changed: tuple[float, float]) -> dict[str, Ttft]:
    """P50 and P99 of all that have times."""
    found = {name: (2.0, 20.0) for name in CRITICAL_PER_S if name != FLUID} | changed
    return {name: Ttft(p50_s, p50_s, p99_s) for name, (p50_s, p99_s) in found.items()}


def test_tetris_ratios_are_means_over_seeds_of_the_ratio_of_one_seed() -> None:
    one = papers_tetris_run.figures(TRACE, critical(), 2.5, times(pool=(1.0, 8.0), **{"fixed-sp8": (4.0, 10.0)}))
    assert one["critical_over_fluid"] == pytest.approx((5 / 4 + 5 / 5) / 2)
    assert one["critical_over_fluid_by_seed"] == pytest.approx([1.25, 1.0])
    assert one["critical_over_fluid_round_robin"] == pytest.approx((2 / 4 + 5 / 5) / 2)
    assert one["critical_over_fluid_noise_10"] == pytest.approx((3 / 4 + 4 / 5) / 2)
    assert one["critical_over_bound"] == 0.5
    # Of the paper's baselines the highest mean, of all others a fixed size that the paper does not have.
    assert (one["best_baseline"], one["best_of_all"]) == ("fixed-sp8", "fixed-sp2")
    assert one["critical_over_best_baseline"] == pytest.approx((5 / 2 + 5 / 3) / 2)
    assert one["critical_over_best_of_all"] == pytest.approx(5 / 4)
    assert one["at_rate_per_s"] == 2.5
    assert one["p99_over_lowest_baseline"] == pytest.approx(8 / 10)
    assert (one["p50_gain"], one["p99_gain"]) == (4.0, 10 / 8)


def test_tetris_other_systems_of_ours_are_no_baselines() -> None:
    found = times(pool=(1.0, 8.0), tetris=(1.0, 4.0), **{"pool-round-robin": (1.0, 1.0), "pool-noise-5": (1.0, 1.0)})
    assert papers_tetris_run.figures(TRACE, critical(), 2.5, found)["p99_over_lowest_baseline"] == 2.0
    again = papers_tetris_run.figures_at_best_of_all(4.0, found)
    assert again["at_best_of_all_per_s"] == 4.0
    assert again["p99_over_lowest_at_best_of_all"] == 2.0
    assert again["systems_at_best_of_all"]["tetris"] == {"p50_s": 1.0, "p99_s": 4.0}  # type: ignore[index]


def test_tetris_systems_without_a_cost_are_left_out() -> None:
    known = {name: one for name, one in critical().items() if name != "fixed-sp16"}
    found = {name: one for name, one in times().items() if name != "fixed-sp16"}
    assert papers_tetris_run.figures(TRACE, known, 2.5, found)["best_baseline"] == "fixed-sp8"


def figures_of(**seconds: float) -> papers_medha.Figures:
    names = ("p50_s", "p90_s", "p99_s", "short_p50_s", "short_p99_s", "long_p50_s", "long_p99_s")
    return papers_medha.Figures(*(seconds.get(name, 8.0) for name in names), 1.0, 1.0)


def test_medha_gains_are_against_the_better_baseline_figure_by_figure() -> None:
    found = {name: figures_of() for name in papers_medha.systems()}
    found["ours"] = figures_of(p50_s=1.0, p99_s=2.0, long_p50_s=4.0, long_p99_s=4.0)
    found["loongserve"] = figures_of(p50_s=2.0, p99_s=12.0, long_p99_s=2.0)
    found["loongserve-idle"] = figures_of(p50_s=3.0, p99_s=6.0)
    found["loongserve-split"] = figures_of(p99_s=3.0, long_p50_s=2.0)
    found["pool"] = figures_of(p99_s=5.0, long_p99_s=3.0)
    found["ours-lars"] = figures_of(p99_s=1.0, long_p99_s=6.0)
    found["spp"] = figures_of(p99_s=7.0, long_p50_s=3.0)
    assert papers_medha.gains(found) == pytest.approx(
        {
            "median_gain": 2.0,
            "p90_gain": 1.0,
            "p99_gain": 3.0,
            "long_p99_over_baseline": 2.0,
            "p99_gain_over_split": 1.5,
            "long_p50_gain_over_split": 0.5,
            "long_p99_gain_over_split": 2.0,
            "p99_gain_over_whole": 2.5,
            "long_p99_gain_over_whole": 0.75,
            "p99_gain_over_lars": 0.5,
            "long_p99_gain_over_lars": 1.5,
            "p50_gain_over_pipelines": 8.0,
            "p90_gain_over_pipelines": 1.0,
            "p99_gain_over_pipelines": 3.5,
            "long_p50_gain_over_pipelines": 0.75,
            "long_p99_gain_over_pipelines": 2.0,
        }
    )


def test_what_is_late_by_age_counts() -> None:
    one = papers_medha.summarise(
        [papers_medha.Ttfts([1.0, 2.0, 3.0], [10.0], 3, 1), papers_medha.Ttfts([4.0], [20.0, 30.0], 2, 1)]
    )
    assert (one.served_share, one.long_served_share) == pytest.approx((5 / 7, 2 / 3))
    assert (one.short_p50_s, one.long_p50_s, one.p99_s) == pytest.approx((2.5, 20.0, 29.4))


def test_ours_and_what_it_is_compared_with_differ_by_one_thing() -> None:
    systems = papers_medha.systems()
    ours = systems["ours"]
    assert systems["pool"] == ours._replace(short_instances=0)
    assert systems["ours-lars"].short_instances == ours.short_instances
    assert {name for name, one in systems.items() if one.pipelines is not None} == set(papers_medha.PIPELINES)
    for name in papers_medha.PIPELINES:
        pipelines, short = systems[name].pipelines, systems[name].short_instances
        assert pipelines is not None
        assert pipelines.count * pipelines.stages + short == papers_medha.INSTANCES
    assert systems["ours-lars"].candidates == ours.candidates


def test_the_critical_load_is_decided_by_one_percent_or_by_one_request() -> None:
    gave_up: list[bool] = []

    def fresh() -> CriticalLoad:
        gave_up.clear()
        return CriticalLoad(1.0, 220, 20, lambda: gave_up.append(True))

    load = fresh()
    for key in (0, 30, 40):  # of 200, two may be late; the first is warm-up
        load.on_first_token(served(key, 1.5))
    assert not load.is_above
    load.on_first_token(served(50, 1.5))
    assert load.is_above
    assert gave_up
    load = fresh()
    load.on_first_token(served(30, 3.0))
    assert not load.is_above
    load.on_first_token(served(31, 3.1))
    assert load.is_above
    load = fresh()
    load.on_refused(SimRequest(30, 0.0, 1, 1))
    assert load.is_above
