"""One chunk of a CDSP plan on one member of its group: rebalance, compute the member's part, keep its KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sglang_ext.long_pool.decide.sharding import ChunkLayout, KvMove, Positions, count_tokens
from sglang_ext.long_pool.member.ranks import SINGLE_RANK, Ranks, all_ranks_or_raise
from sglang_ext.long_pool.member.ring_attention import Attention, DeferredErrorAttention, Ring, as_tensor
from sglang_ext.long_pool.member.shard import KvPool, KvPoolFullError, LayoutMismatchError, Rebalancing, Shard
from sglang_ext.long_pool.mesh.device_streams import DeviceStreams, Mark
from sglang_ext.long_pool.mesh.mesh import Mesh, MeshError, first_line
from sglang_ext.long_pool.step_clock import StepClock


class StreamError(RuntimeError):
    """This member cannot send to a decode rank that waits for its rows."""


class WorkspaceError(RuntimeError):
    """This instance has no memory for what a chunk needs besides KV, as a trial before it shows."""


# What fails a step for the time being; the shard is as it was before.
STEP_ERRORS = (MeshError, KvPoolFullError, LayoutMismatchError, StreamError, WorkspaceError)


def step_errors(ranks: Ranks) -> tuple[type[Exception], ...]:
    """The same, and memory that the model could not have although it could before.

    Of several ranks a single one would leave the others waiting in the model's collectives: there it ends the process.
    """
    return STEP_ERRORS if ranks.size > 1 else (*STEP_ERRORS, torch.OutOfMemoryError)


LayerReady = Callable[[int, Mark | None], None]  # layer; behind what its K and V are there, None: they are
Sending = Callable[[torch.Tensor], LayerReady]


class Engine(Protocol):
    """The model of an instance, and its KV memory."""

    @property
    def pool(self) -> KvPool: ...

    def forward(
        self, token_ids: Sequence[int], positions: torch.Tensor, slots: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Compute these rows (possibly none), writing their K and V to `slots`.

        `positions` and `slots` are int64 [rows]. Attention layers ask `attention`. Returns the logits of the last
        row, float32 [vocabulary].
        """

    def try_workspace(self, rows: int, held_tokens: int) -> None:
        """Allocate, and free at once, about what `forward` needs for this many rows of a prompt, of which this many
        tokens are held here. Raises torch.OutOfMemoryError."""


def run_chunk(
    engine: Engine,
    shard: Shard,
    layout: ChunkLayout,
    token_ids: Sequence[int],
    mesh: Mesh,
    instance: int,
    first_tag: int,
    *,
    clock: StepClock | None = None,
    sending: Sending | None = None,
    ranks: Ranks = SINGLE_RANK,
    record_activity: Callable[[], None] = lambda: None,
    streams: DeviceStreams | None = None,
) -> torch.Tensor | None:
    """Run this member's part of a chunk; `token_ids` are those of its new positions.

    Returns the logits of the chunk's last position on the member that computes it, else None. Raises KvPoolFullError,
    WorkspaceError and LayoutMismatchError before anything was sent, MeshError when a peer has gone; the shard is then
    as before, and so it is after `Shard.roll_back` where another member failed. History travels
    behind the computation of earlier layers. `clock` counts where the time goes. `sending` gets the
    slots of the new rows once every member of the step has its own, so that a step which fails before has sent nothing;
    what it returns is called with every layer whose K and V are there. `record_activity` is called with every layer.
    `streams` of the device that computes; None: a call that has returned is done. Of several `ranks` all raise where
    one does.
    """
    clock = clock or StepClock()
    place = layout.group.index(instance)
    positions = layout.new[place]
    pool = engine.pool
    shard.begin()
    try:
        # The model's own collectives need every rank, so that none may begin where another one cannot, or leave.
        with all_ranks_or_raise(ranks, *STEP_ERRORS):
            move_tag = first_tag + pool.layers * len(layout.group)
            moving = Rebalancing(pool, shard, layout.moves, mesh, instance, move_tag, clock)
            slots = shard.extend(positions)
            held = [(*history, *new) for history, new in zip(layout.history, layout.new, strict=True)]
            if shard.positions != held[place]:
                raise LayoutMismatchError(f"instance {instance} holds {shard.positions}, the layout says {held[place]}")
        _check_workspace(engine, count_tokens(positions), count_tokens(shard.positions), ranks)
        layer_ready: LayerReady = _no_one
        if sending is not None:
            # What fails at any member before all are ready, as most that fails does, has sent nothing anywhere.
            with all_ranks_or_raise(ranks, MeshError):
                mesh.meet()
            with all_ranks_or_raise(ranks, *STEP_ERRORS):
                layer_ready = sending(slots)
        ring = Ring(mesh, layout.group, instance, held, first_tag, clock)
        attention = _ChunkAttention(pool, ring, positions, shard.slots, moving, layer_ready, record_activity, streams)
        deferred = DeferredErrorAttention(attention) if ranks.size > 1 else None
        with all_ranks_or_raise(ranks, *STEP_ERRORS):
            logits = engine.forward(token_ids, as_tensor(positions), slots, deferred or attention)
            if deferred is not None:
                deferred.check()
            mesh.settle()
    except BaseException:
        shard.roll_back()
        raise
    return logits if layout.last_token_owner == instance else None


def _check_workspace(engine: Engine, rows: int, held_tokens: int, ranks: Ranks) -> None:
    """Check memory before the model runs: later no rank can give up without blocking the others' collectives."""
    reason = ""
    try:
        engine.try_workspace(rows, held_tokens)
    except torch.OutOfMemoryError as error:
        reason = first_line(error) or "out of memory"
    if not ranks.all(not reason):
        raise WorkspaceError(reason or "another rank of this instance has no memory for this chunk")


def run_collect(
    pool: KvPool,
    shard: Shard,
    moves: Sequence[KvMove],
    mesh: Mesh,
    instance: int,
    first_tag: int,
    *,
    clock: StepClock | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> None:
    """Send what this instance holds to the owner, or as the owner receive it. Raises as `run_chunk`, and restores."""
    shard.begin()
    try:
        with all_ranks_or_raise(ranks, *STEP_ERRORS):
            moving = Rebalancing(pool, shard, moves, mesh, instance, first_tag, clock)
            for layer in range(pool.layers):
                moving.start(layer + 1)
                moving.finish(layer)
            mesh.settle()
    except BaseException:
        shard.roll_back()
        raise


def _no_one(layer: int, computed: Mark | None) -> None:
    """KV stays among the members."""


class _ChunkAttention:
    def __init__(
        self,
        pool: KvPool,
        ring: Ring,
        queries: Positions,
        slots: torch.Tensor,
        moving: Rebalancing,
        layer_ready: LayerReady,
        record_activity: Callable[[], None],
        streams: DeviceStreams | None,
    ) -> None:
        self._streams = streams
        self._layer_ready = layer_ready
        self._record_activity = record_activity
        self._pool = pool
        self._ring = ring
        self._queries = queries
        self._slots = slots
        self._moving = moving

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        self._record_activity()
        self._layer_ready(layer, None if self._streams is None else self._streams.mark())
        self._moving.finish(layer)
        # It travels while this layer attends and passes its fully connected part.
        self._moving.start(layer + 1)
        return self._ring.attend(q, self._queries, self._pool.read(layer, self._slots), scale, layer)
