"""Memory that a transfer may touch: every read and write is checked against registered regions."""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Vectors: TypeAlias = "npt.NDArray[np.uint64]"
"""Pieces of memory in order, shape [n, 2]: address and length in bytes."""


class OutOfBoundsError(ValueError):
    """A block lies outside every registered region."""


class Span(NamedTuple):
    """`length_bytes` bytes from `address` in this process."""

    address: int
    length_bytes: int


@dataclass(frozen=True)
class _Region:
    start: int
    length_bytes: int
    view: memoryview

    def slice(self, span: Span) -> memoryview | None:
        offset = span.address - self.start
        if offset < 0 or offset + span.length_bytes > self.length_bytes:
            return None
        return self.view[offset : offset + span.length_bytes]


class MemoryRegions:
    """A thread-safe set of regions that hands out views, and waits for them before it forgets a region."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._regions: list[_Region] = []
        self._users = 0
        self._removing = False

    def add(self, address: int, length_bytes: int) -> None:
        """Register [address, address + length_bytes); the caller keeps that memory alive.

        Raises ValueError for an empty region or a null address.
        """
        if address <= 0 or length_bytes <= 0:
            raise ValueError(f"cannot register {length_bytes} bytes at address {address:#x}")
        raw = (ctypes.c_char * length_bytes).from_address(address)
        region = _Region(address, length_bytes, memoryview(raw).cast("B"))
        with self._changed:
            self._regions = sorted([*self._regions, region], key=lambda other: other.start)

    def remove(self, address: int) -> None:
        """Forget the regions that start at `address`, after every view in use has been released.

        Raises KeyError when no region starts there.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._removing)
            self._removing = True
            try:
                self._changed.wait_for(lambda: self._users == 0)
                kept = [region for region in self._regions if region.start != address]
                if len(kept) == len(self._regions):
                    raise KeyError(f"no region starts at {address:#x}")
                self._regions = kept
            finally:
                self._removing = False
                self._changed.notify_all()

    @contextmanager
    def views(self, spans: Sequence[Span]) -> Iterator[list[memoryview]]:
        """Byte views of `spans`, valid inside the `with` block.

        Raises OutOfBoundsError, before anything is handed out, when a span leaves the registered regions.
        """
        with self._held() as regions:
            yield _resolve(regions, spans)

    @contextmanager
    def hold(self, vectors: Vectors) -> Iterator[None]:
        """The memory at `vectors` may be used inside the `with` block.

        Raises OutOfBoundsError when some of it leaves the registered regions.
        """
        with self._held() as regions:
            outside = vectors[~_is_inside(regions, vectors)]
            # Regions may overlap: an earlier one can hold what the nearest one does not.
            _resolve(regions, [Span(address, length) for address, length in outside.tolist()])
            yield

    @contextmanager
    def _held(self) -> Iterator[list[_Region]]:
        with self._changed:
            self._changed.wait_for(lambda: not self._removing)
            self._users += 1
            regions = self._regions
        try:
            yield regions
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()


def _is_inside(regions: list[_Region], vectors: Vectors) -> npt.NDArray[np.bool_]:
    """Return which pieces lie in the last region that starts before them."""
    if not regions:
        return np.zeros(len(vectors), np.bool_)
    starts = np.array([region.start for region in regions], np.uint64)
    stops = starts + np.array([region.length_bytes for region in regions], np.uint64)
    nearest = np.searchsorted(starts, vectors[:, 0], "right") - 1
    stop = stops[nearest]
    # In this order: nothing overflows.
    return (nearest >= 0) & (vectors[:, 0] <= stop) & (vectors[:, 1] <= stop - vectors[:, 0])


def _resolve(regions: list[_Region], spans: Sequence[Span]) -> list[memoryview]:
    starts = [region.start for region in regions]
    views = []
    for span in spans:
        # Regions may overlap, so an earlier one can hold a span that the nearest one does not.
        for index in range(bisect_right(starts, span.address) - 1, -1, -1):
            view = regions[index].slice(span)
            if view is not None:
                views.append(view)
                break
        else:
            raise OutOfBoundsError(
                f"{span.length_bytes} bytes at {span.address:#x} are outside the {len(regions)} registered regions"
            )
    return views
