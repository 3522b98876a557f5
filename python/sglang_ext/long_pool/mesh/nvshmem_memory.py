"""NVSHMEM as the memory of a `MailboxMesh`: puts and signals in the order of a CUDA stream of its own.

NVSHMEM is set up once for all members, and again for every epoch; the NVSHMEM of a process must have been finalised
before. It needs the package nvshmem4py of the machine's CUDA.
"""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_SIGNAL_BYTES = 8
_RELEASED = 2**62


class NvshmemMissingError(RuntimeError):
    """NVSHMEM cannot be used here; the text is one line for the user."""


def load_nvshmem() -> tuple[Any, Any]:
    """The modules `nvshmem.core` and `cuda.core`. Raises NvshmemMissingError."""
    try:
        return import_module("nvshmem.core"), import_module("cuda.core")
    except ImportError as error:
        raise NvshmemMissingError(
            f"NVSHMEM is not installed ({error}); install nvshmem4py-cu12 or nvshmem4py-cu13, by the CUDA of PyTorch"
        ) from None


class NvshmemMemory:
    """See `mailbox_mesh.SymmetricMemory`."""

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, timeout_s: float, device: torch.device
    ) -> None:
        """All members do the same, `rank` of `size`; raises NvshmemMissingError, RuntimeError for what else fails."""
        self._core, self._cuda = load_nvshmem()
        self._store = dist.PrefixStore(name, store)
        self._rank, self._size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._releasing = torch.cuda.Stream(device)
        self._blocks: list[torch.Tensor] = []
        if rank == 0:
            self._store.set("id", _bytes_of(self._core.get_unique_id()).tobytes())
        # NVSHMEM waits for missing members for ever: so that it need not, all are there first.
        self._meet("here")
        unique_id = self._core.get_unique_id(empty=True)
        _bytes_of(unique_id)[:] = np.frombuffer(self._store.get("id"), np.int8)
        one = self._cuda.Device(device.index or 0)
        one.set_current()
        self._core.init(device=one, uid=unique_id, rank=rank, nranks=size, initializer_method="uid")

    def allocate(self, size_bytes: int) -> torch.Tensor:
        block: torch.Tensor = self._core.bytetensor((size_bytes,))
        self._blocks.append(block)
        return block

    def signals(self, count: int) -> None:
        counters = self.allocate(_SIGNAL_BYTES * count)
        counters.zero_()
        torch.cuda.synchronize(self._device)
        self._counters = [self._buffer(counters[_SIGNAL_BYTES * number :][:_SIGNAL_BYTES]) for number in range(count)]
        # No member counts before all are at 0.
        self._meet("counters")

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source)
        # The buffer that is no mailbox may be freed as soon as its owner has let go of it.
        for tensor in (target, source):
            tensor.record_stream(self._stream)

    def put(self, target: torch.Tensor, source: torch.Tensor, member: int, signal: int, count: int) -> None:
        self._core.put_signal(
            self._buffer(target[: source.numel()]),
            self._buffer(source),
            self._counters[signal],
            count,
            self._core.SignalOp.SIGNAL_SET,
            remote_pe=member,
            stream=self._core.NvshmemStream(self._stream),
        )

    def set_signal(self, member: int, signal: int, count: int) -> None:
        self._set(member, signal, count, self._stream)

    def wait_signal(self, signal: int, count: int) -> None:
        self._core.signal_wait(
            self._counters[signal],
            count,
            self._core.ComparisonType.CMP_GE,
            stream=self._core.NvshmemStream(self._stream),
        )

    def mark(self) -> StreamMark:
        return StreamMark(self._stream)

    def release(self) -> None:
        for signal in range(len(self._counters)):
            self._set(self._rank, signal, _RELEASED, self._releasing)

    def close(self) -> None:
        """Give everything back; all members do."""
        torch.cuda.synchronize(self._device)
        for block in self._blocks:
            self._core.free_tensor(block)
        self._core.finalize()

    def _set(self, member: int, signal: int, count: int, stream: torch.cuda.Stream) -> None:
        self._core.signal_op(
            self._counters[signal],
            count,
            self._core.SignalOp.SIGNAL_SET,
            remote_pe=member,
            stream=self._core.NvshmemStream(stream),
        )

    def _buffer(self, tensor: torch.Tensor) -> Any:
        return self._cuda.Buffer.from_handle(tensor.data_ptr(), tensor.numel())

    def _meet(self, what: str) -> None:
        self._store.set(f"{what}/{self._rank}", "")
        self._store.wait([f"{what}/{rank}" for rank in range(self._size)], self._timeout)


def _bytes_of(unique_id: Any) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """The memory of NVSHMEM's id, which is a record without references."""
    view: np.ndarray[tuple[int], np.dtype[np.int8]] = unique_id._data.view(np.int8)
    return view


class StreamMark:
    """See `mailbox_mesh.MemoryMark`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_reached(self) -> bool:
        return bool(self._event.query())
