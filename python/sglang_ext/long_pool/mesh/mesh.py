"""Point-to-point calls between the members of a step, next to the engine's own process groups.

A step agrees on which members send to each other under which tags. How its calls travel is another module's:
`peer_links` for host memory, `nccl_mesh` and `staged_mesh` for GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from sglang_ext.long_pool.link_frames import PeerAddress


class MeshError(RuntimeError):
    """A peer did not answer in time or has gone, or the step has been given up."""

    def __init__(self, reason: str, instance: int | None = None) -> None:
        """`instance`: the peer that could not be talked to, where it was one."""
        super().__init__(reason)
        self.instance = instance


class Lane(Enum):
    """Describes what a call belongs to: calls of one lane do not wait for those of another one."""

    RING = "ring"
    MOVES = "moves"  # of earlier KV, behind the computation


class Pending(Protocol):
    """A call under way. Its tensor belongs to it until `wait` returns."""

    def wait(self) -> None:
        """Return when what the caller computes next sees it done. Raises MeshError."""


class Mesh(Protocol):
    """Calls to the other members of a step, named by instance id."""

    members: tuple[int, ...]

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        """Start sending a contiguous tensor."""

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor of the sender's size."""

    def batch(self, lane: Lane = Lane.RING) -> AbstractContextManager[None]:
        """Return what is started inside need not wait for each other, in whichever order it is started.

        Of two members that talk to each other both start their calls, or batches, of a lane in the same order.
        """

    def meet(self) -> None:
        """Block until every other member of the step has called it, too. Raises MeshError."""

    def settle(self) -> None:
        """Block until everything that was waited for is done, and what was computed with it. Raises MeshError."""


class Membership(NamedTuple):
    """The name by which an instance meets the others as long as it belongs to the pool."""

    pool_id: bytes  # of the coordinator's present run
    instance: int


class Meshes(Protocol):
    """Describes what connects this rank with the same ranks of other members."""

    def enter(self, membership: Membership | None) -> None:
        """The pool that this instance belongs to from now on, or none."""

    def step(self, sequence: int, addresses: Mapping[int, PeerAddress]) -> AbstractContextManager[Mesh]:
        """Take part in a step with these instances, this one among them. Steps of a member rise. Raises MeshError.

        Where it fails inside, the others are informed.
        """

    def record_activity(self) -> None:
        """The thread that computes goes on: it does not hang."""

    def record_computed(self) -> None:
        """A chunk has been computed here: what its first one makes, as compiled kernels, is there."""

    def give_up(self, sequence: int, reason: str) -> None:
        """A step has come to nothing: every wait for it, now or later, fails; from any thread."""


def first_line(error: Exception) -> str:
    """Return an error's message without the stack that torch.distributed adds."""
    return str(error).partition("\n")[0]
