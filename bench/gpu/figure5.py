"""LAPS, figure 5: latency and throughput of short prompts by the waiting window, fixed ones and the adaptive one.

    python -m gpu.figure5 --out FILE [--model NAME] [--small]

The instance is that of `gpu.figure6` with both queues and graphs, started anew for every window. The load is open: new
prompts of up to 256 tokens are due at moments that are drawn beforehand, the same for every window, whatever has been
answered; a request's time runs from the moment at which it was due. A batch also leaves before its window ends, when
it has reached the depth that is aimed at or no other request fits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from gpu import figure6
from gpu.model_shapes import write_model
from sglang_ext.policy.laps.options import LapsOptions
from sglang_ext.sglang_plugin.graphs.graph_options import Capture, GraphOptions

WINDOWS_MS = (0.0, 5.0, 15.0, 30.0)
ADAPTIVE = "adaptive"
RATES_PER_S = (60.0, 180.0, 360.0)
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 48, 0.9, 256
WARM_SECONDS = 2.0
# Every window takes a start of the server: fewer lengths than by default, so that captures do not use up the stage.
GRAPHS = GraphOptions(Capture.START, lengths_tokens=(32, 64, 128, 256))
# An option for the longest window must be above 0.
NO_WINDOW_MS = 0.01


class Load(NamedTuple):
    """How much is asked."""

    rates_per_s: tuple[float, ...]
    seconds: float
    divide_lengths_by: int


class Due(NamedTuple):
    """A request and when it should be sent, from the start of its load."""

    at_s: float
    prompt: list[int]


def windows() -> dict[str, LapsOptions]:
    """Options by the name of the window: its length in ms, or `adaptive`."""
    fixed = {
        f"{window_ms:g}": LapsOptions(w_min_ms=window_ms, w_max_ms=max(window_ms, NO_WINDOW_MS))
        for window_ms in WINDOWS_MS
    }
    return fixed | {ADAPTIVE: LapsOptions()}


def arrivals(rate_per_s: float, seconds: float, divide_lengths_by: int) -> list[Due]:
    """A Poisson stream of prompts, the same whenever it is asked for."""
    draw = random.Random(f"{rate_per_s} {seconds}")
    found, at_s = [], draw.expovariate(rate_per_s)
    while at_s < seconds:
        tokens = min(int(draw.lognormvariate(0.0, SIGMA) * MEDIAN_TOKENS), MOST_TOKENS)
        found.append(Due(at_s, [draw.randint(5, 4000) for _ in range(max(1, tokens // divide_lengths_by))]))
        at_s += draw.expovariate(rate_per_s)
    return found


async def level(server: Any, rate_per_s: float, load: Load) -> dict[str, Any]:
    """One rate for a while, and until all are answered: what they got."""
    times: list[float] = []
    failed = 0
    stream = arrivals(rate_per_s, load.seconds, load.divide_lengths_by)

    async def ask(session: aiohttp.ClientSession, due: Due) -> None:
        nonlocal failed
        try:
            async with session.post(f"{server.url}/generate", json=server.request(due.prompt)) as reply:
                await reply.read()
                failed += reply.status != 200
        except (aiohttp.ClientError, TimeoutError):
            failed += 1
        times.append(time.perf_counter() - started_s - due.at_s)

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for due in stream:
                await asyncio.sleep(max(0.0, started_s + due.at_s - time.perf_counter()))
                group.create_task(ask(session, due))
        ended_s = time.perf_counter()
    return {
        "rate_per_s": rate_per_s,
        "requests": len(times),
        "failed": failed,
        "requests_per_s": len(times) / (ended_s - started_s),
        "mean_s": statistics.fmean(times),
        "p90_s": sorted(times)[int(0.9 * (len(times) - 1))],
    }


def measure(model: Path, laps: LapsOptions, load: Load, has_gpu: bool) -> dict[str, Any]:
    """All rates with one window, and what the queues reported after each."""
    levels = []
    try:
        with figure6.serve(model, figure6.System(laps, GRAPHS), has_gpu) as server:
            for rate_per_s in load.rates_per_s:
                asyncio.run(level(server, rate_per_s, load._replace(seconds=min(WARM_SECONDS, load.seconds))))
                found = asyncio.run(level(server, rate_per_s, load))
                status = figure6.laps_status(server)
                levels.append({**found, "awd": status["awd"], "graphs": status.get("graphs")})
    except RuntimeError as error:
        return {"error": str(error)}
    return {"levels": levels}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each rate and window (default: 8)")
    parser.add_argument(
        "--within", type=float, default=420.0, help="seconds after which no other window is begun (default: 420)"
    )
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    import torch

    has_gpu = torch.cuda.is_available()
    load = Load((2.0, 5.0), 3.0, 8) if arguments.small else Load(RATES_PER_S, arguments.seconds, 1)
    given = windows()
    if arguments.small:
        given = {name: given[name] for name in ("0", "30", ADAPTIVE)}
    last_start_s = time.perf_counter() + arguments.within
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model("tiny" if arguments.small else arguments.model, Path(folder))
        # The adaptive one is what the others are there for: it must not be the one that time has run out for.
        for name in sorted(given, key=lambda name: name != ADAPTIVE):
            if time.perf_counter() < last_start_s:
                found[name] = measure(Path(folder), given[name], load, has_gpu)
            else:
                found[name] = {"not_measured": "the time of the stage was used up"}
    arguments.out.write_text(json.dumps({"windows": found}), encoding="utf-8")
    return 1 if all("levels" not in window for window in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
