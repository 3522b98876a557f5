"""Point-to-point links between the instances of a long pool, beside the engine's own process groups.

One full mesh serves every subset of instances: a group is only an agreement on who talks to whom under which tags.
A mesh lives for one epoch of membership. Whoever joins or is lost ends the epoch: a mesh in which a call has timed
out is of no use to anybody, so it is built anew from those that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

MAX_TAG = 2**31 - 1


class MeshError(RuntimeError):
    """A peer did not answer in time or has gone; the mesh must be built anew."""


class Pending(Protocol):
    """A call under way. Its tensor belongs to it until `wait` returns."""

    def wait(self) -> None:
        """Block until done. Raises MeshError."""


class Mesh(Protocol):
    """Links to all members, named by instance id."""

    members: tuple[int, ...]

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        """Start sending a contiguous tensor."""

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor of the sender's size."""


class GlooMesh:
    """A mesh over TCP for tensors in host memory."""

    def __init__(self, store: dist.Store, epoch: int, members: Sequence[int], instance: int, timeout_s: float) -> None:
        """Connect to all members, who must do the same; raises MeshError after `timeout_s` without one of them.

        `timeout_s` also bounds every later wait. `store` is shared by all; epochs do not disturb each other in it.
        """
        self.members = tuple(members)
        self._rank = {member: rank for rank, member in enumerate(self.members)}
        timeout = timedelta(seconds=timeout_s)
        try:
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore(f"mesh/{epoch}", store), self._rank[instance], len(self.members), timeout
            )
        except RuntimeError as error:
            raise MeshError(f"mesh {epoch} of instances {list(members)}: {_first_line(error)}") from None

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return _start(self._group.send, tensor, self._rank[instance], tag, f"send to instance {instance}")

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return _start(self._group.recv, tensor, self._rank[instance], tag, f"receive from instance {instance}")


class _GlooCall:
    def __init__(self, work: dist.Work, tensor: torch.Tensor, what: str) -> None:
        self._work = work
        self._tensor = tensor  # gloo keeps no reference
        self._what = what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise MeshError(f"{self._what}: {_first_line(error)}") from None


def _start(call: object, tensor: torch.Tensor, rank: int, tag: int, what: str) -> Pending:
    try:
        work = call([tensor.view(-1)], rank, tag % MAX_TAG)  # type: ignore[operator]
    except RuntimeError as error:
        raise MeshError(f"{what}: {_first_line(error)}") from None
    return _GlooCall(work, tensor, what)


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
