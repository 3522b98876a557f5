"""A device that does nothing before it must: what was told to it is done when a caller waits for it, and no more.

So whatever does not come behind what it needs finds memory as it was before. Several devices, each of a thread of its
own, make a simulated network: `Wire`s carry what one of them sends to another one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

GARBAGE = float("nan")


class AbortedError(Exception):
    """An operation that waits for a peer has been aborted."""


class LazyStream:
    """Operations in order; `LazyDevice` does them."""

    _numbers = itertools.count(1)

    def __init__(self, device: LazyDevice) -> None:
        self.handle = next(self._numbers)
        self._device = device
        self._operations: list[Callable[[], object]] = []
        self._done = 0
        self._lock = device.lock or threading.RLock()
        device.by_handle[self.handle] = self

    def tell(self, operation: Callable[[], object]) -> None:
        self._operations.append(operation)

    def follow(self) -> None:
        self.tell(self._device.mark().synchronize)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.tell(lambda: target.copy_(source))
        for tensor in (target, source):
            self.keep(tensor)

    def keep(self, tensor: torch.Tensor) -> None:
        self._device.kept.append(tensor)

    def mark(self) -> LazyMark:
        return LazyMark(self, len(self._operations))

    def run(self, count: int) -> None:
        """Do the first `count` operations, where they are not done."""
        with self._lock:
            while self._done < count:
                operation = self._operations[self._done]
                self._done += 1
                operation()


class LazyMark:
    """See `device_streams.Mark`."""

    def __init__(self, stream: LazyStream, count: int) -> None:
        self._stream = stream
        self._count = count

    def wait(self) -> None:
        self._stream._device.computing.tell(self.synchronize)

    def is_reached(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        with suppress(AbortedError):
            self._stream.run(self._count)


class LazyDevice:
    """See `device_streams.DeviceStreams`; its memory is the host's."""

    device = torch.device("cpu")

    def __init__(self, number: int = 0, *, is_serial: bool = False) -> None:
        """`is_serial`: one operation at a time on all streams, for threads that wait for several; none of the
        operations may then wait for another device."""
        self.lock = threading.RLock() if is_serial else None
        self.identity = number.to_bytes(16, "big")
        self.by_handle: dict[int, LazyStream] = {}
        self.kept: list[torch.Tensor] = []  # for side streams, for good
        self.computing = LazyStream(self)

    def side_stream(self) -> LazyStream:
        return LazyStream(self)

    def mark(self) -> LazyMark:
        return self.computing.mark()

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, GARBAGE) if like.is_floating_point() else torch.zeros_like(like)

    def compute(self, operation: Callable[[], object]) -> None:
        """Tell the stream that computes; returns at once."""
        self.computing.tell(operation)
