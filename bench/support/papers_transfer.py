"""Tetris's traces up to decode: from the arrival of a prompt to the moment in which a decode instance has its KV.

16 prefill instances as in Tetris's experiment, and two decode instances (LLaMA3-8B, 128 KiB of KV a token, 25 GB/s a
transfer, four transfers at a time into one, 12 ms a step and 0.2 ms for each request in it). Prefill instances hold
400,000 tokens each (80 GB less the weights), and the KV of a prompt until decode has it. `plenty`: KV for 4,000,000
tokens each. `scarce`: for 250,000, so that prompts wait for requests to end (decode's back-pressure). 0.6 of the rate
at which all prefill instances would compute all the time, seeds 0 and 200, 10,000 arrivals, the first 10% dropped. The
whole KV is sent after the last chunk, whatever the system: what streaming by layer hides is not simulated.
"""

from __future__ import annotations

import argparse
from multiprocessing import get_context
from typing import NamedTuple

from baselines.systems import build_cluster
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec
from sglang_ext.planner.simulation.decode import DecodeSpec
from sglang_ext.planner.simulation.engines import load_engine
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener
from sglang_ext.planner.simulation.run import RecordedStage, RunOptions, simulate
from sglang_ext.planner.simulation.workload import WorkloadError
from sglang_ext_router.decide.instance_pressure import quantile
from support.papers_tetris import INSTANCES, Trace, arrivals, judged_by, load_trace, systems
from support.result import give_up, progress

TRACES = ("short", "medium", "long")
OURS = "pool"
BASELINES = ("fixed-sp2", "fixed-sp4", "fixed-sp8", "loongserve-idle", "tetris")
LOAD = 0.6
REQUESTS = 10_000
PREFILL_KV_TOKENS = 400_000
SEEDS = (0, 200)
DECODE = {"plenty": DecodeSpec(2, kv_tokens=4_000_000), "scarce": DecodeSpec(2, kv_tokens=250_000)}


class _Task(NamedTuple):
    trace: Trace
    system: str
    decode: str


class Delivered(NamedTuple):
    """Times in s over all seeds: to the first token on prefill, and until decode has the KV."""

    ttft_p50_s: float
    ttft_p99_s: float
    delivered_p50_s: float
    delivered_p99_s: float
    unfinished: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.set_defaults(experiment=run)


def measure(task: _Task) -> Delivered:
    """One system on one trace with one kind of decode."""
    engine = load_engine("table1")
    options = systems(engine)[task.system]
    assert options is not None
    options = judged_by(options, task.trace)

    def build(loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        return build_cluster(
            options, loop, ClusterSpec(INSTANCES, kv_tokens=PREFILL_KV_TOKENS), engine.candidates, listener
        )

    ttfts_s: list[float] = []
    delivered_s: list[float] = []
    unfinished = 0
    for seed in SEEDS:
        requests = arrivals(task.trace, LOAD * task.trace.bound_per_s, REQUESTS, seed)
        around = RunOptions(seed=seed, warm_up_requests=REQUESTS // 10, decode=DECODE[task.decode])
        outcome = simulate(requests, build, around)
        assert not outcome.refused
        assert not outcome.decode_refused
        ttfts_s += [prefill.ttft_s for prefill in outcome.served]
        delivered_s += [
            finished_request.transferred_s - finished_request.request.arrival_s for finished_request in outcome.finished
        ]
        unfinished += len(outcome.served) - len(outcome.finished)
    ttfts_s.sort()
    delivered_s.sort()
    return Delivered(
        quantile(ttfts_s, 0.5),
        quantile(ttfts_s, 0.99),
        quantile(delivered_s, 0.5),
        quantile(delivered_s, 0.99),
        unfinished,
    )


def run(args: argparse.Namespace) -> dict[str, object]:
    """Every system on every trace with both kinds of decode; prints a line for each."""
    engine = load_engine("table1")
    try:
        traces = {name: load_trace(args.data / "tetris_like", name, engine) for name in args.traces}
    except WorkloadError as error:
        give_up(f"--data: {error}")
    tasks = [
        _Task(trace, system, decode) for decode in DECODE for trace in traces.values() for system in (OURS, *BASELINES)
    ]
    found: dict[tuple[str, str], dict[str, Delivered]] = {}
    with get_context("spawn").Pool(args.processes) as pool:
        for task, one in zip(tasks, pool.imap(measure, tasks), strict=True):
            found.setdefault((task.trace.name, task.decode), {})[task.system] = one
            progress(
                f"{task.trace.name:7} decode {task.decode} {task.system:16} first token P50 {one.ttft_p50_s:.2f} s, "
                f"P99 {one.ttft_p99_s:.2f} s; at decode P50 {one.delivered_p50_s:.2f} s, "
                f"P99 {one.delivered_p99_s:.2f} s"
            )
    result: dict[str, object] = {"load": LOAD, "requests": REQUESTS, "seeds": list(SEEDS)}
    for (trace, decode), by_system in found.items():
        ours = by_system[OURS]
        result[f"{trace}_{decode}"] = {
            "p50_over_lowest_baseline": ours.delivered_p50_s
            / min(by_system[name].delivered_p50_s for name in BASELINES),
            "p99_over_lowest_baseline": ours.delivered_p99_s
            / min(by_system[name].delivered_p99_s for name in BASELINES),
            "systems": {name: one._asdict() for name, one in by_system.items()},
        }
    return result
