"""Recording a computation over static tensors, to repeat it: as a CUDA graph, or by running it again.

A recorded computation reads its inputs from tensors that stay where they are and leaves its result in one that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Recording(Protocol):
    """Something recorded once."""

    def replay(self) -> None:
        """Compute again, from what the static tensors hold now."""


class DeviceMemory(NamedTuple):
    """Bytes in use on the device, and the part of them that torch's allocator has."""

    used_bytes: int
    allocator_bytes: int


class Recorder(Protocol):
    """A way of recording: warm up, look at the memory, record, look again."""

    def warm_up(self, compute: Callable[[], None]) -> None: ...

    def record(self, compute: Callable[[], None]) -> Recording: ...

    def memory(self) -> DeviceMemory: ...


class _Again:
    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    def replay(self) -> None:
        self._compute()


class DirectRecorder:
    """Records nothing: a replay is a run. What graphs do, where there are none to be had."""

    def warm_up(self, compute: Callable[[], None]) -> None:
        pass

    def record(self, compute: Callable[[], None]) -> Recording:
        compute()
        return _Again(compute)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(0, 0)


class CudaRecorder:
    """CUDA graphs in one memory pool, captured on one stream."""

    def __init__(self, warm_ups: int = 2) -> None:
        """`warm_ups`: runs before each capture, in which kernels are compiled, loaded and tuned."""
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._warm_ups = warm_ups

    def warm_up(self, compute: Callable[[], None]) -> None:
        """Run, and free what that took of memory: the pool of the graphs has its own."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(self._warm_ups):
                compute()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def record(self, compute: Callable[[], None]) -> Recording:
        """Capture; other threads of the process may go on using the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        torch.cuda.synchronize()
        return graph  # type: ignore[no-any-return, unused-ignore]

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info()
        return DeviceMemory(total - free, torch.cuda.memory_reserved())
