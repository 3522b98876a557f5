"""Upstreams that cost next to nothing: nginx answers a fixed text, and counts what reached which port."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from sglang_ext.cluster.process import answers_ok

_TEMPLATE = Path(__file__).with_name("nginx.conf.template")
CAPACITY_TOKENS = 1 << 23

CHAT_REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello there"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 64, "completion_tokens": 1, "total_tokens": 65},
}


class UpstreamError(RuntimeError):
    """The upstreams cannot start."""


def identity(mode: str, bootstrap_port: int | None) -> dict[str, object]:
    """Return what an instance reports about itself in `/server_info`."""
    facts: dict[str, object] = {
        "model_path": "m",
        "served_model_name": "m",
        "tokenizer_path": "m",
        "tp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": mode,
        "max_total_num_tokens": CAPACITY_TOKENS,
        "max_req_input_len": CAPACITY_TOKENS,
        "context_length": CAPACITY_TOKENS,
        "is_generation": True,
        "version": "0.5.23",
    }
    if bootstrap_port is not None:
        facts["disaggregation_bootstrap_port"] = bootstrap_port
    return facts


def control_replies(mode: str, bootstrap_port: int | None) -> dict[str, object]:
    """Return the fixed JSON answer of every control path of an instance."""
    facts = identity(mode, bootstrap_port)
    load = {
        "dp_rank": 0,
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": 0,
        "max_total_num_tokens": CAPACITY_TOKENS,
        "token_usage": 0.0,
        "num_reqs": 0,
        "num_tokens": 0,
    }
    return {
        "/health": {},
        "/health_generate": {},
        "/server_info": facts,
        "/get_server_info": facts,
        "/model_info": facts,
        "/get_model_info": facts,
        "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "sglang"}]},
        "/get_load": [load],
        "/v1/loads": {"loads": [load]},
    }


class StaticUpstreams:
    """A context manager: nginx on the given ports, prefill and decode."""

    def __init__(self, folder: Path, prefill_ports: Sequence[int], decode_ports: Sequence[int]) -> None:
        self._folder = folder
        self._served = folder / "served.log"
        self._ports: list[tuple[int, str, int | None]] = [(port, "prefill", port + 1) for port in prefill_ports]
        self._ports += [(port, "decode", None) for port in decode_ports]

    def __enter__(self) -> StaticUpstreams:
        binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if binary is None:
            raise UpstreamError("nginx is not installed: apt-get install nginx wrk")
        text = _TEMPLATE.read_text(encoding="utf-8")
        servers = "\n".join(_server(port, mode, bootstrap) for port, mode, bootstrap in self._ports)
        text = text.replace("@SERVERS@", servers).replace("@FOLDER@", str(self._folder))
        (self._folder / "nginx.conf").write_text(text, encoding="utf-8")
        self._process = subprocess.Popen(
            [binary, "-p", str(self._folder), "-c", str(self._folder / "nginx.conf")],
            stdin=subprocess.DEVNULL,
            stderr=(self._folder / "nginx-start.log").open("wb"),
        )
        for port, _, _ in self._ports:
            wait_until_healthy(port, self._process, "nginx", self._folder / "nginx-start.log")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def served(self) -> Counter[int]:
        """Return how many requests each port has answered since the start."""
        time.sleep(0.5)  # the log is written every 200 ms
        lines = self._served.read_bytes().split()
        return Counter(int(line) for line in lines)


def wait_until_healthy(port: int, process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    """Wait until a program answers `/health`. Raises UpstreamError when it ends or takes over 10 s."""
    deadline_s = time.monotonic() + 10
    while not answers_ok(f"http://127.0.0.1:{port}", "/health"):
        if process.poll() is not None or time.monotonic() > deadline_s:
            tail = log.read_text(errors="replace")[-400:].strip()
            raise UpstreamError(f"{name} does not answer on port {port}: {tail}")
        time.sleep(0.05)


def _server(port: int, mode: str, bootstrap_port: int | None) -> str:
    replies = control_replies(mode, bootstrap_port).items()
    locations = [f"    location = {path} {{ return 200 '{json.dumps(reply)}'; }}" for path, reply in replies]
    locations.append(f"    location / {{ return 200 '{json.dumps(CHAT_REPLY)}'; }}")
    return "\n".join([f"  server {{ listen 127.0.0.1:{port};", *locations, "  }"])
