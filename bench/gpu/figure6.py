"""LAPS, figure 6, one instance: requests/s and latency under closed-loop load, by system and concurrency.

    python -m gpu.figure6 --out FILE [--model NAME] [--small]

Short and long prompts as in conversations: a request goes on where one of its client's earlier ones ended, so most
are re-prefills with a cached prefix. All systems are one prefill instance of SGLang at its default flags, with a
stand-in for KV transfer and decode: nothing is sent, and a request ends with its first token, so its time to the first
token is the whole of its time. They differ in LAPS's two queues and in its graphs alone; `stock` has neither. All have
this project's other hooks, of which the stand-in is one.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from gpu.model_shapes import write_model
from sglang_ext.cluster.ports import pick_free_ports
from sglang_ext.policy.laps.options import LapsOptions
from sglang_ext.sglang_plugin.device import Device
from sglang_ext.sglang_plugin.graphs.graph_options import Capture, GraphOptions
from sglang_ext.sglang_plugin.options import ExtensionOptions
from sglang_ext.sglang_plugin.transfer_backend import STAND_IN
from sglang_ext.types import Role

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
LONG_SHARE = 0.1
LONG_TOKENS = (1024, 4096)
SHORT_MEDIAN_TOKENS, SHORT_SIGMA = 48, 0.9
TURNS = 6
START_TIMEOUT_S = 240.0


class System(NamedTuple):
    """What is not SGLang's own in a server."""

    laps: LapsOptions | None = None
    graphs: GraphOptions | None = None


class Server(NamedTuple):
    """Where a prefill instance listens."""

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
    "graphs": System(graphs=GraphOptions(Capture.START)),
    "two queues": System(LapsOptions()),
    "all": System(LapsOptions(), GraphOptions(Capture.START)),
}


class Load(NamedTuple):
    """How much is asked."""

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
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(client(session, 1000 * concurrency + number) for number in range(concurrency)))
    return {
        "concurrency": concurrency,
        "requests": len(times),
        "failed": failed,
        "cached_share": cached_tokens / max(1, asked_tokens),
        "requests_per_s": len(times) / (time.perf_counter() - started_s),
        "mean_s": statistics.fmean(times),
        "p90_s": sorted(times)[int(0.9 * (len(times) - 1))],
    }


def launch_command(
    model: Path, system: System, ports: Sequence[int], has_gpu: bool
) -> tuple[list[str], dict[str, str]]:
    """What starts a prefill instance on two ports, its own and its bootstrap server's; what to add to the environment.

    The flags are those that a machine needs, none is to make SGLang faster or slower.
    """
    flags = ["--model-path", str(model), "--load-format", "dummy", "--port", str(ports[0]), "--skip-tokenizer-init"]
    flags += ["--sampling-backend", "pytorch", "--log-level", "warning"]
    flags += ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(ports[1])]
    flags += ["--disaggregation-transfer-backend", STAND_IN]
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "HOST_IP": "127.0.0.1"}
    if has_gpu:
        flags += ["--dtype", "bfloat16", "--attention-backend", "triton", "--grammar-backend", "none"]
    else:
        flags += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
        flags += ["--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", "16384"]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    device = Device.CUDA if has_gpu else Device.CPU
    environment |= ExtensionOptions(Role.BOTH, device, system.laps, graphs=system.graphs).to_environment()
    return [sys.executable, "-m", "sglang_ext.sglang_plugin.launch", *flags], environment


@contextmanager
def serve(model: Path, system: System, has_gpu: bool) -> Iterator[Server]:
    """A prefill instance, ready. Raises RuntimeError with the end of its log."""
    ports = pick_free_ports("127.0.0.1", 2, draw=random.SystemRandom())
    server = Server(f"http://127.0.0.1:{ports[0]}", ports[1])
    command, added = launch_command(model, system, ports, has_gpu)
    environment = {**os.environ, **added}
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log, entry_point_folder() as folder:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        # In the stage's own session: a stage that is given up takes its server with it.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_ready(server.url, process, Path(log.name))
            yield server
            if process.poll() is not None:
                raise RuntimeError(f"a server ended: {last_error(Path(log.name))}")
        except OSError as error:
            raise RuntimeError(f"a server does not answer: {last_error(Path(log.name))}") from error
        finally:
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
    """What an installation would have told SGLang of this project's plugin; nothing where there is one."""
    if entry_points(group="sglang.srt.plugins", name="sglang_ext"):
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "sglang_ext_bench-0.dist-info"
        told.mkdir()
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-ext-bench\nVersion: 0\n")
        (told / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nsglang_ext = sglang_ext.sglang_plugin.entry_point:register\n"
        )
        yield folder


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
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
    """What the two queues say of themselves: boundary, fit, how often a long prefill yielded."""
    with urllib.request.urlopen(f"{server.url}/laps", timeout=10) as reply:
        return json.load(reply)


def measure(model: Path, system: System, load: Load, has_gpu: bool) -> dict[str, Any]:
    try:
        with serve(model, system, has_gpu) as server:
            asyncio.run(level(server, 2, load._replace(seconds=min(2.0, load.seconds))))  # warm
            found = {"levels": [asyncio.run(level(server, concurrency, load)) for concurrency in load.concurrencies]}
            return found if system.laps is None else {**found, "laps": laps_status(server)}
    except RuntimeError as error:
        return {"error": str(error)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-32b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each concurrency")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    import torch

    has_gpu = torch.cuda.is_available()
    load = Load((1, 2), 3.0, 4) if arguments.small else Load(CONCURRENCIES, arguments.seconds, 1)
    systems: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model("tiny" if arguments.small else arguments.model, Path(folder))
        for name, system in SYSTEMS.items():
            systems[name] = measure(Path(folder), system, load, has_gpu)
    arguments.out.write_text(json.dumps({"systems": systems}), encoding="utf-8")
    return 1 if all("levels" not in system for system in systems.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
