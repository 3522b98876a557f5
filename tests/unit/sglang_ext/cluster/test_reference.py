"""The documented settings are the settings."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.cluster.reference import reference_table

DOCUMENT = Path(__file__).parents[4] / "docs" / "up.md"


def test_the_document_holds_the_table() -> None:
    assert DOCUMENT.read_text(encoding="utf-8").endswith("reference` -->\n" + reference_table())


def test_every_setting_has_a_row() -> None:
    table = reference_table()
    for setting in ("model", "pools.ROLE.worker_args", "router.length_boundary_tokens", "stop.grace_s", "restart"):
        assert table.count(f"| `{setting}` |") == 1
