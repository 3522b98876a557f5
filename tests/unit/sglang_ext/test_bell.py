"""A bell wakes who waits on its descriptor."""

from __future__ import annotations

import select
import threading

from sglang_ext.bell import Bell


def is_rung(bell: Bell, timeout_s: float = 0.0) -> bool:
    return bool(select.select([bell.descriptor], [], [], timeout_s)[0])


def test_it_is_heard_until_it_is_silenced() -> None:
    bell = Bell()
    assert not is_rung(bell)
    for _ in range(100_000):  # nobody listens: it does not block
        bell.ring()
    assert is_rung(bell)
    bell.silence()
    assert not is_rung(bell)
    timer = threading.Timer(0.05, bell.ring)
    timer.start()
    assert is_rung(bell, 10.0)
    timer.join()
    bell.close()
    bell.ring()
