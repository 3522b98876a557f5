"""The routers under test: how each is started on the same upstreams, and a check that it does its work."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from sglang_ext.cluster.process import answers_ok
from sglang_ext.cluster.process_tree import end_processes, session_processes
from support.processor_time import fine_processor_time_s, processor_time_s

OURS = "sglang-ext"
START_TIMEOUT_S = 30.0


class RouterError(RuntimeError):
    """A router did not start, or answers wrongly."""


class Upstreams(NamedTuple):
    """Ports of the instances; each prefill's bootstrap port is the next number."""

    short: Sequence[int]
    long: Sequence[int]
    decode: Sequence[int]

    @property
    def prefill(self) -> list[int]:
        return [*self.short, *self.long]


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _our_command(port: int, metrics_port: int, upstreams: Upstreams) -> list[str]:
    command = [sys.executable, "-m", "sglang_ext.cli", "router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--pd-disaggregation", "--log-level", "warning"]
    for option, ports in (("--prefill-short", upstreams.short), ("--prefill-long", upstreams.long)):
        for prefill in ports:
            command += [option, _url(prefill), str(prefill + 1)]
    for decode in upstreams.decode:
        command += ["--decode", _url(decode)]
    return command


def _peer_command(start: Sequence[str], port: int, metrics_port: int, upstreams: Upstreams) -> list[str]:
    command = [*start, "--host", "127.0.0.1", "--port", str(port), "--pd-disaggregation"]
    for prefill in upstreams.prefill:
        command += ["--prefill", _url(prefill), str(prefill + 1)]
    for decode in upstreams.decode:
        command += ["--decode", _url(decode)]
    # The cheapest of its policies, so that no peer is measured at its worst.
    return [*command, "--policy", "round_robin", "--prometheus-port", str(metrics_port), "--log-level", "warn"]


COMMANDS: dict[str, Callable[[int, int, Upstreams], list[str]]] = {
    OURS: _our_command,
    "sglang-router": partial(_peer_command, [sys.executable, "-m", "sglang_router.launch_router"]),
    "smg": partial(_peer_command, [str(Path(sys.executable).parent / "smg"), "launch"]),
}


class RunningRouter:
    """A context manager: one router on the given upstreams, ready to serve."""

    def __init__(
        self,
        name: str,
        port: int,
        metrics_port: int,
        upstreams: Upstreams,
        log: Path,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        key: str = "",
    ) -> None:
        """`options` are added to its command; `environment` takes the place of this process's.

        `key` is a client's, where it asks for one.
        """
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self.name = name
        self.port = port
        self._command = [*COMMANDS[name](port, metrics_port, upstreams), *options]
        self._environment = environment
        self._log = log

    def __enter__(self) -> RunningRouter:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def processor_time_s(self) -> float:
        """User and system time in seconds of all its processes since its start."""
        return processor_time_s(self._process.pid)

    @property
    def fine_processor_time_s(self) -> float:
        """The same of its living threads, to the nanosecond."""
        return fine_processor_time_s(self._process.pid)

    def ask(self, *, stream: bool) -> bytes:
        """Send one chat request and return the body of the answer. Raises RouterError outside 200."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "stream": stream}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise RouterError(f"{self.name} does not answer: {error!r}") from error
        finally:
            connection.close()
        if reply.status != 200:
            raise RouterError(f"{self.name} answers {reply.status}: {content[:200]!r}")
        return content

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                raise RouterError(f"{self.name} ended with {self._process.returncode}; see {self._log}")
            if answers_ok(_url(self.port), "/health"):
                try:
                    self.ask(stream=False)
                    return
                except RouterError:
                    pass  # up, but its instances are not known yet
            if time.monotonic() > deadline_s:
                raise RouterError(f"{self.name} is not ready after {START_TIMEOUT_S:g} s; see {self._log}")
            time.sleep(0.1)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        end_processes(lambda: session_processes(self._process.pid), grace_s=0.0)
        self._process.wait()
