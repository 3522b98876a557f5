"""Every interleaving of what can happen to a batch."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext.batch.decide.batch_lifecycle import (
    BatchEvent,
    BatchLifecycle,
    BatchStatus,
    BatchWork,
    EventRefusedError,
    parse_completion_window,
)
from support.examples import examples

S = BatchStatus
E = BatchEvent
# Every step that OpenAI's states allow; everything else is a mistake.
ALLOWED = {
    S.VALIDATING: {S.IN_PROGRESS, S.FAILED, S.CANCELLING},
    S.IN_PROGRESS: {S.FINALIZING, S.CANCELLING},
    S.FINALIZING: {S.COMPLETED, S.EXPIRED},
    S.CANCELLING: {S.CANCELLED},
    S.FAILED: set(),
    S.COMPLETED: set(),
    S.EXPIRED: set(),
    S.CANCELLED: set(),
}
TIMES = [field.name for field in fields(BatchLifecycle) if field.name.endswith("_at")]
# What the work of a state can report.
OUTCOMES = {
    BatchWork.VALIDATE: (E.LINES_VALID, E.LINES_INVALID),
    BatchWork.RUN: (E.ALL_FINISHED,),
    BatchWork.WRITE_FILES: (E.FILES_WRITTEN,),
    BatchWork.NOTHING: (),
}


def fresh() -> BatchLifecycle:
    return BatchLifecycle(created_at=1000, expires_at=2000)


def check(lifecycle: BatchLifecycle) -> None:
    """What holds of every lifecycle, however it came about."""
    reached = {name for name in TIMES if getattr(lifecycle, name) is not None} - {"created_at", "expires_at"}
    ends = reached & {"completed_at", "failed_at", "expired_at", "cancelled_at"}
    assert len(ends) == lifecycle.status.is_terminal
    if lifecycle.status is not S.VALIDATING:
        assert f"{lifecycle.status.value}_at" in reached
    assert ("cancelled_at" in reached) <= ("cancelling_at" in reached)
    assert ("completed_at" in reached) <= ("finalizing_at" in reached) <= ("in_progress_at" in reached)
    assert ("expired_at" in reached) <= lifecycle.is_expiring <= ("finalizing_at" in reached)
    assert not ("cancelling_at" in reached and "finalizing_at" in reached)
    assert (lifecycle.work is BatchWork.NOTHING) == lifecycle.status.is_terminal
    order = ["created_at", "in_progress_at", "finalizing_at", "cancelling_at"]
    times = [getattr(lifecycle, name) for name in (*order, *sorted(ends)) if getattr(lifecycle, name) is not None]
    assert times == sorted(times)


@pytest.mark.slow
def test_every_sequence_of_events_takes_allowed_steps_only() -> None:
    seen = set()
    for sequence in product(E, repeat=6):
        lifecycle = fresh()
        for second, event in enumerate(sequence, 1):
            before = lifecycle
            try:
                lifecycle = lifecycle.advance(event, 1000 + second)
            except EventRefusedError:
                continue
            assert lifecycle is before or lifecycle.status in ALLOWED[before.status]
            check(lifecycle)
        seen.add(lifecycle.status)
    assert seen == set(S)


@pytest.mark.parametrize("cancel_at", range(4))
@pytest.mark.parametrize("is_valid", [True, False])
def test_a_cancellation_at_any_step_wins_or_is_refused(cancel_at: int, is_valid: bool) -> None:
    lifecycle = fresh()
    is_cancelled = False
    for step in range(5):
        if step == cancel_at:
            is_open = lifecycle.status in {S.VALIDATING, S.IN_PROGRESS}
            if is_open:
                lifecycle = lifecycle.advance(E.CANCEL, 1100)
                is_cancelled = True
                assert lifecycle.status is S.CANCELLING
                assert lifecycle.advance(E.CANCEL, 1200) is lifecycle  # asked twice
            else:
                with pytest.raises(EventRefusedError, match=f"status '{lifecycle.status.value}' cannot be cancelled"):
                    lifecycle.advance(E.CANCEL, 1100)
        outcomes = OUTCOMES[lifecycle.work]
        if outcomes:
            lifecycle = lifecycle.advance(outcomes[0] if is_valid or len(outcomes) == 1 else outcomes[1], 1150)
    assert lifecycle.status is (S.CANCELLED if is_cancelled else S.COMPLETED if is_valid else S.FAILED)


def test_work_that_a_cancellation_overtook_reports_in_vain() -> None:
    for event in (E.LINES_VALID, E.LINES_INVALID, E.ALL_FINISHED, E.WINDOW_OVER):
        lifecycle = fresh().advance(E.CANCEL, 1100)
        assert lifecycle.advance(event, 1200) is lifecycle


def test_what_no_driver_may_report_is_refused() -> None:
    with pytest.raises(EventRefusedError, match="files of a batch with status 'in_progress'"):
        fresh().advance(E.LINES_VALID, 1001).advance(E.FILES_WRITTEN, 1002)
    with pytest.raises(EventRefusedError, match="all_finished cannot happen to a batch with status 'validating'"):
        fresh().advance(E.ALL_FINISHED, 1001)


def test_a_window_that_ends_while_validating_counts_once_the_requests_are_known() -> None:
    lifecycle = fresh().advance(E.WINDOW_OVER, 2000)
    assert lifecycle.status is S.VALIDATING
    assert lifecycle.due_event(7, 2500) is None
    lifecycle = lifecycle.advance(E.LINES_VALID, 2500)
    assert lifecycle.due_event(7, 2500) is E.WINDOW_OVER
    lifecycle = lifecycle.advance(E.WINDOW_OVER, 2500)
    assert (lifecycle.status, lifecycle.work) == (S.FINALIZING, BatchWork.WRITE_FILES)
    assert lifecycle.advance(E.FILES_WRITTEN, 2501).status is S.EXPIRED


def test_finished_requests_are_not_expired_when_the_window_ends_with_them() -> None:
    lifecycle = fresh().advance(E.LINES_VALID, 1001)
    assert lifecycle.due_event(1, 1999) is None
    assert lifecycle.due_event(0, 5000) is E.ALL_FINISHED
    assert lifecycle.advance(E.ALL_FINISHED, 5000).due_event(0, 5000) is None


class Lives(RuleBasedStateMachine):
    """A driver that does each state's work, with cancellations, ends of windows, restarts and late reports between."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = fresh()
        self.now_s = 1000.0
        self.under_way: list[BatchEvent] = []  # reports of work that was begun in an earlier state
        self.is_cancelled = False
        self.is_over = False

    def report(self, event: BatchEvent) -> None:
        self.lifecycle = self.lifecycle.advance(event, self.now_s)

    @rule(seconds=st.floats(-100, 400))
    def clock(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(data=st.data())
    @precondition(lambda self: self.lifecycle.work is not BatchWork.NOTHING)
    def work_ends(self, data: st.DataObject) -> None:
        self.report(data.draw(st.sampled_from(OUTCOMES[self.lifecycle.work])))

    @rule(data=st.data())
    @precondition(lambda self: OUTCOMES[self.lifecycle.work])
    def work_begins(self, data: st.DataObject) -> None:
        if self.lifecycle.work is not BatchWork.WRITE_FILES:  # this one is never interrupted
            self.under_way.append(data.draw(st.sampled_from(OUTCOMES[self.lifecycle.work])))

    @rule()
    @precondition(lambda self: self.under_way and self.lifecycle.status is not S.FAILED)
    def late_report(self) -> None:
        event = self.under_way.pop()
        try:
            self.report(event)
        except EventRefusedError:  # of an earlier state, and nothing has overtaken it: no driver does that
            assert self.lifecycle.status is S.IN_PROGRESS

    @rule()
    def window(self) -> None:
        event = self.lifecycle.due_event(3, self.now_s)
        if event is not None:
            assert event is E.WINDOW_OVER
            assert self.now_s >= self.lifecycle.expires_at
            self.report(event)
            self.is_over = True

    @rule()
    def cancel(self) -> None:
        if self.lifecycle.status in {S.VALIDATING, S.IN_PROGRESS, S.CANCELLING}:
            self.report(E.CANCEL)
            self.is_cancelled = True
        else:
            with pytest.raises(EventRefusedError):
                self.report(E.CANCEL)

    @invariant()
    def holds(self) -> None:
        check(self.lifecycle)
        if self.is_cancelled:
            assert self.lifecycle.status in {S.CANCELLING, S.CANCELLED}
        if self.is_over:
            assert self.lifecycle.status in {S.FINALIZING, S.EXPIRED}

    @invariant()
    def ends_when_its_work_is_done(self) -> None:
        lifecycle, steps = self.lifecycle, 0
        while lifecycle.work is not BatchWork.NOTHING:
            lifecycle = lifecycle.advance(OUTCOMES[lifecycle.work][0], self.now_s)
            steps += 1
        assert steps <= 3
        assert lifecycle.status.is_terminal


TestLives = pytest.mark.slow(Lives.TestCase)
TestLives.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86400), ("90s", 90), ("30m", 1800), ("7d", 604800), ("1s", 1)])
def test_completion_windows(text: str, seconds: int) -> None:
    assert parse_completion_window(text) == seconds


@given(st.from_regex(r"[0-9]{0,10}[smhdx]?\n?", fullmatch=True))
def test_other_windows_are_refused_or_in_range(text: str) -> None:
    try:
        seconds = parse_completion_window(text)
    except ValueError:
        return
    assert text[:-1].isascii()
    assert 0 < seconds <= 30 * 86400


@pytest.mark.parametrize("text", ["0h", "31d", "-1h", "24", "h", "1.5h", "24H", "24h\n", " 24h", "٢h", ""])
def test_refused_windows(text: str) -> None:
    with pytest.raises(ValueError, match="such as 24h"):
        parse_completion_window(text)
