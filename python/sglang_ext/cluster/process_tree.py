"""The processes that belong to a cluster, found in /proc.

Each program of a cluster leads a session of its own, which its descendants share; and each inherits an
environment variable with the cluster's identity. Either mark is enough: a program may overwrite its
environment's memory (setproctitle does), and a session is unknown until its leader's start was noted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CLUSTER_ID_VARIABLE = "SGLANG_EXT_CLUSTER_ID"
UNKILLABLE_AFTER_S = 10.0  # a process stuck in the kernel outlives SIGKILL; nobody can wait for it
_PROC = Path("/proc")


class ProcessStat(NamedTuple):
    """The part of /proc/PID/stat that is used here."""

    pid: int
    parent_pid: int
    session_id: int
    is_zombie: bool
    cpu_ticks: int  # user and system time


def read_stat(pid: int) -> ProcessStat | None:
    """Return a process's state, or None when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything; the fields follow its last parenthesis.
    rest = text[text.rindex(")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        parent_pid=int(rest[1]),
        session_id=int(rest[3]),
        is_zombie=rest[0] in {"Z", "X"},
        cpu_ticks=int(rest[11]) + int(rest[12]),
    )


def all_processes() -> Iterator[ProcessStat]:
    """Yield every process of the machine that this user may see."""
    for entry in os.listdir(_PROC):
        if entry.isdecimal():
            stat = read_stat(int(entry))
            if stat is not None:
                yield stat


def cluster_processes(cluster_id: str, sessions: Collection[int]) -> list[int]:
    """Return the ids of living processes of the cluster, the caller excepted."""
    mark = f"{CLUSTER_ID_VARIABLE}={cluster_id}".encode()
    own = os.getpid()
    return [
        stat.pid
        for stat in all_processes()
        if stat.pid != own and not stat.is_zombie and (stat.session_id in sessions or mark in _environment(stat.pid))
    ]


def session_processes(session_id: int) -> list[int]:
    """Return the ids of living processes of one session."""
    return [stat.pid for stat in all_processes() if stat.session_id == session_id and not stat.is_zombie]


def send_signal(pids: Collection[int], signal_number: int) -> None:
    """Send a signal to each; those that are gone are passed over."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal_number)


def end_processes(find: Callable[[], list[int]], *, grace_s: float) -> None:
    """Ask the processes that `find` returns to end, and kill those that live on after `grace_s`.

    Searches again until none is left, so that a process which was forked meanwhile does not escape.
    """
    kill_at_s = time.monotonic() + grace_s
    asked: set[int] = set()
    while (found := find()) and time.monotonic() < kill_at_s + UNKILLABLE_AFTER_S:
        if time.monotonic() >= kill_at_s:
            send_signal(found, signal.SIGKILL)
        else:
            send_signal([pid for pid in found if pid not in asked], signal.SIGTERM)
            asked.update(found)
        time.sleep(0.05)


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
