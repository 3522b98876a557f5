"""Chat prompts and long ones: every request divided, against the router's choice of the way.

    python bench/plain_or_divided.py [--full | --trial] [--data FOLDER] [--out FOLDER]

Real SGLang on two cores: a prefill instance on one, a decode and an undivided instance on the other. Both systems have
the same three instances and the same router; they differ in one option:

* **divided**: `--max-local-prefill-length 1`, every request takes two legs;
* **chosen**: the default, short prompts go undivided where that is predicted to be sooner.

Rounds are interleaved, each with the same lengths and arrivals and with other tokens. Writes `plain-or-divided.json`;
the last line is `RESULT {json}`: `short_ttft_p50_ratio` (aim at most 0.7) and `long_p90_ratio` (at most 1.05), chosen
over divided, and how many requests went undivided.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from support.engines import BenchEngine, EngineStartError, running_router
from support.mixed_load import Outcome, Replayer, TraceMix, load_mix, percentile
from support.random_model import RandomLlama, build_random_llama
from support.result import BenchmarkRun, benchmark_parser, give_up, progress

MODEL = RandomLlama(layers=8, hidden=512, heads=8, kv_heads=2)
LEAST_SHORT_TOKENS = 16
LONG_RANGE_TOKENS = (1024, 2048)
OUTPUT_TOKENS = 16
BOUNDARY_TOKENS = 512
LONG_SHARE = 0.15
LOAD = 0.5  # of what the prefill instance can do
DIVIDED, CHOSEN = "divided", "chosen"
SYSTEMS = {DIVIDED: ("--max-local-prefill-length", "1"), CHOSEN: ()}
_PLAIN_EVENTS = 'sglang_ext_router_events_total{event="plain"}'


class Round(NamedTuple):
    """One service of the workload."""

    outcomes: list[Outcome]
    plain: int  # requests that went undivided


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed")
    benchmark = BenchmarkRun("sglang", "torch")
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, 1, LEAST_SHORT_TOKENS)
    rounds, duration_s = (1, 15.0) if arguments.trial else (8, 60.0) if arguments.full else (4, 45.0)
    progress(f"model: {MODEL}, float32; workload: {mix.describe(LONG_SHARE)}")
    try:
        with tempfile.TemporaryDirectory(prefix="plain-or-divided-") as scratch:
            runs, rate_per_s = _measure(Path(scratch), cores, mix, rounds, duration_s)
    except EngineStartError as error:
        give_up(str(error))
    for name, served in runs.items():
        short, long = (_ttfts_s(served, is_long=is_long) for is_long in (False, True))
        progress(
            f"{name:<9} short P50 {percentile(short, 0.5):.3f} s, P90 {percentile(short, 0.9):.3f} s; "
            f"long P50 {percentile(long, 0.5):.3f} s, P90 {percentile(long, 0.9):.3f} s; "
            f"{sum(one.plain for one in served)} undivided of {sum(len(one.outcomes) for one in served)}"
        )
    result = {
        "short_ttft_p50_ratio": _ratio(runs, 0.5, is_long=False),
        "short_ttft_p90_ratio": _ratio(runs, 0.9, is_long=False),
        "long_p50_ratio": _ratio(runs, 0.5, is_long=True),
        "long_p90_ratio": _ratio(runs, 0.9, is_long=True),
        "undivided": {name: sum(one.plain for one in served) for name, served in runs.items()},
        "requests": {name: sum(len(one.outcomes) for one in served) for name, served in runs.items()},
        "failed": sum(one.ttft_s is None for served in runs.values() for each in served for one in each.outcomes),
        "rounds": rounds,
        "rate_per_s": round(rate_per_s, 3),
        "long_share": LONG_SHARE,
        "output_tokens": OUTPUT_TOKENS,
        "workload": mix.describe(LONG_SHARE),
    }
    benchmark.end(result, arguments.out / "plain-or-divided.json")


def _measure(
    scratch: Path, cores: Sequence[int], mix: TraceMix, rounds: int, duration_s: float
) -> tuple[dict[str, list[Round]], float]:
    """Return the rounds of each system, and the requests per second that were sent."""
    model = scratch / "model"
    model.mkdir()
    build_random_llama(MODEL, model)
    with ExitStack() as stack:
        engines = {}
        for role in ("both", "decode", "plain"):
            boundary = ("--laps-boundary-tokens", str(BOUNDARY_TOKENS)) if role == "both" else ()
            engines[role] = BenchEngine.start(role, model, scratch, worker_options=boundary)
            stack.callback(engines[role].stop)
        stack.callback(lambda: [engine.terminate() for engine in engines.values()])
        for engine in engines.values():
            engine.wait_ready()
        engines["both"].pin({cores[0]})
        engines["decode"].pin({cores[1]})
        engines["plain"].pin({cores[1]})
        progress("a prefill, a decode and an undivided instance are up")
        rate_per_s = LOAD * _capacity_per_s(engines, mix)
        runs: dict[str, list[Round]] = {name: [] for name in SYSTEMS}
        for number in range(rounds):
            arrivals = mix.arrivals(rate_per_s, duration_s, LONG_SHARE, seed=number)
            names = list(SYSTEMS) if number % 2 == 0 else list(SYSTEMS)[::-1]
            for place, name in enumerate(names):
                with running_router([*_router_options(engines), *SYSTEMS[name]], len(engines)) as url:
                    replayer = Replayer(url, MODEL.vocabulary, OUTPUT_TOKENS)
                    outcomes = replayer.run(arrivals, seed=1000 + 2 * number + place)
                    runs[name].append(Round(outcomes, _plain_requests(url)))
                progress(f"round {number + 1} of {rounds}: {name}, {len(outcomes)} requests")
    return runs, rate_per_s


def _capacity_per_s(engines: dict[str, BenchEngine], mix: TraceMix) -> float:
    """Return the requests per second that the pair serves, eight at a time."""
    replayer = Replayer(engines["decode"].url, MODEL.vocabulary, OUTPUT_TOKENS, engines["both"])
    prompts = [arrival.prompt_tokens for arrival in mix.arrivals(4.0, 10.0, LONG_SHARE, seed=77)]
    replayer.run_closed(prompts[:8], 4, seed=1)
    Replayer(engines["plain"].url, MODEL.vocabulary, OUTPUT_TOKENS).run_closed(prompts[:8], 4, seed=2)
    return len(prompts) / replayer.run_closed(prompts, 8, seed=3)


def _router_options(engines: dict[str, BenchEngine]) -> Sequence[str]:
    return (
        *("--prefill", engines["both"].url, str(engines["both"].bootstrap_port)),
        *("--decode", engines["decode"].url, "--plain", engines["plain"].url),
        *("--length-boundary-tokens", str(BOUNDARY_TOKENS)),
    )


def _plain_requests(url: str) -> int:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_PLAIN_EVENTS)))


def _ttfts_s(rounds: Sequence[Round], *, is_long: bool) -> list[float]:
    return [
        outcome.ttft_s
        for each in rounds
        for outcome in each.outcomes
        if outcome.ttft_s is not None and outcome.arrival.is_long is is_long
    ]


def _ratio(runs: dict[str, list[Round]], share: float, *, is_long: bool) -> float:
    chosen, divided = (percentile(_ttfts_s(runs[name], is_long=is_long), share) for name in (CHOSEN, DIVIDED))
    return round(chosen / divided, 3)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_traces=True)
    parser.add_argument("--trial", action="store_true", help="one round of 15 s, to see that it works")
    parser.add_argument("--full", action="store_true", help="twice as many rounds, and longer ones")
    return parser.parse_args()


if __name__ == "__main__":
    main()
