"""`sglang-ext size` against real SGLang: the layout that it finds and the next cheaper one, both served.

    python bench/size_reality.py [--requests 200] [--rounds 2] [--data FOLDER] [--out FOLDER]

A prefill and a decode instance of a random Llama are measured by `sglang-ext profile`. A trace of short and long
prompts is given the lowest rate at which, by the profile, one prefill instance breaks its objectives even at 0.9 of it
and some layout of two holds them at 1.1. `sglang-ext size` then searches the cheapest layout for this trace, and
`sglang-ext up` serves the file that it wrote, each prefill instance on a core of its own, everything else on both. The
one layout that is cheaper, a single prefill instance, is served in the same way. Both get the trace `--rounds` times.

The speed of a shared machine changes. A few points of the profile are measured again before and after each replay: how
much longer they take is how much slower the machine was, and the layouts are simulated once more with all their times
that much longer, the objectives as they were.

Writes `size-reality.json`, the profile and what `size` writes; the last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import yaml

from sglang_ext.cluster.cluster_file import dump_cluster, load_cluster
from sglang_ext.cluster.config import ClusterConfig, PoolConfig
from sglang_ext.cluster.state import STATE_FILE
from sglang_ext.planner.sizing import size
from sglang_ext.planner.sizing.deployment import DeployedModel, cluster_config
from sglang_ext.planner.sizing.load_trial import ClusterLayout, LoadTrial, ServiceObjective, TrialSetup, run_load_trial
from support.engines import BenchEngine, EngineStartError
from support.mixed_load import Arrival, Outcome, Replayer, TraceMix, load_mix, percentile
from support.random_model import RandomLlama, build_random_llama
from support.reality import SpeedProbe, busy_core, pin_scheduler, slowed
from support.result import BenchmarkRun, benchmark_parser, give_up, progress

MODEL = RandomLlama(layers=8, hidden=512, heads=8, kv_heads=2)
LEAST_SHORT_TOKENS = 64
LONG_RANGE_TOKENS = (1024, 2048)
LONG_SHARE = 0.1
BOUNDARY_TOKENS = 512
OUTPUT_TOKENS = 1  # decode does next to nothing: two cores are shared by all
CACHED_TOKENS = (0, 256, 512, 1024)
WARM_UP_PROMPTS = (70, 150, 250, 1100, 2000)
LONG_STRETCH = 3.0
SHORT_STRETCH = 5.0  # the objective of short prompts, over what the longest of them takes on an idle instance
ATTAINMENT = 0.9
HEADROOM = 1.1
RATES = tuple(0.5 + 0.05 * step for step in range(14))  # offered load that is tried, in prefill instances
START_TIMEOUT_S = 240.0


class Measurement(NamedTuple):
    """Describes what one layout was predicted to do and did: shares in time and quantiles by objective."""

    layout: ClusterLayout
    predicted: dict[str, dict[str, float]]
    at_speed: dict[str, dict[str, float]]
    measured: dict[str, dict[str, float]]
    slowdown: float
    failed: int

    def holds(self, figures: dict[str, dict[str, float]]) -> bool:
        return all(figure["attainment"] >= ATTAINMENT for figure in figures.values())

    def as_json(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "layout": self.layout.describe(),
            "gpus": self.layout.gpus,
            "predicted": {"holds": self.holds(self.predicted), **self.predicted},
            "predicted_at_speed": {"holds": self.holds(self.at_speed), **self.at_speed},
            "measured": {"holds": self.holds(self.measured), **self.measured},
            "slowdown": round(self.slowdown, 3),
            "failed": self.failed,
        }


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed: one for each prefill instance")
    benchmark = BenchmarkRun("sglang", "torch")
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, 1, LEAST_SHORT_TOKENS)
    arguments.out.mkdir(parents=True, exist_ok=True)
    profile = arguments.out / "size-reality-profile.json"
    progress(f"model: {MODEL}, float32; workload: {mix.describe(LONG_SHARE)}")
    try:
        with tempfile.TemporaryDirectory(prefix="size-reality-") as scratch, ExitStack() as stack:
            engines = _start(Path(scratch), stack)
            with busy_core(cores[1]):
                _pin(engines, cores)
                _profile(engines, profile)
                probe = SpeedProbe(engines["both"].url, engines["decode"].url)
            os.sched_setaffinity(0, set(cores))
            sizing, arrivals, options = _trace(mix, arguments.requests, profile, Path(scratch))
            layout = _search(options, arguments.out)
            cheaper = ClusterLayout(BOUNDARY_TOKENS, 1, 1, 0, 0, 1, 1)
            if layout.gpus <= cheaper.gpus:
                give_up("the search found a layout of one prefill instance, which does not hold by the same profile")
            written = load_cluster(arguments.out / "sized" / "cluster.yaml")
            measurements = []
            for one, config in (
                (layout, written),
                (cheaper, cluster_config(cheaper, sizing.model, sizing.setup.targets)),
            ):
                served = _for_this_machine(config, sizing.model, cores, Path(scratch))
                measurements.append(_measure(one, served, sizing.setup, arrivals, probe, arguments.rounds))
    except EngineStartError as error:
        give_up(str(error))
    result = {
        "requests": len(arrivals) * arguments.rounds,
        "rate_per_s": round((len(arrivals) - 1) / arrivals[-1].at_s, 3),
        "slo_short_ms": round(1e3 * sizing.setup.targets.short_ttft_s, 1),
        "slo_long_stretch": LONG_STRETCH,
        "attainment": ATTAINMENT,
        "headroom": HEADROOM,
        "verdicts_agree": all(
            measurement.holds(measurement.predicted) == measurement.holds(measurement.measured)
            for measurement in measurements
        ),
        "verdicts_agree_at_speed": all(
            measurement.holds(measurement.at_speed) == measurement.holds(measurement.measured)
            for measurement in measurements
        ),
        "failed": sum(measurement.failed for measurement in measurements),
        "chosen": measurements[0].as_json(),
        "cheaper": measurements[1].as_json(),
    }
    progress(f"wrote size-reality.json, size-reality-profile.json and sized/ in {arguments.out}")
    benchmark.end(result, arguments.out / "size-reality.json")


def _start(scratch: Path, stack: ExitStack) -> dict[str, BenchEngine]:
    model = scratch / "model"
    model.mkdir()
    build_random_llama(MODEL, model)
    engines = {}
    for role, worker_options in (("decode", ()), ("both", ("--laps-mode", "off"))):
        engines[role] = BenchEngine.start(role, model, scratch, worker_options=worker_options)
        stack.callback(engines[role].stop)
    for engine in engines.values():
        engine.wait_ready()
        stack.callback(engine.terminate)
    return engines


def _pin(engines: dict[str, BenchEngine], cores: Sequence[int]) -> None:
    """Pin the measured scheduler to the first core with nothing else on it, as when it serves."""
    os.sched_setaffinity(0, {cores[1]})
    for engine in engines.values():
        engine.pin({cores[1]})
    pin_scheduler(engines["both"], {cores[0]})
    replayer = Replayer(engines["decode"].url, MODEL.vocabulary, OUTPUT_TOKENS, engines["both"])
    replayer.run_closed([*WARM_UP_PROMPTS] * 4, 4, seed=1)


def _profile(engines: dict[str, BenchEngine], path: Path) -> None:
    command = [sys.executable, "-m", "sglang_ext.cli", "profile", "--url", engines["both"].url]
    command += ["--decode", engines["decode"].url, "--out", str(path), "--set", "output.accept_bad_fit=true", "--set"]
    command.append("points.cached_tokens=" + ",".join(map(str, CACHED_TOKENS)))
    path.with_name(path.name + ".partial").unlink(missing_ok=True)
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        give_up(f"the profile failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    progress(done.stdout.rstrip())


def _trace(mix: TraceMix, requests: int, profile: Path, scratch: Path) -> tuple[size.Sizing, list[Arrival], list[str]]:
    """The trace at the lowest rate that is of use here, as a file, and the options of `size` for it."""
    one = ClusterLayout(BOUNDARY_TOKENS, 1, 1, 0, 0, 1, 1)
    two = (ClusterLayout(BOUNDARY_TOKENS, 1, 1, 1, 1, 0, 1), one._replace(both=2))
    file = scratch / "trace.csv"
    for load in RATES:
        rate_per_s = load / _work_s(mix, profile)
        arrivals = mix.arrivals(rate_per_s, requests / rate_per_s, LONG_SHARE, seed=1)
        with file.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.writer(opened)
            writer.writerow(["arrived_at", "num_prefill_tokens", "num_decode_tokens"])
            writer.writerows((arrival.at_s, arrival.prompt_tokens, OUTPUT_TOKENS) for arrival in arrivals)
        options = _options(file, profile)
        sizing = size.read_sizing(_parsed(options))
        is_enough = any(run_load_trial(sizing.setup, LoadTrial(layout, HEADROOM)).holds for layout in two)
        if is_enough and not run_load_trial(sizing.setup, LoadTrial(one, 0.9)).holds:
            progress(f"{len(arrivals)} requests at {rate_per_s:.2f}/s, {load:.2f} of a prefill instance's work")
            return sizing, arrivals, options
    raise EngineStartError("at no rate does one prefill instance break its objectives while two hold them")


def _options(trace: Path, profile: Path) -> list[str]:
    engine = size.sized_engine(str(profile))
    short_ms = 1e3 * SHORT_STRETCH * engine.alone_s(256)
    scenario = trace.with_name("scenario.yaml")
    content = {
        "workload": {"file": str(trace)},
        "objectives": {
            "short_ms": round(short_ms, 1),
            "long_stretch": LONG_STRETCH,
            "attainment": ATTAINMENT,
            "headroom": HEADROOM,
        },
        "search": {
            "profiles": str(profile),
            "boundary_tokens": BOUNDARY_TOKENS,
            "max_gpus": 3,
            "processes": 1,
        },
    }
    scenario.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return [str(scenario)]


def _work_s(mix: TraceMix, profile: Path) -> float:
    """Mean time of a prompt's own iterations on an idle instance."""
    engine = size.sized_engine(str(profile))
    return mean(engine.compute_s(arrival.prompt_tokens) for arrival in mix.arrivals(100.0, 10.0, LONG_SHARE, seed=1))


def _parsed(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    size.add_arguments(parser)
    return size.with_settings(parser.parse_args(options))


def _search(options: Sequence[str], out: Path) -> ClusterLayout:
    """The cheapest layout, by the command as a user gives it."""
    folder = out / "sized"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "sglang_ext.cli", "size", *options, "--out", str(folder)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        give_up(f"the search failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    progress(done.stdout.rstrip())
    best = json.loads((folder / "layouts.json").read_text(encoding="utf-8"))["layouts"][0]
    return ClusterLayout(*(best[name] for name in ClusterLayout._fields))


def _for_this_machine(
    config: ClusterConfig, model: DeployedModel, cores: Sequence[int], scratch: Path
) -> ClusterConfig:
    """The cluster with a core for each prefill instance, and without a tokenizer, which the model has not."""
    free = [str(core) for core in cores]
    pools = {}
    for role, pool in config.pools.by_role():
        pinned: PoolConfig = pool
        if role.is_prefill and pool.count:
            pinned = replace(pool, cores=tuple(free[: pool.count]), threads=1)
            free = free[pool.count :]
        elif pool.count:
            pinned = replace(pool, threads=1)
        pools[role.value] = pinned
    return replace(
        config,
        model=model.name,
        name="size-reality",
        run_dir=str(scratch / "run"),
        pools=replace(config.pools, **pools),
        args=("--skip-tokenizer-init", "--log-level", "warning"),
        router=replace(config.router, port=0),
    )


def _measure(
    layout: ClusterLayout,
    config: ClusterConfig,
    setup: TrialSetup,
    arrivals: Sequence[Arrival],
    probe: SpeedProbe,
    rounds: int,
) -> Measurement:
    deadlines_s = setup.deadlines_s()
    slowdowns = [probe.slowdown()]
    outcomes: list[Outcome] = []
    with _served(config) as url:
        replayer = Replayer(url, MODEL.vocabulary, OUTPUT_TOKENS)
        replayer.run_closed([*WARM_UP_PROMPTS] * 8, 4, seed=1)
        for number in range(rounds):
            outcomes += replayer.run(arrivals, seed=10 + number)
    slowdowns.append(probe.slowdown())
    slowdown = mean(slowdowns)
    times_s: dict[ServiceObjective, list[tuple[float, float]]] = {}
    for position, outcome in enumerate(outcomes):
        deadline_s, objective = deadlines_s[position % len(deadlines_s)]
        ttft_s = float("inf") if outcome.ttft_s is None else outcome.ttft_s
        times_s.setdefault(objective, []).append((ttft_s, deadline_s))
    measured = {
        objective.value: {
            "attainment": round(mean(ttft_s <= deadline_s for ttft_s, deadline_s in times), 4),
            "p50_s": round(percentile([ttft_s for ttft_s, _ in times], 0.5), 4),
            "p90_s": round(percentile([ttft_s for ttft_s, _ in times], 0.9), 4),
        }
        for objective, times in times_s.items()
    }
    slow = {tp: engine._replace(costs=slowed(engine.costs, slowdown)) for tp, engine in setup.engines.items()}
    at_speed = TrialSetup(setup.requests, slow, setup.decode, setup.targets, setup.engines[min(setup.engines)])
    one = Measurement(
        layout,
        _predicted(setup, layout),
        _predicted(at_speed, layout),
        measured,
        slowdown,
        sum(outcome.ttft_s is None for outcome in outcomes),
    )
    progress(json.dumps(one.as_json()))
    return one


def _predicted(setup: TrialSetup, layout: ClusterLayout) -> dict[str, dict[str, float]]:
    verdict = run_load_trial(setup, LoadTrial(layout, 1.0, is_complete=True))
    return {
        objective.value: {
            "attainment": round(1.0 - figures.late / figures.requests, 4),
            "p50_s": round(figures.p50_s, 4),
            "p90_s": round(figures.p90_s, 4),
        }
        for objective, figures in verdict.figures.items()
        if objective is not ServiceObjective.TIME_PER_TOKEN
    }


@contextmanager
def _served(config: ClusterConfig) -> Iterator[str]:
    """The router's address of a cluster that `sglang-ext up` has brought up."""
    file = Path(config.run_dir).parent / "served.yaml"
    file.write_text(dump_cluster(config), encoding="utf-8")
    output = file.with_suffix(".log")
    with output.open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "sglang_ext.cli", "up", "--config", str(file)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    state = config.folder / STATE_FILE
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            programs = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {"programs": []}
            if programs["programs"] and all(program["phase"] == "ready" for program in programs["programs"]):
                break
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise EngineStartError(f"the cluster did not start: {output.read_text(encoding='utf-8')[-500:]}")
            time.sleep(0.5)
        yield str(programs["url"])
    finally:
        process.terminate()
        process.wait(60)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_traces=True)
    parser.add_argument("--requests", type=int, default=200, help="requests of the trace (default: 200)")
    parser.add_argument("--rounds", type=int, default=2, help="replays for each layout (default: 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
