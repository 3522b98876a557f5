"""What a sender does in each situation that has a name."""

from __future__ import annotations

import pytest

from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import (
    Grant,
    ReceiverAbort,
    ReceiverClosed,
    ReceiverReport,
    Send,
    SendEnded,
    SenderActions,
    SenderReport,
    SenderStopped,
    SendRecord,
    TransferOutcome,
    UseGrant,
    WritePart,
)
from sglang_ext.transfer.decide.sender import Part, Sender, SenderPhase
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan

OPTIONS = HandshakeOptions(retry_s=0.2, heartbeat_s=1.0, lease_s=10.0)
SHARD = KVShard((TokenSpan(0, 4),), 0, 2, 0, 3)  # 24 cells
GRANT = Grant(0, 70, 1, b"slots", None, ())


def sender(now_s: float = 0.0) -> Sender:
    return Sender(1, "p", "d", 5, OPTIONS, now_s, 2)


def answer(
    *,
    accepted: int = 0,
    grant: Grant | None = None,
    stored: int = 0,
    is_last_known: bool = False,
    is_complete: bool = False,
    sent_s: float = 0.0,
    receiver_epoch: int = 7,
    sender_epoch: int = 5,
) -> ReceiverReport:
    granted = 0 if grant is None else grant.chunk + 1
    return ReceiverReport(
        1, "d", receiver_epoch, sender_epoch, accepted, granted, grant, stored, is_last_known, is_complete, sent_s
    )


def messages(actions: SenderActions) -> list[object]:
    return [action.message for action in actions if isinstance(action, Send)]


def writes(actions: SenderActions) -> list[tuple[int, int]]:
    return [(action.chunk, action.part) for action in actions if isinstance(action, WritePart)]


def record(actions: SenderActions) -> SendRecord | None:
    records = [action.record for action in actions if isinstance(action, SendEnded)]
    assert len(records) <= 1
    return records[0] if records else None


def granted(*, is_last: bool = True) -> Sender:
    machine = sender()
    machine.start(0.0)
    machine.offer(SHARD, 0.0, is_last=is_last)
    machine.on_report(answer(accepted=1, grant=GRANT), 0.0)
    return machine


def test_one_chunk_of_two_parts() -> None:
    machine = sender()
    assert messages(machine.start(0.0)) == [SenderReport(1, "p", 5, 2, 0, (), False, 0, 0, 0, 0.0)]
    assert messages(machine.offer(SHARD, 1.0, is_last=True)) == [
        SenderReport(1, "p", 5, 2, 0, (SHARD,), True, 0, 0, 0, 1.0)
    ]
    assert writes(machine.part_ready(0, Part(8), 2.0)) == []
    actions = machine.on_report(answer(accepted=1, grant=GRANT), 3.0)
    assert actions == (UseGrant(GRANT), WritePart(0, 0, 70))
    assert writes(machine.part_ready(0, Part(16), 4.0)) == [(0, 1)]
    assert machine.on_written(0, 0, 5.0) == ()
    actions = machine.on_written(0, 1, 6.0)
    assert messages(actions) == [SenderReport(1, "p", 5, 2, 1, (), True, 1, 1, 2, 6.0)]
    ended = record(machine.on_report(answer(accepted=1, stored=1, is_last_known=True), 7.0))
    assert ended == SendRecord(1, "d", TransferOutcome.COMPLETE, "", 1, 2, 0, 3.0, 2.0, 1.0, 4.0, 0)
    assert machine.is_over


@pytest.mark.parametrize("stored", [0, 1])
@pytest.mark.parametrize("is_last_known", [False, True])
def test_it_ends_once_the_receiver_knows_everything(stored: int, is_last_known: bool) -> None:
    machine = granted()
    machine.part_ready(0, Part(24), 0.0)
    machine.on_written(0, 0, 0.0)
    machine.on_report(answer(accepted=1, stored=stored, is_last_known=is_last_known), 0.0)
    assert machine.is_over == (stored == 1 and is_last_known)


def test_news_of_an_end_that_is_older_than_the_last_offer_does_not_count() -> None:
    machine = granted(is_last=False)
    machine.part_ready(0, Part(24), 0.0)
    machine.on_written(0, 0, 0.0)
    machine.close(0.0)
    machine.on_report(answer(accepted=1, stored=1), 0.0)
    assert not machine.is_over
    machine.on_report(answer(accepted=1, stored=1, is_last_known=True), 0.0)
    assert machine.is_over


def test_metadata_are_part_of_a_chunk() -> None:
    machine = sender()
    machine.offer(SHARD._replace(has_aux=True), 0.0, is_last=True)
    machine.on_report(answer(accepted=1, grant=GRANT), 0.0)
    machine.part_ready(0, Part(24), 0.0)
    assert machine.on_written(0, 0, 0.0) == ()
    machine.part_ready(0, Part(0, has_aux=True), 0.0)
    (report,) = messages(machine.on_written(0, 1, 0.0))
    assert isinstance(report, SenderReport)
    assert report.stored == 1


@pytest.mark.parametrize("part", [Part(5), Part(-1), Part(4, has_aux=True)])
def test_parts_that_are_more_than_the_chunk_are_refused(part: Part) -> None:
    machine = granted()
    machine.part_ready(0, Part(20), 0.0)
    with pytest.raises(ValueError, match="more than the chunk"):
        machine.part_ready(0, part, 0.0)


def test_offers_without_sense_are_refused() -> None:
    machine = granted()
    with pytest.raises(ValueError, match="the last chunk has been offered"):
        machine.offer(SHARD, 0.0)
    with pytest.raises(ValueError, match="empty"):
        sender().offer(SHARD._replace(layer_count=0), 0.0)


def test_a_repeated_grant_is_used_once() -> None:
    machine = granted()
    machine.part_ready(0, Part(8), 0.0)
    assert machine.on_report(answer(accepted=1, grant=GRANT), 0.0) == ()


def test_grants_are_used_in_order() -> None:
    machine = sender()
    machine.offer(SHARD, 0.0)
    machine.offer(SHARD._replace(tokens=(TokenSpan(4, 8),)), 0.0, is_last=True)
    assert machine.on_report(answer(accepted=2, grant=GRANT._replace(chunk=1)), 0.0) == ()


def test_what_is_not_answered_is_retransmitted_and_a_heartbeat_follows() -> None:
    machine = sender()
    machine.start(0.0)
    assert messages(machine.on_timer(0.1)) == []
    assert len(messages(machine.on_timer(0.2))) == 1
    machine.on_report(answer(sent_s=0.2), 0.3)
    assert messages(machine.on_timer(0.5)) == []
    assert len(messages(machine.on_timer(1.2))) == 1
    machine.offer(SHARD, 1.5)
    assert len(messages(machine.on_timer(2.0))) == 1
    machine.on_report(answer(accepted=1, grant=GRANT, sent_s=2.0), 2.0)
    machine.part_ready(0, Part(24), 2.0)
    machine.on_written(0, 0, 2.0)
    (again,) = messages(machine.on_timer(2.5))
    assert isinstance(again, SenderReport)
    assert (again.stored, again.chunks, again.first_chunk) == (1, (), 1)
    machine.on_report(answer(accepted=1, stored=1, sent_s=2.5), 2.5)
    assert messages(machine.on_timer(3.0)) == []
    machine.close(3.0)
    assert len(messages(machine.on_timer(3.5))) == 1


def test_a_silent_receiver_is_lost() -> None:
    machine = granted()
    machine.on_timer(9.9)
    assert machine.outcome is None
    ended = record(machine.on_timer(10.0))
    assert ended is not None
    assert (ended.outcome, ended.reason) == (TransferOutcome.PEER_LOST, "lost d: silent for 10 s")


def test_the_lease_counts_from_what_the_receiver_has_received() -> None:
    machine = granted()
    machine.on_timer(5.0)
    machine.on_report(answer(accepted=1, sent_s=5.0), 9.0)  # was long under way
    machine.on_timer(14.9)
    assert machine.outcome is None
    machine.on_timer(15.0)
    assert machine.outcome is not None


def test_nothing_is_written_after_the_lease_even_when_no_timer_has_run() -> None:
    machine = granted()
    assert writes(machine.part_ready(0, Part(24), 10.0)) == []
    assert machine.outcome is not None
    late = sender()
    late.offer(SHARD, 0.0)
    late.part_ready(0, Part(24), 0.0)
    assert writes(late.on_report(answer(accepted=1, grant=GRANT, sent_s=0.0), 10.0)) == []


def test_it_says_that_it_has_stopped_only_when_no_write_is_under_way() -> None:
    machine = granted()
    machine.part_ready(0, Part(8), 0.0)
    machine.part_ready(0, Part(8), 0.0)
    assert machine.abort("enough", 0.0) == ()
    assert machine.phase is SenderPhase.STOPPING
    assert machine.on_written(0, 0, 0.0) == ()
    actions = machine.on_write_failed(0, 1, "broken", 1.0)
    assert messages(actions) == [SenderStopped(1, "p", 5, "enough")]
    ended = record(actions)
    assert ended is not None
    assert ended.outcome is TransferOutcome.ABORTED
    assert machine.part_ready(0, Part(8), 1.0) == ()


def test_while_it_stops_it_stays_alive_in_the_receivers_eyes() -> None:
    machine = granted()
    machine.part_ready(0, Part(24), 0.0)
    machine.abort("enough", 0.0)
    assert len(messages(machine.on_timer(1.0))) == 1
    assert machine.on_timer(60.0) != ()
    assert machine.phase is SenderPhase.STOPPING


def test_having_stopped_is_retransmitted_until_the_receiver_knows() -> None:
    machine = granted()
    machine.abort("enough", 0.0)
    stopped = SenderStopped(1, "p", 5, "enough")
    assert messages(machine.on_timer(0.2)) == [stopped]
    assert messages(machine.on_abort(ReceiverAbort(1, "d", 7, 5, "x"), 0.3)) == [stopped]
    machine.on_closed(ReceiverClosed(1, "d", 7, 4), 0.4)
    assert not machine.is_over
    machine.on_closed(ReceiverClosed(1, "d", 7, 5), 0.4)
    assert machine.is_over


def test_it_gives_up_saying_so_after_a_lease() -> None:
    machine = granted()
    machine.abort("enough", 0.0)
    machine.on_timer(10.0)
    assert machine.is_over


def test_a_failed_write_ends_it() -> None:
    machine = granted()
    machine.part_ready(0, Part(24), 0.0)
    ended = record(machine.on_write_failed(0, 0, "broken", 0.0))
    assert ended is not None
    assert (ended.outcome, ended.reason) == (TransferOutcome.WRITE_FAILED, "broken")


def test_news_of_writes_that_it_does_not_know_are_ignored() -> None:
    machine = granted()
    assert machine.on_written(0, 0, 0.0) == machine.on_write_failed(0, 0, "broken", 0.0) == ()
    assert machine.outcome is None


def test_the_receiver_may_abort_or_have_enough() -> None:
    machine = granted()
    ended = record(machine.on_abort(ReceiverAbort(1, "d", 7, 5, "cancelled"), 0.0))
    assert ended is not None
    assert (ended.outcome, ended.reason) == (TransferOutcome.REMOTE_ABORT, "cancelled")
    content = sender()
    content.start(0.0)
    ended = record(content.on_report(answer(is_complete=True), 0.0))
    assert ended is not None
    assert ended.outcome is TransferOutcome.COMPLETE


def test_messages_of_other_incarnations_are_ignored() -> None:
    machine = granted()
    machine.on_report(answer(accepted=1, is_complete=True, receiver_epoch=8), 0.0)
    machine.on_report(answer(accepted=1, is_complete=True, sender_epoch=4), 0.0)
    machine.on_abort(ReceiverAbort(1, "d", 7, 4, "old"), 0.0)
    assert machine.outcome is None
