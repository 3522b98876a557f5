"""A member does what it is ordered, one computation a turn; whatever fails, nothing of it stays behind."""

from __future__ import annotations

import os
import random
import time
from array import array
from collections.abc import Sequence

import pytest
import torch

from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.orders import Collect, DeclineReason, Drop, GiveUp, RollBack, RunChunk
from sglang_ext.long_pool.decide.sharding import Interleaving, KvSegment, gather, lay_out
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.member.pool_member import Collected, Declined
from sglang_ext.long_pool.messages import (
    CancelMessage,
    ChunkOrder,
    CollectOrder,
    DeclineMessage,
    FromMember,
    Peers,
    StepDone,
    StepFailed,
)
from support.memory_pool import FakeLink, MemoryMember, MemoryPool, Wires
from support.toy_engine import ToyEngine, ToyPool, kv_of

POOL_TOKENS = 512
REQUEST = 1  # the number of the first request that instance 0 offers
NO_KV = torch.empty(3, 2, 0, 1, 4)


def ids(tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(50) for _ in range(tokens))


def member(instance: int = 0, wires: Wires | None = None, tokens: int = POOL_TOKENS, page: int = 1) -> MemoryMember:
    return MemoryMember(instance, wires or Wires(), ToyPool(tokens, page))


def peers(count: int) -> Peers:
    return ((PeerAddress("nowhere", 1),),) * count


def sent(link: FakeLink, *kinds: type) -> list[FromMember]:
    return [message for message in link.sent if isinstance(message, kinds)]


def done(link: FakeLink) -> list[int]:
    """Sequences of the steps that it has reported as done."""
    return [message.sequence for message in link.sent if isinstance(message, StepDone)]


def is_idle(one: MemoryMember) -> bool:
    """After another turn, in which slots that a step was to be sent from are let go of."""
    one.turn()
    return not one.member.is_busy


def chunk(
    request: int,
    token_ids: Sequence[int],
    *,
    sequence: int = 1,
    group: tuple[int, ...] = (0,),
    instance: int = 0,
) -> ChunkOrder:
    """The whole prompt as one chunk; `token_ids` are those of the prompt."""
    layout, _ = lay_out({}, (range(len(token_ids)),), group, Interleaving.ZIGZAG)
    mine = array("i", (token_ids[p] for part in layout.new[group.index(instance)] for p in part))
    return ChunkOrder(RunChunk(sequence, request, layout, 0), mine, peers=peers(len(group)))


def collect(request: int, *, sequence: int = 2) -> CollectOrder:
    return CollectOrder(Collect(sequence, request, 0, (0,), (), 0), peers(1))


def test_a_prompt_alone() -> None:
    one = member()
    one.offer(ids(30), NO_KV)
    one.link.inbox.extend([chunk(REQUEST, ids(30)), collect(REQUEST), Drop(REQUEST, (0,))])
    one.turn()
    assert done(one.link) == [1], "one computation a turn"
    assert one.member.held_tokens == 30
    one.turn()
    assert done(one.link) == [1, 2]
    assert isinstance(one.ended[REQUEST], Collected)
    torch.testing.assert_close(one.kv[REQUEST], kv_of(ids(30)), atol=1e-4, rtol=0)
    assert one.pool.free_tokens == POOL_TOKENS
    assert is_idle(one)


def test_a_report_is_due_behind_each_step() -> None:
    """Short prompts may have come meanwhile, which the next chunk would keep waiting."""
    one = member()
    assert one.member.is_report_due(10.0)
    one.offer(ids(30), NO_KV)
    one.turn()
    assert not one.member.is_report_due(10.1)
    one.link.inbox.append(chunk(REQUEST, ids(30)))
    one.turn()
    assert done(one.link) == [1]
    assert one.member.is_report_due(10.1)


@pytest.mark.parametrize("answer", ["step", "decline", "none"])
def test_the_answer_to_an_offer_is_waited_for(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = member()
    listening, waking = os.pipe()
    monkeypatch.setattr(one.link, "wake_descriptor", listening, raising=False)
    one.offer(ids(30), NO_KV)
    assert not one.member.has_step
    assert one.member.await_step() == [], "nothing has come"
    if answer != "none":
        is_step = answer == "step"
        one.link.inbox.append(
            chunk(REQUEST, ids(30)) if is_step else DeclineMessage(REQUEST, DeclineReason.ALONE_IS_BEST, 0.0)
        )
        os.write(waking, b"x")
    outcomes = one.member.await_step()
    assert [type(outcome) for outcome in outcomes] == ([Declined] if answer == "decline" else [])
    assert one.member.has_step == (answer == "step")
    os.close(listening)
    os.close(waking)


def test_a_step_that_was_given_up_before_it_began_leaves_nothing() -> None:
    one = member()
    one.link.inbox.extend([chunk(REQUEST, ids(30)), GiveUp(1, (0,)), chunk(REQUEST, ids(30), sequence=2)])
    one.turn()
    (failed,) = sent(one.link, StepFailed)
    assert isinstance(failed, StepFailed)
    assert failed.sequence == 1
    one.turn()
    assert done(one.link) == [2]


def test_a_full_pool() -> None:
    one = member(tokens=16)
    one.offer(ids(30), NO_KV)
    one.link.inbox.extend([chunk(REQUEST, ids(30)), chunk(6, ids(30), sequence=2)])
    one.turn()
    one.turn()
    assert [message.sequence for message in sent(one.link, StepFailed)] == [1, 2]  # type: ignore[union-attr]
    assert one.pool.free_tokens == 16
    one.link.inbox.append(DeclineMessage(REQUEST, DeclineReason.FAILURES, 1.5))
    one.turn()
    assert one.ended == {REQUEST: Declined(REQUEST, DeclineReason.FAILURES, waited_s=1.5)}
    assert is_idle(one), "of request 6 nothing is held, and no message will end it"


def test_memory_that_the_model_cannot_have_fails_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = member()

    def forward(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("1 GiB is wanted")

    monkeypatch.setattr(ToyEngine, "forward", forward)
    one.link.inbox.append(chunk(REQUEST, ids(30)))
    one.turn()
    assert sent(one.link, StepFailed) == [
        StepFailed(1, "1 GiB is wanted", None, is_out_of_memory=True, free_kv_tokens=POOL_TOKENS, is_unsent=True)
    ]
    assert is_idle(one)
    monkeypatch.undo()
    one.link.inbox.append(chunk(REQUEST, ids(30), sequence=2))
    one.turn()
    assert done(one.link) == [2]


def test_memory_that_a_trial_cannot_have_fails_the_step_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    one = member()
    tried = []

    def try_workspace(engine: ToyEngine, rows: int, held_tokens: int) -> None:
        tried.append((rows, held_tokens))
        if rows > 20:
            raise torch.OutOfMemoryError("1 GiB is wanted\nhere is a long text")

    monkeypatch.setattr(ToyEngine, "try_workspace", try_workspace)
    one.link.inbox.append(chunk(REQUEST, ids(30)))
    one.turn()
    assert sent(one.link, StepFailed) == [
        StepFailed(1, "1 GiB is wanted", None, is_out_of_memory=True, free_kv_tokens=POOL_TOKENS, is_unsent=True)
    ]
    assert is_idle(one)
    one.link.inbox.append(chunk(REQUEST, ids(20), sequence=2))
    one.turn()
    assert (done(one.link), tried) == ([2], [(30, 30), (20, 20)])


def test_taken_back() -> None:
    one = member()
    one.link.inbox.append(chunk(REQUEST, ids(30)))
    one.turn()
    one.link.inbox.append(RollBack(1, REQUEST, (0,)))
    one.turn()
    assert one.pool.free_tokens == POOL_TOKENS
    one.link.inbox.append(Drop(REQUEST, (0,)))
    one.turn()
    assert is_idle(one)


@pytest.mark.slow
def test_a_peer_that_does_not_answer() -> None:
    one = member()
    one.link.inbox.append(chunk(REQUEST, ids(30), group=(0, 1)))
    one.turn()
    assert sent(one.link, StepFailed) == [StepFailed(1, "nothing has come", free_kv_tokens=POOL_TOKENS, is_unsent=True)]
    assert one.pool.free_tokens == POOL_TOKENS
    one.link.inbox.append(Drop(REQUEST, (0,)))
    one.turn()
    assert is_idle(one)


def test_withdrawn() -> None:
    one = member()
    one.offer(ids(30), NO_KV)
    one.link.inbox.append(chunk(REQUEST, ids(30)))
    one.turn()
    one.member.withdraw(REQUEST)
    assert sent(one.link, CancelMessage) == [CancelMessage(REQUEST)]
    one.link.inbox.append(collect(REQUEST))
    one.turn()
    assert (one.ended, one.member.held_tokens) == ({}, 30)
    one.link.inbox.append(Drop(REQUEST, (0,)))
    one.turn()
    assert (is_idle(one), one.pool.free_tokens) == (True, POOL_TOKENS)


def test_a_full_pool_at_the_hand_over() -> None:
    one = member(tokens=40, page=4)
    one.offer(ids(32), NO_KV)
    # The second chunk lies in whole pages, but not in those of the prompt.
    first, held = lay_out({}, (range(2),), (0,), Interleaving.ZIGZAG)
    second, _ = lay_out(held, (range(2, 32),), (0,), Interleaving.ZIGZAG)
    for sequence, layout in enumerate((first, second)):
        mine = array("i", (ids(32)[p] for part in layout.new[0] for p in part))
        one.link.inbox.append(ChunkOrder(RunChunk(sequence, REQUEST, layout, 0), mine, peers=peers(1)))
    one.link.inbox.append(collect(REQUEST))
    for _ in range(3):
        one.turn()
    assert [message.sequence for message in sent(one.link, StepFailed)] == [2]  # type: ignore[union-attr]
    assert (one.ended, one.member.held_tokens) == ({}, 36)
    one.link.inbox.extend([Drop(REQUEST, (0,)), DeclineMessage(REQUEST, DeclineReason.FAILURES, 0.0)])
    one.turn()
    assert one.ended == {REQUEST: Declined(REQUEST, DeclineReason.FAILURES, waited_s=0.0)}
    assert one.pool.free_tokens == 40


def test_abandoned() -> None:
    one = member()
    one.offer(ids(30), kv_of(ids(30))[:, :, :10])
    one.link.inbox.append(chunk(6, ids(30)))
    one.turn()
    one.link.welcome = None
    one.turn()
    assert one.ended == {REQUEST: Declined(REQUEST, DeclineReason.NOT_A_MEMBER)}
    assert (is_idle(one), one.pool.free_tokens) == (True, POOL_TOKENS)


def test_what_others_hold_comes_to_the_owner() -> None:
    """Two members, turn by turn: what the mesh carries waits in queues."""
    wires = Wires()
    owner, other = member(0, wires), member(1, wires)
    held = {1: (KvSegment((range(30),)),)}
    owner.offer(ids(30), NO_KV)
    other.link.inbox.append(chunk(REQUEST, ids(30), group=(1,), instance=1))
    order = CollectOrder(Collect(2, REQUEST, 0, (0, 1), gather(held, 0), 100), peers(2))
    for one in (owner, other):
        one.link.inbox.append(order)
    other.turn()
    other.turn()
    owner.turn()
    assert isinstance(owner.ended[REQUEST], Collected)
    torch.testing.assert_close(owner.kv[REQUEST], kv_of(ids(30)), atol=1e-4, rtol=0)
    other.link.inbox.append(Drop(REQUEST, (0, 1)))
    other.turn()
    assert owner.pool.free_tokens == other.pool.free_tokens == POOL_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_requests_of_several_members_end_right_whatever_fails(seed: int) -> None:
    draw = random.Random(seed)
    page = draw.choice((1, 4))
    wires = Wires(failure_rate=draw.choice((0.0, 0.003, 0.01)), seed=seed)
    costs = PoolCosts([SpCandidate(size, SpCost(0.0, 0.01 / size, 0.0, 0.0)) for size in (1, 2, 3)])
    settings = PoolSettings(
        draw.choice(list(Interleaving)), min_chunk_tokens=16, step_timeout_s=10.0, member_timeout_s=1e6
    )
    members = [member(instance, wires, tokens=640, page=page) for instance in range(3)]
    pool = MemoryPool(PoolProtocol(settings, costs), members, page)
    for number in range(1, 7):
        one = draw.choice(members)
        tokens = draw.randrange(5, 70) * 4
        cached_tokens = draw.choice((0, 0, 4 * draw.randrange(tokens // 4)))
        token_ids = ids(tokens, 100 * seed + number)
        one.offer(token_ids, kv_of(token_ids)[:, :, :cached_tokens])
    pool.run(lambda: all(len(one.ended) == len(one.offered) for one in members), timeout_s=60)
    for one in members:
        for request, kv in one.kv.items():
            token_ids, prefix = one.offered[request]
            start = prefix.numel()
            wanted = kv_of(token_ids)[:, :, start : start + kv.shape[2]]
            torch.testing.assert_close(kv, wanted, atol=1e-4, rtol=0)
    # What others hold of the last request is dropped in the turn after.
    deadline_s = time.monotonic() + 10
    while any(one.member.is_busy for one in members) and time.monotonic() < deadline_s:
        pool.deliver_messages()
        for one in members:
            one.turn()
    assert [one.pool.free_tokens for one in members] == [640, 640, 640]
    if wires.failure_rate == 0.0:
        assert any(isinstance(end, Collected) for one in members for end in one.ended.values())
