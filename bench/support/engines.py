"""Real prefill and decode instances for a benchmark, each pinned to its cores."""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_ext.cluster.fork_client import ForkClient, ForkedProcess
from sglang_ext.cluster.process_tree import all_processes
from sglang_ext.engine.launch_plan import shared_cpu_environment
from sglang_ext.ports import pick_free_ports

START_TIMEOUT_S = 240.0
ROUTER_TIMEOUT_S = 60.0
_CAUSE = re.compile(r"[\w.]+(Error|Exception)\b")
STOP_TIMEOUT_S = 20.0


class EngineStartError(RuntimeError):
    """An instance did not come up; the message ends with its last log line."""


@dataclass
class BenchEngine:
    """One instance that was started by `sglang-ext worker`."""

    url: str
    port: int
    bootstrap_port: int
    process: ForkedProcess
    log_path: Path

    @classmethod
    def start(
        cls,
        role: str,
        model: Path,
        scratch: Path,
        *,
        worker_options: Sequence[str] = (),
        engine_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> BenchEngine:
        """Start an instance, with `environment` added to its own; `wait_ready` returns when it serves."""
        port, bootstrap_port = free_port(), free_port()
        log_path = scratch / f"{role}-{port}.log"
        arguments = [
            *("--role", role, "--model-path", str(model)),
            *("--port", str(port), "--bootstrap-port", str(bootstrap_port), "--threads", "1", "--exit-with-parent"),
            *worker_options,
            *("--", "--skip-tokenizer-init", "--log-level", "warning", *engine_arguments),
        ]
        with log_path.open("wb") as log:
            process = _fork_client(scratch).start(
                arguments,
                output=log.fileno(),
                environment={**os.environ, **(environment or {})},
                cores=os.sched_getaffinity(0),
            )
        return cls(f"http://127.0.0.1:{port}", port, bootstrap_port, process, log_path)

    def wait_ready(self) -> None:
        """Raises EngineStartError when it ends, or is not healthy in time."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except (OSError, ValueError):
                time.sleep(0.3)
        lines = self.log_path.read_text(errors="replace").strip().splitlines() or ["no output"]
        # The last lines of an engine that dies are about processes that ended because another process did.
        causes = [line for line in lines if _CAUSE.match(line)] or lines
        raise EngineStartError(f"an instance did not start: {causes[-1]}")

    def pin(self, cores: Collection[int]) -> None:
        """From now on all its processes and threads run on these cores only. Starting takes all there are."""
        for stat in all_processes():
            if os.getsid(stat.pid) == self.process.pid:
                for task in Path(f"/proc/{stat.pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), cores)

    def get(self, path: str) -> Any:
        """The JSON (or text) of a GET. Raises OSError when it is refused."""
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return _decode(reply.read())

    def post(self, path: str, body: object) -> Any:
        """The JSON (or text) of a POST. Raises OSError when it is refused."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return _decode(reply.read())

    def terminate(self) -> None:
        """Ask it to end; `stop` waits for it."""
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self) -> None:
        """Return when all its processes have ended. Safe to call again."""
        self.terminate()
        if self.process.poll() is None:
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@contextmanager
def running_router(options: Sequence[str], instances: int, key: str = "") -> Iterator[str]:
    """Run our router; its URL, once `instances` of it take requests. Raises EngineStartError.

    `key` is a client's, where the router asks for one.
    """
    port = free_port()
    words = ("router", "--pd-disaggregation", "--port", str(port), "--log-level", "warning", *options)
    process = subprocess.Popen([sys.executable, "-m", "sglang_ext.cli", *words])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + ROUTER_TIMEOUT_S
        while _ready_instances(url, key) < instances:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise EngineStartError("the router did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _ready_instances(url: str, key: str) -> int:
    request = urllib.request.Request(url + "/workers", headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            workers = json.load(reply)["workers"]
    except OSError:
        return 0
    return sum(worker["state"] == "ready" for worker in workers)


@cache
def _fork_client(scratch: Path) -> ForkClient:
    client = ForkClient(scratch / "fork-server.log", {**os.environ, **shared_cpu_environment(is_offline=True)})
    atexit.register(client.close)
    return client


def free_port() -> int:
    """A TCP port on which nothing listens, that the system gives to no connection, and that was not asked for."""
    (port,) = pick_free_ports("127.0.0.1", 1, draw=random.SystemRandom())
    return port


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
