"""One running program of a cluster: its session, its log, its health."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from sglang_ext.cluster.fork_client import WORKER_COMMAND, ForkClient, ForkedProcess, ForkServerError
from sglang_ext.cluster.plan import Program
from sglang_ext.cluster.process_tree import CLUSTER_ID_VARIABLE, end_processes, send_signal, session_processes

PROBE_TIMEOUT_S = 5.0
LIVENESS_PATH = "/ping"  # SGLang answers it without its scheduler; 404 will do


class RunningProgram:
    """A program that was started; it leads a session that its descendants share."""

    def __init__(self, program: Program, log: Path, cluster_id: str, forks: ForkClient | None = None) -> None:
        """Start it, appending to `log`; an instance by forking where there is a client for that.

        Raises OSError when it cannot be executed.
        """
        self.program = program
        environment = {**os.environ, **program.env, CLUSTER_ID_VARIABLE: cluster_id}
        with log.open("ab") as output:
            self._process: ForkedProcess | subprocess.Popen[bytes] = self._fork(
                forks, output, environment
            ) or subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        if program.cores is not None:
            os.sched_setaffinity(self._process.pid, program.cores)

    def _fork(self, forks: ForkClient | None, output: IO[bytes], environment: dict[str, str]) -> ForkedProcess | None:
        command = self.program.command
        if forks is None or command[: len(WORKER_COMMAND)] != WORKER_COMMAND:
            return None
        cores = self.program.cores or os.sched_getaffinity(0)
        try:
            return forks.start(
                command[len(WORKER_COMMAND) :], output=output.fileno(), environment=environment, cores=cores
            )
        except ForkServerError as error:
            output.write(f"sglang-ext: not forked: {error}\n".encode())
            output.flush()
            return None

    @property
    def pid(self) -> int:
        """Process id, and the id of its session."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status as in subprocess (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """Send SIGTERM to the program itself; it ends its own descendants."""
        if self.exit_status is None:
            send_signal([self.pid], signal.SIGTERM)

    def end_now(self) -> None:
        """Kill what is left of its session and wait until it is gone."""
        end_processes(lambda: session_processes(self.pid), grace_s=0.0)
        self._process.wait()


def answers_ok(url: str, path: str) -> bool:
    """Return whether GET `url``path` is answered with 200 within PROBE_TIMEOUT_S."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def answers_anything(url: str, timeout_s: float) -> bool:
    """Return whether a server process answers a request at all, with any status.

    A connection that is refused or closed is an answer, too: of a kernel whose process ends, not of a frozen process.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request("GET", LIVENESS_PATH)
        connection.getresponse()
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return True
    finally:
        connection.close()
    return True


def describe_exit(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def log_tail(log: Path, line_count: int) -> list[str]:
    """Return the last lines of a log file, at most `line_count`, without reading all of it."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    # Progress bars redraw a line with carriage returns; only its last state is of use.
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    return [line for line in lines if line][-line_count:]
