"""The sequence-parallel systems by name: what is simulated when a user asks for `--policy NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_ext.policy.cdsp.improvement_rate import (
    FixedImprovementRate,
    ImprovementRateSource,
    ImprovementRateTable,
    ProfiledImprovementRate,
)
from sglang_ext.policy.cdsp.replanning import ReplanMode
from sglang_ext.policy.cdsp.sp_cost import SpCandidate
from sglang_ext.simulation.cluster import (
    CdspPolicy,
    ClusterPolicy,
    ClusterSpec,
    FixedSp,
    IdleCluster,
    PlannedCluster,
    greedy_esp,
)
from sglang_ext.simulation.events import EventLoop, PrefillListener
from sglang_ext.simulation.replanning_cluster import ReplanningCluster, ReplanOptions


class ClusterSystem(StrEnum):
    """A cluster and who decides over it."""

    FIXED_SP = "fixed-sp"  # independent groups of one size
    LOONGSERVE = "loongserve"  # greedy ESP, planned behind the queues of instances
    LOONGSERVE_IDLE = "loongserve-idle"  # greedy ESP, on instances that are idle
    TETRIS_SINGLE = "tetris-single"  # improvement rate, one chunk per prompt
    TETRIS = "tetris"  # CDSP
    REPLAN_FCFS = "replan-fcfs"  # CDSP, planned again at every event in order of arrival
    REPLAN_LARS = "replan-lars"  # and in order of relative slack
    REPLAN_EDF = "replan-edf"  # of deadlines
    REPLAN_SRPT = "replan-srpt"  # of remaining time

    @property
    def uses_improvement_rate(self) -> bool:
        return self in (self.TETRIS_SINGLE, self.TETRIS) or self in _REPLAN_MODES

    @property
    def can_fail(self) -> bool:
        """Whether failures of instances are simulated for it."""
        return self is not self.LOONGSERVE_IDLE


_REPLAN_MODES = {
    ClusterSystem.REPLAN_FCFS: ReplanMode.FCFS,
    ClusterSystem.REPLAN_LARS: ReplanMode.LARS,
    ClusterSystem.REPLAN_EDF: ReplanMode.EDF,
    ClusterSystem.REPLAN_SRPT: ReplanMode.SRPT,
}


@dataclass(frozen=True, slots=True)
class SystemOptions:
    """What a system is told besides the costs."""

    system: ClusterSystem
    improvement_rate: float = 0.5  # at every load, unless
    improvement_rates: ImprovementRateTable | None = None  # says which at which
    sp_size: int = 8  # of FIXED_SP
    min_chunk_tokens: int = 512
    slo_s: float = 1.0  # TTFT objective by which REPLAN_LARS orders, or
    slo_stretch: float = 5.0  # so many times the time on an idle cluster
    chunk_s: float | None = None  # of REPLAN_…: longest time of a chunk before all is planned again


def build_cluster(
    options: SystemOptions,
    loop: EventLoop,
    spec: ClusterSpec,
    candidates: Sequence[SpCandidate],
    listener: PrefillListener,
    *,
    is_recorded: bool = False,
) -> PlannedCluster | IdleCluster | ReplanningCluster:
    """Return the prefill stage of a system. SP sizes beyond the cluster are left out; ValueError if none is left."""
    usable = [candidate for candidate in candidates if candidate.size <= spec.instances]
    if not usable:
        smallest = min(candidate.size for candidate in candidates)
        raise ValueError(f"the engine's smallest SP size is {smallest}, the cluster has {spec.instances} instances")
    if options.system is ClusterSystem.LOONGSERVE_IDLE:
        return IdleCluster(loop, spec, usable, listener, is_recorded)
    mode = _REPLAN_MODES.get(options.system)
    if mode is None:
        return PlannedCluster(loop, spec, _policy(options, usable), listener, is_recorded)
    replan = ReplanOptions(mode, options.slo_s, options.slo_stretch, options.min_chunk_tokens, chunk_s=options.chunk_s)
    return ReplanningCluster(loop, spec, usable, replan, _rates(options), listener, is_recorded)


def _policy(options: SystemOptions, candidates: Sequence[SpCandidate]) -> ClusterPolicy:
    match options.system:
        case ClusterSystem.FIXED_SP:
            return FixedSp(candidates, options.sp_size)
        case ClusterSystem.LOONGSERVE:
            return greedy_esp(candidates)
        case _:
            return CdspPolicy(
                candidates,
                _rates(options),
                is_chunking=options.system is not ClusterSystem.TETRIS_SINGLE,
                min_chunk_tokens=options.min_chunk_tokens,
            )


def _rates(options: SystemOptions) -> ImprovementRateSource:
    if options.improvement_rates is None:
        return FixedImprovementRate(options.improvement_rate)
    return ProfiledImprovementRate(options.improvement_rates)
