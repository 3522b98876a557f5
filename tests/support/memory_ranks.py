"""Members with several ranks inside one process: a thread for each rank, and collectives that notice who is missing."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sglang_ext.long_pool.member.pool_link import ReplicatedLink
from support.memory_pool import FakeLink, MemoryMember, Wires
from support.toy_engine import ToyPool

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 20.0


class Meeting:
    """Where the ranks of one instance meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=COLLECTIVE_TIMEOUT_S)
        self.sent: list[tuple[str, Any]] = [("", None)] * size


class MemoryRanks:
    """See `long_pool.member.ranks.Ranks`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def share(self, decide: Callable[[], T]) -> T:
        value = decide() if self.rank == 0 else None
        sent = self._meet("share", pickle.dumps(value))[0]
        return value if self.rank == 0 else pickle.loads(sent)  # type: ignore[return-value]

    def all(self, is_so: bool) -> bool:
        return all(self._meet("all", is_so))

    def all_of(self, are_so: Sequence[bool]) -> list[bool]:
        return [all(votes) for votes in zip(*self._meet("all_of", tuple(are_so)), strict=True)] if are_so else []

    def gather(self, value: T) -> list[T]:
        return [pickle.loads(sent) for sent in self._meet("gather", pickle.dumps(value))]

    def _meet(self, kind: str, value: Any) -> list[Any]:
        self._meeting.sent[self.rank] = (kind, value)
        self._meeting.barrier.wait()
        sent = list(self._meeting.sent)
        self._meeting.barrier.wait()
        assert len({kind for kind, _ in sent}) == 1, f"ranks disagree on what they do: {[kind for kind, _ in sent]}"
        return [value for _, value in sent]


class RankedMember:
    """One instance. Its ranks hold the same and do the same, or an assertion says so."""

    def __init__(self, instance: int, wires: Sequence[Wires], tokens: int, page_tokens: int) -> None:
        """`wires`: of each rank with the same rank of the others."""
        self.instance = instance
        self.link = FakeLink(instance)
        self.ranks_count = len(wires)
        self.receivers: tuple[str, ...] = ()
        meeting = Meeting(len(wires))
        self._threads = ThreadPoolExecutor(len(wires))
        self.ranks: list[MemoryMember] = []
        for rank, own in enumerate(wires):
            ranks = MemoryRanks(meeting, rank)
            link = ReplicatedLink(ranks, self.link if rank == 0 else None)
            self.ranks.append(MemoryMember(instance, own, ToyPool(tokens, page_tokens), ranks, link))
        self.turn()  # joins

    @property
    def pool(self) -> ToyPool:
        return self.ranks[0].pool

    def offer(self, token_ids: tuple[int, ...], cached: torch.Tensor) -> int:
        (request,) = {one.offer(token_ids, cached) for one in self.ranks}
        return request

    def turn(self) -> None:
        list(self._threads.map(MemoryMember.turn, self.ranks))
        held = [(one.pool.free_tokens, one.member.held_tokens, sorted(one.ended)) for one in self.ranks]
        assert held == held[:1] * len(held), held

    def close(self) -> None:
        self._threads.shutdown()
