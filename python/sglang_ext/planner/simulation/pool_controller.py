"""The instance-pressure controller over simulated instances: every period it looks, and moves at most one instance.

A move takes effect at once: the policy switches its mode between two iterations, the router counts the instance to its
new pool. The drain, the verification and the undoing of `pool_move` are about calls that fail, which do not here.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.laps.decide.round_plan import ClassReport, LapsMode
from sglang_ext.planner.simulation.events import EventLoop
from sglang_ext.planner.simulation.instances import InstancePool, SimulatedInstance
from sglang_ext.planner.simulation.iteration_policies import LapsPolicy
from sglang_ext.types import LengthClass, Role
from sglang_ext_router.decide.instance_pressure import (
    ControllerState,
    InstanceSignals,
    PoolInstance,
    PressureSettings,
    decide,
)

PERIOD_S = 1.0


class PoolSizes(NamedTuple):
    """Describes how many instances of each pool take requests from a moment on."""

    at_s: float
    short: int
    long: int


class SimulatedMove(NamedTuple):
    """An instance that was moved, and why."""

    at_s: float
    instance: int
    source: LengthClass
    target: LengthClass
    reason: str  # a DecisionReason


class SimulatedController:
    """Runs while anything else is to happen. Without `is_moving` it looks and moves nothing.

    ValueError unless every instance is in a short or a long pool and has the LAPS policy.
    """

    def __init__(
        self, loop: EventLoop, pool: InstancePool, settings: PressureSettings, *, is_moving: bool = True
    ) -> None:
        for instance in pool.instances:
            if instance.role is Role.BOTH or not isinstance(instance.policy, LapsPolicy):
                raise ValueError("pool moves need instances of short and long pools with the laps policy")
        self._loop = loop
        self._pool = pool
        self._settings = settings
        self._is_moving = is_moving
        self._state = ControllerState()
        self._joined_s: dict[int, float] = {}  # by instance; absent: from the start
        self._busy_s: dict[int, float] = {}
        self.moves: list[SimulatedMove] = []
        self.offered: dict[LengthClass, float] = {}  # load of each pool in instances, when it last looked
        self.sizes = [self._sizes()]
        loop.schedule_background(PERIOD_S, self._look, None)

    def record_sizes(self) -> None:
        """An instance has come or is going."""
        self.sizes.append(self._sizes())

    def _look(self, _: None) -> None:
        now_s = self._loop.now_s
        instances = [self._view(instance) for instance in self._pool.serving]
        if instances:
            decision = decide(instances, self._settings, self._state, now_s)
            self._state = decision.state
            for pool, view in ((LengthClass.SHORT, decision.short), (LengthClass.LONG, decision.long)):
                if view.offered_instances is not None:
                    self.offered[pool] = max(0.0, view.offered_instances)
            if decision.proposal is not None and self._is_moving:
                proposal = decision.proposal
                self.moves.append(
                    SimulatedMove(now_s, proposal.worker_id, proposal.source, proposal.target, decision.reason.value)
                )
                self._move(self._pool.instances[proposal.worker_id], proposal.target)
        if self._loop.has_events:
            self._loop.schedule_background(now_s + PERIOD_S, self._look, None)

    def _move(self, instance: SimulatedInstance, target: LengthClass) -> None:
        assert isinstance(instance.policy, LapsPolicy)
        now_s = self._loop.now_s
        instance.role = Role(target.value)
        instance.policy.laps.switch_mode(LapsMode(target.value))
        self._joined_s[instance.number] = now_s
        self._state = self._state.after_move(target, now_s)
        self.sizes.append(self._sizes())

    def _view(self, instance: SimulatedInstance) -> PoolInstance:
        policy = instance.policy
        assert isinstance(policy, LapsPolicy)
        now_s = self._loop.now_s
        report = policy.laps.report(policy.snapshot(instance.items, instance.kv_tokens, now_s))
        pool = LengthClass(instance.role.value)
        own: ClassReport = report.short if pool is LengthClass.SHORT else report.long
        busy_s = instance.busy_s
        if instance.running is not None:
            busy_s += now_s - instance.running.start_s
        utilisation = min(1.0, max(0.0, (busy_s - self._busy_s.get(instance.number, 0.0)) / PERIOD_S))
        self._busy_s[instance.number] = busy_s
        signals = InstanceSignals(
            report.short.backlog_s, report.long.backlog_s, own.slo_violation_rate, own.tardiness, utilisation
        )
        joined_s = self._joined_s.get(instance.number, 0.0)
        return PoolInstance(instance.number, pool, True, signals, True, len(instance.items), joined_s)

    def _sizes(self) -> PoolSizes:
        roles = [instance.role for instance in self._pool.serving]
        return PoolSizes(self._loop.now_s, roles.count(Role.SHORT), roles.count(Role.LONG))
