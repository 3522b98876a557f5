"""Which ids belong to a request with several sequences."""

from __future__ import annotations

import types

import pytest

from sglang_ext.sglang_plugin.hooks.abort_family import abort_request, family

KNOWN = ["x_0", "x_1", "x_1_0", "x_a", "x_", "xy_0", "x", "ax_0"]


def test_members() -> None:
    assert family("x", KNOWN) == ["x_0", "x_1", "x_1_0"]


@pytest.mark.parametrize(
    ("rid", "abort_all", "calls"),
    [
        ("x", False, ["x"]),
        ("f", False, ["f_0", "f_1"]),
        ("unknown", False, ["unknown"]),
        ("", False, [""]),
        ("f", True, ["f"]),
    ],
)
def test_abort_reaches_every_member(rid: str, abort_all: bool, calls: list[str]) -> None:
    manager = types.SimpleNamespace(rid_to_state=dict.fromkeys([*KNOWN, "f_0", "f_1"]))
    seen: list[str] = []
    abort_request(lambda _, member, all_of_them: seen.append(member), manager, rid, abort_all)
    assert seen == calls
