"""LAPS against SGLang's own orders over machines, loads and objectives: one simulated prefill instance in each cell.

    python bench/laps_grid.py [--full | --machines N] [--seeds N] [--requests N] [--data FOLDER] [--out FILE.json]

A cell is a fixed cost of an iteration (1 to 200 ms), a time per token (2 us to 4 ms), a cost of each further request (0
to 50 ms), a load (0.3 to 0.95 of what `fcfs` does at most), an objective for short prompts (a tenth to ten times the
best short P90 of the baselines) and a trace. Without `--full` a sample of the cells is drawn, the same in every run.

Baselines: `fcfs`, `hrrn` and `shortest-prefill-first`, each with the chunk, of 256 to 8,192 tokens, with which the
fewest prompts miss their objective (in whole percent; ties: the lower long P90). A short prompt's objective is the
cell's, a long one's five times what it takes alone if that is more. Ours has default options, the objective, and the
prior of a CPU instance: it has to learn what the machine's iterations cost. Each figure is over the best baseline's,
figure by figure. Capacity is a closed loop with sixteen requests in the system.

The best of three orders, figure by figure, is no system that one could run: where one order has the best short and
another the best long prompts, nothing reaches both. So two more numbers are reported: the cells in which ours keeps all
aims (`AIMS`), and the cells in which any single order with any single chunk does, chosen in hindsight.

Requests arrive Poisson; the first fifth warms up. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits
from sglang_ext.planner.simulation.events import EventLoop, ServedPrefill, SimRequest
from sglang_ext.planner.simulation.instances import LEAST_LOADED, InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, IterationPolicy, LapsPolicy, QueueOrder
from sglang_ext.planner.simulation.run import RunOptions, simulate
from sglang_ext.planner.simulation.workload import WorkloadError, drawn_requests, load_workload
from sglang_ext.types import Role
from support.mixed_load import percentile
from support.result import give_up, machine, print_result, progress, versions

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
FIXED_S = (0.001, 0.005, 0.02, 0.09, 0.2)
TOKEN_S = (2e-6, 2e-5, 2e-4, 1e-3, 4e-3)
REQUEST_S = (0.0, 0.005, 0.05)
LOADS = (0.3, 0.6, 0.8, 0.95)
OBJECTIVES = (0.1, 0.3, 1.0, 3.0, 10.0)
CHUNKS_TOKENS = (256, 512, 1024, 2048, 4096, 8192)
ATTENTION_TOKENS = 30_000  # a prompt of this length spends as much on attention as on the rest
LONG_STRETCH = 5.0
IN_SYSTEM = 16
PRIOR = CostCoefficients.from_throughput(tokens_per_s=400.0, fixed_s=0.02)  # `laps.sglang.instance`, on a CPU
LIMITS = InstanceLimits(page_tokens=1, max_chunk_tokens=8192, max_batch_tokens=8192, max_requests=64)
AIMS = {"short_p90": 1.10, "short_p99": 1.15, "long_p90": 1.15, "capacity": 0.97}  # over the best, in each cell


class Trace(NamedTuple):
    """Prompts by length."""

    tokens: tuple[int, ...]
    short_tokens: int  # most of a short prompt


class Cell(NamedTuple):
    """One machine under one load."""

    fixed_s: float
    token_s: float
    request_s: float
    load: float
    objective: float  # over what is possible
    trace: str

    @property
    def cost(self) -> CostCoefficients:
        """Return what its iterations cost."""
        read_s = 0.002 * self.token_s
        return CostCoefficients(self.token_s / ATTENTION_TOKENS, self.token_s, read_s, self.fixed_s, self.request_s)


class Figures(NamedTuple):
    """TTFT of one run, s, and the share of prompts that missed their objective."""

    short_p90_s: float
    short_p99_s: float
    long_p90_s: float
    long_p99_s: float
    p99_s: float
    missed: float


@lru_cache(maxsize=1)
def traces(data: Path) -> dict[str, Trace]:
    """Return chats (first turns), agents (long prompts of conversations), and one long prompt among nine chats."""
    try:
        chats = [tokens for tokens, _ in _lengths(data / "lmsys_arena" / "lmsys_arena_trace_1500.csv")]
        agents = [tokens for tokens, _ in _lengths(data / "mooncake" / "conversation_trace.jsonl")]
    except WorkloadError as error:
        give_up(f"--data: {error}")
    agents = [tokens for tokens in agents if tokens <= 32_768]
    longs = [tokens for tokens in agents if 1024 < tokens <= 8192]
    draws = Random("mixture")
    mixture = [draws.choice(longs) if draws.random() < 0.1 else draws.choice(chats) for _ in range(5000)]
    return {
        "chats": Trace(tuple(chats), 512),
        "agents": Trace(tuple(agents), 4096),
        "mixture": Trace(tuple(mixture), 1024),
    }


def _lengths(path: Path) -> Sequence[tuple[int, int]]:
    workload = load_workload(path)
    return [(request.prompt_tokens, 1) for request in workload.requests]


class _ClosedLoop:
    """Sends another prompt for every first token; counts those of the second half."""

    def __init__(self, loop: EventLoop, prompts: Iterator[int], count: int) -> None:
        self._loop = loop
        self._prompts = prompts
        self._left = count
        self._key = 0
        self.pool: InstancePool
        self.ends_s: list[float] = []

    def send(self, _: object = None) -> None:
        if self._left:
            self._left -= 1
            self._key += 1
            self.pool.arrive(SimRequest(self._key, self._loop.now_s, next(self._prompts), 1))

    def on_first_token(self, served: ServedPrefill) -> None:
        self.ends_s.append(served.first_token_s)
        self._loop.schedule(self._loop.now_s, self.send, None)

    def on_refused(self, request: SimRequest) -> None:
        raise AssertionError(request)


def capacity_per_s(cell: Cell, trace: Trace, policy: IterationPolicy, requests: int, seed: int) -> float:
    """Return the requests per second of a closed loop."""
    draws = Random(f"closed {seed}")
    loop = EventLoop()
    closed = _ClosedLoop(loop, iter(lambda: draws.choice(trace.tokens), None), requests)
    spec = InstancesSpec((Role.BOTH,), cell.cost)
    closed.pool = InstancePool(loop, spec, router_policy(LEAST_LOADED), lambda role: policy, closed, seed, False)
    for _ in range(IN_SYSTEM):
        loop.schedule(0.0, closed.send, None)
    loop.run()
    first, last = len(closed.ends_s) // 4, len(closed.ends_s) - IN_SYSTEM
    return (last - first) / (closed.ends_s[last] - closed.ends_s[first])


def served(
    cell: Cell, trace: Trace, policy: IterationPolicy, rate_per_s: float, requests: int, seed: int
) -> list[tuple[int, float]]:
    """Return the tokens and the TTFT of each prompt."""
    spec = InstancesSpec((Role.BOTH,), cell.cost)
    lengths = [(tokens, 1) for tokens in trace.tokens]
    outcome = simulate(
        list(drawn_requests(lengths, requests, rate_per_s, seed)),
        lambda loop, listener: InstancePool(
            loop, spec, router_policy(LEAST_LOADED), lambda role: policy, listener, seed, False
        ),
        RunOptions(warm_up_requests=requests // 5),
    )
    return [(prefill.request.prompt_tokens, prefill.ttft_s) for prefill in outcome.served]


def figures(prefills: Sequence[tuple[int, float]], cell: Cell, trace: Trace, objective_s: float) -> Figures:
    """Return a run's figures under an objective of short prompts."""
    cost = cell.cost
    shorts = [ttft_s for tokens, ttft_s in prefills if tokens <= trace.short_tokens]
    longs = [ttft_s for tokens, ttft_s in prefills if tokens > trace.short_tokens]
    missed = sum(
        ttft_s
        > (objective_s if tokens <= trace.short_tokens else max(objective_s, LONG_STRETCH * cost.chunk_s(tokens, 0)))
        for tokens, ttft_s in prefills
    )
    return Figures(
        percentile(shorts, 0.9),
        percentile(shorts, 0.99),
        percentile(longs, 0.9),
        percentile(longs, 0.99),
        percentile([ttft_s for _, ttft_s in prefills], 0.99),
        round(missed / len(prefills), 2),
    )


def keeps_aims(run: Figures, capacity: float, best: Sequence[Figures], best_capacity: float) -> bool:
    """Return whether a run keeps all of `AIMS` over the best of these, figure by figure."""
    return (
        run.short_p90_s <= AIMS["short_p90"] * min(one.short_p90_s for one in best)
        and run.short_p99_s <= AIMS["short_p99"] * min(one.short_p99_s for one in best)
        and run.long_p90_s <= AIMS["long_p90"] * min(one.long_p90_s for one in best)
        and capacity >= AIMS["capacity"] * best_capacity
    )


def laps(objective_s: float) -> LapsPolicy:
    """Return ours, with defaults and this objective."""
    return LapsPolicy(Laps(LapsOptions(short_ttft_slo_ms=1e3 * objective_s), GraphGrid(), PRIOR, LIMITS))


class _Task(NamedTuple):
    machine: Cell  # of any objective
    objectives: tuple[float, ...]
    data: Path
    requests: int
    seeds: int


def compare(task: _Task) -> list[dict[str, object]]:
    """Return the ratios of all objectives of one machine under one load."""
    cell, seeds = task.machine, range(task.seeds)
    trace = traces(task.data)[cell.trace]
    loops = {
        (order, chunk): capacity_per_s(cell, trace, ChunkedPrefill(order, chunk), task.requests, 0)
        for order, chunk in product(QueueOrder, CHUNKS_TOKENS)
    }
    rate_per_s = cell.load * max(loops[QueueOrder.FCFS, chunk] for chunk in CHUNKS_TOKENS)
    runs = {
        setting: [
            prefill
            for seed in seeds
            for prefill in served(cell, trace, ChunkedPrefill(*setting), rate_per_s, task.requests, seed)
        ]
        for setting in loops
    }
    possible_s = min(figures(run, cell, trace, 1.0).short_p90_s for run in runs.values())
    rows: list[dict[str, object]] = []
    for objective in task.objectives:
        objective_s = objective * possible_s
        best: list[Figures] = []
        capacities = []
        chunks = {}
        stock = {setting: figures(run, cell, trace, objective_s) for setting, run in runs.items()}
        for order in QueueOrder:
            of_chunks = {chunk: stock[order, chunk] for chunk in CHUNKS_TOKENS}
            chunk = min(of_chunks, key=lambda size: (of_chunks[size].missed, of_chunks[size].long_p90_s))
            best.append(of_chunks[chunk])
            capacities.append(loops[order, chunk])
            chunks[order.value] = chunk
        ours = figures(
            [
                prefill
                for seed in seeds
                for prefill in served(cell, trace, laps(objective_s), rate_per_s, task.requests, seed)
            ],
            cell,
            trace,
            objective_s,
        )
        capacity = capacity_per_s(cell, trace, laps(objective_s), task.requests, 0)
        rows.append(
            {
                **cell._replace(objective=objective)._asdict(),
                "objective_s": objective_s,
                "chunks_tokens": chunks,
                "short_p90_over_best": ours.short_p90_s / min(one.short_p90_s for one in best),
                "short_p99_over_best": ours.short_p99_s / min(one.short_p99_s for one in best),
                "long_p90_over_best": ours.long_p90_s / min(one.long_p90_s for one in best),
                "long_p99_over_best": ours.long_p99_s / min(one.long_p99_s for one in best),
                "p99_over_best": ours.p99_s / min(one.p99_s for one in best),
                "capacity_over_best": capacity / max(capacities),
                "missed": ours.missed,
                "missed_best": min(one.missed for one in best),
                "keeps_aims": keeps_aims(ours, capacity, best, max(capacities)),
                "stock_keeps_aims": any(
                    keeps_aims(run, loops[setting], best, max(capacities)) for setting, run in stock.items()
                ),
            }
        )
    return rows


RATIOS = (
    "short_p90_over_best",
    "short_p99_over_best",
    "long_p90_over_best",
    "long_p99_over_best",
    "p99_over_best",
    "capacity_over_best",
)


def summary(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Return the worst cell and the geometric mean of each ratio."""
    result: dict[str, dict[str, float]] = {}
    for name in RATIOS:
        values = [float(row[name]) for row in rows]  # type: ignore[arg-type]
        worst = min(values) if name == "capacity_over_best" else max(values)
        mean = math.exp(sum(map(math.log, values)) / len(values))
        result[name] = {"worst": round(worst, 3), "mean": round(mean, 3)}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="LAPS against SGLang's orders over machines, loads and objectives.")
    parser.add_argument("--full", action="store_true", help="all machines")
    parser.add_argument("--machines", type=int, default=60, help="machines under one load that are drawn")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=600, help="in each run")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the workload data")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result into this file too")
    args = parser.parse_args()
    if not args.data.is_dir():
        give_up(f"--data: {args.data} is not there")
    started, began_s = datetime.now(UTC), time.monotonic()
    machines = [
        Cell(fixed_s, token_s, request_s, load, 0.0, trace)
        for fixed_s, token_s, request_s, load, trace in product(FIXED_S, TOKEN_S, REQUEST_S, LOADS, traces(args.data))
    ]
    if not args.full:
        machines = Random("cells").sample(machines, min(args.machines, len(machines)))
    tasks = [_Task(cell, OBJECTIVES, args.data, args.requests, args.seeds) for cell in machines]
    rows: list[dict[str, object]] = []
    with get_context("fork").Pool(args.processes) as pool:
        for number, of_machine in enumerate(pool.imap(compare, tasks), 1):
            rows += of_machine
            for row in of_machine:
                progress(
                    f"{number}/{len(tasks)} {row['trace']:8} fixed {1e3 * float(row['fixed_s']):g} ms, "  # type: ignore[arg-type]
                    f"token {1e6 * float(row['token_s']):g} us, request {1e3 * float(row['request_s']):g} ms, "  # type: ignore[arg-type]
                    f"load {row['load']}, objective {row['objective']}: "
                    + " ".join(f"{float(row[name]):.2f}" for name in RATIOS)  # type: ignore[arg-type]
                )
    result: dict[str, object] = {
        "bench": "laps_grid",
        "command": f"python bench/laps_grid.py {shlex.join(sys.argv[1:])}",
        "started": started.isoformat(timespec="seconds"),
        "cells": len(rows),
        "cells_that_keep_aims": sum(bool(row["keeps_aims"]) for row in rows),
        "cells_that_keep_aims_by_one_stock_setting": sum(bool(row["stock_keeps_aims"]) for row in rows),
        **summary(rows),
        "seconds": round(time.monotonic() - began_s, 1),
        "versions": versions("sglang-ext"),
        "machine": machine(),
    }
    if args.out:
        args.out.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
