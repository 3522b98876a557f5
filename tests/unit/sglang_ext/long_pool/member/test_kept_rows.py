"""Rows of prompts that have ended remain on the members that computed them, and the next prompts begin behind them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.coordinator import Coordinator
from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix
from sglang_ext.long_pool.decide.orders import DropKept
from sglang_ext.long_pool.decide.row_pulls import Pull
from sglang_ext.long_pool.decide.sharding import Interleaving
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.member.kept_rows import KeptRows
from sglang_ext.long_pool.member.kv_streams import Reading
from sglang_ext.long_pool.member.shard import HeldRows, KvPoolFullError
from sglang_ext.long_pool.messages import PullFailed, PullOrder, Welcome
from sglang_ext.transfer.decide.protocol import TransferOutcome
from support.memory_pool import MemoryPool, Wires
from support.streaming_pool import OPTIONS, Decode, StreamingMember, check_kept
from support.toy_engine import ToyPool, kv_of, logits_of

MEMBERS = 3
AMPLE_TOKENS = 1600
Make = Callable[..., list[StreamingMember]]


@pytest.fixture
def decode() -> Iterator[Decode]:
    one = Decode()
    yield one
    one.endpoint.close()


@pytest.fixture
def make(decode: Decode) -> Iterator[Make]:
    with ExitStack() as stack:

        def members(wires: Wires, tokens: int, page: int) -> list[StreamingMember]:
            made = [StreamingMember(one, wires, ToyPool(tokens, page), decode) for one in range(MEMBERS)]
            for one in made:
                stack.callback(one.close)
            return made

        yield members


class Conversations:
    """A pool, and prompts of which each goes on from an earlier one."""

    def __init__(self, make: Make, decode: Decode, seed: int, pool_tokens: int, failure_rate: float = 0.0) -> None:
        self.draw = random.Random(seed)
        self.page = self.draw.choice((1, 4))
        self.decode = decode
        may_fail = failure_rate > 0 or pool_tokens < AMPLE_TOKENS
        wires = Wires(failure_rate, seed) if may_fail else Wires(timeout_s=60.0)
        self.members = make(wires, pool_tokens, self.page)
        self.pool_tokens = pool_tokens
        costs = PoolCosts([SpCandidate(size, SpCost(0.0, 0.01 / size, 0.0, 0.0)) for size in (1, 2, 3)])
        settings = PoolSettings(
            self.draw.choice(list(Interleaving)),
            min_chunk_tokens=16,
            step_timeout_s=10.0 if failure_rate else 60.0,
            member_timeout_s=1e6,
            block_tokens=16,
        )
        self.protocol = PoolProtocol(settings, costs)
        self.pool = MemoryPool(self.protocol, self.members, self.page)
        self.rooms = 0
        self.prompts: dict[int, tuple[tuple[int, ...], int]] = {}  # by room: token ids, and what decode has

    def offer(self, owner: StreamingMember, token_ids: tuple[int, ...], cached_tokens: int = 0) -> None:
        self.rooms += 1
        first_token = self.draw.choice((0, 0, 4 * self.draw.randrange(len(token_ids) // 4)))
        self.prompts[self.rooms] = token_ids, first_token
        deadline_s = time.monotonic() + 20
        while True:
            try:
                owner.offer_streamed(self.rooms, token_ids, cached_tokens, first_token)
                return
            except KvPoolFullError:  # transfers may still read what is kept
                assert time.monotonic() < deadline_s
                owner.turn()
                time.sleep(0.01)

    @property
    def coordinator(self) -> Coordinator:
        pool = self.protocol._pool
        assert pool is not None
        return pool.coordinator

    def token_ids(self) -> dict[int, tuple[int, ...]]:
        """Return token ids by the number under which rows are kept."""
        offered = {request: ids for one in self.members for request, (ids, _) in one.offered.items()}
        return offered | {pull: offered[prompt] for pull, prompt in self.pool.pulled.items()}

    def pull(self) -> None:
        """Any kept prompt comes to any member, as if the coordinator had found that worth while."""
        core, now_s = self.coordinator, time.monotonic()
        kept = [KeptPrefix(prompt.key, prompt.end_tokens) for prompt in core.kept._prompts.values()]
        kept = [prefix for prefix in kept if core._rows.pulls.may_join(core.kept.rows(prefix))]
        targets = [one for one in core.members if core._rows.pulls.may_join((one,))]
        if not kept or not targets:
            return
        prefix, target = self.draw.choice(kept), self.draw.choice(targets)
        parts = core.kept.parts(prefix)
        core.kept.lock(parts)
        order = core._rows.pulls.begin(target, sorted(core.kept.rows(parts[-1])), parts, 1, now_s)
        self.pool._deliver(self.protocol._carry_out([order], now_s))

    def run(self) -> None:
        def is_done() -> bool:
            self.decode.turn()
            ended = all(one.outcome is not None for one in self.decode.requests.values())
            return ended and not self.protocol.history.running and not len(self.coordinator._rows.pulls)

        self.pool.run(is_done, timeout_s=60)
        for room, (token_ids, first_token) in self.prompts.items():
            received = self.decode.requests[room]
            assert received.outcome is TransferOutcome.COMPLETE
            torch.testing.assert_close(received.kv, kv_of(token_ids)[:, :, first_token:], atol=1e-4, rtol=0)

    def check(self) -> None:
        """All memory is free or kept, and what is kept is what it should be."""
        deadline_s = time.monotonic() + 20
        while any(one.pool.free_tokens < self.pool_tokens for one in self.members) and time.monotonic() < deadline_s:
            self.pool.deliver_messages()
            for one in self.members:
                one.turn()
            time.sleep(0.01)
        assert [one.pool.free_tokens for one in self.members] == [self.pool_tokens] * MEMBERS
        for one in self.members:
            check_kept(one, self.token_ids())
            assert not one.ending
            for request, logits in one.logits.items():
                torch.testing.assert_close(logits, logits_of(one.offered[request][0]), atol=1e-4, rtol=0)
        self.pool.deliver_messages()
        for one in self.members:
            one.turn()
            here = sum(part.rows.slots.numel() for part in one.member.kept._parts.values())
            assert self.coordinator.kept.tokens_on(one.instance) == here
            one.member.kept.flush()
        self.pool.deliver_messages()
        assert len(self.coordinator.kept) == 0
        assert [len(one.pool._free) * self.page for one in self.members] == [self.pool_tokens] * MEMBERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pulls", "seed"),
    [
        *((True, seed) for seed in range(4)),
        *(pytest.param(True, seed, marks=pytest.mark.full) for seed in range(4, 16)),
        *(pytest.param(False, seed, marks=() if seed == 2 else pytest.mark.full) for seed in range(16)),
    ],
)
def test_conversations_go_on_behind_what_is_kept_whatever_happens(
    make: Make, decode: Decode, seed: int, pulls: bool
) -> None:
    """Three turns of several conversations on changing members, some of which share a beginning; in some runs steps
    fail, in others memory is short, so that rows make way for new prompts. `pulls`: kept rows come to other members
    meanwhile."""
    is_short, fails = seed % 4 == 1, seed % 4 == 2
    one = Conversations(make, decode, seed, 320 if is_short else AMPLE_TOKENS, 0.004 if fails else 0.0)
    draw = one.draw
    system = tuple(draw.randrange(50) for _ in range(32))
    texts = [(system if number else ()) + tuple(draw.randrange(50) for _ in range(90)) for number in range(3)]
    for turn in range(3):
        for number, text in enumerate(texts):
            cached_tokens = draw.choice((0, 16, 4 * draw.randrange(len(text) // 4)))
            one.offer(draw.choice(one.members), text, cached_tokens if turn < 2 else 0)
            texts[number] = text + tuple(draw.randrange(50) for _ in range(4 * draw.randrange(1, 20)))
        one.run()
        if pulls and turn < 2:
            one.pull()
            one.pull()
    history = one.protocol.history
    if not (is_short or fails):
        assert history.prefix_hits >= 3
        # Those of a single step, which each member of its group counts.
        follow_ups = [up for member in one.members for up in member.member.take_follow_ups()]
        assert all(up.cached_tokens > 0 and up.new_tokens > 0 for up in follow_ups)
        assert follow_ups
        assert not any(member.member.take_follow_ups() for member in one.members)
        assert not history.steps_failed
    one.check()


def test_rows_that_a_transfer_may_still_read_are_not_evicted() -> None:
    pool, lost = ToyPool(64, 4), []
    kept = KeptRows(pool, lost.extend)
    reading = Reading()
    kept.add(1, HeldRows((range(16),), pool.allocate(16)), [reading])
    assert (kept.evictable_tokens, kept.evict(16), lost) == (0, 0, [])
    kept.drop(1)
    assert pool.free_tokens == 48
    reading.is_settled = True
    kept.settle()
    assert (pool.free_tokens, kept.evictable_tokens) == (64, 0)
    later = Reading()
    kept.add(2, HeldRows((range(16),), pool.allocate(16)), [])
    kept.borrow(7, [KeptPrefix(2, 8)])
    kept.give_back(7, [later])
    assert kept.evict(16) == 0
    later.is_settled = True
    kept.settle()
    assert (kept.evict(1), lost) == (16, [2])


def test_rows_for_a_coordinator_that_has_gone_are_freed_and_nobody_is_informed(make: Make) -> None:
    first, second, _ = make(Wires(), 64, 4)
    pull = Pull(-1, second.instance, (first.instance,), (KeptPrefix(1, 16),))
    second.link.inbox.append(PullOrder(pull, second.receivers))  # whose source knows nothing of it
    second.turn()
    assert second.pool.free_tokens == 48
    assert second.member.is_busy
    second.link.welcome = Welcome(second.instance, 16 * "cd", 1.0)
    deadline_s = time.monotonic() + 20
    while second.member.is_busy and time.monotonic() < deadline_s:
        second.turn()
        time.sleep(0.01)
    assert second.pool.free_tokens == 64
    assert not any(isinstance(message, PullFailed) for message in second.link.sent)


@pytest.mark.parametrize("how", ["dropped", "coordinator gone"])
def test_a_target_that_has_a_part_itself_frees_all_where_the_rest_does_not_come(make: Make, how: str) -> None:
    first, second, _ = make(Wires(), 64, 4)
    second.member.kept.add(1, HeldRows((range(16),), second.pool.allocate(16)), [])
    pull = Pull(-1, second.instance, (first.instance, second.instance), (KeptPrefix(1, 32),))
    second.link.inbox.append(PullOrder(pull, second.receivers))  # the first one does nothing
    deadline_s = time.monotonic() + 20
    second.turn()
    while second.member._streams.is_sending and time.monotonic() < deadline_s:
        second.turn()
        time.sleep(0.01)
    assert second.pool.free_tokens == 32
    if how == "dropped":
        second.link.inbox.extend([DropKept(-1, (second.instance,)), DropKept(1, (second.instance,))])
    else:
        second.link.welcome = Welcome(second.instance, 16 * "cd", 1.0)
    second.turn()
    while second.member.is_busy and time.monotonic() < deadline_s:
        second.turn()
        time.sleep(0.01)
    assert len(second.pool._free) * second.pool.page_tokens == 64


@pytest.mark.parametrize("how", ["given up", "coordinator gone"])
def test_a_source_whose_target_never_gets_the_order_stops_sending(make: Make, how: str) -> None:
    first, second, _ = make(Wires(), 64, 4)
    first.member.kept.add(1, HeldRows((range(32),), first.pool.allocate(32)), [])
    pull = Pull(-1, second.instance, (first.instance,), (KeptPrefix(1, 32),))
    first.link.inbox.append(PullOrder(pull, second.receivers))
    deadline_s = time.monotonic() + 0.5  # its endpoint and the target's have shaken hands by then
    while time.monotonic() < deadline_s:
        first.turn()
        time.sleep(0.01)
    assert (first.member.is_busy, first.pool.free_tokens) == (True, 32), "it waits for the target"
    if how == "given up":
        first.link.inbox.extend([DropKept(-1, (first.instance,)), DropKept(1, (first.instance,))])
    else:
        first.link.welcome = Welcome(first.instance, 16 * "cd", 1.0)
    first.turn()
    deadline_s = time.monotonic() + OPTIONS.stall_timeout_s / 2
    while first.member.is_busy and time.monotonic() < deadline_s:
        first.turn()
        time.sleep(0.01)
    assert len(first.pool._free) * first.pool.page_tokens == 64


def test_rows_that_there_is_no_room_for_fail_at_once(make: Make) -> None:
    first, second, _ = make(Wires(), 64, 4)
    pull = Pull(-1, second.instance, (first.instance,), (KeptPrefix(1, 80),))
    second.link.inbox.append(PullOrder(pull, second.receivers))
    second.turn()
    assert [message for message in second.link.sent if isinstance(message, PullFailed)] == [PullFailed(-1)]
    assert (second.pool.free_tokens, second.member.is_busy) == (64, False)
