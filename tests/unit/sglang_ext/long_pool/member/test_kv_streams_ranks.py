"""The ranks of a member let go of what they have sent in the same turn, whatever each of them sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.long_pool.member.chunk_step import StreamError
from sglang_ext.long_pool.member.kv_streams import KvStreams, OpenTarget, Target
from sglang_ext.long_pool.messages import Destination
from sglang_ext.transfer.decide.protocol import TransferOutcome
from sglang_ext.transfer.decide.shards import HeadLayout
from support.memory_ranks import Meeting, MemoryRanks
from support.toy_engine import ToyPool

RANKS = 2
TOKENS = 64
TO = (Destination(7, "decode:1", 0, HeadLayout(2, 1, 2), 0),)


class Handle:
    """Of a transfer that a test brings forward."""

    def __init__(self) -> None:
        self.stored_chunks = 0
        self.status: Any = SimpleNamespace(is_released=False, outcome=None)
        self.offers = 0
        self.restarts: list[str] = []

    def offer(self, chunk: object) -> int:
        self.offers += 1
        return self.offers - 1

    def part(self, chunk: int, rows: object, computed: object = None) -> None:
        pass

    def close(self) -> None:
        pass

    def restart(self, reason: str) -> None:
        self.restarts.append(reason)
        self.status = SimpleNamespace(is_released=True, outcome=TransferOutcome.RESTARTED)


class Rank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.handle = Handle()
        self.pool = ToyPool(TOKENS)
        self.open: OpenTarget = lambda destination: Target(self.handle, 0, 1, 0)  # type: ignore[arg-type]
        self.streams = KvStreams(self.pool, lambda destination: self.open(destination), MemoryRanks(meeting, rank))

    def compute(self, request: int = 1, tokens: int = 10) -> str | None:
        """A chunk, after which its shard is dropped at once."""
        reading = self.streams.announce()
        slots = self.streams.pool.allocate(tokens)
        try:
            ready = self.streams.begin(reading, request, TO, (range(tokens),), slots)
            ready(0, None)
        except StreamError as error:
            return str(error)
        finally:
            self.streams.pool.free(slots)
        return None


OnAll = Callable[[Callable[[Rank], object]], list[Any]]


@pytest.fixture
def ranks() -> list[Rank]:
    meeting = Meeting(RANKS)
    return [Rank(meeting, rank) for rank in range(RANKS)]


@pytest.fixture
def on_all(ranks: list[Rank]) -> Iterator[OnAll]:
    with ThreadPoolExecutor(RANKS) as threads:
        yield lambda what: list(threads.map(what, ranks))


def settled(on_all: OnAll) -> list[int]:
    """Free slots of each rank after a turn."""

    def settle(one: Rank) -> int:
        one.streams.settle()
        free: int = one.pool.free_tokens
        return free

    return on_all(settle)


def test_slots_are_free_when_the_last_rank_has_sent_them(ranks: list[Rank], on_all: OnAll) -> None:
    assert on_all(Rank.compute) == [None, None]
    assert settled(on_all) == [TOKENS - 10] * RANKS
    ranks[1].handle.stored_chunks = 1
    assert settled(on_all) == [TOKENS - 10] * RANKS
    ranks[0].handle.stored_chunks = 1
    assert settled(on_all) == [TOKENS] * RANKS
    assert not any(one.streams.is_sending for one in ranks)


def test_a_later_chunk_may_be_done_first(ranks: list[Rank], on_all: OnAll) -> None:
    on_all(Rank.compute)
    slow = [one.handle for one in ranks]
    for one in ranks:
        one.handle = Handle()
    on_all(lambda one: one.compute(request=2, tokens=5))
    for one in ranks:
        one.handle.stored_chunks = 1
    assert settled(on_all) == [TOKENS - 10] * RANKS
    for handle in slow:
        handle.stored_chunks = 1
    assert settled(on_all) == [TOKENS] * RANKS


def test_a_rank_of_which_decode_wants_nothing(ranks: list[Rank], on_all: OnAll) -> None:
    """It holds padding, or decode's rank has its heads from another one."""
    ranks[1].open = lambda destination: None
    on_all(Rank.compute)
    assert settled(on_all) == [TOKENS - 10] * RANKS
    ranks[0].handle.stored_chunks = 1
    assert settled(on_all) == [TOKENS] * RANKS


def test_a_rank_that_cannot_send(ranks: list[Rank], on_all: OnAll) -> None:
    def refuse(destination: Destination) -> Target | None:
        raise ValueError("no way")

    ranks[1].open = refuse
    first, second = on_all(Rank.compute)
    assert first is None
    assert "no way" in second
    # The step has failed for all: its ranks take it back.
    on_all(lambda one: one.streams.restart(1, "a chunk has failed"))
    assert ranks[0].handle.restarts == ["a chunk has failed"]
    assert settled(on_all) == [TOKENS] * RANKS


def test_a_rank_whose_step_ended_before_it_had_slots(ranks: list[Rank], on_all: OnAll) -> None:
    def first_computes(one: Rank) -> None:
        if one is ranks[0]:
            one.compute()
        else:
            one.streams.announce()

    on_all(first_computes)
    assert settled(on_all) == [TOKENS - 10, TOKENS]  # the second's shard has never had them
    ranks[0].handle.stored_chunks = 1
    assert settled(on_all) == [TOKENS] * RANKS


def test_slots_without_readers_are_free_at_once() -> None:
    pool = ToyPool(TOKENS)
    streams = KvStreams(pool)
    reading = streams.announce()
    slots = streams.pool.allocate(8)
    streams.begin(reading, 1, (), (range(8),), slots)(0, None)
    streams.pool.free(slots)
    assert pool.free_tokens == TOKENS
    streams.settle()
    assert not streams.is_sending
    assert torch.equal(torch.sort(pool.allocate(TOKENS)).values, torch.arange(TOKENS))
