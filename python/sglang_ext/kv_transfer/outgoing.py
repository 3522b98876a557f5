"""A request that this rank sends to one receiver: its state machine, its source slots, and the rows of each part."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_ext.kv_transfer.pool_layout import PoolLayout, RowCopy, Slots, plan_items, plan_rows
from sglang_ext.kv_transfer.transfer_status import SendResult, Stage, TransferStatus
from sglang_ext.policy.handshake.protocol import Grant, TransferOutcome
from sglang_ext.policy.handshake.sender import Part, Sender, SenderPhase
from sglang_ext.policy.handshake.shards import KVShard


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
    has_aux: bool


class _PartSource(NamedTuple):
    rows: PartRows
    slots: Slots | None
    state_slots: tuple[Slots, ...] | None


class Outgoing:
    """Everything about one request towards one receiver; guarded by the endpoint's lock."""

    def __init__(self, machine: Sender) -> None:
        self.machine = machine
        self.written_bytes = 0
        self.result: SendResult | None = None
        self._chunks: list[SourceChunk] = []
        self._parts: list[list[_PartSource]] = []
        self._grants: dict[int, Grant] = {}

    @property
    def status(self) -> TransferStatus:
        ended = self.machine.outcome
        if ended is not None:
            is_complete = ended[0] is TransferOutcome.COMPLETE
            is_released = self.machine.phase is not SenderPhase.STOPPING
            return TransferStatus(Stage.COMPLETE if is_complete else Stage.FAILED, *ended, is_released)
        if self._grants:
            return TransferStatus(Stage.TRANSFERRING, None, "", False)
        return TransferStatus(Stage.WAITING if self.machine.is_acknowledged else Stage.HANDSHAKE, None, "", False)

    def add_chunk(self, chunk: SourceChunk) -> None:
        """Raises ValueError when its slots are not those of its shard."""
        if chunk.slots is not None and len(chunk.slots) != chunk.shard.token_count:
            raise ValueError(f"{len(chunk.slots)} slots for a chunk of {chunk.shard.token_count} tokens")
        if (chunk.aux_slot is not None) != chunk.shard.has_aux:
            raise ValueError("metadata come with an aux slot, and nothing else does")
        self._chunks.append(chunk)
        self._parts.append([])

    def drop_last_chunk(self) -> None:
        """Undo `add_chunk`."""
        self._chunks.pop()
        self._parts.pop()

    def add_part(self, chunk: int, part: PartRows, slots: Slots | None, state_slots: tuple[Slots, ...] | None) -> Part:
        """The next part of a chunk, as the state machine counts it.

        Raises ValueError outside of the chunk, and when its slots are not known or of another number.
        """
        source, shard = self._chunks[chunk], self._chunks[chunk].shard
        layers_fit = shard.first_layer <= part.first_layer and (
            part.first_layer + part.layer_count <= shard.first_layer + shard.layer_count
        )
        tokens_fit = part.first_token >= 0 and part.first_token + part.token_count <= shard.token_count
        if part.token_count and not (layers_fit and tokens_fit):
            raise ValueError(f"room {self.machine.room}: a part lies outside of chunk {chunk}")
        if slots is None and source.slots is not None:
            slots = source.slots[part.first_token : part.first_token + part.token_count]
        if part.token_count and (slots is None or len(slots) != part.token_count):
            raise ValueError(
                f"room {self.machine.room}: a part of chunk {chunk} has no slots, or another number of them"
            )
        self._parts[chunk].append(_PartSource(part, slots, source.state_slots if state_slots is None else state_slots))
        return Part(part.token_count * part.layer_count * shard.head_count, part.has_aux)

    def drop_last_part(self, chunk: int) -> None:
        """Undo `add_part`."""
        self._parts[chunk].pop()

    def use_grant(self, grant: Grant) -> None:
        """Remember where a chunk goes."""
        self._grants[grant.chunk] = grant

    def rows(self, chunk: int, part: int, mine: PoolLayout, peer: PoolLayout) -> list[RowCopy]:
        """What must be copied for a part of a granted chunk. Raises ValueError when a pool does not hold it."""
        source, grant = self._chunks[chunk], self._grants[chunk]
        spec, slots, state_slots = self._parts[chunk][part]
        copies: list[RowCopy] = []
        if slots is not None and spec.token_count and source.shard.head_count:
            tokens = slice(spec.first_token, spec.first_token + spec.token_count)
            shard = source.shard._replace(first_layer=spec.first_layer, layer_count=spec.layer_count)
            target_slots = np.frombuffer(grant.slots, np.uint32)
            copies += plan_rows(mine, peer, shard, slots, target_slots[tokens])
        if spec.has_aux and source.aux_slot is not None and grant.aux_slot is not None:
            copies += plan_items(mine.aux, peer.aux, _one(source.aux_slot), _one(grant.aux_slot))
            kinds = zip(mine.states, peer.states, state_slots or (), grant.state_slots, strict=True)
            for here, there, source_slots, target_bytes in kinds:
                copies += plan_items(here, there, source_slots, np.frombuffer(target_bytes, np.uint32))
        return copies


def _one(slot: int) -> Slots:
    return np.array([slot], np.uint32)
