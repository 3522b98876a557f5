"""`sglang-ext batch serve` as users run it: a process of its own, which can be killed and started again.

with running_service(tmp_path, endpoint.url) as service:
    client = service.client()
    ...
    service.kill()
    service.start()
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import orjson

from support.engines import free_port

UP_WITHIN_S = 60.0


class RunningService:
    """The process; `log_path` has what it wrote in all its lives."""

    def __init__(
        self,
        folder: Path,
        endpoint_url: str,
        options: Sequence[str],
        key: str,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._environment = environment
        self.folder = folder
        self.port = free_port()
        self.key = key
        self.log_path = folder / "service.log"
        self._command = [sys.executable, "-m", "sglang_ext.cli", "batch", "serve", "--endpoint", endpoint_url]
        store = [] if "--store" in options else ["--store", str(folder / "store")]
        self._command += [*store, "--port", str(self.port), *options]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and return when it answers."""
        environment = {**self._environment, "SGLANG_EXT_API_KEY": self.key}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        end_s = time.monotonic() + UP_WITHIN_S
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, self.log_path.read_text()[-4000:]
                assert time.monotonic() < end_s, self.log_path.read_text()[-4000:]
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def client(self, **options: Any) -> openai.OpenAI:
        """The SDK, unmodified."""
        settings = {"max_retries": 0, "timeout": 60.0, "api_key": self.key or "none", **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)


@contextmanager
def running_service(
    folder: Path,
    endpoint_url: str,
    *options: str,
    key: str = "key-of-the-tests",
    environment: Mapping[str, str] = os.environ,
) -> Iterator[RunningService]:
    """The service, up; ended with SIGTERM. Its log must tell of no bug."""
    service = RunningService(folder, endpoint_url, options, key, environment)
    service.start()
    try:
        yield service
    finally:
        assert service.process is not None
        try:
            if service.process.poll() is None:
                service.terminate()
        finally:
            service.kill()
    log = service.log_path.read_text()
    assert "Traceback" not in log, log[-4000:]


def chat_line(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    """A line of a batch's input."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": content}], **body},
    }


def jsonl(lines: Sequence[Any]) -> bytes:
    """Lines of JSON."""
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def parse_jsonl(content: bytes) -> list[dict[str, Any]]:
    """What the lines of a file hold."""
    return [orjson.loads(line) for line in content.splitlines()]


def wait_batch(client: openai.OpenAI, batch_id: str, *wanted: str, timeout_s: float = 60.0) -> openai.types.Batch:
    """Poll until the batch has one of these statuses; by default one that it stays in."""
    wanted = wanted or ("completed", "failed", "expired", "cancelled")
    end_s = time.monotonic() + timeout_s
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in wanted:
            return batch
        assert batch.status not in {"completed", "failed", "expired", "cancelled"}, batch
        assert time.monotonic() < end_s, batch
        time.sleep(0.05)
