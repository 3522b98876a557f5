"""A long prompt through two pipeline stages, on one instance, and in a ring of two; and short prompts at the same time.

    python bench/pipeline.py [--rounds 4] [--tokens 4096,7168] [--short-slo-ms MS] [--full | --trial] [--out FOLDER]

SmolLM2-135M in float32, one thread a stage or an instance, each on one of two cores, KV to decode by handshake through
shared memory. Interleaved, round by round, for each length:

- the prompt on one stock instance (all of it in one chunk, its fastest way), and one on each of two at the same time,
  which is what two processes gain on this machine at all;
- the prompt through two stages of one instance, in LAPS's chunks, mode `long`;
- the prompt on a long pool whose two instances compute it together;
- the longest of the prompts with short ones at the same times, until it is computed: through two stages
  with the small chunks of LAPS's mode `both`, and on the pool, whose instances get them in turn, with chunks of at most
  `--ring-chunk-ms` (a coordinator's `pool.max_chunk_ms`, unbounded else: then short prompts wait for all of it).

What the chunks took comes from the stages themselves (`GET /laps/stages`): t is the time of a chunk on both, and p
stages without bubbles but those of a flow shop need sum(t) / p + (p - 1) t_last / p.

The last line is `RESULT {json}`, figures of the first length: `pp2_speedup` = one instance / two stages, medians;
`independent_gain` = throughput of two stock instances over that of one; `pp2_efficiency` = the former over the latter;
`ring2_speedup` for comparison; `pp2_over_flow_shop` = time to first token over that formula, median of the rounds;
`span_over_flow_shop` = the same from the first launch to the last end on a stage, without transfer and decode;
`short_p90_ratio` = P90 of the time to first token of the short prompts, two stages over ring. `by_tokens` has
all of it for each length. `pipeline.json` is written after every round. No round begins that would not end within 19
minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sglang_ext.cluster.process_tree import all_processes
from sglang_ext.cpu.models.smollm2 import ModelError, ensure_smollm2
from support.cdsp_pool import HANDSHAKE, Costs, PoolCoordinator, Sent
from support.engines import BenchEngine, EngineStartError
from support.mixed_load import percentile
from support.result import BenchmarkRun, benchmark_parser, give_up, print_result, progress, write_json

VOCABULARY = 49152
STAGES = 2
ONE_CHUNK = ("--chunked-prefill-size", "8192")
EFFICIENCY = 0.85  # of two instances, for the planner's costs; what it really is, is measured
SHARED_FROM_TOKENS = 3000
SHORT_TOKENS = 64
SHORT_GAP_S = (0.5, 1.1)  # between two short prompts, drawn evenly
END_S = 1140.0  # after the start
DECODE_KV_MIB = 2048  # two of the longest prompts, and SGLang's reserve of 512 tokens for each short one
STAGES_TIMEOUT_S = 20.0
WARM_UP_PROMPTS = 2  # the cost models of LAPS learn from them


class IdlePrompt(NamedTuple):
    """Seconds of one prompt in each way; of each chunk on each stage its time, and its start after the first launch."""

    stock_s: float
    two_stock_s: float  # until both of two independent prompts have their first token
    pipeline_s: float
    ring_s: float
    span_s: float  # on the stages, from the first launch to the last end
    chunks_s: list[list[float]]
    starts_s: list[list[float]]
    chunks_tokens: list[int]

    @property
    def flow_shop_s(self) -> float:
        """Return what the chunks need on stages without further bubbles."""
        times_s = [sum(chunk) for chunk in self.chunks_s]
        return sum(times_s) / STAGES + (STAGES - 1) * times_s[-1] / STAGES


class MixedRound(NamedTuple):
    """A long prompt and the short ones that came while it was computed, in seconds to the first token."""

    long_s: float
    shorts_s: list[float]
    chunks: int  # batches on a stage, or chunks of the long prompt on the ring


@dataclass
class Measured:
    """All rounds so far."""

    idle: dict[int, list[IdlePrompt]]
    pipeline: list[MixedRound] = field(default_factory=list)
    ring: list[MixedRound] = field(default_factory=list)


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < STAGES:
        give_up("two cores are needed, one for each stage")
    benchmark = BenchmarkRun("sglang", "torch")
    measured = Measured({tokens: [] for tokens in arguments.tokens})
    command = shlex.join(["python", *sys.argv])
    path = arguments.out / "pipeline.json"
    try:
        model = ensure_smollm2()
        with tempfile.TemporaryDirectory(prefix="pipeline-") as scratch, ExitStack() as stack:
            bench = Bench(model, Path(scratch), cores[:STAGES], stack, arguments)
            bench.start()
            for number in range(arguments.rounds):
                round_began_s = benchmark.elapsed_s()
                progress(f"round {number + 1} of {arguments.rounds}, after {round_began_s:.0f} s")
                bench.measure(number, measured)
                write_json(path, {**_result(measured), "command": command, **benchmark.facts(), "is_complete": False})
                now_s = benchmark.elapsed_s()
                if now_s + (now_s - round_began_s) > arguments.end_s and number + 1 < arguments.rounds:
                    progress("no time for more rounds")
                    break
    except (EngineStartError, ModelError) as error:
        give_up(str(error))
    result = {**_result(measured), "command": command, **benchmark.facts()}
    write_json(path, {**result, "is_complete": True})
    result.pop("raw")
    print_result(result)


class Bench:
    """The instances, and everything that is measured at them."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        cores: Sequence[int],
        stack: ExitStack,
        arguments: argparse.Namespace,
    ) -> None:
        self._model, self._scratch, self._cores, self._stack = model, scratch, cores, stack
        self._lengths: list[int] = arguments.tokens
        self._round_ms: float | None = arguments.round_ms
        self._ring_chunk_ms: float = arguments.ring_chunk_ms
        self._short_slo_ms: float | None = arguments.short_slo_ms
        self._engines: dict[str, BenchEngine] = {}
        self._coordinator = PoolCoordinator(scratch)

    def start(self) -> None:
        """Start all instances, measure the planner's costs, and let every instance learn what its iterations take."""
        self._stack.callback(self._coordinator.stop)
        transfer = (*HANDSHAKE, "--transfer-transport", "shared_memory")
        stock = ("--laps-mode", "off", *transfer)
        member = (
            *transfer,
            *("--cdsp-coordinator", self._coordinator.address, "--cdsp-min-tokens", str(SHARED_FROM_TOKENS)),
        )
        round_ms = () if self._round_ms is None else ("--set", f"laps.round_ms={self._round_ms}")
        slo = () if self._short_slo_ms is None else ("--laps-short-ttft-slo-ms", str(self._short_slo_ms))
        stages = ("--pp-size", str(STAGES))
        for name, role, options, engine_arguments in (
            ("stock-0", "long", stock, ONE_CHUNK),
            ("stock-1", "long", stock, ONE_CHUNK),
            ("pipeline", "long", (*transfer, *round_ms), stages),
            ("pipeline-small", "both", (*transfer, *slo), stages),
            ("pool-0", "both", (*member, *slo), ()),
            ("pool-1", "both", (*member, *slo), ()),
            ("decode", "decode", (*transfer, "--kv-memory-mib", str(DECODE_KV_MIB)), ()),
        ):
            engine = BenchEngine.start(
                role, self._model, self._scratch, worker_options=options, engine_arguments=engine_arguments
            )
            self._engines[name] = engine
            self._stack.callback(engine.stop)
        self._stack.callback(lambda: [engine.terminate() for engine in self._engines.values()])
        for engine in self._engines.values():
            engine.wait_ready()
        for name, engine in self._engines.items():
            if name.startswith("pipeline"):
                pin_stages(engine, self._cores)
            elif name != "decode":
                engine.pin({self._cores[int(name[-1])]})
        self._costs = self._measured_costs()
        self._start_coordinator()
        progress(
            f"two stock instances, two pipelines, a pool and a decode instance are up; on idle instances: {self._costs}"
        )
        for name in ("pipeline", "pipeline-small", "pool-0", "pool-1"):
            for _ in range(WARM_UP_PROMPTS):
                self._send(name, SHORT_TOKENS).wait()
                self._send(name, SHARED_FROM_TOKENS // 2).wait()
            self._send(name, self._lengths[0]).wait()

    def measure(self, number: int, measured: Measured) -> None:
        """One round of everything. The order of the ways changes from round to round."""
        for tokens in self._lengths:
            one = self._idle(tokens, is_ring_first=number % 2 == 1)
            measured.idle[tokens].append(one)
            progress(
                f"  {tokens} tokens: one instance {one.stock_s:.2f} s, two at once {one.two_stock_s:.2f}, "
                f"two stages {one.pipeline_s:.2f} (flow shop {one.flow_shop_s:.2f}, {len(one.chunks_s)} chunks), "
                f"ring {one.ring_s:.2f}"
            )
        self._start_coordinator("--set", f"pool.max_chunk_ms={self._ring_chunk_ms:g}")
        ways = {"two stages": (["pipeline-small"], measured.pipeline), "ring": (["pool-0", "pool-1"], measured.ring)}
        for way in sorted(ways, reverse=number % 2 == 1):
            names, rounds = ways[way]
            rounds.append(self._mixed(names, seed=number))
            progress(
                f"  {way}: {len(rounds[-1].shorts_s)} short prompts during {max(self._lengths)} tokens, P90 "
                f"{percentile(rounds[-1].shorts_s, 0.9):.2f} s, the long one {rounds[-1].long_s:.2f} s, "
                f"{rounds[-1].chunks} batches or chunks"
            )
        self._start_coordinator()

    def _start_coordinator(self, *options: str) -> None:
        self._coordinator.start((1, 2), self._costs.profile((1, 2), EFFICIENCY), *options)
        self._coordinator.wait_connected(2)

    def _idle(self, tokens: int, *, is_ring_first: bool) -> IdlePrompt:
        stock_s = self._send("stock-0", tokens).wait().ttft_s
        both = [self._send(f"stock-{number}", tokens) for number in range(2)]
        two_stock_s = max(one.wait().ttft_s for one in both)
        ring_s = self._send("pool-0", tokens).wait().ttft_s if is_ring_first else 0.0
        began_s = time.time()
        pipeline_s = self._send("pipeline", tokens).wait().ttft_s
        rounds = self._stage_rounds("pipeline", began_s, tokens)
        if not is_ring_first:
            ring_s = self._send("pool-0", tokens).wait().ttft_s
        first, last = rounds
        chunks = list(zip(*rounds, strict=True))
        return IdlePrompt(
            stock_s,
            two_stock_s,
            pipeline_s,
            ring_s,
            last[-1]["end_s"] - first[0]["start_s"],
            [[one["end_s"] - one["start_s"] for one in chunk] for chunk in chunks],
            [[one["start_s"] - first[0]["start_s"] for one in chunk] for chunk in chunks],
            [chunk[0]["new_tokens"] for chunk in chunks],
        )

    def _mixed(self, names: Sequence[str], seed: int) -> MixedRound:
        draw = random.Random(seed)
        long = self._send(names[0], max(self._lengths))
        since_s, began_s = time.time(), time.perf_counter()
        sent: list[tuple[float, Sent]] = []
        while not long.is_ended:
            time.sleep(draw.uniform(*SHORT_GAP_S))
            sent.append((time.perf_counter() - began_s, self._send(names[len(sent) % len(names)], SHORT_TOKENS)))
        long_s = long.wait().ttft_s
        shorts = [(at_s, one.wait().ttft_s) for at_s, one in sent]
        if len(names) == 1:
            time.sleep(1.5)  # a stage publishes its rounds twice a second
            (first, *_) = self._engines[names[0]].get("/laps/stages")["stages"]
            chunks = sum(1 for one in first["rounds"] if one["start_s"] >= since_s)
        else:
            chunks = sum(1 for step in self._coordinator.last_prompt()["steps"] if step["kind"] == "chunk")
        return MixedRound(long_s, [ttft_s for at_s, ttft_s in shorts if at_s < long_s], chunks)

    def _stage_rounds(self, name: str, since_s: float, tokens: int) -> list[list[dict[str, Any]]]:
        """The batches of each stage since then, once they are all known. Raises EngineStartError."""
        deadline_s = time.monotonic() + STAGES_TIMEOUT_S
        while True:
            stages = self._engines[name].get("/laps/stages")["stages"]
            rounds = [[one for one in stage["rounds"] if one["start_s"] >= since_s] for stage in stages]
            if len(rounds) == STAGES and all(sum(one["new_tokens"] for one in stage) == tokens for stage in rounds):
                return rounds
            if time.monotonic() > deadline_s:
                raise EngineStartError(f"{name} does not report what its stages have computed")
            time.sleep(0.1)

    def _measured_costs(self) -> Costs:
        longest = max(self._lengths)
        return Costs.through(
            [
                (length, min(self._send("stock-0", length).wait().ttft_s for _ in range(2)))
                for length in (longest // 8, longest // 4, longest // 2, longest)
            ]
        )

    def _send(self, name: str, tokens: int) -> Sent:
        return Sent(self._engines[name], self._engines["decode"], tokens, VOCABULARY)


def pin_stages(engine: BenchEngine, cores: Sequence[int]) -> None:
    """From now on each stage runs on its core, and the instance's other processes on all of these."""
    for stat in all_processes():
        if os.getsid(stat.pid) != engine.process.pid:
            continue
        title = Path(f"/proc/{stat.pid}/cmdline").read_text(errors="replace")
        stages = [number for number in range(len(cores)) if f"scheduler_PP{number}" in title]
        for task in Path(f"/proc/{stat.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {cores[number] for number in stages} or set(cores))


def _result(measured: Measured) -> dict[str, Any]:
    by_tokens = {tokens: _figures(rounds) for tokens, rounds in measured.idle.items() if rounds}
    shorts = {
        "pipeline": [value for one in measured.pipeline for value in one.shorts_s],
        "ring": [value for candidate in measured.ring for value in candidate.shorts_s],
    }
    p90_s = {way: percentile(values, 0.9) for way, values in shorts.items()}
    return {
        **next(iter(by_tokens.values())),
        "short_p90_ratio": round(p90_s["pipeline"] / p90_s["ring"], 3),
        "short_p90_s": {way: round(value, 3) for way, value in p90_s.items()},
        "shorts": {way: len(values) for way, values in shorts.items()},
        "long_beside_shorts_s": {
            "pipeline": round(median(one.long_s for one in measured.pipeline), 3),
            "ring": round(median(candidate.long_s for candidate in measured.ring), 3),
        },
        "rounds": len(measured.ring),
        "by_tokens": {str(tokens): figures for tokens, figures in by_tokens.items()},
        "raw": {
            "idle": {str(tokens): [prompt._asdict() for prompt in rounds] for tokens, rounds in measured.idle.items()},
            "pipeline": [one._asdict() for one in measured.pipeline],
            "ring": [candidate._asdict() for candidate in measured.ring],
        },
    }


def _figures(rounds: Sequence[IdlePrompt]) -> dict[str, object]:
    stock_s, two_stock_s, pipeline_s, ring_s = (
        median(getattr(one, name) for one in rounds) for name in ("stock_s", "two_stock_s", "pipeline_s", "ring_s")
    )
    speedup, gain = stock_s / pipeline_s, 2 * stock_s / two_stock_s
    return {
        "pp2_speedup": round(speedup, 3),
        "ring2_speedup": round(stock_s / ring_s, 3),
        "independent_gain": round(gain, 3),
        "pp2_efficiency": round(speedup / gain, 3),
        "pp2_over_flow_shop": round(median(one.pipeline_s / one.flow_shop_s for one in rounds), 3),
        "span_over_flow_shop": round(median(one.span_s / one.flow_shop_s for one in rounds), 3),
        "chunks": median(len(one.chunks_s) for one in rounds),
        "seconds": {
            "stock": round(stock_s, 3),
            "two_stock": round(two_stock_s, 3),
            "pipeline": round(pipeline_s, 3),
            "ring": round(ring_s, 3),
        },
    }


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each (default: 4)")
    parser.add_argument("--tokens", default="4096,7168", help="lengths of the prompts (default: 4096,7168)")
    parser.add_argument(
        "--round-ms",
        type=float,
        help="fixed time budget of a chunk on a stage, when only this prompt runs (default: LAPS's own)",
    )
    parser.add_argument(
        "--ring-chunk-ms",
        type=float,
        default=400,
        help="longest chunk of the ring while short prompts run (default: 400)",
    )
    parser.add_argument(
        "--short-slo-ms", type=float, help="objective of the short prompts, of both ways (LAPS's own default)"
    )
    parser.add_argument("--full", action="store_true", help="15 rounds, an hour")
    parser.add_argument("--trial", action="store_true", help="one round of 4,096 tokens, to see that it works")
    arguments = parser.parse_args()
    arguments.tokens = [int(word) for word in arguments.tokens.split(",")]
    arguments.end_s = END_S
    if arguments.trial:
        arguments.rounds, arguments.tokens = 1, arguments.tokens[:1]
    if arguments.full:
        arguments.rounds, arguments.end_s = 15, 4 * END_S
    return arguments


if __name__ == "__main__":
    main()
