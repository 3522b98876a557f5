"""One layer's attention over a group: keys and values go round, queries stay (Ring Attention; Tetris, 3.2).

While a block is attended to, the next one is on its way. Results are merged in float32 by log-sum-exp, so they do
not depend on the order in which blocks arrive but for rounding.

Each member's shard is given by the positions that it holds, a few ranges. So nearly all pairs of ranges are seen whole,
not at all, or along a diagonal: those run without a mask. What two ranges of different steps share, which no layout of
a chunk produces, is masked. Layers with a sliding window or capped scores, which no fused kernel here computes, go by
positions (on CPUs only).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from sglang_ext.long_pool.decide.sharding import Positions, count_tokens
from sglang_ext.long_pool.mesh.mesh import Mesh, MeshError, Pending
from sglang_ext.long_pool.step_clock import StepClock
from sglang_ext_kernels import flashinfer_block
from sglang_ext_kernels.block_attention import (
    BlockPlan,
    add_sinks_,
    attention_block,
    default_sizes,
    merge_states_,
    plan_block,
    positioned_block,
    windowed_block,
)


class AttentionRule(NamedTuple):
    """Describes how the queries of a layer attend."""

    scale: float
    window: int | None = None  # a token sees itself and as many before it; None: all
    cap: float = 0.0  # scores are cap * tanh(score / cap); 0: as they are
    sinks: torch.Tensor | None = None  # [H]; a score of each head that takes part in the softmax and has no value


class Visible(NamedTuple):
    """Query rows [q0, q1) see key rows [k0, k1): all of them, or along the diagonal."""

    q0: int
    q1: int
    k0: int
    k1: int
    is_causal: bool = False
    is_masked: bool = False  # by comparing positions, row by row


def visible_blocks(queries: Positions, keys: Positions) -> list[Visible]:
    """Return what the queries see of the keys; rows count through all ranges of a shard in their order."""
    blocks: list[Visible] = []
    for q0, q in zip(_starts(queries), queries, strict=True):
        for k0, k in zip(_starts(keys), keys, strict=True):
            for block in _of_ranges(q, k):
                moved = block._replace(q0=block.q0 + q0, q1=block.q1 + q0, k0=block.k0 + k0, k1=block.k1 + k0)
                last = blocks[-1] if blocks else None
                if last and _is_whole(last) and _is_whole(moved) and (last.q0, last.q1, last.k1) == moved[:3]:
                    blocks[-1] = last._replace(k1=moved.k1)
                else:
                    blocks.append(moved)
    return blocks


def attend_(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Positions,
    keys: Positions,
    rule: AttentionRule,
) -> None:
    """Take the keys of one shard into `out` [Tq, H, Dv] and `lse` [Tq, H] (float32, changed in place).

    `q` [Tq, H, D] at positions `queries`, `k` [Tk, Hkv, D] and `v` [Tk, Hkv, Dv] at positions `keys`. The rule's sinks
    are left out: they count once, over all shards.
    """
    scale = rule.scale
    if rule.window is not None or rule.cap:
        at = as_tensor(queries, q.device), as_tensor(keys, q.device)
        merge_states_(out, lse, *windowed_block(q, k, v, *at, scale, window=rule.window, cap=rule.cap))
        return
    blocks = visible_blocks(queries, keys)
    if q.is_cuda and (any(block.is_masked for block in blocks) or not flashinfer_block.can_run(q, v)):
        # one kernel that goes by positions
        plan = _plan(queries, keys, q.shape[-1], q.dtype, q.device)
        merge_states_(out, lse, *positioned_block(q, k, v, plan, scale))
        return
    for block in blocks:
        rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
        mask = _mask(queries, keys, block, q) if block.is_masked else None
        part, part_lse = attention_block(q[rows], k[columns], v[columns], scale, block.is_causal, mask)
        merge_states_(out[rows], lse[rows], part, part_lse)


def as_tensor(positions: Positions, device: torch.device | str = "cpu") -> torch.Tensor:
    """The positions one by one, int64 [tokens]."""
    parts = [torch.arange(part.start, part.stop, part.step, dtype=torch.int64, device=device) for part in positions]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
def _plan(queries: Positions, keys: Positions, size: int, dtype: torch.dtype, device: torch.device) -> BlockPlan:
    """The same for all layers of a chunk, so kept."""
    return plan_block(as_tensor(queries, device), as_tensor(keys, device), default_sizes(size, dtype))


def _of_ranges(q: range, k: range) -> Iterator[Visible]:
    rows, columns = len(q), len(k)
    if k[0] > q[-1]:
        return
    if k[-1] <= q[0]:
        yield Visible(0, rows, 0, columns)
        return
    if q.step != k.step and rows > 1 and columns > 1:
        first = next(row for row, position in enumerate(q) if position >= k[0])
        yield Visible(first, rows, 0, columns, is_masked=True)
        return
    step = q.step if rows > 1 else k.step
    # Row r sees r + seen keys.
    seen = (q[0] - k[0]) // step + 1
    if seen > 1:
        yield Visible(0, rows, 0, seen - 1)
    first, k0 = max(0, 1 - seen), max(0, seen - 1)
    diagonal = min(rows - first, columns - k0)
    if diagonal > 0:
        yield Visible(first, first + diagonal, k0, k0 + diagonal, is_causal=True)
    if first + diagonal < rows:
        yield Visible(first + diagonal, rows, k0, columns)


def _mask(queries: Positions, keys: Positions, block: Visible, q: torch.Tensor) -> torch.Tensor:
    rows = as_tensor(queries, q.device)[block.q0 : block.q1]
    columns = as_tensor(keys, q.device)[block.k0 : block.k1]
    hidden = columns[None, :] > rows[:, None]
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, float("-inf"))


def _is_whole(block: Visible) -> bool:
    return not (block.is_causal or block.is_masked)


def _starts(positions: Positions) -> Iterator[int]:
    return accumulate((len(part) for part in positions[:-1]), initial=0)


class Attention(Protocol):
    """Attention over all that a group holds of a request."""

    def attend(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
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
        self, q: torch.Tensor, queries: Positions, kv: torch.Tensor, rule: AttentionRule, layer: int
    ) -> torch.Tensor:
        """Attention of `q` [Tq, H, D] at `queries` over what all members hold.

        `kv` [2, Tk, Hkv, D] is what this member holds, and is sent as it is; [1, Tk, 1, D] are latent rows, which are
        keys and values. Every member must call this for every layer, also one without queries. Returns [Tq, H, D] in
        float32. Raises MeshError.
        """
        out = torch.zeros(*q.shape[:2], kv.shape[-1], dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        block = kv
        for hop in range(self.size):
            keys = self._held[(self._place - hop) % self.size]
            following, calls = self._pass_on(block, hop, layer)
            if queries and keys:
                # FP8 is sent as it is stored, and widened by each reader.
                read = block.to(q.dtype) if block.element_size() == 1 else block
                attend_(out, lse, q, read[0], read[-1], queries, keys, rule)
            if calls:
                began_s = self._clock.now_s()
                for call in calls:
                    call.wait()
                self._clock.ring_s += self._clock.now_s() - began_s
            block = following
        if rule.sinks is not None:
            add_sinks_(out, lse, rule.sinks)
        return out

    def _pass_on(self, block: torch.Tensor, hop: int, layer: int) -> tuple[torch.Tensor, list[Pending]]:
        """Start sending `block` on and receiving the one before it; a member that holds nothing sends nothing."""
        if hop + 1 == self.size:
            return block, []
        tokens = count_tokens(self._held[(self._place - hop - 1) % self.size])
        following = block.new_empty((block.shape[0], tokens, *block.shape[2:]))
        tag = self._tag + layer * self.size + hop
        calls = []
        with self._mesh.batch():
            if block.numel():
                calls.append(self._mesh.send(block, self._next, tag))
            if following.numel():
                calls.append(self._mesh.receive(following, self._previous, tag))
        return following, calls


class DeferredErrorAttention:
    """An `Attention` that does not leave the model in the middle of a layer.

    A rank whose ring is broken has peer ranks that wait for it in the model's own collectives. It goes on with them to
    the end, computing zeros, and `check` then raises the error.
    """

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        # The error itself would hold all that the step has used.
        self._failure: tuple[str, int | None] | None = None

    def attend(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        if self._failure is None:
            try:
                return self._attention.attend(layer, q, rule)
            except MeshError as error:
                self._failure = str(error), error.instance
        return torch.zeros_like(q, dtype=torch.float32)

    def check(self) -> None:
        """Raises MeshError where the ring is broken."""
        if self._failure is not None:
            raise MeshError(*self._failure)
