"""One-sided memory of several members inside one process; each member's operations run in a thread, in their order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

WAIT_TIMEOUT_S = 30.0


class SymmetricGroup:
    """What all members share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.members = [FakeSymmetricMemory(self, member) for member in range(size)]

    def close(self) -> None:
        for one in self.members:
            one.close()


class FakeSymmetricMemory:
    """See `long_pool.mesh.mailbox_mesh.SymmetricMemory`."""

    def __init__(self, group: SymmetricGroup, member: int) -> None:
        self._group = group
        self._operations: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._member = member
        self._blocks: list[torch.Tensor] = []
        self._counters: list[int] = []
        self._is_released = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self._blocks.append(torch.zeros(size_bytes, dtype=torch.uint8))
        return self._blocks[-1]

    def signals(self, count: int) -> None:
        self._counters = [0] * count

    def begin(self) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def copy() -> None:
            target.copy_(source)

        self._operations.put(copy)

    def put(self, target: torch.Tensor, source: torch.Tensor, member: int, signal: int, count: int) -> None:
        (block,) = (number for number, one in enumerate(self._blocks) if one.data_ptr() == target.data_ptr())
        there = self._group.members[member]

        def put() -> None:
            there._blocks[block][: source.numel()] = source
            there._set(signal, count)

        self._operations.put(put)

    def set_signal(self, member: int, signal: int, count: int) -> None:
        there = self._group.members[member]
        self._operations.put(lambda: there._set(signal, count))

    def wait_signal(self, signal: int, count: int) -> None:
        def wait() -> None:
            with self._group.changed:
                self._group.changed.wait_for(
                    lambda: self._is_released or self._counters[signal] >= count, WAIT_TIMEOUT_S
                )

        self._operations.put(wait)

    def mark(self) -> FakeMark:
        mark = FakeMark()
        self._operations.put(mark.reached.set)
        return mark

    def release(self) -> None:
        with self._group.changed:
            self._is_released = True
            self._group.changed.notify_all()

    def close(self) -> None:
        self._operations.put(None)
        self.release()
        self._thread.join()

    def _set(self, signal: int, count: int) -> None:
        with self._group.changed:
            assert count > self._counters[signal], "a counter rises"
            self._counters[signal] = count
            self._group.changed.notify_all()

    def _run(self) -> None:
        while (operation := self._operations.get()) is not None:
            operation()


class FakeMark:
    """See `long_pool.mesh.mailbox_mesh.MemoryMark`."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def wait(self) -> None:
        assert self.reached.wait(WAIT_TIMEOUT_S)

    def is_reached(self) -> bool:
        return self.reached.is_set()
