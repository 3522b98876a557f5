"""`docs/reference/traces.md` has the names of spans and attributes as the code has them."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.trace_keys import tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "traces.md"


def test_the_tables_are_those_of_the_code() -> None:
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition("<!-- begin: sglang_ext.trace_keys.tables() -->")
    table, end, _ = rest.partition("<!-- end -->")
    assert end
    assert table.strip() == tables()
