"""Describes how long an engine takes to start on a CPU: with imports of its own, and forked from a process that has
them.

    python bench/engine_start.py [--rounds 3] [--out FOLDER]

`sglang-ext worker` with a tiny random model, from the start to the first 200 of /health, one engine and four at once,
in turns; medians of the rounds:

- cold: `--start-method spawn`, as SGLang starts: the server, the scheduler and the detokenizer import SGLang each;
- single: the default of a worker on a CPU: one import, the other processes forked;
- fast: what `sglang-ext up` does: the whole engine forked from a process with the imports, which is made once.

The last line is `RESULT {json}`: `one_cold_s`, `one_alone_s`, `one_fast_s`, `four_cold_s`, `four_fast_s` = seconds to
/health (of the last of four); `*_cpu_s` = processor time of all processes of the engines until then; `cpu_ratio` =
one_fast_cpu_s over one_cold_cpu_s; `*_memory_mib` = their proportional share of memory; `imports_s`, `imports_cpu_s`,
`imports_memory_mib` = of the process that engines are forked from, spent once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

from sglang_ext.cluster.fork_client import WORKER_COMMAND, ForkClient, ForkedProcess
from sglang_ext.cluster.process_tree import session_processes
from sglang_ext.engine.launch_plan import shared_cpu_environment
from support.engines import EngineStartError, free_port
from support.processor_time import processor_time_s
from support.random_model import RandomLlama, build_random_llama
from support.result import BenchmarkRun, benchmark_parser, give_up, progress

ROLES = ("short", "short", "long", "decode")
READY_TIMEOUT_S = 240.0
SHAPE = RandomLlama(layers=2, hidden=64, heads=4, vocabulary=512)
Process = subprocess.Popen[bytes] | ForkedProcess
Starter = Callable[[list[str], int], Process]


class Start(NamedTuple):
    """Engines that were started together, until the last is healthy."""

    wall_s: float
    cpu_s: float
    memory_mib: float


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    benchmark = BenchmarkRun("sglang", "torch")
    with tempfile.TemporaryDirectory(prefix="engine-start-") as scratch:
        model, log = build_random_llama(SHAPE, Path(scratch) / "model"), Path(scratch) / "log"
        with ForkClient(log, {**os.environ, **shared_cpu_environment(is_offline=True)}) as client:
            while not client.is_ready:
                if not client.is_alive:
                    give_up(f"the fork server ended: {log.read_text()[-400:]}")
                time.sleep(0.05)
            imports = Start(
                benchmark.elapsed_s(), processor_time_s(client.process.pid), _memory_mib(client.process.pid)
            )
            progress(f"imports made in {imports.wall_s:.1f} s, {imports.cpu_s:.1f} s of processor time")
            starters = {"cold": _executed("spawn"), "single": _executed("fork"), "fast": _forked(client)}
            starts: dict[str, list[Start]] = defaultdict(list)
            for number in range(1, arguments.rounds + 1):
                for count, names in ((1, ("cold", "single", "fast")), (4, ("cold", "fast"))):
                    for name in names:
                        start = _start(starters[name], ROLES[:count] if count > 1 else ("short",), model, log)
                        key = f"{'four' if count == 4 else 'one'}_{name}"
                        starts[key].append(start)
                        progress(
                            f"round {number} of {arguments.rounds}, {key}: {start.wall_s:.1f} s, "
                            f"{start.cpu_s:.1f} s of processor time, {start.memory_mib:.0f} MiB"
                        )
    result = {
        **{f"{key}_s": round(median(one.wall_s for one in ones), 2) for key, ones in starts.items()},
        **{f"{key}_cpu_s": round(median(one.cpu_s for one in ones), 2) for key, ones in starts.items()},
        **{f"{key}_memory_mib": round(median(one.memory_mib for one in ones)) for key, ones in starts.items()},
        "cpu_ratio": round(
            median(one.cpu_s for one in starts["one_fast"]) / median(one.cpu_s for one in starts["one_cold"]), 3
        ),
        "imports_s": round(imports.wall_s, 2),
        "imports_cpu_s": round(imports.cpu_s, 2),
        "imports_memory_mib": round(imports.memory_mib),
        "rounds": arguments.rounds,
        "measured": {key: [[round(value, 2) for value in one] for one in ones] for key, ones in starts.items()},
        "model": str(SHAPE),
    }
    benchmark.end(result, arguments.out / "engine-start.json")


def _executed(method: str) -> Starter:
    def start(options: list[str], output: int) -> Process:
        command = [*WORKER_COMMAND, "--start-method", method, *options]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)

    return start


def _forked(client: ForkClient) -> Starter:
    def start(options: list[str], output: int) -> Process:
        return client.start(options, output=output, environment=os.environ, cores=os.sched_getaffinity(0))

    return start


def _start(starter: Starter, roles: tuple[str, ...], model: Path, log: Path) -> Start:
    """Start one engine of each role together, and stop them again."""
    processes: list[Process] = []
    urls: list[str] = []
    began_s = time.monotonic()
    try:
        with log.open("wb") as output:
            for role in roles:
                port = free_port()
                urls.append(f"http://127.0.0.1:{port}/health")
                options = ["--role", role, "--model-path", str(model), "--port", str(port), "--threads", "1"]
                options += ["--bootstrap-port", str(free_port()), "--exit-with-parent"]
                options += ["--", "--skip-tokenizer-init"]
                processes.append(starter(options, output.fileno()))
        with ThreadPoolExecutor(len(urls)) as threads:
            ready_s = max(threads.map(_wait_healthy, urls, processes, [log] * len(urls)))
        cpu_s = sum(processor_time_s(process.pid) for process in processes)
        memory_mib = sum(_memory_mib(pid) for process in processes for pid in session_processes(process.pid))
        return Start(ready_s - began_s, cpu_s, memory_mib)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_healthy(url: str, process: Process, log: Path) -> float:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                if reply.status == 200:
                    return time.monotonic()
        except OSError:
            pass
        time.sleep(0.05)
    raise EngineStartError(f"an engine did not start: {log.read_text(errors='replace')[-400:]}")


def _memory_mib(pid: int) -> float:
    """Proportional set size: shared pages count in parts."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0.0)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except EngineStartError as error:
        give_up(str(error))
