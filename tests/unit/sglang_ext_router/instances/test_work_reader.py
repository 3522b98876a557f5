"""What instances did, on the router's clock: each thing once, bounded, and what is missing is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.live.decide.instance_work import KEPT_RECORDS, BatchMember, WorkLog
from sglang_ext.live.decide.view import SeenSpan
from sglang_ext.types import LengthClass
from sglang_ext_router.instances.work_reader import MAX_RECORDS_PER_S, MIN_RECORDS, WorkReader

SKEW_S = 5000.0  # how far the instance's clock is ahead


class Setup:
    """A router with one instance, whose clock is another one."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.spans: list[SeenSpan] = []
        self.log = WorkLog()
        self.reader = WorkReader(lambda: self.now_s, self.spans.extend)
        self.worker: Any = SimpleNamespace(id=7, name="host:1", url="http://host:1")

    def run(self, start_s: float, tokens: int = 10) -> None:
        """A batch of a tenth of a second, on the router's clock."""
        self.log.record_launch(SKEW_S + start_s, [BatchMember(1, "r", LengthClass.SHORT, tokens, 0)])
        self.log.record_result(SKEW_S + start_s, SKEW_S + start_s + 0.1)

    def ask(self, late_s: float = 0.0, parked: frozenset[int] = frozenset(), *, restarts: bool = False) -> str:
        """One round; the query. With `restarts` another reader comes while the answer is under way."""
        query = self.reader.query(self.worker)
        since, most = (int(part.partition("=")[2]) for part in query[1:].split("&"))
        answer = {"work": self.log.answer(SKEW_S + self.now_s, parked, since, most)}
        self.now_s += late_s
        if restarts:
            self.reader.restart()
        self.reader.take(self.worker, answer)
        return query


def test_work_is_told_once_and_on_the_clock_of_the_router() -> None:
    setup = Setup()
    setup.now_s = 102.0
    setup.run(101.0, tokens=33)
    assert setup.ask() == "?since=0&most=64"
    (span,) = setup.spans
    assert (span.instance, span.kind, span.length_class, span.tokens, span.requests) == (
        "host:1",
        "prefill",
        "short",
        33,
        1,
    )
    assert (span.start_s, span.end_s) == (pytest.approx(101.0), pytest.approx(101.1))
    assert setup.ask() == "?since=1&most=64"
    assert len(setup.spans) == 1
    assert (setup.reader.reporting, setup.reader.silent, setup.reader.missed) == (1, 0, 0)


def test_what_ended_before_the_page_was_opened_is_not_told() -> None:
    setup = Setup()
    setup.run(99.0)
    setup.run(99.95)  # until 100.05
    setup.ask()
    assert [span.start_s for span in setup.spans] == [pytest.approx(99.95)]


def test_what_goes_on_keeps_its_beginning_however_late_answers_come() -> None:
    setup = Setup()
    setup.log.record_launch(SKEW_S + 100.0, [BatchMember(9, "r", LengthClass.LONG, 10, 50)])
    setup.log.record_result(SKEW_S + 100.0, SKEW_S + 101.0)
    setup.run(101.0)
    for late_s in (0.0, 0.2, 0.0, 0.1):
        setup.now_s += 1.0
        setup.ask(late_s, frozenset({9}))
    parked = [span for span in setup.spans if span.kind == "parked"]
    assert len(parked) == 4
    assert len({span.start_s for span in parked}) == 1
    assert parked[-1].end_s > parked[0].end_s


def test_another_reader_is_told_all_that_is_kept_and_nothing_counts_as_missed() -> None:
    setup = Setup()
    for number in range(3):
        setup.run(101.0 + number)
    setup.ask()
    setup.reader.restart()
    assert setup.ask() == "?since=0&most=64"
    assert len(setup.spans) == 6
    assert setup.reader.missed == 0


def test_more_than_there_is_room_for_is_counted() -> None:
    setup = Setup()
    setup.run(101.0)
    setup.ask()
    for number in range(2 * KEPT_RECORDS):
        setup.run(102.0 + number)
    setup.ask()
    assert len(setup.spans) == 1 + KEPT_RECORDS
    assert setup.reader.missed == KEPT_RECORDS


def test_the_first_look_at_a_busy_instance_misses_nothing() -> None:
    setup = Setup()
    for number in range(2 * KEPT_RECORDS):
        setup.run(102.0 + number)
    setup.ask()
    assert setup.reader.missed == 0


def test_a_reader_that_comes_while_an_answer_is_under_way_is_told_all() -> None:
    setup = Setup()
    setup.now_s = 102.0
    setup.run(101.0)
    setup.ask()
    setup.run(101.5)
    assert setup.ask(restarts=True) == "?since=1&most=64"
    setup.spans.clear()
    assert setup.ask() == "?since=0&most=64"
    assert [span.start_s for span in setup.spans] == [pytest.approx(101.0), pytest.approx(101.5)]
    assert setup.ask() == "?since=2&most=64"


def test_a_restarted_instance_is_told_of_again() -> None:
    setup = Setup()
    for number in range(5):
        setup.run(101.0 + number)
    setup.ask()
    setup.log = WorkLog()
    setup.now_s = 200.0
    setup.run(199.0)
    setup.ask()
    assert setup.spans[-1].start_s == pytest.approx(199.0)
    assert setup.reader.missed == 0


@pytest.mark.parametrize("answer", [{}, [], None, {"work": None}, {"work": "much"}, {"work": {"now_s": 1.0}}])
def test_an_instance_that_does_not_tell_is_counted_as_silent(answer: object) -> None:
    setup = Setup()
    setup.reader.take(setup.worker, answer)
    assert (setup.reader.reporting, setup.reader.silent) == (0, 1)
    assert setup.spans == []
    setup.run(101.0)
    setup.ask()  # it has been updated
    assert (setup.reader.reporting, setup.reader.silent, len(setup.spans)) == (1, 0, 1)
    setup.reader.keep([8])
    assert (setup.reader.reporting, setup.reader.silent) == (0, 0)


@pytest.mark.parametrize("instances", [1, 8, 50, 200, 1000])
def test_all_instances_together_tell_no_more_than_there_is_room_for(instances: int) -> None:
    setup = Setup()
    interval_s = max(1.0, instances / 50)
    setup.reader.share_out(instances, interval_s)
    assert MIN_RECORDS <= setup.reader.most <= KEPT_RECORDS
    assert setup.reader.most * instances / interval_s <= MAX_RECORDS_PER_S
    setup.reader.share_out(0, 1.0)
    assert setup.reader.most == KEPT_RECORDS
