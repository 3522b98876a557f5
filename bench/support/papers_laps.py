"""LAPS's experiment: the share of prompts whose first token is later than 0.4 s, with a load-balanced router and ours.

Prompts of `lmsys_arena` (first turns of a chat service; the paper has LMsys-Chat-1M), drawn with replacement, Poisson
arrivals. Costs as of Qwen2.5-32B on an H100, computed, not measured: reading 65 GB of weights at 3.35 TB/s takes 19 ms,
2 x 32.8e9 floating-point operations per token at 45% of 989 TFLOPS take 0.147 ms.

| system | instances | router |
|---|---|---|
| `router` | SGLang's chunked prefill (FCFS, 8,192 tokens) | the least loaded one |
| `round_robin` | the same | each in turn |
| `hrrn` | the same in SGLang's order of that name | the least loaded one |
| `ours` | LAPS with its defaults: the boundary is fitted, here to 1,024 tokens | the least loaded one |
| `ours_boundary_256` | LAPS with a boundary that 18% of the prompts exceed | the least loaded one |
| `ours_predicted_wait` | as `ours` | `predicted_wait`, the router's own |

First with 8 instances at the load where `router` violates 4.7% (bisected to 1%, so it is a little less); then at the
load where `round_robin` does (`_round_robin`), then with 1 instance (`_1`). Last the prompts of Azure's conversations
(`_azure`), half of which are longer than 1,024 tokens (up to 14,050): there LAPS keeps both classes apart. A prompt of
up to 1,024 tokens should have its first token within 0.4 s, a longer one within five
times what it takes by itself; `router` is the better one of chunks of 2,048 and 8,192 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits
from sglang_ext.planner.simulation.instances import LEAST_LOADED, InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, IterationPolicy, LapsPolicy, QueueOrder
from sglang_ext.planner.simulation.run import RunOptions, simulate
from sglang_ext.planner.simulation.workload import WorkloadError, drawn_requests, load_workload
from sglang_ext.types import Role
from support.papers_tetris import bisect_rate
from support.result import give_up, progress

SLO_S = 0.4
LONG_STRETCH = 5.0  # a prompt above the boundary should have its first token within this many times its own time
TARGET_SHARE = 0.047
BOUNDARY_TOKENS = 1024  # no prompt of LMsys is longer: the longest takes 0.17 s
# 64 layers, 40 heads of 128: attention 4 * 64 * 5120 floating-point operations per pair of tokens, causal: halved.
COSTS = CostCoefficients(
    alpha_s=2 * 64 * 5120 / (0.3 * 989e12), token_s=2 * 32.8e9 / (0.45 * 989e12), read_s=1e-8, kappa_s=65e9 / 3.35e12
)
LIMITS = InstanceLimits(page_tokens=1, max_chunk_tokens=8192, max_batch_tokens=8192, max_requests=64)
FACTORS = (0.8, 0.9, 0.95, 1.05, 1.1)  # of the load, for the curve
Lengths = tuple[tuple[int, int], ...]


class System(NamedTuple):
    """A policy in every instance behind a router."""

    order: QueueOrder | None = None  # of SGLang's chunked prefill; None: LAPS
    boundary_tokens: int | None = None  # of LAPS; None: fitted
    router: str = LEAST_LOADED
    chunk_tokens: int = LIMITS.max_chunk_tokens


ROUTER = "router"
ROUND_ROBIN = "round_robin"
SYSTEMS = {
    ROUTER: System(QueueOrder.FCFS),
    ROUND_ROBIN: System(QueueOrder.FCFS, router="round_robin"),
    "hrrn": System(QueueOrder.HRRN),
    "ours": System(),
    "ours_boundary_256": System(boundary_tokens=256),
    "ours_predicted_wait": System(router="predicted_wait"),
}
ALONE = {name: system for name, system in SYSTEMS.items() if system.router == LEAST_LOADED}  # one instance
MIXED = {name: system for name, system in SYSTEMS.items() if name != "ours_boundary_256"}
SMALL_CHUNKS = System(QueueOrder.FCFS, chunk_tokens=2048)


class Figures(NamedTuple):
    """One run."""

    violations: float  # share of all requests
    violations_short: float  # of those of up to BOUNDARY_TOKENS
    p100_s: float


class _Task(NamedTuple):
    system: System
    instances: int
    lengths: Lengths
    rate_per_s: float
    requests: int
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.set_defaults(experiment=run)


def read_lengths(trace: Path) -> Lengths:
    """Prompts of a trace; output is not simulated."""
    try:
        workload = load_workload(trace)
    except WorkloadError as error:
        give_up(f"--data: {error}")
    return tuple((request.prompt_tokens, 1) for request in workload.requests)


def objective_s(prompt_tokens: int) -> float:
    """Within which a prompt should have its first token."""
    return SLO_S if prompt_tokens <= BOUNDARY_TOKENS else max(SLO_S, LONG_STRETCH * COSTS.chunk_s(prompt_tokens, 0))


def simulated(task: _Task) -> Figures:
    """Violations and the largest TTFT of one run."""
    system = task.system
    spec = InstancesSpec((Role.BOTH,) * task.instances, COSTS)

    def policy(role: Role) -> IterationPolicy:
        if system.order is not None:
            return ChunkedPrefill(system.order, system.chunk_tokens)
        options = LapsOptions(boundary_tokens=system.boundary_tokens, short_ttft_slo_ms=1e3 * SLO_S)
        is_lmsys = max(task.lengths)[0] <= BOUNDARY_TOKENS  # where each prompt has the same objective
        return LapsPolicy(Laps(options, GraphGrid(), COSTS, LIMITS), SLO_S if is_lmsys else None)

    requests = list(drawn_requests(task.lengths, task.requests, task.rate_per_s, task.seed))
    outcome = simulate(
        requests,
        lambda loop, listener: InstancePool(
            loop, spec, router_policy(system.router), policy, listener, task.seed, False
        ),
        RunOptions(warm_up_requests=task.requests // 10),
    )
    is_late = [
        (prefill.request.prompt_tokens, prefill.ttft_s > objective_s(prefill.request.prompt_tokens))
        for prefill in outcome.served
    ]
    return Figures(
        fmean(late for _, late in is_late),
        fmean(late for tokens, late in is_late if tokens <= BOUNDARY_TOKENS),
        max(prefill.ttft_s for prefill in outcome.served),
    )


def run(args: argparse.Namespace) -> dict[str, object]:
    """The loads, the shares at them and around the first."""
    lmsys = read_lengths(args.data / "lmsys_arena" / "lmsys_arena_trace_1500.csv")
    azure = read_lengths(args.data / "azure2023" / "AzureLLMInferenceTrace_conv.csv")
    result: dict[str, object] = {"requests": args.requests, "seeds": args.seeds, "slo_s": SLO_S}
    # Every prompt is shorter than a chunk.
    alone_s = [COSTS.chunk_s(prompt, 0) for prompt, _ in lmsys]
    result["p100_without_queue_s"] = max(alone_s)
    result["violations_without_queue"] = sum(time_s > SLO_S for time_s in alone_s) / len(alone_s)
    with get_context("spawn").Pool(args.processes) as pool:

        def run_all(tasks: list[_Task]) -> list[Figures]:
            return pool.map(simulated, tasks, chunksize=1)

        experiment = _Experiment(args, run_all)
        load = experiment.load(SYSTEMS[ROUTER], lmsys, 8)
        result |= experiment.at(load, SYSTEMS, lmsys, 8, "")
        result["curve"] = experiment.curve(load, SYSTEMS, lmsys, 8)
        load = experiment.load(SYSTEMS[ROUND_ROBIN], lmsys, 8)
        result |= experiment.at(load, SYSTEMS, lmsys, 8, "_round_robin")
        load = experiment.load(SYSTEMS[ROUTER], lmsys, 1)
        result |= experiment.at(load, ALONE, lmsys, 1, "_1")
        result["curve_1"] = experiment.curve(load, ALONE, lmsys, 1)
        load, chunks = max((experiment.load(system, azure, 8), system) for system in (SMALL_CHUNKS, SYSTEMS[ROUTER]))
        result["router_chunk_tokens_azure"] = chunks.chunk_tokens
        result |= experiment.at(load, {**MIXED, ROUTER: chunks}, azure, 8, "_azure")
    return result


class _Experiment:
    """Runs of some systems, and what they have in common."""

    def __init__(self, args: argparse.Namespace, run_all: Callable[[list[_Task]], list[Figures]]) -> None:
        self._requests: int = args.requests
        self._seeds: Sequence[int] = args.seeds
        self._run_all = run_all

    def load(self, system: System, lengths: Lengths, instances: int) -> float:
        """The highest load, to 1%, at which this system violates at most TARGET_SHARE."""
        capacity = instances / (COSTS.token_s * fmean(prompt for prompt, _ in lengths))
        return bisect_rate(
            lambda rate: self._figures(system, lengths, instances, rate).violations <= TARGET_SHARE,
            0.3 * capacity,
            capacity,
            0.01,
        )

    def at(
        self, load: float, systems: dict[str, System], lengths: Lengths, instances: int, suffix: str
    ) -> dict[str, object]:
        """Return what each of them violates at this load."""
        figures = {name: self._figures(system, lengths, instances, load) for name, system in systems.items()}
        progress(
            f"{suffix or '8 instances'} at {load:.1f}/s: "
            + ", ".join(f"{name} {one.violations:.2%} ({one.p100_s:.1f} s)" for name, one in figures.items())
        )
        result: dict[str, object] = {f"rate_per_s{suffix}": load}
        for name, one in figures.items():
            result[f"violations_{name}{suffix}"] = one.violations
            result[f"p100_s_{name}{suffix}"] = one.p100_s
            if one.violations_short != one.violations:
                result[f"violations_short_{name}{suffix}"] = one.violations_short
        return result

    def curve(
        self, load: float, systems: dict[str, System], lengths: Lengths, instances: int
    ) -> list[dict[str, float]]:
        """Return what they violate at shares of this load."""
        return [
            {
                "rate_per_s": factor * load,
                **{
                    name: self._figures(system, lengths, instances, factor * load).violations
                    for name, system in systems.items()
                },
            }
            for factor in FACTORS
        ]

    def _figures(self, system: System, lengths: Lengths, instances: int, rate_per_s: float) -> Figures:
        """Means over the seeds, and the largest TTFT of all."""
        runs = self._run_all(
            [_Task(system, instances, lengths, rate_per_s, self._requests, seed) for seed in self._seeds]
        )
        return Figures(
            fmean(one.violations for one in runs),
            fmean(one.violations_short for one in runs),
            max(one.p100_s for one in runs),
        )
