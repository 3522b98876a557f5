"""LAPS, figure 6, one instance: requests/s and latency under closed-loop load, by system and concurrency.

    python -m gpu.figure6 --system NAME --out FILE [--model NAME] [--concurrencies 64,8,1] [--small]

Short and long prompts as in conversations: a request goes on where one of its client's earlier ones ended, so most
are re-prefills with a cached prefix. All systems are one prefill instance of SGLang at its default flags, with a
stand-in for KV transfer and decode: nothing is sent, and a request ends with its first token, so its time to the first
token is the whole of its time. They differ in LAPS's two queues and in its graphs alone; `stock` has neither. All have
this project's other hooks, of which the stand-in is one.

SGLang's default attention on Hopper GPUs is FlashAttention 3. Where its kernels are not there, all run with Triton's;
`stock-flashinfer` has flashinfer's in any case. One system a process; what there is, is written after each concurrency.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from gpu.card import busy_samples
from gpu.model_shapes import write_model
from gpu.stage_plan import CONCURRENCIES
from sglang_ext.cluster.ports import pick_free_ports
from sglang_ext.engine.device import Device
from sglang_ext.engine.options import ExtensionOptions
from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.transfer.sglang.transfer_backend import STAND_IN
from sglang_ext.types import Role
from support.result import write_json

LONG_SHARE = 0.1
LONG_TOKENS = (1024, 4096)
SHORT_MEDIAN_TOKENS, SHORT_SIGMA = 48, 0.9
TURNS = 6
START_TIMEOUT_S = 240.0
LEAST_CORES, CLIENT_CORES = 8, 4
NO_GRAPHS = "no prefill graphs by length and batch size"


class System(NamedTuple):
    """Describes what is not SGLang's own in a server."""

    laps: LapsOptions | None = None
    graphs: GraphOptions | None = None
    attention: str | None = None  # None: SGLang's default where its kernels are there


class Server(NamedTuple):
    """Describes where a prefill instance listens."""

    url: str
    bootstrap_port: int

    def request(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The body of a request that prefills `prompt`, in a room of its own."""
        return {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(_ROOMS),
        }


_ROOMS = itertools.count(1)
_CAUSE = re.compile(r"[\w.]+(Error|Exception)\b")
SYSTEMS = {
    "stock": System(),
    "stock-flashinfer": System(attention="flashinfer"),
    "graphs": System(graphs=GraphOptions(Capture.START)),
    "two-queues": System(LapsOptions()),
    "all": System(LapsOptions(), GraphOptions(Capture.START)),
}


class Load(NamedTuple):
    """Describes how much is asked."""

    concurrencies: tuple[int, ...]
    seconds: float
    divide_lengths_by: int


def turns(seed: int, divide_by: int) -> Iterator[list[int]]:
    """Prompts of one client without end: conversations whose turns begin with all messages before them."""
    draw = random.Random(seed)
    while True:
        prompt: list[int] = []
        for _ in range(draw.randint(1, TURNS)):
            is_long = draw.random() < LONG_SHARE
            tokens = (
                draw.randint(*LONG_TOKENS) if is_long else draw.lognormvariate(0.0, SHORT_SIGMA) * SHORT_MEDIAN_TOKENS
            )
            prompt = prompt + [draw.randint(5, 4000) for _ in range(max(1, int(tokens) // divide_by))]
            yield prompt


async def level(server: Server, concurrency: int, load: Load) -> dict[str, Any]:
    """Closed-loop clients for a while: what they got."""
    times: list[float] = []
    failed = asked_tokens = cached_tokens = 0
    end_s = time.perf_counter() + load.seconds

    async def client(session: aiohttp.ClientSession, seed: int) -> None:
        nonlocal failed, asked_tokens, cached_tokens
        for prompt in turns(seed, load.divide_lengths_by):
            started_s = time.perf_counter()
            if started_s >= end_s:
                return
            try:
                async with session.post(f"{server.url}/generate", json=server.request(prompt)) as reply:
                    body = await reply.read()
                if reply.status == 200:
                    asked_tokens += len(prompt)
                    cached_tokens += json.loads(body)["meta_info"]["cached_tokens"]
                else:
                    failed += 1
            except (aiohttp.ClientError, TimeoutError):
                failed += 1
            times.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=120)
    with busy_samples() as busy_shares:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(client(session, 1000 * concurrency + number) for number in range(concurrency)))
        took_s = time.perf_counter() - started_s
    return {
        "concurrency": concurrency,
        "requests": len(times),
        "failed": failed,
        "cached_share": cached_tokens / max(1, asked_tokens),
        "requests_per_s": len(times) / took_s,
        "mean_s": statistics.fmean(times),
        "p90_s": sorted(times)[int(0.9 * (len(times) - 1))],
        "busy_share": statistics.fmean(busy_shares) if busy_shares else None,
    }


def launch_command(
    model: Path, system: System, ports: Sequence[int], has_gpu: bool
) -> tuple[list[str], dict[str, str]]:
    """Return what starts a prefill instance on two ports, its own and its bootstrap server's; what to add to the
    environment.

    The flags are those that a machine needs, none is to make SGLang faster or slower.
    """
    flags = ["--model-path", str(model), "--load-format", "dummy", "--port", str(ports[0]), "--skip-tokenizer-init"]
    flags += ["--sampling-backend", "pytorch", "--log-level", "warning", "--random-seed", "7"]
    flags += ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(ports[1])]
    flags += ["--disaggregation-transfer-backend", STAND_IN]
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "HOST_IP": "127.0.0.1"}
    if has_gpu:
        flags += ["--dtype", "bfloat16", "--grammar-backend", "none"]
        attention = system.attention or (None if has_default_attention() else "triton")
        flags += [] if attention is None else ["--attention-backend", attention]
    else:
        flags += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
        flags += ["--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", "16384"]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    device = Device.CUDA if has_gpu else Device.CPU
    environment |= ExtensionOptions(Role.BOTH, device, system.laps, graphs=system.graphs).to_environment()
    return [sys.executable, "-m", "sglang_ext.engine.launch", *flags], environment


def has_default_attention() -> bool:
    """Return whether FlashAttention 3 is there, SGLang's default on Hopper GPUs."""
    kernels = find_spec("sgl_kernel")
    folders = [] if kernels is None else list(kernels.submodule_search_locations or ())
    return any(list(Path(folder).glob("flash_ops*.so")) for folder in folders)


def divide_cores(cores: set[int]) -> tuple[set[int], set[int]]:
    """Cores of the server, and of the clients that ask it: apart where there are eight or more."""
    ordered = sorted(cores)
    if len(ordered) < LEAST_CORES:
        return cores, cores
    return set(ordered[:-CLIENT_CORES]), set(ordered[-CLIENT_CORES:])


@contextmanager
def serve(
    model: Path, system: System, has_gpu: bool, log: Path, timeout_s: float = START_TIMEOUT_S
) -> Iterator[Server]:
    """A prefill instance, ready, that appends to `log`. Raises RuntimeError with the cause in its log."""
    ports = pick_free_ports("127.0.0.1", 2, draw=random.SystemRandom())
    server = Server(f"http://127.0.0.1:{ports[0]}", ports[1])
    command, added = launch_command(model, system, ports, has_gpu)
    environment = {**os.environ, **added}
    server_cores, client_cores = divide_cores(os.sched_getaffinity(0))
    with log.open("a", encoding="utf-8") as output, entry_point_folder() as folder:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        os.sched_setaffinity(0, server_cores)
        # In the stage's own session: a stage that is given up takes its server with it.
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        os.sched_setaffinity(0, client_cores)
        try:
            wait_ready(server.url, process, log, timeout_s)
            yield server
            if process.poll() is not None:
                raise RuntimeError(f"a server ended: {last_error(log)}")
        except OSError as error:
            raise RuntimeError(f"a server does not answer: {last_error(log)}") from error
        finally:
            os.sched_setaffinity(0, server_cores | client_cores)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.kill()
                process.kill()
                process.wait()


@contextmanager
def entry_point_folder() -> Iterator[str]:
    """Return how an installation would have registered the plugin with SGLang; nothing where there is one."""
    if entry_points(group="sglang.srt.plugins", name="sglang_ext"):
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "sglang_ext_bench-0.dist-info"
        told.mkdir()
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-ext-bench\nVersion: 0\n")
        (told / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nsglang_ext = sglang_ext.engine.entry_point:register\n"
        )
        yield folder


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"a server did not start: {last_error(log)}")


def last_error(log: Path) -> str:
    """The last error in a log, or its last line: processes that end because another one did log after it."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    return ([line for line in lines if _CAUSE.match(line)] or lines)[-1]


def laps_status(server: Server) -> Any:
    """Return what the two queues say of themselves: boundary, fit, how often a long prefill yielded."""
    with urllib.request.urlopen(f"{server.url}/laps", timeout=10) as reply:
        return json.load(reply)


def decisions_between(before: Mapping[str, Any], after: Mapping[str, Any], took_s: float) -> dict[str, Any]:
    """Return what LAPS's decisions took between two reports: before how many batches, seconds each, share of `took_s`.

    The device computes meanwhile or waits for them; SGLang's own building of a batch is not in it.
    """
    batches = after["decisions"]["batches"] - before["decisions"]["batches"]
    seconds = after["decisions"]["seconds"] - before["decisions"]["seconds"]
    return {"batches": batches, "mean_s": seconds / batches if batches else None, "share": seconds / took_s}


def with_decisions(server: Server, system: System, load: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run a level of load: what it got, and what LAPS's decisions took meanwhile where the system has them."""
    if system.laps is None:
        return asyncio.run(load)
    before, started_s = laps_status(server), time.perf_counter()
    found = asyncio.run(load)
    took_s = time.perf_counter() - started_s
    return {**found, "decisions": decisions_between(before, laps_status(server), took_s)}


def measure(
    model: Path,
    system: System,
    load: Load,
    has_gpu: bool,
    log: Path,
    record: Callable[[dict[str, Any]], None],
    end_s: float,
) -> None:
    """All levels that are begun before `end_s` of the clock `time.perf_counter`; `record` gets what there is."""
    levels: list[dict[str, Any]] = []
    try:
        timeout_s = min(START_TIMEOUT_S, end_s - time.perf_counter())
        with serve(model, system, has_gpu, log, timeout_s) as server:
            # Kernels are compiled, loaded and tuned now, at sizes of batches that will come.
            asyncio.run(level(server, min(16, max(load.concurrencies)), load._replace(seconds=min(2.0, load.seconds))))
            for concurrency in load.concurrencies:
                if time.perf_counter() + load.seconds > end_s:
                    record({"not_measured": f"from concurrency {concurrency} on: the time was used up"})
                    break
                levels.append(with_decisions(server, system, level(server, concurrency, load)))
                record({"levels": levels} if system.laps is None else {"levels": levels, "laps": laps_status(server)})
        problem = missing_graphs(log) if system.graphs is not None and has_gpu else None
        if problem is not None:
            record({"error": problem})
    except RuntimeError as error:
        record({"error": str(error)})


def missing_graphs(log: Path) -> str | None:
    """The line in which a server says that it runs without the graphs it was asked for; None where it does not."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if NO_GRAPHS in line), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-32b")
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concurrencies", default=",".join(map(str, CONCURRENCIES)), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each concurrency")
    parser.add_argument("--within", type=float, default=500.0, help="no level is begun later (s; default: 500)")
    parser.add_argument("--attention", default=None, help="SGLang's backend (default: its own choice, or triton)")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    system = SYSTEMS[arguments.system]
    if system.attention is None:
        system = system._replace(attention=arguments.attention)
    end_s = time.perf_counter() + arguments.within
    import torch

    has_gpu = torch.cuda.is_available()
    concurrencies = tuple(int(part) for part in arguments.concurrencies.split(","))
    load = Load((2, 1), 3.0, 4) if arguments.small else Load(concurrencies, arguments.seconds, 1)
    found: dict[str, Any] = {"attention": system.attention or ("default" if has_default_attention() else "triton")}

    def record(more: dict[str, Any]) -> None:
        found.update(more)
        write_json(arguments.out, found)

    record({})
    with tempfile.TemporaryDirectory() as folder:
        write_model(arguments.model, Path(folder))
        log = arguments.out.with_suffix(".log")
        measure(Path(folder), system, load, has_gpu, log, record, end_s)
    return 0 if "levels" in found else 1


if __name__ == "__main__":
    sys.exit(main())
