"""Instances of a running `sglang-ext up` that are killed and frozen in turn; what they and the router hold idle."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_ext.cluster.process_tree import send_signal, session_processes
from sglang_ext.cluster.state import STATE_FILE

RECOVERY_LIMIT_S = 180.0
# After an instance is back: streams that it had are cut by then, and decode's last echoes are over.
AFTERMATH_S = 5.0
_MIB = 1 << 20
FAULTS = tuple(f"{kind}-{role}" for kind in ("kill", "freeze") for role in ("short", "long", "decode"))


class Fault(NamedTuple):
    """One instance that was killed or frozen; times on the monotonic clock. None: it never came back."""

    program: str
    kind: str  # kill or freeze
    at_s: float
    recovered_s: float | None


class Sample(NamedTuple):
    """The router at one moment."""

    at_s: float
    rss_mib: float
    descriptors: int
    in_flight: float
    queued: float


class ServedCluster:
    """Read a cluster's state from `state.json` in `folder` and from the router's `/metrics`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def state(self) -> dict[str, Any]:
        """Contents of `state.json`. Raises OSError or ValueError while there are none."""
        state: dict[str, Any] = json.loads((self._folder / STATE_FILE).read_text(encoding="utf-8"))
        return state

    def programs(self) -> dict[str, dict[str, Any]]:
        """The programs by name."""
        return {program["name"]: program for program in self.state()["programs"]}

    def is_ready(self) -> bool:
        """Return whether every program is, and the router sends requests to every instance."""
        try:
            state = self.state()
            workers = _get(state["url"] + "/workers")["workers"]
        except (OSError, ValueError):
            return False
        return all(program["phase"] == "ready" for program in state["programs"]) and all(
            worker["state"] == "ready" for worker in workers
        )

    def sample(self) -> Sample:
        """Read the router's memory, descriptors and gauges."""
        state = self.state()
        pid = next(program["pid"] for program in state["programs"] if program["role"] == "router")
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        gauges = self.gauges()
        return Sample(
            time.monotonic(),
            rss_kib * 1024 / _MIB,
            len(os.listdir(f"/proc/{pid}/fd")),
            gauges["requests_in_flight"],
            gauges["requests_queued"],
        )

    def gauges(self) -> dict[str, float]:
        """The router's series by name; those of instances added up."""
        text = _get(self.state()["url"] + "/metrics")
        assert isinstance(text, str)
        totals: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("sglang_ext_router_"):
                key = name.partition("{")[0].removeprefix("sglang_ext_router_")
                totals[key] = totals.get(key, 0.0) + float(value)
        return totals

    def migrated(self) -> int:
        """Return how many streams have gone on on other instances than they began on."""
        lines = str(_get(self.state()["url"] + "/metrics")).splitlines()
        counts = [line.rpartition(" ")[2] for line in lines if 'router_events_total{event="migrated"}' in line]
        return int(sum(map(float, counts)))

    def held(self) -> dict[str, int]:
        """Return what instances hold, by name and kind, where it should be nothing while no request is under way."""
        found: dict[str, int] = {}
        for name, program in self.programs().items():
            if program["role"] in ("router", "coordinator"):
                continue
            (load,) = _get(program["url"] + "/v1/loads")["loads"]
            counts = {key: load[key] for key in ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")}
            counts |= {key: count for key, count in load["disaggregation"].items() if key.endswith("_queue_reqs")}
            found |= {f"{name} {key}": count for key, count in counts.items() if count}
        return found


class Faults:
    """Kills and freezes one instance after the other, each role in turn; the supervisor brings them back."""

    def __init__(self, cluster: ServedCluster, calm_s: float, faults: Sequence[str] = FAULTS) -> None:
        self._cluster = cluster
        self._calm_s = calm_s
        self._faults = frozenset(faults)
        self.done: list[Fault] = []

    def was_active(self, start_s: float, end_s: float) -> bool:
        """Return whether an instance was out, or had just come back, at any time between."""
        return any(
            fault.at_s <= end_s and (fault.recovered_s is None or start_s <= fault.recovered_s + AFTERMATH_S)
            for fault in self.done
        )

    async def run(self, until_s: float) -> None:
        """Go on until there is no time for another fault and its end."""
        draw = random.Random(1)
        names = [name for name, one in self._cluster.programs().items() if one["role"] not in ("router", "coordinator")]
        plan: list[tuple[str, str]] = []
        while time.monotonic() + self._calm_s < until_s:
            await asyncio.sleep(draw.uniform(0.5, 1.5) * self._calm_s)
            if time.monotonic() >= until_s:
                return
            if not plan:
                plan = [
                    (name, kind)
                    for name in names
                    for kind in ("kill", "freeze")
                    if f"{kind}-{name.partition('-')[0]}" in self._faults
                ]
                draw.shuffle(plan)
            await self._one(*plan.pop())

    async def _one(self, name: str, kind: str) -> None:
        before = self._cluster.programs()[name]
        fault = Fault(name, kind, time.monotonic(), None)
        self.done.append(fault)
        if kind == "kill":
            os.kill(before["pid"], signal.SIGKILL)
        else:
            send_signal(session_processes(before["pid"]), signal.SIGSTOP)
        while time.monotonic() < fault.at_s + RECOVERY_LIMIT_S:
            await asyncio.sleep(0.25)
            try:
                is_back = self._cluster.programs()[name]["restarts"] > before["restarts"]
            except (OSError, ValueError):
                continue
            if is_back and await asyncio.to_thread(self._cluster.is_ready):
                self.done[-1] = fault._replace(recovered_s=time.monotonic())
                return


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        body = reply.read()
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
