"""The order of work on a device: computing streams, copying streams next to them, and which waits for which.

A call that starts work on a device returns before it is done. What another stream, or the host, does with the result
comes behind a *mark* that was made behind the work.
"""

from __future__ import annotations

import uuid
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the work of a stream."""

    def wait(self) -> None:
        """Order the caller's next computation behind it; return at once."""

    def is_reached(self) -> bool:
        """Return whether everything before it is done."""

    def synchronize(self) -> None:
        """Return once everything before it is done; from any thread."""


class SideStream(Protocol):
    """Work in an order of its own, next to the stream that computes."""

    @property
    def handle(self) -> int:
        """Return the stream's handle as libraries of the device take it."""

    def follow(self) -> None:
        """Work given to it next comes behind all work of the stream that computes."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between device and host, or within the device. Keeps the memory of both until the copy is done."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Work of this stream uses it: its memory goes to nothing else before that is done."""

    def mark(self) -> Mark:
        """Return a mark behind all work of this stream."""


class DeviceStreams(Protocol):
    """A device as its computing thread sees it."""

    device: torch.device

    @property
    def identity(self) -> bytes:
        """16 bytes that no other device has, on any machine."""

    def side_stream(self) -> SideStream:
        """A new one."""

    def mark(self) -> Mark:
        """Return a mark behind all work of the computing stream."""

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory of this shape from which the device copies by itself."""


class CudaStreams:
    """`DeviceStreams` of a GPU: the stream that computes is the thread's current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def identity(self) -> bytes:
        return uuid.UUID(str(torch.cuda.get_device_properties(self.device).uuid)).bytes

    def side_stream(self) -> SideStream:
        return _CudaSideStream(self.device)

    def mark(self) -> Mark:
        return CudaMark(self.device, torch.cuda.current_stream(self.device))

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


class CudaMark:
    """See `Mark`."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        # `synchronize` would otherwise spin: threads that wait for a layer would take cores from the engine's own.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_reached(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())

    def synchronize(self) -> None:
        # A thread of a link is on GPU 0, where waiting for another GPU would take memory in every rank.
        with torch.cuda.device(self._device):
            self._event.synchronize()


class _CudaSideStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Before the computation's own blocks: what others wait for is short.
        self._stream = torch.cuda.Stream(device, priority=-1)

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            self.keep(tensor)

    def keep(self, tensor: torch.Tensor) -> None:
        # Pinned memory remembers by itself which streams copy from it.
        if tensor.is_cuda:
            tensor.record_stream(self._stream)

    def mark(self) -> Mark:
        return CudaMark(self._device, self._stream)


def streams_of(device: torch.device) -> DeviceStreams | None:
    """Those of a device; None where a call that has returned is done."""
    return CudaStreams(device) if device.type == "cuda" else None
