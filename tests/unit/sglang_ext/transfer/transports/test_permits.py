"""Permits: what holds, what is cut off, and that taking one back waits for writes under way."""

from __future__ import annotations

import threading

import pytest

from sglang_ext.transfer.transports.permits import PermitError, Permits


def nothing() -> None:
    """No write to interrupt."""


def test_a_permit_holds_until_it_is_taken_back() -> None:
    permits = Permits()
    permits.allow(5)
    with permits.use(5, nothing):
        pass
    permits.revoke(5)
    with pytest.raises(PermitError, match="0x5"), permits.use(5, nothing):
        pass


def test_what_was_never_allowed_does_not_hold_and_may_be_taken_back() -> None:
    permits = Permits()
    permits.revoke(5)
    with pytest.raises(PermitError), permits.use(5, nothing):
        pass


def test_taking_back_interrupts_and_waits_for_every_writer() -> None:
    permits = Permits()
    permits.allow(5)
    writing, interrupted, events = threading.Barrier(3), threading.Event(), []

    def write() -> None:
        with permits.use(5, interrupted.set):
            writing.wait()
            interrupted.wait(10)
            events.append("ended")

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    writing.wait()
    permits.revoke(5)
    events.append("revoked")
    for writer in writers:
        writer.join()
    assert events == ["ended", "ended", "revoked"]
