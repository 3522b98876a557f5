"""The tensor-parallel ranks of one instance, which take part in a long pool as one member.

Only the first rank talks to the coordinator. What it has received and what it decides travels to the others in the
same turn, and a step counts only where every rank has done it. Each rank computes its own heads, over a mesh of its own
with the same ranks of the other members.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from sglang_ext.long_pool.mesh.mesh import MeshError

T = TypeVar("T")

# What most turns have to send fits into the first broadcast, behind the number of its bytes.
_FIRST_BYTES = 256
_LENGTH_BYTES = 8


class Ranks(Protocol):
    """All methods but the properties are collective: every rank calls them in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def share(self, decide: Callable[[], T]) -> T:
        """Return what `decide` returns on the first rank, the only one that calls it; equal on all, but not the same
        object."""

    def all(self, is_so: bool) -> bool:
        """Return whether it is so on every rank."""

    def all_of(self, are_so: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on every rank. All ranks pass equally many; none costs no message."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""


class OneRank:
    """No tensor parallelism: nothing travels."""

    rank = 0
    size = 1

    def share(self, decide: Callable[[], T]) -> T:
        return decide()

    def all(self, is_so: bool) -> bool:
        return is_so

    def all_of(self, are_so: Sequence[bool]) -> list[bool]:
        return list(are_so)

    def gather(self, value: T) -> list[T]:
        return [value]


SINGLE_RANK = OneRank()


class GroupRanks:
    """The ranks of a process group of the CPU, which belongs to the calling thread while a method runs."""

    def __init__(self, group: dist.ProcessGroup, first_global_rank: int) -> None:
        """`first_global_rank`: that of the group's first rank, as torch.distributed counts them."""
        self._group = group
        self._first = first_global_rank
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def share(self, decide: Callable[[], T]) -> T:
        value, data = None, b""
        head = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            value = decide()
            data = pickle.dumps(value)
            beginning = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _FIRST_BYTES - _LENGTH_BYTES]
            head[: len(beginning)] = torch.frombuffer(bytearray(beginning), dtype=torch.uint8)
        self._broadcast(head)
        length = int.from_bytes(bytes(head[:_LENGTH_BYTES].numpy()), "little")
        rest = torch.empty(max(0, length - (_FIRST_BYTES - _LENGTH_BYTES)), dtype=torch.uint8)
        if rest.numel():
            if self.rank == 0:
                rest = torch.frombuffer(bytearray(data[_FIRST_BYTES - _LENGTH_BYTES :]), dtype=torch.uint8)
            self._broadcast(rest)
        if self.rank == 0:
            return value  # type: ignore[return-value]  # decided above
        shared: T = pickle.loads(bytes(head[_LENGTH_BYTES:].numpy()) + bytes(rest.numpy()))
        return shared

    def all(self, is_so: bool) -> bool:
        return self.all_of([is_so])[0]

    def all_of(self, are_so: Sequence[bool]) -> list[bool]:
        if not are_so:
            return []
        votes = torch.tensor([int(is_so) for is_so in are_so])
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
        return [bool(vote) for vote in votes.tolist()]

    def gather(self, value: T) -> list[T]:
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]  # every rank has given one

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=self._first, group=self._group)


@contextmanager
def all_ranks_or_raise(ranks: Ranks, *failures: type[Exception]) -> Iterator[None]:
    """Return what happens inside succeeds on every rank or on none: ranks that have not failed themselves raise
    MeshError.

    `failures` are the errors that count; any other ends the process, and with it the instance.
    """
    failure: Exception | None = None
    try:
        yield
    except failures as error:
        failure = error
    is_done = ranks.all(failure is None)
    try:
        if failure is not None:
            raise failure
    finally:
        # Its traceback holds this frame, and in a cycle everything that the step has used would live on: its
        # connections, too.
        failure = None
    if not is_done:
        raise MeshError("another rank of this instance has failed")
