"""Drives the pool controller: asks the instances, lets the policies decide, carries moves out, says so.

Decisions are `decide.instance_pressure` (between the short and the long pool) and `decide.role_choice` (between prefill
and decode), a move is the state machine `decide.pool_move`; here are only the clock, the requests to the instances and
the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import aiohttp

from sglang_ext.laps.decide.round_plan import LapsMode
from sglang_ext.types import LengthClass, Role
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.decide.instance_pressure import (
    ControllerState,
    Decision,
    DecisionReason,
    PoolInstance,
    PoolView,
    decide,
)
from sglang_ext_router.decide.pool_move import (
    AwaitDrain,
    HoldBack,
    MoveActions,
    MoveFinished,
    MoveOutcome,
    MovePlan,
    PoolMove,
    PostMode,
    ReadMode,
    Relabel,
    Release,
)
from sglang_ext_router.decide.role_choice import RoleInstance, RoleState, Side, choose_switch
from sglang_ext_router.instances.laps_monitor import (
    LapsMonitor,
    NoReportError,
    NotServedError,
    SwitchRefusedError,
)
from sglang_ext_router.instances.probe import Prober
from sglang_ext_router.instances.registry import WorkerRegistry, kind_of, used_share
from sglang_ext_router.instances.role_switches import RoleSwitches
from sglang_ext_router.instances.workers import Worker

logger = logging.getLogger(__name__)

KEPT_MOVES = 20
DRAIN_POLL_S = 0.02
MAX_BACKOFF_DOUBLINGS = 6  # of the time that an instance is not moved after failed moves
OPERATOR = "operator"


class MoveRefusedError(Exception):
    """A move that was asked for cannot be made; `status` is what HTTP calls it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class MoveRecord:
    """One move, for people and metrics. Without an outcome it is under way."""

    started_at_s: float  # Unix time
    url: str
    source: LengthClass | Side
    target: LengthClass | Side
    reason: str  # a DecisionReason or SwitchReason, or OPERATOR
    model: str
    outcome: MoveOutcome | None = None
    detail: str = ""
    duration_s: float = 0.0


@dataclass(slots=True)
class ModelControl:
    """Describes what is remembered of the pools of one model."""

    state: ControllerState = field(default_factory=ControllerState)
    decision: Decision | None = None  # the latest
    reported: tuple[DecisionReason, LengthClass | None] | None = None  # what was logged last
    roles: dict[str, RoleState] = field(default_factory=dict)  # by revision


def pool_of(worker: Worker) -> LengthClass | None:
    """Return the pool that an instance belongs to; None for instances that serve both classes, or decode."""
    role = worker.role
    return LengthClass.SHORT if role is Role.SHORT else LengthClass.LONG if role is Role.LONG else None


class PoolController:
    """Runs Algorithm 2 of LAPS every control period, switches roles, and moves what an operator asks for in every mode.

    Each model has pools of its own, and decisions; an instance moves between those of its model. One moves at a time.
    """

    def __init__(
        self,
        config: RouterConfig,
        loop: asyncio.AbstractEventLoop,
        registry: WorkerRegistry,
        prober: Prober,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make a controller. `may_act` returns whether this router moves instances now, of all routers of its group."""
        self._config = config
        self._may_act = may_act
        self._loop = loop
        self._registry = registry
        self._prober = prober
        timeout_s = min(config.controller_interval_secs, config.health_check_timeout_secs)
        self.monitor = LapsMonitor(registry, prober, loop.time, timeout_s)
        self._switches = RoleSwitches(registry, prober, config.controller_drain_timeout_secs)
        self.settings = config.pressure_settings
        self._controls: dict[str, ModelControl] = {}  # by model
        self.current: MoveRecord | None = None
        self.moves: deque[MoveRecord] = deque(maxlen=KEPT_MOVES)  # the latest last
        # (from, to, outcome) → count; from 0, so that the first one shows as an increase
        pairs = ((Role.SHORT.value, Role.LONG.value), (Side.PREFILL.value, Side.DECODE.value))
        directions = (*pairs, *(pair[::-1] for pair in pairs))
        self.move_counts = {(*direction, outcome.value): 0 for direction in directions for outcome in MoveOutcome}
        self.decision_counts: dict[tuple[str, str], int] = {}  # (result, reason) → count
        self._joined_s: dict[int, float] = {}
        self._failures: dict[int, tuple[int, float]] = {}  # worker id → failed moves in a row, not moved until
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_on(self) -> bool:
        return self._config.controller == "on" and self._may_act()

    def control(self, model: str) -> ModelControl:
        """Return what is remembered of the pools of a model."""
        return self._controls.setdefault(model, ModelControl())

    def cooldown_left_s(self, model: str) -> float:
        return self.control(model).state.cooldown_left_s(self.settings, self._loop.time())

    def _models(self) -> list[str]:
        """Those with instances that can be moved; where there is no choice of models the only one in any case."""
        names = list(self._registry.models)
        if len(names) < 2:
            return names or [""]
        split = {worker.model for worker in self._registry if pool_of(worker) is not None}
        return [name for name in names if name in split]

    def start(self) -> None:
        if self._config.controller != "off":
            self._spawn(self._run())

    async def stop(self) -> None:
        """End what runs. A move that is cut leaves the instance in a mode that it reports to the next router."""
        self._is_stopping = True
        pending = set(self._tasks)
        while pending:  # a cancellation that meets a timeout of the HTTP client is lost in it
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)

    async def refresh_if_stale(self) -> None:
        """Ask the instances now, unless it was done within the last control period."""
        refreshed_s = self.monitor.refreshed_s
        if refreshed_s is None or self._loop.time() - refreshed_s >= self._config.controller_interval_secs:
            await self.monitor.refresh()

    # -- deciding ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._is_stopping:
            await asyncio.sleep(self._config.controller_interval_secs)
            try:
                await self.run_round()
            except Exception:  # one bad round must not end all later ones
                logger.exception("the controller's round failed")

    async def run_round(self) -> None:
        """One control period: ask, decide, and begin the move, if any."""
        await self.monitor.refresh()
        if self.current is not None:
            return
        if self.is_on:
            self._adopt_modes()
        instances = self._instances()
        models = self._models()
        known = {*models, *self._registry.models}
        self._controls = {name: control for name, control in self._controls.items() if name in known}
        for model in models:
            self._decide(model, instances.get(model, ()))
        self._decide_roles()

    def _decide(self, model: str, instances: Sequence[PoolInstance]) -> None:
        """Decide for one model, and begin the move, if any."""
        control = self.control(model)
        decision = decide(instances, self.settings, control.state, self._loop.time())
        control.decision, control.state = decision, decision.state
        proposal = decision.proposal
        worker = None
        if proposal is not None and self.current is None:  # a move that is wanted now is wanted in the next round, too
            worker = next(
                (known_worker for known_worker in self._registry if known_worker.id == proposal.worker_id), None
            )
        result = "hold" if proposal is None or worker is None else "move" if self.is_on else "advise"
        key = (result, decision.reason.value)
        self.decision_counts[key] = self.decision_counts.get(key, 0) + 1
        self._say(model, control, worker)
        if self.is_on and worker is not None and proposal is not None:
            self.current = self._record(worker, proposal.source, proposal.target, decision.reason.value)
            self._spawn(self._move(worker, self.current))

    def _decide_roles(self) -> None:
        """Decide for the instances of each model and revision that can switch, and begin the move, if any."""
        now_s = self._loop.time()
        groups: dict[tuple[str, str], list[Worker]] = {}
        for worker in self._registry:
            if worker.is_ready and worker.role is not Role.PLAIN:
                groups.setdefault((worker.model, worker.revision), []).append(worker)
        for (model, revision), workers in groups.items():
            if not any(worker.can_switch_roles for worker in workers):
                continue
            roles = self.control(model).roles
            instances = [self._role_instance(worker, now_s) for worker in workers]
            switch, roles[revision] = choose_switch(instances, self.settings, roles.get(revision, RoleState()), now_s)
            if switch is None:
                continue
            result = "hold" if self.current is not None else "move" if self.is_on else "advise"
            key = (result, switch.reason.value)
            self.decision_counts[key] = self.decision_counts.get(key, 0) + 1
            worker = next(worker for worker in workers if worker.id == switch.worker_id)
            if result == "advise" and roles[revision].wanted_rounds == self.settings.confirm_rounds:
                logger.info("the controller would switch %s to %s (%s)", worker.url, switch.target, switch.reason)
            elif result == "move":
                self.current = self._record(worker, switch.target.other, switch.target, switch.reason.value)
                self._spawn(self._move(worker, self.current))

    def _role_instance(self, worker: Worker, now_s: float) -> RoleInstance:
        _, alone_until_s = self._failures.get(worker.id, (0, now_s))
        return RoleInstance(
            worker.id,
            Side(kind_of(worker.role)),
            Side(kind_of(worker.given_role)),
            is_movable=worker.can_switch_roles and now_s >= alone_until_s,
            used_share=used_share(worker),
            in_flight=worker.in_flight + worker.sibling_in_flight,
        )

    def _instances(self) -> dict[str, list[PoolInstance]]:
        """The members of both pools that take requests, by model."""
        now_s = self._loop.time()
        registered = {worker.id for worker in self._registry}
        self._joined_s = {key: value for key, value in self._joined_s.items() if key in registered}
        self._failures = {key: value for key, value in self._failures.items() if key in registered}
        found: dict[str, list[PoolInstance]] = {}
        for worker in self._registry:
            pool = pool_of(worker)
            if pool is None or not worker.is_ready:
                continue
            report = self.monitor.reports.get(worker.id)
            is_stock = worker.id in self.monitor.stock
            _, alone_until_s = self._failures.get(worker.id, (0, now_s))
            found.setdefault(worker.model, []).append(
                PoolInstance(
                    worker.id,
                    pool,
                    reports=not is_stock,
                    signals=None if report is None else report.signals(pool),
                    is_movable=not is_stock and now_s >= alone_until_s,
                    in_flight=worker.in_flight + worker.sibling_in_flight,
                    joined_s=self._joined_s.setdefault(worker.id, now_s),
                )
            )
        return found

    def _adopt_modes(self) -> None:
        """An instance that was moved keeps its mode while routers come and go: believe it, not the command line."""
        for worker in self._registry:
            pool, report = pool_of(worker), self.monitor.reports.get(worker.id)
            if pool is None or report is None or report.mode is LapsMode.BOTH or report.mode.value == pool.value:
                continue
            logger.warning(
                "worker %s was given as %s and serves %s: it is counted to the %s pool",
                *(worker.url, pool, report.mode, report.mode),
            )
            self._relabel(worker, LengthClass(report.mode.value))

    def _say(self, model: str, control: ModelControl, worker: Worker | None) -> None:
        """Log a decision: as news if it is another one than before."""
        decision = control.decision
        assert decision is not None
        reported = (decision.reason, decision.wanted)
        is_news = reported != control.reported and decision.reason is not DecisionReason.UNCONFIRMED
        if is_news:
            control.reported = reported
        if worker is not None and decision.proposal is not None:
            verb = "moves" if self.is_on else "would move"
            what = f"{verb} {worker.url} from {decision.proposal.source} to {decision.proposal.target}"
        else:
            what = "moves nothing" if decision.wanted is None else f"gives the {decision.wanted} pool nothing"
        of_model = f" of {model}" if len(self._registry.models) > 1 else ""
        logger.log(
            logging.INFO if is_news else logging.DEBUG,
            "the controller %s (%s)%s: %s, %s",
            *(what, decision.reason, of_model, _describe("short", decision.short), _describe("long", decision.long)),
        )

    # -- moving -----------------------------------------------------------------------------------------

    async def request_move(self, worker: Worker, target: LengthClass | Side) -> MoveRecord:
        """Begin a move that an operator wants; MoveRefusedError if it cannot be made."""
        source: LengthClass | Side | None = pool_of(worker)
        if isinstance(target, Side):
            if not worker.can_switch_roles:
                raise MoveRefusedError(
                    409, f"{worker.url} cannot be switched: it was not started with --enable-pd-role-switch"
                )
            source = Side(kind_of(worker.role))
        if source is None:
            raise MoveRefusedError(409, f"{worker.url} is in neither pool: its role is {worker.role}")
        if source is target:
            raise MoveRefusedError(409, f"{worker.url} is in the {target} pool already")
        if isinstance(target, Side) and not self._has_other(worker, source):
            raise MoveRefusedError(409, f"{worker.url} is the last {source} instance of its model")
        if self._config.processes > 1:
            raise MoveRefusedError(409, "instances can be moved only by a router of one process (--processes 1)")
        if self.current is not None:
            raise MoveRefusedError(409, f"{self.current.url} is being moved: one at a time")
        if not worker.is_ready:
            raise MoveRefusedError(409, f"{worker.url} is not ready")
        record = self.current = self._record(worker, source, target, OPERATOR)
        try:
            if not isinstance(target, Side):
                await self.monitor.read(worker)
        except NotServedError:
            self.current = None
            raise MoveRefusedError(
                409, f"{worker.url} cannot be switched: it was not started by `sglang-ext worker`"
            ) from None
        except NoReportError:
            pass  # the move itself will find out, and say so
        except BaseException:
            self.current = None
            raise
        self._spawn(self._move(worker, record))
        return record

    def _record(
        self, worker: Worker, source: LengthClass | Side, target: LengthClass | Side, reason: str
    ) -> MoveRecord:
        return MoveRecord(time.time(), worker.url, source, target, reason, worker.model)

    async def _move(self, worker: Worker, record: MoveRecord) -> None:
        """Carry a move out to its end, and note how it ended."""
        started_s = self._loop.time()
        logger.info("moving %s from %s to %s (%s)", record.url, record.source, record.target, record.reason)
        plan = MovePlan(
            record.source,
            record.target,
            can_drain=self._has_other(worker, record.source),
            verify_timeout_s=self._config.controller_drain_timeout_secs,
        )
        try:
            finished = await self._carry_out(PoolMove(plan), worker)
        except Exception as error:  # an instance must not stay held back
            logger.exception("the move of %s failed", record.url)
            finished = MoveFinished(MoveOutcome.NOT_UNDONE, f"the router failed: {error!r}")
        finally:
            self._hold_back(worker, False)
            self.current = None
        record.outcome, record.detail = finished.outcome, finished.detail
        record.duration_s = self._loop.time() - started_s
        self.moves.append(record)
        key = (record.source.value, record.target.value, finished.outcome.value)
        self.move_counts[key] = self.move_counts.get(key, 0) + 1
        self._learn(worker, record, finished)

    def _has_other(self, worker: Worker, source: LengthClass | Side) -> bool:
        """Return whether another instance serves what this one has served, once it is moved."""
        return any(
            other is not worker
            and other.is_ready
            and other.model == worker.model
            and (
                other.role.serves(source)
                if isinstance(source, LengthClass)
                else kind_of(other.role) == source and other.revision == worker.revision
            )
            for other in self._registry
        )

    def _learn(self, worker: Worker, record: MoveRecord, finished: MoveFinished) -> None:
        now_s = self._loop.time()
        control = self.control(record.model)
        control.reported = None  # what is decided after a move is news
        if isinstance(record.target, Side):
            control.roles[worker.revision] = RoleState(last_switch_s=now_s)
        elif finished.outcome is MoveOutcome.MOVED:
            control.state = control.state.after_move(record.target, now_s)
        else:
            control.state = control.state.after_failed_move(now_s)
        if finished.outcome is MoveOutcome.MOVED:
            self._failures.pop(worker.id, None)
            logger.info("%s is in the %s pool now (%.1f s)", record.url, record.target, record.duration_s)
            return
        failures = self._failures.get(worker.id, (0, 0.0))[0] + 1
        alone_s = self.settings.cooldown_s * 2.0 ** min(failures, MAX_BACKOFF_DOUBLINGS)
        self._failures[worker.id] = (failures, now_s + alone_s)
        logger.warning(
            "%s stays in the %s pool (%s): %s", *(record.url, record.source, finished.outcome, finished.detail)
        )

    async def _carry_out(self, machine: PoolMove, worker: Worker) -> MoveFinished:
        """Do what the state machine says until it says that it is over."""
        actions = deque(machine.start())
        while True:
            action = actions.popleft()
            match action:
                case HoldBack():
                    self._hold_back(worker, True)
                case Release():
                    self._hold_back(worker, False)
                case Relabel():
                    if action.mode in tuple(Side):
                        self._prober.take_side(worker, Side(action.mode))
                    else:
                        self._relabel(worker, LengthClass(action.mode))
                case MoveFinished():
                    return action
                case AwaitDrain() | ReadMode() | PostMode():
                    answer = await self._ask(machine, worker, action)
                    actions.extend(machine.on_lost(lost) if (lost := self._lost(worker)) else answer)

    async def _ask(self, machine: PoolMove, worker: Worker, action: AwaitDrain | ReadMode | PostMode) -> MoveActions:
        """Wait for, or ask, the instance; what the state machine makes of the answer."""
        is_role = machine.plan.target in tuple(Side)
        match action:
            case AwaitDrain():
                return machine.on_drained() if await self._drain(worker) else machine.on_drain_timeout()
            case ReadMode():
                await asyncio.sleep(action.after_s)
                try:
                    if is_role:
                        return machine.on_mode(await self._switches.read(worker), None, self._loop.time())
                    report = await self.monitor.read(worker)
                except (NotServedError, NoReportError) as error:
                    return machine.on_mode_unknown(str(error), self._loop.time())
                self.monitor.reports[worker.id] = report
                return machine.on_mode(report.mode, report.generation, self._loop.time())
            case PostMode():
                try:
                    await (self._switches.switch if is_role else self.monitor.switch)(worker, action.mode)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    logger.info("%s did not answer its switch: %s", worker.url, str(error) or type(error).__name__)
                    return machine.on_switch_unanswered(self._loop.time())
                except SwitchRefusedError as error:
                    if error.is_broken:
                        self._prober.take_out(worker, str(error))
                    return machine.on_switch_failed(str(error), self._loop.time())
                return machine.on_switched(self._loop.time())

    async def _drain(self, worker: Worker) -> bool:
        """Wait for what is in flight there; whether it has ended."""
        end_s = self._loop.time() + self._config.controller_drain_timeout_secs
        while worker.in_flight and not self._lost(worker):
            if self._loop.time() >= end_s:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True

    def _lost(self, worker: Worker) -> str:
        """Return why an instance can no longer be moved; empty while it can."""
        if not self._registry.contains(worker):
            return "it was removed"
        return "" if worker.is_healthy else f"it is out: {worker.last_error}"

    def _hold_back(self, worker: Worker, is_moving: bool) -> None:
        if worker.is_moving is not is_moving:
            worker.is_moving = is_moving
            self._registry.refresh()

    def _relabel(self, worker: Worker, pool: LengthClass) -> None:
        self._registry.relabel(worker, Role(pool.value))
        self._joined_s[worker.id] = self._loop.time()

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _describe(name: str, view: PoolView) -> str:
    shown = "unknown" if view.pressure is None else f"{view.pressure:.2f}"
    return f"{name} pressure {shown} with {view.instances} instances"
