"""One layer's attention over a group: keys and values go round, queries stay (Ring Attention; Tetris, 3.2).

While a block is attended to, the next one is on its way. Results are merged in float32 by log-sum-exp, so they do
not depend on the order in which blocks arrive but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_ext.policy.cdsp.sharding import Positions, count_tokens
from sglang_ext.sequence_parallel.mesh import Mesh, MeshError, Pending
from sglang_ext.sequence_parallel.positioned_attention import attend_
from sglang_ext.sequence_parallel.step_clock import StepClock


class Attention(Protocol):
    """Attention over all that a group holds of a request."""

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of q [rows, H, D]; K and V of the same rows are in the pool already. Float32 [rows, H, D]."""


class Ring:
    """A group's ring as one member sees it, for one chunk: one hop per member and layer, tags given from outside."""

    def __init__(
        self,
        mesh: Mesh,
        group: Sequence[int],
        instance: int,
        held: Sequence[Positions],
        tag: int,
        clock: StepClock | None = None,
    ) -> None:
        """`held`: by place in the ring, the positions whose KV that member has, in the order of its slots."""
        self._mesh = mesh
        self._place = group.index(instance)
        self._next = group[(self._place + 1) % len(group)]
        self._previous = group[(self._place - 1) % len(group)]
        self._held = tuple(held)
        self._tag = tag
        self._clock = clock or StepClock()

    @property
    def size(self) -> int:
        return len(self._held)

    def attend(
        self, q: torch.Tensor, queries: Positions, k: torch.Tensor, v: torch.Tensor, scale: float, layer: int
    ) -> torch.Tensor:
        """Attention of `q` [Tq, H, D] at `queries` over what all members hold.

        `k` and `v` [Tk, Hkv, D] are what this member holds. Every member must call this for every layer, also one
        without queries. Returns [Tq, H, D] in float32. Raises MeshError.
        """
        out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        block = torch.stack([k, v])
        for hop in range(self.size):
            keys = self._held[(self._place - hop) % self.size]
            following, calls = self._pass_on(block, hop, layer)
            if queries and keys:
                attend_(out, lse, q, block[0], block[1], queries, keys, scale)
            if calls:
                began_s = self._clock.now_s()
                for call in calls:
                    call.wait()
                self._clock.ring_s += self._clock.now_s() - began_s
            block = following
        return out

    def _pass_on(self, block: torch.Tensor, hop: int, layer: int) -> tuple[torch.Tensor, list[Pending]]:
        """Start sending `block` on and receiving the one before it; a member that holds nothing sends nothing."""
        if hop + 1 == self.size:
            return block, []
        tokens = count_tokens(self._held[(self._place - hop - 1) % self.size])
        following = block.new_empty((2, tokens, *block.shape[2:]))
        tag = self._tag + layer * self.size + hop
        calls = []
        with self._mesh.batch():
            if block.numel():
                calls.append(self._mesh.send(block, self._next, tag))
            if following.numel():
                calls.append(self._mesh.receive(following, self._previous, tag))
        return following, calls


class DeferredErrorAttention:
    """See `attention.Attention`."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._failure: str | None = None  # the error itself would hold all that the step has used

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        if self._failure is None:
            try:
                return self._attention.attend(layer, q, scale)
            except MeshError as error:
                self._failure = str(error)
        return torch.zeros_like(q, dtype=torch.float32)

    def check(self) -> None:
        """Raises MeshError where the ring is broken."""
        if self._failure is not None:
            raise MeshError(self._failure)
