"""Describes how long a prefill instance decides before an iteration, by the number of requests that wait.

    python bench/laps_decision.py

A queue of that many prompts (a tenth of them long), of ages up to 20 s, on an instance with 42 captured graphs and on
one without: each round takes one decision, removes what it runs, and takes in as many new ones. Timed is what stands
between two iterations: `Laps.choose` and `Laps.record_dispatch`, the queue's upkeep with it. Taking in a request is
reported apart. Run it on an idle machine; a round that the system interrupted counts, but not in the median.

The last line is `RESULT {json}`: `us_32` and `us_8192`, the mean of the rounds below the 95th percentile, with or
without graphs, whichever is more.
"""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from statistics import fmean, median
from typing import NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphGrid, GraphShape
from sglang_ext.laps.decide import policy as policy_module
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, PriorityClass, QueuedPrefill
from support.compiled import use_compiled_modules
from support.processor_time import OtherLoad
from support.result import machine, print_result, progress

QUEUED = (1, 8, 32, 128, 512, 2048, 8192)
ROUNDS = 600
ROUND_S = 0.02
OLDEST_S = 20.0
LONG_SHARE = 0.1
GRAPHS = GraphGrid(
    GraphShape(length, size) for length in (8, 16, 32, 64, 128, 256) for size in (1, 2, 4, 8, 16, 32, 64)
)
# As of a 7B model on a GPU; the time of a decision does not depend on them.
COSTS = CostCoefficients(alpha_s=2e-10, token_s=5e-6, read_s=1e-8, kappa_s=1e-2)
LIMITS = InstanceLimits(page_tokens=1, max_chunk_tokens=8192, max_batch_tokens=8192, max_requests=64)


class Times(NamedTuple):
    """Microseconds."""

    decision: float
    decision_p50: float
    arrival: float
    batch_requests: float


def main() -> None:
    """Run the benchmark and print the result line."""
    use_compiled_modules()
    others = OtherLoad()
    is_compiled = not str(policy_module.__file__).endswith(".py")
    progress(f"the policy is {'compiled' if is_compiled else 'plain Python'}")
    progress(f"{'queued':>8}{'graphs':>8}{'decision':>11}{'P50':>8}{'arrival':>10}   requests in a batch")
    worst: dict[int, float] = {}
    table = []
    for queued in QUEUED:
        for grid in (GRAPHS, GraphGrid()):
            times = measure(queued, grid)
            worst[queued] = max(worst.get(queued, 0.0), times.decision)
            graphs = len(grid.shapes)
            table.append({"queued": queued, "graphs": graphs, **{k: round(v, 1) for k, v in times._asdict().items()}})
            progress(
                f"{queued:>8}{graphs:>8}{times.decision:>8.1f} us{times.decision_p50:>8.1f}{times.arrival:>7.1f} us"
                f"   {times.batch_requests:.1f}"
            )
    print_result(
        {
            "us_32": round(worst[32], 1),
            "us_8192": round(worst[8192], 1),
            "compiled": is_compiled,
            "table": table,
            "other_load_cores": round(others.mean_cores(), 2),
            "machine": machine(),
            "date": datetime.now(UTC).date().isoformat(),
        }
    )


def measure(queued: int, grid: GraphGrid) -> Times:
    """Measure decisions while this number of requests waits."""
    draw = random.Random(queued)
    laps = Laps(LapsOptions(), grid, COSTS, LIMITS)
    now_s, key = 1000.0, 0

    def arrive(arrival_s: float) -> None:
        nonlocal key
        key += 1
        tokens = int(2 ** draw.uniform(9.5, 13)) if draw.random() < LONG_SHARE else draw.randint(5, 200)
        length_class = laps.classify(tokens, 0)
        deadline_s = laps.deadline_s(length_class, tokens, 0, arrival_s, None)
        laps.record_arrival(now_s, length_class, tokens, 0, deadline_s)
        request = QueuedPrefill(
            key, length_class, tokens, 0, tokens, arrival_s, deadline_s, PriorityClass.NORMAL, False, False
        )
        laps.put(request, now_s)

    for _ in range(queued):
        arrive(now_s - OLDEST_S * draw.random())
    decisions, arrivals, batches = [], [], []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        plan = laps.choose(now_s, 1 << 20)
        if plan.batches:
            laps.record_dispatch(now_s, plan.batches[0])
        decisions.append(time.perf_counter() - start_s)
        batches.append(len(plan.batches[0].keys) if plan.batches else 0)
        now_s += ROUND_S
        while len(laps.queue) < queued:
            start_s = time.perf_counter()
            arrive(now_s)
            arrivals.append(time.perf_counter() - start_s)
    decisions.sort()
    return Times(
        1e6 * fmean(decisions[: len(decisions) * 95 // 100]),
        1e6 * median(decisions),
        1e6 * median(arrivals or [0.0]),
        fmean(batches),
    )


if __name__ == "__main__":
    main()
