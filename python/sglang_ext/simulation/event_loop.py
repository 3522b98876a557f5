"""The clock of a simulation: events in order of time, and of scheduling where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class EventLoop:
    """Deterministic and without I/O. `now_s` starts at 0 and never goes back."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0  # handled so far
        self._heap: list[tuple[float, int, Callable[[object], None], object]] = []
        self._sequence = 0
        self._is_stopped = False

    def schedule(self, at_s: float, handler: Callable[[T], None], subject: T) -> None:
        """Call `handler(subject)` at `at_s`, at once after all that is due now if that has passed."""
        self._sequence += 1
        # The sequence number is unique, so that handlers are never compared.
        entry = (max(at_s, self.now_s), self._sequence, handler, subject)
        heapq.heappush(self._heap, entry)  # type: ignore[misc]

    @property
    def has_events(self) -> bool:
        return bool(self._heap)

    def stop(self) -> None:
        """Let `run` return after the event that is being handled."""
        self._is_stopped = True

    def run(self, until_s: float = float("inf")) -> None:
        """Handle events up to and including `until_s`, or until none is left or `stop` is called."""
        heap = self._heap
        while heap and not self._is_stopped and heap[0][0] <= until_s:
            self.now_s, _, handler, subject = heapq.heappop(heap)
            self.events += 1
            handler(subject)
