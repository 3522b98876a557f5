"""Short prompts beside long ones on one prefill instance: SGLang's own schedulers and LAPS, the same requests.

    python bench/prefill_mix.py [--full] [--data FOLDER] [--out FOLDER]

One real prefill instance pinned to the first core, one decode instance and the client on the second, a random
Llama whose prefill is computation. Each policy gets a fresh prefill server, then the same requests at light,
medium and near-saturated load with three seeds. Reports TTFT per length class, requests per second and the
share of requests that missed their TTFT objective (the larger of 400 ms and five times what the prompt takes on
an idle instance).

Writes `prefill-mix.png` and `prefill-mix.json`; the last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from support.engines import BenchEngine, EngineStartError
from support.mixed_load import Arrival, Outcome, Replayer, TraceMix, load_mix, percentile
from support.processor_time import OtherLoad
from support.random_model import RandomLlama, build_random_llama
from support.result import give_up, machine, print_result, progress, versions

MODEL = RandomLlama(layers=8, hidden=512, heads=8, kv_heads=2)
LONG_SHARE = 0.1
LONG_RANGE_TOKENS = (1024, 4096)
DIVIDE_LENGTHS_BY = 2  # torch's attention on one core takes 11 s for 4,096 tokens
OUTPUT_TOKENS = 4
SHORT_SLO_S = 0.4
SLO_STRETCH = 5.0
IDLE_LENGTHS_TOKENS = (16, 128, 512, 1024, 2048)
OURS = "laps"
STOCK = ("--laps-mode", "off")
POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # worker options, engine arguments
    "fcfs": (STOCK, ()),
    "hrrn": (STOCK, ("--schedule-policy", "hrrn")),
    "shortest-prefill-first": (STOCK, ("--schedule-policy", "shortest-prefill-first")),
    OURS: (("--laps-mode", "both"), ()),
}


class Load(NamedTuple):
    """How hard, as a share of the measured saturation rate, and for how long."""

    name: str
    share: float
    duration_s: float


LOADS = (Load("light", 0.4, 12.0), Load("medium", 0.65, 15.0), Load("near-saturated", 0.9, 30.0))


class Figures(NamedTuple):
    """One policy at one load, all seeds together; latencies in seconds."""

    requests: int
    failed: int
    short_p50_s: float
    short_p90_s: float
    short_p99_s: float
    long_p50_s: float
    long_p90_s: float
    long_p99_s: float
    requests_per_s: float
    violation_share: float


class IdleTtft:
    """TTFT on an idle instance by prompt length, between measured points linear."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._points = sorted(points)

    def __call__(self, tokens: int) -> float:
        points = self._points
        for (low, low_s), (high, high_s) in pairwise(points):
            if tokens <= high:
                return low_s + (high_s - low_s) * max(0, tokens - low) / (high - low)
        return points[-1][1]

    def objective_s(self, tokens: int) -> float:
        """The TTFT that a prompt of this length must keep."""
        return max(SHORT_SLO_S, SLO_STRETCH * self(tokens))


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    began_s = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed: one for the prefill instance, one for everything else")
    os.sched_setaffinity(0, {cores[1]})
    others = OtherLoad()
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, DIVIDE_LENGTHS_BY)
    seeds = range(arguments.seeds)
    stretch = 3.0 if arguments.full else 1.0
    loads = [load._replace(duration_s=load.duration_s * stretch) for load in LOADS]
    progress(f"model: {MODEL}, float32; prefill on core {cores[0]}, the rest on core {cores[1]}")
    progress(f"workload: {mix.describe(LONG_SHARE)}; {OUTPUT_TOKENS} output tokens")
    try:
        with tempfile.TemporaryDirectory(prefix="prefill-mix-") as scratch:
            outcomes, idle, saturation_per_s = _measure(Path(scratch), cores, mix, loads, seeds)
    except EngineStartError as error:
        give_up(str(error))
    figures = {
        (policy, load.name): _figures([outcomes[policy, load.name, seed] for seed in seeds], idle)
        for policy in POLICIES
        for load in loads
    }
    _print_table(figures, loads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    _draw(arguments.out / "prefill-mix.png", outcomes, loads, seeds)
    result = {
        **_headline({policy: figures[policy, loads[-1].name] for policy in POLICIES}),
        "saturation_requests_per_s": round(saturation_per_s, 3),
        "duration_s": round(time.monotonic() - began_s, 1),
        "other_load_cores": round(others.mean_cores(), 2),
        "machine": machine(),
        "versions": versions("sglang", "torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    table = [
        {"policy": policy, "load": load, **{name: round(value, 4) for name, value in row._asdict().items()}}
        for (policy, load), row in figures.items()
    ]
    (arguments.out / "prefill-mix.json").write_text(json.dumps({**result, "table": table}, indent=1) + "\n")
    progress(f"wrote {arguments.out / 'prefill-mix.png'} and prefill-mix.json")
    print_result(result)


Outcomes = dict[tuple[str, str, int], list[Outcome]]  # by policy, load and seed


def _measure(
    scratch: Path, cores: Sequence[int], mix: TraceMix, loads: Sequence[Load], seeds: Sequence[int]
) -> tuple[Outcomes, IdleTtft, float]:
    """Every policy under every load; idle latencies and the saturation rate are those of the first policy."""
    model = scratch / "model"
    model.mkdir()
    build_random_llama(MODEL, model)
    outcomes: Outcomes = {}
    workloads: dict[tuple[str, int], list[Arrival]] = {}
    idle, saturation_per_s = IdleTtft([(1, 0.0)]), 0.0
    with _engine("decode", model, scratch, cores[1]) as decode:
        for policy, (worker_options, engine_arguments) in POLICIES.items():
            with _engine("both", model, scratch, cores[0], worker_options, engine_arguments) as prefill:
                replayer = Replayer(prefill, decode, MODEL.vocabulary, OUTPUT_TOKENS)
                warm_up = [arrival.prompt_tokens for arrival in mix.arrivals(8.0, 6.0, LONG_SHARE, seed=999)]
                replayer.run_closed(warm_up, 8, seed=999)
                if not workloads:
                    idle = _idle_ttft(replayer)
                    saturation_per_s = _saturation(replayer, mix)
                    progress(f"{policy}: saturates at {saturation_per_s:.2f} requests/s")
                    workloads = {
                        (load.name, seed): mix.arrivals(
                            load.share * saturation_per_s, load.duration_s, LONG_SHARE, seed
                        )
                        for load in loads
                        for seed in seeds
                    }
                for (load_name, seed), arrivals in workloads.items():
                    # Prompts differ between the runs of a server, so nothing is cached from the run before.
                    outcomes[policy, load_name, seed] = replayer.run(arrivals, seed=crc32(load_name.encode()) + seed)
                    progress(f"{policy}, {load_name}, seed {seed}: {_brief(outcomes[policy, load_name, seed])}")
    return outcomes, idle, saturation_per_s


@contextmanager
def _engine(
    role: str,
    model: Path,
    scratch: Path,
    core: int,
    worker_options: Sequence[str] = (),
    engine_arguments: Sequence[str] = (),
) -> Iterator[BenchEngine]:
    engine = BenchEngine.start(
        role, model, scratch, cores={core}, worker_options=worker_options, engine_arguments=engine_arguments
    )
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


def _idle_ttft(replayer: Replayer) -> IdleTtft:
    """The faster of two measurements at each length."""
    points = []
    for tokens in IDLE_LENGTHS_TOKENS:
        alone = [Arrival(0.0, True, tokens)]
        times = [replayer.run(alone, seed=1000 + tokens + attempt)[0].ttft_s for attempt in range(2)]
        points.append((tokens, min(time_s for time_s in times if time_s is not None)))
    progress("idle TTFT: " + ", ".join(f"{tokens} tokens {ttft_s:.2f} s" for tokens, ttft_s in points))
    return IdleTtft(points)


def _saturation(replayer: Replayer, mix: TraceMix) -> float:
    """Requests per second with always sixteen of the mix in the system."""
    prompts = [arrival.prompt_tokens for arrival in mix.arrivals(10.0, 20.0, LONG_SHARE, seed=500)]
    return len(prompts) / replayer.run_closed(prompts, 16, seed=500)


def _figures(runs: Sequence[Sequence[Outcome]], idle: IdleTtft) -> Figures:
    everything = [outcome for run in runs for outcome in run]
    by_class = {
        is_long: [
            outcome.ttft_s
            for outcome in everything
            if outcome.arrival.is_long is is_long and outcome.ttft_s is not None
        ]
        for is_long in (False, True)
    }
    late = sum(
        outcome.ttft_s is None or outcome.ttft_s > idle.objective_s(outcome.arrival.prompt_tokens)
        for outcome in everything
    )
    return Figures(
        len(everything),
        sum(outcome.ttft_s is None for outcome in everything),
        *(percentile(by_class[is_long], share) for is_long in (False, True) for share in (0.5, 0.9, 0.99)),
        sum(map(len, runs)) / sum(map(_span_s, runs)),
        late / len(everything),
    )


def _span_s(run: Sequence[Outcome]) -> float:
    """From the first arrival to the last end."""
    ends = [outcome.arrival.at_s + outcome.end_s for outcome in run if outcome.end_s is not None]
    return max(ends) - run[0].arrival.at_s if ends else float("inf")


def _headline(near: dict[str, Figures]) -> dict[str, object]:
    ours = near[OURS]
    upstream = [figures for policy, figures in near.items() if policy != OURS]
    return {
        "short_p90_gain_over_fcfs": round(near["fcfs"].short_p90_s / ours.short_p90_s, 3),
        "short_p90_gain_over_best": round(min(one.short_p90_s for one in upstream) / ours.short_p90_s, 3),
        "long_p90_over_fcfs": round(ours.long_p90_s / near["fcfs"].long_p90_s, 3),
        "rps_over_best": round(ours.requests_per_s / max(one.requests_per_s for one in upstream), 3),
        "slo_violation_share": {policy: round(figures.violation_share, 4) for policy, figures in near.items()},
        "failed": sum(figures.failed for figures in near.values()),
    }


def _brief(run: Sequence[Outcome]) -> str:
    short = [one.ttft_s for one in run if not one.arrival.is_long and one.ttft_s is not None]
    long = [one.ttft_s for one in run if one.arrival.is_long and one.ttft_s is not None]
    return (
        f"{len(run)} requests, short P90 {percentile(short, 0.9):.2f} s, long P90 {percentile(long, 0.9):.2f} s, "
        f"{sum(one.ttft_s is None for one in run)} failed"
    )


def _print_table(figures: dict[tuple[str, str], Figures], loads: Sequence[Load]) -> None:
    progress(
        f"\n{'load':<15}{'policy':<24}{'short P50':>10}{'P90':>7}{'P99':>7}{'long P50':>10}{'P90':>7}{'P99':>7}"
        f"{'req/s':>7}{'late':>7}"
    )
    for load in loads:
        for policy in POLICIES:
            row = figures[policy, load.name]
            progress(
                f"{load.name:<15}{policy:<24}{row.short_p50_s:>10.2f}{row.short_p90_s:>7.2f}{row.short_p99_s:>7.2f}"
                f"{row.long_p50_s:>10.2f}{row.long_p90_s:>7.2f}{row.long_p99_s:>7.2f}"
                f"{row.requests_per_s:>7.2f}{row.violation_share:>7.1%}"
            )


def _draw(path: Path, outcomes: Outcomes, loads: Sequence[Load], seeds: Sequence[int]) -> None:
    """TTFT distributions: a row per class, a column per load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(loads), figsize=(4.2 * len(loads), 6.4), squeeze=False)
    for column, load in enumerate(loads):
        for row, is_long in enumerate((False, True)):
            axis = axes[row][column]
            for policy in POLICIES:
                times = sorted(
                    outcome.ttft_s
                    for seed in seeds
                    for outcome in outcomes[policy, load.name, seed]
                    if outcome.arrival.is_long is is_long and outcome.ttft_s is not None
                )
                shares = [(position + 1) / len(times) for position in range(len(times))]
                axis.step(times, shares, where="post", label=policy, linewidth=2.2 if policy == OURS else 1.2)
            axis.set_xscale("log")
            axis.set_ylim(0, 1.02)
            axis.grid(alpha=0.3)
            axis.set_title(f"{'long' if is_long else 'short'} prompts, {load.name} ({load.share:.0%})", fontsize=10)
            axis.set_xlabel("TTFT, s")
    axes[0][0].set_ylabel("share of requests")
    axes[1][0].set_ylabel("share of requests")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--full", action="store_true", help="three times as long")
    parser.add_argument("--seeds", type=int, default=3, help="workloads per load (default: 3)")
    parser.add_argument(
        "--data", type=Path, default=here.parent.parent / "shared" / "data", help="folder with the traces"
    )
    parser.add_argument("--out", type=Path, default=here / "out", help="folder for picture and JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
