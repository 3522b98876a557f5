"""When an instance that fails its probes is taken out, and when its requests are lost."""

from __future__ import annotations

import itertools

import pytest

from sglang_ext_router.decide.signs_of_life import (
    LARGE_BODY_BYTES,
    READING_BYTES_PER_S,
    FailedChecks,
    Judgement,
    ReadingTime,
    Silence,
    judge_checks,
    judge_silence,
)

STAYS, SILENT, OUT, LOST = Judgement.STAYS, Judgement.SILENT, Judgement.OUT, Judgement.LOST
LIMIT_S = 3.5
SILENCE = Silence(silent_s=LIMIT_S, reading_s=0.0, is_unreachable=False, has_peer=False)
CHECKS = FailedChecks(failures=3, is_refused=False, is_unanswered=True, has_worked=False, has_peer=False)


@pytest.mark.parametrize(
    ("silence", "expected"),
    [
        (SILENCE._replace(silent_s=3.4, has_peer=True), STAYS),
        (SILENCE._replace(has_peer=True), LOST),
        (SILENCE, SILENT),
        (SILENCE._replace(silent_s=600.0), SILENT),
        (SILENCE._replace(is_unreachable=True), LOST),
        # It has 4 MB to tokenise: as long as that may take it is no more silent than a busy one.
        (SILENCE._replace(silent_s=16.0, reading_s=16.0, has_peer=True), STAYS),
        (SILENCE._replace(silent_s=16.0, reading_s=16.0, is_unreachable=True), STAYS),
        (SILENCE._replace(silent_s=19.5, reading_s=16.0, has_peer=True), LOST),
        (SILENCE._replace(silent_s=19.5, reading_s=16.0), SILENT),
    ],
)
def test_silence(silence: Silence, expected: Judgement) -> None:
    assert judge_silence(silence, LIMIT_S) is expected


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        (CHECKS._replace(has_peer=True), LOST),
        (CHECKS._replace(failures=2, has_peer=True), STAYS),
        (CHECKS, STAYS),
        (CHECKS._replace(failures=1000), STAYS),
        (CHECKS._replace(has_worked=True, has_peer=True), STAYS),
        (CHECKS._replace(is_unanswered=False), OUT),
        (CHECKS._replace(is_unanswered=False, has_worked=True), OUT),
        (CHECKS._replace(is_unanswered=False, failures=2), STAYS),
        (CHECKS._replace(is_refused=True, is_unanswered=False, failures=1), OUT),
        (CHECKS._replace(is_refused=True, is_unanswered=False, failures=1, has_worked=True), OUT),
    ],
)
def test_failed_checks(checks: FailedChecks, expected: Judgement) -> None:
    assert judge_checks(checks, 3) is expected


def test_no_probe_loses_the_requests_of_a_last_instance_that_can_be_reached() -> None:
    for silent_s, reading_s in itertools.product((0.0, 3.5, 60.0, 1e6), (0.0, 16.0)):
        assert judge_silence(Silence(silent_s, reading_s, False, False), LIMIT_S) in (STAYS, SILENT)
    flags = itertools.product((1, 3, 1000), *[(False, True)] * 3)
    for failures, is_refused, is_unanswered, has_worked in flags:
        assert judge_checks(FailedChecks(failures, is_refused, is_unanswered, has_worked, False), 3) is not LOST


def test_no_health_check_loses_requests_that_progress() -> None:
    for failures, is_refused, is_unanswered, has_peer in itertools.product((1, 3, 1000), *[(False, True)] * 3):
        assert judge_checks(FailedChecks(failures, is_refused, is_unanswered, True, has_peer), 3) is not LOST


def test_more_evidence_of_death_never_saves_an_instance() -> None:
    order = [STAYS, SILENT, LOST]
    for reading_s, is_unreachable, has_peer in itertools.product((0.0, 8.0), (False, True), (False, True)):
        verdicts = [judge_silence(Silence(s / 2, reading_s, is_unreachable, has_peer), LIMIT_S) for s in range(60)]
        ranks = [order.index(verdict) for verdict in verdicts]
        assert ranks == sorted(ranks)


def test_bodies_are_read_one_after_the_other() -> None:
    reading = ReadingTime()
    assert reading.within(0.0, 10.0) == 0.0
    reading.add(4 * READING_BYTES_PER_S, 0.0)
    reading.add(2 * READING_BYTES_PER_S, 1.0)
    assert reading.within(0.0, 3.0) == 3.0
    assert reading.within(0.0, 10.0) == 6.0
    assert reading.within(5.5, 10.0) == pytest.approx(0.5)
    assert reading.within(7.0, 10.0) == 0.0
    reading.add(READING_BYTES_PER_S, 20.0)
    assert reading.within(18.0, 30.0) == 3.0  # from 18 on, what was over by then among it


def test_small_bodies_take_no_time() -> None:
    reading = ReadingTime()
    for _ in range(1000):
        reading.add(LARGE_BODY_BYTES - 1, 0.0)
    assert reading.within(0.0, 1.0) == 0.0
