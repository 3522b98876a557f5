"""The router as users run it: `sglang-ext router` in a process of its own, over real engines."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.types import Role
from support.engines import Engine, Reply, free_port

ADMIN_KEY = "admin-key-of-the-tests"
_OPTION = {Role.SHORT: "--prefill-short", Role.LONG: "--prefill-long", Role.BOTH: "--prefill", Role.DECODE: "--decode"}
_OPTION[Role.PLAIN] = "--plain"


@dataclass
class RunningRouter:
    port: int
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(
        self, method: str, path: str, body: Any = None, timeout_s: float = 60.0, headers: dict[str, str] | None = None
    ) -> tuple[Reply, dict[str, str]]:
        """Status, parsed body and headers (lower case) of a reply."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json", **(headers or {})},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                status, data, received = response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            with error:
                status, data, received = error.code, error.read(), error.headers
        try:
            parsed = json.loads(data)
        except ValueError:
            parsed = data.decode(errors="replace")
        return Reply(status, parsed), {name.lower(): value for name, value in received.items()}

    def post(self, path: str, body: Any, timeout_s: float = 60.0) -> Reply:
        return self.call("POST", path, body, timeout_s)[0]

    def admin(self, method: str, path: str, body: Any = None) -> Reply:
        return self.call(method, path, body, headers={"authorization": f"Bearer {ADMIN_KEY}"})[0]

    def workers(self) -> dict[str, dict[str, Any]]:
        """State of the instances by URL."""
        reply = self.admin("GET", "/workers")
        return {worker["url"]: worker for worker in reply.body["workers"]}

    def wait_workers(self, ready: Sequence[Engine], timeout_s: float = 30.0) -> None:
        """Return when all these engines take requests."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                known = self.workers()
            except OSError:
                known = {}
            if all(known.get(engine.url, {}).get("state") == "ready" for engine in ready):
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"workers: {known}; log:\n{self.log_path.read_text()[-4000:]}")
            time.sleep(0.1)

    def greedy(self, prompt: Sequence[int], new_tokens: int, headers: dict[str, str] | None = None) -> list[int]:
        """Return the greedy tokens behind a prompt. Raises AssertionError where the router answers with an error."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        reply, _ = self.call("POST", "/generate", body, 120, headers)
        assert reply.status == 200, reply.body
        tokens: list[int] = reply.body["output_ids"]
        return tokens

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a counter or gauge over its labels, of which one may be given (`event="evicted"`); 0 where it has none
        yet."""
        reply, _ = self.call("GET", "/metrics")
        lines = [line for line in str(reply.body).splitlines() if line.partition("{")[0].partition(" ")[0] == name]
        lines = [line for line in lines if label in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def is_idle(self) -> bool:
        reply, _ = self.call("GET", "/pools")
        pools = reply.body["pools"].values()
        return reply.body["requests_in_flight"] == 0 and not any(
            pool["in_flight"] or pool["pending_tokens"] for pool in pools
        )


@contextmanager
def running_router(engines: Sequence[Engine], *options: str, strict_models: bool = False) -> Iterator[RunningRouter]:
    """A router over these engines, all of them ready; ended with SIGTERM."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_ext.cli", "router", "--port", str(port), "--admin-api-key", ADMIN_KEY]
    command += ["--health-check-interval-secs", "0.5", "--set", "health.load_poll_interval_secs=0.2"]
    if not strict_models:  # the engines' model has the name of a temporary folder
        command.append("--accept-any-model")
    for engine in engines:
        command += [_OPTION[engine.spec.role], engine.url]
        if engine.spec.role.is_prefill:
            command.append(str(engine.bootstrap_port))
    with tempfile.NamedTemporaryFile(prefix="router-", suffix=".log", delete=False) as log:
        process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    router = RunningRouter(port, process, Path(log.name))
    try:
        router.wait_workers(engines)
        yield router
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    log_text = router.log_path.read_text()
    assert "Traceback" not in log_text, log_text[-4000:]
