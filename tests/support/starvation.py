"""Takes processor time away from running engines, as a throttled container or a crowded machine does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.engines import Engine

_SPIN = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"


@contextmanager
def starved(engines: Sequence[Engine], spinners: int) -> Iterator[None]:
    """Pin all threads of these engines to one core, which this many busy processes share with them."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN % core]) for _ in range(spinners)]
    try:
        _pin(engines, {core})
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        _pin(engines, cores)


def _pin(engines: Sequence[Engine], cores: set[int]) -> None:
    for engine in engines:
        for pid in engine.process_ids():
            for task in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    os.sched_setaffinity(int(task.name), cores)
                except ProcessLookupError:
                    pass
