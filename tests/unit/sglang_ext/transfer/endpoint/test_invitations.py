"""Invitations reach prefill ranks whatever gets lost, and so do withdrawals."""

from __future__ import annotations

from array import array

import msgspec

from sglang_ext.transfer.decide.receive_request import Need, needed
from sglang_ext.transfer.decide.shards import HeadLayout, KVShard, TokenSpan
from sglang_ext.transfer.endpoint.invitations import (
    DecodeRank,
    Invitation,
    InvitationSeen,
    ReceivedInvitations,
    SentInvitations,
    SlotCall,
)

WHOLE = KVShard((TokenSpan(8, 10),), 0, 2, 0, 3)
RANK = DecodeRank(1, HeadLayout(kv_heads=3, tp_size=2, stored_kv_heads=4))
INVITATION = Invitation(1, "d", WHOLE, None, 8, RANK)
WITHDRAWAL = msgspec.structs.replace(INVITATION, withdrawn="gone")
WITHOUT_SLOTS = msgspec.structs.replace(INVITATION, has_slots=False)
CALL = SlotCall(1, "a")


def need(transfer_id: int = 1) -> Need:
    return needed(
        transfer_id, first_token=8, slots=array("I", [5, 6]), first_head=0, head_count=2, first_layer=0, layer_count=3
    )


def sent() -> SentInvitations:
    return SentInvitations("d", retry_s=1.0, give_up_s=10.0, decode_rank=RANK)


def is_idle(invitations: SentInvitations) -> bool:
    return invitations.is_idle


def test_an_invitation_is_retransmitted_until_it_is_acknowledged() -> None:
    invitations = sent()
    assert is_idle(invitations)
    assert list(invitations.invite(need(), ["a", "b"], 0.0)) == [("a", INVITATION), ("b", INVITATION)]
    assert not is_idle(invitations)
    assert list(invitations.on_timer(0.9)) == []
    assert list(invitations.seen(InvitationSeen(1, "a", False), 0.0)) == []
    assert list(invitations.on_timer(1.0)) == [("b", INVITATION)]
    assert list(invitations.on_timer(1.5)) == []
    assert list(invitations.seen(InvitationSeen(1, "b", False), 0.0)) == []
    assert is_idle(invitations)
    assert list(invitations.on_timer(99.0)) == []


def test_an_invitation_tells_how_much_is_cached_also_when_it_is_everything() -> None:
    values = {"first_head": 0, "head_count": 2, "first_layer": 0, "layer_count": 3, "aux_slot": 4}
    cached = needed(1, first_token=12, slots=array("I"), **values)  # type: ignore[arg-type]
    ((_, invitation),) = sent().invite(cached, ["a"], 0.0)
    assert (invitation.whole.tokens, invitation.first_token) == ((), 12)


def test_the_first_stage_is_invited_when_all_others_have_acknowledged() -> None:
    invitations = sent()
    assert list(invitations.invite(need(), ["a", "b", "c"], 0.0, last=["a"])) == [("b", INVITATION), ("c", INVITATION)]
    assert list(invitations.seen(InvitationSeen(1, "b", False), 0.1)) == []
    assert list(invitations.on_timer(1.0)) == [("c", INVITATION)]
    assert list(invitations.seen(InvitationSeen(1, "b", False), 1.1)) == []  # again
    assert list(invitations.seen(InvitationSeen(1, "c", False), 1.2)) == [("a", INVITATION)]
    assert list(invitations.seen(InvitationSeen(1, "c", False), 1.3)) == []
    assert list(invitations.on_timer(2.1)) == []
    assert list(invitations.on_timer(2.2)) == [("a", INVITATION)]
    assert list(invitations.seen(InvitationSeen(1, "a", False), 2.3)) == []
    assert is_idle(invitations)
    # What it has not been invited to is withdrawn there as well.
    list(invitations.invite(need(2), ["a", "b"], 3.0, last=["a"]))
    assert [address for address, _ in invitations.withdraw(2, "gone", 3.1)] == ["a", "b"]
    assert list(invitations.seen(InvitationSeen(2, "b", True), 3.2)) == []
    # In stages of several ranks, and without slots.
    first = list(invitations.invite(need(), ["a", "b", "c", "d"], 4.0, has_slots=False, last=["a", "c"]))
    assert first == [("b", WITHOUT_SLOTS), ("d", WITHOUT_SLOTS)]
    assert list(invitations.seen(InvitationSeen(1, "d", False, has_slots=False), 4.1)) == []
    assert list(invitations.seen(InvitationSeen(1, "b", False, has_slots=False), 4.1)) == [
        ("a", WITHOUT_SLOTS),
        ("c", WITHOUT_SLOTS),
    ]


def test_a_withdrawal_goes_to_everybody_and_is_repeated_for_a_while() -> None:
    invitations = sent()
    list(invitations.invite(need(), ["a", "b"], 0.0))
    assert list(invitations.seen(InvitationSeen(1, "a", False), 0.0)) == []
    assert list(invitations.withdraw(1, "gone", 5.0)) == [("a", WITHDRAWAL), ("b", WITHDRAWAL)]
    assert list(invitations.withdraw(1, "gone again", 5.0)) == []
    assert list(invitations.seen(InvitationSeen(1, "b", False), 0.0)) == []  # of the invitation, late
    assert list(invitations.seen(InvitationSeen(1, "a", True), 0.0)) == []
    assert list(invitations.on_timer(6.0)) == [("b", WITHDRAWAL)]
    assert list(invitations.on_timer(15.0)) == []
    assert is_idle(invitations)


def test_a_withdrawal_that_all_have_acknowledged_is_forgotten() -> None:
    invitations = sent()
    list(invitations.invite(need(), ["a"], 0.0))
    list(invitations.withdraw(1, "gone", 0.0))
    assert list(invitations.seen(InvitationSeen(1, "a", True), 0.0)) == []
    assert list(invitations.seen(InvitationSeen(1, "a", True), 0.0)) == []
    assert list(invitations.withdraw(1, "gone", 0.0)) == []


def test_a_complete_request_needs_no_news() -> None:
    invitations = sent()
    list(invitations.invite(need(), ["a"], 0.0))
    invitations.finish(1)
    invitations.finish(2)
    assert list(invitations.on_timer(9.0)) == list(invitations.withdraw(1, "gone", 9.0)) == []


def test_what_has_arrived_is_kept_by_transfer_and_decode_rank() -> None:
    received = ReceivedInvitations(keep_s=10.0)
    other = msgspec.structs.replace(INVITATION, receiver="e")
    for invitation in (INVITATION, other, INVITATION):
        received.record(invitation, 0.0)
    assert received.of(1) == (INVITATION, other)
    received.record(WITHDRAWAL, 0.0)
    received.record(INVITATION, 0.0)
    assert received.of(1) == (WITHDRAWAL, other)
    received.forget(1)
    received.forget(1)
    assert received.of(1) == ()


def test_what_is_not_asked_for_is_forgotten_in_time() -> None:
    received = ReceivedInvitations(keep_s=10.0)
    received.record(INVITATION, 0.0)
    received.record(msgspec.structs.replace(INVITATION, transfer_id=2), 5.0)
    received.on_timer(9.9)
    assert received.of(1)
    received.on_timer(10.0)
    assert not received.of(1)
    assert received.of(2)


def test_an_invitation_without_slots_is_repeated_until_it_is_followed_by_one_with_them() -> None:
    invitations = sent()
    assert list(invitations.invite(need(), ["a"], 0.0, has_slots=False)) == [("a", WITHOUT_SLOTS)]
    assert invitations.call_of(1) is None
    assert list(invitations.on_timer(1.0)) == [("a", WITHOUT_SLOTS)]  # not acknowledged
    assert list(invitations.seen(InvitationSeen(1, "a", False, has_slots=False), 0.0)) == []
    assert list(invitations.on_timer(5.9)) == []
    assert list(invitations.on_timer(6.0)) == [("a", WITHOUT_SLOTS)]  # it still holds
    assert not is_idle(invitations)
    assert list(invitations.seen(InvitationSeen(1, "a", False, has_slots=False), 0.0)) == []
    assert invitations.on_call(CALL)
    assert invitations.call_of(1) == CALL
    assert list(invitations.invite(need(), ["a"], 7.0)) == [("a", INVITATION)]
    assert not invitations.on_call(CALL)
    assert list(invitations.seen(InvitationSeen(1, "a", False, has_slots=False), 0.0)) == []  # of the first one, late
    assert list(invitations.on_timer(8.0)) == [("a", INVITATION)]
    assert list(invitations.seen(InvitationSeen(1, "a", False), 0.0)) == []
    assert list(invitations.on_timer(99.0)) == []
    assert is_idle(invitations)


def test_the_first_call_counts_and_the_end_of_the_request_counts_for_more() -> None:
    invitations = sent()
    list(invitations.invite(need(), ["a", "b"], 0.0, has_slots=False))
    given_up = SlotCall(1, "b", "aborted")
    for call, answer in ((CALL, CALL), (SlotCall(1, "b"), SlotCall(1, "b")), (given_up, given_up), (CALL, given_up)):
        assert invitations.on_call(call)
        assert invitations.call_of(1) == answer
    assert not invitations.on_call(SlotCall(2, "a"))
    assert invitations.call_of(2) is None
    list(invitations.withdraw(1, "gone", 1.0))
    assert not invitations.on_call(CALL)


def test_a_call_answers_each_invitation_without_slots_and_those_that_follow() -> None:
    received = ReceivedInvitations(keep_s=10.0)
    other = msgspec.structs.replace(WITHOUT_SLOTS, receiver="e")
    assert received.call(CALL) == []  # no rank has invited
    assert received.record(WITHOUT_SLOTS, 0.0) is None
    assert received.call(CALL) == [("d", CALL)]
    assert received.record(other, 0.0) == CALL
    assert received.record(INVITATION, 0.0) is None
    assert received.record(WITHOUT_SLOTS, 0.0) == CALL  # repeated late: does not undo the one with slots
    assert received.of(1) == (INVITATION, other)
    assert received.call(CALL) == [("e", CALL)]
    assert received.record(msgspec.structs.replace(other, withdrawn="gone"), 0.0) is None
    received.forget(1)
    assert received.record(WITHOUT_SLOTS, 0.0) is None


def test_a_request_that_waits_is_kept_as_long_as_its_invitation_is_repeated() -> None:
    received = ReceivedInvitations(keep_s=10.0)
    received.record(WITHOUT_SLOTS, 0.0)
    received.record(msgspec.structs.replace(INVITATION, transfer_id=2), 1.0)
    received.record(WITHOUT_SLOTS, 6.0)
    received.on_timer(11.0)
    assert received.of(1)
    assert not received.of(2)
    received.on_timer(16.0)
    assert not received.of(1)
