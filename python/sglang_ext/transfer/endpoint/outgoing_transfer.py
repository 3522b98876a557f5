"""A request that this rank sends to one receiver: its state machine, its source slots, and the rows of each part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from sglang_ext.transfer.decide.protocol import Grant, SenderActions, SendRecord, TransferOutcome
from sglang_ext.transfer.decide.sender import Part, Sender, SenderPhase
from sglang_ext.transfer.decide.shards import KVShard
from sglang_ext.transfer.endpoint.part_times import PartTime
from sglang_ext.transfer.endpoint.transfer_status import SendResult, Stage, TransferStatus
from sglang_ext.transfer.pool_layout import PoolLayout, RowCopy, Slots, plan_items, plan_rows, plan_states


class SourceChunk(NamedTuple):
    """A chunk as this rank stores it: one slot per token of the shard, in its order.

    Slots and the slots of extra state may be None here; then its parts bring them.
    """

    shard: KVShard
    slots: Slots | None
    aux_slot: int | None
    state_slots: tuple[Slots, ...] | None = ()


class PartRows(NamedTuple):
    """Tokens [first_token, first_token + token_count) of the shard's order × some of its layers."""

    first_layer: int
    layer_count: int
    first_token: int
    token_count: int
    has_aux: bool  # the metadata and extra states of the chunk come with it


class DeviceEvent(Protocol):
    """A point in the work given to a device, such as a CUDA event."""

    def synchronize(self) -> None:
        """Return once the device has come there."""


class _PartSource(NamedTuple):
    rows: PartRows
    slots: Slots | None
    state_slots: tuple[Slots, ...] | None
    computed: DeviceEvent | None


class OutgoingTransfer:
    """One request towards one receiver, as the prefill side holds it. Made by `HandshakeEndpoint.open_sender`.

    Thread-safe. Its endpoint calls `use_grant`, `record_written` and `rows`, with the lock held.
    """

    def __init__(
        self,
        machine: Sender,
        lock: threading.RLock,
        clock: Callable[[], float],
        carry_out: Callable[[OutgoingTransfer, SenderActions], None],
    ) -> None:
        """`lock` guards the machine and all that is here; `carry_out` is called with it held."""
        self.machine = machine
        self.written_bytes = 0
        self._lock = lock
        self._clock = clock
        self._carry_out = carry_out
        self._result: SendResult | None = None
        self._chunks: list[SourceChunk] = []
        self._parts: list[list[_PartSource]] = []
        self._grants: dict[int, Grant] = {}
        self._ready_s: dict[tuple[int, int], float] | None = None  # of parts by chunk and number, where times are kept
        self._part_times: list[PartTime] = []

    @property
    def status(self) -> TransferStatus:
        """Return how far it is; `is_released` says that the source slots may be used for something else."""
        with self._lock:
            ended = self.machine.outcome
            if ended is not None:
                is_complete = ended[0] is TransferOutcome.COMPLETE
                is_released = self.machine.phase is not SenderPhase.STOPPING
                return TransferStatus(Stage.COMPLETE if is_complete else Stage.FAILED, *ended, is_released)
            if self._grants:
                return TransferStatus(Stage.TRANSFERRING, None, "", False)
            return TransferStatus(Stage.WAITING if self.machine.is_acknowledged else Stage.HANDSHAKE, None, "", False)

    @property
    def stored_chunks(self) -> int:
        """Return how many leading chunks are in the receiver's memory: their source slots are not read any more."""
        with self._lock:
            return self.machine.stored_chunks

    @property
    def result(self) -> SendResult | None:
        """Its record, once it has ended."""
        return self._result

    @property
    def part_times(self) -> list[PartTime]:
        """Return the times of the parts that have been written since `keep_times`."""
        with self._lock:
            return list(self._part_times)

    def keep_times(self) -> None:
        """Remember from now on when parts are there, and when they have been written."""
        self._ready_s = {}

    def offer(self, chunk: SourceChunk, *, is_last: bool = False) -> int:
        """A chunk will be computed; returns its index. Raises ValueError when it makes no sense."""
        if chunk.slots is not None and len(chunk.slots) != chunk.shard.token_count:
            raise ValueError(f"{len(chunk.slots)} slots for a chunk of {chunk.shard.token_count} tokens")
        if (chunk.aux_slot is not None) != chunk.shard.has_aux:
            raise ValueError("metadata come with an aux slot, and nothing else does")
        with self._lock:
            index = self.machine.chunk_count
            actions = self.machine.offer(chunk.shard, self._clock(), is_last=is_last)
            self._chunks.append(chunk)
            self._parts.append([])
            self._carry_out(self, actions)
            return index

    def part(
        self,
        chunk: int,
        rows: PartRows,
        slots: Slots | None = None,
        state_slots: tuple[Slots, ...] | None = None,
        computed: DeviceEvent | None = None,
    ) -> None:
        """A part of a chunk is in its source slots: `slots`, where they did not come with the chunk, one per token.

        `state_slots` likewise, per kind of extra state, in the part with metadata or states. `computed` is waited for
        before it is read. Ignored once the transfer has ended. Raises ValueError when it is more than the chunk has, or
        its slots are not known.
        """
        with self._lock:
            if self.machine.outcome is None:
                source = self._part_source(chunk, rows, slots, state_slots, computed)
                cells = rows.token_count * rows.layer_count * self._chunks[chunk].shard.head_count
                now_s = self._clock()
                actions = self.machine.part_ready(chunk, Part(cells, rows.has_aux), now_s)
                if self._ready_s is not None:
                    self._ready_s[chunk, len(self._parts[chunk])] = now_s
                self._parts[chunk].append(source)
                self._carry_out(self, actions)

    def close(self) -> None:
        """No further chunk will be offered; not needed after the last one was offered as such."""
        with self._lock:
            self._carry_out(self, self.machine.close(self._clock()))

    def abort(self, reason: str) -> None:
        """Give the transfer up, on both sides. Ignored once it has ended."""
        with self._lock:
            self._carry_out(self, self.machine.abort(reason, self._clock()))

    def restart(self, reason: str) -> None:
        """End this attempt on both sides: the receiver invites to the next one. Ignored once it has ended."""
        with self._lock:
            self._carry_out(self, self.machine.restart(reason, self._clock()))

    def end(self, record: SendRecord) -> SendResult:
        """Record that nothing is read any more; return the machine's record with what it cannot know."""
        self._result = SendResult(record, self.written_bytes)
        return self._result

    def use_grant(self, grant: Grant) -> None:
        """Remember where a chunk goes."""
        self._grants[grant.chunk] = grant

    def record_written(self, chunk: int, part: int, written_bytes: int, now_s: float) -> None:
        """A part has been written."""
        self.written_bytes += written_bytes
        if self._ready_s is not None:
            rows = self._parts[chunk][part].rows
            ready_s = self._ready_s.pop((chunk, part), now_s)
            place = (rows.first_token, rows.token_count, rows.first_layer, rows.layer_count)
            self._part_times.append(PartTime(chunk, *place, ready_s, now_s))

    def computed(self, chunk: int, part: int) -> DeviceEvent | None:
        """Return what must be waited for before a part is read."""
        return self._parts[chunk][part].computed

    def rows(self, chunk: int, part: int, mine: PoolLayout, peer: PoolLayout) -> list[RowCopy]:
        """Return the rows to copy for a part of a granted chunk. Raises ValueError when a pool does not hold it."""
        source, grant = self._chunks[chunk], self._grants[chunk]
        spec, slots, state_slots, _ = self._parts[chunk][part]
        copies: list[RowCopy] = []
        if slots is not None and spec.token_count and source.shard.head_count:
            tokens = slice(spec.first_token, spec.first_token + spec.token_count)
            shard = source.shard._replace(first_layer=spec.first_layer, layer_count=spec.layer_count)
            target_slots = np.frombuffer(grant.slots, np.uint32)
            copies += plan_rows(mine, peer, shard, slots, target_slots[tokens])
        if spec.has_aux and source.aux_slot is not None and grant.aux_slot is not None:
            copies += plan_items(mine.aux, peer.aux, _one(source.aux_slot), _one(grant.aux_slot))
        if spec.has_aux and mine.states:
            theirs = [np.frombuffer(target_bytes, np.uint32) for target_bytes in grant.state_slots]
            copies += plan_states(mine, peer, source.shard, state_slots or (), theirs)
        return copies

    def _part_source(
        self,
        chunk: int,
        rows: PartRows,
        slots: Slots | None,
        state_slots: tuple[Slots, ...] | None,
        computed: DeviceEvent | None,
    ) -> _PartSource:
        source, shard = self._chunks[chunk], self._chunks[chunk].shard
        layers_fit = shard.first_layer <= rows.first_layer and (
            rows.first_layer + rows.layer_count <= shard.first_layer + shard.layer_count
        )
        tokens_fit = rows.first_token >= 0 and rows.first_token + rows.token_count <= shard.token_count
        if rows.token_count and not (layers_fit and tokens_fit):
            raise ValueError(f"transfer {self.machine.transfer_id}: a part lies outside of chunk {chunk}")
        if slots is None and source.slots is not None:
            slots = source.slots[rows.first_token : rows.first_token + rows.token_count]
        if rows.token_count and (slots is None or len(slots) != rows.token_count):
            raise ValueError(
                f"transfer {self.machine.transfer_id}: a part of chunk {chunk} has no slots, or another number of them"
            )
        return _PartSource(rows, slots, source.state_slots if state_slots is None else state_slots, computed)


def _one(slot: int) -> Slots:
    return np.array([slot], np.uint32)
