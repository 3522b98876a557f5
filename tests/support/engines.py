"""Real engines for tests: started through `sglang-ext worker`, shared between tests, always stopped.

    pair = FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))

Engines are forked from a process that has their imports, 3 s each instead of 20; tests ask the fleet for a
specification and get the engine that already runs with it. The fleet keeps few alive, replaces dead ones, and ends
with the test process.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.cluster.fork_client import WORKER_COMMAND, ForkClient, ForkedProcess
from sglang_ext.cluster.process_tree import send_signal, session_processes
from sglang_ext.engine.launch_plan import shared_cpu_environment
from sglang_ext.ports import pick_free_ports
from sglang_ext.types import Role
from support.tiny_model import STANDARD_SHAPE, TinyModelShape, tiny_model

READY_TIMEOUT_S = 400.0
READY_LINES = (b"The server is fired up and ready to roll!", b"Uvicorn running on ")
SHARED_MEMORY = Path("/dev/shm")
# A prompt in which no other instance has a part; an undivided instance does not look at the last two fields.
WARM_UP = {
    "input_ids": [10, 11, 12],
    "sampling_params": {"temperature": 0, "max_new_tokens": 8},
    "bootstrap_host": "2.2.2.2",
}
MAX_ALIVE = 6
LOG_TAIL_LINES = 40


class EngineError(AssertionError):
    """An engine died or did not become ready; the message ends with the tail of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine a test needs. Equal specifications share one engine."""

    role: Role
    shape: TinyModelShape = STANDARD_SHAPE
    arguments: tuple[str, ...] = ()  # for sglang.launch_server
    worker_options: tuple[str, ...] = ()  # for sglang-ext worker
    environment: tuple[tuple[str, str], ...] = ()  # beside that of the tests
    name: str = ""  # tells apart engines that are otherwise equal
    has_own_imports: bool = False  # started as users start it, not forked


# One ordinary SGLang server: no disaggregation, SGLang's own scheduler.
PLAIN_SERVER = EngineSpec(
    Role.BOTH,
    arguments=("--disaggregation-mode", "null"),
    worker_options=("--laps-mode", "off"),
    name="stock",
)


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any  # parsed JSON where it is JSON, text otherwise


@dataclass
class Engine:
    """One running engine. `start` returns at once, `wait_ready` when it serves."""

    spec: EngineSpec
    port: int
    bootstrap_port: int
    log_path: Path
    process: subprocess.Popen[bytes] | ForkedProcess
    last_used: float = field(default_factory=time.monotonic)
    has_failed: bool = False

    @classmethod
    def start(cls, spec: EngineSpec, ports: tuple[int, int] | None = None) -> Engine:
        """Start an engine on given ports (its own, its bootstrap server's) or on free ones."""
        port, bootstrap_port = ports or (free_port(), free_port())
        descriptor, log_name = tempfile.mkstemp(prefix=f"engine-{spec.role}-{spec.name}-", suffix=".log")
        arguments = [
            *("--role", spec.role.value, "--model-path", str(tiny_model(spec.shape)), "--port", str(port)),
            *("--bootstrap-port", str(bootstrap_port), "--exit-with-parent", "--threads", "1"),
            *spec.worker_options,
            "--",
            # Which begins with a second of sleep; `wait_ready` does the same without.
            *(() if spec.has_own_imports else ("--skip-server-warmup",)),
            *spec.arguments,
        ]
        environment = {**ENVIRONMENT, **dict(spec.environment)}
        process: subprocess.Popen[bytes] | ForkedProcess
        with os.fdopen(descriptor, "wb") as log:
            if spec.has_own_imports:
                process = subprocess.Popen(
                    [*WORKER_COMMAND, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            else:
                process = _fork_client().start(
                    arguments, output=log.fileno(), environment=environment, cores=os.sched_getaffinity(0)
                )
        return cls(spec, port, bootstrap_port, Path(log_name), process)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when SGLang has logged that it serves. Raises EngineError when the process ends or the time is up.

        `/health` says the same, but no sooner than a second after it was asked.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.is_alive:
                raise self._error(f"ended with status {self.process.returncode} while starting")
            log = self.log_path.read_bytes()
            if all(line in log for line in READY_LINES):
                if not self.spec.has_own_imports:
                    # SGLang's own health check, which a router may ask for at this moment, has room 0.
                    embeds = "--is-embedding" in self.spec.arguments  # and ends when it is asked to generate
                    warm_up = {"input": "x"} if embeds else {**WARM_UP, "bootstrap_room": random.getrandbits(62)}
                    reply = self.post("/v1/embeddings" if embeds else "/generate", warm_up)
                    assert reply.status == 200, reply
                return
            time.sleep(0.1)
        raise self._error(f"was not ready within {timeout_s:.0f} s")

    def get(self, path: str, timeout_s: float = 30.0) -> Reply:
        return self._call(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 120.0) -> Reply:
        data = json.dumps(body).encode()
        return self._call(
            urllib.request.Request(self.url + path, data, {"content-type": "application/json"}), timeout_s
        )

    def load(self) -> dict[str, Any]:
        """The first (only) entry of /v1/loads."""
        entry: dict[str, Any] = self.get("/v1/loads").body["loads"][0]
        return entry

    def wait_for_load(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float) -> float:
        """Seconds until the load meets `condition`. Raises EngineError when the time is up."""
        start = time.monotonic()
        while True:
            load = self.load()
            if condition(load):
                return time.monotonic() - start
            if time.monotonic() - start > timeout_s:
                raise self._error(f"load after {timeout_s:.1f} s: {json.dumps(load)}")
            time.sleep(0.05)

    def wait_idle(self, timeout_s: float = 10.0) -> float:
        """Seconds until no request and no KV slot in use is left."""
        return self.wait_for_load(is_idle, timeout_s)

    def process_ids(self, title: str = "") -> list[int]:
        """The engine's processes (its session holds them all), or those whose command line has `title`."""
        return [pid for pid in session_processes(self.process.pid) if title in _command_line(pid)]

    @contextmanager
    def frozen_scheduler(self) -> Iterator[None]:
        """Stop the scheduler's processes, as a machine does that hangs."""
        schedulers = self.process_ids("sglang::scheduler")
        assert schedulers, f"no scheduler among {self.process_ids()}"
        for pid in schedulers:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in schedulers:
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass

    def freeze(self) -> None:
        """SIGSTOP of all its processes: connections are accepted, and nothing is answered."""
        send_signal(session_processes(self.process.pid), signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        send_signal(session_processes(self.process.pid), signal.SIGCONT)

    def kill(self) -> None:
        """kill -9 of the main process, as a crash would do it."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Kill all its processes (SGLang takes 5 s to end when asked to); keep the log of one that failed.

        Safe to call again.
        """
        pids = {self.process.pid, *self.process_ids()}
        while left := self.process_ids():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.01)
        self.process.wait()
        for queue in SHARED_MEMORY.glob("sgl_shm_mq_*"):  # those of tensor-parallel ranks outlive kill -9
            if int(queue.name.split("_")[3]) in pids:
                queue.unlink(missing_ok=True)
        if not self.has_failed:
            self.log_path.unlink(missing_ok=True)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        text = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line[:400] for line in text[-lines:])

    def _call(self, request: urllib.request.Request, timeout_s: float) -> Reply:
        self.last_used = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return Reply(response.status, _decode(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, _decode(error.read()))
        except OSError:
            if not self.is_alive:  # a test may have killed it; where none has, its log says why
                print(f"engine {self.spec.name} has ended:\n{self.log_tail()}", file=sys.stderr)
            raise

    def _error(self, problem: str) -> EngineError:
        self.has_failed = True
        return EngineError(
            f"engine {self.spec.role} {self.spec.name} {problem}; log {self.log_path}:\n{self.log_tail()}"
        )


class EngineFleet:
    """Engines by specification, at most `max_alive` at a time."""

    def __init__(self, max_alive: int = MAX_ALIVE) -> None:
        self._max_alive = max_alive
        self._engines: dict[EngineSpec, Engine] = {}

    def get(self, *specs: EngineSpec) -> list[Engine]:
        """Ready engines for `specs`, in order; missing ones are started together."""
        if len(specs) > self._max_alive:
            raise ValueError(f"{len(specs)} engines asked for, {self._max_alive} may be alive at a time")
        self._drop_dead()
        self._make_room(specs)
        started = []
        for spec in specs:
            if spec not in self._engines:
                self._engines[spec] = Engine.start(spec)
                started.append(spec)
        try:
            for spec in started:
                self._engines[spec].wait_ready()
        except BaseException:
            for spec in started:
                self._engines.pop(spec).stop()
            raise
        engines = [self._engines[spec] for spec in specs]
        for engine in engines:
            engine.last_used = time.monotonic()  # who asks next must not evict what this test is about to use
        return engines

    def close(self) -> None:
        """Stop every engine."""
        while self._engines:
            self._engines.popitem()[1].stop()

    def _drop_dead(self) -> None:
        for spec, engine in list(self._engines.items()):
            if not engine.is_alive:
                engine.stop()
                del self._engines[spec]

    def _make_room(self, wanted: tuple[EngineSpec, ...]) -> None:
        missing = [spec for spec in wanted if spec not in self._engines]
        spare = sorted(
            (spec for spec in self._engines if spec not in wanted), key=lambda spec: self._engines[spec].last_used
        )
        while len(self._engines) + len(missing) > self._max_alive:
            self._engines.pop(spare.pop(0)).stop()


# As this process got it: SGLang, imported by other tests, changes it, and an engine with other settings than the fork
# server's makes its own imports.
ENVIRONMENT = dict(os.environ)
_CLIENTS: list[ForkClient] = []  # the last one is in use


def _fork_client() -> ForkClient:
    if not _CLIENTS or not _CLIENTS[-1].is_alive:
        descriptor, log = tempfile.mkstemp(prefix="fork-server-", suffix=".log")
        os.close(descriptor)
        _CLIENTS.append(ForkClient(Path(log), {**ENVIRONMENT, **shared_cpu_environment(is_offline=True)}))
        atexit.register(_CLIENTS[-1].close)
    return _CLIENTS[-1]


FLEET = EngineFleet()
atexit.register(FLEET.close)


def is_idle(load: dict[str, Any]) -> bool:
    """Whether an entry of /v1/loads shows no request in any queue and no KV slot in use."""
    queues = [count for name, count in load["disaggregation"].items() if name.endswith("_queue_reqs")]
    return not any((load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"], *queues))


def free_port() -> int:
    """A TCP port that has no listener now, that no connection is given by the system, and that was not asked for."""
    (port,) = pick_free_ports("127.0.0.1", 1, draw=random.SystemRandom())
    return port


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
