"""LAPS's experiment: the share of prompts whose first token is later than 0.4 s, with a load-balanced router and ours.

Prompts of `lmsys_arena` (first turns of a chat service; the paper has LMsys-Chat-1M), drawn with replacement, Poisson
arrivals. Costs as of Qwen2.5-32B on an H100, computed, not measured: reading 65 GB of weights at 3.35 TB/s takes 19 ms,
2 x 32.8e9 floating-point operations per token at 45% of 989 TFLOPS take 0.147 ms. `router` is SGLang's chunked prefill
(FCFS, 8,192 tokens) behind the least loaded instance, `hrrn` the same with SGLang's order of that name, `ours` LAPS in
every instance behind the same router, with all prompts of this trace counted as short, and `ours_boundary_256` with the
usual boundary: long prompts run alone then, and each such iteration reads the weights once more. First with 8
instances, then with 1 (the figures that end in `_1`).
The load is the one at which the router violates 4.7%, bisected to 1%.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sglang_ext.policy.laps.cost_model import CostCoefficients
from sglang_ext.policy.laps.graph_grid import GraphGrid
from sglang_ext.policy.laps.options import LapsOptions
from sglang_ext.policy.laps.policy import Laps
from sglang_ext.policy.laps.round_plan import InstanceLimits
from sglang_ext.simulation.instances import InstancePool, InstancesSpec, LeastLoaded
from sglang_ext.simulation.iteration_policies import ChunkedPrefill, IterationPolicy, LapsPolicy, QueueOrder
from sglang_ext.simulation.run import RunOptions, simulate
from sglang_ext.simulation.workload import WorkloadError, drawn_requests, load_workload
from sglang_ext.types import Role
from support.papers_tetris import bisect_rate
from support.result import give_up, progress

SLO_S = 0.4
TARGET_SHARE = 0.047
BOUNDARY_TOKENS = 1024  # all prompts of this trace: the longest takes 0.17 s, so none needs to be kept apart
# 64 layers, 40 heads of 128: attention 4 * 64 * 5120 floating-point operations per pair of tokens, causal: halved.
COSTS = CostCoefficients(
    alpha_s=2 * 64 * 5120 / (0.3 * 989e12), token_s=2 * 32.8e9 / (0.45 * 989e12), read_s=1e-8, kappa_s=65e9 / 3.35e12
)
LIMITS = InstanceLimits(page_tokens=1, max_chunk_tokens=8192, max_batch_tokens=8192, max_requests=64)
POLICIES = ("router", "hrrn", "ours", "ours_boundary_256")
Lengths = tuple[tuple[int, int], ...]


class Figures(NamedTuple):
    """One run."""

    violations: float  # share of all requests
    p100_s: float


class _Task(NamedTuple):
    policy: str
    instances: int
    lengths: Lengths
    rate_per_s: float
    requests: int
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.set_defaults(experiment=run)


def read_lengths(data: Path) -> Lengths:
    """Prompts of the trace; output is not simulated."""
    try:
        workload = load_workload(data / "lmsys_arena" / "lmsys_arena_trace_1500.csv")
    except WorkloadError as error:
        give_up(f"--data: {error}")
    return tuple((request.prompt_tokens, 1) for request in workload.requests)


def simulated(task: _Task) -> Figures:
    """Violations and the largest TTFT of one run."""
    spec = InstancesSpec((Role.BOTH,) * task.instances, COSTS)

    def policy(role: Role) -> IterationPolicy:
        if task.policy.startswith("ours"):
            boundary_tokens = 256 if task.policy == "ours_boundary_256" else BOUNDARY_TOKENS
            options = LapsOptions(boundary_tokens=boundary_tokens, short_ttft_slo_ms=1e3 * SLO_S)
            return LapsPolicy(Laps(options, GraphGrid(), COSTS, LIMITS), SLO_S)
        order = QueueOrder.FCFS if task.policy == "router" else QueueOrder.HRRN
        return ChunkedPrefill(order, LIMITS.max_chunk_tokens)

    warm_up = task.requests // 10
    requests = list(drawn_requests(task.lengths, task.requests, task.rate_per_s, task.seed))
    outcome = simulate(
        requests,
        lambda loop, listener: InstancePool(loop, spec, LeastLoaded(), policy, listener, task.seed, False),
        RunOptions(warm_up_requests=warm_up),
    )
    ttfts_s = [one.ttft_s for one in outcome.served]
    return Figures(sum(ttft_s > SLO_S for ttft_s in ttfts_s) / len(ttfts_s), max(ttfts_s))


def run(args: argparse.Namespace) -> dict[str, object]:
    """The load, the shares at it and around it, for 8 instances and for 1."""
    lengths = read_lengths(args.data)
    result: dict[str, object] = {"requests": args.requests, "seeds": args.seeds, "slo_s": SLO_S}
    # Every prompt is shorter than a chunk.
    alone_s = [COSTS.chunk_s(prompt, 0) for prompt, _ in lengths]
    result["p100_without_queue_s"] = max(alone_s)
    result["violations_without_queue"] = sum(time_s > SLO_S for time_s in alone_s) / len(alone_s)
    with get_context("spawn").Pool(args.processes) as pool:
        for instances in (8, 1):
            figures = _curve(args, lengths, instances, lambda tasks: pool.map(simulated, tasks))
            result |= figures if instances == 8 else {f"{name}_1": value for name, value in figures.items()}
    return result


def _curve(
    args: argparse.Namespace, lengths: Lengths, instances: int, run_all: Callable[[list[_Task]], list[Figures]]
) -> dict[str, object]:
    def shares(policy: str, rate_per_s: float) -> float:
        tasks = [_Task(policy, instances, lengths, rate_per_s, args.requests, seed) for seed in args.seeds]
        return fmean(one.violations for one in run_all(tasks))

    capacity = instances / (COSTS.token_s * fmean(prompt for prompt, _ in lengths))
    load = bisect_rate(lambda rate: shares("router", rate) <= TARGET_SHARE, 0.3 * capacity, capacity, 0.01)
    at_load = {policy: shares(policy, load) for policy in POLICIES}
    curve = [
        {"rate_per_s": factor * load, **{policy: shares(policy, factor * load) for policy in POLICIES}}
        for factor in (0.8, 0.9, 0.95, 1.05, 1.1)
    ]
    progress(f"{instances} instances at {load:.1f}/s: " + ", ".join(f"{k} {v:.2%}" for k, v in at_load.items()))
    return {
        "rate_per_s": load,
        **{f"violations_{policy}": share for policy, share in at_load.items()},
        "curve": curve,
    }
