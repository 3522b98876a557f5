"""Members with several ranks: all ranks do, hold and hand back the same, whatever fails on one of them."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.orders import Drop
from sglang_ext.long_pool.decide.sharding import Interleaving
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.member.pool_link import ReplicatedLink
from sglang_ext.long_pool.member.pool_member import Collected
from sglang_ext.long_pool.messages import Welcome
from support.memory_pool import FakeLink, MemoryPool, Wires
from support.memory_ranks import Meeting, MemoryRanks, RankedMember
from support.toy_engine import ToyEngine, kv_of

POOL_TOKENS = 640


def ids(tokens: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(50) for _ in range(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_requests_end_right_whatever_fails_on_one_rank(seed: int) -> None:
    draw = random.Random(seed)
    page = draw.choice((1, 4))
    failing = draw.randrange(3)
    # Of the wires, some for each rank, one is worse than the others.
    rate = draw.choice((0.0, 0.003, 0.02))
    wires = [Wires(rate if rank == failing else 0.0, seed) for rank in range(2 + seed % 2)]
    costs = PoolCosts([SpCandidate(size, SpCost(0.0, 0.01 / size, 0.0, 0.0)) for size in (1, 2, 3)])
    settings = PoolSettings(
        draw.choice(list(Interleaving)), min_chunk_tokens=16, step_timeout_s=10.0, member_timeout_s=1e6
    )
    members = [RankedMember(instance, wires, POOL_TOKENS, page) for instance in range(3)]
    pool = MemoryPool(PoolProtocol(settings, costs), members, page)
    offered = 0
    for number in range(1, 6):
        one = draw.choice(members)
        tokens = draw.randrange(5, 60) * 4
        cached_tokens = draw.choice((0, 0, 4 * draw.randrange(tokens // 4)))
        token_ids = ids(tokens, 100 * seed + number)
        one.offer(token_ids, kv_of(token_ids)[:, :, :cached_tokens])
        offered += 1
    pool.run(lambda: sum(len(one.ranks[0].ended) for one in members) == offered, timeout_s=60)
    deadline_s = time.monotonic() + 10
    while any(rank.member.is_busy for one in members for rank in one.ranks) and time.monotonic() < deadline_s:
        pool.deliver_messages()
        for one in members:
            one.turn()
    collected = 0
    for rank in (rank for one in members for rank in one.ranks):
        assert rank.pool.free_tokens == POOL_TOKENS
        for request, kv in rank.kv.items():
            token_ids, prefix = rank.offered[request]
            wanted = kv_of(token_ids)[:, :, prefix.numel() : prefix.numel() + kv.shape[2]]
            torch.testing.assert_close(kv, wanted, atol=1e-4, rtol=0)
            collected += 1
    for one in members:
        assert all(rank.ended.keys() == one.ranks[0].ended.keys() for rank in one.ranks)
        assert all(
            isinstance(rank.ended[request], Collected) == isinstance(end, Collected)
            for rank in one.ranks
            for request, end in one.ranks[0].ended.items()
        )
        one.close()
    if not any(one.failure_rate for one in wires):
        assert collected


@pytest.mark.slow
def test_a_rank_without_memory_for_a_chunk_fails_the_step_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []
    wires = [Wires(), Wires()]
    members = [RankedMember(instance, wires, POOL_TOKENS, 1) for instance in range(2)]

    def try_workspace(engine: ToyEngine, rows: int, held_tokens: int) -> None:
        if engine.pool is members[1].ranks[1].pool and not failures:
            failures.append(rows)
            raise torch.OutOfMemoryError("1 GiB is wanted")

    monkeypatch.setattr(ToyEngine, "try_workspace", try_workspace)
    costs = PoolCosts([SpCandidate(size, SpCost(0.0, 0.01 / size, 0.0, 0.0)) for size in (1, 2)])
    protocol = PoolProtocol(PoolSettings(min_chunk_tokens=16, step_timeout_s=10.0, member_timeout_s=1e6), costs)
    pool = MemoryPool(protocol, members, 1)
    token_ids = ids(200, 1)
    members[0].offer(token_ids, kv_of(token_ids)[:, :, :0])
    pool.run(lambda: bool(members[0].ranks[0].ended), timeout_s=60)
    (record,) = protocol.status(0.0).recent
    assert [(step.kind, step.has_failed) for step in record.steps[:2]] == [("chunk", True), ("chunk", False)]
    assert record.outcome == "collected"
    shares = [one.new_tokens for one in record.steps[:2]]
    assert (failures, shares) == ([100], [200, 124]), "a part of about 64 tokens, not of 100"
    for one in members:
        one.close()


def test_what_the_first_rank_hears_all_hear_in_the_same_turn() -> None:
    link = FakeLink()
    meeting = Meeting(2)
    first, second = (ReplicatedLink(MemoryRanks(meeting, rank), link if rank == 0 else None) for rank in range(2))
    member = _Both(first, second)
    link.welcome = None
    assert member.sessions() == [None, None]
    link.welcome = Welcome(3, "ab", 1.0)
    link.inbox.append(Drop(1, (3,)))
    one, other = member.sessions()
    assert one == other == link.welcome
    assert one is link.welcome
    assert first.receive() == second.receive() == [Drop(1, (3,))]
    assert first.receive() == second.receive() == []
    again, other_again = member.sessions()
    assert (again, other_again) == (one, other)
    assert other_again is other, "the same session is the same object"
    # The coordinator has come again, and counts again.
    link.welcome = Welcome(3, "ab", 1.0)
    one_new, other_new = member.sessions()
    assert (one_new, other_new) == (one, other)
    assert one_new is not one
    assert other_new is not other, "another session is another object, also where it is equal"


def test_orders_of_a_session_that_has_ended_are_forgotten() -> None:
    link = FakeLink()
    meeting = Meeting(2)
    first, second = (ReplicatedLink(MemoryRanks(meeting, rank), link if rank == 0 else None) for rank in range(2))
    member = _Both(first, second)
    link.inbox.append(Drop(1, (0,)))
    member.sessions()
    link.welcome = None
    assert member.sessions() == [None, None]
    assert first.receive() == second.receive() == []


class _Both:
    """Two ranks of a link, each in a thread of its own."""

    def __init__(self, *links: ReplicatedLink) -> None:
        self._links = links
        self._threads = ThreadPoolExecutor(len(links))

    def sessions(self) -> list[Welcome | None]:
        return list(self._threads.map(ReplicatedLink.session, self._links))
