"""Describes what a decision costs to make, in microseconds as called from Python, and how far the paper's is from the
optimum.

    python bench/cdsp_planner.py [--sizes 8 16 32 64 128 256 1024] [--queue-sizes 128 1024]
        [--snapshots 1000] [--repeats 21] [--quality 300]

Each snapshot is fresh: new tuples of node ids, queue delays and free KV, and a new request; nothing is kept from one
plan to the next. What is timed is one call of `CdspPlanner.plan`: reading the three tuples, planning, and making the
records of the plan. Each snapshot is timed --repeats times and the median kept; mean, P99 and maximum are over
snapshots. As many instances as the largest SP size, 8 to a node; SP sizes all powers of two; improvement rate 0.05;
prompts log-uniform 4,096 to 190,000 tokens; a quarter of the instances idle, the delays of the others exponential with
mean 1 s; costs fitted to Table 1 of Tetris.

`price_…_us` are those of `PricePlanner.place`, which serves, for one waiting prompt in the same snapshots: any group,
also over several nodes (factor 1.1), reservations, gaps and growing, with 0 to 40 prompts to come.

`queue_…_us` are those of `PoolSchedule.turns` with 64 and 500 prompts waiting on 128 and 1,024 instances, which orders
them all and places the first 64: deadlines of five times the prompt's own time or 1 s, arrived within the last second,
a sixteenth of the instances idle; a tenth of the snapshots, a third of the repeats. `queue_…_order_us` is the order
without the search, a part of it (scaling ring).

Beyond SP 16, which the table does not list, overhead doubles with the size (--scaling ring) or stays what it is at 16
(--scaling ideal, where large groups pay and the search is at its largest); the figures of both are printed, `sp…_us`
are those of ring. The quality part gives the TTFT of plans above the lowest that any growing groups and any cuts could
reach, memory and nodes apart, on 16 instances on 2 nodes: in chunks, in one chunk, and in chunks when all instances
are declared to be on one node (`any_node`), so that the rest is what the preference for few nodes costs.

The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import math
from random import Random
from statistics import fmean, median
from time import perf_counter_ns

from baselines.tetris_planner import CdspPlanner, CdspRequest, ChunkPlan, PlannerConfig
from sglang_ext.long_pool.decide.on_time_order import OnTimeOptions, OnTimeOrder, PendingPrefill
from sglang_ext.long_pool.decide.pool_schedule import PoolSchedule, fastest_s, min_work_s
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot, PriceOptions, PricePlanner, WaitingPrompt
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.decide.table1 import LARGEST_SIZE, fitted_candidates
from support.cdsp_optimum import unrestricted_optimum_s
from support.compiled import use_compiled_modules
from support.result import BenchmarkRun, progress

NODE_SIZE = 8
IMPROVEMENT_RATE = 0.05
QUEUES = (64, 500)  # prompts that wait
FREE_KV_TOKENS = 400_000  # enough for every prompt on one instance
SHORTEST_TOKENS, LONGEST_TOKENS = 4096, 190_000


def candidates(largest_size: int, scaling: str) -> tuple[SpCandidate, ...]:
    """The fitted costs; with ideal scaling the overhead beyond SP 16 is that of SP 16."""
    found = fitted_candidates(largest_size)
    if scaling == "ring":
        return found
    limit_s = fitted_candidates()[-1].cost.a_s  # type: ignore[union-attr]
    return tuple(SpCandidate(choice.size, _with_overhead(choice, limit_s)) for choice in found)


def _with_overhead(candidate: SpCandidate, limit_s: float) -> SpCost:
    cost = candidate.cost
    assert isinstance(cost, SpCost)
    overhead_s = limit_s if candidate.size > LARGEST_SIZE else cost.a_s
    return SpCost(overhead_s, cost.b_s_per_token, cost.c_s_per_token2, cost.d_s_per_token2)


def snapshot(instances: int, random: Random) -> PrefillSnapshot:
    """Instances at a random moment."""
    delays_s = tuple(0.0 if random.random() < 0.25 else random.expovariate(1.0) for _ in range(instances))
    nodes = tuple(index // NODE_SIZE for index in range(instances))
    return PrefillSnapshot(nodes, delays_s, (FREE_KV_TOKENS,) * instances)


def request(random: Random) -> CdspRequest:
    """A prompt, log-uniform in length."""
    return CdspRequest(round(math.exp(random.uniform(math.log(SHORTEST_TOKENS), math.log(LONGEST_TOKENS)))))


def time_plans_us(largest_size: int, scaling: str, snapshots: int, repeats: int) -> tuple[list[float], float]:
    """Median time of each snapshot's plan, ascending, and the share of plans with more than one chunk."""
    planner = CdspPlanner(PlannerConfig(candidates(largest_size, scaling)))
    random = Random(largest_size)
    medians_us, chunked = [], 0
    for _ in range(snapshots):
        instances, wanted = snapshot(largest_size, random), request(random)
        taken_ns = []
        for _ in range(repeats):
            started_ns = perf_counter_ns()
            plan = planner.plan(instances, wanted, IMPROVEMENT_RATE)
            taken_ns.append(perf_counter_ns() - started_ns)
        assert isinstance(plan, ChunkPlan)
        chunked += len(plan.chunks) > 1
        medians_us.append(median(taken_ns) / 1000)
    return sorted(medians_us), chunked / snapshots


def time_placements_us(largest_size: int, scaling: str, snapshots: int, repeats: int) -> list[float]:
    """Median time of each snapshot's decision about one prompt, ascending."""
    planner = PricePlanner(PriceOptions(candidates(largest_size, scaling)))
    random = Random(largest_size)
    medians_us = []
    for _ in range(snapshots):
        instances, wanted = snapshot(largest_size, random), request(random)
        waiting = (WaitingPrompt(wanted.new_tokens, 0, math.inf),)
        others = random.uniform(0.0, 40.0)
        taken_ns = []
        for _ in range(repeats):
            started_ns = perf_counter_ns()
            placed = planner.place(instances, waiting, others)
            taken_ns.append(perf_counter_ns() - started_ns)
        assert len(placed) == 1 or min(instances.queue_delays_s) > 0
        medians_us.append(median(taken_ns) / 1000)
    return sorted(medians_us)


def time_turns_us(instances: int, waiting: int, snapshots: int, repeats: int) -> dict[str, list[float]]:
    """Median times of each snapshot's decision about a queue, and of its order only, ascending."""
    costs = candidates(instances, "ring")
    planner = PricePlanner(PriceOptions(costs))
    random = Random(instances + waiting)
    medians_us: dict[str, list[float]] = {"": [], "_order": []}
    for _ in range(snapshots):
        found = snapshot(instances, random)
        idle = instances // 16
        delays_s = (0.0,) * idle + tuple(0.1 + random.expovariate(1.0) for _ in range(instances - idle))
        found = found._replace(queue_delays_s=delays_s)
        prompts = [_waiting_prompt(key, costs, random) for key in range(waiting)]
        running_s = sum(delays_s)
        taken_ns: dict[str, list[int]] = {name: [] for name in medians_us}
        for _ in range(repeats):
            # One decision changes what the next one may put back: each has an order of its own.
            schedule, order = PoolSchedule(planner), OnTimeOrder(OnTimeOptions())
            started_ns = perf_counter_ns()
            placed = schedule.turns(0.0, found, prompts, running_s)
            taken_ns[""].append(perf_counter_ns() - started_ns)
            assert placed
            started_ns = perf_counter_ns()
            order.order(0.0, prompts, instances, running_s)
            taken_ns["_order"].append(perf_counter_ns() - started_ns)
        for name, times_ns in taken_ns.items():
            medians_us[name].append(median(times_ns) / 1000)
    return {name: sorted(times_us) for name, times_us in medians_us.items()}


def _waiting_prompt(key: int, costs: tuple[SpCandidate, ...], random: Random) -> PendingPrefill:
    tokens, arrival_s = request(random).new_tokens, -random.random()
    whole_s, work_s = fastest_s(costs, 0, tokens), min_work_s(costs, 0, tokens)
    deadline_s = arrival_s + max(1.0, 5.0 * whole_s)
    return PendingPrefill(key, tokens, 0, -1, (), arrival_s, deadline_s, whole_s, whole_s, work_s, is_started=False)


def measure_quality(snapshots: int, rate: float) -> dict[str, float]:
    """Mean and largest TTFT above the optimum, as shares of it: in chunks, in one, and in chunks without nodes."""
    config = PlannerConfig(candidates(LARGEST_SIZE, "ring"))
    chunked = CdspPlanner(config)
    single = CdspPlanner(PlannerConfig(config.candidates, is_chunking=False))
    above: dict[str, list[float]] = {"chunked": [], "single": [], "chunked_any_node": []}
    random = Random(1)
    for _ in range(snapshots):
        instances, wanted = snapshot(LARGEST_SIZE, random), request(random)
        one_node = instances._replace(node_ids=(0,) * LARGEST_SIZE)
        optimum_s = unrestricted_optimum_s(config, instances, wanted)
        plans = {
            "chunked": chunked.plan(instances, wanted, rate),
            "single": single.plan(instances, wanted, rate),
            "chunked_any_node": chunked.plan(one_node, wanted, rate),
        }
        for name, plan in plans.items():
            assert isinstance(plan, ChunkPlan)
            above[name].append(plan.ttft_s / optimum_s - 1)
    means = {f"{name}_gap_mean": fmean(shares) for name, shares in above.items()}
    return means | {f"{name}_gap_max": max(shares) for name, shares in above.items()}


def main() -> None:
    use_compiled_modules()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 1024], help="largest SP sizes"
    )
    parser.add_argument("--queue-sizes", type=int, nargs="*", default=[128, 1024], help="largest SP sizes with a queue")
    parser.add_argument("--snapshots", type=int, default=1000, help="snapshots per size")
    parser.add_argument("--repeats", type=int, default=21, help="times that each snapshot is planned")
    parser.add_argument("--quality", type=int, default=300, help="snapshots compared with the optimum")
    options = parser.parse_args()
    if any(size < 1 or size & (size - 1) for size in options.sizes):
        parser.error("--sizes: powers of two are needed")
    if any(size < 16 or size & (size - 1) for size in options.queue_sizes):
        parser.error("--queue-sizes: powers of two of at least 16 are needed")
    for name in ("snapshots", "repeats", "quality"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: at least 1 is needed")

    benchmark = BenchmarkRun("sglang-ext")
    result: dict[str, object] = {}
    progress(f"{'µs per plan':>12s} {'scaling':>8s} {'mean':>8s} {'P99':>8s} {'max':>8s} {'chunked':>8s}")
    for scaling, suffix in (("ring", ""), ("ideal", "_ideal")):
        for size in options.sizes:
            taken_us, chunked = time_plans_us(size, scaling, options.snapshots, options.repeats)
            p99_us = taken_us[math.ceil(0.99 * len(taken_us)) - 1]
            mean_us = fmean(taken_us)
            progress(
                f"{f'SP {size}':>12s} {scaling:>8s} {mean_us:8.2f} {p99_us:8.2f} {taken_us[-1]:8.2f} {chunked:8.1%}"
            )
            for name, value in (("mean", mean_us), ("p99", p99_us), ("max", taken_us[-1])):
                result[f"sp{size}{suffix}_{name}_us"] = round(value, 2)
    progress(f"{'µs, price':>12s} {'scaling':>8s} {'mean':>8s} {'P99':>8s} {'max':>8s}")
    for scaling, suffix in (("ring", ""), ("ideal", "_ideal")):
        for size in options.sizes:
            taken_us = time_placements_us(size, scaling, options.snapshots, options.repeats)
            p99_us = taken_us[math.ceil(0.99 * len(taken_us)) - 1]
            mean_us = fmean(taken_us)
            progress(f"{f'SP {size}':>12s} {scaling:>8s} {mean_us:8.2f} {p99_us:8.2f} {taken_us[-1]:8.2f}")
            for name, value in (("mean", mean_us), ("p99", p99_us), ("max", taken_us[-1])):
                result[f"price_sp{size}{suffix}_{name}_us"] = round(value, 2)
    progress(f"{'µs, queue':>12s} {'waiting':>8s} {'mean':>8s} {'P99':>8s} {'max':>8s} {'order':>8s}")
    for size in options.queue_sizes:
        for waiting in QUEUES:
            taken = time_turns_us(size, waiting, max(1, options.snapshots // 10), max(1, options.repeats // 3))
            taken_us, order_us = taken[""], taken["_order"]
            p99_us = taken_us[math.ceil(0.99 * len(taken_us)) - 1]
            mean_us = fmean(taken_us)
            progress(
                f"{f'SP {size}':>12s} {waiting:8d} {mean_us:8.2f} {p99_us:8.2f} {taken_us[-1]:8.2f} "
                f"{fmean(order_us):8.2f}"
            )
            for name, value in (("mean", mean_us), ("p99", p99_us), ("max", taken_us[-1])):
                result[f"queue_sp{size}_{waiting}_{name}_us"] = round(value, 2)
            result[f"queue_sp{size}_{waiting}_order_us"] = round(fmean(order_us), 2)
    for rate in (0.0, IMPROVEMENT_RATE):
        quality = measure_quality(options.quality, rate)
        progress(
            f"TTFT above the optimum, improvement rate {rate}: " + ", ".join(f"{k} {v:.2%}" for k, v in quality.items())
        )
        result[f"rate_{rate}"] = {name: round(value, 5) for name, value in quality.items()}
    benchmark.end(result)


if __name__ == "__main__":
    main()
