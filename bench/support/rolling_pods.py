"""Processes in place of pods, and what a cluster does around them: EndpointSlices, probes, graceful ends.

A pod has an address of its own (127.0.N.M) and the ports of its Service. It becomes ready when its readiness path
answers 200; a deleted pod is `terminating` at once, gets SIGTERM after the preStop delay, SIGKILL after the
grace period, and leaves its slice when it has ended. One slice for each Service, as the EndpointSlice controller
writes it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp

PROBE_S = 0.5
START_LIMIT_S = 240.0


class PodError(RuntimeError):
    """A pod did not become ready, or did not end by itself; the message says which and where its log is."""


class Process(Protocol):
    """Describes what is asked of `subprocess.Popen` and of a forked engine."""

    pid: int

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Service(NamedTuple):
    """A Service with its label and ports; the first port is the one of the readiness probe."""

    name: str
    role: str  # of sglang-ext.io/role; empty for a pod that routers ignore
    ports: dict[str, int]
    readiness_path: str
    delay_s: float  # preStop
    grace_s: float  # from SIGTERM on


class End(NamedTuple):
    """Describes how a pod ended."""

    service: str
    status: int | None
    took_s: float  # from SIGTERM on
    was_killed: bool


class Pod:
    """One process and its endpoint."""

    def __init__(self, service: Service, name: str, address: str, process: Process, log: Path) -> None:
        self.service = service
        self.name = name
        self.address = address
        self.process = process
        self.log = log
        self.is_ready = False
        self.is_terminating = False

    @property
    def url(self) -> str:
        return f"http://{self.address}:{next(iter(self.service.ports.values()))}"

    def endpoint(self) -> dict[str, Any]:
        """As the EndpointSlice controller writes it."""
        return {
            "addresses": [self.address],
            "conditions": {
                "ready": self.is_ready and not self.is_terminating,
                "serving": self.is_ready,
                "terminating": self.is_terminating,
            },
            "targetRef": {"kind": "Pod", "name": self.name, "uid": f"uid-{self.name}"},
        }


class Cluster:
    """The pods of all Services. `put_slice` writes to the API server."""

    def __init__(self, folder: Path, put_slice: Callable[[dict[str, Any]], Awaitable[None]], network: int) -> None:
        self._folder = folder
        self._put_slice = put_slice
        self._addresses = (f"127.0.{network}.{number}" for number in count(1))
        self._locks: dict[str, asyncio.Lock] = {}
        self.pods: list[Pod] = []
        self.ends: list[End] = []

    def of(self, service: str) -> list[Pod]:
        """Return its pods, the oldest first, without pods that end."""
        return [pod for pod in self.pods if pod.service.name == service and not pod.is_terminating]

    async def create(self, service: Service, start: Callable[[str, Path], Process]) -> Pod:
        """Start a pod by `start(address, log)` and return when it is ready. Raises PodError."""
        address = next(self._addresses)
        name = f"{service.name}-{address.rpartition('.')[2]}"
        log = self._folder / f"{name}.log"
        pod = Pod(service, name, address, await asyncio.to_thread(start, address, log), log)
        self.pods.append(pod)
        await self._write(service)
        deadline_s = time.monotonic() + START_LIMIT_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
            while not await _answers(session, pod.url + service.readiness_path):
                if pod.process.poll() is not None or time.monotonic() > deadline_s:
                    raise PodError(f"{name} did not become ready: {_last_line(log)} ({log})")
                await asyncio.sleep(PROBE_S)
        pod.is_ready = True
        await self._write(service)
        return pod

    async def delete(self, pod: Pod) -> End:
        """Return what the kubelet and the controllers do when a pod is deleted; returns when it has ended."""
        service = pod.service
        pod.is_terminating = True
        await self._write(service)
        await asyncio.sleep(service.delay_s)
        asked_s = time.monotonic()
        pod.process.terminate()
        while pod.process.poll() is None and time.monotonic() - asked_s < service.grace_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        was_killed = pod.process.poll() is None
        self.kill(pod)
        end = End(service.name, pod.process.poll(), time.monotonic() - asked_s, was_killed)
        self.ends.append(end)
        self.pods.remove(pod)
        await self._write(service)
        return end

    def kill(self, pod: Pod) -> None:
        """SIGKILL of all its processes; each pod has a session of its own."""
        try:
            os.killpg(pod.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        while pod.process.poll() is None:
            time.sleep(0.01)

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for pod in self.pods:
            self.kill(pod)

    async def _write(self, service: Service) -> None:
        labels = {"kubernetes.io/service-name": service.name}
        if service.role:
            labels["sglang-ext.io/role"] = service.role
        async with self._locks.setdefault(service.name, asyncio.Lock()):
            await self._put_slice(
                {
                    "metadata": {"name": f"{service.name}-slice", "namespace": "default", "labels": labels},
                    "addressType": "IPv4",
                    "endpoints": [pod.endpoint() for pod in self.pods if pod.service.name == service.name],
                    "ports": [{"name": n, "port": port, "protocol": "TCP"} for n, port in service.ports.items()],
                }
            )


def run_program(
    command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, its output in `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "no output"
