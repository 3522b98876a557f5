"""Short and long prompts together on one prefill instance: SGLang's own schedulers and LAPS, the same requests.

    python bench/prefill_mix.py [--slow] [--full | --trial] [--seeds N] [--data FOLDER] [--out FOLDER]

One real prefill instance pinned to the first core, one decode instance and the client on the second, a random
Llama whose prefill is computation. Each policy has a prefill server of its own.

1. **Tuning.** Each of SGLang's policies has the chunk size that suits it best, of 256, 512, 1024 and 2048 tokens: the
   one with the lowest share of requests that miss their objective (in whole percent) at the near-saturated load, ties
   by the lower P90 of long prompts. All sizes serve one short workload, the best two a second one. Ours runs with its
   default options. (The papers' own batches are compared in simulated time: `bench/papers.py`.)
2. **Comparison.** Rounds of the near-saturated load, each with requests of its own: every policy serves them, one
   after the other in a changing order, and then a closed loop (sixteen requests in the system, the same prompts for
   all) shows what it can do at most. With `--full` under light and medium load, too.

Load is a share of what `fcfs` with SGLang's own chunk size does in a closed loop. A shared machine is not equally fast
at all times, so that is measured again before each run: arrivals are stretched by how much the machine has become
slower, and times are divided by it. A request's TTFT objective is the larger of 400 ms and five times what the prompt
takes on an idle instance.

With `--slow` the machine cannot hold the objective: a random Llama of SmolLM2-135M's shape on the first core, four in
five prompts of 16 to 64 tokens and the others of 512 to 1,024, one output token, Poisson arrivals. SGLang's policies
have fixed chunks (`SLOW_PEERS`). Every policy serves each rate and seed, one after the other; figures are over all
requests of a rate, each over the best of SGLang's, and the worst rate is reported. Without `--full` one rate and one
seed (8 minutes); with it three of each (an hour).

Intervals are those of 90% of bootstrap samples, of whole rounds. Writes `prefill-mix.png` and `prefill-mix.json`; the
last line is `RESULT {json}`. No round begins that would not end within 19 minutes (an hour with `--full`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from support.engines import BenchEngine, EngineStartError
from support.idle_ttft import IdleTtft, measure_idle_ttft
from support.mixed_load import Arrival, Outcome, Replayer, TraceMix, load_mix, percentile
from support.policy_comparison import (
    Figures,
    MachineSpeed,
    Round,
    Run,
    figures,
    headline,
    intervals,
    order_chunk_sizes,
)
from support.processor_time import OtherLoad
from support.random_model import RandomLlama, build_random_llama
from support.result import give_up, machine, print_result, progress, versions

MODEL = RandomLlama(layers=6, hidden=384, heads=6, kv_heads=2)
LONG_SHARE = 0.1
LONG_RANGE_TOKENS = (1024, 4096)
DIVIDE_LENGTHS_BY = 2  # torch's attention on one core takes seconds for 4,096 tokens
OUTPUT_TOKENS = 4
OURS = "laps"
REFERENCE = "fcfs"
PEERS: dict[str, tuple[str, ...]] = {  # SGLang's own, by engine arguments
    REFERENCE: (),
    "hrrn": ("--schedule-policy", "hrrn"),
    "shortest-prefill-first": ("--schedule-policy", "shortest-prefill-first"),
}
STOCK_CHUNK_TOKENS = 512
CHUNKS_TOKENS = (256, STOCK_CHUNK_TOKENS, 1024, 2048)
SLOW_MODEL = RandomLlama(layers=30, hidden=576, heads=9, kv_heads=3, vocabulary=49_152)
SLOW_PEERS: dict[str, tuple[str, ...]] = {
    "fcfs": ("--chunked-prefill-size", "512"),
    "hrrn": ("--schedule-policy", "hrrn", "--chunked-prefill-size", "256"),
    "shortest-prefill-first": ("--schedule-policy", "shortest-prefill-first", "--chunked-prefill-size", "256"),
}
SLOW_RATES_PER_S = (0.6, 1.0, 1.2)
SLOW_RUN_S, SLOW_CLOSED_PROMPTS = 60.0, 24
IN_SYSTEM = 16
TUNING_S = 8.0
END_S = 1140.0  # after the start


class Load(NamedTuple):
    """Describes how hard, as a share of the saturation rate, and for how long a round."""

    name: str
    share: float
    duration_s: float


NEAR = Load("near-saturated", 0.9, 12.0)
EASIER_LOADS = (Load("light", 0.4, 12.0), Load("medium", 0.65, 12.0))  # with --full


class Plan(NamedTuple):
    """Describes how much is measured."""

    seeds: int
    parts: int  # rounds of a load with one seed
    loads: tuple[Load, ...]
    chunks_tokens: tuple[int, ...]
    end_s: float  # after the start; rounds that would end later are left out


class Result(NamedTuple):
    """Describes what was measured, all policies by name."""

    rounds: dict[str, list[Round]]  # by load
    chunk_tokens: dict[str, int]  # of each peer
    tuning: list[dict[str, Any]]
    idle: IdleTtft
    saturation_per_s: float
    laps: Mapping[str, Any]  # the instance's `GET /laps` at the end


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    began_s = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed: one for the prefill instance, one for everything else")
    others, facts = OtherLoad(), machine()
    if arguments.slow:
        result = slow_machine(arguments, cores)
        result |= {"other_load_cores": round(others.mean_cores(), 2), "machine": facts}
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "prefill-mix-slow.json").write_text(json.dumps(result, indent=1) + "\n")
        print_result({name: value for name, value in result.items() if name != "table"})
        return
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, DIVIDE_LENGTHS_BY)
    progress(f"model: {MODEL}, float32; prefill on core {cores[0]}, the rest on core {cores[1]}")
    progress(f"workload: {mix.describe(LONG_SHARE)}; {OUTPUT_TOKENS} output tokens")
    try:
        with tempfile.TemporaryDirectory(prefix="prefill-mix-") as scratch, ExitStack() as stack:
            plan = _plan(arguments)
            bench = Bench(Path(scratch), cores, mix, stack, plan, began_s)
            measured = bench.run()
    except EngineStartError as error:
        give_up(str(error))
    table = {
        (policy, load): figures([one.runs[policy] for one in rounds], measured.idle)
        for load, rounds in measured.rounds.items()
        for policy in rounds[0].runs
    }
    capacity = {
        policy: median(one.capacity_per_s[policy] for one in measured.rounds[NEAR.name]) for policy in bench.policies
    }
    _print_table(table, capacity)
    arguments.out.mkdir(parents=True, exist_ok=True)
    _draw(arguments.out / "prefill-mix.png", measured)
    result = {
        **_headline(measured),
        "slo_violation_share": {policy: round(table[policy, NEAR.name].violation_share, 4) for policy in capacity},
        "failed": sum(row.failed for row in table.values()),
        "chunk_tokens": measured.chunk_tokens,
        "cost_error_p50": measured.laps["fit"]["error_p50"],
        "cost_error_p90": measured.laps["fit"]["error_p90"],
        "capacity_requests_per_s": {policy: round(value, 3) for policy, value in capacity.items()},
        "saturation_requests_per_s": round(measured.saturation_per_s, 3),
        "rounds": {load: len(rounds) for load, rounds in measured.rounds.items()},
        "duration_s": round(time.monotonic() - began_s, 1),
        "other_load_cores": round(others.mean_cores(), 2),
        "machine": facts,
        "versions": versions("sglang", "torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    details = {
        "table": [{"policy": policy, "load": load, **_rounded(row)} for (policy, load), row in table.items()],
        "tuning": measured.tuning,
        "slowdowns": {
            load: [{policy: round(run.slowdown, 3) for policy, run in one.runs.items()} for one in rounds]
            for load, rounds in measured.rounds.items()
        },
    }
    (arguments.out / "prefill-mix.json").write_text(json.dumps({**result, **details}, indent=1) + "\n")
    progress(f"wrote {arguments.out / 'prefill-mix.png'} and prefill-mix.json")
    print_result(result)


class Bench:
    """The servers, and everything that is measured at them."""

    def __init__(
        self, scratch: Path, cores: Sequence[int], mix: TraceMix, stack: ExitStack, plan: Plan, began_s: float
    ) -> None:
        self._scratch, self._cores, self._mix, self._stack = scratch, cores, mix, stack
        self._plan, self._began_s = plan, began_s
        self._model = scratch / "model"
        self._engines: list[BenchEngine] = []
        self._stock: dict[tuple[str, int], BenchEngine] = {}
        self._own: BenchEngine
        self.policies: dict[str, Replayer] = {}
        self._token_seed = 0

    def run(self) -> Result:
        """Tune the peers, then compare."""
        plan = self._plan
        candidates = self._start()
        self._reference = candidates[REFERENCE, STOCK_CHUNK_TOKENS]
        for replayer in (*candidates.values(), *self.policies.values()):
            self._warm_up(replayer)
        idle = measure_idle_ttft(self._reference)
        progress(f"idle TTFT: {idle}")
        self._first_per_s = median(self._saturation() for _ in range(3))
        self._speed = MachineSpeed(self._first_per_s)
        progress(f"{REFERENCE} with chunks of {STOCK_CHUNK_TOKENS} saturates at {self._first_per_s:.2f} requests/s")
        chunk_tokens, tuning = self._tune(candidates, idle)
        self.policies = {
            **{peer: candidates[peer, tokens] for peer, tokens in chunk_tokens.items()},
            **self.policies,
        }
        self._stop_all_but({*chunk_tokens.items(), (REFERENCE, STOCK_CHUNK_TOKENS)})
        round_s = 0.0  # the last one
        rounds: dict[str, list[Round]] = {load.name: [] for load in plan.loads}
        for number, (part, seed, load) in enumerate(product(range(plan.parts), range(plan.seeds), plan.loads)):
            passed_s = time.monotonic() - self._began_s
            if passed_s + round_s > plan.end_s and all(rounds.values()):
                progress("no time for more rounds")
                break
            progress(f"{load.name}, seed {seed}, part {part + 1}, after {passed_s:.0f} s")
            rounds[load.name].append(self._round(number, load, 10 * seed + part))
            round_s = time.monotonic() - self._began_s - passed_s
        return Result(rounds, chunk_tokens, tuning, idle, self._first_per_s, self._own.get("/laps"))

    def _start(self) -> dict[tuple[str, int], Replayer]:
        """All servers. The peers' come back by policy and chunk size, the others are in `policies`."""
        self._model.mkdir()
        build_random_llama(MODEL, self._model)
        # At the end all at once: ending takes an instance some seconds.
        self._stack.callback(lambda: [engine.terminate() for engine in self._engines])
        decode = self._engine("decode")
        self._stock = {
            (peer, tokens): self._engine(
                "both",
                ("--laps-mode", "off"),
                (*arguments, "--chunked-prefill-size", str(tokens)),
            )
            for peer, arguments in PEERS.items()
            for tokens in self._plan.chunks_tokens
        }
        self._own = self._engine("both", ("--laps-mode", "both"))
        for engine in self._engines:
            engine.wait_ready()
        for prefill in (*self._stock.values(), self._own):
            prefill.pin({self._cores[0]})
        decode.pin({self._cores[1]})
        os.sched_setaffinity(0, {self._cores[1]})
        progress(f"{len(self._stock) + 1} prefill instances and one decode instance are up")

        def replayer(prefill: BenchEngine) -> Replayer:
            return Replayer(decode.url, MODEL.vocabulary, OUTPUT_TOKENS, prefill)

        self.policies = {OURS: replayer(self._own)}
        return {key: replayer(engine) for key, engine in self._stock.items()}

    def _engine(
        self, role: str, worker_options: Sequence[str] = (), engine_arguments: Sequence[str] = ()
    ) -> BenchEngine:
        engine = self._stack.enter_context(_engine(role, self._model, self._scratch, worker_options, engine_arguments))
        self._engines.append(engine)
        return engine

    def _stop_all_but(self, kept: set[tuple[str, int]]) -> None:
        """An idle server takes a percent of a core."""
        rest = [engine for key, engine in self._stock.items() if key not in kept]
        for engine in rest:
            engine.terminate()
        for engine in rest:
            engine.stop()

    def _warm_up(self, replayer: Replayer) -> None:
        count_s = 10.0 if replayer in self.policies.values() else 3.0  # ours learns what iterations cost
        self._closed(replayer, count_s, seed=999, in_system=8)

    def _closed(self, replayer: Replayer, count_s: float, seed: int, in_system: int = IN_SYSTEM) -> float:
        """Measure requests per second with this number of the mix in the system; prompts are new each time."""
        prompts = [arrival.prompt_tokens for arrival in self._mix.arrivals(10.0, count_s, LONG_SHARE, seed)]
        self._token_seed += 1
        return len(prompts) / replayer.run_closed(prompts, in_system, 1_000_000 + self._token_seed)

    def _saturation(self) -> float:
        return self._closed(self._reference, 5.0, seed=500)

    def _open(self, replayer: Replayer, load: Load, seed: int, token_seed: int) -> Run:
        """One open-loop run, at the speed that the machine has now."""
        slowdown = self._speed.observe(self._saturation())
        arrivals = self._mix.arrivals(load.share * self._first_per_s, load.duration_s, LONG_SHARE, seed)
        stretched = [arrival._replace(at_s=arrival.at_s * slowdown) for arrival in arrivals]
        return Run(replayer.run(stretched, seed=token_seed), slowdown)

    def _tune(
        self, candidates: Mapping[tuple[str, int], Replayer], idle: IdleTtft
    ) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """The chunk size of each peer, and all that was tried."""
        load = NEAR._replace(duration_s=TUNING_S)
        runs: dict[tuple[str, int], list[Run]] = {key: [] for key in candidates}
        best = {peer: list(self._plan.chunks_tokens) for peer in PEERS}
        for attempt, kept in enumerate((2, 1)):
            if attempt and time.monotonic() - self._began_s > self._plan.end_s / 2:
                progress("the machine is slow: no second look at chunk sizes")
                break
            # By chunk size first, so that a slow moment of the machine meets all policies.
            for tokens in self._plan.chunks_tokens:
                for peer in PEERS:
                    if tokens in best[peer]:
                        runs[peer, tokens].append(
                            self._open(candidates[peer, tokens], load, seed=300 + attempt, token_seed=300 + attempt)
                        )
            for peer in PEERS:
                tried = {tokens: figures(runs[peer, tokens], idle) for tokens in best[peer]}
                best[peer] = order_chunk_sizes(tried)[:kept]
        rows = [
            {"policy": peer, "chunk_tokens": tokens, "is_best": tokens == best[peer][0], **_rounded(row)}
            for (peer, tokens), row in ((key, figures(done, idle)) for key, done in runs.items())
        ]
        for row in rows:
            progress(
                f"  {row['policy']:<24}chunks of {row['chunk_tokens']:>4}: {row['violation_share']:.1%} late, short "
                f"P90 {row['short_p90_s']:.2f} s, long P90 {row['long_p90_s']:.2f} s{' *' if row['is_best'] else ''}"
            )
        return {peer: sizes[0] for peer, sizes in best.items()}, rows

    def _round(self, number: int, load: Load, seed: int) -> Round:
        order = list(self.policies)
        order = order[number % len(order) :] + order[: number % len(order)]
        runs: dict[str, Run] = {}
        capacity: dict[str, float] = {}
        for policy in order:
            # Tokens differ between rounds, so nothing is cached from an earlier one.
            runs[policy] = self._open(self.policies[policy], load, seed, token_seed=1000 * (number + 1))
            progress(f"  {policy:<24}{_brief(runs[policy])}")
        for policy in reversed(order):
            slowdown = self._speed.observe(self._saturation())
            capacity[policy] = self._closed(self.policies[policy], 8.0, seed=seed) * slowdown
        progress("  closed loop: " + ", ".join(f"{policy} {value:.2f}" for policy, value in capacity.items()))
        return Round(runs, capacity)


def slow_arrivals(rate_per_s: float, duration_s: float, seed: int) -> list[Arrival]:
    """Return Poisson arrivals of the load with `--slow`."""
    draw = random.Random(f"slow {seed}")
    arrivals: list[Arrival] = []
    at_s = draw.expovariate(rate_per_s)
    while at_s < duration_s:
        is_long = draw.random() < 0.2
        arrivals.append(Arrival(at_s, is_long, draw.randint(512, 1024) if is_long else draw.randint(16, 64)))
        at_s += draw.expovariate(rate_per_s)
    return arrivals


def slow_machine(arguments: argparse.Namespace, cores: Sequence[int]) -> dict[str, Any]:
    """Measure all policies at a load with objectives that the machine cannot hold."""
    rates, seeds = (SLOW_RATES_PER_S, arguments.seeds) if arguments.full else ((1.0,), 1)
    duration_s = 15.0 if arguments.trial else SLOW_RUN_S
    runs: dict[tuple[str, float], list[Outcome]] = {}
    capacity: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="prefill-mix-") as scratch, ExitStack() as stack:
        model = Path(scratch) / "model"
        model.mkdir()
        build_random_llama(SLOW_MODEL, model)
        decode = stack.enter_context(_engine("decode", model, Path(scratch)))
        servers = {OURS: stack.enter_context(_engine("both", model, Path(scratch), ("--laps-mode", "both")))}
        for peer, options in SLOW_PEERS.items():
            servers[peer] = stack.enter_context(_engine("both", model, Path(scratch), ("--laps-mode", "off"), options))
        for engine in (decode, *servers.values()):
            engine.wait_ready()
        decode.pin({cores[1]})
        for engine in servers.values():
            engine.pin({cores[0]})
        os.sched_setaffinity(0, {cores[1]})
        clients = {name: Replayer(decode.url, SLOW_MODEL.vocabulary, 1, engine) for name, engine in servers.items()}
        prompts = [arrival.prompt_tokens for arrival in slow_arrivals(1.0, 1e3, 99)][:SLOW_CLOSED_PROMPTS]
        for number, (seed, rate) in enumerate(product(range(seeds), rates)):
            order = list(clients)[number % len(clients) :] + list(clients)[: number % len(clients)]
            for name in order:
                outcomes = clients[name].run(slow_arrivals(rate, duration_s, seed), seed=number)
                runs.setdefault((name, rate), []).extend(outcomes)
                progress(f"rate {rate}, seed {seed}: {name:<24}{_brief(Run(outcomes, 1.0))}")
        for name in clients:
            capacity[name] = [len(prompts) / clients[name].run_closed(prompts, 8, seed=7) for _ in range(seeds)]
        laps = servers[OURS].get("/laps")
    table = [{"policy": name, "rate": rate, **_slow_figures(outcomes)} for (name, rate), outcomes in runs.items()]

    def over_best(figure: str) -> float:
        ratios = []
        for rate in rates:
            of_rate = {row["policy"]: row[figure] for row in table if row["rate"] == rate}
            ratios.append(of_rate[OURS] / min(of_rate[peer] for peer in SLOW_PEERS))
        return round(max(ratios), 3)

    return {
        "short_p90_over_best": over_best("short_p90_s"),
        "long_p90_over_best": over_best("long_p90_s"),
        "capacity_over_best": round(median(capacity[OURS]) / max(median(capacity[peer]) for peer in SLOW_PEERS), 3),
        "failed": sum(outcome.ttft_s is None for outcomes in runs.values() for outcome in outcomes),
        "cost_error_p50": laps["fit"]["error_p50"],
        "cost_error_p90": laps["fit"]["error_p90"],
        "laps": {name: laps[name] for name in ("boundary_tokens", "round_s", "fit")},
        "table": table,
        "versions": versions("sglang", "torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _slow_figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    times = {
        is_long: [
            300.0 if outcome.ttft_s is None else outcome.ttft_s
            for outcome in outcomes
            if outcome.arrival.is_long is is_long
        ]
        for is_long in (False, True)
    }
    return {
        f"{name}_p{round(100 * share)}_s": round(percentile(times[is_long], share), 3)
        for name, is_long in (("short", False), ("long", True))
        for share in (0.5, 0.9, 0.99)
    }


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


def _headline(measured: Result) -> dict[str, object]:
    """Each figure, and its interval under the same name in `intervals`."""
    rounds = measured.rounds[NEAR.name]

    def measure(some: Sequence[Round]) -> Any:
        return headline(some, OURS, tuple(PEERS), measured.idle)

    return {
        **{name: round(value, 3) for name, value in measure(rounds)._asdict().items()},
        "intervals": {
            name: [round(low, 3), round(high, 3)] for name, (low, high) in intervals(rounds, measure).items()
        },
    }


def _rounded(row: Figures) -> dict[str, Any]:
    return {name: round(value, 4) for name, value in row._asdict().items()}


def _brief(run: Run) -> str:
    times: dict[bool, list[float]] = {False: [], True: []}
    for outcome in run.outcomes:
        if outcome.ttft_s is not None:
            times[outcome.arrival.is_long].append(outcome.ttft_s / run.slowdown)
    return (
        f"{len(run.outcomes)} requests, short P90 {percentile(times[False], 0.9):.2f} s, long P90 "
        f"{percentile(times[True], 0.9):.2f} s, {sum(outcome.ttft_s is None for outcome in run.outcomes)} failed; "
        f"slowdown {run.slowdown:.2f}"
    )


def _print_table(table: Mapping[tuple[str, str], Figures], capacity: Mapping[str, float]) -> None:
    progress(
        f"\n{'load':<15}{'policy':<24}{'short P50':>10}{'P90':>7}{'P99':>7}{'long P50':>10}{'P90':>7}{'P99':>7}"
        f"{'req/s':>7}{'late':>7}{'capacity':>10}"
    )
    for (policy, load), row in table.items():
        progress(
            f"{load:<15}{policy:<24}{row.short_p50_s:>10.2f}{row.short_p90_s:>7.2f}{row.short_p99_s:>7.2f}"
            f"{row.long_p50_s:>10.2f}{row.long_p90_s:>7.2f}{row.long_p99_s:>7.2f}"
            f"{row.requests_per_s:>7.2f}{row.violation_share:>7.1%}{capacity[policy]:>10.2f}"
        )


def _draw(path: Path, measured: Result) -> None:
    """TTFT distributions: a row per class, a column per load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    loads = list(measured.rounds)
    figure, axes = plt.subplots(2, len(loads), figsize=(max(6.0, 4.2 * len(loads)), 6.4), squeeze=False)
    for column, load in enumerate(loads):
        for row, is_long in enumerate((False, True)):
            axis = axes[row][column]
            for policy in measured.rounds[load][0].runs:
                times = sorted(
                    outcome.ttft_s / run.slowdown
                    for run in (one.runs[policy] for one in measured.rounds[load])
                    for outcome in run.outcomes
                    if outcome.arrival.is_long is is_long and outcome.ttft_s is not None
                )
                shares = [(position + 1) / len(times) for position in range(len(times))]
                tokens = measured.chunk_tokens.get(policy)
                label = policy if tokens is None else f"{policy}, chunks of {tokens}"
                axis.step(times, shares, where="post", label=label, linewidth=2.2 if policy == OURS else 1.2)
            axis.set_xscale("log")
            axis.set_ylim(0, 1.02)
            axis.grid(alpha=0.3)
            axis.set_title(f"{'long' if is_long else 'short'} prompts, {load}", fontsize=10)
            axis.set_xlabel("TTFT, s")
    axes[0][0].set_ylabel("share of requests")
    axes[1][0].set_ylabel("share of requests")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.trial:
        chunks_tokens = (STOCK_CHUNK_TOKENS, CHUNKS_TOKENS[-1])
        return Plan(1, 1, (NEAR._replace(duration_s=4.0),), chunks_tokens, END_S)
    if arguments.full:
        loads = (*EASIER_LOADS, NEAR)
        return Plan(2 * arguments.seeds, 2, loads, CHUNKS_TOKENS, 3.2 * END_S)
    return Plan(arguments.seeds, 2, (NEAR,), CHUNKS_TOKENS, END_S)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--slow", action="store_true", help="a load with objectives that the machine cannot hold")
    parser.add_argument("--trial", action="store_true", help="two minutes, to see that it works")
    parser.add_argument("--full", action="store_true", help="twice as many seeds, three loads; an hour")
    parser.add_argument("--seeds", type=int, default=3, help="seeds, each with two rounds of a load (default: 3)")
    parser.add_argument(
        "--data", type=Path, default=here.parent.parent / "shared" / "data", help="folder with the traces"
    )
    parser.add_argument("--out", type=Path, default=here / "out", help="folder for picture and JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
