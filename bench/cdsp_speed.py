"""One long prompt on one instance of stock SGLang, and shared by two instances of a long pool.

    python bench/cdsp_speed.py [--rounds 5] [--tokens 4096] [--out FOLDER]

SmolLM2-135M in float32, one thread an instance, two prefill instances on a core each. Interleaved, round by round:
the prompt on one stock instance; a prompt on each of two stock instances at the same time (what two processes gain on
this machine at all); the prompt on the pool, whose two instances compute it together. Time to first token, through
a decode instance; medians.

The last line is `RESULT {json}`: `sp2_speedup` = stock / pool, `independent_gain` = throughput of two stock instances
over that of one, `sp2_efficiency` = the former over the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
from statistics import median
from typing import Any, NamedTuple

from sglang_ext.models.smollm2 import MODEL_NAME, ModelError, ensure_smollm2
from support.engines import BenchEngine, EngineStartError, free_port
from support.processor_time import OtherLoad
from support.result import give_up, machine, print_result, progress, versions

VOCABULARY = 49152
STOCK = ("--laps-mode", "off")
# Two instances always pay, by these costs: what is measured is the execution, not the decision.
COSTS = {
    "format": "sglang-ext engine profile",
    "version": 1,
    "model": MODEL_NAME,
    "sp": [
        {"size": size, "a_s": 0.001, "b_s_per_token": 0.01 / size, "c_s_per_token2": 0.0, "d_s_per_token2": 0.0}
        for size in (1, 2)
    ],
}


class Round(NamedTuple):
    """Times to first token, seconds."""

    stock_s: float
    two_stock_s: float  # until both of two independent prompts have theirs
    pool_s: float


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed, one for each prefill instance")
    others = OtherLoad()
    try:
        model = ensure_smollm2()
        with tempfile.TemporaryDirectory(prefix="cdsp-speed-") as scratch:
            rounds, collected = _measure(model, Path(scratch), cores, arguments.tokens, arguments.rounds)
    except (EngineStartError, ModelError) as error:
        give_up(str(error))
    stock_s, two_stock_s, pool_s = (median(column) for column in zip(*rounds, strict=True))
    speedup, gain = stock_s / pool_s, 2 * stock_s / two_stock_s
    result = {
        "sp2_speedup": round(speedup, 3),
        "independent_gain": round(gain, 3),
        "sp2_efficiency": round(speedup / gain, 3),
        "stock_s": round(stock_s, 3),
        "pool_s": round(pool_s, 3),
        "tokens": arguments.tokens,
        "shared_requests": collected,
        "rounds": [[round(value, 3) for value in one] for one in rounds],
        "other_load_cores": round(others.mean_cores(), 2),
        "machine": machine(),
        "versions": versions("sglang", "torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "cdsp-speed.json").write_text(json.dumps(result, indent=1) + "\n")
    print_result(result)


def _measure(model: Path, scratch: Path, cores: Sequence[int], tokens: int, count: int) -> tuple[list[Round], int]:
    with ExitStack() as stack:
        address, status_url = stack.enter_context(_coordinator(scratch))
        member = ("--cdsp-coordinator", address, "--cdsp-min-tokens", "512")
        engines = {
            "stock-0": BenchEngine.start("long", model, scratch, worker_options=STOCK),
            "stock-1": BenchEngine.start("long", model, scratch, worker_options=STOCK),
            "pool-0": BenchEngine.start("long", model, scratch, worker_options=member),
            "pool-1": BenchEngine.start("long", model, scratch, worker_options=member),
            "decode": BenchEngine.start("decode", model, scratch),
        }
        for engine in engines.values():
            stack.callback(engine.stop)
        stack.callback(lambda: [engine.terminate() for engine in engines.values()])
        for engine in engines.values():
            engine.wait_ready()
        for name, engine in engines.items():
            if name != "decode":
                engine.pin({cores[int(name[-1])]})
        _wait_connected(status_url)
        progress("two stock instances, a pool of two, and a decode instance are up")
        draw = random.Random(1)
        for name in ("stock-0", "stock-1", "pool-0"):
            _ttft_s(engines, [name], 1024, draw)
        rounds = []
        for number in range(count):
            one = Round(
                _ttft_s(engines, ["stock-0"], tokens, draw),
                _ttft_s(engines, ["stock-0", "stock-1"], tokens, draw),
                _ttft_s(engines, ["pool-0"], tokens, draw),
            )
            rounds.append(one)
            progress(
                f"round {number + 1} of {count}: stock {one.stock_s:.2f} s, two of them {one.two_stock_s:.2f} s, "
                f"pool of two {one.pool_s:.2f} s"
            )
        collected = int(_get(status_url)["requests_collected"])
    return rounds, collected


def _ttft_s(engines: dict[str, BenchEngine], prefills: Sequence[str], tokens: int, draw: random.Random) -> float:
    """Until each of these instances has prefilled a prompt of its own and decode has its first token."""
    bodies = []
    for name in prefills:
        body = {
            "input_ids": [draw.randrange(8, VOCABULARY) for _ in range(tokens)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": engines[name].bootstrap_port,
            "bootstrap_room": draw.getrandbits(62),
        }
        bodies += [(engines[name], body), (engines["decode"], body)]
    failures: list[Exception] = []

    def send(engine: BenchEngine, body: object) -> None:
        try:
            request = urllib.request.Request(
                engine.url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=600) as reply:
                reply.read()
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=send, args=one) for one in bodies]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise EngineStartError(f"a request failed: {failures[0]}")
    return time.perf_counter() - began_s


@contextmanager
def _coordinator(scratch: Path) -> Iterator[tuple[str, str]]:
    """Address for members, and the URL of the status."""
    costs = scratch / "costs.json"
    costs.write_text(json.dumps(COSTS))
    port, http_port = free_port(), free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sglang_ext.cli", "coordinator", "--port", str(port)),
            *("--http-port", str(http_port), "--sp-sizes", "1,2", "--profile", str(costs), "--log-level", "warning"),
        ]
    )
    try:
        yield f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}/status"
    finally:
        process.terminate()
        process.wait()


def _wait_connected(status_url: str) -> None:
    deadline_s = time.monotonic() + 60.0
    while True:
        try:
            status = _get(status_url)
            if len(status["members"]) == 2 and status["is_connected"]:
                return
        except OSError:
            pass
        if time.monotonic() > deadline_s:
            raise EngineStartError("the pool's instances are not connected")
        time.sleep(0.2)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt (default: 4096)")
    parser.add_argument("--full", action="store_true", help="15 rounds")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent / "out", help="folder for the JSON file"
    )
    arguments = parser.parse_args()
    if arguments.full:
        arguments.rounds = 15
    return arguments


if __name__ == "__main__":
    main()
