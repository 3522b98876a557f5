"""Prompts that routers announce: how they are read, and the ledger of those that are open."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.identifiers import pool_request, pool_ticket, room_of
from sglang_ext.long_pool.coordinator import tickets
from sglang_ext.long_pool.coordinator.ticket_desk import read_announcement
from sglang_ext.long_pool.coordinator.tickets import (
    Announcement,
    OpenTickets,
    TicketEnd,
    TicketError,
    TicketProblem,
    TicketTimes,
)

GOOD = {"ticket": 2**62, "tokens": 900, "cached_tokens": 10, "waited_s": 0.5, "slack_s": -1}


def test_read() -> None:
    assert read_announcement(json.dumps(GOOD).encode()) == Announcement(2**62, 900, 10, 0.5, -1.0, True)
    assert read_announcement(b'{"ticket": 0, "tokens": 1, "slack_s": null}') == Announcement(0, 1, 0, 0.0, None, True)
    assert not read_announcement(b'{"ticket": 0, "tokens": 1, "online": false}').is_online


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ticket": -1}, "ticket must be a whole number"),
        ({"ticket": 2**63}, "ticket"),
        ({"ticket": True}, "ticket"),
        ({"ticket": None}, "ticket"),
        ({"tokens": 0}, "tokens must be"),
        ({"tokens": 9.0}, "tokens must be"),
        ({"tokens": 2**31 + 1}, "tokens must be"),
        ({"cached_tokens": 900}, "cached_tokens must be a whole number from 0 to 899"),
        ({"waited_s": -0.1}, "waited_s is below 0"),
        ({"waited_s": math.inf}, "waited_s must be a number of seconds"),
        ({"waited_s": True}, "waited_s"),
        ({"slack_s": math.nan}, "slack_s must be"),
        ({"slack_s": "1"}, "slack_s must be"),
        ({"slack_s": 10**400}, "slack_s must be"),
        ({"online": None}, "online must be true or false"),
        ({"online": 1}, "online must be true or false"),
        ({"owner": 3}, "'owner' is no field of a ticket"),
    ],
)
def test_a_field_that_is_refused_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(TicketError, match=named) as caught:
        read_announcement(json.dumps(GOOD | changes).encode())
    assert caught.value.problem is TicketProblem.BAD


@pytest.mark.slow
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(TicketError):
        read_announcement(body)


@given(st.lists(st.integers(0, 2**63 - 1), unique=True), st.integers(0, 2**31), st.integers(0, 2**32 - 1))
def test_no_ticket_is_a_request_or_another_ticket(rooms: list[int], instance: int, count: int) -> None:
    named = [pool_ticket(room) for room in rooms]
    assert len({*named, pool_request(instance, count)}) == len(rooms) + 1
    assert [room_of(ticket) for ticket in named] == rooms
    assert sorted(named) == [pool_ticket(room) for room in sorted(rooms)]


def test_what_becomes_of_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "MAX_WAITING", 4)
    ledger = OpenTickets()
    for room in range(4):
        ledger.open(room, 1.0)
    for room, problem in ((3, TicketProblem.KNOWN), (9, TicketProblem.TOO_MANY)):
        with pytest.raises(TicketError) as caught:
            ledger.open(room, 1.0)
        assert caught.value.problem is problem
    ledger.bind(0, 2.0)
    ledger.bind(1, 2.5)
    with pytest.raises(TicketError, match="announced already"):
        ledger.open(0, 3.0)
    assert ledger.claim(0, 3.0) == TicketTimes(1.0, 2.0)
    assert ledger.claim(0, 3.0) is None
    assert ledger.claim(2, 3.0) == TicketTimes(1.0, 3.0)  # before its turn
    assert ledger.withdraw(1)
    assert not ledger.withdraw(1)
    assert ledger.waiting == 1
    ledger.open(7, 4.0)
    ledger.bind(7, 4.0)
    assert ledger.end_all() == [3]
    ledger.open(8, 4.0)
    ledger.bind(8, 4.0)
    ledger.forget_unclaimed(65.0)
    assert ledger.claim(8, 65.0) is None
    assert ledger.ends == {
        TicketEnd.CLAIMED: 2,
        TicketEnd.WITHDRAWN: 1,
        TicketEnd.UNSERVED: 1,
        TicketEnd.UNCLAIMED: 2,
    }
