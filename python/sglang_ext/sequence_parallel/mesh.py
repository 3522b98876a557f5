"""Point-to-point links between the instances of a long pool, beside the engine's own process groups.

One full mesh serves every subset of instances: a group only agrees on which members send to each other under which
tags. A mesh lives for one epoch of membership. A member that joins or is lost ends the epoch: a mesh in which a call
has timed out is of no use, so it is built anew from those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

MAX_TAG = 2**31 - 1
_INTERRUPTION_S = 0.001


class MeshError(RuntimeError):
    """A peer did not answer in time or has gone; the mesh must be built anew."""


class Pending(Protocol):
    """A call under way. Its tensor belongs to it until `wait` returns."""

    def wait(self) -> None:
        """Return when what the caller computes next sees it done. Raises MeshError."""


class Mesh(Protocol):
    """Links to all members, named by instance id."""

    members: tuple[int, ...]

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        """Start sending a contiguous tensor."""

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor of the sender's size."""

    def batch(self) -> AbstractContextManager[None]:
        """What is started inside need not wait for each other, in whichever order it is started.

        Of two members that talk to each other both start their calls, or batches, in the same order.
        """

    def step(self, sequence: int) -> AbstractContextManager[None]:
        """What happens inside belongs to this step. Calls fail soon after a member has given it up."""

    def settle(self) -> None:
        """Block until everything that was waited for is done. Raises MeshError."""


class Watch(Protocol):
    """Whether a step is still worth going on with; see `mesh_store.StepWatch`."""

    def step(self, sequence: int) -> AbstractContextManager[None]: ...

    def fail(self) -> None: ...


class GlooMesh:
    """A mesh over TCP for tensors in host memory."""

    def __init__(self, store: dist.Store, name: str, members: Sequence[int], instance: int, timeout_s: float) -> None:
        """Connect to all members, which must do the same; raises MeshError after `timeout_s` without one of them.

        `timeout_s` also bounds every later wait. `store` is shared by all; meshes of other names do not disturb.
        """
        self.members = tuple(members)
        self._rank = {member: rank for rank, member in enumerate(self.members)}
        self._instance = instance
        self._watch: Watch | None = None
        timeout = timedelta(seconds=timeout_s)
        try:
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore(name, store), self._rank[instance], len(self.members), timeout
            )
        except RuntimeError as error:
            raise MeshError(f"{name} of instances {list(members)}: {first_line(error)}") from None

    def watch(self, watch: Watch) -> None:
        """Announce failures of this rank's calls, and be interrupted by those of others."""
        self._watch = watch

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return self._start(self._group.send, tensor, instance, tag, "send to")

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return self._start(self._group.recv, tensor, instance, tag, "receive from")

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, sequence: int) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.step(sequence)

    def settle(self) -> None:
        pass

    def interrupt(self) -> None:
        """Make every call fail, also one that another thread waits in."""
        for member in self.members:
            if member != self._instance:
                try:
                    # Gloo closes all connections of a group in which one call has timed out.
                    call = self._group.recv([torch.empty(1)], self._rank[member], MAX_TAG)
                    call.wait(timedelta(seconds=_INTERRUPTION_S))
                except RuntimeError:
                    pass  # so it should; where this one was closed before, the next one will

    def fail(self, what: str, error: RuntimeError) -> MeshError:
        """The error for a call that failed, which is announced to the others."""
        if self._watch is not None:
            self._watch.fail()
        return MeshError(f"{what}: {first_line(error)}")

    def _start(
        self, call: Callable[..., dist.Work], tensor: torch.Tensor, instance: int, tag: int, what: str
    ) -> Pending:
        what = f"{what} instance {instance}"
        try:
            work = call([tensor.view(-1)], self._rank[instance], tag % MAX_TAG)
        except RuntimeError as error:
            raise self.fail(what, error) from None
        return _GlooCall(self, work, tensor, what)


class _GlooCall:
    def __init__(self, mesh: GlooMesh, work: dist.Work, tensor: torch.Tensor, what: str) -> None:
        self._mesh = mesh
        self._work = work
        self._tensor = tensor  # gloo keeps no reference
        self._what = what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._mesh.fail(self._what, error) from None


def first_line(error: Exception) -> str:
    """Its message, without the stack that torch.distributed adds."""
    return str(error).partition("\n")[0]
