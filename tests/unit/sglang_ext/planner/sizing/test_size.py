"""`sglang-ext size`: what it prints and writes; an error is one line that names the option, the line or the field."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sglang_ext.cli import main
from sglang_ext.cluster.cluster_file import load_cluster
from sglang_ext.cluster.config import PoolConfig
from sglang_ext.planner.sizing.deployment import DeployedModel, cluster_config, helm_values
from sglang_ext.planner.sizing.load_trial import ClusterLayout, SloTargets
from support import manifests
from support.settings import sets

ROOT = Path(__file__).resolve().parents[5]
CHART = ROOT / "deploy/helm/sglang-ext"
needs_helm = pytest.mark.skipif(
    not (ROOT / ".venv/charts/helm_python").is_dir(), reason="Helm is not there: `make charts-env`"
)
SLO = sets("objectives.short_ms=300", "objectives.long_stretch=3")
PROFILE = {
    "format": "sglang-ext engine profile",
    "version": 1,
    "model": "org/made-up",
    "prefill": {"alpha_s": 2e-9, "token_s": 4e-5, "read_s": 0.0, "kappa_s": 0.01},
    "provenance": {
        "kv_tokens": 200_000,
        "server_arguments": {"tp_size": 1, "chunked_prefill_size": 4096, "device": "cuda"},
    },
}
TARGETS = SloTargets(0.3, 3.0, 0.05)
SPLIT = ClusterLayout(1024, 2, 1, 1, 3, 0, 4)
ONE_POOL = ClusterLayout(512, 1, 2, 0, 0, 3, 1)
PIPELINES = ClusterLayout(1024, 2, 1, 1, 2, 0, 4, long_pp=4)
RING = ClusterLayout(1024, 1, 1, 1, 4, 0, 2, is_ring=True)
SHARED = ClusterLayout(1024, 1, 1, 0, 0, 4, 2, is_ring=True)
LAYOUTS = {"split pools": SPLIT, "one pool for all lengths": ONE_POOL, "pipelines": PIPELINES}


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, PROFILE)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    rows = [f"{number / 8},{5000 if number % 8 == 0 else 100 + number},{5 + number % 20}" for number in range(60)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]), encoding="utf-8")
    return str(path)


def written(folder: Path, profile: dict[str, Any], name: str = "profile.json") -> str:
    path = folder / name
    path.write_text(json.dumps(profile), encoding="utf-8")
    return str(path)


def chart_values() -> dict[str, Any]:
    found = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_layouts_are_printed_and_written(
    trace: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    arguments = [
        "size",
        *sets(f"workload.file={trace}", f"search.profiles={profile}"),
        *SLO,
        *sets("search.max_gpus=9"),
        "--out",
        str(out),
    ]
    arguments += sets("search.processes=1", "search.boundary_tokens=512")
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "60 requests, 8/s; first token: 52 short prompts within 300 ms, 8 long ones" in captured.out
    assert "2 of 2 kinds of layout" in captured.err
    found = json.loads((out / "layouts.json").read_text(encoding="utf-8"))
    layouts = found["layouts"]
    assert [one["gpus"] for one in layouts] == sorted(one["gpus"] for one in layouts)
    assert {one["both"] > 0 for one in layouts} == {True, False}
    for one in layouts:
        assert one["gpus"] == one["short"] + one["long"] + one["both"] + one["decode"] <= 9
        assert one["load"] >= found["headroom"] == 1.25
        assert one["breaks_first"]["pool"] in {"short", "long", "both", "decode"}
        assert one["as_recorded"]["short"]["late"] <= 0.01 * one["as_recorded"]["short"]["requests"]
    best = layouts[0]
    config = load_cluster(out / "cluster.yaml")
    assert config.model == "org/made-up"
    assert config.router.length_boundary_tokens == best["boundary_tokens"]
    assert {role.value: pool.count for role, pool in config.pools.by_role()} == {
        **{name: best[name] for name in ("short", "long", "both", "decode")},
        "plain": 0,
    }
    values = yaml.safe_load((out / "values.yaml").read_text(encoding="utf-8"))
    assert values["boundaryTokens"] == best["boundary_tokens"]
    assert (out / "cost.png").stat().st_size > 1000


@pytest.mark.slow
def test_several_processes_find_the_same(trace: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for processes in ("1", "2"):
        arguments = [
            "size",
            *sets(f"workload.file={trace}", f"search.profiles={profile}"),
            *SLO,
            *sets("search.max_gpus=9", f"search.processes={processes}"),
        ]
        assert main([*arguments, *sets("search.boundary_tokens=512")]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_a_profile_that_fits_badly_is_named(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = written(tmp_path, {**PROFILE, "max_error": 0.2, "fit": {"iteration": {"error_p90": 0.35}}})
    arguments = [
        "size",
        *sets(f"workload.file={trace}", f"search.profiles={bad}"),
        *SLO,
        *sets("search.max_gpus=6", "search.processes=1"),
    ]
    main([*arguments, *sets("search.boundary_tokens=512")])
    doubt = "sglang-ext size: TP 1: the profile's iteration fits badly: relative error 35% at one point of ten"
    assert capsys.readouterr().err.splitlines()[0] == doubt


@pytest.mark.slow
def test_profiles_of_several_tp_are_compared(
    trace: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = {**PROFILE, "prefill": {"alpha_s": 1e-9, "token_s": 2e-5, "read_s": 0.0, "kappa_s": 0.006}}
    fast.pop("provenance")
    second = "2:" + written(tmp_path, fast, "fast.json")
    arguments = [
        "size",
        *sets(f"workload.file={trace}", f"search.profiles={profile},{second}"),
        *SLO,
        *sets("search.max_gpus=9"),
    ]
    assert main([*arguments, *sets("search.processes=1", "search.boundary_tokens=512")]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert {row.partition("TP ")[2][:1] for row in rows} == {"1", "2"}
    assert sorted(int(row.split()[0]) for row in rows) == [int(row.split()[0]) for row in rows]


@pytest.mark.slow
def test_an_objective_that_no_instance_holds_alone_takes_a_pipeline_or_a_ring(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long prompts of 2.8 s within 1.2 s: no number of instances apart does it, several that share a prompt do."""
    pytest.importorskip("matplotlib")
    trace = tmp_path / "long.csv"
    rows = [f"{number / 2},{30_000 if number % 8 == 0 else 100 + number},5" for number in range(60)]
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]), encoding="utf-8")
    arguments = ["size", *sets(f"workload.file={trace}", f"search.profiles={profile}", "objectives.short_ms=1200")]
    arguments += sets(
        "objectives.long_stretch=1", "search.max_gpus=10", "search.processes=1", "search.boundary_tokens=512"
    )
    objective = sets("objectives.attainment=1")
    assert main([*arguments, *objective]) == 1
    capsys.readouterr()
    out = tmp_path / "out"
    shapes = [*sets("search.long_pp=1,4", "search.ring=true", "links.hop_ms=1"), "--out", str(out)]
    assert main([*arguments, *objective, *shapes]) == 0
    layouts = json.loads((out / "layouts.json").read_text(encoding="utf-8"))["layouts"]
    assert {one["long_pp"] for one in layouts if not one["is_ring"]} == {4}
    assert {bool(one["both"]) for one in layouts if one["is_ring"]} == {False, True}
    best = layouts[0]
    config = load_cluster(out / "cluster.yaml")
    assert config.coordinator.enabled == best["is_ring"]
    assert config.pools.long.pp == (best["long_pp"] if best["long"] else 1)
    assert config.pools.both.count == best["both"]
    values = yaml.safe_load((out / "values.yaml").read_text(encoding="utf-8"))
    assert values["coordinator"]["enabled"] == best["is_ring"]


def test_where_nothing_holds_it_says_what_breaks(trace: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "size",
        *sets(
            f"workload.file={trace}",
            f"search.profiles={profile}",
            "objectives.short_ms=12",
            "objectives.long_stretch=1",
        ),
    ]
    assert main([*arguments, *sets("search.max_gpus=6", "search.processes=1", "search.boundary_tokens=512")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no layout of at most 6 GPUs holds at x1.25 of the load; of " in error
    assert "what breaks first: " in error


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_cpu", [False, True])
def test_up_takes_its_file_and_reads_what_was_written(
    name: str, is_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no such model.
    monkeypatch.setattr("sglang_ext.cluster.model._find_on_hub", lambda name: None)
    monkeypatch.setattr("sglang_ext.cluster.cluster.engine_checks", lambda plan: ())
    from sglang_ext.planner.sizing.deployment import write_cluster

    layout = LAYOUTS[name]
    config = cluster_config(layout, DeployedModel("org/made-up", 4096, is_cpu), TARGETS)
    write_cluster(tmp_path / "cluster.yaml", "what it is", config)
    assert load_cluster(tmp_path / "cluster.yaml") == config
    pools: dict[str, PoolConfig] = {role.value: pool for role, pool in config.pools.by_role()}
    assert {role: pool.count for role, pool in pools.items() if pool.count} == {
        role.value: count for role, count in layout.pools()
    }
    assert config.router.length_boundary_tokens == layout.boundary_tokens
    for role, pool in config.pools.by_role():
        if pool.count:
            assert pool.tp == (layout.tp if role.is_prefill else layout.decode_tp)
            assert pool.pp == layout.pp(role)
            assert pool.args == (("--chunked-prefill-size", "4096") if role.is_prefill else ())
            assert ("--laps-short-ttft-slo-ms" in pool.worker_args) == role.is_prefill
    assert main(["up", "--config", str(tmp_path / "cluster.yaml"), "--dry-run", "--port", "0"]) == 0


def test_a_ring_is_a_coordinator_and_its_members() -> None:
    model = DeployedModel("org/made-up", 4096, True, (1, 2, 4))
    config = cluster_config(RING, model, TARGETS)
    assert config.coordinator.enabled
    assert config.coordinator.args == ("--sp-sizes", "1,2,4")
    values: Any = helm_values(RING, model, TARGETS)
    assert values["coordinator"] == {"enabled": True, "spSizes": [1, 2, 4]}
    shared = {name for name, pool in values["pools"].items() if pool is not None and "sharesLongPrompts" in pool}
    assert shared == {"prefill-long"}
    assert RING.describe() == "1 short + 4 long (ring) + 2 decode, boundary 1024, TP 1"
    values = helm_values(SHARED, model, TARGETS)
    assert [name for name, pool in values["pools"].items() if pool is not None and "sharesLongPrompts" in pool] == [
        "prefill"
    ]
    assert cluster_config(SHARED, model, TARGETS).coordinator.enabled
    assert SHARED.describe() == "4 both (ring) + 2 decode, boundary 1024, TP 1"
    assert PIPELINES.describe() == "1 short + 2 long of PP 4 + 4 decode, boundary 1024, TP 2"
    assert PIPELINES.gpus == 2 * (1 + 2 * 4) + 4


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_cpu", [False, True])
def test_the_chart_s_schema_takes_the_values(name: str, is_cpu: bool) -> None:
    values = helm_values(LAYOUTS[name], DeployedModel("org/made-up", 4096, is_cpu), TARGETS)
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    merged = chart_values()
    for key, value in values.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) else value
    merged["pools"] = {name: pool for name, pool in merged["pools"].items() if pool is not None}
    jsonschema.Draft7Validator(schema).validate(merged)


@pytest.mark.slow
@needs_helm
def test_the_chart_renders_the_values() -> None:
    cases = [
        (layout, helm_values(layout, DeployedModel("org/made-up", 4096, is_cpu), TARGETS))
        for layout in LAYOUTS.values()
        for is_cpu in (False, True)
    ]
    cases.append((RING, helm_values(RING, DeployedModel("org/made-up", 4096, True), TARGETS)))
    done = subprocess.run(
        [sys.executable, "tools/render_chart.py", "--cases"],
        input=json.dumps([values for _, values in cases]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for (layout, _), result in zip(cases, json.loads(done.stdout), strict=True):
        assert result.get("problems") == [], result
        manifests.check(result["documents"])
        replicas = {
            pods.labels["sglang-ext.io/role"]: pods.owner["spec"]["replicas"]
            for pods in manifests.pods_of(result["documents"])
            if pods.component == "worker"
        }
        names = {"short": "prefill-short", "long": "prefill-long", "both": "prefill", "decode": "decode"}
        assert replicas == {names[role]: count for role, count in layout.pools()}


@pytest.mark.full
def test_an_interrupted_search_ends_at_once(profile: str, tmp_path: Path) -> None:
    trace = tmp_path / "long.csv"
    rows = [f"{number / 40},{5000 if number % 8 == 0 else 400},50" for number in range(20_000)]
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "sglang_ext.cli",
        "size",
        *sets(f"workload.file={trace}", f"search.profiles={profile}"),
        *SLO,
    ]
    process = subprocess.Popen([*command, *sets("search.processes=2")], stderr=subprocess.PIPE, text=True)
    time.sleep(5.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "sglang-ext size: interrupted"
    assert time.monotonic() - began_s < 30.0


ERRORS: dict[str, tuple[list[str], str]] = {
    "no such trace": (
        sets("workload.file=/no/trace"),
        "workload.file: /no/trace cannot be read: No such file or directory",
    ),
    "no such profile": (sets("search.profiles=/no/profile"), "search.profiles: /no/profile is neither table1, "),
    "an objective of 0": (sets("objectives.short_ms=0"), "objectives.short_ms must be above 0, got 0"),
    "a stretch below 1": (sets("objectives.long_stretch=0.5"), "objectives.long_stretch must be at least 1, got 0.5"),
    "no time per token": (sets("objectives.token_ms=nan"), "objectives.token_ms must be above 0, got nan"),
    "an attainment above 1": (
        sets("objectives.attainment=99"),
        "objectives.attainment must be above 0 and at most 1, got 99",
    ),
    "less than no headroom": (sets("objectives.headroom=0.9"), "objectives.headroom must be at least 1, got 0.9"),
    "too few GPUs": (sets("search.max_gpus=1"), "search.max_gpus: the smallest layout takes 2 GPUs, got 1"),
    "no GPUs": (sets("search.max_gpus=0"), "search.max_gpus must be at least 1, got 0"),
    "a boundary above all prompts": (
        sets("search.boundary_tokens=512,9999"),
        "search.boundary_tokens 9999: all prompts are on one side: 101 to 5000 tokens",
    ),
    "little KV": (
        sets("instances.kv_tokens=4000"),
        "instances.kv_tokens: a prompt of 5000 tokens does not fit into the 4000 of an ",
    ),
    "little KV in decode": (
        sets("decode.kv_tokens=5001"),
        "decode.kv_tokens: a request of 5021 tokens does not fit into the 5001 of an instance",
    ),
    "a decode step of nothing": (sets("decode.step_ms=0"), "decode.step_ms must be above 0, got 0"),
    "a rate of nothing": (sets("workload.rate=0"), "workload.rate must be above 0, got 0"),
    "no stages": (sets("search.long_pp=0"), "search.long_pp must be at least 1, got 0"),
    "a link of nothing": (
        sets("search.ring=true", "links.ring_gb_per_s=0"),
        "links.ring_gb_per_s must be above 0, got 0",
    ),
    "a hop of less than nothing": (
        sets("search.long_pp=2", "links.hop_ms=-1"),
        "links.hop_ms must be at least 0, got -1",
    ),
    "one request": (
        sets("workload.requests=1"),
        "workload.file: all requests arrive at once, so there is no load to size for",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_one_line_that_names_the_option(
    name: str, trace: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = ERRORS[name]
    arguments = ["size", *SLO, *sets(f"workload.file={trace}", f"search.profiles={profile}")]
    assert main([*arguments, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sglang-ext size: error: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_tokens": 0}, '"provenance": kv_tokens must be a whole number of at least 1'),
        ({"server_arguments": {"tp_size": "two"}}, '"provenance": server_arguments, tp_size must be a whole number'),
    ],
)
def test_a_profile_s_wrong_field_is_named(
    change: dict[str, object], message: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = written(tmp_path, {**PROFILE, "provenance": change})
    assert main(["size", *sets(f"workload.file={trace}", f"search.profiles={wrong}"), *SLO]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"search.profiles: {wrong}: {message}" in line


def test_a_trace_s_wrong_line_and_column_are_named(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "wrong.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,1\n1,-5,1\n", encoding="utf-8")
    assert main(["size", *sets(f"workload.file={trace}", f"search.profiles={profile}"), *SLO]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "line 3: num_prefill_tokens -5 is not a whole number of at least 1" in line


def test_profiles_of_one_tp_are_refused(trace: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    for second, message in ((profile, "there is another profile of TP 1"), (f"2:{profile}", "was measured with TP 1")):
        assert main(["size", *sets(f"workload.file={trace}", f"search.profiles={profile},{second}"), *SLO]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"search.profiles {second}: " in line
        assert message in line


def test_an_engine_of_two_devices_has_its_tp(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = "1:h200-qwen2.5-72b-tp2"
    assert main(["size", *sets(f"workload.file={trace}", f"search.profiles={name}"), *SLO]) == 2
    assert f"search.profiles {name}: the profile was measured with TP 2" in capsys.readouterr().err
