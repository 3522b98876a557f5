"""Describes where the KV pool of one rank lies in its memory, and which rows must be copied from one pool to another.

SGLang's pools are, per layer, one K and one V buffer of shape [slots, heads, head_dim] (NHD): a slot is a row, a
range of heads is a range of bytes within it. With latent attention (MLA) a layer has one buffer, whose rows all heads
share: it is a pool of one KV head. A page is a run of slots, so the page size does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_ext.transfer.decide.shards import KVShard

Slots: TypeAlias = "npt.NDArray[np.uint32]"


class ItemBuffer(NamedTuple):
    """An array of equal items in memory."""

    address: int
    item_bytes: int
    item_count: int

    @property
    def length_bytes(self) -> int:
        return self.item_bytes * self.item_count


LayerBuffers: TypeAlias = tuple[ItemBuffer, ...]
"""K and V of one layer, or its latent rows; items are token slots."""


class StatePart(NamedTuple):
    """A run of bytes within an item of a state: each rank of an instance has an equal piece of the whole, in order, or
    each rank has all of it."""

    offset_bytes: int
    length_bytes: int
    is_on_all_ranks: bool = False

    def whole_bytes(self, ranks: int) -> int:
        """Return the bytes of the whole, of which this is a rank's piece."""
        return self.length_bytes * (1 if self.is_on_all_ranks else ranks)

    def first_byte(self, rank: int) -> int:
        """Return where in the whole a rank's piece begins."""
        return 0 if self.is_on_all_ranks else rank * self.length_bytes


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One rank's pool. `aux` are the metadata buffers, one item per request; `states` the buffers of each kind of
    extra state; a model of recurrent layers alone has nothing else. Raises ValueError when the numbers contradict each
    other."""

    kv_dtype: str  # as SGLang names it: both sides must agree
    first_layer: int
    layers: tuple[LayerBuffers, ...]
    first_head: int  # the model's KV head that is head 0 here
    head_count: int  # heads that there is memory for
    aux: tuple[ItemBuffer, ...] = ()
    states: tuple[tuple[ItemBuffer, ...], ...] = ()
    states_by_head: tuple[bool, ...] = ()  # per kind: items are tokens' heads, as in a layer; none where empty
    # Per kind and buffer: the parts of an item that are divided over the ranks; a kind without parts is not divided.
    state_parts: tuple[tuple[tuple[StatePart, ...], ...], ...] = ()
    rank: int = 0
    ranks: int = 1
    has_draft: bool = False  # the last layer is all of a draft model's

    def __post_init__(self) -> None:
        if self.head_count < 1 or not (self.layers or self.states):
            raise ValueError("a KV pool has at least one head, and a layer or a kind of state")
        for layer in self.layers:
            for buffer in layer:
                if buffer.item_bytes % self.head_count:
                    raise ValueError(
                        f"a token of {buffer.item_bytes} bytes does not hold {self.head_count} equal heads"
                    )

    @property
    def buffers(self) -> tuple[ItemBuffer, ...]:
        """Every buffer that a transfer may touch."""
        kv = (buffer for layer in self.layers for buffer in layer)
        return (*kv, *self.aux, *(buffer for kind in self.states for buffer in kind))

    def layout_mismatch(self, peer: PoolLayout) -> str | None:
        """One line that says why KV of this pool cannot be used in the peer's, or None."""
        if self.kv_dtype != peer.kv_dtype:
            return f"KV is {self.kv_dtype} here and {peer.kv_dtype} at the peer"
        if self.has_draft != peer.has_draft:
            return "one of the two has a draft model (--speculative-algorithm), the other has none"
        for mine, other in zip(self._shared(peer), peer._shared(self), strict=True):
            if [buffer.item_bytes // self.head_count for buffer in mine] != [
                buffer.item_bytes // peer.head_count for buffer in other
            ]:
                return "one head of one token takes another number of bytes at the peer"
        if len(self.aux) != len(peer.aux) or any(
            a.item_bytes != b.item_bytes for a, b in zip(self.aux, peer.aux, strict=True)
        ):
            return "the metadata buffers differ from the peer's"
        if self._state_bytes != peer._state_bytes:
            return "extra states take other bytes at the peer: both need one tensor parallel size"
        return None

    @property
    def _state_bytes(self) -> list[tuple[bool, list[tuple[int, bool]]]]:
        """Per kind, whether its items are cut by heads, and the bytes of a head, of a part on all ranks or of an
        item, with whether each rank has all of it."""
        sizes = []
        for is_cut, parts, kind in zip(self.cut_states, self.parts_of_states, self.states, strict=True):
            whole = [(part.whole_bytes(self.ranks), part.is_on_all_ranks) for buffer in parts for part in buffer]
            heads = self.head_count if is_cut else 1
            sizes.append((is_cut, whole or [(item.item_bytes // heads, not is_cut) for item in kind]))
        return sizes

    @property
    def parts_of_states(self) -> tuple[tuple[tuple[StatePart, ...], ...], ...]:
        """Return `state_parts`, with nothing for each kind where there are none at all."""
        return self.state_parts or ((),) * len(self.states)

    @property
    def cut_states(self) -> tuple[bool, ...]:
        """Return per kind of extra state whether it is cut by heads."""
        return self.states_by_head or (False,) * len(self.states)

    def _shared(self, peer: PoolLayout) -> tuple[LayerBuffers, ...]:
        """Layers of this pool that the peer has too."""
        first = max(self.first_layer, peer.first_layer)
        stop = min(self.first_layer + len(self.layers), peer.first_layer + len(peer.layers))
        return self.layers[first - self.first_layer : max(first, stop) - self.first_layer]


class RowSet(NamedTuple):
    """`length_bytes` bytes at address + slot × stride, for each of some slots."""

    address: int
    stride: int
    length_bytes: int


class RowCopy(NamedTuple):
    """Copy `length_bytes` of each row: from source_address + slot × source_stride to target_address + slot ×
    target_stride, for each pair of slots."""

    source_address: int
    source_stride: int
    source_slots: Slots
    target_address: int
    target_stride: int
    target_slots: Slots
    length_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.length_bytes * len(self.source_slots)

    @property
    def source(self) -> RowSet:
        return RowSet(self.source_address, self.source_stride, self.length_bytes)

    @property
    def target(self) -> RowSet:
        return RowSet(self.target_address, self.target_stride, self.length_bytes)


def plan_rows(
    source: PoolLayout, target: PoolLayout, shard: KVShard, source_slots: Slots, target_slots: Slots
) -> list[RowCopy]:
    """Rows of a shard's heads and layers; the slots are of its tokens, in one order.

    Raises ValueError when one of the pools does not hold them.
    """
    if len(source_slots) != len(target_slots):
        raise ValueError(f"{len(source_slots)} source slots for {len(target_slots)} target slots")
    for name, pool in (("source", source), ("target", target)):
        heads_fit = pool.first_head <= shard.first_head and (
            shard.first_head + shard.head_count <= pool.first_head + pool.head_count
        )
        layers_fit = pool.first_layer <= shard.first_layer and (
            shard.first_layer + shard.layer_count <= pool.first_layer + len(pool.layers)
        )
        if not heads_fit or not layers_fit:
            raise ValueError(f"the {name} pool does not hold these heads and layers")
    rows: list[RowCopy] = []
    for layer in range(shard.first_layer, shard.first_layer + shard.layer_count):
        buffers = source.layers[layer - source.first_layer], target.layers[layer - target.first_layer]
        rows += _plan_heads(source, target, shard, *buffers, source_slots, target_slots)
    return rows


def plan_states(
    source: PoolLayout,
    target: PoolLayout,
    shard: KVShard,
    source_slots: Sequence[Slots],
    target_slots: Sequence[Slots],
) -> list[RowCopy]:
    """Return the copies of extra states, per kind: the shard's heads of cut states, of states in parts what the rank
    has of the target's pieces. Other states, and parts that all ranks have, come whole with the metadata.

    Raises ValueError when the numbers of kinds, buffers or items differ.
    """
    copies: list[RowCopy] = []
    buffers = zip(source.states, target.states, source_slots, target_slots, strict=True)
    for kind, (here, there, mine, theirs) in enumerate(buffers):
        is_cut, parts = source.cut_states[kind], source.parts_of_states[kind]
        is_divided = bool(parts) and source.ranks != target.ranks
        if not is_cut and not is_divided:
            copies += plan_items(here, there, mine, theirs) if shard.has_aux else ()
            continue
        if len(mine) != len(theirs):
            raise ValueError("source and target of items differ in number")
        if is_cut and shard.head_count:
            copies += _plan_heads(source, target, shard, here, there, mine, theirs)
        elif is_divided:
            pieces = zip(parts, target.parts_of_states[kind], strict=True)
            for buffer, ours_and_theirs in zip(zip(here, there, strict=True), pieces, strict=True):
                copies += _plan_parts(
                    *(source, target, *buffer, *ours_and_theirs, mine, theirs), sends_shared=shard.has_aux
                )
    return copies


def _plan_parts(
    source: PoolLayout,
    target: PoolLayout,
    here: ItemBuffer,
    there: ItemBuffer,
    source_parts: Sequence[StatePart],
    target_parts: Sequence[StatePart],
    source_slots: Slots,
    target_slots: Slots,
    *,
    sends_shared: bool,
) -> Iterator[RowCopy]:
    """Yield a copy for each part of which both ranks have bytes: of the bytes that both have.

    `sends_shared`: parts that all ranks have come from this one.
    """
    for mine, theirs in zip(source_parts, target_parts, strict=True):
        if mine.is_on_all_ranks and not sends_shared:
            continue
        first, target_first = mine.first_byte(source.rank), theirs.first_byte(target.rank)
        start = max(first, target_first)
        stop = min(first + mine.length_bytes, target_first + theirs.length_bytes)
        if start < stop:
            yield RowCopy(
                here.address + mine.offset_bytes + start - first,
                here.item_bytes,
                source_slots,
                there.address + theirs.offset_bytes + start - target_first,
                there.item_bytes,
                target_slots,
                stop - start,
            )


def _plan_heads(
    source: PoolLayout,
    target: PoolLayout,
    shard: KVShard,
    here: Iterable[ItemBuffer],
    there: Iterable[ItemBuffer],
    source_slots: Slots,
    target_slots: Slots,
) -> Iterator[RowCopy]:
    for mine, theirs in zip(here, there, strict=True):
        head_bytes = mine.item_bytes // source.head_count
        yield RowCopy(
            mine.address + (shard.first_head - source.first_head) * head_bytes,
            mine.item_bytes,
            source_slots,
            theirs.address + (shard.first_head - target.first_head) * head_bytes,
            theirs.item_bytes,
            target_slots,
            shard.head_count * head_bytes,
        )


def plan_items(
    source: tuple[ItemBuffer, ...], target: tuple[ItemBuffer, ...], source_slots: Slots, target_slots: Slots
) -> list[RowCopy]:
    """Whole items of parallel buffers (metadata, extra state). Raises ValueError when their numbers differ."""
    if len(source_slots) != len(target_slots) or len(source) != len(target):
        raise ValueError("source and target of items differ in number")
    return [
        RowCopy(
            here.address, here.item_bytes, source_slots, there.address, there.item_bytes, target_slots, here.item_bytes
        )
        for here, there in zip(source, target, strict=True)
    ]


def cut_rows(copies: Iterable[RowCopy], max_bytes: int) -> Iterator[list[RowCopy]]:
    """The same bytes, cut into parts of at most `max_bytes` each."""
    part: list[RowCopy] = []
    left_bytes = max_bytes
    for copy in copies:
        for columns in _cut_columns(copy, max_bytes):
            first, rows = 0, len(columns.source_slots)
            while first < rows:
                count = min(rows - first, left_bytes // columns.length_bytes)
                if not count:
                    yield part
                    part, left_bytes = [], max_bytes
                    continue
                part.append(columns if count == rows else _some_rows(columns, first, first + count))
                left_bytes -= part[-1].total_bytes
                first += count
    if part:
        yield part


def group_by_slots(copies: Iterable[RowCopy]) -> Iterator[list[RowCopy]]:
    """Copies that follow each other and are of the very same slots."""
    for _, group in groupby(copies, key=lambda copy: (id(copy.source_slots), id(copy.target_slots))):
        yield list(group)


def join_rows(copies: Iterable[RowCopy]) -> npt.NDArray[np.uint64]:
    """Source, target and length of pieces [n, 3]: rows that follow each other on both sides are one."""
    found = [_pieces(copy) for copy in copies if len(copy.source_slots)]
    return np.concatenate(found) if found else np.empty((0, 3), np.uint64)


def count_runs(source_slots: Slots, target_slots: Slots) -> int:
    """Return how many runs of slots follow each other on both sides; at least one slot."""
    breaks = (source_slots[1:] != source_slots[:-1] + 1) | (target_slots[1:] != target_slots[:-1] + 1)
    return 1 + int(np.count_nonzero(breaks))


def _pieces(copy: RowCopy) -> npt.NDArray[np.uint64]:
    length = copy.length_bytes
    sources = copy.source_address + copy.source_slots.astype(np.int64) * copy.source_stride
    targets = copy.target_address + copy.target_slots.astype(np.int64) * copy.target_stride
    breaks = (np.diff(sources) != length) | (np.diff(targets) != length)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    rows = np.diff(np.concatenate((starts, [len(sources)])))
    return np.stack([sources[starts], targets[starts], rows * length], axis=1).astype(np.uint64)


def _some_rows(copy: RowCopy, first: int, stop: int) -> RowCopy:
    return copy._replace(source_slots=copy.source_slots[first:stop], target_slots=copy.target_slots[first:stop])


def _cut_columns(copy: RowCopy, max_bytes: int) -> Iterator[RowCopy]:
    """The same bytes as copies of rows of at most `max_bytes`."""
    if copy.length_bytes <= max_bytes:
        yield copy
        return
    for offset in range(0, copy.length_bytes, max_bytes):
        yield copy._replace(
            source_address=copy.source_address + offset,
            target_address=copy.target_address + offset,
            length_bytes=min(max_bytes, copy.length_bytes - offset),
        )
