"""The document of the differences is made of the list by which the conformance test goes."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_is_current() -> None:
    rendered = runpy.run_path(str(ROOT / "tools" / "render_differences.py"))["render"]()
    assert (ROOT / "docs" / "reference" / "differences.md").read_text() == rendered, (
        "run `python tools/render_differences.py`"
    )
