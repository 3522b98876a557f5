"""Batches are divided among dispatchers, and taken in fair shares over tenants."""

from __future__ import annotations

from sglang_ext.batch.decide.batch_lifecycle import OpenBatch, choose_batches


def sending(*names: str) -> list[OpenBatch]:
    """Batches called by tenant and age, as `a1`."""
    return [OpenBatch(f"{name[1:]}{name[0]}", name[0], True) for name in names]


def test_short_work_is_always_taken() -> None:
    batches = [*sending("a0", "a1"), OpenBatch("2", "a", False), OpenBatch("3", "a", False)]
    assert choose_batches(batches, {"0a": "me", "3": "other"}, ["0a"], 1, 1) == ["2"]


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


def test_a_tenant_without_a_batch_under_way_does_not_wait_for_others() -> None:
    batches = sending("a1", "a2", "a3", "b4", "b5", "c6")
    held = {"1a": "me", "2a": "me"}
    assert choose_batches(batches, held, list(held), 1, 2) == ["4b", "6c"]
    assert choose_batches(batches, {**held, "4b": "other"}, list(held), 2, 2) == ["6c"]


def test_a_heavier_tenant_has_more_batches_under_way() -> None:
    light = [OpenBatch(f"{age}a", "a", True) for age in range(6)]
    heavy = [OpenBatch(f"{age}b", "b", True, weight=3.0) for age in range(6)]
    chosen = choose_batches([*light, *heavy], {}, [], 1, 8)
    assert sum(batch_id.endswith("b") for batch_id in chosen) == 6
    assert sum(batch_id.endswith("b") for batch_id in chosen[:4]) == 3
