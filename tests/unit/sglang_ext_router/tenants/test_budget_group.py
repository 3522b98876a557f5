"""A budget that three router processes divide is exact within 1%, also while one of them is killed and starts again."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.engines import free_port
from support.tenants import bearer, tenants_file

PER_MINUTE = 30_000
USED_TOKENS = 50  # by each request
BODY = {"text": "x" * 38, "sampling_params": {"max_new_tokens": 40}}  # the mock engine counts 10 tokens of the text
LONGEST_WARM_UP_S = 60.0
MEASURED_S = 20.0
TOLERANCE = 0.01
COMMAND = (sys.executable, "-m", "sglang_ext.cli")


class RouterGroup:
    """Router processes over one mock engine, each with a database of its own."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._tenants = tenants_file(folder, a={"tokens_per_minute": PER_MINUTE})
        self._engine_port = free_port()
        self._peer_ports = [free_port() for _ in range(count)]
        self.ports = [free_port() for _ in range(count)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_engine(self) -> None:
        self._start("engine", "mock-engine", "--role", "plain", "--port", self._engine_port, "--token-ms", 0.5)

    def start_router(self, number: int) -> None:
        peers = [word for port in self._peer_ports for word in ("--peer", f"127.0.0.1:{port}")]
        self._start(
            f"router-{number}",
            *("router", "--port", self.ports[number], "--plain", f"http://127.0.0.1:{self._engine_port}", *peers),
            *("--peer-port", self._peer_ports[number], "--admin-api-key", "admin"),
            *("--tenants-file", self._tenants, "--usage-db", self._folder / f"usage-{number}.db"),
        )

    def kill_router(self, number: int) -> None:
        process = self._processes[f"router-{number}"]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def _start(self, name: str, *words: object) -> None:
        environment = {**os.environ, "SGLANG_EXT_PEER_KEY": "a key of the routers of these tests"}
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [*COMMAND, *map(str, words)]
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait_ready(self, number: int) -> None:
        end_s = time.monotonic() + 120
        while _ask(self.ports[number], "GET", "/readyz") != 200:
            assert time.monotonic() < end_s, (self._folder / f"router-{number}.log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(20)


@contextmanager
def router_group(folder: Path, count: int) -> Iterator[RouterGroup]:
    group = RouterGroup(folder, count)
    try:
        group.start_engine()
        for number in range(count):
            group.start_router(number)
        for number in range(count):
            group.wait_ready(number)
        yield group
    finally:
        group.stop()


def _ask(port: int, method: str, path: str, body: object = None) -> int:
    """Return the status of a reply; 0 where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), bearer("a"))
        reply = connection.getresponse()
        reply.read()
        return reply.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


class Client(threading.Thread):
    """Asks a router again and again, and remembers when it was let in."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._is_ending = threading.Event()
        self.let_in_s: list[float] = []
        self.statuses: set[int] = set()

    def run(self) -> None:
        while not self._is_ending.is_set():
            asked_s = time.monotonic()
            status = _ask(self._port, "POST", "/generate", BODY)
            self.statuses.add(status)
            if status == 200:
                self.let_in_s.append(asked_s)
            else:
                time.sleep(0.05)

    def end(self) -> None:
        self._is_ending.set()
        self.join()


def wait_until_used_up(clients: Sequence[Client]) -> None:
    """Wait until what the routers had at their start is used up: within two seconds as many are let in as may be."""
    end_s = time.monotonic() + LONGEST_WARM_UP_S
    while True:
        time.sleep(2.0)
        since_s = time.monotonic() - 2.0
        let_in = sum(at_s >= since_s for client in clients for at_s in client.let_in_s)
        if all(429 in client.statuses for client in clients) and let_in * USED_TOKENS <= 1.2 * PER_MINUTE / 30:
            return
        assert time.monotonic() < end_s, (let_in, [client.statuses for client in clients])


@pytest.mark.slow
@pytest.mark.parametrize(
    "down_s",
    [
        pytest.param(None, id="all-stay", marks=pytest.mark.full),
        pytest.param(0.5, id="one-is-back-soon", marks=pytest.mark.full),
        pytest.param(8.0, id="one-is-away-longer", marks=pytest.mark.full),
    ],
)
def test_the_budget_of_three_processes(tmp_path: Path, down_s: float | None) -> None:
    with ExitStack() as stack:
        group = stack.enter_context(router_group(tmp_path, 3))
        clients = [Client(port) for port in group.ports for _ in range(2)]
        for client in clients:
            stack.callback(client.end)
            client.start()
        wait_until_used_up(clients)
        began_s = time.monotonic()
        if down_s is not None:
            time.sleep(2.0)
            group.kill_router(2)
            time.sleep(down_s)
            group.start_router(2)
            group.wait_ready(2)
        time.sleep(max(0.0, began_s + MEASURED_S - time.monotonic()))
        ended_s = time.monotonic()
    let_in = sum(began_s <= at_s < ended_s for client in clients for at_s in client.let_in_s)
    assert set().union(*(client.statuses for client in clients)) <= {200, 429, 503, 0}
    assert let_in * USED_TOKENS == pytest.approx(
        PER_MINUTE * (ended_s - began_s) / 60, abs=TOLERANCE * PER_MINUTE * (1 + (ended_s - began_s) / 60)
    )
