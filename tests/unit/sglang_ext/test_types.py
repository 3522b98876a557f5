"""Which role serves which class."""

from __future__ import annotations

import pytest

from sglang_ext.types import LengthClass, Role


@pytest.mark.parametrize(
    ("role", "served"),
    [
        (Role.SHORT, {LengthClass.SHORT}),
        (Role.LONG, {LengthClass.LONG}),
        (Role.BOTH, {LengthClass.SHORT, LengthClass.LONG}),
        (Role.DECODE, set()),
    ],
)
def test_a_role_serves_its_class(role: Role, served: set[LengthClass]) -> None:
    assert {length_class for length_class in LengthClass if role.serves(length_class)} == served
    assert role.is_prefill == bool(served)
