"""Describes how long the simulator takes, and how much memory: a real trace on 32 instances, a million requests on a
thousand.

    python bench/simulator_scale.py

Each run is a process of its own, one after the other; seconds are of the whole run after the imports (reading the
trace or drawing the requests, simulating, summarising), memory is the process's peak.

- `mooncake`: the conversation trace of Mooncake (12,031 requests) on 16 prefill and 16 decode instances, CDSP;
  `mooncake_pool`: by the coordinator that serves.
- `million`: 1,000,000 Poisson arrivals of that trace's lengths on 1,000 prefill instances, nodes of 8, SP sizes up to
  512, at 0.7 of the load that keeps all of them computing; CDSP without re-planning. `million_decode`: with 1,000
  decode instances behind them.
- `thousand_pool`: 20,000 of those arrivals on the same prefill instances, by the coordinator that serves.

Costs are the Table 1 fit (`sglang-ext simulate --engine table1`). The last line is `RESULT {json}`.
"""

from __future__ import annotations

import resource
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from baselines.systems import ClusterSystem, SystemOptions, build_cluster
from sglang_ext.long_pool.decide.pool_schedule import min_work_s
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec
from sglang_ext.planner.simulation.decode import DecodeSpec
from sglang_ext.planner.simulation.engines import load_engine
from sglang_ext.planner.simulation.report import make_report
from sglang_ext.planner.simulation.run import RunOptions, simulate
from sglang_ext.planner.simulation.workload import WorkloadError, drawn_requests, load_workload
from support.result import BenchmarkRun, give_up, progress

TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl"
LOAD = 0.7
IMPROVEMENT_RATE = 0.5


class Run(NamedTuple):
    """One simulation."""

    name: str
    system: ClusterSystem
    prefill: int
    decode: int
    drawn_requests: int | None  # None: the trace as it is


class Figures(NamedTuple):
    """Describes what it took, and enough of what came out to see that it is the same simulation."""

    seconds: float
    processor_seconds: float  # of them; the rest went to other work on the machine
    peak_mib: float
    requests: int
    events: int
    mean_ttft_s: float


RUNS = (
    Run("mooncake", ClusterSystem.TETRIS, 16, 16, None),
    Run("mooncake_pool", ClusterSystem.POOL, 16, 16, None),
    Run("million", ClusterSystem.TETRIS, 1000, 0, 1_000_000),
    Run("million_decode", ClusterSystem.TETRIS, 1000, 1000, 1_000_000),
    Run("thousand_pool", ClusterSystem.POOL, 1000, 0, 20_000),
)


def carry_out(run: Run) -> Figures:
    """Simulate in this process."""
    started_s, processor_started_s = time.perf_counter(), time.process_time()
    engine = load_engine("table1", largest_size=1 << (run.prefill.bit_length() - 1))
    workload = load_workload(TRACE)
    requests = list(workload.requests)
    if run.drawn_requests is not None:
        lengths = workload.drawn_lengths()
        rate_per_s = LOAD * run.prefill / fmean(min_work_s(engine.candidates, 0, prompt) for prompt, _ in lengths)
        requests = list(drawn_requests(lengths, run.drawn_requests, rate_per_s, seed=0))
    options = SystemOptions(run.system, improvement_rate=IMPROVEMENT_RATE)
    outcome = simulate(
        requests,
        lambda loop, listener: build_cluster(options, loop, ClusterSpec(run.prefill), engine.candidates, listener),
        RunOptions(decode=DecodeSpec(run.decode) if run.decode else None),
    )
    report = make_report(outcome, None, 1.0, 512)
    seconds = time.perf_counter() - started_s
    processor_seconds = time.process_time() - processor_started_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    overall = report.classes[0]
    return Figures(seconds, processor_seconds, peak_mib, overall.requests, report.events, overall.mean_s or 0.0)


def main() -> int:
    try:
        load = fmean(request.prompt_tokens for request in load_workload(TRACE).requests)
    except WorkloadError as error:
        give_up(f"the trace is needed: {error}")
    progress(f"{TRACE.name}: {load:.0f} prompt tokens on average")
    benchmark = BenchmarkRun("sglang-ext")
    result: dict[str, object] = {"bench": "simulator_scale"}
    for run in RUNS:
        with get_context("spawn").Pool(1) as pool:
            figures = pool.apply(carry_out, (run,))
        progress(
            f"{run.name:16} {figures.seconds:8.1f} s ({figures.processor_seconds:.1f} s of a core), "
            f"{figures.peak_mib:6.0f} MiB: {figures.requests} requests, {figures.events} events, "
            f"mean TTFT {figures.mean_ttft_s:.3f} s"
        )
        result |= {f"{run.name}_{name}": round(value, 3) for name, value in figures._asdict().items()}
    benchmark.end(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
