"""The GPU benchmark's comparison of logits on real SGLang: it passes for right attention and sees wrong attention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from gpu.judgement import CONTROL_BOUND, failures_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.integration

GRID = ("--model", "tiny", "--mode", "grid", "--lengths", "16", "--batches", "2", "--reprefills", "", "--repeats", "1")
# What the benchmark does, in a process whose graphs are captured with attention of each token to itself only.
BROKEN = """
import sys
from gpu import buckets
buckets.prepare_process()
with buckets.attention_to_oneself():
    sys.exit(buckets.main())
"""
# Weights as SGLang's loader draws them without a checkpoint: within 1e-3.
UNSPREAD = """
import sys
from gpu import buckets
buckets.spread_weights = lambda runner: None
sys.exit(buckets.main())
"""


def grid_of(tmp_path: Path, *start: str) -> tuple[dict[str, Any], list[str]]:
    """What the step found, and its failures as `bench/h200.py` judges them."""
    out = tmp_path / "found.json"
    folders = ("python", "router", "kernels", "cuda_graphs", "tests", "bench")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in folders)}
    done = subprocess.run(
        [sys.executable, *start, *GRID, "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    stages = {"tokens": {"model": "tiny", "steps": {"grid": found}}}
    return found, failures_of({"card": "cpu", "is_dry_run": True, "stages": stages})


@pytest.mark.full
def test_wrong_attention_in_the_graphs_is_seen(tmp_path: Path) -> None:
    found, failures = grid_of(tmp_path, "-c", BROKEN)
    assert found["worst_relative_error"] > CONTROL_BOUND
    assert any(line.startswith("tokens, grid: logits differ by") for line in failures)
    assert "tokens, grid: tokens with and without graphs differ" in failures


@pytest.mark.full
def test_right_attention_passes_and_its_control_does_not(tmp_path: Path) -> None:
    found, failures = grid_of(tmp_path, "-m", "gpu.buckets")
    assert failures == []
    assert found["worst_relative_error"] < 1e-5
    assert found["control_error"] > CONTROL_BOUND


@pytest.mark.full
def test_weights_that_hide_wrong_attention_are_a_failure(tmp_path: Path) -> None:
    found, failures = grid_of(tmp_path, "-c", UNSPREAD)
    assert found["control_error"] < 0.01
    assert [line.partition(" differs by")[0] for line in failures] == [
        "tokens, grid: attention of each token to itself only"
    ]
