"""GPU benchmarks with SGLang, tried on a CPU: they run on real engines, and their comparisons see what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from gpu import serve, two_engines

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.full]

# The graphs are captured with attention of each token to itself only.
BROKEN = """
import sys
from gpu import buckets, sglang_runner
sglang_runner.prepare_process(True)
with sglang_runner.attention_to_oneself():
    sys.exit(buckets.main({arguments!r}))
"""
# Weights as SGLang's loader draws them without a checkpoint: within 1e-3.
UNSPREAD = """
import sys
from gpu import buckets
buckets.spread_weights = lambda runner: None
sys.exit(buckets.main({arguments!r}))
"""


def buckets_on_a_cpu(tmp_path: Path, code: str | None, *more: str) -> dict[str, Any]:
    """Return the record of the script, or of code that runs it otherwise."""
    out = tmp_path / "found.json"
    arguments = ["--dry-run", "--out", str(out), *more]
    folders = ("python", "router", "kernels", "cuda_graphs", "tests", "bench")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in folders)}
    script = [str(ROOT / "bench/gpu/buckets.py"), *arguments]
    done = subprocess.run(
        [sys.executable, *(script if code is None else ["-c", code.format(arguments=arguments)])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout.splitlines()[-1].startswith("RESULT "), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == bool(found["failed"])
    return found


def test_right_attention_passes_and_its_control_does_not(tmp_path: Path) -> None:
    found = buckets_on_a_cpu(tmp_path, None, "--exact")
    assert found["failed"] == []
    assert max(row["error"] for row in found["rows"]) < 1e-5
    assert found["control_error"] > 0.3
    assert all(row["grid_s"] > 0 and row["grid_eager_runs"] == 0 for row in found["rows"])


SMALLEST = ("--exact", "--lengths", "16", "--batches", "2", "--reprefills", "")


def test_wrong_attention_in_the_graphs_is_seen(tmp_path: Path) -> None:
    found = buckets_on_a_cpu(tmp_path, BROKEN, *SMALLEST)
    assert found["failed"] == ["error of logits on the grid", "batches with equal tokens, of all"]


def test_weights_that_hide_wrong_attention_are_a_failure(tmp_path: Path) -> None:
    found = buckets_on_a_cpu(tmp_path, UNSPREAD, *SMALLEST)
    assert found["control_error"] < 0.01
    assert found["failed"] == ["error of attention to oneself, which must be seen"]


def test_batches_are_timed_against_the_floor(tmp_path: Path) -> None:
    found = buckets_on_a_cpu(tmp_path, None)
    assert found["failed"] == []
    assert {row["requests"] for row in found["rows"]} == {1, 2}
    assert all(row["eager_s"] > 0 and row["grid_s"] > 0 and row["floor_s"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("options", "systems"),
    [(("--systems", "stock,all"), ["stock", "all"]), (("--windows", "adaptive,0"), ["adaptive", "0"])],
)
def test_servers_are_loaded(
    options: tuple[str, ...], systems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    out = tmp_path / "found.json"
    assert serve.main(["--dry-run", "--out", str(out), *options]) == 0
    found = json.loads(out.read_text())["systems"]
    assert list(found) == systems
    for name, system in found.items():
        (level,) = system["levels"]
        assert level["requests"] > 0
        assert level["failed"] == 0
        assert system["server"]["attention_backend"] == "torch_native"
        assert ("decisions" in level) == (name != "stock")


@pytest.mark.parametrize("arrangements", ["handshake", "default,pool"])
def test_answers_of_engines_are_those_of_one(
    arrangements: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_engines.signal, "signal", lambda *_: None)
    out = tmp_path / "found.json"
    assert two_engines.main(["--dry-run", "--out", str(out), "--arrangements", arrangements]) == 0
    for found in json.loads(out.read_text())["arrangements"].values():
        assert found["equal"] + found["ties"] == found["answers"] == 8
        assert found["control_equal"] == 0
