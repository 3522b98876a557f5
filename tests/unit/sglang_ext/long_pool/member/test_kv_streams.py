"""KV of shared prompts comes to decode from everybody who computes it, once, and whatever fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.coordinator.pool_history import StepKind
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.orders import DeclineReason, Drop, RollBack, RunChunk
from sglang_ext.long_pool.decide.sharding import Interleaving, lay_out
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.member.kv_streams import Pin, PinnedPool
from sglang_ext.long_pool.member.pool_member import Declined
from sglang_ext.long_pool.member.shard import KvPoolFullError
from sglang_ext.long_pool.messages import ChunkOrder, Destination, StepFailed, Streamed, Welcome
from sglang_ext.transfer.decide.protocol import TransferOutcome
from support.examples import examples
from support.handshake_process import wait_until
from support.memory_pool import MemoryPool, Wires
from support.streaming_pool import HEADS, Decode, StreamingMember, check_kept
from support.toy_engine import LAYERS, ToyPool, kv_of, logits_of

POOL_TOKENS = 640
ROOM = 7
Make = Callable[..., StreamingMember]


def ids(tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(50) for _ in range(tokens))


@pytest.fixture
def decode() -> Iterator[Decode]:
    one = Decode()
    yield one
    one.endpoint.close()


@pytest.fixture
def make(decode: Decode) -> Iterator[Make]:
    with ExitStack() as stack:

        def begin(
            instance: int = 0,
            wires: Wires | None = None,
            page: int = 1,
            on_layer: Callable[[int], None] = lambda layer: None,
        ) -> StreamingMember:
            one = StreamingMember(instance, wires or Wires(), ToyPool(POOL_TOKENS, page), decode, on_layer)
            stack.callback(one.close)
            return one

        yield begin


def order(one: StreamingMember, tokens: int, first_token: int = 0) -> ChunkOrder:
    """A chunk of a prompt of another instance, which this one computes alone."""
    layout, _ = lay_out({}, (range(tokens),), (0,), Interleaving.ZIGZAG)
    destination = Destination(ROOM, one.decode.endpoint.address, 0, HEADS, first_token)
    return ChunkOrder(RunChunk(1, 5, layout, 0), ids(tokens), (destination,), peers=((PeerAddress("nowhere", 1),),))


def turns_until(members: list[StreamingMember], condition: Callable[[], bool]) -> None:
    def turn() -> bool:
        for one in members:
            one.turn()
        members[0].decode.turn()
        return condition()

    wait_until(turn)


@pytest.mark.slow
def test_a_layer_is_stored_while_later_ones_are_computed(make: Make, decode: Decode) -> None:
    stored_at_layer: list[int] = []
    members: list[StreamingMember] = []

    def on_layer(layer: int) -> None:
        if layer == LAYERS - 1:
            wait_until(lambda: members[0].endpoint.totals().writes >= 1)
            stored_at_layer.append(layer)

    helper = make(on_layer=on_layer)
    members.append(helper)
    decode.expect(ROOM, 4, 40, "127.0.0.1:1")
    helper.link.inbox.append(order(helper, 40, first_token=4))
    helper.turn()
    assert stored_at_layer == [LAYERS - 1]
    turns_until(members, lambda: decode.requests[ROOM].outcome is not None)
    torch.testing.assert_close(decode.requests[ROOM].kv, kv_of(ids(40))[:, :, 4:], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_slots_stay_taken_until_they_have_been_read(make: Make, decode: Decode) -> None:
    helper = make(page=4)
    helper.link.inbox.append(order(helper, 40))
    helper.turn()
    helper.link.inbox.append(Drop(5, (0,)))
    helper.turn()
    assert helper.member.is_busy
    assert helper.member.held_tokens == 40
    assert helper.pool.free_tokens == POOL_TOKENS - 40
    decode.expect(ROOM, 0, 40, "127.0.0.1:1")
    turns_until([helper], lambda: helper.pool.free_tokens == POOL_TOKENS)
    assert not helper.member.is_busy
    turns_until([helper], lambda: decode.requests[ROOM].outcome is TransferOutcome.COMPLETE)
    torch.testing.assert_close(decode.requests[ROOM].kv, kv_of(ids(40)), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_chunk_that_is_taken_back_begins_the_transfer_anew(make: Make, decode: Decode) -> None:
    helper = make()
    decode.expect(ROOM, 0, 50, "127.0.0.1:1")
    helper.link.inbox.append(order(helper, 40))
    helper.turn()
    helper.link.inbox.append(RollBack(1, 5, (0,)))
    turns_until([helper], lambda: decode.requests[ROOM].attempts == 2)
    turns_until([helper], lambda: helper.pool.free_tokens == POOL_TOKENS)


@pytest.mark.slow
def test_numbers_come_again_under_another_coordinator(make: Make, decode: Decode) -> None:
    helper = make()
    helper.link.inbox.append(order(helper, 40))  # no slots yet
    helper.turn()
    helper.link.welcome = Welcome(0, 16 * "cd", 1.0)
    helper.turn()
    assert helper.ended == {}
    again = order(helper, 40)
    (destination,) = again.destinations
    decode.expect(ROOM + 1, 0, 40, "127.0.0.1:1")
    helper.link.inbox.append(again._replace(destinations=(destination._replace(room=ROOM + 1),)))
    turns_until([helper], lambda: decode.requests[ROOM + 1].outcome is TransferOutcome.COMPLETE)
    helper.link.inbox.append(Drop(5, (0,)))
    turns_until([helper], lambda: helper.pool.free_tokens == POOL_TOKENS)


def test_a_member_that_cannot_send_fails_the_chunk(make: Make) -> None:
    helper = make()
    helper.endpoint.close()
    helper.link.inbox.append(order(helper, 40))
    helper.turn()
    (failed,) = (message for message in helper.link.sent if isinstance(message, StepFailed))
    assert "cannot send to" in failed.reason
    helper.turn()
    assert helper.pool.free_tokens == POOL_TOKENS


def test_without_a_coordinator_what_was_sent_is_sent_anew(make: Make, decode: Decode) -> None:
    owner = make()
    owner.offer_streamed(1, ids(60), cached_tokens=10, first_token=4)
    owner.link.inbox.append(Streamed(1, 40, True))
    owner.turn()
    owner.link.welcome = None
    owner.turn()
    assert owner.ended == {1: Declined(1, DeclineReason.NOT_A_MEMBER, Streamed(1, 40, True))}
    turns_until([owner], lambda: decode.requests[1].outcome is not None)
    assert (decode.requests[1].outcome, decode.requests[1].attempts) == (TransferOutcome.COMPLETE, 2)
    torch.testing.assert_close(decode.requests[1].kv, kv_of(ids(60))[:, :, 4:], atol=1e-4, rtol=0)


@pytest.mark.slow
# Pages of both sizes, with failures and without, with rows that are kept and without.
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in (0, 3, 5, 7) else pytest.mark.full) for seed in range(9)]
)
def test_prompts_of_several_members_arrive_whatever_fails(make: Make, decode: Decode, seed: int) -> None:
    draw = random.Random(seed)
    page = draw.choice((1, 4))
    wires = Wires(failure_rate=draw.choice((0.0, 0.0, 0.003, 0.01)), seed=seed)
    costs = PoolCosts([SpCandidate(size, SpCost(0.0, 0.01 / size, 0.0, 0.0)) for size in (1, 2, 3)])
    settings = PoolSettings(
        draw.choice(list(Interleaving)),
        min_chunk_tokens=16,
        step_timeout_s=10.0,
        member_timeout_s=1e6,
        keeps_rows=seed % 3 > 0,
        block_tokens=16,
    )
    members = [make(instance, wires, page) for instance in range(3)]
    protocol = PoolProtocol(settings, costs)
    pool = MemoryPool(protocol, members, page)
    prompts: dict[int, tuple[tuple[int, ...], int]] = {}
    for number in range(1, 7):
        one = draw.choice(members)
        tokens = draw.randrange(5, 50) * 4
        cached_tokens = draw.choice((0, 0, 4 * draw.randrange(tokens // 4)))
        first_token = draw.choice((0, 0, 4 * draw.randrange(tokens // 4)))
        token_ids = ids(tokens, 100 * seed + number)
        prompts[number] = token_ids, first_token
        one.offer_streamed(number, token_ids, cached_tokens, first_token)

    def is_done() -> bool:
        decode.turn()
        return all(one.outcome is not None for one in decode.requests.values())

    pool.run(is_done, timeout_s=60)
    for room, (token_ids, first_token) in prompts.items():
        received = decode.requests[room]
        assert received.outcome is TransferOutcome.COMPLETE
        torch.testing.assert_close(received.kv, kv_of(token_ids)[:, :, first_token:], atol=1e-4, rtol=0)
    deadline_s = time.monotonic() + 20
    while any(one.pool.free_tokens < POOL_TOKENS for one in members) and time.monotonic() < deadline_s:
        pool.deliver_messages()
        for one in members:
            one.turn()
        time.sleep(0.01)
    assert [one.pool.free_tokens for one in members] == [POOL_TOKENS] * 3
    assert not any(one.ending for one in members)
    offered = {request: ids for member in members for request, (ids, _) in member.offered.items()}
    for one in members:
        for request, logits in one.logits.items():
            torch.testing.assert_close(logits, logits_of(one.offered[request][0]), atol=1e-4, rtol=0)
        check_kept(one, offered | {pull: offered[prompt] for pull, prompt in pool.pulled.items()})
    assert decode.pool.free_tokens == 4096
    assert decode.endpoint.totals().unsettled_permits == 0
    if protocol.history.steps_failed == 0:
        assert settings.keeps_rows == (protocol.status(0.0).prompts_kept > 0)
        assert all(one.attempts == 1 for one in decode.requests.values())
        # Nothing goes to an owner but what it has computed itself, where it alone has begun a prompt and ends it.
        steps = [step for record in protocol.history.ended for step in record.steps if step.kind is StepKind.COLLECT]
        assert not sum(step.moved_tokens for step in steps) or protocol.status(0.0).requests_declined
        assert sum(one.endpoint.totals().written_bytes > 0 for one in members) > 1


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_step_that_fails_before_it_sends_costs_the_streaming_nothing(
    make: Make, decode: Decode, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    wires, failures = Wires(), []

    def on_layer(layer: int) -> None:
        if when == "behind" and not failures:
            failures.append(layer)
            raise KvPoolFullError("drawn")

    members = [make(instance, wires, 1, on_layer if instance else lambda layer: None) for instance in range(2)]
    allocate = ToyPool.allocate

    def allocate_or_fail(pool: ToyPool, tokens: int) -> torch.Tensor:
        if when == "before" and pool is members[1].pool and not failures:
            failures.append(tokens)
            raise KvPoolFullError("drawn")
        return allocate(pool, tokens)

    costs = PoolCosts([SpCandidate(size, SpCost(0.0, 0.01 / size, 0.0, 0.0)) for size in (1, 2)])
    protocol = PoolProtocol(PoolSettings(min_chunk_tokens=16, step_timeout_s=10.0, member_timeout_s=1e6), costs)
    pool = MemoryPool(protocol, members, 1)
    members[0].offer_streamed(1, ids(200), 0, 0)
    monkeypatch.setattr(ToyPool, "allocate", allocate_or_fail)

    def is_done() -> bool:
        decode.turn()
        return decode.requests[1].outcome is not None and bool(members[0].ended)

    pool.run(is_done, timeout_s=60)
    assert len(failures) == protocol.history.steps_failed == 1
    assert decode.requests[1].attempts == (1 if when == "before" else 2)
    assert (1 in members[0].logits) == (when == "before"), "without a collect"
    torch.testing.assert_close(decode.requests[1].kv, kv_of(ids(200)), atol=1e-4, rtol=0)


TOKENS = 48


class Histories(RuleBasedStateMachine):
    """Any order of taking, pinning, freeing and letting go; the toy pool notices what is freed twice."""

    @initialize(page=st.sampled_from([1, 4]))
    def begin(self, page: int) -> None:
        self.page = page
        self.inner = ToyPool(TOKENS, page)
        self.pool = PinnedPool(self.inner)
        self.held: list[torch.Tensor] = []
        self.pins: list[Pin] = []

    @rule(tokens=st.integers(1, 20))
    def allocate(self, tokens: int) -> None:
        try:
            self.held.append(self.pool.allocate(tokens))
        except KvPoolFullError:
            pages = -(-tokens // self.page)
            assert pages * self.page > self.inner.free_tokens

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.held)
    def pin(self, choice: object) -> None:
        self.pins.append(self.pool.pin(choice.choice(self.held)))  # type: ignore[attr-defined]

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.held)
    def free(self, choice: object) -> None:
        slots = self.held.pop(choice.randrange(len(self.held)))  # type: ignore[attr-defined]
        self.pool.free(slots)

    @rule(choice=st.randoms(use_true_random=False))
    @precondition(lambda self: self.pins)
    def unpin(self, choice: object) -> None:
        self.pool.unpin(self.pins.pop(choice.randrange(len(self.pins))))  # type: ignore[attr-defined]

    @invariant()
    def nothing_that_is_held_or_read_is_free(self) -> None:
        if hasattr(self, "pool"):
            held = {page for slots in self.held for page in (slots // self.page).tolist()}
            pinned = {page for pin in self.pins for page in pin.pages}
            assert self.inner.free_tokens == TOKENS - len(held | pinned) * self.page
            assert self.pool.deferred_tokens == len(pinned - held) * self.page


TestHistories = pytest.mark.slow(Histories.TestCase)
TestHistories.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("page", [1, 4])
def test_a_part_of_what_is_freed_is_pinned(page: int) -> None:
    inner = ToyPool(TOKENS, page)
    pool = PinnedPool(inner)
    slots = pool.allocate(12)
    pin = pool.pin(slots[:5])
    pool.free(slots)
    kept = -(-5 // page) * page
    assert (inner.free_tokens, pool.deferred_tokens) == (TOKENS - kept, kept)
    pool.unpin(pin)
    assert (inner.free_tokens, pool.deferred_tokens) == (TOKENS, 0)
