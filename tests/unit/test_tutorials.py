"""Tutorials that need no model run as they stand: every command of their code blocks, in order, in one shell.

`first-cluster.md` and `first-long-pool.md` start engines: `tests/integration/test_up.py` and `test_up_long_pool.py`
start such clusters over a model of their own, and `test_document_commands.py` parses their commands.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.engines import free_port

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/tutorial"


def script_of(page: Path) -> str:
    """Return a page's commands as a script that ends its background jobs, with free ports in place of the page's."""
    blocks = re.findall(r"^( *)```\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line.strip() for _, block in blocks for line in block.splitlines()]
    # The command that a tutorial kills is the only one that may fail.
    lines = [f"{line} || true" if line.startswith("timeout -s KILL") else line for line in lines]
    script = "\n".join(["set -e", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *lines])
    for port in sorted(set(re.findall(r"\b300\d\d\b", script))):
        script = re.sub(rf"\b{port}\b", str(free_port()), script)
    return script


def run_page(name: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script_of(PAGES / name)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_first_batch(tmp_path: Path) -> None:
    assert "1000 answers.jsonl" in run_page("first-batch.md", tmp_path)


@pytest.mark.slow
def test_the_first_simulation(tmp_path: Path) -> None:
    printed = run_page("first-simulation.md", tmp_path)
    assert printed.count("short ") >= 3
    assert (tmp_path / "run.html").is_file()
