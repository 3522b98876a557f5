"""`/metrics` as a whole: what its document lists, well formed in both formats, the sum of all processes."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from sglang_ext_router.observe import histograms
from sglang_ext_router.observe.exposition import PREFIX
from support.linked_routers import process_links
from support.raw_client import request_bytes
from support.router_process import FAST, Cluster, RunningRouter, cluster, running_router, until
from support.scripted_engine import DONE, ScriptedEngine, event, hang, reply, status, stream

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^\| `((?:sglang_ext_router|process)_\w+)` \| (counter|gauge|histogram) \|([^|]*)\|", re.MULTILINE)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PROMPT = {"text": "x"}
Values = dict[
    tuple[str, tuple[str, ...]], float
]  # by name without the prefix, and label values in order of their names


async def page(served: RunningRouter, accept: str = "") -> str:
    answer = await served.ask("GET", "/metrics", headers={"accept": accept} if accept else {})
    assert answer.status == 200
    expected = OPENMETRICS if accept else "text/plain; version=0.0.4"
    assert answer.headers["content-type"].startswith(expected)
    return answer.body.decode()


async def values(served: RunningRouter) -> Values:
    return {
        (sample.name.removeprefix(PREFIX), tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parse_text(await page(served))
        for sample in family.samples
    }


async def until_shown(served: RunningRouter, expected: Callable[[], Values]) -> None:
    """Wait until the values that are expected then are shown; AssertionError tells the others."""
    shown: Values = {}
    for _ in range(200):
        shown = await values(served)
        if all(shown.get(key) == value for key, value in expected().items()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError({key: shown.get(key) for key in expected()})


async def until_processes(served: RunningRouter, expected: set[str]) -> None:
    """Wait until the gauges of exactly these processes are shown: one that stood still is left out for a while."""
    shown: set[str] = set()
    for _ in range(200):
        shown = {labels[0] for name, labels in await values(served) if name == "process_open_fds"}
        if shown == expected:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(shown)


async def serve_everything(served: Cluster) -> None:
    """Requests that leave a sample in every family that counts requests."""
    served.decode[0].plan(status(503), status(503))
    for _ in range(3):
        await served.ask("POST", "/generate", PROMPT)
    await served.ask("POST", "/generate", b"{")
    await served.ask("POST", "/generate", {"text": "z" * 9_000})
    served.short[0].script = served.decode[0].script = stream(event({}), event({}), event({}), DONE)
    await served.ask("POST", "/generate", {**PROMPT, "stream": True})
    served.decode[0].script = hang()
    async with await served.connect() as client:
        await client.send(request_bytes("POST", "/generate", b'{"text": "x"}'))
        await served.until(lambda: bool(served.router.running))
    async with await served.connect() as client:
        await client.send(b"nonsense\r\n\r\n")
        await client.reply()
    await served.until_idle()


async def test_the_document_lists_what_is_shown() -> None:
    rows = {
        name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(DOCUMENT.read_text())
    }
    options = {"retry_max_retries": 1, "retry_budget_min_per_sec": 0.0, "retry_budget_ratio": 0.0}
    async with cluster(access_log="/dev/null", **options) as served:
        await serve_everything(served)
        shown = {}
        for family in parse_text(await page(served)):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            name = family.name + ("_total" if family.type == "counter" else "")
            shown[name] = (family.type, labels)
    # Nothing has been counted there without a controller, classes, a coordinator and a collector: no samples.
    idle = {
        "class_ttft_total",
        "controller_decisions_total",
        "pool_pressure",
        "pool_offered_instances",
        "pool_offers_total",
        "traces_total",
    }
    # Nor is there a group, a cluster or a tenant, and no instance publishes KV events.
    absent = ("peer", "controller_lea", "discovery_", "kv_events_", "tenant_")
    idle |= {one.removeprefix(PREFIX) for one in rows if one.removeprefix(PREFIX).startswith(absent)}
    for name in idle:
        assert shown[PREFIX + name] == (rows[PREFIX + name][0], set())
        shown[PREFIX + name] = rows[PREFIX + name]
    assert shown == rows


@pytest.mark.slow
async def test_both_formats_tell_the_same() -> None:
    async with cluster() as served:
        await serve_everything(served)
        plain = {family.name: family for family in parse_text(await page(served))}
        opened = {family.name: family for family in parse_openmetrics(await page(served, OPENMETRICS))}
        assert plain.keys() == opened.keys()
        for name, family in plain.items():
            assert opened[name].type == family.type
            assert opened[name].documentation == family.documentation
            if not name.startswith(("process_", PREFIX + "event_loop_lag")):
                parts = 2 if family.type == "gauge" else 3  # a gauge may change between two pages
                assert [one[:parts] for one in opened[name].samples] == [one[:parts] for one in family.samples]


async def test_a_scraper_that_takes_both_gets_openmetrics() -> None:
    """What Prometheus sends."""
    accept = f"{OPENMETRICS};q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    async with cluster() as served:
        text = await page(served, accept)
        assert text.endswith("# EOF\n")


@pytest.mark.slow
async def test_the_series_of_a_removed_worker_end() -> None:
    async with cluster(decode=2, admin_api_key="admin") as served:
        gone, stays = served.decode
        gone.plan(status(503))
        for _ in range(6):
            await served.ask("POST", "/generate", PROMPT)
        await served.until_idle()
        shown = await values(served)
        assert shown["worker_requests_total", (gone.url,)] > 0
        assert shown["worker_failures_total", (gone.url,)] == 1
        await served.ask(
            "DELETE", f"/workers/{gone.url.removeprefix('http://')}", headers={"Authorization": "Bearer admin"}
        )
        assert gone.url not in await page(served)
        assert (await values(served))["worker_requests_total", (stays.url,)] > 0


async def test_a_removed_worker_that_still_fails_stays_away() -> None:
    async with cluster(decode=2, retry_max_retries=0) as served:
        gone = served.decode[0]
        for engine in served.decode:
            engine.script = hang()
        clients = [await served.connect() for _ in range(4)]
        for client in clients:
            await client.send(request_bytes("POST", "/generate", b'{"text": "x"}'))
        await gone.received(1)
        served.router.remove_worker(served.worker(gone.url))
        await gone.stop()
        for engine in served.decode:
            engine.script = reply()
        await served.until(lambda: bool(served.router.metrics.requests))
        assert gone.url not in await page(served)
        for client in clients:
            client.close()


@pytest.mark.slow
async def test_gauges_of_processes_add_up(tmp_path: Path) -> None:
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    for engine in engines:
        await engine.start()
        engine.script = hang()
    workers = tuple(WorkerAddress(engine.url, engine.role) for engine in engines)
    config = FAST.__class__(workers=workers, processes=2, max_concurrent_requests=2, health_check_interval_secs=0.1)
    try:
        async with (
            process_links(tmp_path, config) as link,
            running_router(config, 0, link(0)) as first,
            running_router(config, 1, link(1)) as second,
        ):
            for one in (first, second):
                await one.until_ready()
            clients = []
            for one, count in ((first, 3), (second, 2)):
                for _ in range(count):
                    client = await one.connect()
                    await client.send(request_bytes("POST", "/generate", b'{"input_ids": [1, 2, 3]}'))
                    clients.append(client)
            admissions = [one.router.admission for one in (first, second)]
            for one, admission, count in zip((first, second), admissions, (3, 2), strict=True):
                await one.until(lambda admission=admission, count=count: admission.running + admission.waiting == count)

            def expected() -> Values:
                # Two of each run where it had them before it knew of the other's, fewer else; none ends.
                running = sum(admission.running for admission in admissions)
                return {
                    ("requests_in_flight", ()): float(running),
                    ("requests_queued", ()): 5.0 - running,
                    ("instance_connections", ()): 2.0 * running,
                    ("client_connections", ()): 6.0,  # the one that asks, too
                    ("worker_in_flight", ("both", engines[0].url)): float(running),
                    ("worker_in_flight", ("decode", engines[1].url)): float(running),
                    ("worker_pending_tokens", ("both", engines[0].url)): 3.0 * running,
                }

            for one in (first, second):
                await until_shown(one, expected)
                await until_processes(one, {"0", "1"})
            await second.router.siblings.stop()  # as if it had been killed
            await until_shown(first, lambda: {("requests_in_flight", ()): float(admissions[0].running)})
            await until_processes(first, {"0"})
            for client in clients:
                client.close()
            for one in (first, second):
                await one.until_idle()
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.full
async def test_counters_go_on_when_a_process_is_replaced(tmp_path: Path) -> None:
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    for engine in engines:
        await engine.start()
    workers = tuple(WorkerAddress(engine.url, engine.role) for engine in engines)
    config = FAST.__class__(workers=workers, processes=2, health_check_interval_secs=0.1)
    key = ("requests_total", ("short", "ok", "/generate", "200"))
    try:
        async with process_links(tmp_path, config) as link, running_router(config, 0, link(0)) as first:
            for count in (1, 2, 3):  # three processes of the same number, one after the other
                async with running_router(config, 1, link(1)) as second:
                    await second.until_ready()
                    assert (await second.ask("POST", "/generate", PROMPT)).status == 200
                    await until_shown(first, lambda count=count: {key: float(count)})
                    assert (await values(second))[key] == count
                    sent = ("worker_requests_total", (engines[1].url,))
                    assert (await values(first))[sent] == (await values(second))[sent] == count
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.slow
async def test_a_stalled_loop_shows() -> None:
    async with cluster() as served:
        lag = served.router.metrics.loop_lag_s
        before_s = lag.total
        await until(lambda: sum(lag.counts) > 3)
        served.router.loop.call_soon(lambda: __import__("time").sleep(0.3))
        await until(lambda: lag.total - before_s > 0.2)


# -- buckets ------------------------------------------------------------------------------------------------


def of_sglang(name: str) -> list[list[float]]:
    """The literal lists that SGLang gives to `name` (a variable, or the keyword of a call with that metric's name)."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "srt/observability/metrics_collector.py").read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            found.append(node.value)
        if isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if "buckets" in given and "name" in given and ast.unparse(given["name"]) == repr(name):
                found.append(given["buckets"])
    return [[float(value) for value in ast.literal_eval(one)] for one in found if isinstance(one, ast.List)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (histograms.ttft_bounds_s(1800), "bucket_time_to_first_token"),
        (histograms.duration_bounds_s(1800), "bucket_e2e_request_latency"),
        (histograms.TOKEN_TIME_BUCKETS_S, "bucket_inter_token_latency"),
        (histograms.queue_bounds_s(1800), "sglang:queue_time_seconds"),
        (histograms.TOKEN_BUCKETS, "default_bucket_prompt_tokens"),
    ],
)
def test_sglangs_bounds_are_among_ours(ours: tuple[float, ...], theirs: str) -> None:
    (bounds,) = of_sglang(theirs)
    assert set(bounds) <= set(ours)
    assert list(ours) == sorted(set(ours))
    assert not [bound for bound in ours if bounds[0] < bound < bounds[-1] and bound not in bounds]


@pytest.mark.parametrize("limit_s", [1.0, 400.0, 401.0, 1800.0, 5000.0, 86400.0])
def test_buckets_reach_the_limit_of_a_request(limit_s: float) -> None:
    for bounds in (histograms.ttft_bounds_s(limit_s), histograms.duration_bounds_s(limit_s)):
        assert bounds[-1] >= limit_s
        assert list(bounds) == sorted(set(bounds))
