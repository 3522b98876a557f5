"""A process that ends a cluster whose supervisor died without doing so itself (kill -9, out of memory).

It reads the supervisor's notes from standard input, one session id per line (negative: no longer the
cluster's); the end of the input means that the supervisor is gone. After a clean stop nothing is left
to end, and it leaves at once.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from sglang_ext.cluster.process_tree import cluster_processes, end_processes

GRACE_S = 5.0


class Watchdog:
    """The supervisor's end: starts the process and tells it what to watch."""

    def __init__(self, cluster_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang_ext.cluster.watchdog", cluster_id],
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
        """Drop a session that has ended: its number may come to belong to somebody else."""
        self._write(-session_id)

    def _write(self, note: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % note)
        self._process.stdin.flush()

    def close(self) -> None:
        """Tell it that the supervisor is done, and wait for it."""
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
    end_processes(lambda: cluster_processes(cluster_id, sessions), grace_s=GRACE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
