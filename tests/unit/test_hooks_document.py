"""`docs/reference/hooks.md` has the hooks as the code has them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sglang_ext.engine.hook_table import HOOK_TABLE

TOOL = Path(__file__).parents[2] / "tools" / "render_hooks.py"


def test_the_page_has_every_hook() -> None:
    spec = importlib.util.spec_from_file_location("render_hooks", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.DOCUMENT.read_text(encoding="utf-8")
    assert page == tool.render(), "python tools/render_hooks.py"
    assert all(f"\n| `{hook.name}` | " in page for hook in HOOK_TABLE)
