"""Processes agree on the instances whatever becomes of their messages."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from sglang_ext_router.membership import MembershipTable

INITIAL = (WorkerAddress("http://p:1", Role.BOTH, 1), WorkerAddress("http://d:1", Role.DECODE))
URLS = ("http://p:1", "http://d:1", "http://new:1")

# (process, url, what): a change made by one process, or messages carried between two
CHANGES = st.tuples(st.integers(0, 2), st.sampled_from(URLS), st.sampled_from(["add", "remove", "drain"]))
MESSAGES = st.tuples(st.integers(0, 2), st.integers(0, 2))


def wire_of(table: MembershipTable) -> Any:
    return [tuple(entry) for entry in json.loads(json.dumps(table.wire()))]


def change(table: MembershipTable, url: str, what: str) -> None:
    if what == "remove":
        table.change(url, None)
    else:
        table.change(url, table.address(url) or WorkerAddress(url, Role.DECODE), what == "drain")


def view(table: MembershipTable) -> dict[str, tuple[WorkerAddress | None, Any]]:
    entries = {url: (entry.address, entry.is_draining) for url, entry in table._entries.items()}
    return {url: entry for url, entry in entries.items() if entry[0] is not None}


@given(steps=st.lists(st.one_of(CHANGES, MESSAGES), max_size=25))
def test_once_all_have_heard_all_they_agree(steps: list[tuple[Any, ...]]) -> None:
    """Lost, doubled and reordered messages included: each only ever carries the sender's state of that moment."""
    tables = [MembershipTable(index, INITIAL) for index in range(3)]
    for step in steps:
        if len(step) == 3:
            change(tables[step[0]], step[1], step[2])
        else:
            tables[step[1]].merge(wire_of(tables[step[0]]))
    for _ in range(2):
        for sender in tables:
            for receiver in tables:
                receiver.merge(wire_of(sender))
    assert view(tables[0]) == view(tables[1]) == view(tables[2])


@given(steps=st.lists(CHANGES, max_size=10))
def test_a_message_heard_twice_changes_nothing(steps: list[tuple[int, str, str]]) -> None:
    sender, receiver = MembershipTable(0, INITIAL), MembershipTable(1, INITIAL)
    for _, url, what in steps:
        change(sender, url, what)
    receiver.merge(wire_of(sender))
    before = view(receiver)
    assert receiver.merge(wire_of(sender)) == []
    assert view(receiver) == before == view(sender)


def test_the_later_change_wins() -> None:
    first, second = MembershipTable(0, INITIAL), MembershipTable(1, INITIAL)
    change(first, "http://d:1", "drain")
    second.merge(wire_of(first))
    change(second, "http://d:1", "remove")
    stale = wire_of(first)
    assert [url for url, _ in first.merge(wire_of(second))] == ["http://d:1"]
    assert first.merge(stale) == []
    assert first.address("http://d:1") is None


def test_changes_at_the_same_time_are_decided_alike() -> None:
    first, second = MembershipTable(0, INITIAL), MembershipTable(1, INITIAL)
    change(first, "http://d:1", "drain")
    change(second, "http://d:1", "remove")
    of_first, of_second = wire_of(first), wire_of(second)
    first.merge(of_second)
    second.merge(of_first)
    assert view(first) == view(second)


def test_what_the_command_line_gave_is_not_told() -> None:
    assert MembershipTable(0, INITIAL).wire() == []
