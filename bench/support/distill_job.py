"""The rows of a distillation job, and the two ways to run one: a good client of any endpoint, and `batch run`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from support.mixed_load import FIRST_ORDINARY_TOKEN, TraceMix
from support.result import progress


class Job(NamedTuple):
    """A file of batch lines for `/generate`, and what is in it."""

    path: Path
    bodies: list[bytes]
    prompt_tokens: int


class JobFailedError(RuntimeError):
    """A job did not answer every row."""


def write_job(path: Path, mix: TraceMix, rows: int, long_share: float, new_tokens: int, seed: int, top: int = 0) -> Job:
    """Rows in random order, prompts of random tokens, nothing shared; with `top` their sequences are scored."""
    draw = random.Random(seed)
    lengths = [arrival.prompt_tokens for arrival in mix.arrivals(1.0, float(rows), long_share, seed)]
    bodies = []
    with path.open("wb") as file:
        for number, tokens in enumerate(lengths):
            ids = [draw.randrange(FIRST_ORDINARY_TOKEN, 4000) for _ in range(tokens)]
            sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling}
            line: Mapping[str, Any] = {
                "custom_id": f"row-{number}",
                "method": "POST",
                "url": "/generate",
                "body": body,
            }
            if top:
                line = {"custom_id": f"row-{number}", "token_ids": ids}
                body = {
                    "input_ids": ids,
                    "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "top_logprobs_num": top,
                }
            bodies.append(json.dumps(body).encode())
            file.write(json.dumps(line).encode() + b"\n")
    return Job(path, bodies, sum(lengths))


def run_client(url: str, job: Job, concurrency: int, output: Path) -> float:
    """Return the seconds in which a client with this concurrency has all answers, written as they come.

    Raises JobFailedError for an answer that is none.
    """
    return asyncio.run(_run_client(url, job, concurrency, output))


async def _run_client(url: str, job: Job, concurrency: int, output: Path) -> float:
    waiting = iter(enumerate(job.bodies))
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"content-type": "application/json"}
    began_s = time.perf_counter()
    with output.open("wb") as file:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

            async def worker() -> None:
                for number, body in waiting:
                    for attempt in range(3):
                        async with session.post(url + "/generate", data=body, headers=headers) as reply:
                            answer = await reply.read()
                            if reply.status == 200:
                                break
                            if attempt == 2:
                                raise JobFailedError(f"row {number}: {reply.status} {answer[:200]!r}")
                        await asyncio.sleep(0.5)
                    file.write(b'{"custom_id": "row-%d", "body": %b}\n' % (number, answer.strip()))

            await asyncio.gather(*(worker() for _ in range(concurrency)))
    return time.perf_counter() - began_s


def best_concurrency(url: str, job: Job, choices: Sequence[int], output: Path, engine_urls: Sequence[str]) -> int:
    """The number of requests at a time with which the client is fastest; caches are emptied before each."""
    seconds = {}
    for concurrency in choices:
        for engine_url in engine_urls:
            _flush_cache(engine_url)
        seconds[concurrency] = run_client(url, job, concurrency, output)
        progress(f"  {concurrency} at a time: {seconds[concurrency]:.1f} s")
    return min(seconds, key=lambda one: seconds[one])


def _flush_cache(engine_url: str) -> None:
    """SGLang refuses while anything is under way, a transfer's end included."""
    for attempt in range(20):
        try:
            urllib.request.urlopen(urllib.request.Request(engine_url + "/flush_cache", b"", method="POST"), timeout=30)
            return
        except urllib.error.HTTPError as error:
            if attempt == 19:
                raise JobFailedError(f"{engine_url} keeps its cache: {error}") from None
            time.sleep(0.5)


class BatchRun:
    """`sglang-ext batch run` as a process of its own. A context manager; leaving it kills it."""

    def __init__(self, url: str, job: Job, output: Path, options: Sequence[str] = ()) -> None:
        self._command = [
            *(sys.executable, "-m", "sglang_ext.cli", "batch", "run"),
            *("--input", str(job.path), "--output", str(output), "--endpoint", url, *options),
        ]
        self._log = output.with_suffix(".log")

    def __enter__(self) -> BatchRun:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """kill -9 of the run and what it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def wait(self) -> None:
        """Return when every row is answered. Raises JobFailedError."""
        if self._process.wait() != 0:
            tail = " | ".join(self._log.read_text(errors="replace").strip().splitlines()[-4:])
            raise JobFailedError(f"batch run ended with {self._process.returncode}: {tail}")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


def run_batch(url: str, job: Job, output: Path, options: Sequence[str] = ()) -> float:
    """Seconds of a whole `batch run`, from its start to its end: reading, storing and exporting included."""
    began_s = time.perf_counter()
    with BatchRun(url, job, output, options) as run:
        run.wait()
    return time.perf_counter() - began_s
