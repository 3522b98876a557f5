"""`sglang-ext simulate`: table, JSON, pictures; every error one line that names the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.cli import main
from sglang_ext.simulation.engines import TABLE1, EngineError, load_engine
from sglang_ext.simulation.scenario import POLICIES

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


def test_a_trace_keeps_its_times_unless_a_rate_is_given(timed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload", timed, "--warm-up", "0.4"]) == 0
    text = capsys.readouterr().out
    assert "load: as in the trace" in text
    assert text.splitlines()[3].split()[:2] == ["all", "2"]
    assert main(["simulate", "--workload", timed, "--rate", "0.5"]) == 0
    assert "load: 0.5 requests/s" in capsys.readouterr().out


def test_pictures_are_drawn(lengths: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "pictures"
    arguments = ["simulate", "--workload", lengths, "--rates", "1", "2", "--requests", "20", "--pictures", str(folder)]
    arguments += ["--policy", "laps", "--prefill", "3", "--short-instances", "1", "--move-pools"]
    assert main(arguments) == 0
    names = {"ttft.png", "load.png", "timeline-1.png", "timeline-2.png", "pools-1.png", "pools-2.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(path.stat().st_size > 1000 for path in folder.iterdir())


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
        (["--rate", "1", "--short-instances", "2"], "--short-instances and --move-pools need --policy laps"),
        (["--rate", "1", "--policy", "laps", "--move-pools"], "--move-pools needs --short-instances"),
        (["--rate", "1", "--warm-up", "1"], "--warm-up must be at least 0 and below 1, got 1"),
        (["--rate", "1", "--decode", "1", "--transfer-gb-per-s", "0"], "--transfer-gb-per-s must be above 0, got 0"),
        (["--rate", "1", "--slo", "nan"], "--slo must be above 0, got nan"),
        (["--rate", "1", "--engine", "a100.json"], "--engine: a100.json is neither table1 nor a profile"),
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


# ---- engines ----


def test_table_1_and_profiles(tmp_path: Path) -> None:
    table1 = load_engine(TABLE1)
    assert [candidate.size for candidate in table1.candidates] == [1, 2, 4, 8, 16]
    alone = table1.candidates[0].cost
    for new, cached in ((4096, 0), (512, 30_000)):
        assert table1.coefficients.chunk_s(new, cached) == pytest.approx(alone.predict_s(cached, new))
    path = tmp_path / "profile.json"
    prefill = {"alpha_s": 1e-10, "token_s": 2e-5, "read_s": 0.0, "kappa_s": 0.01}
    path.write_text(json.dumps({"model": "m", "device": "d", "prefill": prefill}), encoding="utf-8")
    engine = load_engine(str(path))
    assert engine.name == "m on d"
    assert engine.candidates[0].cost.predict_s(100, 1000) == pytest.approx(engine.coefficients.chunk_s(1000, 100))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no", "is not JSON"),
        ("{}", 'a profile has "sp" or "prefill"'),
        ('{"sp": []}', '"sp" is a list of at least one SP size'),
        ('{"sp": [{"size": 1}]}', '"sp": a_s must be a number of at least 0'),
        ('{"prefill": {"alpha_s": -1}}', '"prefill": alpha_s must be a number of at least 0'),
        ('{"prefill": {"alpha_s": 0, "token_s": 0, "read_s": 0, "kappa_s": 1}}', "a token costs nothing"),
    ],
)
def test_a_wrong_profile_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(EngineError, match=message) as caught:
        load_engine(str(path))
    assert "\n" not in str(caught.value)
