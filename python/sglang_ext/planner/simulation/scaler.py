"""A horizontal autoscaler over simulated instances, as Kubernetes runs it on the queries of the Helm chart.

Every `sync_s` it reckons how many instances are needed: for each `queue_s` of work are queued, or each is busy for
`utilisation` of its time, whichever needs more. More replicas are asked for when everything within
`up_stabilisation_s` needed more, and are ready after `startup_s`; fewer when nothing within `stabilisation_s` needed as
many. Kubernetes' tolerance of a tenth is there, too. A replica that is taken away is the latest of its pool; it
finishes what it has.

`SCALE_POOLS` gives each pool a scaler of its own. A replica belongs to the pool that it was started for, whichever pool
the controller has moved it to: so scaler and controller reckon with different numbers, and both answer the same
queue. `SCALE_TOTAL` is the rule by which they do not fight: only the controller decides how instances are shared out,
the scaler how many there are. It goes by the work of both pools together, changes one of them, the long one, and takes
longer to add an instance than the controller to move one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sglang_ext.planner.simulation.events import EventLoop
from sglang_ext.planner.simulation.instances import InstancePool, SimulatedInstance
from sglang_ext.planner.simulation.pool_controller import SimulatedController
from sglang_ext.types import LengthClass, Role

SCALE_POOLS, SCALE_TOTAL = "pools", "total"
SCALERS = (SCALE_POOLS, SCALE_TOTAL)
TOLERANCE = 0.1  # Kubernetes' --horizontal-pod-autoscaler-tolerance


@dataclass(frozen=True, slots=True)
class ScalerSettings:
    """Describes what a scaler goes by. ValueError, in one line that names the setting, for a value that makes no
    sense."""

    scaler: str = SCALE_TOTAL
    queue_s: float = 2.0  # of work queued for each instance
    utilisation: float = 0.7
    startup_s: float = 120.0
    up_stabilisation_s: float = 90.0
    stabilisation_s: float = 300.0
    most: int = 32  # replicas of one pool
    sync_s: float = 15.0

    def __post_init__(self) -> None:
        if self.scaler not in SCALERS:
            raise ValueError(f"scaler.kind must be one of {', '.join(SCALERS)}, got {self.scaler}")
        if not (math.isfinite(self.queue_s) and self.queue_s > 0):
            raise ValueError(f"scaler.queue_s must be above 0, got {self.queue_s:g}")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"scaler.utilisation must be above 0 and at most 1, got {self.utilisation:g}")
        for name in ("startup_s", "up_stabilisation_s", "stabilisation_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"scaler.{name} must be at least 0, got {value:g}")
        if self.most < 1:
            raise ValueError(f"scaler.max must be at least 1, got {self.most}")


class Scaling(NamedTuple):
    """The number of replicas that a pool should have from a moment on."""

    at_s: float
    pool: LengthClass
    replicas: int


@dataclass(slots=True, eq=False)
class _Deployment:
    """The replicas that were started for a pool, even if they serve another one now."""

    pool: LengthClass
    ready: list[SimulatedInstance]
    starting: list[float]  # when each will be ready
    needed: deque[tuple[float, int]]  # what was reckoned recently

    @property
    def replicas(self) -> int:
        return len(self.ready) + len(self.starting)


class SimulatedScaler:
    """Runs while anything else is to happen."""

    def __init__(
        self, loop: EventLoop, pool: InstancePool, controller: SimulatedController, settings: ScalerSettings
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._controller = controller
        self._settings = settings
        self._deployments = {
            length_class: _Deployment(
                length_class, [each for each in pool.serving if each.role is Role(length_class.value)], [], deque()
            )
            for length_class in LengthClass
        }
        self.scalings = [
            Scaling(0.0, deployment.pool, deployment.replicas) for deployment in self._deployments.values()
        ]
        loop.schedule_background(settings.sync_s, self._look, None)

    def _look(self, _: None) -> None:
        if self._settings.scaler == SCALE_TOTAL:
            short, long = self._deployments[LengthClass.SHORT], self._deployments[LengthClass.LONG]
            self._scale(long, self._needed(LengthClass, fixed=short.replicas))
        else:
            for deployment in self._deployments.values():
                self._scale(deployment, self._needed((deployment.pool,), fixed=0))
        if self._loop.has_events:
            self._loop.schedule_background(self._loop.now_s + self._settings.sync_s, self._look, None)

    def _needed(self, pools: Iterable[LengthClass], fixed: int) -> list[tuple[float, float]]:
        """(value, what each replica may have of it) of each query, for the pools together less `fixed` instances."""
        settings = self._settings
        roles = {Role(pool.value) for pool in pools}
        tokens = sum(instance.pending_tokens for instance in self._pool.serving if instance.role in roles)
        queued_s = tokens / self._pool.tokens_per_s
        offered = sum(self._controller.offered.get(pool, 0.0) for pool in LengthClass if Role(pool.value) in roles)
        return [
            (queued_s - fixed * settings.queue_s, settings.queue_s),
            (offered - fixed * settings.utilisation, settings.utilisation),
        ]

    def _scale(self, deployment: _Deployment, queries: list[tuple[float, float]]) -> None:
        settings, now_s = self._settings, self._loop.now_s
        replicas = deployment.replicas
        wanted = 1
        for value, each in queries:
            is_near = abs(value / (each * replicas) - 1.0) <= TOLERANCE
            wanted = max(wanted, replicas if is_near else math.ceil(value / each))
        wanted = min(wanted, settings.most)
        deployment.needed.append((now_s, wanted))
        while deployment.needed[0][0] < now_s - max(settings.stabilisation_s, settings.up_stabilisation_s):
            deployment.needed.popleft()
        if wanted < replicas:
            wanted = min(replicas, max(self._lately(deployment, settings.stabilisation_s)))
        elif wanted > replicas:
            wanted = max(replicas, min(self._lately(deployment, settings.up_stabilisation_s)))
        if wanted == replicas:
            return
        self.scalings.append(Scaling(now_s, deployment.pool, wanted))
        for _ in range(wanted - replicas):
            deployment.starting.append(now_s + settings.startup_s)
            self._loop.schedule_background(now_s + settings.startup_s, self._start, deployment)
        for _ in range(replicas - wanted):
            if deployment.starting:
                deployment.starting.pop()
            else:
                self._pool.drain_instance(deployment.ready.pop())
                self._controller.record_sizes()

    def _lately(self, deployment: _Deployment, window_s: float) -> list[int]:
        """Return what was reckoned within the window; in its first one, as if nothing had changed before."""
        now_s = self._loop.now_s
        before = [deployment.replicas] if now_s < window_s else []
        return [needed for at_s, needed in deployment.needed if at_s >= now_s - window_s] + before

    def _start(self, deployment: _Deployment) -> None:
        """A requested replica is ready, unless it was taken away before."""
        if deployment.starting and deployment.starting[0] <= self._loop.now_s:
            deployment.starting.pop(0)
            deployment.ready.append(self._pool.add_instance(Role(deployment.pool.value)))
            self._controller.record_sizes()
