"""LAPS on one prefill instance: requests/s and TTFT under load, against stock SGLang at its default flags.

    python bench/gpu/serve.py [--out FILE] [--systems stock,all,own-graphs,graphs,two-queues] [--concurrencies 64]
    python bench/gpu/serve.py --windows adaptive,0,30,5,15 [--rates 360,180,60] [--out FILE]

The first form is LAPS's figure 6, a closed loop of clients: conversations whose turns begin with all messages before
them, a tenth of the messages long (1,024 to 4,096 tokens). The second is its figure 5, an open loop of short prompts
that are due at moments drawn beforehand, by waiting window, with both queues and graphs.

Each system is one prefill instance of SGLang, started for it, with a stand-in for KV transfer and decode: nothing is
sent, and a request ends with its first token, so its whole time is its TTFT. Systems differ only in LAPS's two queues
and in graphs. `stock` has SGLang's default flags, which on CUDA include its own `breakable` prefill graphs;
`own-graphs` asks for them and is left out where `stock` has them. Attention is SGLang's default where FlashAttention 3
is installed, else Triton's, for all systems. Clients have cores of their own where there are eight or more.

What is found is written after each level of load. A server that fails is a check that failed, with the end of its log
in the record; the next system is started.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import aiohttp
import psutil

import gpu.checkout  # noqa: F401
from gpu.measure import HAS_GPU, Report, parser
from gpu.model_shapes import SHAPES, prefill_operations, write_model
from gpu.sglang_runner import default_attention
from sglang_ext.engine.device import Device
from sglang_ext.engine.options import ExtensionOptions
from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.ports import pick_free_ports
from sglang_ext.transfer.sglang.transfer_backend import STAND_IN
from sglang_ext.types import Role

LONG_SHARE, LONG_TOKENS = 0.1, (1024, 4096)
SHORT_MEDIAN_TOKENS, SHORT_SIGMA, MAX_SHORT_TOKENS = 48, 0.9, 256  # the last only of figure 5
MAX_TURNS = 6
AIM_CLIENTS, AIM_RATE_PER_S = 64, 360.0
MAX_DECIDING_SHARE = 0.02  # a tenth of what figure 6 is to gain
START_TIMEOUT_S, START_ESTIMATE_S, WARM_S = 180.0, 60.0, 3.0
MIN_CORES, CLIENT_CORES = 8, 4
ADAPTIVE = "adaptive"
NOMINAL_OPERATIONS_PER_S = 7.9e14  # bfloat16 products that an H100 and an H200 have shown


class System(NamedTuple):
    """Describes what is not SGLang's own in an instance, and flags beyond those that each has."""

    laps: LapsOptions | None = None
    graphs: GraphOptions | None = None
    flags: tuple[str, ...] = ()


class Server(NamedTuple):
    """Describes where a prefill instance listens."""

    url: str
    bootstrap_port: int

    def request(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the body of a request that prefills `prompt`, in a room of its own."""
        return {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(_ROOMS),
        }

    def get(self, path: str) -> Any:
        """Return the JSON of a GET. Raises OSError."""
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return json.load(reply)


class Prompt(NamedTuple):
    """A request; `is_long` is of its last message."""

    tokens: list[int]
    is_long: bool
    due_s: float = 0.0  # from the start of an open load


class Answer(NamedTuple):
    """Describes what became of a request. Times are from the start of the load; it began when it was sent or due."""

    is_long: bool
    began_s: float
    ended_s: float
    is_failed: bool
    prompt_tokens: int
    cached_tokens: int


_ROOMS = itertools.count(1)
# Every window takes a start of the server: fewer lengths than by default.
_WINDOW_GRAPHS = GraphOptions(Capture.START, lengths_tokens=(32, 64, 128, 256))
SYSTEMS = {
    "stock": System(),
    "all": System(LapsOptions(), GraphOptions(Capture.START)),
    "own-graphs": System(flags=("--cuda-graph-backend-prefill", "breakable")),
    "graphs": System(graphs=GraphOptions(Capture.START)),
    "two-queues": System(LapsOptions()),
}
WINDOWS = {ADAPTIVE: System(LapsOptions(), _WINDOW_GRAPHS)} | {
    # The longest window must be above 0.
    f"{ms:g}": System(LapsOptions(w_min_ms=ms, w_max_ms=max(ms, 0.01)), _WINDOW_GRAPHS)
    for ms in (0.0, 30.0, 5.0, 15.0)
}


def turns(seed: int, divide_by: int) -> Iterator[Prompt]:
    """Yield the prompts of one client without end: conversations whose turns begin with all messages before them."""
    draw = random.Random(seed)
    while True:
        tokens: list[int] = []
        for _ in range(draw.randint(1, MAX_TURNS)):
            is_long = draw.random() < LONG_SHARE
            short = draw.lognormvariate(0.0, SHORT_SIGMA) * SHORT_MEDIAN_TOKENS
            new = int(draw.randint(*LONG_TOKENS) if is_long else short)
            tokens = tokens + [draw.randint(5, 4000) for _ in range(max(1, new // divide_by))]
            yield Prompt(tokens, is_long)


def arrivals(rate_per_s: float, seconds: float, divide_by: int) -> list[Prompt]:
    """Return a Poisson stream of short prompts, the same each time."""
    draw = random.Random(f"{rate_per_s} {seconds}")
    found, due_s = [], draw.expovariate(rate_per_s)
    while due_s < seconds:
        new = min(int(draw.lognormvariate(0.0, SHORT_SIGMA) * SHORT_MEDIAN_TOKENS), MAX_SHORT_TOKENS)
        tokens = [draw.randint(5, 4000) for _ in range(max(1, new // divide_by))]
        found.append(Prompt(tokens, False, due_s))
        due_s += draw.expovariate(rate_per_s)
    return found


async def ask(session: aiohttp.ClientSession, server: Server, prompt: Prompt, began_s: float, start_s: float) -> Answer:
    """Send a request; `began_s` is when it was sent or due, `start_s` the clock's start of the load."""
    cached_tokens, is_failed = 0, True
    try:
        async with session.post(f"{server.url}/generate", json=server.request(prompt.tokens)) as reply:
            body = await reply.read()
        if reply.status == 200:
            is_failed = False
            cached_tokens = json.loads(body)["meta_info"]["cached_tokens"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
        pass
    ended_s = time.perf_counter() - start_s
    return Answer(prompt.is_long, began_s, ended_s, is_failed, len(prompt.tokens), cached_tokens)


async def closed_loop(server: Server, clients: int, seconds: float, divide_by: int, seed: int) -> list[Answer]:
    """Return what clients got that send a request when the one before has ended, until the time is up."""
    answers: list[Answer] = []
    start_s = time.perf_counter()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        for prompt in turns(1000 * seed + number, divide_by):
            began_s = time.perf_counter() - start_s
            if began_s >= seconds:
                return
            answers.append(await ask(session, server, prompt, began_s, start_s))

    async with _session() as session:
        await asyncio.gather(*(client(session, number) for number in range(clients)))
    return answers


async def open_loop(server: Server, stream: Sequence[Prompt]) -> list[Answer]:
    """Return what requests got that are sent when they are due; their times run from then."""
    start_s = time.perf_counter()
    async with _session() as session, asyncio.TaskGroup() as group:
        tasks = []
        for prompt in stream:
            await asyncio.sleep(max(0.0, start_s + prompt.due_s - time.perf_counter()))
            tasks.append(group.create_task(ask(session, server, prompt, prompt.due_s, start_s)))
    return [task.result() for task in tasks]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0))


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return throughput, TTFT in seconds, of short and long prompts too, and the share of cached tokens."""

    def ttft(chosen: Sequence[Answer]) -> dict[str, Any]:
        times = sorted(answer.ended_s - answer.began_s for answer in chosen)
        if not times:
            return {"requests": 0}
        shares = {"median_s": 0.5, "p90_s": 0.9, "p99_s": 0.99}
        quantiles = {name: times[math.ceil(share * len(times)) - 1] for name, share in shares.items()}
        return {"requests": len(times), "mean_s": statistics.fmean(times), **quantiles}

    served = [answer for answer in answers if not answer.is_failed]
    took_s = max(answer.ended_s for answer in answers)
    halves = [sum((answer.ended_s > took_s / 2) == is_second for answer in served) for is_second in (False, True)]
    return {
        **ttft(served),
        "failed": len(answers) - len(served),
        "seconds": took_s,
        "requests_per_s": len(served) / took_s,
        "requests_per_s_by_half": [count / (took_s / 2) for count in halves],
        "short": ttft([answer for answer in served if not answer.is_long]),
        "long": ttft([answer for answer in served if answer.is_long]),
        "cached_share": sum(one.cached_tokens for one in served) / max(1, sum(one.prompt_tokens for one in served)),
    }


def launch_command(model: Path, system: System, ports: Sequence[int], attention: str | None) -> list[str]:
    """Return what starts a prefill instance on two ports, its own and its bootstrap server's.

    The flags are those that a machine needs; none is to make SGLang faster or slower.
    """
    flags = ["--model-path", str(model), "--load-format", "dummy", "--port", str(ports[0]), "--skip-tokenizer-init"]
    flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--log-level", "warning"]
    flags += ["--random-seed", "7", "--disaggregation-mode", "prefill"]
    flags += ["--disaggregation-bootstrap-port", str(ports[1]), "--disaggregation-transfer-backend", STAND_IN]
    if not HAS_GPU:
        flags += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
        flags += ["--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", "16384"]
    elif attention is not None:
        flags += ["--attention-backend", attention]
    return [sys.executable, "-m", "sglang_ext.engine.launch", *flags, *(system.flags if HAS_GPU else ())]


def launch_environment(system: System) -> dict[str, str]:
    """Return what to add to the environment of an instance."""
    added = {"HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "HOST_IP": "127.0.0.1"}
    if not HAS_GPU:
        added |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    device = Device.CUDA if HAS_GPU else Device.CPU
    return added | ExtensionOptions(Role.BOTH, device, system.laps, graphs=system.graphs).to_environment()


def divide_cores(cores: set[int]) -> tuple[set[int], set[int]]:
    """Return cores of the server and of the clients: apart where there are eight or more."""
    ordered = sorted(cores)
    if len(ordered) < MIN_CORES:
        return cores, cores
    return set(ordered[:-CLIENT_CORES]), set(ordered[-CLIENT_CORES:])


@contextmanager
def serve(command: Sequence[str], added: Mapping[str, str], ports: Sequence[int], log: Path) -> Iterator[Server]:
    """Start a prefill instance that logs to `log`, wait until it serves, end it in the end. Raises RuntimeError."""
    server = Server(f"http://127.0.0.1:{ports[0]}", ports[1])
    server_cores, client_cores = divide_cores(os.sched_getaffinity(0))
    with log.open("w", encoding="utf-8") as output, entry_point_folder() as folder:
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        os.sched_setaffinity(0, server_cores)
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **added, "PYTHONPATH": path}
        )
        os.sched_setaffinity(0, client_cores)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not _is_healthy(server):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with status {process.returncode} while it started")
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"the server did not start within {START_TIMEOUT_S:.0f} s")
                time.sleep(0.3)
            yield server
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode} under load")
        finally:
            os.sched_setaffinity(0, server_cores | client_cores)
            # What is left would keep the device's memory from the next server.
            started = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
            for child in started:
                try:
                    child.kill()
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(started[1:], timeout=20)
            process.wait()


def _is_healthy(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@contextmanager
def entry_point_folder() -> Iterator[str]:
    """Yield a folder that registers the plugin with SGLang as an installation would; "" where it is installed."""
    if entry_points(group="sglang.srt.plugins", name="sglang_ext"):
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        information = Path(folder) / "sglang_ext_bench-0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-ext-bench\nVersion: 0\n")
        (information / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nsglang_ext = sglang_ext.engine.entry_point:register\n"
        )
        yield folder


@contextmanager
def busy_share() -> Iterator[list[float]]:
    """Yield a list that gets, at the end, the mean share of time in which the GPU computed; empty without a GPU."""
    found: list[float] = []
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500"]
    sampler = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield found
    finally:
        sampler.terminate()
        samples = [int(line) / 100 for line in sampler.communicate()[0].split() if line.isdigit()]
        found += [statistics.fmean(samples)] if samples else []


def measure_level(server: Server, system: System, given: Any, amount: float) -> dict[str, Any]:
    """Return what a level of load got: `amount` is clients, or requests a second by windows."""
    before = server.get("/laps") if system.laps is not None else None
    with busy_share() as busy:
        if given.windows:
            answers = asyncio.run(open_loop(server, arrivals(amount, given.seconds, given.divide_by)))
        else:
            answers = asyncio.run(closed_loop(server, int(amount), given.seconds, given.divide_by, seed=int(amount)))
    found = {
        "rate_per_s" if given.windows else "clients": amount,
        **summary(answers),
        "busy_share": (busy or [None])[0],
    }
    if before is not None:
        after = server.get("/laps")
        found["laps"] = {name: after.get(name) for name in ("awd", "graphs")}
        found["decisions"] = decisions_between(before, after, found["seconds"])
    return found


def decisions_between(before: Mapping[str, Any], after: Mapping[str, Any], took_s: float) -> dict[str, Any]:
    """Return what LAPS's decisions took between two reports: before how many batches, and their share of `took_s`.

    The device computes meanwhile or waits for them; SGLang's own building of a batch is not in it.
    """
    batches = after["decisions"]["batches"] - before["decisions"]["batches"]
    seconds = after["decisions"]["seconds"] - before["decisions"]["seconds"]
    return {"batches": batches, "mean_s": seconds / batches if batches else None, "share": seconds / took_s}


def measure(model: Path, name: str, system: System, given: Any, report: Report) -> None:
    """Measure all levels of one system and record them as they come; a failure is recorded with the end of the log."""
    found: dict[str, Any] = {"levels": []}
    results = {**report.found.get("systems", {}), name: found}
    log = given.logs / f"{given.out.stem if given.out else 'serve'}-{name}.log"
    ports = pick_free_ports("127.0.0.1", 2, draw=random.SystemRandom())
    command, started_s = launch_command(model, system, ports, given.attention), time.perf_counter()
    found["command"] = " ".join(command[3:])
    print(f"== {name}", flush=True)
    try:
        with serve(command, launch_environment(system), ports, log) as server:
            found["started_after_s"] = time.perf_counter() - started_s
            found["server"] = server_facts(server)
            report.record(systems=results)
            # Kernels are compiled and loaded now, at sizes of batches that will come.
            warm_s = min(WARM_S, given.seconds)
            asyncio.run(closed_loop(server, int(max(given.concurrencies)), warm_s, given.divide_by, seed=7777))
            for amount in given.rates if given.windows else given.concurrencies:
                if time.perf_counter() + given.seconds > given.end_s:
                    found["not_measured"] = f"from {amount:g} on: the time was used up"
                    break
                level = measure_level(server, system, given, amount)
                found["levels"].append(level)
                report.record(systems=results)
                print(level_line(name, level), flush=True)
            if system.graphs is not None:
                status = server.get("/laps") if system.laps is not None else {}
                found["graphs"] = status.get("graphs")
    except Exception as error:
        traceback.print_exc()
        found["log_end"] = log.read_text(errors="replace").splitlines()[-40:] if log.is_file() else []
        print("\n".join(found["log_end"]), file=sys.stderr)
        report.record(systems=results)
        report.fail(name, error)
    report.record(systems=results)


def level_line(name: str, level: Mapping[str, Any]) -> str:
    """Return a level in a line, times in ms."""
    what = f"{level['clients']} clients" if "clients" in level else f"{level['rate_per_s']:g}/s"

    def times(part: Mapping[str, Any]) -> str:
        names = ("mean_s", "median_s", "p90_s", "p99_s")
        return " ".join(f"{part[one] * 1e3:.0f}" for one in names) if part["requests"] else "-"

    return (
        f"{name}, {what}: {level['requests_per_s']:.1f} requests/s, {level['failed']} failed; TTFT mean, median, P90, "
        f"P99 in ms: {times(level)}; short {times(level['short'])}; long {times(level['long'])}"
    )


def server_facts(server: Server) -> dict[str, Any]:
    """Return settings of an instance that its numbers depend on."""
    info = server.get("/server_info")
    names = (
        "attention_backend",
        "chunked_prefill_size",
        "cuda_graph_config",
        "mem_fraction_static",
        "max_total_tokens",
    )
    names += ("disable_overlap_schedule", "schedule_policy", "max_running_requests", "max_total_num_tokens")
    return {name: info[name] for name in names if name in info}


def has_own_graphs(found: Mapping[str, Any]) -> bool:
    """Return whether a system runs on SGLang's own prefill graphs, as its server reported."""
    config = found.get("server", {}).get("cuda_graph_config") or {}
    return bool(config) and config.get("prefill", {}).get("backend") == "breakable"


def judge(report: Report, given: Any) -> None:
    """Check the aims: of figure 6 at 64 clients, of figure 5 at 360 requests a second."""
    systems: dict[str, Any] = report.found.get("systems", {})
    key, aim = ("rate_per_s", AIM_RATE_PER_S) if given.windows else ("clients", AIM_CLIENTS)
    amounts = given.rates if given.windows else given.concurrencies
    aim = aim if aim in amounts else max(amounts)
    at_aim = {name: level for name, found in systems.items() for level in found["levels"] if level[key] == aim}

    def ratio(name: str, of: str, to: float | None) -> float:
        level = at_aim.get(of)
        return float("nan") if level is None or not to or name not in level else level[name] / to

    for name, found in systems.items():
        failed = sum(level["failed"] for level in found["levels"])
        if found["levels"]:
            report.check(f"{name}: requests that failed", failed, at_most=0)
        graphs = found.get("graphs") or {}
        if HAS_GPU and name in {**WINDOWS, "all": None} and found["levels"]:
            report.check(f"{name}: prefills on a captured shape", sum(graphs.get("replays", {}).values()), at_least=1)
    if given.windows:
        fixed = [level for name, level in at_aim.items() if name != ADAPTIVE]
        for name, best, bounds in (
            ("mean_s", min, {"at_most": 1.1}),
            ("p90_s", min, {"at_most": 1.1}),
            ("requests_per_s", max, {"at_least": 0.95}),
        ):
            to = best(level[name] for level in fixed) if fixed else None
            report.check(f"{name}, adaptive over the best window", ratio(name, ADAPTIVE, to), is_speed=True, **bounds)
    elif "all" in given.systems:
        stocks = [at_aim[name] for name in ("stock", "own-graphs") if name in at_aim]
        stock = max(stocks, key=lambda level: level["requests_per_s"], default={})
        for name, what, bounds in (
            ("requests_per_s", "requests/s", {"at_least": 1.2}),
            ("mean_s", "mean TTFT", {"at_most": 0.8}),
        ):
            gain = ratio(name, "all", stock.get(name))
            report.check(f"{what}, all over stock, {aim} clients", gain, is_speed=True, **bounds)
        deciding = at_aim.get("all", {}).get("decisions", {}).get("share", float("nan"))
        report.check("share of time in LAPS's decisions", deciding, at_most=MAX_DECIDING_SHARE, is_speed=True)


def expect(report: Report, given: Any) -> None:
    """Print what the roofline and the paper let expect."""
    short = SHORT_MEDIAN_TOKENS * math.exp(SHORT_SIGMA**2 / 2)
    new_tokens = short if given.windows else LONG_SHARE * sum(LONG_TOKENS) / 2 + (1 - LONG_SHARE) * short
    each_s = prefill_operations(SHAPES[given.model], round(new_tokens), 1) / NOMINAL_OPERATIONS_PER_S
    report.expect("load", f"{new_tokens:.0f} new tokens a request: {1 / each_s:.0f} requests/s at most on a Hopper GPU")
    if given.windows:
        report.expect("figure 5", "the adaptive window within 10% of the best fixed one")
    else:
        least_s = ", ".join(f"{clients * each_s:.2f} s with {clients}" for clients in given.concurrencies)
        report.expect("mean TTFT", f"at least {least_s} clients, by Little's law")
        report.expect("all over stock", "1.2 times the requests/s, 0.8 times the mean TTFT, at 64 clients")


def arguments_of(argv: Sequence[str] | None) -> Any:
    """Return the options; sizes of a dry run are small."""
    options = parser(__doc__)
    options.add_argument("--model", choices=SHAPES, default=None, help="shape of the model (default: qwen2.5-7b)")
    options.add_argument("--systems", default=None, help=f"in this order (default: {','.join(SYSTEMS)})")
    options.add_argument("--concurrencies", default=None, help="clients of the closed loop (default: 64)")
    options.add_argument("--windows", default="", help=f"of {','.join(WINDOWS)}: figure 5 in place of figure 6")
    options.add_argument("--rates", default=None, help="requests/s of the open loop (default: 360,180,60)")
    options.add_argument("--seconds", type=float, default=None, help="of each level (default: 10)")
    options.add_argument("--within", type=float, default=450.0, help="no server is started that would serve later (s)")
    options.add_argument("--attention", default=default_attention(), help="SGLang's backend, of all systems")
    given = options.parse_args(argv)
    small = {"model": "tiny", "systems": "stock,all", "concurrencies": "2", "rates": "4", "seconds": 2.0}
    large = {"model": "qwen2.5-7b", "systems": ",".join(SYSTEMS), "concurrencies": "64", "rates": "360,180,60"}
    for name, default in (small if given.dry_run else {**large, "seconds": 10.0}).items():
        if getattr(given, name) is None:
            setattr(given, name, default)
    given.systems, given.windows = given.systems.split(","), list(filter(None, given.windows.split(",")))
    unknown = [name for name in given.windows or given.systems if name not in (WINDOWS if given.windows else SYSTEMS)]
    if unknown:
        options.error(f"{', '.join(unknown)}: systems are {', '.join(SYSTEMS)}, windows {', '.join(WINDOWS)}")
    given.concurrencies = [int(part) for part in given.concurrencies.split(",")]
    given.rates = [float(part) for part in given.rates.split(",")]
    given.divide_by = 8 if given.dry_run else 1
    given.end_s = time.perf_counter() + given.within
    given.logs = given.out.resolve().parent if given.out else Path(tempfile.mkdtemp(prefix="serve-"))
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments_of(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    report = Report("serve", given.out, given.dry_run)
    expect(report, given)
    report.record(model=given.model, attention=given.attention or "SGLang's default", logs=str(given.logs))
    chosen = {name: WINDOWS[name] for name in given.windows} or {name: SYSTEMS[name] for name in given.systems}
    with tempfile.TemporaryDirectory() as folder:
        write_model(given.model, Path(folder))
        for name, system in chosen.items():
            systems = report.found.get("systems", {})
            if name == "own-graphs" and has_own_graphs(systems.get("stock", {})):
                report.record(own_graphs="stock has them")
                continue
            if time.perf_counter() + START_ESTIMATE_S * HAS_GPU + given.seconds > given.end_s:
                left = list(chosen)[list(chosen).index(name) :]
                report.record(not_measured=f"{', '.join(left)}: the time was used up")
                break
            measure(Path(folder), name, system, given, report)
            is_first = name == next(iter(chosen))
            if is_first and HAS_GPU and given.attention is None and not report.found["systems"][name]["levels"]:
                # FlashAttention 3 may be there and not run; all systems are compared with another, then.
                given.attention = "triton"
                report.record(attention="triton, as the first server failed with SGLang's default")
                measure(Path(folder), name, system, given, report)
    judge(report, given)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
