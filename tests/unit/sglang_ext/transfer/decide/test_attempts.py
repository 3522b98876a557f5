"""What a helper's end does to a request, and how a request begins again."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from sglang_ext.identifiers import MAX_ATTEMPTS, TransferAttempt, TransferId, attempts_of, next_attempt
from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import (
    Failing,
    Grant,
    ReceiverAbort,
    ReceiverClosed,
    ReceiverReport,
    Released,
    Send,
    SendEnded,
    SenderReport,
    SenderStopped,
    TransferOutcome,
)
from sglang_ext.transfer.decide.receive_request import Need, needed
from sglang_ext.transfer.decide.receiver import Receiver
from sglang_ext.transfer.decide.sender import Part, Sender, SenderPhase
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan

OPTIONS = HandshakeOptions(retry_s=0.1, heartbeat_s=1.0, lease_s=5.0)
HALF = KVShard((TokenSpan(0, 4, 2),), 0, 1, 0, 1)
OTHER_HALF = HALF._replace(tokens=(TokenSpan(1, 4, 2),))


def receiver() -> Receiver:
    machine = Receiver("d", 1, OPTIONS)
    machine.expect(need(1), 0.0)
    return machine


def need(transfer_id: TransferId) -> Need:
    return needed(
        transfer_id,
        first_token=0,
        slots=array("I", [4, 5, 6, 7]),
        first_head=0,
        head_count=1,
        first_layer=0,
        layer_count=1,
    )


def report(sender: str, *chunks: KVShard, is_helper: bool, stored: int = 0) -> SenderReport:
    return SenderReport(1, sender, 9, None, 0, chunks, False, stored, stored, stored, 0.0, is_helper)


def test_a_room_has_a_bounded_number_of_attempts() -> None:
    assert len(attempts_of(5)) == MAX_ATTEMPTS
    assert attempts_of(5)[:2] == (5, TransferAttempt(5, 1))
    assert next_attempt(5) == TransferAttempt(5, 1)
    assert next_attempt(TransferAttempt(5, MAX_ATTEMPTS - 1)) is None
    assert str(TransferAttempt(5, 1)) == "5 (attempt 2)"


def test_a_lost_helper_is_no_lost_owner() -> None:
    machine = receiver()
    machine.on_report(report("owner", is_helper=False), 0.0)
    machine.on_report(report("helper", HALF, is_helper=True), 0.0)
    machine.on_report(report("owner", is_helper=False), 4.0)
    failing = next(action for action in machine.on_timer(5.0) if isinstance(action, Failing))
    assert failing.outcome is TransferOutcome.RESTARTED
    machine = receiver()
    for sender in ("helper", "owner"):
        machine.on_report(report(sender, is_helper=sender == "helper"), 0.0)
    failing = next(action for action in machine.on_timer(5.0) if isinstance(action, Failing))
    assert failing.outcome is TransferOutcome.PEER_LOST


@pytest.mark.parametrize("restarts", [True, False])
def test_a_sender_says_whether_the_request_is_sent_anew(restarts: bool) -> None:
    machine = receiver()
    machine.on_report(report("owner", HALF, is_helper=False), 0.0)
    machine.on_report(report("helper", OTHER_HALF, is_helper=True), 0.0)
    actions = machine.on_stopped(SenderStopped(1, "helper", 9, "enough", restarts), 1.0)
    failing = next(action for action in actions if isinstance(action, Failing))
    assert failing.outcome is (TransferOutcome.RESTARTED if restarts else TransferOutcome.REMOTE_ABORT)
    aborts = [action.message for action in actions if isinstance(action, Send) and action.to == "owner"]
    assert [message.restarts for message in aborts if isinstance(message, ReceiverAbort)] == [restarts]
    assert not any(isinstance(action, Released) for action in actions)  # the owner may be writing
    actions = machine.on_stopped(SenderStopped(1, "owner", 9, "told to", restarts), 1.1)
    assert any(isinstance(action, Released) for action in actions)
    if restarts:
        machine.expect(need(TransferAttempt(1, 1)), 1.2)
        late = machine.on_report(report("helper", OTHER_HALF, is_helper=True), 1.3)
        assert [action.message for action in late if isinstance(action, Send)] == [
            ReceiverAbort(1, "d", 1, 9, "helper has stopped: enough", True)
        ]


def test_senders_that_do_not_agree_leave_it_to_the_owner() -> None:
    for is_helper, outcome in ((True, TransferOutcome.RESTARTED), (False, TransferOutcome.REFUSED)):
        machine = receiver()
        machine.on_report(report("owner", HALF, is_helper=False), 0.0)
        actions = machine.on_report(report("other", HALF, is_helper=is_helper), 0.0)
        assert next(action for action in actions if isinstance(action, Failing)).outcome is outcome


def sender(*, is_helper: bool) -> Sender:
    machine = Sender(1, "p", "d", 9, OPTIONS, 0.0, is_helper=is_helper)
    machine.start(0.0)
    machine.offer(HALF, 0.0)
    machine.on_report(ReceiverReport(1, "d", 1, 9, 1, 0, None, 0, False, False, 0.0), 0.0)
    return machine


@pytest.mark.parametrize("is_helper", [True, False])
def test_whatever_ends_a_helper_is_a_restart(is_helper: bool) -> None:
    for end, otherwise in (
        (lambda machine: machine.abort("x", 1.0), TransferOutcome.ABORTED),
        (lambda machine: machine.on_timer(20.0), TransferOutcome.PEER_LOST),
        (lambda machine: machine.restart("x", 1.0), TransferOutcome.RESTARTED),
    ):
        machine = sender(is_helper=is_helper)
        actions = end(machine)  # type: ignore[no-untyped-call]
        outcome = TransferOutcome.RESTARTED if is_helper else otherwise
        assert machine.outcome is not None
        assert machine.outcome[0] is outcome
        (stopped,) = (action.message for action in actions if isinstance(action, Send))
        assert stopped.restarts == (outcome is TransferOutcome.RESTARTED)


def test_a_restart_that_comes_after_the_end_is_none() -> None:
    machine = sender(is_helper=False)
    machine.restart("x", 1.0)
    assert machine.phase is SenderPhase.STOPPED
    machine.on_closed(ReceiverClosed(1, "d", 1, 9, is_complete=True), 1.1)
    assert machine.outcome == (TransferOutcome.COMPLETE, "")
    complete = receiver()
    complete.on_report(report("owner", HALF, OTHER_HALF, is_helper=False), 0.0)
    complete.on_report(report("owner", HALF, OTHER_HALF, is_helper=False, stored=1), 0.0)
    complete.on_report(report("owner", HALF, OTHER_HALF, is_helper=False, stored=2), 0.0)
    (answer,) = complete.on_stopped(SenderStopped(1, "owner", 9, "x", True), 1.0)
    assert isinstance(answer, Send)
    assert answer.message == ReceiverClosed(1, "d", 1, 9, True)


@pytest.mark.parametrize(("may_have_helpers", "outcome"), [(True, "restarted"), (False, "write_failed")])
def test_a_write_that_decode_refuses(may_have_helpers: bool, outcome: str) -> None:
    machine = Sender(1, "p", "d", 9, OPTIONS, 0.0, may_have_helpers=may_have_helpers)
    machine.start(0.0)
    machine.offer(HALF, 0.0)
    grant = Grant(0, 70, None, b"", None, ())
    machine.on_report(ReceiverReport(1, "d", 1, 9, 1, 1, grant, 0, False, False, 0.0), 0.0)
    machine.part_ready(0, Part(2), 0.0)
    machine.on_write_failed(0, 0, "refused", 1.0)
    assert machine.outcome == (TransferOutcome(outcome), "refused")


def test_an_owner_waits_for_its_helpers() -> None:
    machine = Sender(1, "p", "d", 9, OPTIONS, 0.0, may_have_helpers=True)
    machine.start(0.0)
    machine.offer(HALF, 0.0, is_last=True)
    grant = Grant(0, 70, None, b"", None, ())
    machine.on_report(ReceiverReport(1, "d", 1, 9, 1, 1, grant, 0, True, False, 0.0), 0.0)
    machine.part_ready(0, Part(2), 0.0)
    machine.on_written(0, 0, 0.0)
    machine.on_report(ReceiverReport(1, "d", 1, 9, 1, 1, None, 1, True, False, 0.0), 0.0)
    assert machine.phase is SenderPhase.OPEN
    assert machine.on_timer(OPTIONS.retry_s)  # asks again
    machine.on_report(ReceiverReport(1, "d", 1, 9, 1, 1, None, 1, True, True, 0.0), 0.2)
    assert machine.is_over


@pytest.mark.parametrize("restarts", [True, False])
def test_an_owner_that_has_done_its_part_may_still_end_the_request(restarts: bool) -> None:
    machine = receiver()
    machine.on_report(msgspec.structs.replace(report("owner", HALF, is_helper=False), is_last=True), 0.0)
    machine.on_report(msgspec.structs.replace(report("owner", HALF, is_helper=False, stored=1), is_last=True), 0.0)
    machine.on_report(report("helper", OTHER_HALF, is_helper=True), 0.0)
    actions = machine.on_stopped(SenderStopped(1, "owner", 9, "enough", restarts), 1.0)
    outcome = TransferOutcome.RESTARTED if restarts else TransferOutcome.REMOTE_ABORT
    assert [action.outcome for action in actions if isinstance(action, Failing)] == [outcome]


def test_everybody_hears_that_all_is_there() -> None:
    machine = receiver()
    machine.on_report(report("owner", HALF, is_helper=False), 0.0)
    machine.on_report(report("owner", HALF, is_helper=False, stored=1), 0.0)
    machine.on_report(report("helper", OTHER_HALF, is_helper=True), 0.0)
    actions = machine.on_report(report("helper", OTHER_HALF, is_helper=True, stored=1), 1.0)
    told = {
        action.to
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, ReceiverReport) and action.message.is_complete
    }
    assert told == {"owner", "helper"}


def test_decode_has_been_started_again() -> None:
    machine = sender(is_helper=False)
    machine.restart("x", 1.0)
    machine.on_closed(ReceiverClosed(1, "d", 2, 9), 1.1)
    assert machine.outcome is not None
    assert machine.outcome[0] is TransferOutcome.PEER_LOST


def test_a_restart_that_is_not_acknowledged_is_a_loss() -> None:
    machine = sender(is_helper=False)
    machine.restart("x", 1.0)
    machine.on_timer(6.0)
    assert machine.is_over
    assert machine.outcome is not None
    assert machine.outcome[0] is TransferOutcome.PEER_LOST


def test_parts_that_were_written_before_all_was_computed_are_counted() -> None:
    whole = KVShard((TokenSpan(0, 2),), 0, 1, 0, 2)
    machine = Sender(1, "p", "d", 9, OPTIONS, 0.0)
    machine.start(0.0)
    machine.offer(whole, 0.0, is_last=True)
    receiving = Receiver("d", 1, OPTIONS)
    receiving.expect(
        needed(1, first_token=0, slots=array("I", [1, 2]), first_head=0, head_count=1, first_layer=0, layer_count=2),
        0.0,
    )
    granted = receiving.on_report(SenderReport(1, "p", 9, None, 0, (whole,), True, 0, 0, 0, 0.0), 0.0)
    for action in granted:
        if isinstance(action, Send) and isinstance(action.message, ReceiverReport):
            machine.on_report(action.message, 0.0)
    machine.part_ready(0, Part(2), 1.0)
    machine.on_written(0, 0, 1.5)
    machine.part_ready(0, Part(2), 2.0)
    machine.on_written(0, 1, 2.5)
    ended = machine.on_report(ReceiverReport(1, "d", 1, 9, 1, 1, None, 1, True, True, 2.5), 3.0)
    (record,) = (action.record for action in ended if isinstance(action, SendEnded))
    assert (record.parts, record.overlapped_parts) == (2, 1)
