"""A waker wakes the loop that waits on its descriptor."""

from __future__ import annotations

import os
import select
import threading

from sglang_ext.waker import Waker


def is_readable(waker: Waker, timeout_s: float = 0.0) -> bool:
    return bool(select.select([waker.descriptor], [], [], timeout_s)[0])


def test_readable_from_a_notification_until_it_is_drained() -> None:
    waker = Waker()
    assert not is_readable(waker)
    for _ in range(100_000):  # no loop drains it: it does not block
        waker.notify()
    assert is_readable(waker)
    waker.drain()
    assert not is_readable(waker)
    timer = threading.Timer(0.05, waker.notify)
    timer.start()
    assert is_readable(waker, 10.0)
    timer.join()
    waker.close()
    waker.notify()


def test_a_notification_after_the_end_touches_no_other_file() -> None:
    waker = Waker()
    waker.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        assert other == waker.descriptor, "the number is used again"
        waker.notify()
        assert not is_readable(waker)
    finally:
        os.close(other)


def test_a_full_counter_does_not_block() -> None:
    waker = Waker()
    os.eventfd_write(waker.descriptor, 2**64 - 2)
    waker.notify()
    assert is_readable(waker)
    waker.close()
