"""The Triton kernels where there is no GPU: run in Triton's interpreter, and compiled for a Hopper GPU.

Triton is in a folder of its own (`make kernels-env`), because an engine on a CPU imports stand-ins for it and would
behave otherwise with the real one. Hence other processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRITON = ROOT / ".venv/kernels"


def run_with_triton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    if not (TRITON / "triton").is_dir():
        pytest.fail(f"no Triton in {TRITON}: run `make kernels-env`")
    path = os.pathsep.join(filter(None, [str(TRITON), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_kernels_are_their_references() -> None:
    done = run_with_triton("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    done = run_with_triton("tools/compile_kernels.py", "--json", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    records = json.loads(done.stdout.splitlines()[-1])
    attention = [record for record in records if record["kernel"] in {"positioned_block", "split_prefix"}]
    assert {record["kernel"] for record in records} == {
        *(
            "positioned_block",
            "split_prefix",
            "join_splits",
            "merge_states",
            "move_kv",
            "move_heads",
            "pad_tokens",
            "pad_requests",
            "prefix_indices",
        )
    }
    assert all(record["has_wgmma"] for record in attention if record["constants"]["PRECISION"] != "ieee")
    assert all(record["shared_bytes"] <= 227 * 1024 for record in records)
