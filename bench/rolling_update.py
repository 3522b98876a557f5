"""A rolling update under constant load: routers, prefill and decode instances are replaced one after the other.

    python bench/rolling_update.py [--users 6] [--period-s 2] [--before-s 60] [--out FOLDER]

A real Kubernetes API server runs, and processes stand in for pods: three routers with service discovery that share
what they know, and a short, a long and two decode instances of SGLang on the CPU. What a cluster does around them is
done here: EndpointSlices (ready, serving, terminating), readiness probes, preStop delays, SIGTERM, grace periods. Users
stream from the routers in turn, over kept connections. Two updates follow a time without one:

1. each router, prefill and decode instance is replaced: a new one starts, and when it is ready the old one ends;
2. instances of revision v2 start while the instances of v1 serve, which end then. KV may not pass between the two.

`failed` (no whole reply with status 200) and `hung` (no end within 60 s) must be 0, and so must `killed` (pods that did
not end by themselves within their grace period), `bad_exits` (a status other than 0) and `mixed_pairs` (prefill and
decode of different revisions). `ttft_p99_ratio` is the time to first token, 99th percentile, during the updates over
that before them. On a machine with few cores it shows what the start of an engine takes from the others. The last line
is `RESULT {json}`.

Needs kube-apiserver and etcd, which `tools/build_kube_apiserver` builds once (about 8 minutes; it names what is
missing).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_ext.cluster.fork_client import ForkClient, ForkedProcess
from sglang_ext.engine.launch_plan import shared_cpu_environment
from sglang_ext.ports import pick_free_ports
from support.result import BenchmarkRun, give_up, progress
from support.rolling_pods import Cluster, Pod, PodError, Process, Service, run_program
from support.steady_load import Ended, SteadyLoad
from support.text_model import build_text_model

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # the API server that the tests use

from support.kubernetes_api_server import NAMESPACE, ApiServer  # noqa: E402

BOUNDARY_TOKENS = 128
ROUTERS = 3
WORKERS = (("prefill-short", "short", 1), ("prefill-long", "long", 1), ("decode", "decode", 2))
WORKER_DELAY_S, WORKER_GRACE_S = 3.0, 60.0
ROUTER_DELAY_S, ROUTER_GRACE_S = 3, 60
PAUSE_S = 2.0  # between two replacements
AFTER_S = 10.0


class Phase(NamedTuple):
    """A part of the run; times on the monotonic clock."""

    name: str
    from_s: float
    to_s: float


class Deployment:
    """The pods that are served, on one API server."""

    def __init__(self, server: ApiServer, folder: Path, model: Path, router_options: Sequence[str] = ()) -> None:
        self._server = server
        self._router_options = router_options
        self._model = model
        self._forks = ForkClient(folder / "fork-server.log", {**os.environ, **shared_cpu_environment(is_offline=True)})
        network = random.SystemRandom().randrange(16, 250)
        self.cluster = Cluster(folder, server.put_slice, network)
        ports = pick_free_ports("127.0.0.1", 4, draw=random.SystemRandom())
        self.router = Service("router", "", {"http": ports[0]}, "/readyz", 0.0, ROUTER_DELAY_S + ROUTER_GRACE_S + 10.0)
        self.workers = {
            role: Service(
                role,
                role,
                {"http": ports[1]} if role == "decode" else {"http": ports[1], "bootstrap": ports[2]},
                "/health",
                WORKER_DELAY_S,
                WORKER_GRACE_S,
            )
            for role, _, _ in WORKERS
        }
        self._peer_port = ports[3]
        self._peers = [f"127.0.{network}.{number}:{ports[3]}" for number in range(1, 60)]
        self._peer_key = secrets.token_hex(16)
        self.revisions: dict[str, str] = {}  # URL → revision

    async def add_worker(self, role: str, revision: str) -> Pod:
        """A new instance of a pool; returns when it is ready."""
        option = next(option for name, option, _ in WORKERS if name == role)
        service = self.workers[role]

        def start(address: str, log: Path) -> Process:
            self.revisions[f"http://{address}:{service.ports['http']}"] = revision
            return self._start_worker(service, option, revision, address, log)

        return await self.cluster.create(service, start)

    async def add_router(self) -> Pod:
        """A new router; returns when it is ready."""
        return await self.cluster.create(self.router, self._start_router)

    def router_urls(self) -> list[str]:
        """Return where clients may send requests."""
        return [pod.url for pod in self.cluster.of("router") if pod.is_ready]

    def close(self) -> None:
        self.cluster.kill_all()
        self._forks.close()

    def _start_worker(self, service: Service, option: str, revision: str, address: str, log: Path) -> ForkedProcess:
        arguments = [
            *("--role", option, "--model-path", str(self._model), "--host", address),
            *("--port", str(service.ports["http"]), "--bootstrap-port", str(service.ports.get("bootstrap", 8998))),
            *("--threads", "1", "--exit-with-parent", "--kv-memory-mib", "64", "--revision", revision),
            *(("--laps-boundary-tokens", str(BOUNDARY_TOKENS)) if option != "decode" else ()),
            *("--", "--served-model-name", "m"),
        ]
        with log.open("ab") as output:
            return self._forks.start(
                arguments, output=output.fileno(), environment=os.environ, cores=os.sched_getaffinity(0)
            )

    def _start_router(self, address: str, log: Path) -> Process:
        command = [
            *(sys.executable, "-m", "sglang_ext.cli", "router", "--host", address),
            *("--port", str(self.router.ports["http"]), "--length-boundary-tokens", str(BOUNDARY_TOKENS)),
            *("--drain-delay-secs", str(ROUTER_DELAY_S), "--shutdown-grace-period-secs", str(ROUTER_GRACE_S)),
            *("--service-discovery", "--service-discovery-namespace", NAMESPACE),
            *("--set", f"discovery.kubernetes_url={self._server.url}"),
            *("--set", f"discovery.kubernetes_ca_file={self._server.ca_file}"),
            *("--set", f"discovery.kubernetes_token_file={self._server.token_file}"),
            *("--peer-port", str(self._peer_port), "--set", f"group.peer_host={address}"),
        ]
        for peer in self._peers:
            command += ["--peer", peer]
        return run_program([*command, *self._router_options], log, {"SGLANG_EXT_PEER_KEY": self._peer_key})


async def replace_one_by_one(deployment: Deployment, phases: list[Phase]) -> None:
    """The first update: surge of one, nothing unavailable."""
    began_s = time.monotonic()
    for old in deployment.cluster.of("router"):
        new = await deployment.add_router()
        _report(deployment, old, new, await deployment.cluster.delete(old))
        await asyncio.sleep(PAUSE_S)
    phases.append(Phase("routers", began_s, time.monotonic()))
    for name, roles in (("prefill", ("prefill-short", "prefill-long")), ("decode", ("decode",))):
        began_s = time.monotonic()
        for role in roles:
            for old in deployment.cluster.of(role):
                new = await deployment.add_worker(role, "v1")
                _report(deployment, old, new, await deployment.cluster.delete(old))
                await asyncio.sleep(PAUSE_S)
        phases.append(Phase(name, began_s, time.monotonic()))


async def replace_by_revision(deployment: Deployment, phases: list[Phase]) -> None:
    """Run the second update: v2 together with v1, then v2 only."""
    began_s = time.monotonic()
    for role, _, count in WORKERS:
        for _ in range(count):
            pod = await deployment.add_worker(role, "v2")
            progress(f"{pod.name} of v2 is ready")
    for role, _, _ in reversed(WORKERS):
        for old in [pod for pod in deployment.cluster.of(role) if deployment.revisions[pod.url] == "v1"]:
            _report(deployment, old, None, await deployment.cluster.delete(old))
            await asyncio.sleep(PAUSE_S)
    phases.append(Phase("revision", began_s, time.monotonic()))


def _report(deployment: Deployment, old: Pod, new: Pod | None, end: object) -> None:
    came = f"{new.name} is ready, " if new else ""
    progress(f"{came}{old.name} has ended: {end}")


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """All of it; the result's values. Raises PodError."""
    model = folder / "model"
    model.mkdir()
    build_text_model(model)
    server = ApiServer(folder)
    deployment: Deployment | None = None
    try:
        await server.start()
        deployment = Deployment(server, folder, model)
        began_s = time.monotonic()
        for role, _, count in WORKERS:
            for _ in range(count):
                await deployment.add_worker(role, "v1")
        for _ in range(ROUTERS):
            await deployment.add_router()
        progress(f"all is ready after {time.monotonic() - began_s:.0f} s")
        phases: list[Phase] = []
        load = SteadyLoad(
            deployment.router_urls,
            users=arguments.users,
            period_s=arguments.period_s,
            boundary_tokens=BOUNDARY_TOKENS,
        )
        async with load:
            await asyncio.sleep(5.0)  # the first requests compile and fill caches
            began_s = time.monotonic()
            await asyncio.sleep(arguments.before_s)
            phases.append(Phase("before", began_s, time.monotonic()))
            await replace_one_by_one(deployment, phases)
            await replace_by_revision(deployment, phases)
            began_s = time.monotonic()
            await asyncio.sleep(AFTER_S)
            phases.append(Phase("after", began_s, time.monotonic()))
        return result_of(load, phases, deployment)
    finally:
        if deployment is not None:
            deployment.close()
        await server.stop()


def result_of(load: SteadyLoad, phases: list[Phase], deployment: Deployment) -> dict[str, object]:
    """Return what came of the requests, the pods and the times to first token."""
    outcomes = Counter(one.outcome for one in load.ended)
    for one in load.ended:
        if one.outcome != "ok":
            phase = next((phase.name for phase in phases if phase.from_s <= one.started_s < phase.to_s), "-")
            progress(f"{one.outcome} ({phase}, {one.router} {one.prefill} {one.decode}): {one.detail}")
    by_phase = {phase.name: load.between(phase.from_s, phase.to_s) for phase in phases}
    updates = [one for name, ended in by_phase.items() if name not in {"before", "after"} for one in ended]
    before_p99, during_p99 = _percentile(by_phase["before"], 0.99), _percentile(updates, 0.99)
    revisions = deployment.revisions
    mixed = [one for one in load.ended if one.decode and revisions[one.prefill] != revisions[one.decode]]
    ends = deployment.cluster.ends
    return {
        "requests": len(load.ended),
        "failed": outcomes["failed"],
        "hung": outcomes["hung"],
        "ttft_p99_ratio": round(during_p99 / before_p99, 2),
        "ttft_p99_before_ms": round(before_p99, 1),
        "ttft_p99_during_ms": round(during_p99, 1),
        "ttft_p50_before_ms": round(_percentile(by_phase["before"], 0.5), 1),
        "ttft_p50_during_ms": round(_percentile(updates, 0.5), 1),
        "mixed_pairs": len(mixed),
        "replaced": dict(Counter(end.service for end in ends)),
        "killed": sum(end.was_killed for end in ends),
        "bad_exits": sum(end.status != 0 for end in ends),
        "slowest_end_s": round(max(end.took_s for end in ends), 1),
        "phases": {
            phase.name: {
                "seconds": round(phase.to_s - phase.from_s, 1),
                "requests": len(by_phase[phase.name]),
                "ttft_p99_ms": round(_percentile(by_phase[phase.name], 0.99), 1),
            }
            for phase in phases
        },
        "requests_per_s": round(len(load.ended) / (phases[-1].to_s - phases[0].from_s + 5.0), 2),
    }


def _percentile(ended: list[Ended], share: float) -> float:
    """Of the times to first token, in ms; the nearest rank."""
    times = sorted(one.ttft_ms for one in ended if one.ttft_ms is not None)
    return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")


def main() -> None:
    """Run the benchmark and print the result line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--users", type=int, default=6, help="users, each with a connection of its own")
    parser.add_argument("--period-s", type=float, default=2.0, help="time between two requests of a user")
    parser.add_argument("--before-s", type=float, default=60.0, help="time without an update, to compare with")
    parser.add_argument("--out", type=Path, help="folder for rolling_update.json")
    parser.add_argument("--keep", type=Path, help="folder for model and logs, which stays")
    arguments = parser.parse_args()
    built = subprocess.run(
        [str(ROOT / "tools/build_kube_apiserver")],
        env={**os.environ, "JOBS": str(len(os.sched_getaffinity(0))), "NICE": "0"},
        check=False,
    )
    if built.returncode:
        give_up("there is no API server; see the line above")
    benchmark = BenchmarkRun("sglang-ext", "sglang", "torch")
    try:
        if arguments.keep is not None:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            result = asyncio.run(run(arguments, arguments.keep))
        else:
            with tempfile.TemporaryDirectory(prefix="rolling-update-") as folder:
                result = asyncio.run(run(arguments, Path(folder)))
    except PodError as error:
        give_up(str(error))
    benchmark.end(result, None if arguments.out is None else arguments.out / "rolling_update.json")


if __name__ == "__main__":
    main()
