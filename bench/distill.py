"""A distillation job over real instances: stock SGLang with a good client, and `batch run` over the same hardware.

    python bench/distill.py [--full] [--rows N] [--data FOLDER] [--out FOLDER]

Each side has one prefill instance (first core) and one decode instance (second core, with router and client); a random
Llama whose prefill is computation. Stock: SGLang's own scheduler behind `sglang_router`, and a client whose number of
requests at a time is the best of 16, 32, 64 and 128; its engines have this project's attention for CPUs, too, without
which they would be slower. Ours: LAPS, our router, `sglang-ext batch run` as a process, with its store and export.

* `time_ratio`: the job's time, ours over stock, in alternating halves.
* `score_time_ratio`: scores of sequences, over what stock gives them with: prefill and decode with one new token where
  these come through its router, else one undivided server.
* `online_p99_ratio`: time to first token of light online traffic while the job runs, divided by the time without it.
* `kill_cost_s`: time lost by kill -9 in the middle and starting again.

Writes `distill.json`; the last line is `RESULT {json}`.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from support.distill_job import BatchRun, Job, JobFailedError, best_concurrency, run_batch, run_client, write_job
from support.engines import BenchEngine, EngineStartError, free_port
from support.mixed_load import Replayer, TraceMix, load_mix, percentile
from support.random_model import RandomLlama, build_random_llama
from support.result import BenchmarkRun, benchmark_parser, give_up, progress

MODEL = RandomLlama(layers=6, hidden=384, heads=6, kv_heads=2)
LONG_SHARE = 0.1
LONG_RANGE_TOKENS = (1024, 4096)
DIVIDE_LENGTHS_BY = 2
NEW_TOKENS = 16
TOP_LOGPROBS = 8
CONCURRENCIES = (16, 32, 64, 128)
ONLINE_PER_S = 1.5
STOCK_OPTIONS = ("--laps-mode", "off")


class JobMaker(Protocol):
    """Makes a job of `count` rows; with `top` its sequences are scored."""

    def __call__(self, name: str, count: int, seed: int, top: int = 0) -> Job: ...


class Sides(NamedTuple):
    """Describes where the two sides are reached, and the undivided server."""

    stock_url: str
    our_url: str
    plain_url: str
    stock_engine_urls: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        """Of all sides."""
        return self.stock_url, self.our_url, self.plain_url


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        give_up("two cores are needed: one for the prefill instances, one for everything else")
    benchmark = BenchmarkRun("sglang", "torch", "sglang-router")
    mix = load_mix(arguments.data, LONG_RANGE_TOKENS, DIVIDE_LENGTHS_BY)
    rows = arguments.rows * (3 if arguments.full else 1)
    progress(f"model: {MODEL}, float32; workload: {rows} rows, {mix.describe(LONG_SHARE)}; {NEW_TOKENS} new tokens")
    try:
        with tempfile.TemporaryDirectory(prefix="distill-") as folder, _sides(Path(folder), cores) as sides:
            figures = _measure(sides, Path(folder), mix, rows)
    except (EngineStartError, JobFailedError) as error:
        give_up(str(error))
    result = {
        **figures,
        "rows": rows,
    }
    benchmark.end(result, arguments.out / "distill.json")


def _measure(sides: Sides, folder: Path, mix: TraceMix, rows: int) -> dict[str, object]:
    def job(name: str, count: int, seed: int, top: int = 0) -> Job:
        return write_job(folder / f"{name}.jsonl", mix, count, LONG_SHARE, NEW_TOKENS, seed, top)

    out = folder / "out.jsonl"
    warm_up = job("warm-up", 60, 1)
    for url in sides.urls:
        run_client(url, warm_up, 16, out)
    progress("how many at a time stock serves fastest:")
    tuned = job("tune", max(100, rows // 8), 2)
    concurrency = best_concurrency(sides.stock_url, tuned, CONCURRENCIES, out, sides.stock_engine_urls)
    halves = [job(f"half-{number}", rows // 2, 10 + number) for number in range(2)]
    stock_s = our_s = 0.0
    for number, half in enumerate(halves):
        for side in ("stock", "ours") if number % 2 == 0 else ("ours", "stock"):
            if side == "stock":
                seconds = run_client(sides.stock_url, half, concurrency, out)
                stock_s += seconds
            else:
                seconds = run_batch(sides.our_url, half, folder / f"half-{number}-out.jsonl")
                our_s += seconds
            progress(f"half {number + 1}, {side}: {seconds:.1f} s, {half.prompt_tokens / seconds:.0f} prompt tokens/s")
    prompt_tokens = sum(half.prompt_tokens for half in halves)
    scoring = _measure_scores(sides, folder, job, rows)
    online = _measure_online(sides, folder, job, mix, rows)
    killed = _measure_kill(sides, folder, job, rows)
    return {
        "time_ratio": round(our_s / stock_s, 3),
        **scoring,
        **online,
        **killed,
        "stock_s": round(stock_s, 1),
        "ours_s": round(our_s, 1),
        "stock_concurrency": concurrency,
        "stock_tokens_per_s": round((prompt_tokens + rows * NEW_TOKENS) / stock_s),
        "our_tokens_per_s": round((prompt_tokens + rows * NEW_TOKENS) / our_s),
    }


def _measure_scores(sides: Sides, folder: Path, job: JobMaker, rows: int) -> dict[str, object]:
    """The same sequences through ours and through what gives scores in stock SGLang."""
    through_pd = _gives_scores(sides.stock_url)
    base_url = sides.stock_url if through_pd else sides.plain_url
    base = "prefill and decode, max_new_tokens 1" if through_pd else "an undivided server"
    progress(f"scores: stock gives them through {base}")
    out = folder / "out.jsonl"
    concurrency = best_concurrency(
        base_url,
        job("tune-score", max(50, rows // 16), 20, TOP_LOGPROBS),
        (8, 32, 128),
        out,
        sides.stock_engine_urls if through_pd else (sides.plain_url,),
    )
    base_s = our_s = 0.0
    for number in range(2):
        half = job(f"score-{number}", rows // 8, 30 + number, TOP_LOGPROBS)
        for side in ("stock", "ours") if number % 2 == 0 else ("ours", "stock"):
            if side == "stock":
                seconds = run_client(base_url, half, concurrency, out)
                base_s += seconds
            else:
                options = ("--mode", "score", "--top-logprobs", str(TOP_LOGPROBS))
                seconds = run_batch(sides.our_url, half, folder / f"scores-{number}.parquet", options)
                our_s += seconds
            progress(f"scores {number + 1}, {side}: {seconds:.1f} s, {half.prompt_tokens / seconds:.0f} tokens/s")
    return {
        "score_time_ratio": round(our_s / base_s, 3),
        "score_base": base,
        "score_base_s": round(base_s, 1),
        "score_ours_s": round(our_s, 1),
    }


def _gives_scores(url: str) -> bool:
    body = {
        "input_ids": [9, 10, 11, 12],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": TOP_LOGPROBS,
    }
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        info = json.load(reply)["meta_info"]
    return len(info.get("input_token_logprobs") or []) == 4 and len(info.get("input_top_logprobs") or []) == 4


def _measure_online(sides: Sides, folder: Path, job: JobMaker, mix: TraceMix, rows: int) -> dict[str, object]:
    """Send light traffic of short prompts through our router, first without a job, then during a longer one."""
    duration_s = max(40.0, rows / 25)
    replayer = Replayer(sides.our_url, MODEL.vocabulary, 8)
    arrivals = [arrival for arrival in mix.arrivals(ONLINE_PER_S, duration_s, 0.01, 40) if not arrival.is_long]
    idle = [reply.ttft_s for reply in replayer.run(arrivals, 41) if reply.ttft_s is not None]
    large = job("during", max(rows, 2000) * 2, 42)
    with BatchRun(sides.our_url, large, folder / "during-out.jsonl") as run:
        time.sleep(8.0)
        during = [reply.ttft_s for reply in replayer.run(arrivals, 43) if reply.ttft_s is not None]
        if run.has_ended:
            progress("warning: the job ended before the online traffic did")
    answered = (len(idle), len(during), len(arrivals))
    idle_s, during_s = percentile(idle, 0.99), percentile(during, 0.99)
    progress(f"online, without and during the job: P99 {idle_s:.3f} s and {during_s:.3f} s")
    return {
        "online_p99_ratio": round(during_s / idle_s, 3),
        "online_p50_ratio": round(percentile(during, 0.5) / percentile(idle, 0.5), 3),
        "online_p99_idle_s": round(idle_s, 3),
        "online_p99_during_s": round(during_s, 3),
        "online_answered_of": answered,
    }


def _measure_kill(sides: Sides, folder: Path, job: JobMaker, rows: int) -> dict[str, object]:
    """One job whole; another of the same kind killed in its middle and started again."""
    whole_s = run_batch(sides.our_url, job("whole", rows // 5, 50), folder / "whole-out.jsonl")
    killed = job("killed", rows // 5, 51)
    output = folder / "killed-out.jsonl"
    began_s = time.perf_counter()
    with BatchRun(sides.our_url, killed, output):
        time.sleep(whole_s / 2)
    run_batch(sides.our_url, killed, output)
    total_s = time.perf_counter() - began_s
    ids = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    if len(ids) != rows // 5 or len(set(ids)) != len(ids):
        raise JobFailedError(f"{len(ids)} rows of {rows // 5} in the output after a kill, {len(set(ids))} different")
    progress(f"killed in the middle: {total_s:.1f} s instead of {whole_s:.1f} s")
    return {"kill_cost_s": round(total_s - whole_s, 2), "kill_whole_s": round(whole_s, 2)}


# -- instances and routers ------------------------------------------------------------------------------------


@contextmanager
def _sides(folder: Path, cores: Sequence[int]) -> Iterator[Sides]:
    model = folder / "model"
    model.mkdir()
    build_random_llama(MODEL, model)
    with ExitStack() as stack:
        stock = [_start(stack, role, model, folder, STOCK_OPTIONS) for role in ("both", "decode")]
        ours = [_start(stack, role, model, folder) for role in ("both", "decode")]
        plain = _start(stack, "both", model, folder, STOCK_OPTIONS, ("--disaggregation-mode", "null"))
        engines = (*stock, *ours, plain)
        for engine in engines:
            engine.wait_ready()
        stack.callback(lambda: [engine.terminate() for engine in engines])
        for engine in (stock[0], ours[0], plain):
            engine.pin({cores[0]})
        for engine in (stock[1], ours[1]):
            engine.pin({cores[1]})
        os.sched_setaffinity(0, {cores[1]})
        progress("five instances are up")
        stock_port, our_port = free_port(), free_port()
        _start_peer_router(stack, stock_port, stock[0], stock[1], folder / "sglang-router.log")
        command = [
            *(sys.executable, "-m", "sglang_ext.cli", "router", "--port", str(our_port), "--log-level", "warning"),
            *("--prefill", ours[0].url, str(ours[0].bootstrap_port), "--decode", ours[1].url),
        ]
        _start_process(stack, command, folder / "router.log")
        urls = [f"http://127.0.0.1:{port}" for port in (stock_port, our_port)]
        for url in urls:
            _wait_serving(url)
        yield Sides(urls[0], urls[1], plain.url, (stock[0].url, stock[1].url))


def _start(
    stack: ExitStack,
    role: str,
    model: Path,
    folder: Path,
    options: Sequence[str] = (),
    engine_arguments: Sequence[str] = (),
) -> BenchEngine:
    engine = BenchEngine.start(role, model, folder, worker_options=options, engine_arguments=engine_arguments)
    stack.callback(engine.stop)
    return engine


def _start_peer_router(stack: ExitStack, port: int, prefill: BenchEngine, decode: BenchEngine, log: Path) -> None:
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"),
        *("--port", str(port), "--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url),
        *("--prometheus-port", str(free_port()), "--log-level", "warn", "--request-timeout-secs", "600"),
    ]
    _start_process(stack, command, log)


def _start_process(stack: ExitStack, command: Sequence[str], log: Path) -> None:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    stack.callback(process.wait)
    stack.callback(process.kill)


def _wait_serving(url: str) -> None:
    body = json.dumps({"input_ids": [9, 10], "sampling_params": {"max_new_tokens": 1}}).encode()
    end_s = time.monotonic() + 60
    while True:
        try:
            request = urllib.request.Request(url + "/generate", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=20):
                return
        except OSError as error:
            if time.monotonic() > end_s:
                raise EngineStartError(f"{url} does not serve: {error}") from None
            time.sleep(0.5)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_traces=True)
    parser.add_argument("--rows", type=int, default=2000, help="rows of the job (default: 2000)")
    parser.add_argument("--full", action="store_true", help="three times as many")
    return parser.parse_args()


if __name__ == "__main__":
    main()
