"""`sglang-ext simulate`: table, JSON, pictures; every error one line that names the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.cli import main
from sglang_ext.laps.decide.boundary import expected_boundary_tokens
from sglang_ext.planner.simulation.engines import load_engine
from sglang_ext.planner.simulation.scenario import POLICIES
from support.settings import sets

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
    arguments = [
        "simulate",
        *sets(f"workload.file={lengths}", "workload.rate=2", "workload.requests=60", "instances.prefill=8"),
    ]
    assert main([*arguments, *sets(f"policy.name={policy}", "decode.instances=2"), "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert run["ttft"]["all"]["requests"] == 60
    assert run["ttft"]["all"]["unfinished"] == run["ttft"]["all"]["refused"] == 0
    assert run["ttft"]["short"]["requests"] + run["ttft"]["long"]["requests"] == 60
    assert run["decode"]["finished"] == 60
    assert "load: 2 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["one", "laps", "fcfs"])
@pytest.mark.parametrize("decode", [0, 1])
def test_clients_wait_for_their_number_over_the_throughput(
    policy: str, decode: int, lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Little's law, with replies that end with the first token; decode makes clients wait for longer."""
    out = tmp_path / "out.json"
    arguments = sets(f"workload.file={lengths}", "workload.concurrency=6", "workload.requests=300")
    more = sets("instances.prefill=2", f"policy.name={policy}", f"decode.instances={decode}")
    assert main(["simulate", *arguments, *more, "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert (run["clients"], run["rate_per_s"], run["ttft"]["all"]["requests"]) == (6, None, 300)
    clients = run["ttft"]["all"]["mean_s"] * 300 / run["end_s"]
    assert clients < 5.7 if decode else 5.7 < clients <= 6.0
    assert "load: 6 clients that send again, " in capsys.readouterr().out


def test_a_trace_s_times_do_not_count_where_clients_send_again(timed: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = sets(f"workload.file={timed}", "workload.concurrency=3", "instances.prefill=2")
    assert main(["simulate", *arguments, "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert run["ttft"]["all"]["unfinished"] == 0
    assert run["end_s"] < 10.0


def test_the_seed_decides(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for seed in ("1", "1", "2"):
        assert (
            main(
                [
                    "simulate",
                    *sets(
                        f"workload.file={lengths}", "workload.rate=2", "workload.requests=50", f"workload.seed={seed}"
                    ),
                ]
            )
            == 0
        )
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.slow
def test_short_is_what_instances_of_the_engine_would_find(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "simulate",
        *sets(f"workload.file={lengths}", "workload.rate=2", "workload.requests=50", "policy.name=laps"),
    ]
    engine = load_engine("table1", largest_size=8, model=None)
    for more, objective_s, max_tokens in (
        ((), 1.0, 8192),
        (sets("policy.slo_s=0.4", "instances.chunk_tokens=1000"), 0.4, 1000),
    ):
        expected = expected_boundary_tokens(engine.coefficients, objective_s, max_tokens)
        assert main([*arguments, *more]) == 0
        found = capsys.readouterr().out
        assert f"short: up to {expected} new tokens" in found
        assert main([*arguments, *more, *sets(f"policy.boundary_tokens={expected}")]) == 0
        assert capsys.readouterr().out == found


def test_a_trace_keeps_its_times_unless_a_rate_is_given(timed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *sets(f"workload.file={timed}", "workload.warm_up=0.4")]) == 0
    text = capsys.readouterr().out
    assert "load: as in the trace" in text
    assert text.splitlines()[3].split()[:2] == ["all", "2"]
    assert main(["simulate", *sets(f"workload.file={timed}", "workload.rate=0.5")]) == 0
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
        arguments = sets(
            "workload.rate=5",
            "workload.requests=300",
            "instances.prefill=4",
            "policy.name=fcfs",
            f"policy.router={router}",
        )
        out = tmp_path / "out.json"
        assert main(["simulate", *sets(f"workload.file={turns}"), *arguments, "--json", str(out)]) == 0
        assert "prefix caches had" in capsys.readouterr().out
        (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
        assert run["ttft"]["all"]["requests"] == 300
        shares[router] = run["cached_share"]
    assert shares["predicted_wait"] > 0.4 > 0.3 > shares["round_robin"]


@pytest.mark.slow
def test_pictures_are_drawn(lengths: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "pictures"
    arguments = [
        "simulate",
        *sets(f"workload.file={lengths}", "workload.rate=1,2", "workload.requests=20"),
        "--pictures",
        str(folder),
    ]
    arguments += sets("policy.name=laps", "instances.prefill=3", "instances.short=1", "policy.move_pools=true")
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
    arguments = [
        "simulate",
        *sets(f"workload.file={workload}", f"instances.engine={engine}", "policy.name=laps", "instances.prefill=1"),
    ]
    arguments += [
        *sets("instances.long_pp=4", "links.hop_ms=0", "policy.slo_s=0.3", "policy.boundary_tokens=1024"),
        "--json",
        str(out),
    ]
    assert main([*arguments, *sets("instances.chunk_tokens=16384")]) == 0
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert run["ttft"]["short"]["max_s"] <= 0.32


def test_instances_of_several_stages(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On as many devices: a prompt alone takes far less time, with a slow hop more."""
    common = [
        "simulate",
        *sets(f"workload.file={lengths}", "workload.rate=0.02", "workload.requests=20", "policy.name=laps"),
    ]
    medians_s = []
    for number, stages in enumerate(
        (
            sets("instances.prefill=4"),
            sets("instances.prefill=1", "instances.long_pp=4"),
            sets("instances.prefill=1", "instances.long_pp=4", "links.hop_ms=500"),
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
        pools = sets(f"policy.name={policy}", "instances.prefill=3", "instances.short=1", "instances.short_pp=2")
        assert main([*common, *pools]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "workload.rate is needed: the workload has lengths without times"),
        (sets("workload.rate=0"), "workload.rate must be above 0, got 0"),
        (sets("workload.rate=1", "instances.prefill=0"), "instances.prefill must be above 0, got 0"),
        (sets("workload.rate=1", "workload.requests=-5"), "workload.requests must be above 0, got -5"),
        (
            sets("workload.rate=1", "instances.fail=3:x:1"),
            "instances.fail '3:x:1' is not INSTANCE:AT:FOR, such as 3:60:120",
        ),
        (sets("workload.rate=1", "instances.fail=16:0:1"), "instances.fail '16:0:1': there are instances 0 to 15"),
        (
            sets("workload.rate=1", "policy.name=laps", "policy.move_pools=true"),
            "policy.move_pools needs instances.short",
        ),
        (
            sets(
                "workload.rate=1",
                "policy.name=laps",
                "policy.move_pools=true",
                "instances.short=1",
                "instances.long_pp=2",
            ),
            "policy.move_pools: instances of the pools must have as many stages (instances.short_pp, ",
        ),
        (
            sets("workload.rate=1", "policy.name=laps", "instances.short_pp=2"),
            "instances.short_pp needs instances.short",
        ),
        (
            sets("workload.rate=1", "policy.name=laps", "instances.long_pp=0"),
            "instances.long_pp must be above 0, got 0",
        ),
        (
            sets("workload.rate=1", "policy.name=laps", "instances.long_pp=2", "links.hop_ms=-1"),
            "links.hop_ms must be at least 0, got -1",
        ),
        (
            sets("workload.rate=1", "instances.long_pp=2"),
            "instances.long_pp: instances that share prompts (policy.name one) have one stage",
        ),
        (sets("workload.concurrency=0"), "workload.concurrency must be at least 1, got 0"),
        (
            sets("workload.concurrency=2", "workload.rate=1"),
            "workload.rate: with workload.concurrency a request comes when a reply has come",
        ),
        (sets("workload.rate=1", "workload.warm_up=1"), "workload.warm_up must be at least 0 and below 1, got 1"),
        (
            sets("workload.rate=1", "decode.instances=1", "decode.transfer_gb_per_s=0"),
            "decode.transfer_gb_per_s must be above 0, got 0",
        ),
        (sets("workload.rate=1", "policy.slo_s=nan"), "policy.slo_s must be above 0, got nan"),
        (
            sets("workload.rate=1", "instances.engine=a100.json"),
            "instances.engine: a100.json is neither table1, h200-llama3-8b",
        ),
    ],
)
def test_an_error_is_one_line_that_names_the_option(
    arguments: list[str], message: str, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *sets(f"workload.file={lengths}"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_wrong_workload_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *sets(f"workload.file={tmp_path}/none.csv")]) == 2
    assert "error: workload.file: " in capsys.readouterr().err
