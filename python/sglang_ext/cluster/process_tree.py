"""The processes that belong to a cluster, found in /proc, and a watchdog that ends them with their supervisor.

Each program of a cluster leads a session of its own, which its descendants share; and each inherits an
environment variable with the cluster's identity. Either mark is enough: a program may overwrite its
environment's memory (setproctitle does), and a session is unknown until its leader's start was noted.

The watchdog is a process that ends a cluster whose supervisor died without doing so itself (kill -9, out of memory).
It reads the supervisor's notes from standard input, one session id per line (negative: no longer the cluster's);
the end of the input means that the supervisor is gone. After a clean stop nothing is left to end, and it leaves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CLUSTER_ID_VARIABLE = "SGLANG_EXT_CLUSTER_ID"
UNKILLABLE_AFTER_S = 10.0  # a process stuck in the kernel outlives SIGKILL; waiting for it has no end
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
    """Send a signal to each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal_number)


def end_processes(find: Callable[[], list[int]], *, grace_s: float) -> None:
    """Ask the processes that `find` returns to end, and kill what lives on after `grace_s`.

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


WATCHDOG_GRACE_S = 5.0


class Watchdog:
    """The supervisor's side: start the process and send it the sessions to watch."""

    def __init__(self, cluster_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang_ext.cluster.process_tree", cluster_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C for the supervisor is none for the watchdog
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def watch_session(self, session_id: int) -> None:
        """Note a session of the cluster. Raises BrokenPipeError when the watchdog is gone."""
        self._write(session_id)

    def forget_session(self, session_id: int) -> None:
        """Drop a session that has ended: its number may come to belong to another program."""
        self._write(-session_id)

    def _write(self, note: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % note)
        self._process.stdin.flush()

    def close(self) -> None:
        """Send word that the supervisor is done, and wait for the process to end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait()


def main(cluster_id: str) -> int:
    """Wait for the end of standard input, then end what is left of the cluster."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the supervisor's end ends it
    sessions: set[int] = set()
    for line in sys.stdin.buffer:
        note = int(line)
        if note > 0:
            sessions.add(note)
        else:
            sessions.discard(-note)
    end_processes(lambda: cluster_processes(cluster_id, sessions), grace_s=WATCHDOG_GRACE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
