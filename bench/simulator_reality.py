"""The simulator against real SGLang: the same requests on a prefill instance and on its profile.

    python bench/simulator_reality.py [--requests 250] [--rounds 3] [--load 0.6] [--data FOLDER] [--out FOLDER]

One decode instance and two prefill instances of a random Llama, one with SGLang's own FCFS and one with LAPS, each of
only their schedulers on the first core (one works at a time), everything else on the second. A program of idle
priority fills what is left of the second core throughout: cores of a virtual machine share clock and caches, and the
first would be faster while the profile is made than while clients are busy. The FCFS instance is measured by
`sglang-ext profile` (with the hand-over to decode). Then both serve the same short and long prompts at the same
times, in turns and for several rounds of other arrivals, and so does the simulator with the profile and the same
policies. The distributions of all rounds together are compared.

The speed of a shared machine changes. After the profile, and before and after each replay, a few points are measured:
what they take at the replay, over what they took after the profile, is how much slower the machine was. The simulation
is run with the profile as it is, and with all its times multiplied by that one number. What other programs took of the
scheduler's core meanwhile is reported.

Writes `simulator-reality.json`, `simulator-reality.png` and the profile; the last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from support.engines import BenchEngine, EngineStartError
from support.mixed_load import Arrival, Replayer, load_mix
from support.random_model import RandomLlama, build_random_llama
from support.reality import (
    POLICIES,
    Comparison,
    Measured,
    SchedulerTime,
    SpeedProbe,
    busy_core,
    compare,
    draw_comparisons,
    offered_work_s,
    pin_scheduler,
    simulated_ttfts_s,
)
from support.result import BenchmarkRun, benchmark_parser, give_up, progress

MODEL = RandomLlama(layers=6, hidden=384, heads=6, kv_heads=2)
LONG_SHARE = 0.1
LONG_RANGE_TOKENS = (1024, 4096)
DIVIDE_LENGTHS_BY = 2
OUTPUT_TOKENS = 1  # a decode step holds up the handshake of the next request; the simulator does not know that
CACHED_TOKENS = (0, 256, 512, 1024, 1792)  # prompts of the workload have up to 2,048
WARM_UP_PROMPTS = (8, 40, 200, 700)


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed: one for the scheduler, one for everything else")
    benchmark = BenchmarkRun("sglang", "torch")
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, DIVIDE_LENGTHS_BY)
    progress(f"model: {MODEL}, float32; workload: {mix.describe(LONG_SHARE)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    profile_path = arguments.out / "simulator-reality-profile.json"
    try:
        with tempfile.TemporaryDirectory(prefix="simulator-reality-") as scratch, ExitStack() as stack:
            stack.enter_context(busy_core(cores[1]))
            engines = _start(Path(scratch), cores, stack)
            _profile(engines["fcfs"], engines["decode"], profile_path)
            probe = SpeedProbe(engines["fcfs"].url, engines["decode"].url)
            measured = Measured.of(profile_path)
            work_s = offered_work_s(measured, mix.arrivals(100.0, 10.0, LONG_SHARE, seed=1))
            rate_per_s = arguments.load / work_s
            progress(f"{arguments.requests} requests a round at {rate_per_s:.2f}/s, {1e3 * work_s:.0f} ms of work each")
            rounds: dict[str, list[Comparison]] = {policy: [] for policy in POLICIES}
            for seed in range(arguments.rounds):
                arrivals = mix.arrivals(rate_per_s, arguments.requests / rate_per_s, LONG_SHARE, seed)
                for policy, compared in rounds.items():
                    compared.append(_compare(policy, engines, measured, arrivals, probe))
            comparisons = [Comparison.of_all(compared) for compared in rounds.values()]
    except EngineStartError as error:
        give_up(str(error))
    for comparison in comparisons:
        progress(f"all rounds: {comparison.describe()}")
    draw_comparisons(comparisons, arguments.out / "simulator-reality.png")
    result = {
        "requests": sum(len(one.real_s) + one.failed for one in rounds["fcfs"]),
        "rounds": {policy: [one.as_json() for one in compared] for policy, compared in rounds.items()},
        "offered_load": arguments.load,
        "largest_deviation": max(comparison.largest_deviation for comparison in comparisons),
        "largest_deviation_at_speed": max(comparison.largest_deviation_at_speed for comparison in comparisons),
        "failed": sum(comparison.failed for comparison in comparisons),
        "policies": {comparison.policy: comparison.as_json() for comparison in comparisons},
        "fit": json.loads(profile_path.read_text(encoding="utf-8"))["fit"],
    }
    progress(f"wrote simulator-reality.json, .png and -profile.json in {arguments.out}")
    benchmark.end(result, arguments.out / "simulator-reality.json")


def _start(scratch: Path, cores: Sequence[int], stack: ExitStack) -> dict[str, BenchEngine]:
    """All instances, ready and pinned: each prefill scheduler on the first core, the rest on the second."""
    model = scratch / "model"
    model.mkdir()
    build_random_llama(MODEL, model)
    engines = {"decode": BenchEngine.start("decode", model, scratch)}
    stack.callback(engines["decode"].stop)
    for policy, worker_options in POLICIES.items():
        engines[policy] = BenchEngine.start("both", model, scratch, worker_options=worker_options)
        stack.callback(engines[policy].stop)
    for engine in engines.values():
        engine.wait_ready()
    # All at once: ending takes an instance some seconds.
    for engine in engines.values():
        stack.callback(engine.terminate)
    os.sched_setaffinity(0, {cores[1]})
    for engine in engines.values():
        engine.pin({cores[1]})
    for policy in POLICIES:
        pin_scheduler(engines[policy], {cores[0]})
        _replayer(engines[policy], engines["decode"]).run_closed([*WARM_UP_PROMPTS] * 4, 4, seed=1)
    progress("one decode and two prefill instances are up")
    return engines


def _profile(prefill: BenchEngine, decode: BenchEngine, path: Path) -> None:
    """Measure the instance as a user does. Torch's attention has a term that the papers' forms lack: see the docs."""
    command = [sys.executable, "-m", "sglang_ext.cli", "profile", "--url", prefill.url]
    command += ["--decode", decode.url, "--out", str(path), "--set", "output.accept_bad_fit=true", "--set"]
    command.append("points.cached_tokens=" + ",".join(map(str, CACHED_TOKENS)))
    path.with_name(path.name + ".partial").unlink(missing_ok=True)
    began_s = time.monotonic()
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        give_up(f"the profile failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    progress(done.stdout.rstrip())
    progress(f"measured in {time.monotonic() - began_s:.0f} s")


def _compare(
    policy: str,
    engines: dict[str, BenchEngine],
    measured: Measured,
    arrivals: Sequence[Arrival],
    probe: SpeedProbe,
) -> Comparison:
    before = probe.slowdown()
    since = SchedulerTime.of(engines[policy])
    outcomes = _replayer(engines[policy], engines["decode"]).run(arrivals, seed=3)
    waited_share = SchedulerTime.of(engines[policy]).waited_share(since)
    slowdown = (before + probe.slowdown()) / 2
    comparison = compare(
        policy,
        outcomes,
        simulated_ttfts_s(policy, measured, arrivals, 1.0),
        simulated_ttfts_s(policy, measured, arrivals, slowdown),
        slowdown,
        waited_share,
    )
    progress(comparison.describe())
    return comparison


def _replayer(prefill: BenchEngine, decode: BenchEngine) -> Replayer:
    return Replayer(decode.url, MODEL.vocabulary, OUTPUT_TOKENS, prefill)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_traces=True)
    parser.add_argument("--requests", type=int, default=250, help="requests of each replay (default: 250)")
    parser.add_argument("--rounds", type=int, default=3, help="replays of each policy (default: 3)")
    parser.add_argument("--load", type=float, default=0.6, help="offered load by the profile (default: 0.6)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
