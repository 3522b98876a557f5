"""What an instance keeps of its work: what was launched, with its tokens; who was parked when; and a bounded answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.live.decide.instance_work import (
    KEPT_RECORDS,
    BatchMember,
    InstanceWork,
    WorkLog,
    read_work,
)
from sglang_ext.types import LengthClass


def short(key: int, tokens: int = 10) -> BatchMember:
    return BatchMember(key, f"short-{key}", LengthClass.SHORT, tokens, 0)


def chunk(key: int, tokens: int, left: int) -> BatchMember:
    return BatchMember(key, f"long-{key}", LengthClass.LONG, tokens, left)


def run(log: WorkLog, at_s: float, *members: BatchMember, shape: str = "") -> None:
    """One batch that takes a second."""
    log.record_launch(at_s, members)
    if shape:
        log.record_shape(shape)
    log.record_result(at_s, at_s + 1.0)


def read(log: WorkLog, since: int = 0, *, now_s: float = 100.0, parked: set[int] | None = None, most: int = 64) -> Any:
    answer = log.answer(now_s, parked or set(), since, most)
    work = read_work(json.loads(json.dumps(answer, allow_nan=False)))
    assert isinstance(work, InstanceWork)
    assert work.now_s == now_s
    return work


def test_batches_are_told_with_their_class_requests_and_tokens() -> None:
    log = WorkLog()
    run(log, 1.0, short(1, 20), short(2, 30), shape="32x2")
    run(log, 2.0, chunk(3, 256, 44))
    run(log, 3.0, short(4, 10), chunk(3, 44, 0))
    run(log, 4.0, BatchMember(-1, "health", None, 1, 0))
    run(log, 5.0, BatchMember(-1, "health", None, 1, 0), short(5, 7))
    told = [record[:5] for record in read(log).records]
    assert told == [
        ("prefill", 1.0, 2.0, "short", "short-1 and 1 more, graph 32x2"),
        ("prefill", 2.0, 3.0, "long", "long-3"),
        ("prefill", 3.0, 4.0, "mixed", "44 long and 10 short tokens"),
        ("prefill", 4.0, 5.0, None, "health"),
        ("prefill", 5.0, 6.0, "short", "short-5"),
    ]
    assert [(record.tokens, record.requests) for record in read(log).records] == [
        (50, 2),
        (256, 1),
        (54, 2),
        (1, 1),
        (7, 1),
    ]


def test_a_prefill_is_parked_from_the_end_of_its_chunk_until_its_next_one_begins_if_others_ran() -> None:
    log = WorkLog()
    run(log, 1.0, chunk(1, 256, 600))
    run(log, 2.5, chunk(1, 256, 344))
    assert [one.kind for one in read(log, parked={1}).records] == ["prefill", "prefill"], "no other batch ran between"
    run(log, 4.0, short(2))
    (going_on,) = [one for one in read(log, parked={1}, now_s=5.0).records if one.kind == "parked"]
    assert going_on[:4] == ("parked", 3.5, None, "long")
    assert (going_on.label, going_on.tokens) == ("long-1", 344)
    assert "parked" not in {one.kind for one in read(log, parked=set()).records}, "it has been aborted"
    run(log, 5.0, chunk(1, 344, 0))
    (parked,) = [one for one in read(log, parked=set()).records if one.kind == "parked"]
    assert parked[:3] == ("parked", 3.5, 5.0)
    run(log, 7.0, short(3))
    assert len([one for one in read(log).records if one.kind == "parked"]) == 1, "it has ended"


def test_launches_that_overlap_are_no_parking() -> None:
    log = WorkLog()
    log.record_launch(1.0, [chunk(1, 256, 300)])
    log.record_launch(1.1, [short(2)])
    log.record_result(1.0, 2.0)
    log.record_launch(2.1, [chunk(1, 300, 0)])
    log.record_result(2.0, 3.0)
    log.record_result(3.0, 4.0)
    kinds = [(one.kind, one.start_s, one.end_s) for one in read(log).records if one.kind == "parked"]
    assert kinds == [("parked", 2.0, 2.1)]


def test_a_cursor_keeps_answers_small_and_what_is_missed_is_counted() -> None:
    log = WorkLog()
    for number in range(10):
        run(log, number, short(number))
    first = read(log)
    assert (len(first.records), first.last, first.missed) == (10, 10, 0)
    assert read(log, first.last).records == ()
    log.record_transfers(3.0, 5.0, 70, ["a", "b", "c"])
    (sent,) = read(log, first.last).records
    assert sent == ("transfer", 3.0, 5.0, None, "a and 2 more", 70, 3)
    for number in range(3 * KEPT_RECORDS):
        run(log, 10.0 + number, short(number))
    many = read(log, first.last)
    assert (len(many.records), many.missed) == (KEPT_RECORDS, 2 * KEPT_RECORDS + 1)
    few = read(log, first.last, most=5)
    assert [one.start_s for one in few.records] == [10.0 + 3 * KEPT_RECORDS - 5 + one for one in range(5)]
    assert few.missed == 3 * KEPT_RECORDS + 1 - 5


def test_a_cursor_of_an_earlier_process_begins_anew() -> None:
    log = WorkLog()
    run(log, 1.0, short(1))
    again = read(log, since=5000)
    assert (len(again.records), again.last) == (1, 1)


def test_prefills_that_never_go_on_are_not_kept_for_ever() -> None:
    log = WorkLog()
    for key in range(5 * KEPT_RECORDS):
        run(log, key, chunk(key, 10, 90))
    assert len(log._unfinished) == KEPT_RECORDS


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"now_s": 1.0, "last": 1, "missed": 0},
        {"now_s": float("nan"), "last": 1, "missed": 0, "records": []},
        {"now_s": 1.0, "last": -1, "missed": 0, "records": []},
        {"now_s": 1.0, "last": 1, "missed": True, "records": []},
        {"now_s": 1.0, "last": 1, "missed": 0, "records": [["prefill", 1.0, 2.0]]},
        {"now_s": 1.0, "last": 1, "missed": 0, "records": [["sleep", 1.0, 2.0, None, "", 1, 1]]},
        {"now_s": 1.0, "last": 1, "missed": 0, "records": [["prefill", "1", 2.0, None, "", 1, 1]]},
        {"now_s": 1.0, "last": 1, "missed": 0, "records": [["prefill", 1.0, 2.0, [], "", 1, 1]]},
        {"now_s": 1.0, "last": 1, "missed": 0, "records": [["prefill", 1.0, 2.0, "short", "", 1, 1]] * 1000},
    ],
)
def test_an_answer_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="work"):
        read_work(wrong)


def test_an_instance_that_does_not_tell_and_one_that_will_tell_more() -> None:
    assert read_work(None) is None
    later = {"now_s": 1, "last": 1, "missed": 0, "records": [["prefill", 1, 2, "short", "", 1, 1, "more"]], "more": 1}
    work = read_work(later)
    assert work is not None
    assert work.records[0] == ("prefill", 1.0, 2.0, "short", "", 1, 1)
