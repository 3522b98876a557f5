"""The table of model families is made of what the code refuses."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_is_current() -> None:
    rendered = runpy.run_path(str(ROOT / "tools" / "render_compatibility.py"))["render"]()
    document = ROOT / "docs" / "reference" / "compatibility.md"
    assert document.read_text() == rendered, "run `python tools/render_compatibility.py`"
