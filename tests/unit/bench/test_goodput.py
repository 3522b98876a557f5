"""What `bench/goodput.py` makes of runs: who is good, how far, and ours over the best other system's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

import goodput
from goodput import Figures, Run, Setting, Variant, ratios, run, scene_of, systems, worst
from sglang_ext.planner.simulation.events import EventLoop, ServedPrefill, SimRequest
from sglang_ext.planner.simulation.host_times import H200_HOST

SETTING = Setting("tetris-short", "h200-llama3-8b", "fitted", 4)


def served(key: int, prompt_tokens: int, ttft_s: float) -> ServedPrefill:
    return ServedPrefill(SimRequest(key, 0.0, prompt_tokens, 1), 0.0, ttft_s)


def test_host_time_is_in_every_iteration_and_chunk() -> None:
    plain, with_host = scene_of(SETTING._replace(host="none")), scene_of(SETTING)
    each_s = H200_HOST.replayed_s + H200_HOST.request_s
    longer_s = with_host.candidates[0].cost.predict_s(0, 8192) - plain.candidates[0].cost.predict_s(0, 8192)
    assert 0.5 * each_s < longer_s < 1.5 * each_s  # of two fits, 2% apart
    assert (plain.engine.iteration.request_s, with_host.engine.iteration.request_s) == (0.0, H200_HOST.request_s)
    assert plain.outside_s(1000) == 0.0
    assert with_host.outside_s(2000) > with_host.outside_s(1000) > H200_HOST.way_s + H200_HOST.front_s


@pytest.mark.parametrize("tokens", [500, 3000, 8000])
def test_a_prompt_takes_as_long_in_a_batch_as_in_a_chunk_on_one_instance(tokens: int) -> None:
    scene = scene_of(SETTING)
    requests = [SimRequest(key, 100.0 * key, tokens, 1) for key in range(10)]
    done = run(scene, systems()["fcfs"][3], requests, stops_early=False)
    times_s = [*done.times_s[True], *done.times_s[False]]
    assert times_s == pytest.approx([scene.candidates[0].cost.predict_s(0, tokens) + scene.outside_s(tokens)] * 9)


def test_one_late_short_prompt_in_a_hundred_is_good_and_two_are_not() -> None:
    requests = [SimRequest(key, 0.0, 100, 1) for key in range(1000)]
    counted = Run(scene_of(SETTING), requests, EventLoop(), stops_early=False)
    for key in range(9):
        counted.on_first_token(served(100 + key, 100, 0.5))
    assert counted.is_good
    counted.on_first_token(served(0, 100, 0.5))  # warms up
    assert counted.is_good
    counted.on_first_token(served(200, 100, 0.5))
    assert not counted.is_good


def test_long_prompts_have_at_least_a_second() -> None:
    scene = scene_of(SETTING)
    assert scene.objective_s(8192) == 0.4
    assert scene.objective_s(8193) == 1.0
    assert scene.objective_s(500_000) > 5.0


def test_the_bisection_finds_the_highest_good_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"a": 3.0, "b": 3.5, "c": 0.0}
    search = goodput._Search.__new__(goodput._Search)
    search.bound_per_s = 10.0
    monkeypatch.setattr(
        search, "is_good", lambda variant, rate_per_s: rate_per_s <= limits[variant.name], raising=False
    )
    variants = [Variant(name, lambda *_: None) for name in "abc"]
    assert search.goodput(variants[:1])[0] == pytest.approx(3.0, rel=0.05)
    per_s, best = search.goodput(variants)
    assert (best.name, per_s) == ("b", pytest.approx(3.5, rel=0.05))
    assert search.goodput(variants[2:])[0] == 0.0


def test_ratios_are_over_the_best_other_figure_by_figure() -> None:
    loads = {
        "1": {"one": Figures(0.1, 0.2, 0.3, 0.4, 0.5), "x": Figures(1, 0.1, 1, 0.8, 1), "y": Figures(1, 1, 0.3, 1, 1)}
    }
    over = ratios({"one": 4.0, "x": 2.0, "y": 1.0}, loads)
    assert over["goodput_over_best"] == 2.0
    assert over["short_p99_over_best"] == {"1": 2.0}
    assert over["long_p90_over_best"] == {"1": 0.5}
    assert over["long_p50_over_best"] == {"1": 1.0}
    assert ratios({"one": 4.0, "x": 0.0}, loads)["goodput_over_best"] is None


def test_the_worst_setting_counts() -> None:
    def result(trace: str, gain: float | None, p99: float) -> dict[str, object]:
        over = {f"{name}_over_best": {"1": p99} for name in ("short_p99", "long_p90", "long_p50")}
        return {"setting": SETTING._replace(trace=trace)._asdict(), "goodput_over_best": gain, **over}

    least = worst([result("azure", 1.1, 0.9), result("mooncake", None, 1.2), result("sharegpt", 1.4, 0.5)])
    assert least["goodput_over_best"] == 1.1
    assert least["goodput_over_best_with_prefixes"] == 1.4
    assert least["short_p99_over_best"] == 1.2
    assert least["traces"]["mooncake"]["short_p99_over_best"] == 1.2
    assert least["traces"]["mooncake"]["goodput_over_best"] is None
    assert least["traces"]["sharegpt"] == {
        "goodput_over_best": 1.4,
        "short_p99_over_best": 0.5,
        "long_p90_over_best": 0.5,
        "long_p50_over_best": 0.5,
    }
    assert least["no_other_is_good"] == ["mooncake h200-llama3-8b host fitted"]


@pytest.mark.parametrize("name", systems())
def test_every_system_serves_every_prompt(name: str) -> None:
    """Eight instances: fixed groups of eight need them."""
    requests = [SimRequest(key, 0.2 * key, 20_000 if key % 3 else 300, 1) for key in range(40)]
    scene = scene_of(SETTING._replace(instances=8))
    for variant in systems()[name]:
        done = run(scene, variant, requests, stops_early=False)
        assert len(done.times_s[True]) + len(done.times_s[False]) == 36
