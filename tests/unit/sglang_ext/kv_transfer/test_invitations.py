"""Invitations reach prefill ranks whatever gets lost, and so do withdrawals."""

from __future__ import annotations

from array import array

from sglang_ext.kv_transfer.invitations import (
    DecodeRank,
    Invitation,
    InvitationSeen,
    ReceivedInvitations,
    SentInvitations,
)
from sglang_ext.policy.handshake.receive_request import Need, needed
from sglang_ext.policy.handshake.shards import HeadLayout, KVShard, TokenSpan

WHOLE = KVShard((TokenSpan(8, 10),), 0, 2, 0, 3)
RANK = DecodeRank(1, HeadLayout(kv_heads=3, tp_size=2, stored_kv_heads=4))
INVITATION = Invitation(1, "d", WHOLE, None, 8, RANK)
WITHDRAWAL = INVITATION._replace(withdrawn="gone")


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
    invitations.seen(InvitationSeen(1, "a", False))
    assert list(invitations.on_timer(1.0)) == [("b", INVITATION)]
    assert list(invitations.on_timer(1.5)) == []
    invitations.seen(InvitationSeen(1, "b", False))
    assert is_idle(invitations)
    assert list(invitations.on_timer(99.0)) == []


def test_an_invitation_tells_how_much_is_cached_also_when_it_is_everything() -> None:
    values = {"first_head": 0, "head_count": 2, "first_layer": 0, "layer_count": 3, "aux_slot": 4}
    cached = needed(1, first_token=12, slots=array("I"), **values)  # type: ignore[arg-type]
    ((_, invitation),) = sent().invite(cached, ["a"], 0.0)
    assert (invitation.whole.tokens, invitation.first_token) == ((), 12)


def test_a_withdrawal_goes_to_everybody_and_is_repeated_for_a_while() -> None:
    invitations = sent()
    list(invitations.invite(need(), ["a", "b"], 0.0))
    invitations.seen(InvitationSeen(1, "a", False))
    assert list(invitations.withdraw(1, "gone", 5.0)) == [("a", WITHDRAWAL), ("b", WITHDRAWAL)]
    assert list(invitations.withdraw(1, "gone again", 5.0)) == []
    invitations.seen(InvitationSeen(1, "b", False))  # of the invitation, late
    invitations.seen(InvitationSeen(1, "a", True))
    assert list(invitations.on_timer(6.0)) == [("b", WITHDRAWAL)]
    assert list(invitations.on_timer(15.0)) == []
    assert is_idle(invitations)


def test_a_withdrawal_that_all_have_acknowledged_is_forgotten() -> None:
    invitations = sent()
    list(invitations.invite(need(), ["a"], 0.0))
    list(invitations.withdraw(1, "gone", 0.0))
    invitations.seen(InvitationSeen(1, "a", True))
    invitations.seen(InvitationSeen(1, "a", True))
    assert list(invitations.withdraw(1, "gone", 0.0)) == []


def test_a_complete_request_needs_no_news() -> None:
    invitations = sent()
    list(invitations.invite(need(), ["a"], 0.0))
    invitations.finish(1)
    invitations.finish(2)
    assert list(invitations.on_timer(9.0)) == list(invitations.withdraw(1, "gone", 9.0)) == []


def test_what_has_arrived_is_kept_by_transfer_and_decode_rank() -> None:
    received = ReceivedInvitations(keep_s=10.0)
    other = INVITATION._replace(receiver="e")
    for invitation in (INVITATION, other, INVITATION):
        received.note(invitation, 0.0)
    assert received.of(1) == (INVITATION, other)
    received.note(WITHDRAWAL, 0.0)
    received.note(INVITATION, 0.0)
    assert received.of(1) == (WITHDRAWAL, other)
    received.forget(1)
    received.forget(1)
    assert received.of(1) == ()


def test_what_is_not_asked_for_is_forgotten_in_time() -> None:
    received = ReceivedInvitations(keep_s=10.0)
    received.note(INVITATION, 0.0)
    received.note(INVITATION._replace(transfer_id=2), 5.0)
    received.on_timer(9.9)
    assert received.of(1)
    received.on_timer(10.0)
    assert not received.of(1)
    assert received.of(2)
