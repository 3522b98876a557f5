"""The documents make a site without a dead link, with a navigation and llms.txt that have every page of the index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "docs"


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if not (PACKAGES / "mkdocs").is_dir():
        pytest.skip("mkdocs is not installed: `make docs-env`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(PACKAGES), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = re.findall(
        r"^- \[[^]]+\]\(([^)]+)\.md\)", (ROOT / "docs/index.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    listed = re.findall(r"\]\(([^)]+)\.html\)", (tmp_path / "llms.txt").read_text(encoding="utf-8"))
    assert listed == pages
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert all((tmp_path / f"{page}.html").is_file() and f'href="{page}.html"' in home for page in pages)
    assert (tmp_path / "search/search_index.json").is_file()
