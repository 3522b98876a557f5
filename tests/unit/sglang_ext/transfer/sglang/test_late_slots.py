"""What prefill counts as work before a long prompt, whom it calls, and what its load reports say of those that wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_ext.transfer.decide.shards import KVShard
from sglang_ext.transfer.decide.slot_calls import SlotCalls
from sglang_ext.transfer.endpoint.invitations import Invitation

pytestmark = pytest.mark.usefixtures("sglang_imported")

INVITATION = Invitation(0, "decode", KVShard((), 0, 2, 0, 3), None, has_slots=False)


def request(arrival_s: float, tokens: int, computed_tokens: int = 0, sender: Any = None) -> Any:
    return SimpleNamespace(
        origin_input_ids=[1] * tokens,
        prefix_len=computed_tokens,
        disagg_kv_sender=sender,
        time_stats=SimpleNamespace(prefill_bootstrap_queue_entry_time=arrival_s),
    )


def late(room: int, arrival_s: float, tokens: int, *invitations: Invitation) -> Any:
    from sglang_ext.transfer.sglang.sender import HandshakeKVSender

    sender: Any = object.__new__(HandshakeKVSender)
    sender.bootstrap_room = room
    sender._outgoing = None
    sender.kv_mgr = SimpleNamespace(endpoint=SimpleNamespace(invitations=lambda _: invitations))
    return request(arrival_s, tokens, sender=sender)


def call(waiting: list[Any], *work: Any, chunked: Any = None, parked: tuple[Any, ...] = (), leads: bool = True) -> Any:
    """Rooms that are called in one round."""
    from sglang_ext.transfer.sglang.late_slots import call_for_slots

    called: list[int] = []
    manager = SimpleNamespace(
        slot_calls=SlotCalls(500) if leads else None, endpoint=SimpleNamespace(call_for_slots=called.append)
    )
    scheduler = SimpleNamespace(waiting_queue=list(work), chunked_req=chunked, held_requests=lambda: list(parked))
    queue = SimpleNamespace(kv_manager=manager, queue=waiting, scheduler=scheduler)
    assert call_for_slots(lambda one: one.queue, queue) is waiting
    return called


@pytest.mark.full
def test_what_is_queued_parked_or_in_chunks_is_before_it() -> None:
    prompt = late(7, 5.0, 1000, INVITATION)
    chunked, parked = request(1.0, 1000, 800), request(2.0, 1000, 801)
    assert call([prompt], request(3.0, 100), chunked=chunked, parked=(parked, chunked)) == [7]
    assert call([prompt], request(3.0, 102), chunked=chunked, parked=(parked, chunked)) == []
    assert call([prompt], request(6.0, 10_000)) == [7]


def test_only_those_that_decode_knows_and_has_no_slots_for_are_called() -> None:
    with_slots = late(1, 1.0, 1000, msgspec.structs.replace(INVITATION, has_slots=True))
    withdrawn = late(2, 2.0, 1000, msgspec.structs.replace(INVITATION, withdrawn="gone"))
    assert call([request(0.0, 5), with_slots, withdrawn, late(3, 3.0, 1000), late(4, 4.0, 10, INVITATION)]) == [4]


def test_one_rank_decides() -> None:
    assert call([late(7, 5.0, 1000, INVITATION)], leads=False) == []


def test_their_tokens_wait_in_load_reports() -> None:
    from sglang_ext.transfer.sglang.late_slots import late_tokens

    queue = SimpleNamespace(queue=[request(0.0, 5), late(1, 1.0, 1000, INVITATION), late(2, 2.0, 70), request(1.0, 3)])
    assert late_tokens(queue) == 1000


def watched(answers: list[str | None], times_s: list[float], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sender whose decode rank has no slots yet, polled at these times; what it asked, and what failed."""
    from sglang_ext.transfer.sglang import sender as sender_module

    asked: list[tuple[str, float, int | None]] = []
    failed: list[tuple[int, str]] = []

    def loss_reason(receiver: str, waited_s: float, epoch: int | None) -> str | None:
        asked.append((receiver, waited_s, epoch))
        return answers[len(asked) - 1]

    invitation = msgspec.structs.replace(INVITATION, epoch=3)
    sender = late(7, 0.0, 1000, invitation).disagg_kv_sender
    sender._made_s, sender._watched_s, sender.init_time = 10.0, float("-inf"), 0.0
    endpoint = SimpleNamespace(invitations=lambda _: (invitation,), loss_reason=loss_reason)
    sender.kv_mgr = SimpleNamespace(endpoint=endpoint, fail=lambda room, reason: failed.append((room, reason)))
    for now_s in times_s:
        monkeypatch.setattr(sender_module.time, "perf_counter", lambda now_s=now_s: now_s)
        sender._advance()
    monkeypatch.undo()
    return asked, failed, sender.init_time


def test_one_that_waits_is_not_timed_out_and_its_decode_rank_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = [10.0, 10.1, 10.4, 10.6, 11.2]
    asked, failed, init_time_s = watched([None, None, "lost decode"], times_s, monkeypatch)
    assert [(receiver, round(waited_s, 6), epoch) for receiver, waited_s, epoch in asked] == [
        ("decode", 0.0, 3),
        ("decode", 0.6, 3),
        ("decode", 1.2, 3),
    ]
    assert failed == [(7, "lost decode")]
    assert init_time_s > 0
