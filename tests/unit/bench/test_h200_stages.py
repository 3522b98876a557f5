"""The commands of `bench/h200.py`: they fit their time and their card, keep what they had, and see what is wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

import h200
from gpu import preflight, stage_plan
from gpu.card import CARDS, Card, busy_samples, largest_model, needed_bytes, read_card
from gpu.expected import expected_lines
from gpu.judgement import CONTROL_BOUND, LOGITS_BOUND, failures_of, merge, verdicts_of
from gpu.stage_plan import (
    ARRANGEMENTS,
    COMMAND_S,
    COMMANDS,
    CONCURRENCIES,
    DEADLINE_S,
    MODES,
    MOST_FILES,
    RESERVE_S,
    STAGES,
    SYSTEMS,
    WINDOWS,
    Selection,
    Step,
    plan,
    repeats_within,
)
from support.running_time import running_s

ROOT = Path(__file__).resolve().parents[3]
H100, H200 = CARDS["h100"], CARDS["h200"]


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_command_fits_its_time_and_its_files(card: Card) -> None:
    assert DEADLINE_S + RESERVE_S < COMMAND_S
    for command in COMMANDS:
        steps = command.steps(card)
        assert command.estimate_s(card) <= DEADLINE_S - RESERVE_S, command.options
        assert len({step.log_name for step in steps}) == len(steps)
        assert len(steps) + 1 <= MOST_FILES  # their logs and the result
    wanted = [
        *(("buckets-7b", mode) for mode in MODES),
        *(("figure6", system) for system in SYSTEMS),
        *(("figure5", window) for window in WINDOWS),
        *(("two-engines", arrangement) for arrangement in ARRANGEMENTS),
    ]
    measured = {(step.stage, step.name) for command in COMMANDS for step in command.steps(card)}
    assert set(wanted) < measured
    # as they are printed, a shell takes them
    assert all(shlex.split(" ".join(command.options)) == list(command.options) for command in COMMANDS)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_step_fits_a_command_by_itself(card: Card) -> None:
    for stage in STAGES:
        if (stage, card) == ("buckets-32b", H100):
            continue
        for step in plan(stage, card, Selection()):
            assert step.start_s < step.estimate_s <= DEADLINE_S - RESERVE_S, step


def test_the_first_half_hour_has_what_decides_most() -> None:
    # Less than 30 s between commands, or the machine is gone.
    assert sum(command.estimate_s(H100) + 30 for command in COMMANDS[:4]) < 1500
    first = [(step.stage, step.name) for command in COMMANDS[:3] for step in command.steps(H100)]
    assert first == [
        *(("preflight", "checks"), ("tokens", "grid"), ("kernels-check", "tests")),
        *(("buckets-7b", "grid"), ("buckets-7b", "breakable"), ("figure6", "stock"), ("figure6", "all")),
    ]
    assert CONCURRENCIES == (64, 8, 1)


def test_the_model_is_what_the_card_holds() -> None:
    assert largest_model(H100.memory_bytes) == "qwen2.5-14b"
    assert largest_model(H200.memory_bytes) == "qwen2.5-32b"
    assert {step.model for step in plan("figure6", H100, Selection())} == {"qwen2.5-14b"}
    with pytest.raises(ValueError, match=r"buckets-32b: needs 91 GB of device memory, NVIDIA H100 80GB HBM3 has 86 GB"):
        plan("buckets-32b", H100, Selection())
    with pytest.raises(ValueError, match="no model fits into 10 GB"):
        largest_model(1e10)
    assert needed_bytes("qwen2.5-7b") < 40e9


def test_attention_is_the_engines_choice_unless_another_is_named() -> None:
    for stage in ("figure6", "figure5"):
        for one in plan(stage, H100, Selection()):
            assert "--attention" not in one.arguments
        for one in plan(stage, H100, Selection(attention="triton")):
            assert one.arguments[-2:] == ("--attention", "triton")


def test_a_card_is_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_card() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 580.159.03'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    card = read_card()
    assert card == Card("NVIDIA H200", 143771 * 2**20, "580.159.03")
    assert (card.slug, H100.slug) == ("h200", "h100")
    assert Card("NVIDIA GeForce RTX 4090", 1.0).slug == "nvidia-geforce-rtx-4090"
    for answer in ("exit 9", "echo 'no devices were found'"):
        tool.write_text(f"#!/bin/sh\n{answer}\n")
        assert read_card() is None


def test_how_busy_the_card_is_sampled_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with busy_samples() as found:
        pass
    assert found == []
    tool, told = tmp_path / "nvidia-smi", tmp_path / "told"
    tool.write_text(f"#!/bin/sh\necho 90\necho 70\necho '[N/A]'\n/bin/touch {told}\nexec /bin/sleep 600\n")
    tool.chmod(0o755)
    with busy_samples() as found:
        while not told.exists():
            time.sleep(0.01)
    assert found == [0.9, 0.7]


def test_repeats_are_fewer_where_they_take_long() -> None:
    assert repeats_within(0.001, 20, 1.0) == 20
    assert repeats_within(0.1, 20, 1.0) == 10
    assert repeats_within(9.0, 20, 1.0) == 5
    assert repeats_within(9.0, 3, 1.0) == 3
    assert repeats_within(0.0, 20, 1.0) == 20


def step(script: str, start_s: float = 0.0) -> Step:
    return Step("figure6", "all", "tiny", ("-c", script), 1.0, start_s)


WRITES = """
import json, subprocess, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
within = sys.argv[sys.argv.index("--within") + 1]
json.dump({"levels": [{"concurrency": 64, "failed": 0}], "within": within}, open(out, "w"))
"""


def run_one(tmp_path: Path, one: Step, deadline_s: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(h200, "plan", lambda *given: [one])
    run = h200.Run(tmp_path, H200, deadline_s, is_dry=False)
    run.stage("figure6", Selection())
    assert run.path.name.startswith("h200-")
    written: dict[str, Any] = json.loads(run.path.read_text())
    assert written == json.loads(json.dumps(run.record))
    found: dict[str, Any] = written["stages"]["figure6"]["steps"]["all"]
    return found


@pytest.mark.full
def test_a_step_that_is_stopped_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200, "RESERVE_S", 3.0)
    script = WRITES + (
        "child = subprocess.Popen(['sleep', '600'])\nprint('child', child.pid, flush=True)\n"
        "print('measuring', flush=True)\ntime.sleep(600)\n"
    )
    found = run_one(tmp_path, step(script), 6.0, monkeypatch)
    assert re.fullmatch(r"not done after [3-5] s", found["error"])
    assert found["levels"] == [{"concurrency": 64, "failed": 0}]
    # The process knows when to begin nothing new, some time before it is stopped.
    assert int(found["within"]) in (1, 2, 3)
    log = (tmp_path / "figure6-all.log").read_text()
    assert log.splitlines()[-1] == "measuring"
    child = int(log.split()[1])
    if psutil.pid_exists(child):
        psutil.Process(child).wait(30)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".log"]


@pytest.mark.slow
def test_a_step_that_fails_says_why_and_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_one(tmp_path, step(WRITES + "sys.exit('out of memory')\n"), 60.0, monkeypatch)
    assert found["error"] == "out of memory"
    assert found["levels"][0]["concurrency"] == 64
    found = run_one(tmp_path, step(WRITES), 60.0, monkeypatch)
    assert "error" not in found


@pytest.mark.slow
def test_a_step_that_hangs_leaves_time_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_plan, "LEAST_LIMIT_S", 6.0)
    hangs = step("import time; time.sleep(600)")
    monkeypatch.setattr(h200, "plan", lambda *given: [hangs, step(WRITES)._replace(name="next", estimate_s=100.0)])
    run = h200.Run(tmp_path, H200, 570.0, is_dry=False)
    run.stage("figure6", Selection())
    steps = run.record["stages"]["figure6"]["steps"]
    assert steps["all"]["error"].startswith("not done after ")
    assert "levels" in steps["next"]
    for one in (step for command in COMMANDS for step in command.steps(H100)):
        assert one.max_s > 2 * one.estimate_s


def test_the_environment_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in float32 run on what SGLang has for them, and Triton multiplies them so; a bundle brings what is
    compiled of this project, and packages in a folder of their own."""
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(site))
    laid: list[tuple[Path, Path]] = []
    monkeypatch.setattr(h200, "lay_own", lambda *given: laid.append(given) or 55)
    tokens, buckets = (step("")._replace(stage=stage) for stage in ("tokens", "buckets-7b"))
    run = h200.Run(tmp_path, H200, 570.0, is_dry=False)
    assert laid == [(site, h200.ROOT)]
    exact, fast = run._environment(tokens), run._environment(buckets)
    assert (exact["SGLANG_FORCE_FUSED_OP_BACKEND"], exact["TRITON_F32_DEFAULT"]) == ("torch", "tf32x3")
    assert not {"SGLANG_FORCE_FUSED_OP_BACKEND", "TRITON_F32_DEFAULT"} & set(fast)
    path = fast["PYTHONPATH"].split(":")
    assert path[0] == str(h200.ROOT / "python")
    assert path[-2:] == [str(site), str(site / "nvidia_cutlass_dsl/dsl_packages")]
    dry = h200.Run(tmp_path, H200, 570.0, is_dry=True)._environment(tokens)
    assert "SGLANG_FORCE_FUSED_OP_BACKEND" not in dry
    assert dry["PYTHONPATH"].split(":")[-1] == str(site)
    assert len(laid) == 1


def test_what_has_no_time_left_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_one(tmp_path, step("raise SystemExit('was begun')", start_s=40.0), 50.0, monkeypatch)
    assert list(found) == ["not_measured"]
    assert found["not_measured"].endswith(" s were left")
    assert not (tmp_path / "figure6-all.log").exists()


@pytest.mark.slow
def test_results_are_there_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step reads the result of the first from the file of the run."""
    second = (
        "import glob, json, sys\n"
        "from pathlib import Path\n"
        "out = Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "(result,) = out.parent.glob('h200-*.json')\n"
        "steps = json.loads(result.read_text())['stages']['figure6']['steps']\n"
        "out.write_text(json.dumps({'seen': steps['first']['levels']}))\n"
    )
    steps = [step(WRITES)._replace(name="first"), step(second)._replace(name="second")]
    monkeypatch.setattr(h200, "plan", lambda *given: steps)
    run = h200.Run(tmp_path, H200, 60.0, is_dry=False)
    run.stage("figure6", Selection())
    assert run.record["stages"]["figure6"]["steps"]["second"]["seen"] == [{"concurrency": 64, "failed": 0}]


@pytest.mark.slow
def test_what_was_compiled_beforehand_is_found_beside_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "flashinfer_jit_cache/jit_cache/norm").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/other:{site}")
    script = "import json, os, sys; open(sys.argv[2], 'w').write(json.dumps(dict(os.environ)))"
    found = run_one(tmp_path, step(script), 60.0, monkeypatch)
    assert found["FLASHINFER_USE_CUDA_NORM"] == "1"
    assert found["CUDA_HOME"]
    assert found["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    assert str(site) in found["PYTHONPATH"].split(":")


def test_a_stage_that_the_card_does_not_hold_is_a_failure_of_its_own(tmp_path: Path) -> None:
    run = h200.Run(tmp_path, H100, 60.0, is_dry=False)
    run.stage("buckets-32b", Selection())
    assert failures_of(run.record) == [f"buckets-32b: {run.record['stages']['buckets-32b']['error']}"]
    assert verdicts_of(run.record) == []
    assert h200.report(run.record) == 1


GRID = {
    "rows": [],
    "worst_relative_error": 0.01,
    "control_error": 1.3,
    "tokens_equal": True,
    "all_on_grid": True,
    "read_bytes_per_s": 4e12,
    "operations_per_s": 8e14,
}


def record(stage: str, name: str, found: dict[str, Any], is_dry: bool = False, card: str = "h200") -> dict[str, Any]:
    steps = {name: found}
    return {"card": card, "is_dry_run": is_dry, "stages": {stage: {"model": "qwen2.5-7b", "steps": steps}}}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, None),
        ({"worst_relative_error": LOGITS_BOUND}, "logits differ by 0.1, more than 0.1"),
        ({"worst_relative_error": float("nan")}, "logits differ by nan, more than 0.1"),
        ({"worst_relative_error": None}, "no logits were compared"),
        # What weights of 1e-3 give: attention of each token to itself only goes unseen.
        ({"control_error": 7e-4}, "attention of each token to itself only differs by 0.0007: the comparison would"),
        ({"control_error": None}, "wrong attention was not tried, so the comparison proves nothing"),
        ({"all_on_grid": False}, "a batch that fits a captured shape did not run on it"),
        ({"error": "not done after 500 s"}, "not done after 500 s"),
    ],
)
def test_a_grid_that_is_wrong_is_a_failure(more: dict[str, Any], line: str | None) -> None:
    found = failures_of(record("buckets-7b", "grid", {**GRID, **more}))
    if line is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"buckets-7b, grid: {line}")
    assert LOGITS_BOUND < CONTROL_BOUND


def test_tokens_have_a_closer_bound() -> None:
    for is_dry, error in ((False, 5e-3), (True, 1e-3)):
        found = failures_of(record("tokens", "grid", {**GRID, "worst_relative_error": error}, is_dry))
        assert found == [f"tokens, grid: logits differ by {error:.2g}, more than {2e-3 if not is_dry else 1e-4:g}"]
    found = failures_of(record("tokens", "grid", {**GRID, "worst_relative_error": 1e-5, "tokens_equal": False}))
    assert found == ["tokens, grid: tokens with and without graphs differ"]


def test_a_test_that_was_skipped_on_the_device_is_a_failure() -> None:
    log = (
        "tests/gpu/test_mesh_gpu.py::test_nccl_with_itself PASSED\n"
        "SKIPPED [1] tests/gpu/test_mesh_gpu.py:70: needs two CUDA devices\n"
        "SKIPPED [1] tests/gpu/test_mesh_gpu.py:55: needs nvshmem4py\n"
        "==== 3 passed, 2 skipped in 1.00s ====\n"
    )
    found = h200.tests_in(log)
    assert found["tests"] == "==== 3 passed, 2 skipped in 1.00s ===="
    assert failures_of(record("kernels-check", "tests", found)) == [
        "kernels-check, tests: skipped: tests/gpu/test_mesh_gpu.py:55: needs nvshmem4py"
    ]
    assert "importorskip" not in (ROOT / "tests/gpu/test_mesh_gpu.py").read_text()


def test_requests_blocks_and_checks_that_fail_are_failures() -> None:
    graphs, timed = {"replays": {"8x1": 3}}, {"decisions": {"batches": 9}}
    failing = {"levels": [{"failed": 2, **timed}, {"failed": 1, **timed}], "laps": {"graphs": graphs}}
    assert failures_of(record("figure6", "all", failing)) == ["figure6, all: 3 requests failed"]
    assert failures_of(record("figure6", "stock", {"levels": [{"failed": 0}]})) == []
    for idle in (None, {"replays": {}}, {"replays": {"8x1": 0}}):
        # A result of graphs in which none ran is a result of something else.
        for stage, name, found in (
            ("figure6", "all", {"levels": [{"failed": 0, **timed}], "laps": {"graphs": idle}}),
            ("figure5", "0", {"levels": [{"failed": 0, "graphs": idle, **timed}]}),
        ):
            assert failures_of(record(stage, name, found)) == [f"{stage}, {name}: no prefill ran on a captured shape"]
            assert failures_of(record(stage, name, found, is_dry=True)) == []
    untimed = {"levels": [{"concurrency": 8, "failed": 0}]}
    assert failures_of(record("figure6", "two-queues", untimed)) == ["figure6, two-queues: at 8 no decision was timed"]
    assert failures_of(record("kernels", "rates", {"blocks": [{"tokens": 64, "causal_error": 0.5}]})) == [
        "kernels, rates: causal_error at 64 tokens is 0.5"
    ]
    prefixes = [{"shape": [16, 1, 4096], "split_error": 0.003}, {"shape": [8, 1, 0], "split_error": float("nan")}]
    assert failures_of(record("kernels", "rates", {"prefixes": prefixes})) == [
        "kernels, rates: split_error at [8, 1, 0] is nan"
    ]
    blocks = [{"tokens": 64, "causal_error": 1e-3, "flashinfer_failed": "no nvcc"}]
    assert failures_of(record("kernels", "rates", {"blocks": blocks})) == [
        "kernels, rates: flashinfer at 64 tokens: no nvcc"
    ]
    checks = {
        "norm": {"ok": False, "is_required": True, "detail": "no cublasLt.h"},
        "FlashAttention 3": {"ok": False, "is_required": False, "detail": "not there"},
    }
    assert failures_of(record("preflight", "checks", {"checks": checks})) == ["preflight, checks: norm: no cublasLt.h"]
    assert failures_of(record("preflight", "checks", {"checks": checks}, is_dry=True)) == []


@pytest.mark.slow
def test_results_of_several_commands_are_judged_as_one(tmp_path: Path) -> None:
    graphs = {"replays": {"8x1": 3}}
    level = {"concurrency": 64, "failed": 0, "requests_per_s": 10.0, "mean_s": 2.0, "graphs": graphs}
    faster = {**level, "requests_per_s": 13.0, "mean_s": 1.0, "decisions": {"batches": 9, "share": 0.001}}
    parts = [
        record("figure6", "stock", {"levels": [level]}),
        record("figure6", "all", {"error": "out of memory"}),
        record("figure6", "all", {"levels": [faster]}),
    ]
    paths = []
    for number, part in enumerate(parts):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(part))

    def judge(*given: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "bench/h200.py", "--judge", *map(str, given)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = judge(*paths)
    assert done.returncode == 0, done.stderr
    assert "yes figure 6: requests/s gained" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["aims"]["figure 6: mean latency gained"] == [-0.5, True]
    assert judge(*paths[:2]).returncode == 1
    assert merge(parts)["stages"]["figure6"]["steps"]["all"] == {"levels": [faster]}
    with pytest.raises(ValueError, match="results of one kind of device are wanted, not of h100, h200"):
        merge([*parts, record("figure6", "all", {}, card="h100")])
    missing = judge(tmp_path / "none.json")
    assert (missing.returncode, len(missing.stderr.splitlines())) == (1, 1)
    assert missing.stderr.startswith("error: --judge: ")


@pytest.mark.slow
def test_what_is_expected_is_printed_beforehand() -> None:
    (line, model, least, *_) = expected_lines("buckets-7b", H200, Selection(modes=("grid",)))
    assert line.endswith("s for grid")
    assert "weights 15.2 GB" in model
    assert "8x1 3.29" in least  # 14.1 GB read at 4.3 TB/s
    _, rate, means = expected_lines("figure6", H100, Selection())
    assert "qwen2.5-14b" in rate
    requests_per_s = float(rate.split("so ")[1].split(" requests")[0])
    # Little's law
    assert float(means.split("ms: ")[1].split(" with 64")[0]) == pytest.approx(64e3 / requests_per_s, rel=0.02)
    assert next(expected_lines("buckets-32b", H100, Selection())).startswith("buckets-32b: needs 91 GB")
    for stage in STAGES:
        assert list(expected_lines(stage, Card("NVIDIA Q1", 2e11), Selection()))
    environment = {**os.environ, "PATH": "/nowhere"}
    for options, status in (["--expected", "--card", "h100"], 0), (["--expected"], 2), ([], 2):
        command = [sys.executable, "bench/h200.py", *options]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        if status == 0:
            assert all(f"h200.py {' '.join(command.options)}" in done.stdout for command in COMMANDS)
        else:
            assert done.stderr.splitlines()[-1].endswith("--dry-run goes without, --expected takes --card")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "figure7"], "argument --stages: figure7: not among preflight"),
        (["--systems", "stock,none"], "argument --systems: none: not among stock"),
        (["--concurrencies", "64,0"], "argument --concurrencies: '64,0' is not a list of positive numbers"),
    ],
)
def test_bad_options_are_named_in_a_line(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["h200.py", *options])
    with pytest.raises(SystemExit) as refusal:
        h200.main()
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_check_that_fails_is_a_line_and_stops_no_other() -> None:
    def broken() -> str:
        raise OSError("nvcc: fatal error\ncublasLt.h: no such file")

    started_s = running_s()
    results = [preflight.run_check(preflight.Check("one", True, run)) for run in (broken, lambda: "found")]
    assert [(result["ok"], result["detail"]) for result in results] == [
        (False, "OSError: cublasLt.h: no such file"),
        (True, "found"),
    ]
    assert running_s() - started_s < 1.0
    names = [check.name for check in preflight.CHECKS]
    # What may be compiled for a minute comes last.
    assert names[-1] == "flashinfer"
    assert {"norm", "engine", "NVSHMEM"} <= {check.name for check in preflight.CHECKS if check.is_required}


@pytest.mark.parametrize("is_well", [True, False])
def test_without_a_gpu_only_what_does_not_compute_is_looked_at(
    is_well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_it() -> str:
        if not is_well:
            raise ModuleNotFoundError("No module named 'cutlass'")
        return "imported"

    checks = (
        preflight.Check("engine", True, import_it, computes=False),
        preflight.Check("norm", True, lambda: pytest.fail("there is no device")),
        preflight.Check("NIXL", False, import_it, computes=False),
    )
    pretended: list[bool] = []
    monkeypatch.setattr(preflight, "CHECKS", checks)
    monkeypatch.setattr(preflight, "pretend", lambda: pretended.append(True))
    monkeypatch.setattr(sys, "argv", ["preflight", "--pretend", "--out", str(tmp_path / "found.json")])
    assert preflight.main() == (0 if is_well else 1)
    assert pretended == [True]
    found = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert {name: one["ok"] for name, one in found.items()} == {"engine": is_well, "NIXL": is_well}
    assert is_well or "cutlass" in found["engine"]["detail"]


@pytest.mark.slow
def test_a_check_that_may_hang_or_crash_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(h200.HERE))
    (packages,) = (check for check in preflight.CHECKS if check.name == "packages")
    found = preflight.run_apart(packages, 60.0)
    assert found["detail"] == preflight.run_check(packages)["detail"]
    assert preflight.run_apart(packages, 0.01)["detail"] == "not done after 0 s"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ended = preflight.run_apart(packages._replace(is_required=False), 60.0)
    assert (ended["ok"], ended["is_required"]) == (False, False)
    assert ended["detail"] == "its process ended with status 1"


ANSWERS = {
    "backend": "nixl",
    "answers": 16,
    "equal": 15,
    "ties": 1,
    "different": [],
    "control_equal": 0.0,
    "graphs": {"replays": {"8x1": 3}},
}


@pytest.mark.parametrize(
    ("arrangement", "more", "line"),
    [
        ("default", {}, None),
        ("pool", {"shared": 2, "graphs": None}, None),
        ("pool", {"shared": 0}, "no prompt was computed by both members"),
        ("handshake", {"ties": 5, "equal": 11}, "5 of 16 answers part at ties"),
        (
            "handshake",
            {"control_equal": 0.5},
            "50% of answers stay the same behind another prompt",
        ),
        ("handshake", {"control_equal": float("nan")}, "nan% of answers stay the same behind another prompt"),
        ("default", {"graphs": {"replays": {}}}, "no prefill ran on a captured shape"),
        (
            "default",
            {"different": [{"prompt_tokens": 300, "at": 2, "gap": 1.5}]},
            "the answer to 300 tokens is another one from its token 2 on, which is better than the next best by 1.5",
        ),
        ("default", {"answers": 0}, "no answers were compared"),
    ],
)
def test_other_answers_of_two_engines_are_a_failure(arrangement: str, more: dict[str, Any], line: str | None) -> None:
    found = failures_of(record("two-engines", arrangement, {**ANSWERS, **more}))
    if line is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"two-engines, {arrangement}: {line}")


def test_what_a_device_does_not_take_is_told_and_fails_where_it_must_be() -> None:
    refused = {"not_possible": "transfer backend handshake moves host memory only"}
    for arrangement in ARRANGEMENTS:
        failures = failures_of(record("two-engines", arrangement, refused))
        assert failures == [f"two-engines, {arrangement}: not possible: {refused['not_possible']}"]
        assert failures_of(record("two-engines", arrangement, refused, is_dry=True))
        (verdict,) = verdicts_of(record("two-engines", arrangement, refused))
        assert verdict.holds is None
    different = {**ANSWERS, "equal": 14, "different": [{"prompt_tokens": 3, "at": 0, "gap": 1.0}]}
    for found, holds in ((ANSWERS, True), (different, False)):
        (verdict,) = verdicts_of(record("two-engines", "default", found))
        assert verdict.holds is holds
