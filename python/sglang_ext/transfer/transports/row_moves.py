"""Rows of registered memory to consecutive bytes and back: what stands between a pool and a message.

Heads of a wider pool and slots without order are many short rows: a Python object for each costs more than moving it.
The shortest are gathered into a staging buffer, which is moved whole; longer ones, and runs of rows that follow each
other, move from and to their place, as vectors that the kernel takes a thousand of at a time. Rows of all buffers share
one `SlotIndex`, so slots are looked at once and not per layer.

Where the C++ module `_rows` is built (`native/rows.cpp`) it copies: it fetches rows before it gathers them, and writes
scattered rows past the processor's cache. Without it numpy copies the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_ext.transfer.pool_layout import RowSet, Slots
from sglang_ext.transfer.transports.memory_regions import MemoryRegions, OutOfBoundsError, Span, Vectors

native_rows: ModuleType | None
try:
    from sglang_ext.transfer.transports import _rows as native_rows
except ImportError:  # no C++ compiler where this was installed
    native_rows = None

Bytes: TypeAlias = "npt.NDArray[np.uint8]"

# Rows, or runs of them, of at least this many bytes are moved from and to their place: a vector costs as much at either
# end as some thousand bytes copied in C++, or some hundred by numpy.
DIRECT_BYTES = 1024 if native_rows is None else 4096
# What is gathered before it is sent, and what is received before it is scattered. A larger one leaves the processor's
# cache, with a smaller one a sender waits more often.
SEND_STAGING_BYTES = 4 << 20
RECEIVE_STAGING_BYTES = 1 << 20


class SlotIndex:
    """Slots as indices into the rows from the lowest to the highest of them."""

    def __init__(self, slots: Slots) -> None:
        """`slots`: at least one."""
        self.count = len(slots)
        self.low = int(slots.min())
        self.rows = int(slots.max()) - self.low + 1  # from the lowest to the highest
        self._relative = np.subtract(slots, self.low, dtype=np.int64)
        self._scaled: dict[int, npt.NDArray[np.int64]] = {1: self._relative}
        self.relative_slots = self._relative.astype(np.uint32)  # to the lowest, as `native_rows` takes them
        self._breaks = self._relative[1:] != self._relative[:-1] + 1
        self._run_count = 1 + int(np.count_nonzero(self._breaks))

    @property
    def is_one_run(self) -> bool:
        """Return whether all slots follow each other."""
        return self._run_count == 1

    @property
    def mean_run(self) -> float:
        """Slots that follow each other."""
        return self.count / self._run_count

    def scaled(self, factor: int) -> npt.NDArray[np.int64]:
        """Indices where `factor` rows of the same length stand for one slot."""
        scaled = self._scaled.get(factor)
        if scaled is None:
            scaled = self._scaled[factor] = self._relative * factor
        return scaled

    @cached_property
    def runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First row and number of rows of each run of slots that follow each other, in order."""
        if self.is_one_run:
            return self._relative[:1], np.array([self.count])
        starts = np.concatenate(([0], np.flatnonzero(self._breaks) + 1))
        return self._relative[starts], np.diff(np.concatenate((starts, [self.count])))


class RowWindow:
    """The rows of one `RowSet` in this process's memory. Made by `open_rows`, valid as long as that is."""

    def __init__(self, view: memoryview, rows: RowSet, index: SlotIndex) -> None:
        self.count = index.count
        self.length_bytes = rows.length_bytes
        self._view = view
        self._address = rows.address + index.low * rows.stride
        self._stride = rows.stride
        self._index = index
        # Long rows, or runs of them, need no staging.
        run_bytes = rows.length_bytes * (index.mean_run if rows.stride == rows.length_bytes else 1)
        self.is_direct = run_bytes >= DIRECT_BYTES
        self._step, rest = divmod(rows.stride, rows.length_bytes)
        self._is_dense = not rest  # so that the rows of one slot and the next are whole rows apart
        if rest:
            self._step = 1

    @cached_property
    def _items(self) -> npt.NDArray[Any]:  # numpy has no type for an item of any size
        kind = np.dtype((np.void, self.length_bytes))
        if self._is_dense:
            return np.frombuffer(self._view, kind)
        item = np.frombuffer(self._view[: self.length_bytes], kind)
        return np.lib.stride_tricks.as_strided(item, (self._index.rows,), (self._stride,))

    def vectors(self) -> Vectors:
        """All rows, in order, where they lie."""
        is_joined = self._stride == self.length_bytes
        rows, counts = self._index.runs if is_joined else (self._index.scaled(1), np.ones(1, np.int64))
        vectors = np.empty((len(rows), 2), np.uint64)
        vectors[:, 0] = self._address + rows * self._stride
        vectors[:, 1] = counts * self.length_bytes
        return vectors

    def gather(self, first: int, count: int, out: Bytes) -> None:
        """Copy rows first, first + 1, … one after the other to `out` (count × length_bytes bytes)."""
        if native_rows is not None and not self._index.is_one_run:
            native_rows.gather(*self._numbers(first, count, out))
            return
        staged, places = out.view(self._items.dtype), self._places(first, count)
        if isinstance(places, slice) or not self._is_dense:
            staged[:] = self._items[places]
        else:
            # Clipping changes no index, and lets numpy write to `out` directly.
            np.take(self._items, places, out=staged, mode="clip")

    def scatter(self, first: int, count: int, staged: Bytes) -> None:
        """Copy consecutive bytes (count × length_bytes) to rows first, first + 1, …"""
        if native_rows is not None:
            native_rows.scatter(*self._numbers(first, count, staged))
            return
        self._items[self._places(first, count)] = staged.view(self._items.dtype)

    def _numbers(self, first: int, count: int, staged: Bytes) -> tuple[int, int, int, int, int, int]:
        """Return the arguments of `native_rows`, which checks nothing. The caller keeps all of this memory."""
        slots = self._index.relative_slots[first : first + count]
        if len(slots) != count or staged.nbytes != count * self.length_bytes or not staged.flags.c_contiguous:
            raise ValueError(f"{staged.nbytes} bytes are not {count} rows of {self.length_bytes} from row {first} on")
        return self._address, self._stride, self.length_bytes, slots.ctypes.data, count, staged.ctypes.data

    def _places(self, first: int, count: int) -> slice | npt.NDArray[np.int64]:
        if self._index.is_one_run:
            return slice(first * self._step, (first + count - 1) * self._step + 1, self._step)
        return self._index.scaled(self._step)[first : first + count]


@contextmanager
def open_rows(regions: MemoryRegions, sets: Sequence[RowSet], index: SlotIndex) -> Iterator[list[RowWindow]]:
    """Windows onto the same slots of several buffers, valid inside the `with` block.

    Raises OutOfBoundsError, before anything is handed out, when one of them leaves the registered regions, or when
    rows overlap.
    """
    spans = []
    for rows in sets:
        if not 1 <= rows.length_bytes <= rows.stride:
            raise OutOfBoundsError(f"rows of {rows.length_bytes} bytes every {rows.stride} bytes overlap")
        length_bytes = (index.rows - 1) * rows.stride + rows.length_bytes
        spans.append(Span(rows.address + index.low * rows.stride, length_bytes))
    with regions.views(spans) as views:
        yield [RowWindow(view, rows, index) for view, rows in zip(views, sets, strict=True)]


class Piece(NamedTuple):
    """Rows of a window that are staged at once, from byte `offset` of the staging buffer on."""

    window: RowWindow
    first_row: int
    row_count: int
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.row_count * self.window.length_bytes

    def gather(self, staging: Bytes) -> None:
        """Copy these rows into their place in the staging buffer."""
        self.window.gather(self.first_row, self.row_count, staging[self.offset : self.stop])

    def scatter(self, staging: Bytes) -> None:
        """Copy these rows out of their place in the staging buffer."""
        self.window.scatter(self.first_row, self.row_count, staging[self.offset : self.stop])


class Unstaged(NamedTuple):
    """Windows that follow each other and whose rows are moved from and to their place."""

    windows: list[RowWindow]

    def vectors(self) -> Vectors:
        """All their rows, in order."""
        return np.concatenate([window.vectors() for window in self.windows])


def stage_pieces(windows: Sequence[RowWindow], staging_bytes: int) -> Iterator[list[Piece] | Unstaged]:
    """The windows in order: pieces that fill a staging buffer of `staging_bytes` (at least DIRECT_BYTES), or windows
    that need none."""
    pieces: list[Piece] = []
    used_bytes = 0
    for is_direct, group in groupby(windows, key=lambda window: window.is_direct):
        if is_direct:
            if pieces:
                yield pieces
            pieces, used_bytes = [], 0
            yield Unstaged(list(group))
            continue
        for window in group:
            first = 0
            while first < window.count:
                count = min(window.count - first, (staging_bytes - used_bytes) // window.length_bytes)
                if count:
                    pieces.append(Piece(window, first, count, used_bytes))
                    used_bytes, first = pieces[-1].stop, first + count
                else:
                    yield pieces
                    pieces, used_bytes = [], 0
    if pieces:
        yield pieces
