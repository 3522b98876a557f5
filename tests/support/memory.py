"""The slots of an instance's memory pools, and whether all are back."""

from __future__ import annotations

import time

from sglang_ext.engine.hooks.memory_pools import MEMORY_KEY
from support.engines import Engine

Pools = dict[str, dict[str, int]]


def pools(engine: Engine, state: int = 0) -> Pools:
    """Slots by pool, as the instance counts them, in the `state`-th answer of its data-parallel ranks."""
    reply = engine.get("/server_info")
    assert reply.status == 200, reply.body
    counted: Pools = reply.body["internal_states"][state][MEMORY_KEY]
    return counted


def check_whole(engine: Engine, timeout_s: float = 20.0, ranks: int = 1) -> Pools:
    """Return its pools once each slot is free or cached. Raises AssertionError when the time is up."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        counted = [pools(engine, state) for state in range(ranks)]
        held = [{name: slots for name, slots in one.items() if not is_whole(slots)} for one in counted]
        if not any(held):
            return counted[0]
        assert time.monotonic() < deadline_s, f"{engine.spec.role} {engine.spec.name}: {held}"
        time.sleep(0.05)


def is_whole(slots: dict[str, int]) -> bool:
    """Return whether no request holds any slot."""
    return slots["free"] + slots["cached"] == slots["total"] and not slots["locked"]
