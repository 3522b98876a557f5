"""Starts CPU engines by forking them from a process that has their imports: seconds instead of half a minute.

    with ForkClient(log, {**os.environ, **shared_cpu_environment(is_offline=True)}) as client:
        process = client.start(["--role", "short", …], output=log.fileno(), environment=os.environ, cores={0})
        process.wait()

`sglang_ext.sglang_plugin.fork_server` is the other side. An engine that is started so is a child of this process, as
one that `subprocess` starts is.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from sglang_ext.sglang_plugin.launch_plan import LAUNCH_MODULE

START_TIMEOUT_S = 20.0  # between the request and the process id; the imports are made by then
IMPORT_TIMEOUT_S = 300.0
MAX_ANSWER_BYTES = 4096
WORKER_COMMAND = (sys.executable, "-m", "sglang_ext.cli", "worker")
_PR_SET_CHILD_SUBREAPER = 36


class ForkServerError(RuntimeError):
    """No engine can be started this way; `subprocess` still can."""


class ForkedProcess:
    """A child of this process, with the part of `subprocess.Popen` that supervisors use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status as subprocess counts it (-9: SIGKILL), None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._descriptor)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        status = self.poll()
        if status is None:
            select.select([self._descriptor], [], [], timeout)
            status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired([*WORKER_COMMAND], timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, never to another process that has got the same id."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkClient:
    """A fork server of this process's own; it ends with this process, the engines as they were asked to."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """Start it, with its output in `log`; it imports for some seconds. Raises OSError.

        `environment` is that of the engines to come (`shared_cpu_environment`, and what they inherit): one that
        differs in what the imports read makes its own.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._is_ready = False
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", LAUNCH_MODULE, "--fork-server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether its imports are made; does not wait."""
        with suppress(ForkServerError):
            self._await_imports(0.0)
        return self._is_ready

    def start(
        self, arguments: Sequence[str], *, output: int, environment: Mapping[str, str], cores: Collection[int]
    ) -> ForkedProcess:
        """Run `sglang-ext worker ARGUMENTS` as a child of this process, in a session of its own.

        Its output goes to the descriptor `output`, its input is empty, its folder is this one. Waits for the
        imports. Raises ForkServerError.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "cores": sorted(cores),
            "client": os.getpid(),
        }
        with self._lock, open(os.devnull, "rb") as nothing:
            self._await_imports(IMPORT_TIMEOUT_S)
            _set_subreaper(True)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [nothing.fileno(), output, output])
                answer = json.loads(self._receive(START_TIMEOUT_S))
            except OSError as error:
                raise ForkServerError(f"the fork server does not take the request: {error}") from None
            finally:
                _set_subreaper(False)
        if "pid" not in answer:
            raise ForkServerError(answer["error"])
        return ForkedProcess(answer["pid"])

    def close(self) -> None:
        """End the fork server; engines live on. Safe to call again."""
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ForkClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_imports(self, timeout_s: float) -> None:
        if not self._is_ready:
            self._receive(timeout_s)
            self._is_ready = True

    def _receive(self, timeout_s: float) -> bytes:
        if not select.select([self._socket], [], [], timeout_s)[0]:
            raise ForkServerError(f"the fork server did not answer within {timeout_s:g} s")
        data = self._socket.recv(MAX_ANSWER_BYTES)
        if not data:
            raise ForkServerError("the fork server has ended")
        return data


def _set_subreaper(is_one: bool) -> None:
    """Whether orphans below this process become its children, which an engine does while it is started."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0) != 0:
        raise ForkServerError(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
