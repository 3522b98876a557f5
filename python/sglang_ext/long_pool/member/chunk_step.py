"""One chunk of a CDSP plan on one member of its group: rebalance, compute the member's part, keep its KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sglang_ext.long_pool.decide.kept_prompts import within
from sglang_ext.long_pool.decide.sharding import ChunkLayout, KvMove, Positions, count_tokens
from sglang_ext.long_pool.member.ranks import SINGLE_RANK, Ranks, all_ranks_or_raise
from sglang_ext.long_pool.member.ring_attention import (
    Attention,
    AttentionRule,
    DeferredErrorAttention,
    Ring,
    as_tensor,
)
from sglang_ext.long_pool.member.shard import (
    HeldRows,
    KvPool,
    KvPoolFullError,
    LayoutMismatchError,
    Rebalancing,
    Shard,
    rows_within,
)
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


@dataclass(frozen=True)
class StepContext:
    """Holds what one step of a member works with."""

    mesh: Mesh
    instance: int  # this one
    first_tag: int  # of the messages of this step
    clock: StepClock = field(default_factory=StepClock)  # counts where the time goes
    ranks: Ranks = SINGLE_RANK  # of several, all raise where one does
    record_activity: Callable[[], None] = lambda: None  # called with every layer
    streams: DeviceStreams | None = None  # of the device that computes; None: a call that has returned is done


def run_chunk(
    step: StepContext,
    engine: Engine,
    shard: Shard,
    layout: ChunkLayout,
    token_ids: Sequence[int],
    sending: Sending | None = None,
) -> torch.Tensor | None:
    """Run this member's part of a chunk; `token_ids` are those of its new positions.

    Returns the logits of the chunk's last position on the member that computes it, else None. Raises KvPoolFullError,
    WorkspaceError and LayoutMismatchError before anything was sent, MeshError when a peer has gone; the shard is then
    as before, and so it is after `Shard.roll_back` where another member failed. History travels
    behind the computation of earlier layers. `sending` gets the slots of the new rows once every member of the step has
    its own, so that a step which fails before has sent nothing; what it returns is called with every layer whose K and
    V are there.
    """
    mesh, instance, ranks = step.mesh, step.instance, step.ranks
    place = layout.group.index(instance)
    positions = layout.new[place]
    pool = engine.pool
    shard.begin()
    try:
        # The model's own collectives need every rank, so that none may begin where another one cannot, or leave.
        with all_ranks_or_raise(ranks, *STEP_ERRORS):
            move_tag = step.first_tag + pool.layers * len(layout.group)
            moving = Rebalancing(pool, shard, layout.moves, mesh, instance, move_tag, step.clock)
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
        rows = HeldRows(shard.positions, shard.slots)
        attention = _ChunkAttention(step, pool, layout, held, rows, moving, layer_ready)
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


def run_collect(step: StepContext, pool: KvPool, shard: Shard, moves: Sequence[KvMove]) -> None:
    """Send what this instance holds to the owner, or as the owner receive it. Raises as `run_chunk`, and restores."""
    shard.begin()
    try:
        with all_ranks_or_raise(step.ranks, *STEP_ERRORS):
            moving = Rebalancing(pool, shard, moves, step.mesh, step.instance, step.first_tag, step.clock)
            for layer in range(pool.layers):
                moving.start(layer + 1)
                moving.finish(layer)
            step.mesh.settle()
    except BaseException:
        shard.roll_back()
        raise


def _no_one(layer: int, computed: Mark | None) -> None:
    """KV stays among the members."""


class _ChunkAttention:
    def __init__(
        self,
        step: StepContext,
        pool: KvPool,
        layout: ChunkLayout,
        held: Sequence[Positions],
        rows: HeldRows,
        moving: Rebalancing,
        layer_ready: LayerReady,
    ) -> None:
        """`held`: by place in the ring, what that member holds with the chunk's new positions; `rows` of this one."""
        self._step = step
        self._layer_ready = layer_ready
        self._pool = pool
        self._layout = layout
        self._queries = layout.new[layout.group.index(step.instance)]
        self._held = held
        self._rows = rows
        self._moving = moving
        self._first = min((part[0] for positions in layout.new for part in positions), default=0)
        self._rings: dict[int | None, tuple[Ring, torch.Tensor]] = {}  # by window

    def attend(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        streams = self._step.streams
        self._step.record_activity()
        self._layer_ready(layer, None if streams is None else streams.mark())
        self._moving.finish(layer)
        # It travels while this layer attends and passes its fully connected part.
        self._moving.start(layer + 1)
        ring, slots = self._ring_of(rule.window)
        return ring.attend(q, self._queries, self._pool.read(layer, slots), rule, layer)

    def _ring_of(self, window: int | None) -> tuple[Ring, torch.Tensor]:
        """Return the ring of layers with this window, and the slots of this member's rows that go round in it: those
        that a query of the chunk may see."""
        if window not in self._rings:
            held, rows = self._held, self._rows
            if window is not None:
                start, end = self._first - window, max(part[-1] for positions in held for part in positions) + 1
                held = [within(positions, start, end) for positions in held]
                rows = rows_within(rows, start, end)
            step = self._step
            ring = Ring(step.mesh, self._layout.group, step.instance, held, step.first_tag, step.clock)
            self._rings[window] = ring, rows.slots
        return self._rings[window]
