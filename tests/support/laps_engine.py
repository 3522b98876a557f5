"""A scripted prefill instance that reports its queues and can be switched, as ours do.

engine = LapsEngine(Role.SHORT)
engine.tell(backlog_s=30.0, utilisation=1.0)
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

from sglang_ext.live.decide.instance_work import WORK_KEY, WorkLog
from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from support.router_process import FAST, Cluster, running_router
from support.scripted_engine import Received, Script, ScriptedEngine, cut, hang, reply, status

CONTROLLED = replace(
    FAST,
    controller="on",
    controller_interval_secs=0.05,
    controller_cooldown_secs=0.2,
    controller_confirm_rounds=1,
    controller_drain_timeout_secs=0.5,
    admin_api_key="admin",
)
ADMIN = {"Authorization": "Bearer admin"}
# Nothing moves by itself, and nothing a second time.
SLOW: dict[str, Any] = {"controller_interval_secs": 60.0, "controller_cooldown_secs": 60.0}


class LapsEngine(ScriptedEngine):
    """What a switch does is `behaviour`.

    obey; ignore: 200 and nothing else; lie: 200 and a higher generation, but the old mode; refuse: 500;
    silent: no answer; cut: no answer and the connection is closed.
    """

    def __init__(self, role: Role, script: Script | None = None) -> None:
        super().__init__(role, script)
        self.mode = "both"
        self.generation = 0
        self.behaviour = "obey"
        self.switches: list[str] = []
        self.laps_status = 200
        self.report: dict[str, Any] = {}
        self.work: WorkLog | None = None  # what it did, on the clock of the event loop; None: of an earlier version
        self.parked: set[int] = set()  # keys in `work` of what is parked now
        self.queries: list[str] = []  # behind the question mark of each GET /laps
        self.tell()

    def tell(self, *, backlog_s: float = 0.0, utilisation: float = 0.1, slo_violation_rate: float = 0.0) -> None:
        """What it reports from now on."""
        busy = {
            "requests": 1,
            "tokens": 100,
            "backlog_s": backlog_s,
            "oldest_wait_s": 0.1,
            "slo_violation_rate": slo_violation_rate,
            "tardiness": slo_violation_rate,
            "utilisation": utilisation,
        }
        idle = {**dict.fromkeys(busy, 0.0), "requests": 0, "tokens": 0}
        classes = {"short": idle, "long": busy} if self.role is Role.LONG else {"short": busy, "long": idle}
        self.report = {**classes, "page_tokens": 1, "parked": 0, "utilisation": utilisation, "fit": {}, "awd": {}}

    def _control(self, request: Received) -> Script:
        if request.path == "/laps":
            if self.laps_status != 200:
                return status(self.laps_status)
            self.queries.append(request.target.partition("?")[2])
            asked = parse_qs(self.queries[-1])
            told = {}
            if self.work is not None and "since" in asked:
                since, most = int(asked["since"][0]), int(asked["most"][0])
                told = {WORK_KEY: self.work.answer(request.at_s, self.parked, since, most)}
            return reply({**self.report, **told, "mode": self.mode, "generation": self.generation})
        if request.path == "/laps/mode":
            return self._switch(json.loads(request.body)["mode"])
        return super()._control(request)

    def _switch(self, mode: str) -> Script:
        self.switches.append(mode)
        previous = self.mode
        match self.behaviour:
            case "refuse":
                return status(500)
            case "silent":
                return hang()
            case "cut":
                return cut()
            case "obey" | "lie":
                self.generation += 1
                self.mode = mode if self.behaviour == "obey" else self.mode
        return reply({"mode": mode, "previous": previous, "generation": self.generation})


class ControlledCluster(Cluster):
    """A router with a controller, and the instances that it moves."""

    def role(self, engine: ScriptedEngine) -> Role:
        return self.worker(engine.url).role

    async def pools(self) -> dict[str, Any]:
        answer = await self.ask("GET", "/pools")
        assert answer.status == 200
        pools: dict[str, Any] = answer.json
        return pools

    async def moves(self) -> list[dict[str, Any]]:
        """The moves that have ended, the latest first."""
        moves: list[dict[str, Any]] = (await self.pools())["controller"]["moves"]
        return moves


@asynccontextmanager
async def controlled(
    *, short: int = 2, long: int = 1, both: int = 0, stock: int = 0, base: RouterConfig = CONTROLLED, **options: Any
) -> AsyncIterator[ControlledCluster]:
    """Engines that report, `stock` short ones that do not, one decode engine, and a router over them."""
    counts = {Role.SHORT: short, Role.LONG: long, Role.BOTH: both}
    engines: dict[Role, list[ScriptedEngine]] = {
        role: [LapsEngine(role) for _ in range(count)] for role, count in counts.items()
    }
    engines[Role.SHORT] += [ScriptedEngine(Role.SHORT) for _ in range(stock)]
    engines[Role.DECODE] = [ScriptedEngine(Role.DECODE)]
    all_engines = [engine for group in engines.values() for engine in group]
    for engine in all_engines:
        await engine.start()
    addresses = tuple(WorkerAddress(engine.url, engine.role) for engine in all_engines)
    try:
        async with running_router(replace(base, workers=addresses, **options)) as running:
            served = ControlledCluster(running, engines, all_engines)
            await served.until_ready()
            yield served
            await served.until_idle()
            for engine in all_engines:
                assert engine.malformed == []
    finally:
        for engine in all_engines:
            await engine.stop()


def laps(engine: object) -> LapsEngine:
    assert isinstance(engine, LapsEngine)
    return engine


def press_long(served: ControlledCluster) -> None:
    for engine in served.long:
        laps(engine).tell(backlog_s=60.0, utilisation=1.0)


def told(served: ControlledCluster) -> dict[str, int]:
    """How often which decision was made."""
    counts = served.router.controller.decision_counts
    return {f"{result} {reason}": count for (result, reason), count in counts.items()}


async def move(served: ControlledCluster, engine: object, to: str = "long") -> Any:
    return await served.ask("POST", "/pools/move", {"url": laps(engine).url, "to": to}, ADMIN)


async def ended(served: ControlledCluster) -> dict[str, Any]:
    """The first move, once it has ended."""
    await served.until(lambda: len(served.router.controller.moves) > 0)
    return (await served.moves())[-1]
