"""Write `docs/reference/differences.md`, the router against plain SGLang: `python tools/render_differences.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from conformance.differences import DIFFERENCES, FATAL  # noqa: E402
from sglang_ext_router.http.instance_paths import INSTANCE_PATHS, Handling  # noqa: E402

DOCUMENT = ROOT / "docs" / "reference" / "differences.md"
_HEAD = """# How the router differs from a plain SGLang server

<!-- made by `python tools/render_differences.py` -->

`make test-all` sends some 1,300 requests to a router over a prefill and a decode instance, and to a plain SGLang server
with the same model: fields of every type, ranges, prompts, headers, targets, broken bodies (`tests/conformance`).
Status, errors and replies are the same, but for ids, times, timings and these differences. The test knows no others,
and fails for each that is no more.

| sent | plain SGLang | router | why |
|---|---|---|---|
"""
_FATAL = """
## What the router does not let through

A plain server may end at these; through a router one such request would end an instance, and with every retry the
next. The router refuses them (400).

| sent | a plain server |
|---|---|
"""
_PATHS = """
## Paths of SGLang

| path | at the router |
|---|---|
"""


def render() -> str:
    """Return the document's text."""
    parts = [_HEAD]
    parts += [f"| {known.sent} | {known.plain} | {known.router} | {known.reason} |\n" for known in DIFFERENCES]
    parts.append(_FATAL)
    parts += [f"| {sent} | {ends} |\n" for sent, ends in FATAL]
    parts.append(_PATHS)
    rows: dict[str, list[str]] = {}
    for entry in INSTANCE_PATHS:
        row = f"404: {entry.reason}" if entry.handling is Handling.NOT_SERVED else entry.handling.value
        rows.setdefault(row, []).append(f"`{entry.methods} {entry.path}`")
    parts += [f"| {', '.join(paths)} | {row} |\n" for row, paths in rows.items()]
    return "".join(parts)


def main() -> int:
    DOCUMENT.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
