"""`sglang-ext simulate`: table, JSON, pictures; every error one line that names the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.cli import main
from sglang_ext.laps.decide.boundary import expected_boundary_tokens
from sglang_ext.planner.simulation.engines import load_engine
from sglang_ext.planner.simulation.scenario import POLICIES

LENGTHS = "num_prefill_tokens,num_decode_tokens\n4000,20\n200,5\n30000,50\n"
TIMED = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,4000,20\n1,200,5\n2,30000,50\n"


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.csv"
    path.write_text(LENGTHS, encoding="utf-8")
    return str(path)


@pytest.fixture
def timed(tmp_path: Path) -> str:
    path = tmp_path / "timed.csv"
    path.write_text(TIMED, encoding="utf-8")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_a_workload(
    policy: str, lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["simulate", "--workload", lengths, "--rate", "2", "--requests", "60", "--prefill", "8"]
    assert main([*arguments, "--policy", policy, "--decode", "2", "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert run["ttft"]["all"]["requests"] == 60
    assert run["ttft"]["all"]["unfinished"] == run["ttft"]["all"]["refused"] == 0
    assert run["ttft"]["short"]["requests"] + run["ttft"]["long"]["requests"] == 60
    assert run["decode"]["finished"] == 60
    assert "load: 2 requests/s" in capsys.readouterr().out


def test_the_seed_decides(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for seed in ("1", "1", "2"):
        assert main(["simulate", "--workload", lengths, "--rate", "2", "--requests", "50", "--seed", seed]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.slow
def test_short_is_what_instances_of_the_engine_would_find(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--workload", lengths, "--rate", "2", "--requests", "50", "--policy", "laps"]
    engine = load_engine("table1", largest_size=8, model=None)
    for more, objective_s, most_tokens in (((), 1.0, 8192), (("--slo", "0.4", "--chunk-tokens", "1000"), 0.4, 1000)):
        expected = expected_boundary_tokens(engine.coefficients, objective_s, most_tokens)
        assert main([*arguments, *more]) == 0
        found = capsys.readouterr().out
        assert f"short: up to {expected} new tokens" in found
        assert main([*arguments, *more, "--boundary-tokens", str(expected)]) == 0
        assert capsys.readouterr().out == found


def test_a_trace_keeps_its_times_unless_a_rate_is_given(timed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload", timed, "--warm-up", "0.4"]) == 0
    text = capsys.readouterr().out
    assert "load: as in the trace" in text
    assert text.splitlines()[3].split()[:2] == ["all", "2"]
    assert main(["simulate", "--workload", timed, "--rate", "0.5"]) == 0
    assert "load: 0.5 requests/s" in capsys.readouterr().out


def test_sessions_find_their_prefix_where_the_router_sends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = tmp_path / "turns.csv"
    turns.write_text(
        "conv,turn,new_input_tokens,history_tokens,output_tokens\n0,1,900,0,100\n0,2,50,1000,100\n0,3,50,1150,100\n",
        encoding="utf-8",
    )
    shares = {}
    for router in ("predicted_wait", "round_robin"):
        arguments = ["--rate", "5", "--requests", "300", "--prefill", "4", "--policy", "fcfs", "--router", router]
        out = tmp_path / "out.json"
        assert main(["simulate", "--workload", str(turns), *arguments, "--json", str(out)]) == 0
        assert "prefix caches had" in capsys.readouterr().out
        (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
        assert run["ttft"]["all"]["requests"] == 300
        shares[router] = run["cached_share"]
    assert shares["predicted_wait"] > 0.4 > 0.3 > shares["round_robin"]


@pytest.mark.slow
def test_pictures_are_drawn(lengths: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "pictures"
    arguments = ["simulate", "--workload", lengths, "--rates", "1", "2", "--requests", "20", "--pictures", str(folder)]
    arguments += ["--policy", "laps", "--prefill", "3", "--short-instances", "1", "--move-pools"]
    assert main(arguments) == 0
    names = {"ttft.png", "load.png", "timeline-1.png", "timeline-2.png", "pools-1.png", "pools-2.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(path.stat().st_size > 1000 for path in folder.iterdir())


def test_rounds_of_several_stages_are_short_for_short_prompts(tmp_path: Path) -> None:
    """With the rounds of one stage these would take half a second."""
    engine = tmp_path / "engine.json"
    costs = {"alpha_s": 0.0, "token_s": 4e-5, "read_s": 0.0, "kappa_s": 0.05}
    content = {"format": "sglang-ext engine profile", "version": 1, "model": "m", "prefill": costs}
    engine.write_text(json.dumps(content), encoding="utf-8")
    workload = tmp_path / "workload.csv"
    rows = ["0,90000,2", *(f"{0.1 + 0.31 * number},50,2" for number in range(1, 8))]
    workload.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]), encoding="utf-8")
    out = tmp_path / "out.json"
    arguments = ["simulate", "--workload", str(workload), "--engine", str(engine), "--policy", "laps", "--prefill", "1"]
    arguments += ["--long-pp", "4", "--hop-ms", "0", "--slo", "0.3", "--boundary-tokens", "1024", "--json", str(out)]
    assert main([*arguments, "--chunk-tokens", "16384"]) == 0
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert run["ttft"]["short"]["max_s"] <= 0.32


def test_instances_of_several_stages(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On as many devices: a prompt alone takes far less time, with a slow hop more."""
    common = ["simulate", "--workload", lengths, "--rate", "0.02", "--requests", "20", "--policy", "laps"]
    medians_s = []
    for number, stages in enumerate(
        (
            ["--prefill", "4"],
            ["--prefill", "1", "--long-pp", "4"],
            ["--prefill", "1", "--long-pp", "4", "--hop-ms", "500"],
        )
    ):
        out = tmp_path / f"{number}.json"
        assert main([*common, *stages, "--json", str(out)]) == 0
        (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
        medians_s.append(run["ttft"]["long"]["p50_s"])
    assert medians_s[1] < 0.6 * medians_s[0]
    assert medians_s[2] > medians_s[1] + 1.4
    assert "1 prefill instances of 4 stages, policy laps" in capsys.readouterr().out
    for policy in ("pool", "laps"):
        pools = ["--policy", policy, "--prefill", "3", "--short-instances", "1", "--short-pp", "2"]
        assert main([*common, *pools]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--rate is needed: the workload has lengths without times"),
        (["--rate", "0"], "--rate must be above 0, got 0"),
        (["--rate", "1", "--rates", "2"], "--rate and --rates exclude each other"),
        (["--rate", "1", "--prefill", "0"], "--prefill must be above 0, got 0"),
        (["--rate", "1", "--requests", "-5"], "--requests must be above 0, got -5"),
        (["--rate", "1", "--improvement-rate", "1"], "--improvement-rate must be at least 0 and below 1, got 1"),
        (["--rate", "1", "--policy", "fixed-sp", "--prefill", "4"], "--sp-size 8 is more than the instances, 4"),
        (["--rate", "1", "--policy", "fixed-sp", "--sp-size", "3"], "--policy fixed-sp: SP size 3 has no cost"),
        (["--rate", "1", "--fail", "3:x:1"], "--fail '3:x:1' is not INSTANCE:AT:FOR, such as 3:60:120"),
        (["--rate", "1", "--fail", "16:0:1"], "--fail '16:0:1': there are instances 0 to 15"),
        (["--rate", "1", "--policy", "laps", "--move-pools"], "--move-pools needs --short-instances"),
        (
            ["--rate", "1", "--policy", "laps", "--move-pools", "--short-instances", "1", "--long-pp", "2"],
            "--move-pools: instances of the pools must have as many stages (--short-pp, --long-pp)",
        ),
        (["--rate", "1", "--policy", "laps", "--short-pp", "2"], "--short-pp needs --short-instances"),
        (["--rate", "1", "--policy", "laps", "--long-pp", "0"], "--long-pp must be above 0, got 0"),
        (
            ["--rate", "1", "--policy", "laps", "--long-pp", "2", "--hop-ms", "-1"],
            "--hop-ms must be at least 0, got -1",
        ),
        (["--rate", "1", "--long-pp", "2"], "--long-pp: instances that share prompts (--policy tetris) have one stage"),
        (["--rate", "1", "--warm-up", "1"], "--warm-up must be at least 0 and below 1, got 1"),
        (["--rate", "1", "--decode", "1", "--transfer-gb-per-s", "0"], "--transfer-gb-per-s must be above 0, got 0"),
        (["--rate", "1", "--slo", "nan"], "--slo must be above 0, got nan"),
        (["--rate", "1", "--engine", "a100.json"], "--engine: a100.json is neither table1, h200-llama3-8b"),
    ],
)
def test_an_error_is_one_line_that_names_the_option(
    arguments: list[str], message: str, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--workload", lengths, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_wrong_workload_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload", str(tmp_path / "none.csv")]) == 2
    assert "error: --workload: " in capsys.readouterr().err
