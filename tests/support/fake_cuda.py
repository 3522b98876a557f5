"""A stand-in for what of torch.cuda captures graphs, with its rules, for tests without a GPU.

The rules: a pool that is counted as recording takes no other capture; a capture that was broken cannot be ended, and
then neither the pool nor the random generator is released, and the allocator of pinned memory, which nobody can tell,
counts the pool as recording for ever; nothing may be freed by the garbage collector meanwhile.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Stream:
    """A stream that waits for others."""

    def __init__(self, name: str = "new") -> None:
        self.name = name
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Graph:
    """Replays nothing by itself: what was launched cannot be known here."""

    def replay(self) -> None:
        pass


class Cuda:
    """The part of torch.cuda that a recorder uses."""

    CUDAGraph = Graph
    Stream = Stream

    def __init__(self) -> None:
        self.current = Stream("forward")
        self.recording: set[Any] = set()  # pools
        self.recording_pinned: set[Any] = set()
        self.handles = itertools.count(99)
        self.is_generator_capturing = False
        self.is_broken = False
        self.pools_of_captures: list[Any] = []
        self.runs_outside = 0
        self.gc_in_captures: list[bool] = []

    def graph_pool_handle(self) -> Any:
        return (0, next(self.handles))

    def current_stream(self) -> Stream:
        return self.current

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def mem_get_info(self) -> tuple[int, int]:
        return 1 << 30, 2 << 30

    def memory_reserved(self) -> int:
        return 0

    def empty_cache(self) -> None:
        pass

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        if pool in self.recording | self.recording_pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.add(pool)
        self.recording_pinned.add(pool)
        self.is_generator_capturing = True
        self.is_broken = False
        self.current = stream
        self.gc_in_captures.append(gc.isenabled())
        try:
            yield
        finally:
            if self.is_broken:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.recording.discard(pool)
            self.recording_pinned.discard(pool)
            self.is_generator_capturing = False
        self.pools_of_captures.append(pool)

    def break_capture(self) -> None:
        """What a synchronisation does."""
        if self.recording:
            self.is_broken = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def draw(self) -> None:
        assert not self.is_generator_capturing, "Offset increment outside graph capture encountered unexpectedly"

    def end_allocate(self, device: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.discard(pool)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """In the place of torch's."""
        for name in dir(self):
            if not name.startswith("_") and hasattr(torch.cuda, name):
                patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *shape, device="cpu", **more: zeros(*shape, device="cpu", **more))
