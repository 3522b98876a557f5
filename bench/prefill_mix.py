"""Short prompts beside long ones on one prefill instance: SGLang's own schedulers and LAPS, the same requests.

    python bench/prefill_mix.py [--full] [--data FOLDER] [--out FOLDER]

One real prefill instance pinned to the first core, one decode instance and the client on the second, a random
Llama whose prefill is computation. Each policy has a prefill server of its own, started once; block by block
(light, medium and near-saturated load, three seeds) they serve the same requests one after the other. Reports
TTFT per length class, requests per second and the share of requests that missed their TTFT objective: the larger
of 400 ms and five times what the prompt takes on an idle instance.

Writes `prefill-mix.png` and `prefill-mix.json`; the last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from support.engines import BenchEngine, EngineStartError
from support.idle_ttft import IdleTtft, measure_idle_ttft
from support.mixed_load import Arrival, Outcome, Replayer, TraceMix, load_mix, percentile
from support.processor_time import OtherLoad
from support.random_model import RandomLlama, build_random_llama
from support.result import give_up, machine, print_result, progress, versions

MODEL = RandomLlama(layers=6, hidden=384, heads=6, kv_heads=2)
LONG_SHARE = 0.1
LONG_RANGE_TOKENS = (1024, 4096)
DIVIDE_LENGTHS_BY = 2  # torch's attention on one core takes seconds for 4,096 tokens
OUTPUT_TOKENS = 4
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


LOADS = (Load("light", 0.4, 10.0), Load("medium", 0.65, 12.0), Load("near-saturated", 0.9, 30.0))


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


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    began_s = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed: one for the prefill instance, one for everything else")
    others, facts = OtherLoad(), machine()
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, DIVIDE_LENGTHS_BY)
    seeds = range(arguments.seeds)
    stretch = 3.0 if arguments.full else 1.0
    loads = [load._replace(duration_s=load.duration_s * stretch) for load in LOADS]
    progress(f"model: {MODEL}, float32; prefill on core {cores[0]}, the rest on core {cores[1]}")
    progress(f"workload: {mix.describe(LONG_SHARE)}; {OUTPUT_TOKENS} output tokens")
    try:
        with tempfile.TemporaryDirectory(prefix="prefill-mix-") as scratch:
            blocks, idle, saturation_per_s = _measure(Path(scratch), cores, mix, loads, seeds)
    except EngineStartError as error:
        give_up(str(error))
    figures = {
        (policy, load.name): _figures(policy, [block for block in blocks if block.load is load], idle)
        for policy in POLICIES
        for load in loads
    }
    _print_table(figures, loads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    _draw(arguments.out / "prefill-mix.png", blocks, loads)
    result = {
        **_headline({policy: figures[policy, loads[-1].name] for policy in POLICIES}),
        "saturation_requests_per_s": round(saturation_per_s, 3),
        "slowdowns": [round(block.slowdown, 2) for block in blocks],
        "duration_s": round(time.monotonic() - began_s, 1),
        "other_load_cores": round(others.mean_cores(), 2),
        "machine": facts,
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


class Block(NamedTuple):
    """One load with one seed: every policy serves the same requests, one after the other."""

    load: Load
    seed: int
    arrivals: list[Arrival]
    slowdown: float  # of the machine, against when idle latencies were measured
    outcomes: dict[str, list[Outcome]]  # by policy


def _measure(
    scratch: Path, cores: Sequence[int], mix: TraceMix, loads: Sequence[Load], seeds: Sequence[int]
) -> tuple[list[Block], IdleTtft, float]:
    """Every policy under every load, interleaved; idle latencies and saturation rates are those of the first policy.

    All servers run from the start, idle ones asleep. The saturation rate is measured anew before each block,
    because a shared machine is not equally fast at all times.
    """
    model = scratch / "model"
    model.mkdir()
    build_random_llama(MODEL, model)
    with ExitStack() as stack:
        decode = stack.enter_context(_engine("decode", model, scratch))
        prefills = {
            policy: stack.enter_context(_engine("both", model, scratch, worker_options, engine_arguments))
            for policy, (worker_options, engine_arguments) in POLICIES.items()
        }
        for engine in (decode, *prefills.values()):
            engine.wait_ready()
        # All at once: ending takes an instance some seconds.
        stack.callback(lambda: [engine.terminate() for engine in (decode, *prefills.values())])
        for prefill in prefills.values():
            prefill.pin({cores[0]})
        decode.pin({cores[1]})
        os.sched_setaffinity(0, {cores[1]})
        progress(f"{len(prefills)} prefill instances and one decode instance are up")
        replayers = {
            policy: Replayer(decode.url, MODEL.vocabulary, OUTPUT_TOKENS, prefill)
            for policy, prefill in prefills.items()
        }
        warm_up = [arrival.prompt_tokens for arrival in mix.arrivals(5.0, 6.0, LONG_SHARE, seed=999)]
        for replayer in replayers.values():
            replayer.run_closed(warm_up, 8, seed=999)
        reference = replayers["fcfs"]
        idle = measure_idle_ttft(reference)
        progress(f"idle TTFT: {idle}")
        first_per_s = _saturation(reference, mix, seed=500)
        blocks = []
        for number, (load, seed) in enumerate((load, seed) for seed in seeds for load in loads):
            saturation_per_s = _saturation(reference, mix, seed=501 + number)
            block = Block(
                load,
                seed,
                mix.arrivals(load.share * saturation_per_s, load.duration_s, LONG_SHARE, seed),
                first_per_s / saturation_per_s,
                {},
            )
            progress(f"{load.name}, seed {seed}: saturates at {saturation_per_s:.2f} requests/s")
            order = list(POLICIES)
            for policy in order[number % len(order) :] + order[: number % len(order)]:
                # Prompts differ between blocks, so nothing is cached from an earlier one.
                block.outcomes[policy] = replayers[policy].run(block.arrivals, seed=1000 * number)
                progress(f"  {policy:<24}{_brief(block.outcomes[policy])}")
            blocks.append(block)
    return blocks, idle, first_per_s


@contextmanager
def _engine(
    role: str,
    model: Path,
    scratch: Path,
    worker_options: Sequence[str] = (),
    engine_arguments: Sequence[str] = (),
) -> Iterator[BenchEngine]:
    engine = BenchEngine.start(role, model, scratch, worker_options=worker_options, engine_arguments=engine_arguments)
    try:
        yield engine
    finally:
        engine.stop()


def _saturation(replayer: Replayer, mix: TraceMix, seed: int) -> float:
    """Requests per second with always sixteen of the mix in the system."""
    prompts = [arrival.prompt_tokens for arrival in mix.arrivals(4.0, 10.0, LONG_SHARE, seed)]
    return len(prompts) / replayer.run_closed(prompts, 16, seed)


def _figures(policy: str, blocks: Sequence[Block], idle: IdleTtft) -> Figures:
    """Of blocks with one load."""
    everything = [outcome for block in blocks for outcome in block.outcomes[policy]]
    ttft_s = {
        is_long: [one.ttft_s for one in everything if one.arrival.is_long is is_long and one.ttft_s is not None]
        for is_long in (False, True)
    }
    late = sum(
        one.ttft_s is None or one.ttft_s > idle.objective_s(one.arrival.prompt_tokens, block.slowdown)
        for block in blocks
        for one in block.outcomes[policy]
    )
    return Figures(
        len(everything),
        sum(outcome.ttft_s is None for outcome in everything),
        *(percentile(ttft_s[is_long], share) for is_long in (False, True) for share in (0.5, 0.9, 0.99)),
        len(everything) / sum(_span_s(block.outcomes[policy]) for block in blocks),
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


def _draw(path: Path, blocks: Sequence[Block], loads: Sequence[Load]) -> None:
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
                    for block in blocks
                    if block.load is load
                    for outcome in block.outcomes[policy]
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
