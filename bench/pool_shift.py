"""A load that turns several times between short and long prompts: two instances with and without the controller.

    python bench/pool_shift.py [--full | --trial] [--data FOLDER] [--out FOLDER]

Two real prefill instances on a core each, a decode instance and the router on both. In a short-heavy phase short
prompts ask for more than one instance can do, in a long-heavy one long prompts do; in a balanced one each class asks
for half an instance. Three systems serve the same requests:

* **static**: one instance for short prompts, one for long ones, for ever (`pool_spill` off);
* **both**: each instance serves both classes, and the router sends a prompt to the one with less to do;
* **controller**: the static split to begin with, but a pool that overflows is helped by the other at once, and a
  controller moves instances as the load turns (`--controller on`, min_short and min_long 0: it
  may give both to one class; what is left of the other is served with it). It knows the objectives.

A turn is *answered* when the class that asks for more than one instance has both. A turn that is not answered before
the next one counts with the whole phase. Arrivals are stretched by as much as the machine is slower than when
capacities were measured.

Writes `pool-shift.png` and `pool-shift.json`; the last line is `RESULT {json}`: violations of the TTFT objective over
those of each baseline ((ours + 1) / (theirs + 1)), moves, and how long each turn went unanswered.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from support.engines import BenchEngine, EngineStartError, running_router
from support.idle_ttft import IdleTtft, measure_idle_ttft
from support.mixed_load import Arrival, Outcome, Replayer, TraceMix, load_mix, percentile
from support.pool_turns import Move, Phase, turns_s, unanswered
from support.random_model import RandomLlama, build_random_llama
from support.result import BenchmarkRun, benchmark_parser, give_up, progress

# Prefill must be what is scarce, so prompts are not too short, the model not too small, and decode does next to
# nothing: two prefill instances, the decode instance, router and client share two cores.
MODEL = RandomLlama(layers=8, hidden=512, heads=8, kv_heads=2)
LEAST_SHORT_TOKENS = 64
LONG_RANGE_TOKENS = (1024, 2048)
DIVIDE_LENGTHS_BY = 1
OUTPUT_TOKENS = 1
BOUNDARY_TOKENS = 512
HEAVY, LIGHT, EVEN = 1.1, 0.05, 0.5  # offered load of a class, in instances
INSTANCES = 2
CONTROLLER = (
    *("--controller", "on", "--set", "controller.interval_secs=1", "--set", "controller.cooldown_secs=8"),
    *("--set", "controller.min_short=0", "--set", "controller.min_long=0", "--set", "controller.drain_timeout_secs=10"),
)
STATIC = ("--set", "placement.pool_spill=false")


SHORT_HEAVY = Phase("short-heavy", HEAVY, LIGHT, 35.0)
LONG_HEAVY = Phase("long-heavy", LIGHT, HEAVY, 35.0)
BALANCED = Phase("balanced", EVEN, EVEN, 35.0)
PHASES = (SHORT_HEAVY, LONG_HEAVY, SHORT_HEAVY, BALANCED, LONG_HEAVY, SHORT_HEAVY)


class System(NamedTuple):
    """Describes how the two instances are used."""

    name: str
    modes: tuple[str, str]  # of the instances
    router_options: tuple[str, ...]


OURS = "controller"
SYSTEMS = (
    System("static", ("short", "long"), STATIC),
    System("both", ("both", "both"), ()),
    System(OURS, ("short", "long"), CONTROLLER),
)


class Capacity(NamedTuple):
    """Measure how many requests of one class per second an instance serves when the other class is absent."""

    short_per_s: float
    long_per_s: float


class Run(NamedTuple):
    """One service of the whole workload."""

    outcomes: list[Outcome]
    moves: list[Move]
    slowdown: float  # of the machine, against when capacities were measured; arrivals are stretched by it


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < INSTANCES:
        give_up("two cores are needed, one for each prefill instance")
    benchmark = BenchmarkRun("sglang", "torch")
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, DIVIDE_LENGTHS_BY, LEAST_SHORT_TOKENS)
    stretch = 2.0 if arguments.full else 0.3 if arguments.trial else 1.0
    phases = [phase._replace(duration_s=phase.duration_s * stretch) for phase in PHASES]
    progress(f"model: {MODEL}, float32; workload: {mix.describe(0.5)}")
    try:
        with tempfile.TemporaryDirectory(prefix="pool-shift-") as scratch:
            runs, idle, capacity = _measure(Path(scratch), cores, mix, phases)
    except EngineStartError as error:
        give_up(str(error))
    violations = {name: _violations(run, idle) for name, run in runs.items()}
    moves = [move for move in runs[OURS].moves if move.outcome == "moved"]
    unanswered_s = unanswered(phases, moves)
    result = {
        **{
            f"violations_over_{name}": round((violations[OURS] + 1) / (violations[name] + 1), 3)
            for name in runs
            if name != OURS
        },
        "moves": len(moves),
        "settle_s": round(max(unanswered_s), 1),
        "unanswered_s": [round(one, 1) for one in unanswered_s],
        "violations": violations,
        "requests": len(runs[OURS].outcomes),
        "failed": sum(outcome.ttft_s is None for run in runs.values() for outcome in run.outcomes),
        "moves_made": [move._asdict() for move in runs[OURS].moves],
        "capacity_per_s": {name: round(value, 3) for name, value in capacity._asdict().items()},
        "slowdowns": {name: round(run.slowdown, 3) for name, run in runs.items()},
        "phases": [phase._asdict() for phase in phases],
    }
    for name, run in runs.items():
        _print_run(name, run, phases)
    arguments.out.mkdir(parents=True, exist_ok=True)
    _draw(arguments.out / "pool-shift.png", runs, phases)
    progress(f"wrote {arguments.out / 'pool-shift.png'} and pool-shift.json")
    benchmark.end(result, arguments.out / "pool-shift.json")


def _measure(
    scratch: Path, cores: Sequence[int], mix: TraceMix, phases: Sequence[Phase]
) -> tuple[dict[str, Run], IdleTtft, Capacity]:
    model = scratch / "model"
    model.mkdir()
    build_random_llama(MODEL, model)
    with ExitStack() as stack:
        engines = {}
        for role in ("short", "long", "decode"):
            boundary = () if role == "decode" else ("--laps-boundary-tokens", str(BOUNDARY_TOKENS))
            engines[role] = BenchEngine.start(role, model, scratch, worker_options=boundary)
            stack.callback(engines[role].stop)
        # All at once: ending takes an instance some seconds.
        stack.callback(lambda: [engine.terminate() for engine in engines.values()])
        for engine in engines.values():
            engine.wait_ready()
        engines["short"].pin({cores[0]})
        engines["long"].pin({cores[1]})
        progress("two prefill instances and one decode instance are up")
        capacity, idle = _capacity(engines, mix)
        progress(
            f"one instance does {capacity.short_per_s:.2f} short or {capacity.long_per_s:.2f} long requests/s; "
            f"idle TTFT: {idle}"
        )
        arrivals = _arrivals(mix, phases, capacity)
        first_per_s = _speed(engines, mix, seed=20)
        runs = {}
        for number, system in enumerate(SYSTEMS):
            for role, mode in zip(("short", "long"), system.modes, strict=True):
                engines[role].post("/laps/mode", {"mode": mode})
                _flush(engines[role])
            slowdown = first_per_s / _speed(engines, mix, seed=21 + number)
            stretched = [arrival._replace(at_s=arrival.at_s * slowdown) for arrival in arrivals]
            with running_router(_router_options(engines, system, idle), len(engines)) as url:
                progress(
                    f"{system.name}: {len(arrivals)} requests over {stretched[-1].at_s:.0f} s, slowdown {slowdown:.2f}"
                )
                runs[system.name] = _run(url, stretched, slowdown, seed=3 + number)
    return runs, idle, capacity


def _flush(engine: BenchEngine) -> None:
    """Empty its prefix cache. Refused while it has requests; the last ones may have been answered just now."""
    for _ in range(20):
        try:
            engine.post("/flush_cache", {})
            return
        except OSError:
            time.sleep(0.5)
    progress(f"the cache of {engine.url} was not emptied")


def _speed(engines: dict[str, BenchEngine], mix: TraceMix, seed: int) -> float:
    """Measure requests per second of a fixed work on the short instance, to compare with later."""
    replayer = Replayer(engines["decode"].url, MODEL.vocabulary, OUTPUT_TOKENS, engines["short"])
    prompts = [arrival.prompt_tokens for arrival in mix.arrivals(10.0, 4.0, 0.0, seed=9)]
    return len(prompts) / replayer.run_closed(prompts, 16, seed)


def _capacity(engines: dict[str, BenchEngine], mix: TraceMix) -> tuple[Capacity, IdleTtft]:
    """Serve each class by itself on the short instance, sixteen at a time, the other instance idle."""
    replayer = Replayer(engines["decode"].url, MODEL.vocabulary, OUTPUT_TOKENS, engines["short"])
    prompts = {
        is_long: [arrival.prompt_tokens for arrival in mix.arrivals(4.0, 10.0, float(is_long), seed=7)]
        for is_long in (False, True)
    }
    replayer.run_closed(prompts[False] + prompts[True][:8], 8, seed=1)
    idle = measure_idle_ttft(replayer)
    rates = [
        len(lengths) / replayer.run_closed(lengths, 16, seed=2 + number)
        for number, lengths in enumerate((prompts[False] * 2, prompts[True][:20]))
    ]
    return Capacity(*rates), idle


def _arrivals(mix: TraceMix, phases: Sequence[Phase], capacity: Capacity) -> list[Arrival]:
    arrivals: list[Arrival] = []
    start_s = 0.0
    for number, phase in enumerate(phases):
        for share, rate_per_s in (
            (0.0, phase.short * capacity.short_per_s),
            (1.0, phase.long * capacity.long_per_s),
        ):
            drawn = mix.arrivals(rate_per_s, phase.duration_s, share, seed=10 * number + int(share))
            arrivals += [arrival._replace(at_s=start_s + arrival.at_s) for arrival in drawn]
        start_s += phase.duration_s
    return sorted(arrivals)


def _run(url: str, arrivals: Sequence[Arrival], slowdown: float, seed: int) -> Run:
    """Replay the workload; moves are read from the router's `GET /pools` while it runs.

    Prompts of another seed have the same lengths and other tokens: nothing is cached from an earlier run.
    """
    began = datetime.now(UTC)
    seen: dict[str, Move] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(1.0):
            for move in _get(url + "/pools")["controller"]["moves"]:
                if move["outcome"] is not None:
                    started_s = (datetime.fromisoformat(move["started_at"]) - began).total_seconds()
                    at_s = started_s + move["duration_s"]
                    seen[move["started_at"]] = Move(round(at_s, 1), move["from"], move["to"], move["outcome"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcomes = Replayer(url, MODEL.vocabulary, OUTPUT_TOKENS).run(arrivals, seed)
    finally:
        is_over.set()
        watcher.join()
    moves = [seen[started_at]._replace(at_s=round(seen[started_at].at_s / slowdown, 1)) for started_at in sorted(seen)]
    return Run(outcomes, moves, slowdown)


def _router_options(engines: dict[str, BenchEngine], system: System, idle: IdleTtft) -> list[str]:
    flags = {"short": "--prefill-short", "long": "--prefill-long", "both": "--prefill"}
    prefills = [
        word
        for engine, mode in zip((engines["short"], engines["long"]), system.modes, strict=True)
        for word in (flags[mode], engine.url, str(engine.bootstrap_port))
    ]
    return [
        *prefills,
        *("--decode", engines["decode"].url, "--length-boundary-tokens", str(BOUNDARY_TOKENS)),
        *("--set", f"controller.short_slo_secs={idle.objective_s(LEAST_SHORT_TOKENS, 1.0)}"),
        *("--set", f"controller.long_slo_secs={idle.objective_s(LONG_RANGE_TOKENS[0], 1.0)}"),
        *system.router_options,
    ]


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return json.load(reply)


def _violations(run: Run, idle: IdleTtft) -> int:
    return sum(
        outcome.ttft_s is None or outcome.ttft_s > idle.objective_s(outcome.arrival.prompt_tokens, run.slowdown)
        for outcome in run.outcomes
    )


def _print_run(name: str, run: Run, phases: Sequence[Phase]) -> None:
    for phase, turn_s in zip(phases, turns_s(phases), strict=True):
        within = [
            outcome
            for outcome in run.outcomes
            if turn_s <= outcome.arrival.at_s / run.slowdown < turn_s + phase.duration_s
        ]
        cells = []
        for is_long in (False, True):
            times = [one.ttft_s for one in within if one.arrival.is_long is is_long and one.ttft_s is not None]
            label = "long" if is_long else "short"
            cells.append(f"{label} P50 {percentile(times, 0.5):.2f} s, P90 {percentile(times, 0.9):.2f} s")
        progress(f"{name:<11}{phase.name:<18}{len(within):>5} requests; {'; '.join(cells)}")
    for move in run.moves:
        progress(f"{name:<11}at {move.at_s:.0f} s an instance moves {move.source} -> {move.target}: {move.outcome}")


def _draw(path: Path, runs: dict[str, Run], phases: Sequence[Phase]) -> None:
    """TTFT of every request by its arrival, one system below the other, with the controller's moves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 9.0), sharex=True, sharey=True)
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        for is_long, colour in ((False, "tab:blue"), (True, "tab:orange")):
            points = [
                (outcome.arrival.at_s / run.slowdown, outcome.ttft_s)
                for outcome in run.outcomes
                if outcome.arrival.is_long is is_long and outcome.ttft_s is not None
            ]
            axis.scatter(*zip(*points, strict=True), s=6, color=colour, label="long" if is_long else "short")
        for turn_s in turns_s(phases)[1:]:
            axis.axvline(turn_s, color="grey", linestyle=":")
        for move in run.moves:
            axis.axvline(move.at_s, color="tab:green")
            axis.annotate(f"to {move.target}", (move.at_s, 1.0), xycoords=("data", "axes fraction"), fontsize=8)
        axis.set_yscale("log")
        axis.set_ylabel("TTFT, s")
        axis.set_title(name, loc="left")
        axis.grid(alpha=0.3)
    axes[0].legend()
    axes[-1].set_xlabel("arrival, s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_traces=True)
    parser.add_argument("--trial", action="store_true", help="phases of 10 s, to see that it works")
    parser.add_argument("--full", action="store_true", help="twice as long")
    return parser.parse_args()


if __name__ == "__main__":
    main()
