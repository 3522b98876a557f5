"""Rows of registered buffers to consecutive bytes of staging memory and back, by the device that has both.

Memory is known by its address; it becomes a tensor where it lies. Rows are moved in the widest integers that their
places allow, one call for each buffer.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from types import SimpleNamespace

import numpy as np
import torch

from sglang_ext.transfer.pool_layout import ItemBuffer, RowSet, Slots
from sglang_ext.transfer.transports.memory_regions import OutOfBoundsError

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def tensor_at(address: int, length_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [length_bytes] over memory of the device or of the host, which the caller keeps alive."""
    if device.type == "cpu":
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address)))
    interface = {"shape": (length_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)


class TensorRows:
    """The rows of some buffers; thread-safe. Each thread works in an order of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()  # a stream of each thread
        self._buffers: list[ItemBuffer] = []
        self._starts: list[int] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, buffers: Sequence[ItemBuffer]) -> None:
        """Before anything is moved. The caller keeps their memory alive."""
        self._buffers = sorted([*self._buffers, *buffers], key=lambda buffer: buffer.address)
        self._starts = [buffer.address for buffer in self._buffers]
        self._tensors = [
            tensor_at(buffer.address, buffer.length_bytes, self._device).view(buffer.item_count, buffer.item_bytes)
            for buffer in self._buffers
        ]

    def holds(self, address: int) -> bool:
        """Return whether this address lies in one of the buffers."""
        return self._find(address) is not None

    def gather(self, sets: Sequence[RowSet], slots: Slots, staging: torch.Tensor, offset: int) -> int:
        """Copy rows one after the other, set by set, to byte `offset` of `staging` (uint8 [bytes]).

        Returns where they end, once they are there. Raises OutOfBoundsError.
        """
        return self._move(sets, slots, staging, offset, is_gather=True)

    def scatter(self, sets: Sequence[RowSet], slots: Slots, staging: torch.Tensor, offset: int) -> int:
        """Copy rows from `staging` to their places; otherwise as `gather`. No slot is there twice."""
        return self._move(sets, slots, staging, offset, is_gather=False)

    def _move(
        self, sets: Sequence[RowSet], slots: Slots, staging: torch.Tensor, offset: int, *, is_gather: bool
    ) -> int:
        count, high = len(slots), int(slots.max(initial=0))
        places = []
        for rows in sets:
            stop = offset + count * rows.length_bytes
            if offset < 0 or stop > len(staging):
                raise OutOfBoundsError("rows outside of the staging memory")
            places.append((self._rows(rows, high, offset), slice(offset, stop), rows.length_bytes))
            offset = stop
        if not count:
            return offset
        with self._at_once():
            at = torch.from_numpy(slots.astype(np.int64)).to(self._device)
            for view, place, length_bytes in places:
                staged = staging[place].view(count, length_bytes).view(view.dtype)
                if is_gather:
                    torch.index_select(view, 0, at, out=staged)
                else:
                    view.index_copy_(0, at, staged)
        return offset

    def _rows(self, rows: RowSet, high: int, offset: int) -> torch.Tensor:
        """Return all rows of a set [slots, integers of a row], as wide as `offset` allows. Raises OutOfBoundsError."""
        place = self._find(rows.address)
        buffer = None if place is None else self._buffers[place]
        first = 0 if buffer is None else rows.address - buffer.address
        if (
            place is None
            or buffer is None
            or rows.stride != buffer.item_bytes
            or rows.length_bytes < 1
            or first + rows.length_bytes > buffer.item_bytes
            or high >= buffer.item_count
        ):
            raise OutOfBoundsError(f"rows of {rows.length_bytes} bytes at {rows.address:#x} are outside the buffers")
        width = gcd(buffer.address, buffer.item_bytes, first, rows.length_bytes, offset, 8)
        view = self._tensors[place][:, first : first + rows.length_bytes]
        return view.view(_INTEGERS[width])

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Work of the `with` block waits for no other work of the device, and is done when the block ends."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device):
            if not hasattr(self._own, "stream"):
                self._own.stream = torch.cuda.Stream(self._device, priority=-1)
            with torch.cuda.stream(self._own.stream):
                yield
                done = torch.cuda.Event(blocking=True)
                done.record()
            done.synchronize()

    def _find(self, address: int) -> int | None:
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._starts[place] + self._buffers[place].length_bytes:
            return None
        return place
