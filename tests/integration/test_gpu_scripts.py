"""GPU benchmarks without an engine, tried on a CPU: they run, their comparisons can fail, they import no SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.full]

# Runs `kernels.py` with a kernel that leaves one row of its result out.
BROKEN_SCATTER = """
import runpy, sys
sys.path[:0] = [{kernels!r}]
from sglang_ext_kernels import block_attention as kernels
right = kernels.scatter_kv_
kernels.scatter_kv_ = lambda keys, values, slots, packed: right(keys, values, slots[1:], packed[:, 1:].contiguous())
sys.argv = [{script!r}, "--dry-run", "--out", {out!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def no_engine(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing of SGLang can be imported."""
    for name in ("sglang", "sgl_kernel", "flashinfer"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not for this script')\n", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(command: list[str], environment: dict[str, str], out: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and record of a script."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines()[-1].startswith("RESULT "), done.stdout[-3000:] + done.stderr[-3000:]
    return done.returncode, json.loads(out.read_text())


@pytest.mark.parametrize("name", ["kernels", "graphs", "ring", "transfer"])
def test_a_script_runs_dry_without_an_engine(name: str, no_engine: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    script = str(ROOT / f"bench/gpu/{name}.py")
    status, found = run([sys.executable, script, "--dry-run", "--out", str(out)], no_engine, out)
    assert found["failed"] == []
    assert status == 0
    judged = [check for check in found["checks"] if check["is_judged"]]
    assert len(judged) >= 2
    # Speed is said, not judged.
    assert len(judged) < len(found["checks"])


def test_a_wrong_kernel_fails(no_engine: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    code = BROKEN_SCATTER.format(kernels=str(ROOT / "kernels"), script=str(ROOT / "bench/gpu/kernels.py"), out=str(out))
    status, found = run([sys.executable, "-c", code], no_engine, out)
    assert status == 1
    assert found["failed"] == ["gathered and scattered rows that are equal"]
