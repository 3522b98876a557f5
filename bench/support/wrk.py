"""The load generator `wrk`, with its result read from its own hook instead of from its text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

PROMPT_BYTES = 372
_SCRIPT = Path(__file__).with_name("chat.lua")


class WrkError(RuntimeError):
    """wrk could not run, or saw an error."""


class Load(NamedTuple):
    """Describes what one run of wrk saw."""

    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float


def run_wrk(
    port: int,
    *,
    concurrency: int,
    duration_s: float,
    stream: bool,
    prompt_bytes: int = PROMPT_BYTES,
    pause_ms: int = 0,
    key: str = "",
) -> Load:
    """Send chat requests with prompts of `prompt_bytes` to 127.0.0.1:`port` for `duration_s`.

    Each connection waits `pause_ms` before a request: there are at most `concurrency / pause_ms` in a millisecond.

    `key` is sent as a bearer token.

    Raises WrkError on any answer outside 2xx and on any connection error.
    """
    command = ["wrk", "-t1", f"-c{concurrency}", f"-d{duration_s:g}s", "--timeout", "20s"]
    command += ["-s", str(_SCRIPT), f"http://127.0.0.1:{port}/v1/chat/completions"]
    command += ["--", "stream" if stream else "whole", str(prompt_bytes), str(pause_ms), key]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SUMMARY ")]
    if done.returncode or not lines:
        raise WrkError(f"wrk failed: {(done.stderr or done.stdout).strip()}")
    seen = json.loads(lines[0].removeprefix("SUMMARY "))
    errors = {kind: count for kind, count in seen["errors"].items() if count}
    if errors or not seen["requests"]:
        raise WrkError(f"at concurrency {concurrency}: {seen['requests']} requests, errors {errors}")
    return Load(
        requests=seen["requests"],
        requests_per_s=seen["requests"] / (seen["duration_us"] / 1e6),
        p50_ms=seen["p50_us"] / 1e3,
        p99_ms=seen["p99_us"] / 1e3,
    )
