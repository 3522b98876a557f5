"""Describes what a tenant's flood does to others, whether shares follow weights, and what tenants cost a router.

    python bench/fair_shares.py [--full]

Ten tenants of equal weight; their keys are in a file of tenants. On mock engines at a high rate, and on one real SGLang
instance that computes a random Llama on one core:

- `victim_p99_ratio`: nine tenants send lightly, at random times. P99 of the time that their requests take while the
  tenth always has several times as many requests under way as there are places, over P99 while it sends nothing;
  both in turns. `real_` is the same on SGLang
- `flooder_share_error`: all ten always have requests waiting, those of the tenth four times as large. By how much its
  part of all tokens (`GET /v1/usage`) differs from a tenth, as a share of that
- `cpu_ratio`: processor time of the router per request with tenants and budgets, over that with a file of API keys; on
  static upstreams, in turns, the median of the pairs; the larger of concurrency 16 and 64

A run fails when a request is lost, or when a light tenant is refused. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import uvloop
import yaml

from sglang_ext.cluster.process import answers_ok
from sglang_ext.ports import pick_free_ports
from support.compiled import use_compiled_modules
from support.engines import BenchEngine, free_port, running_router
from support.random_model import RandomLlama, build_random_llama
from support.result import BenchmarkRun, benchmark_parser, give_up, progress
from support.routers import OURS, RunningRouter, Upstreams
from support.static_upstreams import StaticUpstreams
from support.tenant_load import Served, TenantLoad, TenantRequest, percentile, usage_tokens
from support.wrk import run_wrk

FLOODER = "flooder"
VICTIMS = tuple(f"victim{number}" for number in range(9))
ADMIN = "admin"
LARGER = 4  # times the tokens of the flooder's requests where all flood
CPU_CONCURRENCIES = (16, 64)
WARM_UP_S = 1.0
MOCKS = 2
MOCK_TOKEN_MS = 2.0
START_S = 30.0
KEY = "bench"


class Setting(NamedTuple):
    """The load of one kind of instances."""

    request: TenantRequest
    places: int
    victim_rate_per_s: float  # of each of the nine
    turn_s: float
    turns: int  # with the flood, and as many without
    shares_s: float


MOCK = Setting(TenantRequest(32, 16), 32, 5.0, 12.0, 3, 15.0)
REAL = Setting(TenantRequest(48, 8), 2, 0.35, 40.0, 3, 60.0)


def main() -> None:
    """Measure, and print the result."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="three times as long")
    arguments = parser.parse_args()
    use_compiled_modules()
    benchmark = BenchmarkRun("sglang", "torch")
    scale = 3 if arguments.full else 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cpu = _cpu_ratios(folder, repeats=5 * scale)
        with _mock_engines(folder) as urls:
            mock = _measure(folder, urls, _scaled(MOCK, scale))
        with _sglang(folder) as url:
            real = _measure(folder, [url], _scaled(REAL, scale))
    result = {
        **mock,
        **{f"real_{figure}": value for figure, value in real.items()},
        "cpu_ratio": max(cpu.values()),
        "cpu_ratios": cpu,
    }
    benchmark.end(result, arguments.out / "fair-shares.json")


def _scaled(setting: Setting, scale: int) -> Setting:
    return setting._replace(turns=setting.turns * scale, shares_s=setting.shares_s * scale)


# -- tenants against each other ---------------------------------------------------------------------------------


def _measure(folder: Path, urls: Sequence[str], setting: Setting) -> dict[str, object]:
    options = [word for url in urls for word in ("--plain", url)]
    options += ["--tenants-file", str(_tenants_file(folder, (*VICTIMS, FLOODER))), "--admin-api-key", ADMIN]
    options += ["--max-concurrent-requests", str(setting.places), "--queue-size", str(8 * setting.places)]
    options += ["--queue-timeout-secs", "300"]
    with running_router(options, len(urls), ADMIN) as url:
        return uvloop.run(_measure_at(url, setting))


async def _measure_at(url: str, setting: Setting) -> dict[str, object]:
    load = TenantLoad(int(url.rpartition(":")[2]))
    victims = dict.fromkeys(VICTIMS, setting.request)
    connections = 4 * setting.places
    await load.send_lightly(victims, setting.victim_rate_per_s, setting.turn_s / 4)
    _checked(load.take_served())
    times_s: dict[bool, list[float]] = {False: [], True: []}
    flooded = flooded_s = 0.0
    for turn in range(2 * setting.turns):
        is_flooded = turn % 4 in (1, 2)  # what drifts meets both alike
        light = load.send_lightly(victims, setting.victim_rate_per_s, setting.turn_s)
        if is_flooded:
            flood = load.flood(FLOODER, setting.request, connections, setting.turn_s)
            await asyncio.gather(light, flood)
        else:
            await light
        served = _checked(load.take_served())
        times_s[is_flooded] += [one.duration_s for one in served if one.tenant != FLOODER]
        if is_flooded:
            flooded += sum(one.tenant == FLOODER for one in served)
            flooded_s += setting.turn_s
        progress(f"turn {turn + 1} of {2 * setting.turns}: {len(served)} requests{', flooded' if is_flooded else ''}")
    error = await _share_error(load, url, setting)
    await load.close()
    p99_s = {is_flooded: percentile(values, 0.99) for is_flooded, values in times_s.items()}
    return {
        "victim_p99_ratio": round(p99_s[True] / p99_s[False], 3),
        "victim_p99_ms": round(p99_s[True] * 1e3, 1),
        "victim_p99_alone_ms": round(p99_s[False] * 1e3, 1),
        "victim_p50_ms": round(percentile(times_s[True], 0.5) * 1e3, 1),
        "victim_p50_alone_ms": round(percentile(times_s[False], 0.5) * 1e3, 1),
        "victim_requests": len(times_s[True]) + len(times_s[False]),
        "flooder_requests_per_s": round(flooded / flooded_s, 1),
        "flooder_share_error": round(error, 4),
    }


async def _share_error(load: TenantLoad, url: str, setting: Setting) -> float:
    """Return by how much the flooder's part of all tokens differs from its tenth, while all flood."""
    large = TenantRequest(LARGER * setting.request.prompt_tokens, LARGER * setting.request.output_tokens)
    names = (*VICTIMS, FLOODER)
    floods = [
        asyncio.create_task(
            load.flood(name, large if name == FLOODER else setting.request, setting.places + 2, setting.shares_s)
        )
        for name in names
    ]
    await asyncio.sleep(setting.shares_s / 5)
    before = await asyncio.to_thread(_usage, url)
    await asyncio.sleep(setting.shares_s * 3 / 5)
    after = await asyncio.to_thread(_usage, url)
    await asyncio.gather(*floods)
    _checked(load.take_served())
    tokens = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    progress(f"tokens by tenant: {tokens}")
    return abs(tokens[FLOODER] / sum(tokens.values()) * len(names) - 1)


def _usage(url: str) -> dict[str, int]:
    request = urllib.request.Request(f"{url}/v1/usage", headers={"authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return usage_tokens(json.load(reply)["data"])


def _checked(served: list[Served]) -> list[Served]:
    """End the program where a request was lost, or a light tenant refused; return what was served."""
    failed = [one for one in served if one.status != 200 and (one.tenant != FLOODER or one.status != 429)]
    if failed:
        give_up(f"{len(failed)} of {len(served)} requests failed, the first is {failed[0]}")
    return [one for one in served if one.status == 200]


# -- what tenants cost ------------------------------------------------------------------------------------------


def _cpu_ratios(folder: Path, repeats: int) -> dict[str, float]:
    ports = iter(pick_free_ports("127.0.0.1", 9, draw=random.SystemRandom()))
    upstreams = Upstreams([next(ports)], [next(ports)], [next(ports)])
    router_ports = {"keys": next(ports), "tenants": next(ports)}
    keys = folder / "keys"
    keys.write_text(f"{KEY}:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    budgets = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12}
    options = {
        "keys": ("--api-keys-file", str(keys)),
        "tenants": ("--tenants-file", str(_tenants_file(folder, (KEY, FLOODER), **budgets))),
    }
    ratios: dict[int, list[float]] = {concurrency: [] for concurrency in CPU_CONCURRENCIES}
    with ExitStack() as stack:
        stack.enter_context(StaticUpstreams(folder, upstreams.prefill, upstreams.decode))
        routers = {
            name: stack.enter_context(
                RunningRouter(
                    OURS,
                    port,
                    0,
                    upstreams,
                    folder / f"{name}.log",
                    options=(*options[name], "--max-concurrent-requests", "1000", "--worker-api-key", "w"),
                    key=KEY,
                )
            )
            for name, port in router_ports.items()
        }
        for router in routers.values():
            run_wrk(router.port, concurrency=16, duration_s=WARM_UP_S, stream=False, key=KEY)
        for number in range(repeats):
            for concurrency in CPU_CONCURRENCIES:
                cost_us = {}
                for name in sorted(routers, reverse=number % 2 == 1):
                    router = routers[name]
                    used_s = router.fine_processor_time_s
                    load = run_wrk(router.port, concurrency=concurrency, duration_s=2.0, stream=False, key=KEY)
                    cost_us[name] = (router.fine_processor_time_s - used_s) / load.requests * 1e6
                ratios[concurrency].append(cost_us["tenants"] / cost_us["keys"])
                progress(
                    f"concurrency {concurrency}: {cost_us['keys']:.0f} us, {cost_us['tenants']:.0f} us with tenants"
                )
    return {str(concurrency): round(median(values), 3) for concurrency, values in ratios.items()}


# -- instances --------------------------------------------------------------------------------------------------


@contextmanager
def _mock_engines(folder: Path) -> Iterator[list[str]]:
    ports = [free_port() for _ in range(MOCKS)]
    words = ("--role", "plain", "--token-ms", str(MOCK_TOKEN_MS))
    with ExitStack() as stack:
        for port in ports:
            command = [sys.executable, "-m", "sglang_ext.cli", "mock-engine", *words, "--port", str(port)]
            log = stack.enter_context((folder / f"mock-{port}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        end_s = time.monotonic() + START_S
        while not all(answers_ok(f"http://127.0.0.1:{port}", "/health") for port in ports):
            if time.monotonic() > end_s:
                give_up("the mock engines do not start")
            time.sleep(0.1)
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextmanager
def _sglang(folder: Path) -> Iterator[str]:
    model = folder / "model"
    model.mkdir()
    build_random_llama(RandomLlama(), model)
    engine = BenchEngine.start("plain", model, folder)
    try:
        engine.wait_ready()
        progress("an SGLang instance is up")
        yield engine.url
    finally:
        engine.stop()


def _tenants_file(folder: Path, names: Sequence[str], **limits: int) -> Path:
    file = folder / f"tenants-{len(names)}.yaml"
    tenants = {name: {**limits, "keys": {name: hashlib.sha256(name.encode()).hexdigest()}} for name in names}
    file.write_text(yaml.safe_dump({"tenants": tenants}))
    return file


if __name__ == "__main__":
    main()
