"""Wakes a loop that sleeps on descriptors."""

from __future__ import annotations

import os
import threading


class Waker:
    """A descriptor (eventfd) that is readable from `notify` to `drain`. Any thread may notify, also after `close`."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A number that is closed may be another file's before long.
        self._lock = threading.Lock()
        self._is_closed = False

    def notify(self) -> None:
        """Make the descriptor readable; never blocks."""
        with self._lock:
            if not self._is_closed:
                try:
                    os.eventfd_write(self.descriptor, 1)
                except BlockingIOError:
                    pass  # the counter is full, so it is readable

    def drain(self) -> None:
        """Forget all notifications so far."""
        with self._lock:
            if not self._is_closed:
                try:
                    os.eventfd_read(self.descriptor)
                except BlockingIOError:
                    pass  # there were none

    def close(self) -> None:
        """Close the descriptor, which no loop sleeps on any more; once."""
        with self._lock:
            self._is_closed = True
            os.close(self.descriptor)
