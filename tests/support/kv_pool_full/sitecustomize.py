"""Python runs this in each process that has this folder on its path: its first chunk finds the KV pool full, once."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_MODULE = "sglang_ext.long_pool.sglang.engine"


def _wait_for_pool() -> None:
    while not hasattr(sys.modules.get(_MODULE), "SchedulerKvPool"):
        time.sleep(0.005)
    pool: Any = sys.modules[_MODULE].SchedulerKvPool  # type: ignore[attr-defined]
    full: Any = sys.modules["sglang_ext.long_pool.member.shard"].KvPoolFullError  # type: ignore[attr-defined]
    allocate = pool.allocate

    def allocate_but_once(self: Any, tokens: int) -> Any:
        pool.allocate = allocate
        raise full(f"{tokens} KV slots are wanted, none are free: this is the one time that a test wants")

    pool.allocate = allocate_but_once


threading.Thread(target=_wait_for_pool, name="kv-pool-full", daemon=True).start()
