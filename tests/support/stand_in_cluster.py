"""Clusters of stand-in programs; as a script, one that serves until it is told to stop or is killed."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.cluster.config import LivenessSettings
from sglang_ext.cluster.plan import ROUTER_NAME, ClusterPlan, Program
from sglang_ext.cluster.supervisor import Listener, Supervisor
from sglang_ext.ports import pick_free_ports
from sglang_ext.types import Role

TESTS = Path(__file__).resolve().parent.parent
_INSTANCES = (("short-0", Role.SHORT), ("long-0", Role.LONG), ("decode-0", Role.DECODE))


def stand_in_plan(options: dict[str, Sequence[str]] | None = None, start_parallel: int = 8) -> ClusterPlan:
    """Return a plan of three instances and a router; `options` are stand_in_server's, by program name."""
    ports = pick_free_ports("127.0.0.1", len(_INSTANCES) + 1, draw=random.Random())
    *instance_ports, router_port = ports

    def program(name: str, role: Role | None, port: int) -> Program:
        command = (sys.executable, "-m", "support.stand_in_server", str(port), *(options or {}).get(name, ()))
        return Program(
            name=name,
            command=command,
            env={"PYTHONPATH": str(TESTS)},
            cores=None,
            url=f"http://127.0.0.1:{port}",
            ready_path="/readyz" if role is None else "/health",
            role=role,
            bootstrap_port=None,
        )

    return ClusterPlan(
        instances=tuple(program(*entry, port) for entry, port in zip(_INSTANCES, instance_ports, strict=True)),
        router=program(ROUTER_NAME, None, router_port),
        start_parallel=start_parallel,
        admin_key="key",
        model_name="m",
    )


def stand_in_supervisor(
    plan: ClusterPlan,
    logs: Path,
    *,
    listener: Listener = lambda member, line: None,
    start_timeout_s: float = 20.0,
    grace_s: float = 5.0,
    restarts: bool = True,
    liveness: LivenessSettings | None = None,
) -> Supervisor:
    """Return a supervisor for `plan` that has not started anything but its watchdog."""
    return Supervisor(
        plan,
        logs,
        start_timeout_s=start_timeout_s,
        drain_s=grace_s,
        grace_s=grace_s,
        restarts=restarts,
        liveness=liveness or LivenessSettings(),
        listener=listener,
    )


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    from sglang_ext.cluster.process_tree import read_stat

    stat = read_stat(pid)
    return stat is not None and not stat.is_zombie


def wait_until_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Wait for processes to end and return those that have not."""
    deadline_s = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def main(logs: str) -> None:
    """Start a cluster whose instances are hard to end, print the pids, and serve for ever."""
    stubborn = ("--ignore-term", "--child")
    plan = stand_in_plan({"short-0": stubborn, "long-0": ("--child",)})
    supervisor = stand_in_supervisor(plan, Path(logs))
    assert supervisor.start()
    print(os.getpid(), *(member.pid for member in supervisor.members), flush=True)
    while True:
        supervisor.tick()
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
