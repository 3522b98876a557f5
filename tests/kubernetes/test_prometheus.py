"""A real Prometheus scrapes a cluster of real instances under a little traffic: every panel has something to show."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest

from sglang_ext.types import Role
from support.chart import needs_helm, render
from support.engines import FLEET, Engine, EngineSpec, free_port
from support.long_pool import Coordinator
from support.manifests import of_kind
from support.monitoring_files import ALERTS, alert_rules, panels
from support.prometheus_server import PrometheusServer, running_prometheus
from support.reference import random_prompt
from support.router_cli import RunningRouter, running_router
from support.scripted_kubernetes import ScriptedKubernetes, endpoint, endpoint_slice

pytestmark = [pytest.mark.kubernetes, pytest.mark.integration]

BOUNDARY_TOKENS = 256
SHOWN_WITHIN_S = 90.0
HANDSHAKE = ("--transfer-backend", "handshake")
ROLES = {Role.SHORT: "prefill-short", Role.LONG: "prefill-long", Role.DECODE: "decode"}
Result = TypeVar("Result")


class ApiServerThread:
    """The scripted API server, in a thread, as the test waits for processes."""

    def __init__(self) -> None:
        self.api = ScriptedKubernetes()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[ApiServerThread]:
        one = cls()
        one.run(one.api.start())
        try:
            yield one
        finally:
            one.run(one.api.stop())
            one._loop.call_soon_threadsafe(one._loop.stop)
            one._thread.join()
            one._loop.close()


@contextmanager
def cluster() -> Iterator[tuple[list[RunningRouter], list[Engine], Coordinator]]:
    """Two routers of a group that find their instances in Kubernetes, and a long pool of two."""
    with (
        ApiServerThread.running() as kubernetes,
        Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as coordinator,
    ):
        shares = (*HANDSHAKE, "--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", str(BOUNDARY_TOKENS))
        engines = FLEET.get(
            EngineSpec(Role.SHORT, worker_options=HANDSHAKE, name="watched"),
            *(EngineSpec(Role.LONG, worker_options=shares, name=f"watched-{number}") for number in range(2)),
            *(EngineSpec(Role.DECODE, worker_options=HANDSHAKE, name=f"watched-{number}") for number in range(2)),
        )
        coordinator.wait_for(lambda status: len(status["members"]) == 2)
        for number, engine in enumerate(engines):
            pod = endpoint("127.0.0.1", uid=f"uid-{number}")
            bootstrap = engine.bootstrap_port if engine.spec.role.is_prefill else None
            role = ROLES[engine.spec.role]
            one = endpoint_slice(f"slice-{number}", role, pod, port=engine.port, bootstrap=bootstrap)
            kubernetes.run(kubernetes.api.put(one))
        ports = free_port(), free_port()
        options = [
            *("--length-boundary-tokens", str(BOUNDARY_TOKENS), "--peer-key", "secret-of-the-tests"),
            *("--service-discovery", "--set", f"discovery.kubernetes_url={kubernetes.api.url}"),
            *("--service-discovery-namespace", "default", "--coordinator-url", coordinator.http_url),
            *("--controller", "on", "--controller-lease", "controller", "--set", "controller.interval_secs=0.5"),
        ]
        for port in ports:
            options += ["--peer", f"127.0.0.1:{port}"]
        with (
            running_router([], *options, "--peer-port", str(ports[0])) as first,
            running_router([], *options, "--peer-port", str(ports[1])) as second,
        ):
            for router in (first, second):
                router.wait_workers(engines)
            yield [first, second], engines, coordinator
        for engine in engines:
            engine.stop()


def body(tokens: int, seed: int, *, stream: bool, new_tokens: int = 12) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": random_prompt(tokens, seed=seed), "sampling_params": parameters, "stream": stream}


class Traffic:
    """A little of everything, until it is stopped: both classes, streams, deadlines, mistakes, clients that leave."""

    def __init__(self, routers: list[RunningRouter]) -> None:
        self._routers = routers
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(3)
        self._futures = [self._threads.submit(self._send, number) for number in range(3)]

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._threads.shutdown()
        for future in self._futures:
            future.result()

    def _send(self, thread: int) -> None:
        seed = 0
        while not self._stop.is_set():
            seed += 1
            router = self._routers[seed % 2]
            tokens = (40, 700)[(seed + thread) % 2]
            hints = {"x-sgl-ttft-slo-ms": "20000", "x-sgl-priority": "high"}
            # Twice the same prompt, so that there are prefix hits.
            wanted = body(tokens, seed // 4 + 1000 * thread, stream=seed % 3 != 0)
            router.call("POST", "/generate", wanted, headers=hints if seed % 5 else {})
            if seed % 7 == 0:
                router.post("/generate", [])  # refused
            if seed % 9 == 0:
                leave(router, body(tokens, seed, stream=True, new_tokens=400))


def leave(router: RunningRouter, wanted: dict[str, Any]) -> None:
    """A client that is gone behind the first byte."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=30)
    connection.request("POST", "/generate", json.dumps(wanted), {"content-type": "application/json"})
    connection.getresponse().read(1)
    connection.close()


def empty_targets(prometheus: PrometheusServer) -> dict[str, str]:
    """Expressions of panels that have no finite value."""
    found = {}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$namespace", ".*").replace("$__rate_interval", "60s")
            if not any(math.isfinite(value) for _, value in prometheus.query(expression)):
                found[f"{panel['title']} {target['refId']}"] = expression
    return found


class Watched(NamedTuple):
    """A cluster under traffic, and the Prometheus that scrapes it."""

    prometheus: PrometheusServer
    engines: list[Engine]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with cluster() as (routers, engines, coordinator):
        addresses = {
            **{f"127.0.0.1:{router.port}": "router" for router in routers},
            **{f"127.0.0.1:{engine.port}": ROLES[engine.spec.role] for engine in engines},
            coordinator.http_url.removeprefix("http://"): "coordinator",
        }
        # What the chart's PodMonitors, or the documented relabelling, add in a cluster.
        targets = {
            address: {
                "namespace": "sglang-ext",
                "pod": f"sglang-ext-{pool}-7d9c5b6f4-x2x9{number}",
                "sglang_ext_io_pool": pool,
            }
            for number, (address, pool) in enumerate(addresses.items())
        }
        folder = tmp_path_factory.mktemp("prometheus")
        with running_prometheus(folder, targets, ALERTS) as prometheus, Traffic(routers):
            prometheus.until_scraped(len(targets))
            time.sleep(8)
            yield Watched(prometheus, engines)


@needs_helm
def test_what_scales_has_a_value(watched: Watched) -> None:
    """Each query of the chart's ScaledObjects is one number."""
    ((labels, _),) = watched.prometheus.query("count by (model) (sglang_ext_router_pool_instances)")
    values = {
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
        "autoscaling": {"keda": {"enabled": True, "prometheusAddress": "http://prometheus:9090"}},
        "router": {"controller": "advise"},
        "poolDefaults": {"autoscaled": True, "servedModelName": labels["model"]},
    }
    (result,) = render([values])
    triggers = [
        (scaled["metadata"]["name"], trigger["metadata"]["query"])
        for scaled in of_kind(result["documents"], "ScaledObject")
        for trigger in scaled["spec"]["triggers"]
    ]
    assert {name for name, _ in triggers} == {f"sglang-ext-{role}" for role in ROLES.values()}
    deadline_s = time.monotonic() + SHOWN_WITHIN_S
    for name, query in triggers:
        while [math.isfinite(value) for _, value in watched.prometheus.query(query)] != [True]:
            assert time.monotonic() < deadline_s, (name, query, watched.prometheus.query(query))
            time.sleep(1)


def test_no_panel_is_empty(watched: Watched) -> None:
    prometheus = watched.prometheus
    watched.engines[-1].freeze()  # what waits there is repeated at the other one
    time.sleep(8)
    watched.engines[-1].kill()
    deadline_s = time.monotonic() + SHOWN_WITHIN_S
    while empty := empty_targets(prometheus):
        assert time.monotonic() < deadline_s, empty
        time.sleep(1)
    check_values(prometheus)
    (group,) = prometheus.get("/api/v1/rules", type="alert")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in alert_rules()]
    assert {rule["lastError"] for rule in group["rules"] if "lastError" in rule} <= {""}
    assert {rule["health"] for rule in group["rules"]} == {"ok"}


def check_values(prometheus: PrometheusServer) -> None:
    """Some of them mean what they are to mean."""
    assert prometheus.query('sum (sglang_ext_router_controller_leader{namespace="sglang-ext"})') == [({}, 1.0)]
    assert [value for _, value in prometheus.query("sglang_ext_router_peers_connected")] == [1.0, 1.0]
    assert prometheus.query("sglang_ext:cdsp_members")[0][1] == 2.0
    up = {labels["role"]: value for labels, value in prometheus.query(expression_of("Instances that take requests"))}
    assert up == {"short": 1.0, "long": 2.0, "decode": 1.0}
    hits = {labels["length_class"]: value for labels, value in prometheus.query(expression_of("Prefix hits"))}
    assert hits.keys() == {"short", "long"}
    assert 0.0 < max(hits.values()) < 1.0


def expression_of(title: str) -> str:
    (target,) = next(panel["targets"] for panel in panels() if panel["title"] == title)
    return str(target["expr"]).replace("$namespace", ".*").replace("$__rate_interval", "60s")
