"""`docs/reference/environment-variables.md` has every variable of this project that the sources read, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/environment-variables.md"
SOURCES = [path for root in ("python", "router", "kernels", "cuda_graphs") for path in (ROOT / root).rglob("*.py")]


def test_the_page_has_what_the_sources_read() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (*SOURCES, ROOT / "hatch_build.py")]
    read = {name for text in texts for name in re.findall(r"\bSGLANG_EXT_[A-Z_]+\b", text)}
    backends = {"SGLANG_EXT_TCP", "SGLANG_EXT_HANDSHAKE", "SGLANG_EXT_STAND_IN"}  # members of SGLang's enumeration
    named = set(re.findall(r"`(SGLANG_EXT_[A-Z_]+)`", PAGE.read_text(encoding="utf-8")))
    assert named == read - backends
