"""LAPS, figure 5: latency and throughput of short prompts by the waiting window, fixed ones and the adaptive one.

    python -m gpu.figure5 --window NAME --out FILE [--model NAME] [--small]

The instance is that of `gpu.figure6` with both queues and graphs, started again for every window. The load is open: new
prompts of up to 256 tokens are due at moments that are drawn beforehand, the same for every window, whatever has been
answered; a request's time runs from the moment at which it was due. A batch also leaves before its window ends, when
it has reached the depth that is aimed at or no other request fits. One window a process, the highest rate first; what
there is, is written after each rate.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from gpu import figure6
from gpu.model_shapes import write_model
from gpu.stage_plan import RATES_PER_S
from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions
from sglang_ext.laps.decide.options import LapsOptions
from support.result import write_json

WINDOWS_MS = (0.0, 5.0, 15.0, 30.0)
ADAPTIVE = "adaptive"
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 48, 0.9, 256
WARM_SECONDS = 2.0
# Every window takes a start of the server: fewer lengths than by default, so that captures do not use up the stage.
GRAPHS = GraphOptions(Capture.START, lengths_tokens=(32, 64, 128, 256))
# An option for the longest window must be above 0.
NO_WINDOW_MS = 0.01


class Load(NamedTuple):
    """Describes how much is asked."""

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


def measure(
    model: Path,
    system: figure6.System,
    load: Load,
    has_gpu: bool,
    log: Path,
    record: Callable[[dict[str, Any]], None],
    end_s: float,
) -> None:
    """All rates with one window, and what the queues reported after each; `record` gets what there is."""
    levels: list[dict[str, Any]] = []
    try:
        timeout_s = min(figure6.START_TIMEOUT_S, end_s - time.perf_counter())
        with figure6.serve(model, system, has_gpu, log, timeout_s) as server:
            for rate_per_s in load.rates_per_s:
                if time.perf_counter() + load.seconds + WARM_SECONDS > end_s:
                    record({"not_measured": f"from {rate_per_s:g}/s on: the time was used up"})
                    break
                asyncio.run(level(server, rate_per_s, load._replace(seconds=min(WARM_SECONDS, load.seconds))))
                found = figure6.with_decisions(server, system, level(server, rate_per_s, load))
                status = figure6.laps_status(server)
                levels.append({**found, "awd": status["awd"], "graphs": status.get("graphs")})
                record({"levels": levels})
    except RuntimeError as error:
        record({"error": str(error)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--window", choices=windows(), required=True, help="its length in ms, or adaptive")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each rate (default: 8)")
    parser.add_argument("--within", type=float, default=500.0, help="no rate is begun later (s; default: 500)")
    parser.add_argument("--attention", default=None, help="SGLang's backend (default: its own choice, or triton)")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    end_s = time.perf_counter() + arguments.within
    import torch

    has_gpu = torch.cuda.is_available()
    load = Load((5.0, 2.0), 3.0, 8) if arguments.small else Load(RATES_PER_S, arguments.seconds, 1)
    found: dict[str, Any] = {}

    def record(more: dict[str, Any]) -> None:
        found.update(more)
        write_json(arguments.out, found)

    record({})
    with tempfile.TemporaryDirectory() as folder:
        write_model(arguments.model, Path(folder))
        log = arguments.out.with_suffix(".log")
        system = figure6.System(windows()[arguments.window], GRAPHS, arguments.attention)
        measure(Path(folder), system, load, has_gpu, log, record, end_s)
    return 0 if "levels" in found else 1


if __name__ == "__main__":
    sys.exit(main())
