"""What one prefill instance needs for LAPS, put together from its scheduler.

The policy decides, the clock measures, the agreement carries decisions to the other ranks, the metrics tell.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from sglang_ext.policy.laps.cost_model import CostCoefficients, IterationSample
from sglang_ext.policy.laps.graph_grid import GraphGrid
from sglang_ext.policy.laps.policy import Laps
from sglang_ext.policy.laps.round_plan import (
    InstanceLimits,
    LapsMode,
    LongChunk,
    RoundPlan,
    RoundSnapshot,
    ShortBatch,
)
from sglang_ext.sglang_plugin.device import Device
from sglang_ext.sglang_plugin.graphs.runner import GridPrefillRunner
from sglang_ext.sglang_plugin.laps.iteration_clock import IterationClock
from sglang_ext.sglang_plugin.laps.metrics import LapsMetrics, NoMetrics, PrometheusMetrics
from sglang_ext.sglang_plugin.laps.rank_agreement import (
    MAX_BATCH_REQUESTS,
    BroadcastAgreement,
    RankAgreement,
    SingleRank,
)
from sglang_ext.sglang_plugin.options import options_from_environment
from sglang_ext.types import LengthClass

logger = logging.getLogger(__name__)

# Before the first sample; the warm-up request that SGLang runs at start replaces most of it.
_PRIOR = {
    Device.CPU: CostCoefficients.from_throughput(tokens_per_s=400.0, fixed_s=0.02),
    Device.CUDA: CostCoefficients.from_throughput(tokens_per_s=20_000.0, fixed_s=0.01),
}


class LapsInstance:
    """The policy of one scheduler process and what surrounds it. Only the deciding rank's policy is asked."""

    def __init__(self, policy: Laps, agreement: RankAgreement, metrics: LapsMetrics) -> None:
        self.policy = policy
        self.agreement = agreement
        self.clock = IterationClock()
        self.generation = 0  # counts mode switches, so that one that did nothing can be told from one that did
        self.current_key: int | None = None  # the long prefill whose chunk ran last
        self.has_tree_grown = False
        self.parks = 0  # times that an unfinished long prefill made room for something else
        self._is_yielding = False  # the long prefill in hand has been parked already
        self._metrics = metrics
        self.now_s = time.perf_counter

    def classify(self, new_tokens: int, cached_tokens: int) -> LengthClass:
        return self.policy.classify(new_tokens, cached_tokens)

    def deadline_s(
        self,
        length_class: LengthClass,
        new_tokens: int,
        cached_tokens: int,
        arrival_s: float,
        ttft_slo_s: float | None,
    ) -> float:
        return self.policy.deadline_s(length_class, new_tokens, cached_tokens, arrival_s, ttft_slo_s)

    def choose(self, snapshot: RoundSnapshot) -> RoundPlan:
        return self.policy.choose(snapshot)

    def note_arrival(self, now_s: float, length_class: LengthClass, new_tokens: int, cached_tokens: int) -> None:
        self.policy.note_arrival(now_s, length_class, new_tokens, cached_tokens)

    def note_dispatch(self, snapshot: RoundSnapshot, action: ShortBatch | LongChunk) -> None:
        """SGLang has built the batch of `action`."""
        self.policy.note_dispatch(snapshot, action)
        chosen = action.key if isinstance(action, LongChunk) else None
        in_hand = next((item for item in snapshot.queue if item.is_current and item.is_started), None)
        if in_hand is not None and in_hand.key != chosen and not self._is_yielding:
            self.parks += 1
            self._metrics.note_park()
        self._is_yielding = in_hand is not None and in_hand.key != chosen and chosen is None
        if chosen is not None:
            self.current_key = chosen
        self._metrics.note_dispatch(snapshot, action)

    def note_iteration(self, sample: IterationSample) -> None:
        self.policy.note_iteration(sample)

    def note_first_token(self, now_s: float, length_class: LengthClass, arrival_s: float, deadline_s: float) -> None:
        self.policy.note_first_token(now_s, length_class, arrival_s, deadline_s)

    def switch_mode(self, mode: LapsMode) -> None:
        """Takes effect with the next round; whatever is queued stays queued."""
        previous = self.policy.mode
        self.policy.switch_mode(mode)
        self.generation += 1
        self._metrics.note_mode_switch(mode)
        if self.agreement.is_deciding:
            logger.info("laps mode %s -> %s, generation %d", previous, mode, self.generation)

    def publish(self, now_s: float, snapshot: Callable[[], RoundSnapshot]) -> None:
        """Bring the gauges up to date, at most once a second."""
        if self.agreement.is_deciding and self._metrics.is_due(now_s):
            self._metrics.publish(now_s, self.policy.report(snapshot()))


def build_instance(scheduler: Any) -> LapsInstance | None:
    """LAPS for an SGLang scheduler that has been set up; None where the options leave it out."""
    options = options_from_environment(os.environ)
    if options is None or options.laps is None:
        return None
    policy = Laps(
        options.laps,
        _captured_grid(scheduler),
        _PRIOR[options.device],
        InstanceLimits(
            page_tokens=scheduler.page_size,
            max_chunk_tokens=scheduler.chunked_prefill_size,
            max_batch_tokens=min(scheduler.chunked_prefill_size, scheduler.max_prefill_tokens),
            max_requests=min(scheduler.max_running_requests, MAX_BATCH_REQUESTS),
        ),
    )
    agreement = _agreement(scheduler)
    counts = agreement.is_deciding and scheduler.server_args.enable_metrics
    return LapsInstance(policy, agreement, PrometheusMetrics.shared() if counts else NoMetrics())


def _captured_grid(scheduler: Any) -> GraphGrid:
    """The shapes of prefill that are captured; empty without `--laps-graphs`."""
    runner = getattr(scheduler.tp_worker.model_runner, "prefill_cuda_graph_runner", None)
    return runner.grid if isinstance(runner, GridPrefillRunner) else GraphGrid(())


def _agreement(scheduler: Any) -> RankAgreement:
    group = scheduler.tp_group
    if group.world_size == 1:
        return SingleRank()
    return BroadcastAgreement(group.cpu_group, group.rank_in_group, group.ranks[0])
