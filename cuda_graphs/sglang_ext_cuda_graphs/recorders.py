"""Recording a computation over static tensors, to repeat it: as a CUDA graph, or by running it again.

A recorded computation reads its inputs from tensors that stay where they are and leaves its result in such a tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch

# Around captures on a given stream, which it makes the current one.
CaptureContext = Callable[[Any], AbstractContextManager[Any]]


class Recording(Protocol):
    """Something recorded once."""

    def replay(self) -> None:
        """Compute again, from what the static tensors hold now."""


class DeviceMemory(NamedTuple):
    """Bytes in use on the device, and the part of them that torch's allocator has."""

    used_bytes: int
    allocator_bytes: int


class Recorder(Protocol):
    """A way of recording: warm up, look at the memory, record, look again, all within a session."""

    def session(self) -> AbstractContextManager[None]:
        """Around one or more recordings."""
        ...

    def warm_up(self, compute: Callable[[], None]) -> None: ...

    def record(self, compute: Callable[[], None]) -> Recording: ...

    def memory(self) -> DeviceMemory: ...


class CudaRecorder:
    """CUDA graphs in one memory pool, captured on one stream."""

    def __init__(
        self,
        pool: Any = None,
        stream: Any = None,
        context: CaptureContext | None = None,
        on_new_pool: Callable[[Any], None] | None = None,
    ) -> None:
        """`pool` and `stream`: to share with other graphs that never run at the same time; None: of its own.

        `context` is entered around captures with their stream; None: the stream becomes the current one. `on_new_pool`
        is given the pool that others are to capture into from then on: torch takes no capture into one in which a
        capture could not be ended.
        """
        self.pool: Any = torch.cuda.graph_pool_handle() if pool is None else pool
        self._context: CaptureContext = torch.cuda.stream if context is None else context
        self._stream = torch.cuda.Stream() if stream is None else stream
        self._probe = torch.zeros(1, device="cuda")
        self._on_new_pool = on_new_pool
        self._has_recorded = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Capture on the graphs' stream, without garbage collection: a capture must not free what it would free."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with self._context(self._stream), collection_paused():
            yield

    def warm_up(self, compute: Callable[[], None]) -> None:
        """Run, and free the memory that this took: the pool of the graphs has its own.

        Runs twice before the first recording, when kernels are compiled, loaded and tuned; then once, for the kernels
        that a further shape needs.
        """
        for _ in range(1 if self._has_recorded else 2):
            compute()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def record(self, compute: Callable[[], None]) -> Recording:
        """Capture; other threads of the process may go on using the device meanwhile.

        Raises what stands against it; further computations and captures are then possible as before.
        """
        try:
            graph = self._capture(compute)
        except BaseException:
            self._recover()
            raise
        self._has_recorded = True
        return graph

    def memory(self) -> DeviceMemory:
        """Return what is in use once all work that was launched is done."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return DeviceMemory(total - free, torch.cuda.memory_reserved())

    def _capture(self, compute: Callable[[], None]) -> Recording:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        torch.cuda.synchronize()
        return graph  # type: ignore[no-any-return, unused-ignore]

    def _recover(self) -> None:
        """Undo what torch leaves behind where it cannot end a capture.

        Its allocators, of the device's and of pinned memory, still count the pool as recording and refuse every later
        capture into it. The former gets a message; the latter cannot: captures go to a new pool from now on. Its random
        generator still counts as captured, and refuses to draw until a capture has ended well.
        """
        try:
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        except RuntimeError:
            pass  # it is not recording: the capture ended, and only the computation failed
        else:
            self.pool = torch.cuda.graph_pool_handle()
            if self._on_new_pool is not None:
                self._on_new_pool(self.pool)
        with suppress(RuntimeError):  # the device is lost then; its next use says why
            self._capture(lambda: self._probe.add_(1.0))


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage is collected on its own."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collection_frozen() -> Iterator[None]:
    """Collections look at nothing that is alive now, so that those which torch asks for are quick.

    For a process that has frozen nothing itself: what it had would be looked at again afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
