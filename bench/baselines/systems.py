"""The sequence-parallel systems by name: the pool that serves, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from baselines.clusters import CdspPolicy, ClusterPolicy, FixedSp, IdleCluster, PlannedCluster, greedy_esp
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener
from sglang_ext.planner.simulation.long_pool import (
    LongPool,
    LongPoolOptions,
    OrderFactory,
    new_on_time_order,
    usable_candidates,
)


class ClusterSystem(StrEnum):
    """A cluster and who decides over it."""

    FIXED_SP = "fixed-sp"  # independent groups of one size
    LOONGSERVE = "loongserve"  # greedy ESP, planned behind the queues of instances
    LOONGSERVE_IDLE = "loongserve-idle"  # greedy ESP, on instances that are idle
    TETRIS_SINGLE = "tetris-single"  # improvement rate, one chunk per prompt
    TETRIS = "tetris"  # CDSP
    POOL = "pool"  # the coordinator that serves

    @property
    def uses_improvement_rate(self) -> bool:
        return self in (self.TETRIS_SINGLE, self.TETRIS)

    @property
    def can_fail(self) -> bool:
        """Return whether failures of instances are simulated for it."""
        return self is not self.LOONGSERVE_IDLE


@dataclass(frozen=True, slots=True)
class SystemOptions:
    """Settings of a system besides the costs."""

    system: ClusterSystem
    improvement_rate: float = 0.5  # of the paper's systems
    sp_size: int = 8  # of FIXED_SP
    min_chunk_tokens: int = 512
    slo_s: float = 1.0  # TTFT objective by which POOL orders, or
    slo_stretch: float = 5.0  # this many times the time on an idle pool
    chunk_s: float | None = None  # of POOL: longest time of a chunk, after which all is decided again
    cross_node_factor: float = 1.1  # of POOL: what a group over more nodes than it needs takes; inf: there is none
    noise: float = 0.0  # of POOL: standard deviation of a chunk's time over the predicted one
    order: OrderFactory = new_on_time_order  # of POOL: whose turn it is
    is_announced: bool = True  # of POOL; False: a prompt has an instance when it arrives, round robin, which offers it


def build_cluster(
    options: SystemOptions,
    loop: EventLoop,
    spec: ClusterSpec,
    candidates: Sequence[SpCandidate],
    listener: PrefillListener,
    *,
    is_recorded: bool = False,
) -> PlannedCluster | IdleCluster | LongPool:
    """Return the prefill stage of a system. SP sizes beyond the cluster are left out; ValueError if none is left."""
    usable = usable_candidates(candidates, spec.instances)
    if options.system is ClusterSystem.LOONGSERVE_IDLE:
        return IdleCluster(loop, spec, usable, listener, is_recorded)
    if options.system is not ClusterSystem.POOL:
        return PlannedCluster(loop, spec, _policy(options, usable), listener, is_recorded)
    pool = LongPoolOptions(
        options.slo_s,
        options.slo_stretch,
        options.min_chunk_tokens,
        options.chunk_s,
        options.cross_node_factor,
        options.noise,
        is_announced=options.is_announced,
        order=options.order,
    )
    return LongPool(loop, spec, usable, pool, listener, is_recorded)


def _policy(options: SystemOptions, candidates: Sequence[SpCandidate]) -> ClusterPolicy:
    match options.system:
        case ClusterSystem.FIXED_SP:
            return FixedSp(candidates, options.sp_size)
        case ClusterSystem.LOONGSERVE:
            return greedy_esp(candidates)
        case _:
            return CdspPolicy(
                candidates,
                options.improvement_rate,
                is_chunking=options.system is not ClusterSystem.TETRIS_SINGLE,
                min_chunk_tokens=options.min_chunk_tokens,
            )
