"""Metrics of the pools and of what moves between them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sglang_ext.types import LengthClass, Role
from sglang_ext_router.controller import PoolController
from sglang_ext_router.metrics import PREFIX
from sglang_ext_router.workers import WorkerRegistry


def pool_families(registry: WorkerRegistry, controller: PoolController) -> Iterator[Metric]:
    """Gauges at this moment, and counters of this process. A pool whose pressure is unknown has no pressure."""
    sizes = GaugeMetricFamily(PREFIX + "pool_instances", "Instances of a pool, ready or not", labels=("pool",))
    for role in Role:
        sizes.add_metric((role.value,), sum(worker.role is role for worker in registry))
    yield sizes
    pressures = GaugeMetricFamily(PREFIX + "pool_pressure", "P90 of its instances' pressures", labels=("pool",))
    offered = GaugeMetricFamily(
        PREFIX + "pool_offered_instances", "Load offered to a pool, in instances' worth of work", labels=("pool",)
    )
    decision = controller.decision
    if decision is not None:
        for pool, view in ((LengthClass.SHORT, decision.short), (LengthClass.LONG, decision.long)):
            if view.pressure is not None:
                pressures.add_metric((pool.value,), view.pressure)
            if view.offered_instances is not None:
                offered.add_metric((pool.value,), view.offered_instances)
    yield from (pressures, offered)
    moves = CounterMetricFamily(
        PREFIX + "pool_moves", "Moves between pools that have ended", labels=("source", "target", "outcome")
    )
    for move_key, count in controller.move_counts.items():
        moves.add_metric(move_key, count)
    decisions = CounterMetricFamily(
        PREFIX + "controller_decisions", "The controller's decisions, by what came of them", labels=("result", "reason")
    )
    for decision_key, count in controller.decision_counts.items():
        decisions.add_metric(decision_key, count)
    yield from (moves, decisions)
