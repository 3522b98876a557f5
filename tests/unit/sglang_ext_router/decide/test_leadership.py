"""Never two leaders, whatever is lost, late or repeated; and always one again once the server answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext_router.decide.leadership import Leadership, LeaseAction, LeaseRecord, LeaseSettings
from support.examples import examples

SETTINGS = LeaseSettings(duration_s=15.0, renew_deadline_s=10.0, retry_s=2.0)


class Server:
    """The record, with its version; writes are refused over another one."""

    def __init__(self) -> None:
        self.lease: LeaseRecord | None = None
        self.writes = 0

    def write(self, candidate: str, read: LeaseRecord | None, duration_s: float = 15.0) -> bool:
        if (self.lease and self.lease.version) != (read and read.version):
            return False
        self.writes += 1
        changed = self.lease is None or self.lease.holder != candidate
        transitions = (self.lease.transitions if self.lease else 0) + changed
        self.lease = LeaseRecord(candidate, duration_s, str(self.writes), str(self.writes), transitions)
        return True


class Candidate:
    def __init__(self, name: str) -> None:
        self.leadership = Leadership(name, SETTINGS)
        self.read: tuple[LeaseRecord | None, LeaseAction] | None = None
        self.began_s = 0.0
        self.answer: bool | None = None  # of a write that the server has carried out and that has not come back


def turn(one: Leadership, server: Server, now_s: float) -> None:
    read = server.lease
    if one.on_read(read, now_s) is not LeaseAction.WAIT:
        one.on_written(now_s) if server.write(one.candidate, read) else one.on_refused()


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["turn", "turn", "pause", "pause", "read", "arrive", "answer", "lose", "restart"]),
        st.floats(0.0, 12.0),
    ),
    max_size=60,
)


@pytest.mark.full
@settings(max_examples=examples(1000))
@given(STEPS)
def test_there_are_never_two_leaders(steps: list[tuple[int, str, float]]) -> None:
    server, now_s = Server(), 0.0
    candidates = [Candidate(f"c{number}") for number in range(3)]
    for number, step, wait_s in steps:
        one = candidates[number]
        if step == "turn":
            turn(one.leadership, server, now_s)
            one.answer = one.read = None
        elif step == "read":
            one.read = (server.lease, one.leadership.on_read(server.lease, now_s))
            one.answer = None
        elif step == "arrive" and one.read is not None and one.read[1] is not LeaseAction.WAIT:
            one.answer = server.write(one.leadership.candidate, one.read[0])
            one.read = None
        elif step == "answer" and one.answer is not None:
            one.leadership.on_written(one.began_s) if one.answer else one.leadership.on_refused()
            one.answer = None
        elif step == "lose":
            one.answer = one.read = None
        elif step == "restart":
            candidates[number] = Candidate(f"c{number} again {now_s}")
        elif step == "pause":
            now_s += wait_s
        if step == "read":
            one.began_s = now_s  # a write begins after the read that it is for
        leaders = [other for other in candidates if other.leadership.is_leader(now_s)]
        assert len(leaders) <= 1


def test_the_next_one_leads_once_the_holder_is_silent() -> None:
    server = Server()
    first, second = Leadership("a", SETTINGS), Leadership("b", SETTINGS)
    for now_s in range(0, 20, 2):
        turn(first, server, now_s)
        turn(second, server, now_s)
        assert (first.is_leader(now_s), second.is_leader(now_s)) == (True, False)
    assert not first.is_leader(28.1)
    for now_s in range(20, 33, 2):
        turn(second, server, now_s)
        assert not second.is_leader(now_s)
    turn(second, server, 34)
    assert second.is_leader(34)
    turn(first, server, 35)
    assert not first.is_leader(35)


def test_a_lease_that_was_released_is_taken_at_once() -> None:
    server = Server()
    first, second = Leadership("a", SETTINGS), Leadership("b", SETTINGS)
    turn(first, server, 0)
    assert server.lease is not None
    server.lease = server.lease._replace(holder="", version="released")
    turn(second, server, 1)
    assert second.is_leader(1)


def test_a_longer_duration_of_the_holder_is_kept() -> None:
    one = Leadership("a", SETTINGS)
    lease = LeaseRecord("b", 60.0, "r", "1", 0)
    assert one.on_read(lease, 0.0) is LeaseAction.WAIT
    assert one.on_read(lease, 59.0) is LeaseAction.WAIT
    assert one.on_read(lease, 60.0) is LeaseAction.WRITE


def test_settings_that_could_make_two_leaders_are_refused() -> None:
    for wrong in (LeaseSettings(10, 10, 2), LeaseSettings(10, 5, 5), LeaseSettings(10, 5, 0)):
        with pytest.raises(ValueError, match="is needed"):
            Leadership("a", wrong)
