"""Medha's experiment: chat prompts and 5% of 128K to 1M tokens on 16 A100, against systems that do not preempt.

Prompts of the ShareGPT lengths (at most 8K tokens, as in the paper), one in twenty replaced by a long one, log-uniform
from 131,072 to 1,048,576 tokens (median 371K, P90 852K; the paper's MEDHA-SWE, which is not published, has 393K and
839K). Poisson arrivals for 60 minutes, 5 seeds; what has no first token then counts with its age, so a figure of an
overloaded system is a lower bound. 16 instances of LLaMA3-8B on 2 nodes, Table 1 fit of Tetris, continued beyond its
256K; 400,000 KV tokens an instance (80 GB less the weights).

Baselines, non-preemptive: `loongserve` (greedy ESP behind the queues of instances) and `loongserve-idle` (on idle
instances). Each gain is against the better of the two in that very figure. `ours` is the coordinator that serves, on
15 instances, and keeps one for prompts of at most 8,192 tokens (LAPS, short mode). That partition is given to the
baselines too, `loongserve-split` and `loongserve-idle-split`, so that what the pool adds to it is seen: `…_over_split`.

The paper's own mechanisms, on all 16 instances together: `lars` decides at every arrival and at the end of every chunk,
in order of relative slack, chunks of at most 1 s or ten times the fixed cost of its group (adaptive chunking),
and with an SP size of 15 in place of 16, so that no long prompt takes all instances (space sharing). `fcfs`, `edf`,
`srpt` and `on-time` differ from it only by the order (the paper's Figure 13), `lars-16` only by the SP sizes,
`lars-whole` has no chunk limit. `pool` is `ours` without the partition, `ours-lars` is `ours` in order of relative
slack: what the partition and what the order give, each by itself. A deadline is 0.5 s, or five times the prompt's own
time if that is more. Above 0.75/s only the baselines, `lars` and `ours` are run. SP 15 is interpolated between 8 and
16.

Stream pipeline parallelism, whose instances mix short and long prefills in one batch: `spp-medha` is one pipeline of
16 stages for all prompts with Medha's own composition (`baselines/laps_compositions.py`), `spp` the same with ours
(packed), `spp-2x8` two of 8 stages, `ours-spp` keeps one instance for chat prompts, as `ours`, and makes one pipeline
of the other 15, `ours-spp-3x5` three. A stage takes its layers' share of one instance's time by the same fit (32
layers: three on the last two of 15 stages and two on the others, so that it computes at most 71% of the time); a hop
takes 2 ms and 16,384 bytes a token over 25 GB/s; a stage holds the KV of its layers, so that a pipeline holds as many
tokens as all its instances. The time budget of a round is LAPS's for this many stages and an objective of 0.5 s.

What does not apply: KV-parallel decode (decode is not simulated, so there are no TPOT figures), and mixing a short and
a long prefill in one batch of a group, which computes one request at a time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from baselines.laps_compositions import MAX_SHARE, MEDHA
from baselines.prefill_orders import edf, fcfs, lars, srpt
from baselines.systems import ClusterSystem, SystemOptions, build_cluster
from sglang_ext.costs.flow_shop import Hop
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.packed_batch import packed_round_s
from sglang_ext.laps.decide.policy import PACKED, Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, LapsMode
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.decide.table1 import fitted_candidates, fitted_cost
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec
from sglang_ext.planner.simulation.engines import TABLE1, load_engine
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener, SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, LeastLoaded
from sglang_ext.planner.simulation.iteration_policies import IterationPolicy, LapsPolicy
from sglang_ext.planner.simulation.run import RecordedStage, RunOptions, simulate
from sglang_ext.planner.simulation.scenario import SplitStage
from sglang_ext.planner.simulation.workload import WorkloadError, load_workload, poisson_s
from sglang_ext.types import Role
from sglang_ext_router.decide.instance_pressure import quantile
from support.result import give_up, progress

INSTANCES = 16
KV_TOKENS = 400_000
DURATION_S = 3600.0
LONG_SHARE = 0.05
LONG_TOKENS = (131_072, 1_048_576)
RATES_PER_S = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
REPORTED_PER_S = (0.25, 0.75)
MOST_WITH_ALL_PER_S = 0.75
SEEDS = (0, 1, 2, 3, 4)
CHUNK_S = 1.0
SLO_S = 0.5
CHAT_TOKENS = 8192  # most of a prompt that is not long
OURS = "ours"
BASELINES = ("loongserve", "loongserve-idle")
SPLIT_BASELINES = ("loongserve-split", "loongserve-idle-split")
PIPELINES = ("spp-medha", "spp", "spp-2x8", "ours-spp", "ours-spp-3x5")
_GAINS = ("p50", "p90", "p99", "long_p50", "long_p99")
HOP = Hop.over_link(16_384, 25e9, 0.002)
MOST_ROUND_TOKENS = 65_536  # of a pipeline's batch: the time budget is what bounds it
AT_OVERLOAD = (*BASELINES, *SPLIT_BASELINES, "lars", OURS)

Lengths = tuple[int, ...]


class Pipelines(NamedTuple):
    """Instances of several stages, and how they compose their batches."""

    count: int
    stages: int
    is_medha: bool = False  # Medha's composition


class System(NamedTuple):
    """A system, the SP sizes that it may use, and how many of the instances serve only short prompts.

    With pipelines the others are these, and neither options nor sizes matter.
    """

    options: SystemOptions
    candidates: tuple[SpCandidate, ...]
    short_instances: int = 0
    pipelines: Pipelines | None = None


class Ttfts(NamedTuple):
    """Times to first token (s) or ages, sorted, and how many requests got their first token."""

    short: list[float]
    long: list[float]
    served: int
    long_served: int


class _Task(NamedTuple):
    name: str
    rate_per_s: float
    seed: int
    lengths: Lengths


class Figures(NamedTuple):
    """One system at one load, all seeds together."""

    p50_s: float
    p90_s: float
    p99_s: float
    short_p50_s: float
    short_p99_s: float
    long_p50_s: float
    long_p99_s: float
    served_share: float
    long_served_share: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES_PER_S), help="requests per second")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.set_defaults(experiment=run)


def fifteen() -> SpCandidate:
    """SP 15 between 8 and 16: overhead on the straight line between them, work divided by 15."""
    eight, sixteen = fitted_cost(8), fitted_cost(16)
    return SpCandidate(
        15,
        SpCost(
            eight.a_s + (sixteen.a_s - eight.a_s) * 7 / 8,
            sixteen.b_s_per_token * 16 / 15,
            sixteen.c_s_per_token2 * 16 / 15,
            sixteen.d_s_per_token2 * 16 / 15,
        ),
    )


def systems() -> dict[str, System]:
    """All that is measured, by name."""
    powers = fitted_candidates(INSTANCES)
    spared = (*powers[:-1], fifteen())
    pool = SystemOptions(ClusterSystem.POOL, slo_s=SLO_S)
    slack = replace(pool, order=lars, chunk_s=CHUNK_S)
    greedy, idle = SystemOptions(ClusterSystem.LOONGSERVE), SystemOptions(ClusterSystem.LOONGSERVE_IDLE)
    return {
        "loongserve": System(greedy, powers),
        "loongserve-idle": System(idle, powers),
        "loongserve-split": System(greedy, spared, short_instances=1),
        "loongserve-idle-split": System(idle, spared, short_instances=1),
        "fcfs": System(replace(slack, order=fcfs), spared),
        "edf": System(replace(slack, order=edf), spared),
        "srpt": System(replace(slack, order=srpt), spared),
        "on-time": System(replace(pool, chunk_s=CHUNK_S), spared),
        "lars": System(slack, spared),
        "lars-16": System(slack, powers),
        "lars-whole": System(replace(slack, chunk_s=None), spared),
        "pool": System(pool, spared),
        "ours-lars": System(replace(pool, order=lars), spared, short_instances=1),
        OURS: System(pool, spared, short_instances=1),
        "spp-medha": System(pool, spared, pipelines=Pipelines(1, 16, is_medha=True)),
        "spp": System(pool, spared, pipelines=Pipelines(1, 16)),
        "spp-2x8": System(pool, spared, pipelines=Pipelines(2, 8)),
        "ours-spp": System(pool, spared, short_instances=1, pipelines=Pipelines(1, 15)),
        "ours-spp-3x5": System(pool, spared, short_instances=1, pipelines=Pipelines(3, 5)),
    }


def read_lengths(data: Path) -> Lengths:
    """Prompt lengths of the chat requests."""
    try:
        workload = load_workload(data / "sharegpt" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
    except WorkloadError as error:
        give_up(f"--data: {error}")
    return tuple(prompt for prompt, _ in workload.lengths)


def arrivals(lengths: Lengths, rate_per_s: float, seed: int) -> list[SimRequest]:
    """The requests of an hour; a seed has the same prompts in the same order at every load."""
    times_s, draws = poisson_s(rate_per_s, Random(f"arrivals {seed}")), Random(f"lengths {seed}")
    low, high = (math.log(tokens) for tokens in LONG_TOKENS)
    requests: list[SimRequest] = []
    while (at_s := next(times_s)) < DURATION_S:
        is_long = draws.random() < LONG_SHARE
        prompt_tokens = round(math.exp(draws.uniform(low, high))) if is_long else draws.choice(lengths)
        requests.append(SimRequest(len(requests), at_s, prompt_tokens, 1))
    return requests


def measure(task: _Task) -> Ttfts:
    """One run."""
    system = systems()[task.name]
    options = system.options
    short = system.short_instances
    spec = ClusterSpec(INSTANCES - short, kv_tokens=KV_TOKENS)

    def build(loop: EventLoop, listener: PrefillListener) -> RecordedStage:
        cluster: RecordedStage
        if system.pipelines is not None:
            cluster = _pipelines(system.pipelines, loop, listener)
        else:
            cluster = build_cluster(options, loop, spec, system.candidates, listener)
        return SplitStage(CHAT_TOKENS, _short_pool(short, loop, listener), cluster, short) if short else cluster

    requests = arrivals(task.lengths, task.rate_per_s, task.seed)
    outcome = simulate(requests, build, RunOptions(until_s=DURATION_S))
    assert not outcome.refused
    every = [(prefill.request, prefill.ttft_s) for prefill in outcome.served]
    every += [(finished_request, DURATION_S - finished_request.arrival_s) for finished_request in outcome.unfinished]
    return Ttfts(
        sorted(time_s for request, time_s in every if not is_long(request)),
        sorted(time_s for request, time_s in every if is_long(request)),
        len(outcome.served),
        sum(is_long(prefill.request) for prefill in outcome.served),
    )


def _short_pool(instances: int, loop: EventLoop, listener: PrefillListener) -> InstancePool:
    cost = fitted_cost(1)
    coefficients = CostCoefficients(cost.d_s_per_token2, cost.b_s_per_token, 0.0, cost.a_s)
    options = LapsOptions(mode=LapsMode.SHORT, boundary_tokens=CHAT_TOKENS, short_ttft_slo_ms=1e3 * SLO_S)
    limits = InstanceLimits(page_tokens=1, max_chunk_tokens=CHAT_TOKENS, max_batch_tokens=CHAT_TOKENS, max_requests=64)
    spec = InstancesSpec((Role.BOTH,) * instances, coefficients, KV_TOKENS, CHAT_TOKENS)

    def policy(_: Role) -> IterationPolicy:
        return LapsPolicy(Laps(options, GraphGrid(), coefficients, limits))

    return InstancePool(loop, spec, LeastLoaded(), policy, listener, 0, False)


def _pipelines(pipelines: Pipelines, loop: EventLoop, listener: PrefillListener) -> InstancePool:
    engine, stages = load_engine(TABLE1), pipelines.stages
    costs = engine.on_stages(stages, HOP)._replace(kv_tokens=stages * KV_TOKENS)
    options = LapsOptions(
        boundary_tokens=CHAT_TOKENS,
        short_ttft_slo_ms=1e3 * SLO_S,
        rho_max=MAX_SHARE if pipelines.is_medha else LapsOptions().rho_max,
        # Ours has its own for this many stages; Medha's composition knows only of one.
        round_ms=1e3 * packed_round_s(costs.coefficients.kappa_s, SLO_S, stages) if pipelines.is_medha else None,
    )
    limits = InstanceLimits(1, MOST_ROUND_TOKENS, MOST_ROUND_TOKENS, 64, stages=stages)
    spec = InstancesSpec(
        (Role.BOTH,) * pipelines.count, engine.coefficients, KV_TOKENS, CHAT_TOKENS, pipelines={Role.BOTH: costs}
    )

    def policy(_: Role) -> IterationPolicy:
        composition = MEDHA if pipelines.is_medha else PACKED
        return LapsPolicy(Laps(options, GraphGrid(), costs.coefficients, limits, composition))

    return InstancePool(loop, spec, LeastLoaded(), policy, listener, 0, False)


def is_long(request: SimRequest) -> bool:
    return request.prompt_tokens >= LONG_TOKENS[0]


def run(args: argparse.Namespace) -> dict[str, object]:
    """Every system at every load; prints a line for each."""
    lengths = read_lengths(args.data)
    result: dict[str, object] = {
        "duration_s": DURATION_S,
        "seeds": args.seeds,
        "chunk_s": CHUNK_S,
        "carried_per_s": carried_per_s(lengths),
    }
    with get_context("spawn").Pool(args.processes) as pool:
        for rate_per_s in sorted(args.rates):
            names = list(systems()) if rate_per_s <= MOST_WITH_ALL_PER_S else list(AT_OVERLOAD)
            tasks = [_Task(name, rate_per_s, seed, lengths) for name in names for seed in args.seeds]
            runs: dict[str, list[Ttfts]] = {name: [] for name in names}
            for task, ttfts in zip(tasks, pool.map(measure, tasks, chunksize=1), strict=True):
                runs[task.name].append(ttfts)
            found = {name: summarise(runs[name]) for name in names}
            for name, one in found.items():
                progress(
                    f"{rate_per_s:g}/s {name:21} P50 {one.p50_s:8.2f} s, P90 {one.p90_s:8.2f} s, "
                    f"P99 {one.p99_s:8.2f} s, long P50 {one.long_p50_s:8.2f} s, P99 {one.long_p99_s:8.2f} s, "
                    f"served {one.served_share:.1%}, long {one.long_served_share:.1%}"
                )
            if rate_per_s in REPORTED_PER_S:
                result |= {f"{key}_{rate_per_s:g}": value for key, value in gains(found).items()}
            result[f"at_{rate_per_s:g}"] = {name: choice._asdict() for name, choice in found.items()}
    return result


def summarise(runs: Sequence[Ttfts]) -> Figures:
    """The figures of all seeds together."""
    short = sorted(time_s for one in runs for time_s in one.short)
    long = sorted(time_s for one in runs for time_s in one.long)
    every = sorted([*short, *long])
    return Figures(
        quantile(every, 0.5),
        quantile(every, 0.9),
        quantile(every, 0.99),
        quantile(short, 0.5),
        quantile(short, 0.99),
        quantile(long, 0.5),
        quantile(long, 0.99),
        sum(one.served for one in runs) / len(every),
        sum(one.long_served for one in runs) / len(long),
    )


def gains(found: Mapping[str, Figures]) -> dict[str, float]:
    """Return how many times lower ours is than the better baseline, figure by figure; without and with the same
    partition."""
    ours = found[OURS]

    def best(name: str, baselines: Sequence[str] = BASELINES) -> float:
        return min(float(getattr(found[baseline], name)) for baseline in baselines)

    return {
        "median_gain": best("p50_s") / ours.p50_s,
        "p90_gain": best("p90_s") / ours.p90_s,
        "p99_gain": best("p99_s") / ours.p99_s,
        "long_p99_over_baseline": ours.long_p99_s / best("long_p99_s"),
        "p99_gain_over_split": best("p99_s", SPLIT_BASELINES) / ours.p99_s,
        "long_p50_gain_over_split": best("long_p50_s", SPLIT_BASELINES) / ours.long_p50_s,
        "long_p99_gain_over_split": best("long_p99_s", SPLIT_BASELINES) / ours.long_p99_s,
        "p99_gain_over_whole": best("p99_s", ("pool",)) / ours.p99_s,
        "long_p99_gain_over_whole": best("long_p99_s", ("pool",)) / ours.long_p99_s,
        "p99_gain_over_lars": best("p99_s", ("ours-lars",)) / ours.p99_s,
        "long_p99_gain_over_lars": best("long_p99_s", ("ours-lars",)) / ours.long_p99_s,
        **{f"{name}_gain_over_pipelines": best(f"{name}_s", PIPELINES) / getattr(ours, f"{name}_s") for name in _GAINS},
    }


def carried_per_s(lengths: Lengths) -> float:
    """The load at which all instances would compute all the time, each prompt on the size that takes least of them."""
    candidates = fitted_candidates(INSTANCES)
    low, high = (math.log(tokens) for tokens in LONG_TOKENS)
    steps = 1000
    longs = [math.exp(low + (high - low) * (step + 0.5) / steps) for step in range(steps)]

    def min_s(prompt_tokens: float) -> float:
        return min(candidate.size * candidate.cost.predict_s(0, round(prompt_tokens)) for candidate in candidates)

    mean_s = (1 - LONG_SHARE) * fmean(map(min_s, lengths)) + LONG_SHARE * fmean(map(min_s, longs))
    return INSTANCES / mean_s
