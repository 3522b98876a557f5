"""NCCL between lazy devices of one process, with its rules: no pair waits but for each other, and none for the host.

What a pair of ranks has started in one communicator is done in the order in which both have started it. An operation
that waits for its peer ends when its communicator is aborted, here or there.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable

from sglang_ext.long_pool.mesh.nccl_library import UNIQUE_ID_BYTES, NcclError
from support.lazy_device import AbortedError, LazyDevice

_LOOK_S = 0.005


class NcclNetwork:
    """What all ranks share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._wires: dict[tuple[bytes, int, int], queue.SimpleQueue[bytes]] = defaultdict(queue.SimpleQueue)
        self.ranks: dict[bytes, set[int]] = defaultdict(set)  # that have connected, by communicator
        self.made = 0  # communicators, counted once for all their ranks

    def unique_id(self) -> bytes:
        with self._lock:
            self.made += 1
            return next(self._numbers).to_bytes(UNIQUE_ID_BYTES, "big")

    def wire(self, unique_id: bytes, source: int, target: int) -> queue.SimpleQueue[bytes]:
        with self._lock:
            return self._wires[unique_id, source, target]


class _Communicator:
    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        self.unique_id, self.rank, self.size = unique_id, rank, size
        self.is_aborted = threading.Event()


class NcclDouble:
    """See `nccl_library.Nccl`: of one rank, on one device."""

    def __init__(self, network: NcclNetwork, device: LazyDevice) -> None:
        self.network = network
        self._device = device
        self._communicators: dict[int, _Communicator] = {}
        self._numbers = itertools.count(1)
        self._group: list[tuple[int, Callable[[], object]]] | None = None  # stream, what it is told
        self.fails_to_connect = False
        self.looks_until_ready = 1  # at a call, until it is on its stream
        self._looks = 0

    @property
    def open_count(self) -> int:
        return len(self._communicators)

    def unique_id(self) -> bytes:
        return self.network.unique_id()

    def begin_connect(self, unique_id: bytes, rank: int, size: int) -> int:
        if self.fails_to_connect:
            raise NcclError("unhandled system error")
        number = next(self._numbers)
        self._communicators[number] = _Communicator(unique_id, rank, size)
        self.network.ranks[unique_id].add(rank)
        return number

    def is_ready(self, communicator: int) -> bool:
        one = self._communicators[communicator]
        self._looks += 1
        return len(self.network.ranks[one.unique_id]) == one.size and self._looks >= self.looks_until_ready

    def begin_group(self) -> None:
        assert self._group is None
        self._group = []

    def end_group(self) -> None:
        assert self._group is not None
        self._looks = 0
        operations, self._group = self._group, None
        for stream in {stream for stream, _ in operations}:
            # Sends first: within a group nothing waits for anything else of it.
            of_stream = [operation for one, operation in operations if one == stream]
            self._device.by_handle[stream].tell(lambda parts=of_stream: [part() for part in parts])

    def send(self, communicator: int, address: int, size_bytes: int, peer: int, stream: int) -> None:
        one = self._communicators[communicator]
        wire = self.network.wire(one.unique_id, one.rank, peer)
        assert self._group is not None
        self._group.insert(0, (stream, lambda: wire.put(ctypes.string_at(address, size_bytes))))

    def receive(self, communicator: int, address: int, size_bytes: int, peer: int, stream: int) -> None:
        one = self._communicators[communicator]
        wire = self.network.wire(one.unique_id, peer, one.rank)

        def receive() -> None:
            while not one.is_aborted.is_set():
                try:
                    data = wire.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                assert len(data) == size_bytes
                ctypes.memmove(address, data, size_bytes)
                return
            raise AbortedError

        assert self._group is not None
        self._group.append((stream, receive))

    def abort(self, communicator: int) -> None:
        self._communicators.pop(communicator).is_aborted.set()
