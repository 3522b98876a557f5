"""The sequence-parallel systems by name: what is simulated when a user asks for `--policy NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_ext.policy.cdsp.records import SpCandidate
from sglang_ext.policy.cdsp.replanning import ReplanMode
from sglang_ext.simulation.cluster import ClusterSpec, PlannedCluster
from sglang_ext.simulation.cluster_policies import CdspPolicy, ClusterPolicy, FixedSp, greedy_esp
from sglang_ext.simulation.event_loop import EventLoop
from sglang_ext.simulation.idle_cluster import IdleCluster
from sglang_ext.simulation.records import PrefillListener
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

    @property
    def uses_improvement_rate(self) -> bool:
        return self in (self.TETRIS_SINGLE, self.TETRIS, self.REPLAN_FCFS, self.REPLAN_LARS)

    @property
    def can_fail(self) -> bool:
        """Whether failures of instances are simulated for it."""
        return self is not self.LOONGSERVE_IDLE


@dataclass(frozen=True, slots=True)
class SystemOptions:
    """What a system is told besides the costs."""

    system: ClusterSystem
    improvement_rate: float = 0.5
    sp_size: int = 8  # of FIXED_SP
    min_chunk_tokens: int = 512
    slo_s: float = 1.0  # TTFT objective by which REPLAN_LARS orders, or
    slo_stretch: float = 5.0  # so many times the time on an idle cluster


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
    match options.system:
        case ClusterSystem.LOONGSERVE_IDLE:
            return IdleCluster(loop, spec, usable, listener, is_recorded)
        case ClusterSystem.REPLAN_FCFS | ClusterSystem.REPLAN_LARS:
            mode = ReplanMode.FCFS if options.system is ClusterSystem.REPLAN_FCFS else ReplanMode.LARS
            replan = ReplanOptions(
                mode, options.improvement_rate, options.slo_s, options.slo_stretch, options.min_chunk_tokens
            )
            return ReplanningCluster(loop, spec, usable, replan, listener, is_recorded)
        case _:
            return PlannedCluster(loop, spec, _policy(options, usable), listener, is_recorded)


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
