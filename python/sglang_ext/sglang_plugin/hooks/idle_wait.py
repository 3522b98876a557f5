"""A CPU engine whose requests all wait for KV of others sleeps between two looks, instead of keeping a core busy."""

from __future__ import annotations

import time
from typing import Any

import zmq

from sglang_ext.waker import Waker

_SHORTEST_WAIT_MS = 1
# A look costs half a millisecond; nothing has happened in any of the waits before, each twice as long as the last.
_LONGEST_WAIT_MS = 2
_LONGEST_NOTIFIED_WAIT_MS = 50  # where the transfer backend notifies when something has happened
_NEXT_WAIT_MS = "_sglang_ext_next_wait_ms"


def wait_a_little(result: None, scheduler: Any) -> None:
    """AFTER `Scheduler.on_idle()`: nothing to run. Where nothing is there at all, SGLang has slept itself."""
    if str(scheduler.device) != "cpu" or scheduler.is_fully_idle():
        return
    asleep = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    if asleep is None:
        time.sleep(_SHORTEST_WAIT_MS / 1e3)
        return
    poller = zmq.Poller()
    for source, flags in asleep.sockets:
        poller.register(source, flags)
    waker = _waker_of(scheduler)
    if waker is not None:
        poller.register(waker.descriptor, zmq.POLLIN)
    # What waits in the queue may wait for its time, of which no notification comes.
    wait_ms = _SHORTEST_WAIT_MS if scheduler.waiting_queue else getattr(scheduler, _NEXT_WAIT_MS, _SHORTEST_WAIT_MS)
    has_happened = poller.poll(wait_ms)
    if waker is not None:
        waker.drain()
    longest_ms = _LONGEST_WAIT_MS if waker is None else _LONGEST_NOTIFIED_WAIT_MS
    setattr(scheduler, _NEXT_WAIT_MS, _SHORTEST_WAIT_MS if has_happened else min(2 * wait_ms, longest_ms))


def _waker_of(scheduler: Any) -> Waker | None:
    """That of the KV manager, if it has one and all ranks' requests are this rank's."""
    if scheduler.tp_group.world_size > 1:
        return None
    queues = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")
    queue = next(filter(None, (getattr(scheduler, name, None) for name in queues)), None)
    endpoint = getattr(getattr(queue, "kv_manager", None), "endpoint", None)
    waker = getattr(endpoint, "waker", None)
    return waker if isinstance(waker, Waker) else None
