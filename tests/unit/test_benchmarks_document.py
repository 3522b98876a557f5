"""`docs/benchmarks.md` and the figures of README.md are those of the raw results."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools/render_benchmarks.py"))
RUN_IT = "run `python tools/render_benchmarks.py`"


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8") == TOOL["render"](), RUN_IT


def test_the_figures_of_the_readme_are_current() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8") == TOOL["render_readme"](), RUN_IT


def test_figures_of_tables_are_read_from_raw_results() -> None:
    rows = [row for row in TOOL["TEMPLATE"].read_text(encoding="utf-8").splitlines() if "{{" in row]
    assert len(rows) > 90
