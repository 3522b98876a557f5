"""Conversations over long documents, and chat prompts, on one pool and on its peers: real SGLang on two cores.

    python bench/one_pool.py [--full | --trial] [--out FOLDER]

Two prefill instances on a core each; decode, routers and the client on both. Four systems serve the same rounds, one
after the other, each with instances and a router of its own; of four rounds, each system is first in one:

* **one_pool**: both instances batch short prompts (LAPS), share long ones, and keep their KV for the next turn;
* **two_pools**: one instance for short prompts, one for long ones (`pool_spill` off);
* **laps**: LAPS on both, `cache_aware`;
* **stock**: SGLang's `shortest-prefill-first` with chunks of 256 tokens on both, `cache_aware`.

A round has conversations of three turns over documents of 2,000 to 6,000 tokens, and chat prompts of 10 to 200: 60% of
what both instances can do, where each computes while the other does. Then, on one_pool and on stock `fcfs` with chunks
of 1,024 tokens: a follow-up to a document that has been read, every second while two unknown prompts of 7,000 tokens
(one for each instance) are computed.

The requests of one_pool are also simulated, at the costs that its coordinator and instances know at the end of each
round, with batches that vary as they have measured, and with what surrounds the prefill of a chat prompt when all is
idle: `simulated_over_real` for each class.

`short` are chat prompts, `long` all turns of conversations; `…_over_best` is one_pool over the best of its peers. Every
greedy answer is compared between the systems. `--full` takes a model of SmolLM2-135M's shape, with random weights, and
longer rounds. Writes `one-pool.json` and `one-pool.png`; the last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.live.decide.instance_work import PREFILL, WORK_KEY, read_work
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from support.conversations import Answer, Client, draw_load, opening_s
from support.engines import BenchEngine, EngineStartError, free_port
from support.mixed_load import percentile
from support.pool_simulation import batch_costs_of, costs_of, paces_of, simulated_ttfts_s
from support.processor_time import OtherLoad
from support.random_model import RandomLlama, build_random_llama
from support.result import give_up, machine, print_result, progress, versions

MODEL = RandomLlama(layers=6, hidden=384, heads=6, kv_heads=2)
SMOLLM2 = RandomLlama(layers=30, hidden=576, heads=9, kv_heads=3, vocabulary=49152)
OUTPUT_TOKENS = 4
BOUNDARY_TOKENS = 512
LOAD = 0.6  # of both cores, where nothing is cached twice
CHAT_SHARE = 0.2  # of the load
SIMULATED_TIMES = 5  # each round, as batches do not always take the same
COLD_TOKENS, WARM_TOKENS, IDLE_TOKENS = 7000, 2000, 60
HANDSHAKE = ("--transfer-backend", "handshake")
OWN_SCHEDULER = ("--laps-boundary-tokens", str(BOUNDARY_TOKENS))
SHARED_FROM = ("--cdsp-min-tokens", str(BOUNDARY_TOKENS))
OURS = "one_pool"
FCFS = "fcfs"


class System(NamedTuple):
    """Describes how the two instances are used."""

    name: str
    roles: tuple[str, str]
    router_options: tuple[str, ...] = ("--prefill-policy", "cache_aware")
    engine_arguments: tuple[str, ...] = ()


SHORT_FIRST = ("--schedule-policy", "shortest-prefill-first", "--chunked-prefill-size", "256")
SYSTEMS = (
    System(OURS, ("both", "both")),
    System("two_pools", ("short", "long"), ("--set", "placement.pool_spill=false")),
    System("laps", ("both", "both")),
    System("stock", ("both", "both"), engine_arguments=SHORT_FIRST),
)
COLD_PEER = System(FCFS, ("both", "both"), engine_arguments=("--chunked-prefill-size", "1024"))


class Plan(NamedTuple):
    """Describes how much is measured."""

    model: RandomLlama
    rounds: int
    round_s: float


class Served(NamedTuple):
    """One system that runs."""

    prefills: tuple[BenchEngine, BenchEngine]
    client: Client


class Round(NamedTuple):
    """One_pool's answers of a round, and what was known at its end."""

    answers: list[Answer]
    costs: tuple[SpCandidate, ...]  # of chunks
    batches: CostCoefficients
    paces: tuple[float, ...]  # of batches: see `paces_of`


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    began_s = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed, one for each prefill instance")
    others = OtherLoad()
    plan = Plan(SMOLLM2, 4, 180.0) if arguments.full else Plan(MODEL, 1 if arguments.trial else 4, 50.0)
    progress(f"model: {plan.model}, float32; {plan.rounds} rounds of {plan.round_s:.0f} s")
    try:
        with tempfile.TemporaryDirectory(prefix="one-pool-") as scratch, ExitStack() as stack:
            bench = Bench(Path(scratch), cores, plan, stack)
            runs = bench.run()
            simulated = _row(bench.simulate())
            during = bench.run_beside()
            pool = bench.pool_status()
    except EngineStartError as error:
        give_up(str(error))
    table = {name: _row(answers) for name, answers in runs.items()}
    differing = _differing(runs)
    for name, row in table.items():
        progress(f"{name:<10}" + "".join(f"{key} {value:8.2f}   " for key, value in row.items()))
    result = {
        **{
            f"{key}_over_best": round(
                table[OURS][key] / min(row[key] for name, row in table.items() if name != OURS), 3
            )
            for key in ("short_p50", "short_p90", "long_p50", "long_p90", "follow_up_p50")
        },
        "warm_ttft_stock_over_ours": round(during[FCFS]["warm_s"] / during[OURS]["warm_s"], 2),
        "cold_ttft_over_stock": round(during[OURS]["cold_s"] / during[FCFS]["cold_s"], 3),
        "simulated_over_real": {key: round(value / table[OURS][key], 3) for key, value in simulated.items()},
        "answers_that_differ": len(differing),
        "failed": sum(answer.ttft_s is None for answers in runs.values() for answer in answers),
        "requests": len(runs[OURS]),
        "table": {name: {key: round(value, 3) for key, value in row.items()} for name, row in table.items()},
        "beside_cold_prompts": {
            name: {key: round(value, 3) for key, value in row.items()} for name, row in during.items()
        },
        "prefix_hits": pool["prefix_hits"],
        "prefix_hit_tokens": pool["prefix_hit_tokens"],
        "model": str(plan.model),
        "duration_s": round(time.monotonic() - began_s, 1),
        "other_load_cores": round(others.mean_cores(), 2),
        "machine": machine(),
        "versions": versions("sglang", "torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    _draw(arguments.out / "one-pool.png", runs)
    answers = {name: [[*one.key, one.tokens, one.ttft_s] for one in several] for name, several in runs.items()}
    written = {**result, "answers": answers, "differing": differing}
    (arguments.out / "one-pool.json").write_text(json.dumps(written) + "\n")
    progress(f"wrote {arguments.out / 'one-pool.png'} and one-pool.json")
    print_result(result)


class Bench:
    """The instances of all systems; instances without requests sleep."""

    def __init__(self, scratch: Path, cores: Sequence[int], plan: Plan, stack: ExitStack) -> None:
        self._scratch, self._cores, self._plan, self._stack = scratch, cores, plan, stack
        self._model = scratch / "model"
        self._served: dict[str, Served] = {}
        self._rounds: list[Round] = []  # of one_pool
        self._pool_url = ""
        self._idle_overhead_s = 0.0  # around the prefill of a chat prompt on one_pool

    def run(self) -> dict[str, list[Answer]]:
        """Start everything and serve all rounds. The answers of each system."""
        self._start()
        for served in self._served.values():
            served.client.ask(served.client.tokens(1500, 1))
            served.client.ask(served.client.tokens(100, 2))
        # What both cores do in a second is known when both are busy: they may be two threads of one.
        document_s = self._together_s(4000)
        chat_s = self._together_s(IDLE_TOKENS)
        ours = self._served[OURS].client
        idle_short_s = median(ours.ask(ours.tokens(IDLE_TOKENS, 9 + number)).ttft_s or inf for number in range(9))
        self._idle_overhead_s = idle_short_s - self._batch_s(IDLE_TOKENS)
        load_cores = LOAD * len(self._cores[:2])
        begun_s = (1 - CHAT_SHARE) * load_cores * opening_s(self._plan.round_s)
        conversations = max(2, round(begun_s / (document_s + 2 * chat_s)))
        chats_per_s = CHAT_SHARE * load_cores / chat_s
        progress(
            f"both instances at once: 4,000 tokens take {document_s:.1f} s, {IDLE_TOKENS} tokens {chat_s:.3f} s; "
            f"a round has {conversations} conversations and {chats_per_s:.1f} chat prompts/s"
        )
        runs: dict[str, list[Answer]] = {system.name: [] for system in SYSTEMS}
        for number in range(self._plan.rounds):
            load = draw_load(self._plan.round_s, min(4.0, chats_per_s), conversations, seed=number)
            order = SYSTEMS[number % len(SYSTEMS) :] + SYSTEMS[: number % len(SYSTEMS)]
            for system in order:
                served = self._served[system.name]
                self._flush(served)
                answers = served.client.run(load, seed=number)
                row = _row(answers)
                progress(f"round {number}: {system.name}: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items()))
                # The same prompts get the same answers in every system.
                answers = [answer.in_round(number) for answer in answers]
                runs[system.name] += answers
                if system.name == OURS:
                    self._rounds.append(self._round(answers))
        return runs

    def _together_s(self, tokens: int) -> float:
        """Return the TTFT of a prompt on each instance, both at the same time: the lowest mean of three pairs."""
        client = self._served["stock"].client
        pairs = [[client.tokens(tokens, tokens + 2 * pair + one) for one in range(2)] for pair in range(3)]
        answers = [client.ask_beside(pair, (), 1.0)[0] for pair in pairs]
        return min(mean(one.ttft_s or inf for one in pair) for pair in answers)

    def _queues(self, query: str = "") -> list[dict[str, Any]]:
        """Return the status of one_pool's instances."""
        return [json.loads(_get(f"{prefill.url}/laps{query}")) for prefill in self._served[OURS].prefills]

    def _round(self, answers: list[Answer]) -> Round:
        """Return a round that has just ended, with what the coordinator and the instances know of it."""
        queues = self._queues()
        return Round(
            answers, costs_of(json.loads(_get(self._pool_url + "/status"))), batch_costs_of(queues), paces_of(queues)
        )

    def _batch_s(self, tokens: int) -> float:
        """Return the median time that an instance of one_pool has taken for a batch of this many tokens."""
        works = (read_work(status[WORK_KEY]) for status in self._queues("?since=0"))
        return median(
            record.end_s - record.start_s
            for work in works
            if work is not None
            for record in work.records
            if record.kind == PREFILL and record.tokens == tokens and record.end_s is not None
        )

    def simulate(self) -> list[Answer]:
        """Return the answers of one_pool with the times that the simulator has for them."""
        simulated = []
        for answers, costs, batches, paces in self._rounds:
            progress(
                f"simulated with chunks of {costs}, batches of {batches}, and {self._idle_overhead_s:.3f} s around them"
            )
            for seed in range(SIMULATED_TIMES):
                ttfts_s = simulated_ttfts_s(
                    answers, costs, batches, 2, BOUNDARY_TOKENS, self._idle_overhead_s, paces, seed
                )
                simulated += [answer._replace(ttft_s=ttfts_s[answer.key]) for answer in answers]
        return simulated

    def run_beside(self) -> dict[str, dict[str, float]]:
        """Measure warm follow-ups during cold prompts: the median TTFT of each."""
        measured = {}
        for name in (FCFS, OURS):
            served = self._served[name]
            self._flush(served)
            warm_s, cold_s = [], []
            for attempt in range(2):
                document = served.client.tokens(WARM_TOKENS, 800 + attempt)
                served.client.ask(document)
                time.sleep(1.0)
                cold = [served.client.tokens(COLD_TOKENS, 900 + 10 * attempt + number) for number in range(2)]
                warm = [document + served.client.tokens(30, 1000 + number) for number in range(120)]
                cold_answers, warm_answers = served.client.ask_beside(cold, warm, 1.0)
                cold_s += [one.ttft_s for one in cold_answers if one.ttft_s is not None]
                warm_s += [one.ttft_s for one in warm_answers if one.ttft_s is not None]
            warm_p50_s, cold_p50_s = median(warm_s), median(cold_s)
            measured[name] = {"warm_s": round(warm_p50_s, 3), "cold_s": round(cold_p50_s, 3), "follow_ups": len(warm_s)}
            progress(f"{name}: follow-ups {warm_p50_s:.2f} s during cold prompts of {cold_p50_s:.1f} s")
        return measured

    def pool_status(self) -> dict[str, float]:
        """Return how often the pool's kept KV was used."""
        found = {}
        for line in _get(self._pool_url + "/metrics").decode().splitlines():
            for name in ("prefix_hits", "prefix_hit_tokens"):
                if line.startswith(f"sglang_ext:cdsp_{name}_total "):
                    found[name] = float(line.split()[-1])
        return found

    def _start(self) -> None:
        self._model.mkdir()
        build_random_llama(self._plan.model, self._model)
        coordinator_port, self._pool_url = self._start_coordinator()
        engines: dict[str, tuple[BenchEngine, BenchEngine]] = {}
        decode = self._engine("decode", HANDSHAKE)
        for system in (*SYSTEMS, COLD_PEER):
            stock = ("--laps-mode", "off")
            options = (*HANDSHAKE, *(stock if system.engine_arguments else OWN_SCHEDULER))
            if system.name == OURS:
                options += ("--cdsp-coordinator", f"127.0.0.1:{coordinator_port}", *SHARED_FROM)
            first, second = (self._engine(role, options, system.engine_arguments) for role in system.roles)
            engines[system.name] = first, second
        everything = [decode, *(engine for pair in engines.values() for engine in pair)]
        self._stack.callback(lambda: [engine.terminate() for engine in everything])
        for engine in everything:
            engine.wait_ready()
        for system in (*SYSTEMS, COLD_PEER):
            for engine, core in zip(engines[system.name], self._cores, strict=False):
                engine.pin({core})
            url = self._start_router(system, engines[system.name], decode)
            self._served[system.name] = Served(
                engines[system.name], Client(url, self._plan.model.vocabulary, OUTPUT_TOKENS)
            )
        progress(f"{len(everything)} instances and {len(self._served)} routers are up")

    def _engine(self, role: str, options: Sequence[str], arguments: Sequence[str] = ()) -> BenchEngine:
        engine = BenchEngine.start(role, self._model, self._scratch, worker_options=options, engine_arguments=arguments)
        self._stack.callback(engine.stop)
        return engine

    def _start_coordinator(self) -> tuple[int, str]:
        port, http_port = free_port(), free_port()
        self._run_program("coordinator", *("--port", str(port), "--http-port", str(http_port), "--sp-sizes", "1,2"))
        url = f"http://127.0.0.1:{http_port}"
        _wait_for(url + "/health")
        return port, url

    def _start_router(self, system: System, prefills: tuple[BenchEngine, BenchEngine], decode: BenchEngine) -> str:
        port = free_port()
        flags = {"short": "--prefill-short", "long": "--prefill-long", "both": "--prefill"}
        arguments = ["--pd-disaggregation", "--port", str(port)]
        for role, engine in zip(system.roles, prefills, strict=True):
            arguments += [flags[role], engine.url, str(engine.bootstrap_port)]
        arguments += ["--decode", decode.url, "--length-boundary-tokens", str(BOUNDARY_TOKENS)]
        if system.name == OURS:
            arguments += ["--coordinator-url", self._pool_url]
        self._run_program("router", *arguments, *system.router_options)
        _wait_for(f"http://127.0.0.1:{port}/readyz")
        return f"http://127.0.0.1:{port}"

    def _run_program(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "sglang_ext.cli", name, *arguments, "--log-level", "warning"]
        process = subprocess.Popen(command)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    def _flush(self, served: Served) -> None:
        """Empty its prefix caches. Refused while there are requests; the last ones may have been answered just now."""
        for engine in served.prefills:
            for _ in range(20):
                try:
                    engine.post("/flush_cache", {})
                    break
                except OSError:
                    time.sleep(0.5)
            else:
                progress(f"the cache of {engine.url} was not emptied")


def _row(answers: Sequence[Answer]) -> dict[str, float]:
    classes = {
        "short": [one for one in answers if one.turn == 0],
        "long": [one for one in answers if one.turn > 0],
        "follow_up": [one for one in answers if one.turn > 1],
    }
    return {
        f"{name}_p{share}": percentile([one.ttft_s for one in several if one.ttft_s is not None], share / 100)
        for name, several in classes.items()
        for share in (50, 90)
    }


def _differing(runs: Mapping[str, Sequence[Answer]]) -> list[tuple[tuple[int, int], dict[str, tuple[int, ...]]]]:
    """Return the prompts with different answers, by their keys; prompts that failed in one system are left out."""
    answers: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    for name, several in runs.items():
        for answer in several:
            if answer.ttft_s is not None:
                answers.setdefault(answer.key, {})[name] = answer.output
    return [(key, outputs) for key, outputs in answers.items() if len(set(outputs.values())) > 1]


def _draw(path: Path, runs: Mapping[str, Sequence[Answer]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5), sharey=True)
    titles = ("chat prompts", "first turns: documents of 2,000 to 6,000 tokens", "second and third turns")
    for axis, title, turns in zip(axes, titles, ((0,), (1,), (2, 3)), strict=True):
        for name, answers in runs.items():
            times_s = sorted(one.ttft_s for one in answers if one.turn in turns and one.ttft_s is not None)
            shares = [(number + 1) / len(times_s) for number in range(len(times_s))]
            axis.step(times_s, shares, where="post", label=name, linewidth=2 if name == OURS else 1)
        axis.set(title=title, xlabel="TTFT, s", xscale="log")
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _wait_for(url: str) -> None:
    deadline_s = time.monotonic() + 60.0
    while True:
        try:
            _get(url)
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise EngineStartError(f"{url} does not answer") from None
            time.sleep(0.2)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return reply.read()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="a model of SmolLM2-135M's shape; longer rounds")
    size.add_argument("--trial", action="store_true", help="one round")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent / "out", help="folder for the results"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
