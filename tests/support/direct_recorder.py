"""A recorder without graphs: what is recorded runs again at each replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from sglang_ext_cuda_graphs.recorders import DeviceMemory, Recording


class _Again(NamedTuple):
    compute: Callable[[], None]

    def replay(self) -> None:
        self.compute()


class DirectRecorder:
    """Stands in for `CudaRecorder` where there is no GPU."""

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def warm_up(self, compute: Callable[[], None]) -> None:
        pass

    def record(self, compute: Callable[[], None]) -> Recording:
        compute()
        return _Again(compute)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(0, 0)
