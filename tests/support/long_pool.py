"""A real coordinator process for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.engines import free_port

START_TIMEOUT_S = 60.0
# Two instances nearly halve the time, so that whatever is long enough is shared: what is tested is not whether it pays.
_PROFILE = {
    "format": "sglang-ext engine profile",
    "version": 1,
    "model": "any",
    "sp": [
        {"size": size, "a_s": 0.001, "b_s_per_token": 1e-3 / size, "c_s_per_token2": 0.0, "d_s_per_token2": 0.0}
        for size in (1, 2, 3, 4)
    ],
}


class Coordinator:
    """`sglang-ext coordinator` on ports of its own, which it keeps when it is started again."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._port, self._http_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        descriptor, name = tempfile.mkstemp(prefix="costs-", suffix=".json")
        with os.fdopen(descriptor, "w") as file:
            json.dump(_PROFILE, file)
        self._profile = Path(name)

    @classmethod
    @contextmanager
    def running(cls, *options: str) -> Iterator[Coordinator]:
        with cls.prepared(*options) as one:
            one.start_again()
            yield one

    @classmethod
    @contextmanager
    def prepared(cls, *options: str) -> Iterator[Coordinator]:
        """One that has its address and is to be started; ended in the end."""
        one = cls(*options)
        try:
            yield one
        finally:
            one.kill()
            one._profile.unlink()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def http_url(self) -> str:
        """Of /status and /metrics."""
        return f"http://127.0.0.1:{self._http_port}"

    def start_again(self) -> None:
        command = [
            *(sys.executable, "-m", "sglang_ext.cli", "coordinator", "--host", "127.0.0.1"),
            *("--port", str(self._port), "--http-port", str(self._http_port)),
            *("--profile", str(self._profile), *self._options),
        ]
        self._process = subprocess.Popen(command)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.status()
                return
            except OSError:
                assert self._process.poll() is None, "the coordinator has ended"
                assert time.monotonic() < deadline_s, "the coordinator does not start"
                time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def status(self) -> dict[str, Any]:
        """Its `GET /status`."""
        with urllib.request.urlopen(f"{self.http_url}/status", timeout=10) as reply:
            status: dict[str, Any] = json.load(reply)
        return status

    def settled(self) -> dict[str, Any]:
        """The status once no prompt is under way: a client may have its answer before the coordinator knows."""
        self.wait_for(lambda status: not status["requests"])
        return self.status()

    @property
    def shared(self) -> int:
        """How many prompts members have computed; waits until none is under way."""
        status = self.settled()
        count: int = status["requests_collected"] + status["requests_streamed"]
        return count

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition(self.status()):
            assert time.monotonic() < deadline_s, self.status()
            time.sleep(0.1)
