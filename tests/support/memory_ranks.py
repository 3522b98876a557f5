"""Members with several ranks inside one process: a thread for each rank, and collectives that notice who is missing."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from sglang_ext.sequence_parallel.messages import Welcome
from sglang_ext.sequence_parallel.pool_link import ReplicatedLink
from support.memory_pool import FakeLink, MemoryMember, Wires
from support.toy_engine import ToyPool

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 20.0


class Meeting:
    """Where the ranks of one instance meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=COLLECTIVE_TIMEOUT_S)
        self.said: list[tuple[str, Any]] = [("", None)] * size


class MemoryRanks:
    """See `sequence_parallel.ranks.Ranks`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def share(self, decide: Callable[[], T]) -> T:
        value = decide() if self.rank == 0 else None
        said = self._meet("share", pickle.dumps(value))[0]
        return value if self.rank == 0 else pickle.loads(said)  # type: ignore[return-value]

    def all(self, is_so: bool) -> bool:
        return all(self._meet("all", is_so))

    def all_of(self, are_so: Sequence[bool]) -> list[bool]:
        return [all(votes) for votes in zip(*self._meet("all_of", tuple(are_so)), strict=True)] if are_so else []

    def gather(self, value: T) -> list[T]:
        return [pickle.loads(said) for said in self._meet("gather", pickle.dumps(value))]

    def _meet(self, kind: str, value: Any) -> list[Any]:
        self._meeting.said[self.rank] = (kind, value)
        self._meeting.barrier.wait()
        said = list(self._meeting.said)
        self._meeting.barrier.wait()
        assert len({kind for kind, _ in said}) == 1, f"ranks disagree on what they do: {[kind for kind, _ in said]}"
        return [value for _, value in said]


class FakePoolLink(FakeLink):
    """The first rank's, with a session that a test may change."""

    wake_descriptor = None

    def __init__(self) -> None:
        super().__init__()
        self.welcome: Welcome | None = Welcome(0, "nowhere", 1, 1.0)

    def session(self) -> Welcome | None:
        return self.welcome


class RankedMember:
    """One instance. Its ranks hold the same and do the same, or an assertion says so."""

    def __init__(self, instance: int, wires: Sequence[Wires], tokens: int, page_tokens: int) -> None:
        """`wires`: of each rank with the same rank of the others."""
        self.instance = instance
        self.link = FakePoolLink()
        meeting = Meeting(len(wires))
        self._threads = ThreadPoolExecutor(len(wires))
        self._links = []
        self.ranks: list[MemoryMember] = []
        for rank, own in enumerate(wires):
            ranks = MemoryRanks(meeting, rank)
            self._links.append(ReplicatedLink(ranks, self.link if rank == 0 else None))
            self.ranks.append(MemoryMember(instance, own, ToyPool(tokens, page_tokens), ranks, self._links[-1]))

    @property
    def pool(self) -> ToyPool:
        return self.ranks[0].pool

    def offer(self, request: int, token_ids: tuple[int, ...], cached: torch.Tensor) -> None:
        for one in self.ranks:
            one.offer(request, token_ids, cached)

    def turn(self) -> None:
        list(self._threads.map(self._turn_of, range(len(self.ranks))))
        held = [(one.pool.free_tokens, one.member.held_tokens, sorted(one.ended)) for one in self.ranks]
        assert held == held[:1] * len(held), held

    def close(self) -> None:
        self._threads.shutdown()

    def _turn_of(self, rank: int) -> None:
        self._links[rank].session()
        self.ranks[rank].turn()
