"""`docs/reference/live-stream.md` has the stream as the code has it, and the picture that the tool draws."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_code_and_the_picture_is_there() -> None:
    spec = importlib.util.spec_from_file_location("render_live_page", ROOT / "tools" / "render_live_page.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    document = tool.DOCUMENT.read_text(encoding="utf-8")
    assert document == tool.rendered(document), "python tools/render_live_page.py"
    assert tool.PICTURE.name in (ROOT / "docs/how-to/live-page.md").read_text(encoding="utf-8")
    assert f"docs/{tool.PICTURE.name}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert 20_000 < tool.PICTURE.stat().st_size < 400_000
    assert tool.PICTURE.read_bytes().startswith(b"\x89PNG")
