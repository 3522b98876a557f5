"""Starts CPU engines by forking them from a process that has their imports: seconds instead of half a minute.

    with ForkClient(log, {**os.environ, **shared_cpu_environment(is_offline=True)}) as client:
        process = client.start(["--role", "short", …], output=log.fileno(), environment=os.environ, cores={0})
        process.wait()

`sglang_ext.engine.fork_server` is the other side. An engine that is started so is a child of this process, as
a process started by `subprocess` is.
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from sglang_ext.engine.launch_plan import LAUNCH_MODULE

START_TIMEOUT_S = 10.0  # between the request and the process id, milliseconds unless the machine is overloaded
MAX_ANSWER_BYTES = 4096
IMPORT_TIMEOUT_S = 300.0
WORKER_COMMAND = (sys.executable, "-m", "sglang_ext.cli", "worker")
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_SUBREAPER = threading.Lock()  # which process adopts orphans is a property of the whole process


class ForkServerError(RuntimeError):
    """No engine can be started this way; `subprocess` still can."""


class ForkedProcess:
    """A child of this process, with the part of `subprocess.Popen` that supervisors use."""

    def __init__(self, pid: int) -> None:
        """Raises OSError where there are no descriptors for processes, or no more."""
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def poll(self) -> int | None:
        """The exit status as subprocess counts it (-9: SIGKILL), None while it runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # SIGCHLD is ignored: as with subprocess, the status is lost
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        status = self.poll()
        if status is None:
            _is_readable(self._descriptor, timeout)
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
    """A fork server of this process's own. It ends with this process, and so does every engine (SIGTERM)."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """Start it, with its output in `log`; it imports for some seconds. Raises OSError.

        `environment` is that of the engines to come (`shared_cpu_environment`, and what they inherit): one that
        differs in what the imports read makes its own.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._has_imports = False
        self._is_broken = False
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
        """Return whether it may start engines, now or once its imports are made."""
        return not self._is_broken and self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Return whether its imports are made; does not wait."""
        with suppress(ForkServerError), self._lock:
            self._await_imports(0.0)
        return self._has_imports and self.is_alive

    def start(
        self, arguments: Sequence[str], *, output: int, environment: Mapping[str, str], cores: Collection[int]
    ) -> ForkedProcess:
        """Run `sglang-ext worker ARGUMENTS` as a child of this process, in a session of its own.

        Its output goes to the descriptor `output`, its input is empty, its folder is this one. Waits for the imports.
        Raises ForkServerError; unless they only were not made in time, the fork server is at its end then.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "cores": sorted(cores),
            "client": os.getpid(),
        }
        with self._lock:
            self._await_imports(IMPORT_TIMEOUT_S)
            try:
                return self._start(json.dumps(request).encode(), output)
            except BaseException as error:
                # An answer that still came would be taken for the next request's.
                self._give_up()
                if isinstance(error, OSError | ValueError):
                    raise ForkServerError(f"the fork server has failed: {error}") from None
                raise

    def close(self) -> None:
        """End the fork server; engines live on. Safe to call again."""
        with self._lock:
            self._give_up()

    def __enter__(self) -> ForkClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, request: bytes, output: int) -> ForkedProcess:
        with open(os.devnull, "rb") as nothing, _adopting_orphans():
            socket.send_fds(self._socket, [request], [nothing.fileno(), output, output])
            answer = json.loads(self._receive(START_TIMEOUT_S))
        if "pid" not in answer:
            raise ForkServerError(answer["error"])
        try:
            return ForkedProcess(answer["pid"])
        except OSError:
            os.kill(answer["pid"], signal.SIGKILL)
            os.waitpid(answer["pid"], 0)
            raise

    def _give_up(self) -> None:
        self._is_broken = True
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def _await_imports(self, timeout_s: float) -> None:
        if self._is_broken:
            raise ForkServerError("the fork server has ended")
        if not self._has_imports:
            self._receive(timeout_s)
            self._has_imports = True

    def _receive(self, timeout_s: float) -> bytes:
        if not _is_readable(self._socket.fileno(), timeout_s):
            raise ForkServerError(f"the fork server did not answer within {timeout_s:g} s")
        data = self._socket.recv(MAX_ANSWER_BYTES)
        if not data:
            raise ForkServerError("the fork server has ended")
        return data


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Orphans below this process become its children, which an engine does while it is started."""
    library = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    with _SUBREAPER:
        if (
            library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0
            or library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0
        ):
            raise ForkServerError(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            library.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _is_readable(descriptor: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1e3))
