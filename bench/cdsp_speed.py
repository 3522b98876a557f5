"""One long prompt on one instance of stock SGLang, and shared by the instances of a long pool.

    python bench/cdsp_speed.py [--rounds 5] [--tokens 4096] [--transport shared_memory] [--out FOLDER]

SmolLM2-135M in float32, one thread an instance, two prefill instances on a core each, KV to decode by handshake. All
run on one machine, so KV goes through shared memory; over TCP the copies take time of the cores that compute.
Interleaved, round by round, medians:

- the prompt on one stock instance (all of it in one chunk, its fastest way), and one on each of two at the same time,
  which is what two processes gain on this machine at all;
- the prompt on the pool, whose two instances compute it together;
- the prompt on the pool, whose owner samples the first token without the KV (`pool.ending=streamed`), or collects it
  all before (`pool.ending=collected`); the latter also without transfer (SGLang's stand-in for decode, whose KV is
  always collected), which shows what the handshake costs: both sides have the same ending;
- one of the two instances is busy with a shorter prompt: the pool begins on one instance and goes on on two (1 → 2),
  with KV rebalanced behind the computation or before it, or may only use both and waits.

Then four instances of a tiny model send to decode together, which has four receive backends, or two.

The last line is `RESULT {json}`: `sp2_speedup` = stock / pool; `independent_gain` = throughput of two stock instances
over that of one; `sp2_efficiency` = the former over the latter; `streamed_over_collected` = time to first token without
a collection over that with one; `grow_over_wait` = time to first token of 1 → 2 over waiting for two;
`rebalance_overhead` = share of 1 → 2 in which a member waits for rebalanced KV;
`handshake_overhead` = what the transfer adds to a prefill that is collected, as a share of it;
`handshake_overhead_half` = what two instead of four backends add.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from sglang_ext.cpu.models.smollm2 import ModelError, ensure_smollm2
from support.cdsp_pool import HANDSHAKE, Costs, PoolCoordinator, Sent
from support.engines import BenchEngine, EngineStartError
from support.random_model import RandomLlama, build_random_llama
from support.result import BenchmarkRun, benchmark_parser, give_up, progress

VOCABULARY = 49152
ONE_CHUNK = ("--chunked-prefill-size", "8192")
EFFICIENCY = 0.85  # of two instances, for the planner's costs; what it really is, is measured
BUSY_TOKENS = (
    1024  # of the prompt that keeps the second instance busy: the planner would rather use one than wait longer
)
SHARED_FROM_TOKENS = 3000
TINY = RandomLlama(layers=4, hidden=128, heads=4, kv_heads=2)
TINY_TOKENS = 2000
TINY_AT_ONCE = 4
TINY_ROUNDS = 3  # times the rounds of the first part


class Round(NamedTuple):
    """Seconds."""

    stock_s: float
    two_stock_s: float  # until both of two independent prompts have their first token
    pool_s: float


class Ended(NamedTuple):
    """Seconds of prompts of one length, each with an ending and a coordinator of its own."""

    streamed_s: float  # to the first token
    collected_s: float  # the same
    collected_prefill_s: float  # of the same prompt: until prefill has answered
    untransferred_prefill_s: float  # of another one, which is collected, too, and goes to SGLang's stand-in for decode


class Grown(NamedTuple):
    """A prompt that came while one of the two was busy."""

    ttft_s: float
    rebalance_s: float  # in which members waited for KV of earlier chunks
    sizes: tuple[int, ...]  # instances of each chunk


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed, one for each prefill instance")
    benchmark = BenchmarkRun("sglang", "torch")
    try:
        model = ensure_smollm2()
        with tempfile.TemporaryDirectory(prefix="cdsp-speed-") as scratch:
            transfer = (*HANDSHAKE, "--transfer-transport", arguments.transport)
            shared = _measure_two(model, Path(scratch), cores, transfer, arguments.tokens, arguments.rounds)
            backends = _measure_backends(Path(scratch), cores, transfer, arguments.rounds * TINY_ROUNDS)
    except (EngineStartError, ModelError) as error:
        give_up(str(error))
    result = {
        **shared,
        **backends,
        "tokens": arguments.tokens,
        "transport": arguments.transport,
        "rounds": arguments.rounds,
    }
    benchmark.end(result, arguments.out / "cdsp-speed.json")


# ---------------------------------------------------------------- two instances, SmolLM2


def _measure_two(
    model: Path, scratch: Path, cores: Sequence[int], transfer: Sequence[str], tokens: int, count: int
) -> dict[str, object]:
    stock = ("--laps-mode", "off", *transfer)
    with ExitStack() as stack:
        coordinator = PoolCoordinator(scratch)
        stack.callback(coordinator.stop)
        options = (
            *transfer,
            *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", str(SHARED_FROM_TOKENS)),
        )
        engines = _up(
            {
                "stock-0": BenchEngine.start("long", model, scratch, worker_options=stock, engine_arguments=ONE_CHUNK),
                "stock-1": BenchEngine.start("long", model, scratch, worker_options=stock, engine_arguments=ONE_CHUNK),
                "pool-0": BenchEngine.start("long", model, scratch, worker_options=options),
                "pool-1": BenchEngine.start("long", model, scratch, worker_options=options),
                "decode": BenchEngine.start("decode", model, scratch, worker_options=transfer),
            },
            stack,
        )
        for name, engine in engines.items():
            if name != "decode":
                engine.pin({cores[int(name[-1])]})
        costs = _measured_costs(engines, tokens)
        coordinator.start((1, 2), costs.profile((1, 2), EFFICIENCY))
        coordinator.wait_connected(2)
        progress(f"two stock instances, a pool of two, and a decode instance are up; on one instance: {costs}")
        for engine in (engines["pool-0"], engines["pool-1"]):
            for length in (
                BUSY_TOKENS,
                BUSY_TOKENS,
                tokens,
            ):  # it learns from its own iterations what its queue will take
                Sent(engine, engines["decode"], length, VOCABULARY).wait()
        rounds = []
        for number in range(count):
            rounds.append(_round(engines, tokens))
            progress(f"round {number + 1} of {count}: " + ", ".join(f"{n} {v:.2f}" for n, v in _named(rounds[-1])))
        sizes = _last_sizes(coordinator)
        endings = []
        for number in range(count):
            endings.append(_ended(engines, coordinator, costs, tokens, is_transferred_first=number % 2 == 0))
            progress(f"endings, {number + 1} of {count}: " + ", ".join(f"{n} {v:.2f}" for n, v in _named(endings[-1])))
        grown: dict[str, list[Grown]] = {"grow": [], "wait": []}
        ways = {"grow": (1, 2), "wait": (2,)}
        for number in range(count):
            for way, allowed in ways.items():
                coordinator.start(allowed, costs.profile(allowed, EFFICIENCY))
                coordinator.wait_connected(2)
                grown[way].append(_grown(engines, coordinator, tokens))
            progress(
                f"with one instance busy, {number + 1} of {count}: "
                + ", ".join(f"{way} {ones[-1].ttft_s:.2f} s on {ones[-1].sizes}" for way, ones in grown.items())
            )
    return {**_summary(rounds, grown, sizes), **_endings(endings)}


def _round(engines: dict[str, BenchEngine], tokens: int) -> Round:
    decode = engines["decode"]
    stock = Sent(engines["stock-0"], decode, tokens, VOCABULARY).wait().ttft_s
    both = [Sent(engines[f"stock-{number}"], decode, tokens, VOCABULARY) for number in range(2)]
    two_stock = max(one.wait().ttft_s for one in both)
    pool = Sent(engines["pool-0"], decode, tokens, VOCABULARY).wait().ttft_s
    return Round(stock, two_stock, pool)


def _ended(
    engines: dict[str, BenchEngine],
    coordinator: PoolCoordinator,
    costs: Costs,
    tokens: int,
    *,
    is_transferred_first: bool,
) -> Ended:
    def send(decode: BenchEngine | None) -> Sent:
        return Sent(engines["pool-0"], decode, tokens, VOCABULARY).wait()

    def start(ending: str) -> None:
        coordinator.start((1, 2), costs.profile((1, 2), EFFICIENCY), "--set", f"pool.ending={ending}")
        coordinator.wait_connected(2)

    start("streamed")
    streamed = send(engines["decode"])
    start("collected")
    # The first prompt of a pool connects its members.
    if is_transferred_first:
        collected, untransferred = send(engines["decode"]), send(None)
    else:
        untransferred, collected = send(None), send(engines["decode"])
    return Ended(streamed.ttft_s, collected.ttft_s, collected.prefill_s, untransferred.prefill_s)


def _grown(engines: dict[str, BenchEngine], coordinator: PoolCoordinator, tokens: int) -> Grown:
    busy = Sent(engines["pool-1"], engines["decode"], BUSY_TOKENS, VOCABULARY)
    time.sleep(0.3)  # it computes by now, and has reported it
    sent = Sent(engines["pool-0"], engines["decode"], tokens, VOCABULARY).wait()
    busy.wait()
    last = coordinator.last_prompt()
    return Grown(sent.ttft_s, float(last["times"]["rebalance_s"]), _last_sizes(coordinator))


def _last_sizes(coordinator: PoolCoordinator) -> tuple[int, ...]:
    steps = coordinator.last_prompt()["steps"]
    return tuple(len(step["members"]) for step in steps if step["kind"] == "chunk" and not step["has_failed"])


def _measured_costs(engines: dict[str, BenchEngine], tokens: int) -> Costs:
    points = []
    for length in (tokens // 8, tokens // 4, tokens // 2, tokens):
        times_s = [Sent(engines["stock-0"], engines["decode"], length, VOCABULARY).wait().ttft_s for _ in range(2)]
        points.append((length, min(times_s)))
    return Costs.through(points)


def _summary(rounds: Sequence[Round], grown: dict[str, list[Grown]], sizes: tuple[int, ...]) -> dict[str, object]:
    stock_s, two_stock_s, pool_s = (median(column) for column in zip(*rounds, strict=True))
    speedup, gain = stock_s / pool_s, 2 * stock_s / two_stock_s
    ttft_s = {way: median(one.ttft_s for one in ones) for way, ones in grown.items()}
    rebalance = {way: median(one.rebalance_s / one.ttft_s for one in ones) for way, ones in grown.items()}
    return {
        "sp2_speedup": round(speedup, 3),
        "independent_gain": round(gain, 3),
        "sp2_efficiency": round(speedup / gain, 3),
        "grow_over_wait": round(ttft_s["grow"] / ttft_s["wait"], 3),
        "rebalance_overhead": round(rebalance["grow"], 4),
        "seconds": {
            "stock": round(stock_s, 3),
            "two_stock": round(two_stock_s, 3),
            "pool": round(pool_s, 3),
            **{way: round(value, 3) for way, value in ttft_s.items()},
        },
        "pool_sizes": list(sizes),
        "measured": [[round(value, 3) for value in one] for one in rounds],
        "grown": {
            way: [[round(one.ttft_s, 3), round(one.rebalance_s, 4), list(one.sizes)] for one in ones]
            for way, ones in grown.items()
        },
    }


def _endings(endings: Sequence[Ended]) -> dict[str, object]:
    return {
        "streamed_over_collected": round(median(ending.streamed_s / ending.collected_s for ending in endings), 3),
        "handshake_overhead": round(
            median(ending.collected_prefill_s / ending.untransferred_prefill_s - 1 for ending in endings), 4
        ),
        "endings": [[round(value, 3) for value in ending] for ending in endings],
    }


# ---------------------------------------------------------------- four senders, a tiny model


def _measure_backends(scratch: Path, cores: Sequence[int], transfer: Sequence[str], count: int) -> dict[str, object]:
    model = scratch / "tiny"
    model.mkdir()
    build_random_llama(TINY, model)
    with ExitStack() as stack:
        coordinator = PoolCoordinator(scratch)
        stack.callback(coordinator.stop)
        member = (*transfer, "--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", "500")
        decode = {backends: (*transfer, "--set", f"transfer.receive_backends={backends}") for backends in (4, 2)}
        engines = _up(
            {
                **{
                    f"pool-{number}": BenchEngine.start("long", model, scratch, worker_options=member)
                    for number in range(4)
                },
                "ample": BenchEngine.start("decode", model, scratch, worker_options=decode[4]),
                "half": BenchEngine.start("decode", model, scratch, worker_options=decode[2]),
            },
            stack,
        )
        for number in range(4):
            engines[f"pool-{number}"].pin({cores[number % 2]})
        # Four instances are the only choice: what is measured is how they send.
        coordinator.start((4,), Costs(0.001, 1e-3, 0.0).profile((4,), 1.0))
        coordinator.wait_connected(4)
        progress("four instances of a tiny model and two decode instances are up")
        single_s: dict[str, list[float]] = {"ample": [], "half": []}
        together_s: dict[str, list[float]] = {"ample": [], "half": []}
        for number in range(count + 1):
            for name in single_s:
                single = _many(engines, name, 1)
                together = _many(engines, name, TINY_AT_ONCE)
                if number:  # the first one warms up
                    single_s[name].append(single)
                    together_s[name].append(together)
        sizes = _last_sizes(coordinator)
    return {
        "handshake_overhead_half": round(_ratio(together_s) - 1, 4),
        "handshake_overhead_half_alone": round(_ratio(single_s) - 1, 4),
        "four_senders": {
            "sizes": list(sizes),
            "prompts_at_once": TINY_AT_ONCE,
            "mean_ttft_s": {name: round(median(values), 4) for name, values in together_s.items()},
            "alone_ttft_s": {name: round(median(values), 4) for name, values in single_s.items()},
            "measurements_each": count,
        },
    }


def _many(engines: dict[str, BenchEngine], decode: str, count: int) -> float:
    """Mean time to first token of prompts sent at once, one instance after the other."""
    sent = [
        Sent(engines[f"pool-{number % 4}"], engines[decode], TINY_TOKENS, TINY.vocabulary) for number in range(count)
    ]
    return sum(one.wait().ttft_s for one in sent) / count


def _ratio(times_s: dict[str, list[float]]) -> float:
    return median(half / ample for half, ample in zip(times_s["half"], times_s["ample"], strict=True))


# ---------------------------------------------------------------- helpers


def _up(engines: dict[str, BenchEngine], stack: ExitStack) -> dict[str, BenchEngine]:
    for engine in engines.values():
        stack.callback(engine.stop)
    stack.callback(lambda: [engine.terminate() for engine in engines.values()])
    for engine in engines.values():
        engine.wait_ready()
    return engines


def _named(one: Round | Ended) -> list[tuple[str, float]]:
    return [(name.removesuffix("_s").replace("_", " "), value) for name, value in one._asdict().items()]


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt (default: 4096)")
    parser.add_argument(
        "--transport", choices=["shared_memory", "tcp"], default="shared_memory", help="default: shared_memory"
    )
    parser.add_argument("--full", action="store_true", help="15 rounds")
    arguments = parser.parse_args()
    if arguments.full:
        arguments.rounds = 15
    return arguments


if __name__ == "__main__":
    main()
