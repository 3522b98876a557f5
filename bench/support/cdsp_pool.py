"""A long pool for a benchmark: its coordinator, its members, and prompts through them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_ext.long_pool.decide.sp_cost import ChunkSample, fit_sp_cost
from support.engines import BenchEngine, EngineStartError, free_port

HANDSHAKE = ("--transfer-backend", "handshake")
# SGLang's name for a decode instance that takes all and needs nothing.
STAND_IN_DECODE = "2.2.2.2"
_CONNECT_TIMEOUT_S = 90.0


class Costs(NamedTuple):
    """Seconds of a prefill of L tokens on one instance: a + b L + d L²."""

    a_s: float
    b_s_per_token: float
    d_s_per_token2: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Costs:
        """The fit of (tokens, seconds) that profiles have."""
        cost = fit_sp_cost([ChunkSample(0, tokens, duration_s) for tokens, duration_s in points])
        return cls(cost.a_s, cost.b_s_per_token, cost.d_s_per_token2)

    def profile(self, sizes: Sequence[int], efficiency: float) -> dict[str, object]:
        """Return a profile of `sglang-ext profile`; several instances divide the work at this efficiency."""
        rows = []
        for size in sizes:
            share = 1.0 if size == 1 else 1.0 / (size * efficiency)
            rows.append(
                {
                    "size": size,
                    "a_s": self.a_s,
                    "b_s_per_token": self.b_s_per_token * share,
                    "c_s_per_token2": 2 * self.d_s_per_token2 * share,
                    "d_s_per_token2": self.d_s_per_token2 * share,
                }
            )
        return {"format": "sglang-ext engine profile", "version": 1, "model": "measured", "sp": rows}


class PoolCoordinator:
    """`sglang-ext coordinator`, which may be started again with other options on the same ports."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._port, self._http_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self, sizes: Sequence[int], profile: dict[str, object], *options: str) -> None:
        """Start, or start again."""
        self.stop()
        costs = self._scratch / "costs.json"
        costs.write_text(json.dumps(profile))
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang_ext.cli", "coordinator", "--port", str(self._port)),
                *("--http-port", str(self._http_port), "--sp-sizes", ",".join(map(str, sizes))),
                *("--profile", str(costs), "--log-level", "error", *options),
            ]
        )

    def wait_connected(self, members: int) -> None:
        """Return when this number of members has joined, each connected with all. Raises EngineStartError."""
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                status = self.status()
                if len(status["members"]) == members:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise EngineStartError("the pool's instances are not connected")

    def status(self) -> Any:
        """Its `GET /status`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/status", timeout=10) as reply:
            return json.load(reply)

    def last_prompt(self) -> Any:
        """The record of the prompt that has ended last, once none is under way."""
        while (status := self.status())["requests"] or not status["recent"]:
            time.sleep(0.05)
        return status["recent"][-1]

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


class Sent:
    """A random prompt that is on its way; `decode` None: SGLang's stand-in for it takes the KV."""

    def __init__(self, prefill: BenchEngine, decode: BenchEngine | None, tokens: int, vocabulary: int) -> None:
        draw = random.SystemRandom()
        body = {
            "input_ids": [draw.randrange(8, vocabulary) for _ in range(tokens)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "bootstrap_host": STAND_IN_DECODE if decode is None else "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": draw.getrandbits(62),
        }
        self._failures: list[str] = []
        self._ended_s = [0.0, 0.0]  # prefill, decode
        legs = [prefill] if decode is None else [prefill, decode]
        self._threads = [
            threading.Thread(target=self._send, args=(number, engine, body)) for number, engine in enumerate(legs)
        ]
        self._began_s = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def wait(self) -> Sent:
        """Until all legs have been answered. Raises EngineStartError when one has failed."""
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise EngineStartError(f"a request failed: {self._failures[0]}")
        return self

    @property
    def is_ended(self) -> bool:
        """Return whether all legs have been answered."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def prefill_s(self) -> float:
        """Until prefill answered: computed, and its KV gone."""
        return self._ended_s[0] - self._began_s

    @property
    def ttft_s(self) -> float:
        """Until the first token came: from decode, which is all that a router waits for, or from prefill without it."""
        return self._ended_s[len(self._threads) - 1] - self._began_s

    def _send(self, number: int, engine: BenchEngine, body: object) -> None:
        try:
            request = urllib.request.Request(
                engine.url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=600) as reply:
                reply.read()
        except urllib.error.HTTPError as error:
            with error:
                self._failures.append(f"{error}: {error.read().decode(errors='replace')[:200]}")
        except OSError as error:
            self._failures.append(str(error))
        self._ended_s[number] = time.perf_counter()
