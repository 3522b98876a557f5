"""A clock that stands still while this process does not run.

A bound such as "an abort within a second" is about what the product does. On a machine whose cores are all busy a
process can stand for a second and more, with everything in it late at once: time in which nothing runs is not
counted, time in which something blocks or computes is.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time

TICK_S = 0.01
LONGEST_TICK_S = 0.05  # more between two ticks of an idle thread: the process did not run


class _Clock:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._now_s = 0.0
        self._ticked_s = time.monotonic()
        threading.Thread(target=self._tick, name="running-time", daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            now_s = time.monotonic()
            self._now_s += min(now_s - self._ticked_s, LONGEST_TICK_S)
            self._ticked_s = now_s

    def now_s(self) -> float:
        return self._now_s + min(time.monotonic() - self._ticked_s, LONGEST_TICK_S)


_clock: _Clock | None = None


def running_s() -> float:
    """Seconds for which this process has run, from any moment; never more than `time.monotonic` says."""
    global _clock
    if _clock is None or _clock.pid != os.getpid():
        _clock = _Clock()
    return _clock.now_s()


async def pause(seconds: float) -> None:
    """Sleep for so much running time: what became due before is done before, even when the process stood still."""
    end_s = running_s() + seconds
    while (left_s := end_s - running_s()) > 0:  # noqa: ASYNC110 - no event tells when the clock goes on
        await asyncio.sleep(left_s)
