"""How a prompt ends whose KV goes straight to decode: messages of the coordinator, and of the prompt's own member."""

from __future__ import annotations

import math
import random
from array import array

import pytest
import torch

from sglang_ext.identifiers import pool_request
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.coordinator.pool_history import PrefillEnd
from sglang_ext.long_pool.coordinator.pool_protocol import NewMember, PoolProtocol, PoolProtocolError
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix
from sglang_ext.long_pool.decide.orders import (
    Borrow,
    DeclineReason,
    Drop,
    DropKept,
    Keep,
    MemberReport,
    RunChunk,
)
from sglang_ext.long_pool.decide.sharding import Interleaving, lay_out
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.member.pool_member import Concluded, Declined, PoolMember, Sendable
from sglang_ext.long_pool.messages import (
    PROTOCOL_VERSION,
    AddressedMessage,
    CancelMessage,
    ChunkOrder,
    CollectOrder,
    Computed,
    DeclineMessage,
    Destination,
    FromMember,
    Hello,
    KeptLost,
    OfferMessage,
    StepDone,
    StepFailed,
    Streamed,
    StreamFailed,
    ToMember,
    Transferred,
    Welcome,
)
from sglang_ext.long_pool.step_clock import StepTimes
from sglang_ext.transfer.decide.shards import HeadLayout
from sglang_ext.waker import Waker
from support.memory_pool import FakeLink, MemoryMember, MemoryMeshes, Wires, member_turn
from support.toy_engine import HEAD_SIZE, KV_HEADS, LAYERS, ToyEngine, ToyPool, kv_of, logits_of

TIMES = StepTimes(1.0, 0.0, 0.0)
IDS = array("i", range(400))
WHERE = (Destination(9, "decode:1", 0, HeadLayout(2, 1, 2), 0),)
REQUEST = pool_request(0, 1)
LOGITS = array("f", [0.5, -math.inf, 2.0])


def begun(**settings: bool) -> tuple[PoolProtocol, int]:
    """A pool of two that computes a prompt of member 0 as one chunk; the sequence of that step."""
    costs = PoolCosts([SpCandidate(size, SpCost(0.0, 0.01 / size, 0.0, 0.0)) for size in (1, 2)])
    pool = PoolProtocol(PoolSettings(min_chunk_tokens=16)._replace(**settings), costs)
    for name in ("a", "b"):
        hello = Hello(PROTOCOL_VERSION, name, "node", "model", 2, 1, MemberReport(0.0, 10_000))
        answer = pool.greet(hello)
        assert isinstance(answer, NewMember)
        pool.join(answer.instance, hello, 1.0)
    out = pool.take(0, OfferMessage(REQUEST, IDS, 0, 0.0, None, WHERE), 3.0)
    chunks = [one.message for one in out if isinstance(one.message, ChunkOrder)]
    assert len(chunks) == 2
    return pool, chunks[0].chunk.sequence


def computed(**settings: bool) -> tuple[PoolProtocol, list[AddressedMessage]]:
    """A pool of two that has computed a prompt of member 0; what the coordinator has sent after the last answer."""
    pool, sequence = begun(**settings)
    pool.take(0, StepDone(sequence, TIMES, 9000), 4.0)
    return pool, pool.take(1, StepDone(sequence, TIMES, 9000, LOGITS), 5.0)


def test_logits_of_the_last_row_go_to_the_prompts_own_member() -> None:
    pool, out = computed()
    assert out == [AddressedMessage(0, Computed(REQUEST, LOGITS))]
    assert [one.computed_s for one in pool.status(5.0).requests] == [5.0]
    assert pool.status(5.0).requests_streamed == 0
    drops = pool.take(0, Transferred(REQUEST, 2.5, 0.5), 5.5)
    assert [(one.instance, type(one.message)) for one in drops] == [(0, Drop), (1, Drop)]
    status = pool.status(6.0)
    assert (status.requests_streamed, status.requests_collected, status.requests) == (1, 0, ())
    assert (status.recent[-1].outcome, status.recent[-1].transfer_s) == (PrefillEnd.STREAMED, 2.5)


def test_what_did_not_arrive_is_collected_and_its_member_is_told_not_to_rely_on_it() -> None:
    pool, _ = computed()
    first, *collects = pool.take(0, StreamFailed(REQUEST), 5.5)
    assert first == AddressedMessage(0, Streamed(REQUEST, 400, False))
    assert [type(one.message) for one in collects] == [CollectOrder, CollectOrder]
    for instance in (1, 0):
        pool.take(instance, StepDone(collects[0].message.collect.sequence, TIMES, 9000), 6.0)  # type: ignore[union-attr]
    status = pool.status(6.0)
    assert (status.requests_streamed, status.requests_collected) == (0, 1)


INTACT, BROKEN, AS_BEFORE = Streamed(REQUEST, 400, True), Streamed(REQUEST, 400, False), Streamed(REQUEST, 0, True)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # By answer: what the prompt's own member is sent. A chunk of which nothing was sent is ordered again.
        (("unsent", "unsent"), ([], [AS_BEFORE, INTACT])),
        (("unsent", "sent"), ([], [BROKEN])),
        (("sent", "unsent"), ([BROKEN], [])),
        (("done", "unsent"), ([], [BROKEN])),
        (("unsent", "done"), ([], [BROKEN])),
        (("done", "done"), ([], [])),
    ],
)
def test_what_a_failed_chunk_means_for_the_stream_depends_on_what_was_sent(
    answers: tuple[str, str], expected: tuple[list[Streamed], list[Streamed]], first: int
) -> None:
    pool, sequence = begun()
    for instance, answer, wanted in zip((first, 1 - first), answers, expected, strict=True):
        message = StepFailed(sequence, "no memory", is_unsent=answer == "unsent")
        out = pool.take(instance, StepDone(sequence, TIMES, 9000) if answer == "done" else message, 4.0)
        assert [one.message for one in out if isinstance(one.message, Streamed)] == wanted


def test_given_up_while_it_is_on_its_way() -> None:
    pool, _ = computed()
    assert [type(one.message) for one in pool.take(0, CancelMessage(REQUEST), 5.5)] == [Drop, Drop]
    assert pool.status(6.0).recent[-1].outcome is PrefillEnd.CANCELLED


def test_everything_can_be_collected() -> None:
    _, out = computed(collects=True)
    assert [type(one.message) for one in out] == [CollectOrder, CollectOrder]


def test_another_members_prompt_cannot_be_ended() -> None:
    pool, _ = computed()
    for message in (StreamFailed(REQUEST), Transferred(REQUEST, 1.0, 0.0)):
        with pytest.raises(PoolProtocolError, match="does not belong to instance 1"):
            pool.take(1, message, 5.5)


# ---------------------------------------------------------------- a member


def ids(tokens: int) -> tuple[int, ...]:
    draw = random.Random(tokens)
    return tuple(draw.randrange(50) for _ in range(tokens))


def member() -> MemoryMember:
    return MemoryMember(0, Wires(), ToyPool(256))


def last_chunk(request: int, *, is_last: bool = True) -> ChunkOrder:
    layout, _ = lay_out({}, (range(30),), (0,), Interleaving.ZIGZAG)
    return ChunkOrder(
        RunChunk(1, request, layout, 0, is_last), array("i", ids(30)), peers=((PeerAddress("nowhere", 1),),)
    )


def sent(one: MemoryMember, kind: type) -> list[object]:
    return [message for message in one.link.sent if isinstance(message, kind)]


def offered(*orders: ToMember) -> MemoryMember:
    """A member that has offered a prompt, and what came of it then."""
    one = member()
    one.offer(ids(30), torch.empty(LAYERS, 2, 0, KV_HEADS, HEAD_SIZE))
    one.link.inbox.extend(orders)
    return one


def test_a_first_token_does_not_wait_for_the_chunk_of_another_prompt() -> None:
    one = offered(Streamed(REQUEST, 30, True), last_chunk(REQUEST))
    member_turn(one.member)
    one.link.inbox.extend([Computed(REQUEST, None), last_chunk(REQUEST + 1)])
    (outcome,) = one.member.take_orders()
    assert isinstance(outcome, Sendable)
    assert len(sent(one, StepDone)) == 1, "the next chunk has not begun"
    assert one.member.compute() == []
    assert len(sent(one, StepDone)) == 2


class AnsweringLink(FakeLink):
    """Has the coordinator's answer to a step as soon as that is done."""

    def __init__(self) -> None:
        super().__init__()
        self._waker = Waker()
        self.wake_descriptor = self._waker.descriptor

    def session(self) -> Welcome | None:
        self._waker.drain()
        return super().session()

    def send(self, message: FromMember) -> None:
        super().send(message)
        if isinstance(message, StepDone):
            self._waker.notify()  # of something else; the answer comes then
            self.inbox.append(Computed(REQUEST, None))


def test_a_first_token_does_not_wait_for_the_engines_next_batch() -> None:
    one = member()
    link = one.link = AnsweringLink()
    one.member = PoolMember(ToyEngine(one.pool), link, MemoryMeshes(Wires()))
    member_turn(one.member)
    one.offer(ids(30), torch.empty(LAYERS, 2, 0, KV_HEADS, HEAD_SIZE))
    link.inbox.extend([Streamed(REQUEST, 30, True), last_chunk(REQUEST)])
    assert one.member.take_orders() == []
    (outcome,) = one.member.compute()
    assert isinstance(outcome, Sendable)


def test_logits_that_the_prompts_own_member_has_computed_do_not_travel() -> None:
    one = offered(Streamed(REQUEST, 30, True), last_chunk(REQUEST))
    assert member_turn(one.member) == []
    (done,) = sent(one, StepDone)
    assert isinstance(done, StepDone)
    assert (done.logits, done.free_kv_tokens) == (None, 256 - 30)
    one.link.inbox.append(Computed(REQUEST, None))
    (outcome,) = member_turn(one.member)
    assert isinstance(outcome, Sendable)
    torch.testing.assert_close(outcome.logits, logits_of(ids(30)), atol=1e-4, rtol=0)
    assert one.member.held_tokens == 30, "kept until it is at decode"
    assert one.member.transferred(REQUEST, 2.0, 1.0), "its cached prefix is still wanted"
    assert sent(one, Transferred) == [Transferred(REQUEST, 2.0, 1.0)]
    one.link.inbox.append(Drop(REQUEST, (0,)))
    assert member_turn(one.member) == [Concluded(REQUEST)]
    assert member_turn(one.member) == []
    assert (one.pool.free_tokens, one.member.is_busy) == (256, False)


def at_decode() -> MemoryMember:
    """A member whose prompt of 30 tokens is at decode."""
    one = offered(Streamed(REQUEST, 30, True), last_chunk(REQUEST), Computed(REQUEST, None))
    member_turn(one.member)
    member_turn(one.member)
    assert one.member.transferred(REQUEST, 2.0, 1.0)
    return one


def test_what_is_kept_is_there_for_the_next_prompt_and_for_nobody_else() -> None:
    one = at_decode()
    one.link.inbox.append(Keep(REQUEST, (0,), 0, 24))
    assert member_turn(one.member) == [Concluded(REQUEST)]
    assert (one.member.is_busy, one.pool.free_tokens, one.member.kept.evictable_tokens) == (False, 256, 24)
    other = pool_request(3, 1)
    one.link.inbox.append(Borrow(other, (0,), (KeptPrefix(REQUEST, 16),), 0))
    assert member_turn(one.member) == []
    assert (one.member.is_busy, one.member.kept.evictable_tokens) == (True, 0)
    shard = one.member._shards[other]
    torch.testing.assert_close(one.pool.kv(shard.slots), kv_of(ids(30))[:, :, :16], atol=1e-4, rtol=0)
    one.link.inbox.append(DropKept(REQUEST, (0,)))
    assert member_turn(one.member) == []
    assert one.pool.free_tokens == 256 - 24, "it is read"
    one.link.inbox.append(Drop(other, (0,)))
    assert member_turn(one.member) == []
    assert (one.pool.free_tokens, one.member.is_busy) == (256, False)


def test_the_pool_knows_what_has_made_way() -> None:
    one = at_decode()
    one.link.inbox.append(Keep(REQUEST, (0,), 0, 24))
    member_turn(one.member)
    assert one.member.kept.evict(1) == 24
    assert sent(one, KeptLost) == [KeptLost((REQUEST,))]
    other = pool_request(3, 1)
    one.link.inbox.append(Borrow(other, (0,), (KeptPrefix(REQUEST, 16),), 0))
    assert member_turn(one.member) == []
    assert (one.pool.free_tokens, one.member.is_busy) == (256, False)


def test_a_shard_that_is_gone_is_not_kept() -> None:
    one = at_decode()
    one.member._drop(REQUEST)
    one.link.inbox.append(Keep(REQUEST, (0,), 0, 24))
    assert member_turn(one.member) == [Concluded(REQUEST)]
    assert sent(one, KeptLost) == [KeptLost((REQUEST,))]


def test_what_is_kept_is_dropped_when_the_coordinator_goes() -> None:
    one = at_decode()
    one.link.welcome = None
    assert member_turn(one.member) == [Concluded(REQUEST)]
    assert one.pool.free_tokens == 256
    other = at_decode()
    other.link.inbox.append(Keep(REQUEST, (0,), 0, 24))
    member_turn(other.member)
    other.link.welcome = None
    assert member_turn(other.member) == []
    assert other.pool.free_tokens == 256


def test_only_what_the_pool_has_is_kept() -> None:
    one = at_decode()
    assert not one.member.transferred(REQUEST, 2.0, 1.0)
    assert not one.member.transferred(pool_request(7, 1), 2.0, 1.0)


@pytest.mark.parametrize("is_last", [True, False])
def test_another_member_brings_them_where_they_are_wanted(is_last: bool) -> None:
    one = member()
    one.link.inbox.append(last_chunk(pool_request(3, 1), is_last=is_last))
    member_turn(one.member)
    (done,) = sent(one, StepDone)
    assert isinstance(done, StepDone)
    if is_last:
        assert done.logits is not None
        torch.testing.assert_close(torch.tensor(done.logits), logits_of(ids(30)), atol=1e-4, rtol=0)
    else:
        assert done.logits is None


def test_logits_of_another_member() -> None:
    one = offered(Streamed(REQUEST, 30, True), Computed(REQUEST, LOGITS))
    (outcome,) = member_turn(one.member)
    assert isinstance(outcome, Sendable)
    assert outcome.logits.tolist() == list(LOGITS)
    assert outcome.streamed == Streamed(REQUEST, 30, True)


def test_without_logits_it_has_to_be_collected() -> None:
    one = offered(Streamed(REQUEST, 30, True), Computed(REQUEST, None))
    assert member_turn(one.member) == []
    assert sent(one, StreamFailed) == [StreamFailed(REQUEST)]


def test_a_prompt_that_has_ended_meanwhile_is_not_sampled() -> None:
    one = offered(Streamed(REQUEST, 30, True), Computed(REQUEST, LOGITS))
    one.member.withdraw(REQUEST)
    assert member_turn(one.member) == []


def test_what_is_on_its_way_comes_back_when_the_coordinator_goes_or_gives_it_up() -> None:
    one = offered(Streamed(REQUEST, 30, True), Computed(REQUEST, LOGITS))
    member_turn(one.member)
    one.link.inbox.append(DeclineMessage(REQUEST, DeclineReason.NO_ROOM, 0.0))
    assert member_turn(one.member) == [Declined(REQUEST, DeclineReason.NO_ROOM, Streamed(REQUEST, 30, True), 0.0)]
    other = offered(Streamed(REQUEST, 30, True), Computed(REQUEST, LOGITS))
    member_turn(other.member)
    other.link.welcome = None
    assert member_turn(other.member) == [Declined(REQUEST, DeclineReason.NOT_A_MEMBER, Streamed(REQUEST, 30, True))]


def test_another_coordinator_is_not_told_of_it() -> None:
    one = offered(Streamed(REQUEST, 30, True), Computed(REQUEST, LOGITS))
    member_turn(one.member)
    one.link.welcome = Welcome(5, 16 * "cd", 1.0)
    member_turn(one.member)
    one.link.sent.clear()
    one.member.transferred(REQUEST, 1.0, 0.5)
    one.member.withdraw(REQUEST)
    one.member.stream_failed(REQUEST)
    assert not one.link.sent
