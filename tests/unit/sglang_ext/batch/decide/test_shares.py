"""Batches are divided among dispatchers, and taken in fair shares over tenants."""

from __future__ import annotations

from sglang_ext.batch.decide.batch_lifecycle import OpenBatch, choose_batches


def sending(*names: str) -> list[OpenBatch]:
    """Batches called by tenant and age, as `a1`."""
    return [OpenBatch(f"{name[1:]}{name[0]}", name[0], True) for name in names]


def test_short_work_is_always_taken() -> None:
    batches = [*sending("a1"), OpenBatch("2", "a", False), OpenBatch("3", "a", False)]
    assert choose_batches(batches, {"3": "other"}, [], 2, 0) == ["2"]


def test_no_dispatcher_takes_more_than_its_part() -> None:
    batches = sending("a1", "a2", "a3", "a4", "a5")
    assert choose_batches(batches, {}, [], 2, 16) == ["1a", "2a", "3a"]
    assert choose_batches(batches, {"1a": "me"}, ["1a"], 2, 16) == ["2a", "3a"]
    assert choose_batches(batches, {"1a": "x", "2a": "x", "3a": "x"}, [], 2, 16) == ["4a", "5a"]
    assert choose_batches(batches, {}, [], 1, 4) == ["1a", "2a", "3a", "4a"]
    assert choose_batches(batches, {}, [], 0, 16) == ["1a", "2a", "3a", "4a", "5a"]


def test_the_next_batch_is_of_the_tenant_with_the_fewest_under_way() -> None:
    batches = sending("a1", "a2", "a3", "b4", "b5", "c6")
    assert choose_batches(batches, {}, [], 1, 4) == ["1a", "4b", "6c", "2a"]
    assert choose_batches(batches, {"1a": "x", "4b": "x"}, [], 2, 16) == ["6c", "2a", "5b"]
