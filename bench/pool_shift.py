"""Load that turns from short-heavy to long-heavy and back: a static split of two instances against the controller.

    python bench/pool_shift.py [--full] [--data FOLDER] [--out FOLDER]

Two real prefill instances, one short and one long, each on a core of its own, a decode instance and the router on
both. Three phases: short prompts ask for more than one instance can do, then long ones, then short ones again. The
same requests are served with `--controller off` and with `--controller on`, which may give both instances to one
class (`--controller-min-short 0 --controller-min-long 0`; what is left of the other class is served beside it).

Writes `pool-shift.png` and `pool-shift.json`; the last line is `RESULT {json}`: violations of the TTFT objective
over those of the static split ((ours + 1) / (static + 1)), moves, and the longest time from a turn of the load to the
last move that it caused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from support.engines import BenchEngine, EngineStartError, free_port
from support.idle_ttft import IdleTtft, measure_idle_ttft
from support.mixed_load import Arrival, Outcome, Replayer, TraceMix, load_mix, percentile
from support.processor_time import OtherLoad
from support.random_model import RandomLlama, build_random_llama
from support.result import give_up, machine, print_result, progress, versions

# Prefill must be what is scarce, so prompts are not too short, the model not too small, and decode does next to
# nothing: two prefill instances, the decode instance, router and client share two cores.
MODEL = RandomLlama(layers=8, hidden=512, heads=8, kv_heads=2)
LEAST_SHORT_TOKENS = 64
LONG_RANGE_TOKENS = (1024, 2048)
DIVIDE_LENGTHS_BY = 1
OUTPUT_TOKENS = 1
BOUNDARY_TOKENS = 512
HEAVY, LIGHT = 1.1, 0.05  # offered load of a class, in instances
CONTROLLER = (
    *("--controller", "on", "--controller-interval-secs", "1", "--controller-cooldown-secs", "8"),
    *("--controller-min-short", "0", "--controller-min-long", "0", "--controller-drain-timeout-secs", "10"),
)


class Phase(NamedTuple):
    """Offered load of each class, in instances, and the seconds that it lasts."""

    name: str
    short: float
    long: float
    duration_s: float


class Capacity(NamedTuple):
    """What one instance does of each class alone, in requests per second."""

    short_per_s: float
    long_per_s: float


class Move(NamedTuple):
    """A finished move, timed from the first arrival."""

    at_s: float
    source: str
    target: str
    outcome: str


class Run(NamedTuple):
    """One service of the whole workload."""

    outcomes: list[Outcome]
    moves: list[Move]


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    began_s = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed, one for each prefill instance")
    others = OtherLoad()
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, DIVIDE_LENGTHS_BY, LEAST_SHORT_TOKENS)
    duration_s = 120.0 if arguments.full else 60.0
    phases = [
        Phase("short-heavy", HEAVY, LIGHT, duration_s),
        Phase("long-heavy", LIGHT, HEAVY, duration_s),
        Phase("short-heavy again", HEAVY, LIGHT, duration_s),
    ]
    progress(f"model: {MODEL}, float32; workload: {mix.describe(0.5)}")
    try:
        with tempfile.TemporaryDirectory(prefix="pool-shift-") as scratch:
            static, ours, idle, capacity = _measure(Path(scratch), cores, mix, phases)
    except EngineStartError as error:
        give_up(str(error))
    violations = {name: _violations(run, idle) for name, run in (("static", static), ("controller", ours))}
    turns_s = [sum(phase.duration_s for phase in phases[:number]) for number in range(len(phases))]
    done = [move for move in ours.moves if move.outcome == "moved"]
    result = {
        "violations_over_static": round((violations["controller"] + 1) / (violations["static"] + 1), 3),
        "moves": len(done),
        "settle_s": round(_settle_s(done, turns_s), 1),
        "violations": violations,
        "requests": len(static.outcomes),
        "failed": sum(outcome.ttft_s is None for run in (static, ours) for outcome in run.outcomes),
        "moves_made": [move._asdict() for move in ours.moves],
        "capacity_per_s": {name: round(value, 3) for name, value in capacity._asdict().items()},
        "phases": [phase._asdict() for phase in phases],
        "duration_s": round(time.monotonic() - began_s, 1),
        "other_load_cores": round(others.mean_cores(), 2),
        "machine": machine(),
        "versions": versions("sglang", "torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    for name, run in (("static", static), ("controller", ours)):
        _print_run(name, run, phases, turns_s)
    arguments.out.mkdir(parents=True, exist_ok=True)
    _draw(arguments.out / "pool-shift.png", {"static": static, "controller": ours}, turns_s)
    (arguments.out / "pool-shift.json").write_text(json.dumps(result, indent=1) + "\n")
    progress(f"wrote {arguments.out / 'pool-shift.png'} and pool-shift.json")
    print_result(result)


def _measure(
    scratch: Path, cores: Sequence[int], mix: TraceMix, phases: Sequence[Phase]
) -> tuple[Run, Run, IdleTtft, Capacity]:
    model = scratch / "model"
    model.mkdir()
    build_random_llama(MODEL, model)
    with ExitStack() as stack:
        engines = {}
        for role in ("short", "long", "decode"):
            engines[role] = BenchEngine.start(role, model, scratch)
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
        runs = []
        for name, options in (("static", ()), ("controller", CONTROLLER)):
            with _router(engines, options) as url:
                progress(f"{name}: {len(arrivals)} requests over {sum(phase.duration_s for phase in phases):.0f} s")
                runs.append(_run(url, arrivals))
            for role in ("short", "long"):
                # Back to the split that both runs begin with.
                engines[role].post("/laps/mode", {"mode": role})
    return runs[0], runs[1], idle, capacity


def _capacity(engines: dict[str, BenchEngine], mix: TraceMix) -> tuple[Capacity, IdleTtft]:
    """Each class alone on the short instance, sixteen at a time, the other instance idle."""
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


def _run(url: str, arrivals: Sequence[Arrival]) -> Run:
    """Replay the workload; moves are read from the router's `GET /pools` while it runs."""
    began = datetime.now(UTC)
    seen: dict[str, Move] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(1.0):
            for move in _get(url + "/pools")["controller"]["moves"]:
                at_s = (datetime.fromisoformat(move["started_at"]) - began).total_seconds()
                if move["outcome"] is not None:
                    seen[move["started_at"]] = Move(round(at_s, 1), move["from"], move["to"], move["outcome"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcomes = Replayer(url, MODEL.vocabulary, OUTPUT_TOKENS).run(arrivals, seed=3)
    finally:
        is_over.set()
        watcher.join()
    return Run(outcomes, [seen[started_at] for started_at in sorted(seen)])


@contextmanager
def _router(engines: dict[str, BenchEngine], options: Sequence[str]) -> Iterator[str]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_ext.cli", "router", "--pd-disaggregation", "--port", str(port)),
        *("--prefill-short", engines["short"].url, str(engines["short"].bootstrap_port)),
        *("--prefill-long", engines["long"].url, str(engines["long"].bootstrap_port)),
        *("--decode", engines["decode"].url, "--length-boundary-tokens", str(BOUNDARY_TOKENS)),
        *("--log-level", "warning", *options),
    ]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + 60.0
        while True:
            try:
                _get(url + "/readyz")
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise EngineStartError("the router did not start") from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as reply:
        body = reply.read()
    try:
        return json.loads(body)
    except ValueError:
        return body


def _violations(run: Run, idle: IdleTtft) -> int:
    return sum(
        one.ttft_s is None or one.ttft_s > idle.objective_s(one.arrival.prompt_tokens, 1.0) for one in run.outcomes
    )


def _settle_s(moves: Sequence[Move], turns_s: Sequence[float]) -> float:
    """The longest time from a turn of the load to the last move before the next one; 0 without moves."""
    longest_s = 0.0
    for number, turn_s in enumerate(turns_s):
        end_s = turns_s[number + 1] if number + 1 < len(turns_s) else float("inf")
        longest_s = max([longest_s, *(move.at_s - turn_s for move in moves if turn_s <= move.at_s < end_s)])
    return longest_s


def _print_run(name: str, run: Run, phases: Sequence[Phase], turns_s: Sequence[float]) -> None:
    for phase, turn_s in zip(phases, turns_s, strict=True):
        within = [one for one in run.outcomes if turn_s <= one.arrival.at_s < turn_s + phase.duration_s]
        cells = []
        for is_long in (False, True):
            times = [one.ttft_s for one in within if one.arrival.is_long is is_long and one.ttft_s is not None]
            label = "long" if is_long else "short"
            cells.append(f"{label} P50 {percentile(times, 0.5):.2f} s, P90 {percentile(times, 0.9):.2f} s")
        progress(f"{name:<11}{phase.name:<18}{len(within):>5} requests; {'; '.join(cells)}")
    for move in run.moves:
        progress(f"{name:<11}at {move.at_s:.0f} s an instance moves {move.source} -> {move.target}: {move.outcome}")


def _draw(path: Path, runs: dict[str, Run], turns_s: Sequence[float]) -> None:
    """TTFT of every request by its arrival, static above, controller below, with its moves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 6.6), sharex=True, sharey=True)
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        for is_long, colour in ((False, "tab:blue"), (True, "tab:orange")):
            points = [
                (one.arrival.at_s, one.ttft_s)
                for one in run.outcomes
                if one.arrival.is_long is is_long and one.ttft_s is not None
            ]
            axis.scatter(*zip(*points, strict=True), s=6, color=colour, label="long" if is_long else "short")
        for turn_s in turns_s[1:]:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--full", action="store_true", help="twice as long")
    parser.add_argument(
        "--data", type=Path, default=here.parent.parent / "shared" / "data", help="folder with the traces"
    )
    parser.add_argument("--out", type=Path, default=here / "out", help="folder for picture and JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
