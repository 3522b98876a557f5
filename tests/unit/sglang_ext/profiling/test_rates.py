"""`sglang-ext profile rates`: the best rate of each load, going on after an interruption, errors of one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

import pytest

from sglang_ext.costs.improvement_rates import RatesFileError, load_improvement_rates
from sglang_ext.policy.cdsp.improvement_rate import ImprovementRateTable, ProfiledRate
from sglang_ext.policy.cdsp.sp_cost import SpCandidate, SpCost
from sglang_ext.policy.cdsp.table1 import fitted_candidates
from sglang_ext.profiling import profile_rates
from sglang_ext.profiling.rates import (
    Objective,
    RatesSearch,
    Trial,
    TrialError,
    TrialTtft,
    carrying_rate_per_s,
    choose_rate,
    run_trial,
)
from sglang_ext.simulation.cluster import ClusterSpec
from sglang_ext.simulation.run import RunOptions, simulate
from sglang_ext.simulation.systems import ClusterSystem, SystemOptions, build_cluster
from sglang_ext.simulation.workload import drawn_requests

LENGTHS = "num_prefill_tokens,num_decode_tokens\n4000,20\n200,5\n30000,50\n"
# Alone 1,000 tokens take 1 s, two together 0.6 s.
PAIR = (SpCandidate(1, SpCost(0.0, 1e-3, 0.0, 0.0)), SpCandidate(2, SpCost(0.1, 0.5e-3, 0.0, 0.0)))


def search(**changes: object) -> RatesSearch:
    values: dict[str, object] = {
        "system": ClusterSystem.TETRIS,
        "cluster": ClusterSpec(2),
        "candidates": PAIR,
        "lengths": ((1000, 1),),
        "requests": 10,
        "seeds": (0, 1),
        "arrival_rates": (0.001,),
        "improvement_rates": (0.1, 0.5),
    }
    return RatesSearch(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text(LENGTHS, encoding="utf-8")
    return path


def command(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    profile_rates.add_arguments(parser)
    return profile_rates.run(parser.parse_args([str(one) for one in arguments]))


# ---- the search ----


def test_the_rate_that_the_instances_can_carry() -> None:
    # The least time of instances is 1 s on one.
    assert carrying_rate_per_s(PAIR, 2, ((1000, 1),)) == pytest.approx(2.0)


def test_a_trial_is_one_simulation() -> None:
    # No prompt waits at one arrival in 1,000 s: the second instance is worth 40%, more than 10% and less than 50%.
    assert run_trial(search(), Trial(0.001, 0.1, 0)) == pytest.approx((0.6, 0.6, 0.6))
    assert run_trial(search(), Trial(0.001, 0.5, 0)) == pytest.approx((1.0, 1.0, 1.0))


def test_what_cannot_be_served_is_reported() -> None:
    with pytest.raises(TrialError, match="a prompt of 1000 tokens cannot be served by these instances"):
        run_trial(search(cluster=ClusterSpec(2, kv_tokens=100)), Trial(0.001, 0.1, 0))


def test_the_lowest_time_wins_and_the_smaller_rate_among_equals() -> None:
    wanted = search(improvement_rates=(0.1, 0.3, 0.5), seeds=(0, 1))
    results = {
        Trial(0.001, 0.1, 0): TrialTtft(1.0, 9.0, 9.0),
        Trial(0.001, 0.1, 1): TrialTtft(3.0, 9.0, 9.0),
        Trial(0.001, 0.3, 0): TrialTtft(2.0, 8.0, 9.5),
        Trial(0.001, 0.3, 1): TrialTtft(2.0, 8.0, 9.5),
        Trial(0.001, 0.5, 0): TrialTtft(2.5, 8.0, 7.0),
        Trial(0.001, 0.5, 1): TrialTtft(2.5, 8.0, 9.0),
    }
    best = {one: choose_rate(wanted, 0.001, results, one).best.improvement_rate for one in Objective}
    assert best == {Objective.MEAN: 0.1, Objective.P50: 0.3, Objective.P99: 0.5}
    choice = choose_rate(wanted, 0.001, results, Objective.P99)
    assert choice.best.ttft_s == (2.5, 8.0, 8.0)
    assert [one.improvement_rate for one in choice.tried] == [0.1, 0.3, 0.5]
    assert (choice.arrivals_per_s, choice.best.improvement_rate) == (0.001, 0.5)
    with pytest.raises(KeyError):
        choose_rate(wanted, 2.0, results, Objective.MEAN)


def test_the_table_is_at_no_profiled_load_worse_than_any_fixed_rate() -> None:
    """On arrivals other than those searched on, with the window that finds the load by itself."""
    table1 = fitted_candidates(8)
    wanted = search(
        cluster=ClusterSpec(8),
        candidates=table1,
        lengths=tuple((tokens, 1) for tokens in (4096, 8192, 16384, 65536)),
        requests=1500,
        seeds=(0, 1),
        arrival_rates=(0.5, 1.5, 2.5),
        improvement_rates=(0.05, 0.3, 0.6),
    )
    results = {trial: run_trial(wanted, trial) for trial in wanted.trials()}
    choices = [choose_rate(wanted, one, results, Objective.MEAN) for one in wanted.arrival_rates]
    table = ImprovementRateTable(tuple(ProfiledRate(one.arrivals_per_s, one.best.improvement_rate) for one in choices))
    # A rate for light load and another under load: or the table would be idle.
    assert table.entries[0].improvement_rate < table.entries[-1].improvement_rate

    def mean_ttft_s(options: SystemOptions, arrivals_per_s: float) -> float:
        requests = list(drawn_requests(wanted.lengths, 2000, arrivals_per_s, seed=77))
        outcome = simulate(
            requests,
            lambda loop, listener: build_cluster(options, loop, wanted.cluster, table1, listener),
            RunOptions(warm_up_requests=200),
        )
        return fmean(one.ttft_s for one in outcome.served)

    by_load = []
    for choice in choices:
        with_table = mean_ttft_s(SystemOptions(ClusterSystem.TETRIS, improvement_rates=table), choice.arrivals_per_s)
        fixed = [
            mean_ttft_s(SystemOptions(ClusterSystem.TETRIS, improvement_rate=rate), choice.arrivals_per_s)
            for rate in wanted.improvement_rates
        ]
        by_load.append((with_table, fixed))
        # Best on the arrivals searched on, to the digit; on these the window may err by an entry now and then.
        assert choice.best.ttft_s.mean == min(one.ttft_s.mean for one in choice.tried)
        assert with_table <= 1.03 * min(fixed)
    # Over all loads no single rate is as good.
    for column in range(len(wanted.improvement_rates)):
        assert sum(fixed[column] for _, fixed in by_load) > sum(with_table for with_table, _ in by_load)


# ---- the command ----

FEW = ("--prefill", "4", "--requests", "40", "--seeds", "0", "1", "--candidates", "0.5", "0.05", "--processes", "1")


def test_the_file_has_the_table_and_where_it_comes_from(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rates.json"
    assert command("--workload", lengths, "--out", out, "--arrival-rates", "0.5", "1.2", *FEW) == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    assert [one["arrivals_per_s"] for one in content["rates"]] == [0.5, 1.0]
    for one in content["rates"]:
        assert [tried["improvement_rate"] for tried in one["tried"]] == [0.05, 0.5]
        means = {tried["improvement_rate"]: tried["ttft_s"]["mean"] for tried in one["tried"]}
        assert means[one["improvement_rate"]] == min(means.values()) == one["ttft_s"]["mean"]
    provenance = content["provenance"]
    assert provenance["engine"] == "Tetris Table 1 fit, LLaMA3-8B on A100"
    assert provenance["engine_sha256"] is None
    assert (provenance["workload"], len(provenance["workload_sha256"])) == (str(lengths), 64)
    assert (provenance["seeds"], provenance["requests"], provenance["sp_sizes"]) == ([0, 1], 40, [1, 2, 4])
    assert provenance["versions"]["sglang-ext"]
    assert "command" in provenance
    assert "created" in provenance
    table = load_improvement_rates(out)
    assert [entry.arrivals_per_s for entry in table.entries] == [0.5, 1.0]
    assert not list(tmp_path.glob("rates.json.*"))
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "0.5"


def test_the_loads_end_where_the_instances_can_carry_no_more(lengths: Path, tmp_path: Path) -> None:
    out = tmp_path / "rates.json"
    assert command("--workload", lengths, "--out", out, *FEW) == 0
    rates = [entry.arrivals_per_s for entry in load_improvement_rates(out).entries]
    # Prompts of 4,000, 200 and 30,000 tokens take 1.1 s of an instance on average.
    assert rates == [0.5 * step for step in range(1, len(rates) + 1)]
    assert 3.0 <= rates[-1] <= 4.0


def test_an_interrupted_search_goes_on(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rates.json"
    arguments = ("--workload", lengths, "--arrival-rates", "0.5", "1", *FEW)
    assert command(*arguments, "--out", tmp_path / "whole.json") == 0
    monkeypatch.setattr(profile_rates, "write_rates", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert command(*arguments, "--out", out) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    monkeypatch.undo()
    partial = tmp_path / "rates.json.partial"
    header, *lines = partial.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 8
    # Three are there, the fourth was cut off, and the second is marked.
    trial = json.loads(lines[1])
    lines[1] = json.dumps([*trial[:3], 1000.0, 1000.0, 1000.0]) + "\n"
    partial.write_text("".join([header, *lines[:3], lines[3][:10]]), encoding="utf-8")
    assert command(*arguments, "--out", out) == 0
    assert "3 of 8 simulations were made before" in capsys.readouterr().err
    whole, resumed = (json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "whole.json", out))
    mine = next(one for one in resumed["rates"] if one["arrivals_per_s"] == trial[0])
    assert max(tried["ttft_s"]["mean"] for tried in mine["tried"]) > 500  # it was not made again
    others = [one for one in resumed["rates"] if one["arrivals_per_s"] != trial[0]]
    assert others == [one for one in whole["rates"] if one["arrivals_per_s"] != trial[0]]
    assert not partial.exists()


def test_notes_of_another_search_are_not_used(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rates.json"
    (tmp_path / "rates.json.partial").write_text("{}\n", encoding="utf-8")
    assert command("--workload", lengths, "--out", out, *FEW) == 2
    error = capsys.readouterr().err
    assert "error: --out: " in error
    assert "is of another search" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "0"], "--prefill must be at least 1, got 0"),
        (["--requests", "-1"], "--requests must be at least 1, got -1"),
        (["--processes", "0"], "--processes must be at least 1, got 0"),
        (["--seeds", "1", "1"], "--seeds: a value is there twice"),
        (["--candidates", "0.5", "1"], "--candidates must be at least 0 and below 1, got 1"),
        (["--sp-sizes", "3"], "--sp-sizes: the engine has no SP size 3, only 1, 2, 4, 8, 16"),
        (["--sp-sizes", "8", "--prefill", "8", "--sp-sizes", "16"], "--sp-sizes: the engine has no SP size 16"),
        (["--arrival-rates", "0", "1"], "--arrival-rates must be above 0 and FROM at most TO, got 0 and 1"),
        (["--arrival-rates", "2", "1"], "--arrival-rates must be above 0 and FROM at most TO, got 2 and 1"),
        (["--arrival-rates", "1", "nan"], "--arrival-rates must be above 0"),
        (["--arrival-rates", "1", "1e9"], "too many"),
        (["--engine", "none.json"], "--engine: none.json is neither table1"),
        (["--kv-tokens", "100", *FEW, "--prefill", "16"], "tokens cannot be served by these instances"),
    ],
)
def test_an_error_is_one_line_that_names_the_option(
    arguments: list[str], message: str, lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--workload", lengths, "--out", tmp_path / "rates.json", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "rates.json").exists()


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--workload", tmp_path / "none.csv", "--out", tmp_path / "rates.json") == 2
    assert "error: --workload: " in capsys.readouterr().err
    wrong = tmp_path / "wrong.json"
    with pytest.raises(RatesFileError, match="cannot be read: No such file"):
        load_improvement_rates(wrong)
    for text, message in (("{", "is not JSON"), ("{}", "version None is not known"), ("\xff", "is not JSON")):
        wrong.write_bytes(text.encode("latin-1"))
        with pytest.raises(RatesFileError, match=message) as caught:
            load_improvement_rates(wrong)
        assert str(wrong) in str(caught.value)
