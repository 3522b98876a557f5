"""What the receiver does in each situation that has a name."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import (
    Allow,
    Failing,
    Fence,
    Ready,
    Received,
    ReceiverAbort,
    ReceiverAction,
    ReceiverActions,
    ReceiverClosed,
    ReceiverReport,
    Released,
    Retire,
    Send,
    SenderReport,
    SenderStopped,
    TransferOutcome,
)
from sglang_ext.transfer.decide.receive_request import Need, needed
from sglang_ext.transfer.decide.receiver import Receiver
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan

OPTIONS = HandshakeOptions(
    receive_backends=1,
    hold_idle_s=1.0,
    retry_s=0.2,
    heartbeat_s=1.0,
    lease_s=10.0,
    quarantine_s=30.0,
    stall_timeout_s=100.0,
)


def need(transfer_id: int, tokens: int = 4, aux_slot: int | None = None, first_token: int = 0) -> Need:
    slots = array("I", range(100 * transfer_id, 100 * transfer_id + tokens))
    return needed(
        transfer_id,
        first_token=first_token,
        slots=slots,
        first_head=0,
        head_count=2,
        first_layer=0,
        layer_count=3,
        aux_slot=aux_slot,
    )


def shard(start: int, stop: int, step: int = 1, *, has_aux: bool = False) -> KVShard:
    return KVShard((TokenSpan(start, stop, step),), 0, 2, 0, 3, has_aux)


def report(
    transfer_id: int,
    sender: str = "p",
    chunks: tuple[KVShard, ...] = (),
    *,
    stored: int = 0,
    seen: int = 0,
    first_chunk: int = 0,
    is_last: bool = True,
    epoch: int = 1,
    count: int | None = None,
    parts: int = 0,
) -> SenderReport:
    return SenderReport(transfer_id, sender, epoch, count, first_chunk, chunks, is_last, seen, stored, parts, 0.0)


def only(actions: ReceiverActions, kind: type[ReceiverAction]) -> list[ReceiverAction]:
    return [action for action in actions if isinstance(action, kind)]


def allowed(actions: ReceiverActions) -> list[tuple[int, str]]:
    return [(action.transfer_id, action.sender) for action in actions if isinstance(action, Allow)]


def answers(actions: ReceiverActions) -> list[object]:
    return [action.message for action in actions if isinstance(action, Send)]


def receiver(options: HandshakeOptions = OPTIONS) -> Receiver:
    return Receiver("d", 7, options)


def test_one_sender_one_chunk() -> None:
    machine = receiver()
    assert machine.expect(need(1, aux_slot=9), 0.0) == ()
    actions = machine.on_report(report(1, chunks=(shard(0, 4, has_aux=True),)), 1.0)
    assert allowed(actions) == [(1, "p")]
    (grant,) = [action.grant for action in actions if isinstance(action, Allow)]
    assert (grant.chunk, grant.permit, grant.backend, grant.aux_slot) == (0, 7 << 32 | 1, 0, 9)
    assert array("I", grant.slots).tolist() == [100, 101, 102, 103]
    assert isinstance(actions[0], Allow), "the right to write must precede the news of it"
    actions = machine.on_report(report(1, chunks=(shard(0, 4, has_aux=True),), stored=1, seen=1), 3.0)
    assert only(actions, Retire) == [Retire(grant.permit)]
    assert only(actions, Ready) == [Ready(1)]
    (record,) = [action.record for action in actions if isinstance(action, Received)]
    assert (record.handshake_wait_s, record.backend_wait_s, record.transfer_s) == (1.0, 0.0, 2.0)
    assert (record.senders, record.chunks, record.tokens) == (1, 1, 4)
    assert answers(actions) == [ReceiverReport(1, "d", 7, 1, 1, 1, None, 1, True, True, 0.0)]
    assert machine.is_idle


def test_slots_of_striped_tokens_after_a_cached_prefix() -> None:
    machine = receiver()
    machine.expect(need(1, tokens=6, first_token=10), 0.0)
    actions = machine.on_report(report(1, chunks=(shard(11, 16, 2),)), 0.0)
    (grant,) = [action.grant for action in actions if isinstance(action, Allow)]
    assert array("I", grant.slots).tolist() == [101, 103, 105]


def test_a_grant_is_repeated_until_it_has_been_seen() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 0.0)
    for seen, has_grant in ((0, True), (1, False)):
        (answer,) = answers(machine.on_report(report(1, chunks=(shard(0, 4),), seen=seen), 1.0))
        assert isinstance(answer, ReceiverReport)
        assert (answer.grant is not None) == has_grant


def test_a_late_sender_of_an_older_request_goes_before_a_younger_request() -> None:
    machine = receiver()
    for transfer_id in (1, 2, 3):
        machine.expect(need(transfer_id), 0.0)
    machine.on_report(report(1, "a", (shard(0, 4),)), 1.0)  # has the only backend
    machine.on_report(report(2, "b", (shard(0, 2),), is_last=False), 2.0)
    machine.on_report(report(3, "c", (shard(0, 4),)), 3.0)
    machine.on_report(report(2, "late", (shard(2, 4),)), 4.0)
    assert allowed(machine.on_report(report(1, "a", (shard(0, 4),), stored=1), 5.0)) == [(2, "b")]
    assert allowed(machine.on_report(report(2, "b", (shard(0, 2),), stored=1), 6.0)) == [(2, "late")]
    actions = machine.on_report(report(2, "late", (shard(2, 4),), stored=1), 7.0)
    assert only(actions, Ready) == [Ready(2)]
    assert allowed(actions) == [(3, "c")]


def test_a_request_keeps_an_idle_backend_until_another_has_waited_for_long() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.expect(need(2), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),), is_last=False), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),), is_last=False, stored=1), 1.0)
    assert machine.backends.held_by(1) == (0,)
    assert allowed(machine.on_report(report(2, "b", (shard(0, 4),)), 1.5)) == []
    assert allowed(machine.on_timer(1.9)) == []
    assert allowed(machine.on_timer(2.0)) == [(2, "b")]
    assert allowed(machine.on_report(report(1, "a", (shard(2, 4),), first_chunk=1, stored=1), 2.1)) == []
    assert allowed(machine.on_report(report(2, "b", (shard(0, 4),), stored=1), 3.0)) == [(1, "a")]


def test_without_an_idle_timeout_an_idle_backend_is_kept() -> None:
    machine = receiver(HandshakeOptions(receive_backends=1, hold_idle_s=None))
    machine.expect(need(1), 0.0)
    machine.expect(need(2), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),), is_last=False), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),), is_last=False, stored=1), 1.0)
    machine.on_report(report(2, "b", (shard(0, 4),)), 1.5)
    assert allowed(machine.on_timer(9.0)) == []


def test_a_backend_that_no_sender_can_need_any_more_is_given_up() -> None:
    machine = receiver(HandshakeOptions(receive_backends=2, hold_idle_s=None))
    machine.expect(need(1), 0.0)
    machine.expect(need(2), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),), count=2), 0.0)
    machine.on_report(report(1, "b", (shard(2, 3),), count=2, is_last=False), 0.0)
    assert allowed(machine.on_report(report(2, "c", (shard(0, 4),)), 0.0)) == []
    assert allowed(machine.on_report(report(1, "a", (shard(0, 2),), count=2, stored=1), 1.0)) == [(2, "c")]


def test_two_requests_that_each_hold_a_backend_and_want_more_end() -> None:
    machine = receiver(HandshakeOptions(receive_backends=2, hold_idle_s=None))
    halves = {"x": shard(0, 2), "y": shard(2, 4)}
    for transfer_id in (1, 2):
        machine.expect(need(transfer_id), 0.0)
        assert allowed(machine.on_report(report(transfer_id, "x", (halves["x"],), count=2), 0.0)) == [
            (transfer_id, "x")
        ]
    for transfer_id in (1, 2):
        assert allowed(machine.on_report(report(transfer_id, "y", (halves["y"],), count=2), 0.0)) == []
    for transfer_id in (1, 2):
        assert (transfer_id, "y") in allowed(
            machine.on_report(report(transfer_id, "x", (halves["x"],), count=2, stored=1), 1.0)
        )
    ready = [
        machine.on_report(report(transfer_id, "y", (halves["y"],), count=2, stored=1), 2.0) for transfer_id in (1, 2)
    ]
    assert [only(actions, Ready) for actions in ready] == [[Ready(1)], [Ready(2)]]
    assert machine.backends.free_count == 2


def test_handshakes_before_the_slots_are_known_keep_their_place() -> None:
    machine = receiver()
    assert allowed(machine.on_report(report(2, "b", (shard(0, 4),)), 0.0)) == []
    machine.expect(need(1), 1.0)
    assert allowed(machine.on_report(report(1, "a", (shard(0, 4),)), 1.0)) == [(1, "a")]
    machine.expect(need(3), 2.0)
    machine.on_report(report(3, "c", (shard(0, 4),)), 2.0)
    machine.expect(need(2), 3.0)
    assert allowed(machine.on_report(report(1, "a", (shard(0, 4),), stored=1), 4.0)) == [(2, "b")]


def test_nobody_writes_to_slots_that_this_instance_may_still_write_to() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0, is_held=True)
    actions = machine.on_report(report(1, chunks=(shard(0, 4),)), 1.0)
    assert not allowed(actions)
    (answer,) = answers(actions)
    assert isinstance(answer, ReceiverReport)
    assert (answer.accepted, answer.granted) == (1, 0)
    assert not allowed(machine.on_timer(1.5))
    assert allowed(machine.on_slots_unused(1, 2.0)) == [(1, "p")]
    assert machine.on_slots_unused(1, 3.0) == ()
    assert machine.on_slots_unused(2, 3.0) == ()
    assert only(machine.on_report(report(1, chunks=(shard(0, 4),), stored=1, seen=1), 3.0), Ready) == [Ready(1)]


def test_held_slots_hold_up_no_younger_request_and_are_released_at_once_when_it_is_given_up() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0, is_held=True)
    machine.expect(need(2), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 1.0)
    assert allowed(machine.on_report(report(2, chunks=(shard(0, 4),)), 2.0)) == [(2, "p")]
    assert only(machine.cancel(1, "gone", 3.0), Released) == [Released(1)]
    assert machine.on_slots_unused(1, 4.0) == ()


def test_early_handshakes_are_bounded() -> None:
    machine = receiver(HandshakeOptions(max_early_requests=1))
    assert machine.on_report(report(1), 0.0) != ()
    assert machine.on_report(report(2), 0.0) == ()
    machine.expect(need(1), 0.0)
    assert machine.on_report(report(2), 0.0) != ()


def test_shards_offered_early_are_checked_once_slots_are_known() -> None:
    machine = receiver()
    machine.on_report(report(1, chunks=(shard(0, 5),)), 0.0)
    actions = machine.expect(need(1), 1.0)
    (failing,) = only(actions, Failing)
    assert isinstance(failing, Failing)
    assert failing.outcome is TransferOutcome.REFUSED
    assert "outside" in failing.reason
    assert only(actions, Released) == [Released(1)]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (report(1, "q", (shard(3, 6),)), "overlaps"),
        (report(1, "q", (shard(4, 9),)), "outside"),
        (report(1, "p", (shard(0, 4), shard(4, 6)), is_last=True), "out of order"),
    ],
)
def test_what_does_not_fit_fails_the_request(second: SenderReport, reason: str) -> None:
    machine = receiver()
    machine.expect(need(1, tokens=6), 0.0)
    machine.on_report(report(1, "p", (shard(0, 4),)), 0.0)
    (failing,) = only(machine.on_report(second, 1.0), Failing)
    assert isinstance(failing, Failing)
    assert reason in failing.reason


def test_slots_are_released_only_when_the_sender_has_stopped() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 0.0)
    actions = machine.cancel(1, "gone", 1.0)
    assert only(actions, Failing) == [Failing(1, TransferOutcome.ABORTED, "gone")]
    assert only(actions, Fence) == [Fence(7 << 32 | 1)]
    assert not only(actions, Released)
    assert machine.backends.free_count == 0
    assert answers(machine.on_timer(1.1)) == []
    assert answers(machine.on_timer(1.25)) == [ReceiverAbort(1, "d", 7, 1, "gone")]
    actions = machine.on_stopped(SenderStopped(1, "p", 1, "told to"), 2.0)
    assert only(actions, Released) == [Released(1)]
    assert answers(actions) == [ReceiverClosed(1, "d", 7, 1)]
    assert machine.backends.free_count == 1


@pytest.mark.parametrize("is_stored", [False, True])
def test_slots_are_released_when_the_transport_bars_the_sender_or_it_has_written_all(is_stored: bool) -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 0.0)
    machine.cancel(1, "gone", 1.0)
    if is_stored:
        actions = machine.on_report(report(1, chunks=(shard(0, 4),), stored=1), 2.0)
        assert answers(actions) == [ReceiverAbort(1, "d", 7, 1, "gone")]
    else:
        actions = machine.on_fenced(7 << 32 | 1, 2.0)
    assert only(actions, Released) == [Released(1)]


def test_a_fence_of_an_open_request_or_of_an_unknown_permit_means_nothing() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 0.0)
    assert machine.on_fenced(7 << 32 | 1, 1.0) == machine.on_fenced(5, 1.0) == ()
    assert machine.unsettled_permits == 1


def test_slots_of_a_lost_sender_stay_in_quarantine() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 0.0)
    assert not only(machine.on_timer(9.9), Failing)
    (failing,) = only(machine.on_timer(10.0), Failing)
    assert isinstance(failing, Failing)
    assert failing.outcome is TransferOutcome.PEER_LOST
    assert failing.reason == "lost p: silent for 10 s"
    assert not only(machine.on_timer(39.9), Released)
    assert only(machine.on_timer(40.0), Released) == [Released(1)]


def test_nothing_is_granted_to_a_request_that_fails_when_a_backend_becomes_free_for_it() -> None:
    machine = receiver(
        HandshakeOptions(receive_backends=2, hold_idle_s=0.5, retry_s=0.2, heartbeat_s=1.0, lease_s=10.0)
    )
    machine.expect(need(1), 0.0)
    machine.expect(need(2), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),)), 0.0)
    machine.on_report(report(2, "z", (shard(0, 2),), is_last=False), 0.0)
    machine.on_report(report(1, "b", (shard(2, 4),)), 9.0)
    machine.on_report(report(2, "z", (shard(0, 2),), is_last=False, stored=1), 9.5)
    actions = machine.on_timer(10.0)  # a is lost; the backend that z left idle may go to b
    assert only(actions, Failing)
    assert not only(actions, Allow)


def test_a_finished_sender_may_be_silent() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),)), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),), stored=1), 0.0)
    machine.on_report(report(1, "b", is_last=False), 9.0)
    assert not only(machine.on_timer(15.0), Failing)


def test_a_request_in_which_nothing_moves_fails_though_its_senders_live() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, "a", (shard(0, 2),)), 1.0)
    machine.on_report(report(1, "b", (shard(2, 4),)), 1.0)  # waits for the backend of a
    for now_s in range(2, 100, 5):
        for name, part in (("a", shard(0, 2)), ("b", shard(2, 4))):
            machine.on_report(report(1, name, (part,)), now_s)
        assert not only(machine.on_timer(now_s), Failing)
    machine.on_report(report(1, "a", (shard(0, 2),)), 101.0)
    machine.on_report(report(1, "b", (shard(2, 4),)), 101.0)
    (failing,) = only(machine.on_timer(101.0), Failing)
    assert isinstance(failing, Failing)
    assert failing.outcome is TransferOutcome.STALLED


def test_written_parts_are_progress_and_waiting_for_others_is_no_stall() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.expect(need(2), 0.0)
    machine.on_report(report(1, "a", (shard(0, 4),)), 0.0)
    machine.on_report(report(2, "b", (shard(0, 4),)), 0.0)
    for step in range(1, 60):
        machine.on_report(report(1, "a", (shard(0, 4),), parts=step), 5.0 * step)
        machine.on_report(report(2, "b", (shard(0, 4),)), 5.0 * step)
        assert not only(machine.on_timer(5.0 * step), Failing)


def test_a_request_without_a_sender_fails() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    assert only(machine.on_timer(100.0), Released) == [Released(1)]


def test_an_invited_rank_is_lost_before_it_shakes_hands() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, "p", (shard(0, 2),), count=2), 0.0)
    assert machine.permit_of(1, "p") is not None
    assert machine.permit_of(1, "q") is None
    # One that has shaken hands has its lease, and may be done; another transfer's does not matter here.
    assert machine.on_peer_lost(1, "p", "gone", 1.0) == ()
    assert machine.on_peer_lost(2, "q", "gone", 1.0) == ()
    actions = machine.on_peer_lost(1, "q", "gone", 1.0)
    assert only(actions, Failing) == [Failing(1, TransferOutcome.PEER_LOST, "gone")]
    (abort,) = [message for message in answers(actions) if isinstance(message, ReceiverAbort)]
    assert abort.reason == "gone"
    assert only(actions, Released) == []  # the other one may be writing
    assert machine.on_peer_lost(1, "r", "gone, too", 1.0) == ()
    assert only(machine.on_stopped(SenderStopped(1, "p", 1, "told to"), 1.0), Released) == [Released(1)]
    assert machine.permit_of(1, "p") is None


def test_late_messages_of_an_ended_request_get_a_true_answer_until_it_is_forgotten() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),), stored=1), 1.0)
    (answer,) = answers(machine.on_report(report(1, chunks=(shard(0, 4),), stored=1), 20.9))
    assert isinstance(answer, ReceiverReport)
    assert answer.is_complete
    machine.cancel(2, "never mind", 1.0)
    assert answers(machine.on_report(report(2), 20.9)) == [ReceiverAbort(2, "d", 7, 1, "never mind")]
    machine.on_timer(21.0)
    (answer,) = answers(machine.on_report(report(1), 21.0))
    assert isinstance(answer, ReceiverReport)
    assert not answer.is_complete


def test_a_transfer_id_serves_one_request() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    with pytest.raises(ValueError, match="transfer 1 is in use"):
        machine.expect(need(1), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),), stored=1), 0.0)
    with pytest.raises(ValueError, match="transfer 1 has been used before"):
        machine.expect(need(1), 0.0)


def test_a_request_cancelled_or_aborted_before_its_slots_were_known_fails_at_once() -> None:
    machine = receiver()
    machine.cancel(1, "gone", 0.0)
    machine.on_report(report(2, is_last=False), 0.0)
    machine.on_stopped(SenderStopped(2, "p", 1, "no"), 0.0)
    machine.on_stopped(SenderStopped(3, "p", 1, "no"), 0.0)
    for transfer_id in (1, 2, 3):
        actions = machine.expect(need(transfer_id), 1.0)
        assert only(actions, Failing)
        assert only(actions, Released) == [Released(transfer_id)]


def test_another_incarnation_of_a_sender_is_sent_away() -> None:
    machine = receiver()
    machine.expect(need(1), 0.0)
    machine.on_report(report(1, chunks=(shard(0, 4),)), 0.0)
    (answer,) = answers(machine.on_report(report(1, chunks=(shard(0, 4),), stored=1, epoch=2), 1.0))
    assert isinstance(answer, ReceiverAbort)
    assert answer.sender_epoch == 2
    assert machine.unsettled_permits == 1
    machine.on_stopped(SenderStopped(1, "p", 2, "bye"), 1.0)
    assert machine.unsettled_permits == 1


def test_a_request_of_cached_tokens_only_is_ready_at_once_or_with_its_metadata() -> None:
    machine = receiver()
    assert only(machine.expect(need(1, tokens=0), 0.0), Ready) == [Ready(1)]
    assert not only(machine.expect(need(2, tokens=0, aux_slot=3), 0.0), Ready)
    aux = KVShard((), 0, 0, 0, 0, True)
    machine.on_report(report(2, chunks=(aux,)), 0.0)
    assert only(machine.on_report(report(2, chunks=(aux,), stored=1), 0.0), Ready) == [Ready(2)]


def test_a_request_of_cached_tokens_only_waits_for_the_pieces_of_its_states() -> None:
    """No rows say that a sender is missing: the number of senders does."""
    machine = receiver(replace(OPTIONS, receive_backends=None))
    wanted = need(1, tokens=0, aux_slot=3)._replace(state_slots=(b"\5\0\0\0",))
    assert not only(machine.expect(wanted, 0.0), Ready)
    first, second = KVShard((), 0, 1, 0, 3, True, True), KVShard((), 1, 1, 0, 3, False, True)
    machine.on_report(report(1, "p", chunks=(first,), count=2), 0.0)
    assert not only(machine.on_report(report(1, "p", chunks=(first,), stored=1, count=2), 0.0), Ready)
    actions = machine.on_report(report(1, "q", chunks=(second,), count=2), 0.0)
    (grant,) = [action.grant for action in actions if isinstance(action, Allow)]
    assert (grant.aux_slot, grant.state_slots) == (None, wanted.state_slots)
    assert only(machine.on_report(report(1, "q", chunks=(second,), stored=1, count=2), 0.0), Ready) == [Ready(1)]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"receive_backends": 0}, "receive_backends"),
        ({"lease_s": 1.0}, "lease_s"),
        ({"heartbeat_s": 0.1}, "heartbeat_s"),
        ({"retry_s": float("nan")}, "retry_s"),
        ({"stall_timeout_s": -1.0}, "stall_timeout_s"),
        ({"quarantine_s": None}, "quarantine_s"),
        ({"max_early_requests": 0}, "max_early_requests"),
    ],
)
def test_options_without_sense_are_named(values: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        HandshakeOptions(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"first_token": -1}, {"layer_count": 0}, {"slots": array("i", [1])}])
def test_needs_without_sense_are_refused(change: dict[str, object]) -> None:
    values: dict[str, object] = {
        "first_token": 0,
        "slots": array("I", [1]),
        "first_head": 0,
        "head_count": 1,
        "first_layer": 0,
        "layer_count": 1,
    }
    with pytest.raises(ValueError):
        needed(1, **{**values, **change})  # type: ignore[arg-type]
