"""Describes what one prefill instance needs for LAPS, put together from its scheduler.

The policy decides, the clock measures, the agreement carries decisions to the other ranks, the metrics report.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sglang_ext.engine.device import Device
from sglang_ext.engine.options import options_from_environment
from sglang_ext.graphs.sglang.runner import planned_grid
from sglang_ext.laps.decide.cost_model import CostCoefficients, IterationSample
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import (
    InstanceLimits,
    LapsMode,
    PrefillBatch,
    RoundSnapshot,
)
from sglang_ext.laps.sglang.metrics import LapsMetrics, NoMetrics, PrometheusMetrics
from sglang_ext.laps.sglang.queued_request import LapsEntry, as_queued_prefill
from sglang_ext.laps.sglang.rank_agreement import (
    MAX_BATCH_REQUESTS,
    BroadcastAgreement,
    PipelineAgreement,
    RankAgreement,
    SingleRankAgreement,
    StageLink,
)
from sglang_ext.laps.sglang.stage_times import StageMonitor, build_monitor
from sglang_ext.live.decide.instance_work import WorkLog
from sglang_ext.types import LengthClass

logger = logging.getLogger(__name__)

# Before the first sample; the warm-up request that SGLang runs at start replaces most of it.
_PRIOR = {
    Device.CPU: CostCoefficients.from_throughput(tokens_per_s=400.0, fixed_s=0.02),
    Device.CUDA: CostCoefficients.from_throughput(tokens_per_s=20_000.0, fixed_s=0.01),
}


NOW_S = time.perf_counter
# SGLang's method that says how many tokens a started prefill gets at most: from 0.5.23 on.
_COPIED_BYTES = 64 << 20  # more than a cache holds
_COPIES = 6


@dataclass
class DecisionTimes:
    """Describes what deciding took before batches that were launched; the device may idle meanwhile."""

    batches: int = 0
    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        self.batches += 1
        self.seconds += seconds


class LapsInstance:
    """The policy of one scheduler process and what surrounds it. Only the deciding rank's policy is asked."""

    def __init__(
        self,
        policy: Laps,
        agreement: RankAgreement,
        metrics: LapsMetrics,
        stages: int = 1,
        stage: StageMonitor | None = None,
    ) -> None:
        self.policy = policy
        self.agreement = agreement
        self.stages = stages  # of a pipeline
        self.stage = stage  # this one; None where there is no other
        self.clock = IterationClock(stages)
        self.work = WorkLog()
        self.decisions = DecisionTimes()
        self.generation = 0  # counts mode switches, so that a switch that did nothing can be distinguished
        self.current_key: int | None = None  # the long prefill whose chunk ran last
        self.has_tree_grown = False
        self.parks = 0  # times that an unfinished long prefill made room for something else
        self._is_yielding = False  # the long prefill in hand has been parked already
        self._metrics = metrics
        self.now_s = NOW_S

    def record_dispatch(self, now_s: float, batch: PrefillBatch) -> None:
        """SGLang has built this batch of the plan."""
        queue = self.policy.queue
        members = [queue.get(key).request for key in batch.keys]
        in_hand = next((ranked.request for ranked in queue.started.values() if ranked.request.is_current), None)
        self.policy.record_dispatch(now_s, batch)
        is_yielding = in_hand is not None and in_hand.key not in batch.keys
        if is_yielding and not self._is_yielding:
            self.parks += 1
            self._metrics.record_park()
        self._is_yielding = is_yielding and batch.is_short
        if batch.cut is not None:
            self.current_key = batch.cut.key
        self._metrics.record_dispatch(now_s, batch, members)

    def put(self, request: Any, entry: LapsEntry, now_s: float) -> None:
        """A request waits, or has changed."""
        if self.agreement.is_deciding:
            is_current = entry.key == self.current_key
            self.policy.put(as_queued_prefill(request, entry, is_current=is_current), now_s)

    def switch_mode(self, mode: LapsMode) -> None:
        """Takes effect with the next round; everything queued stays queued."""
        previous = self.policy.mode
        self.policy.switch_mode(mode)
        self.generation += 1
        self._metrics.record_mode_switch(mode)
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
    max_tokens = options.laps.max_chunk_tokens
    if max_tokens is None:
        max_tokens = scheduler.chunked_prefill_size
    max_tokens = max(scheduler.page_size, min(max_tokens, scheduler.max_prefill_tokens))
    stages = _stages(scheduler)
    policy = Laps(
        with_write_cost(options.laps, scheduler),
        planned_grid(scheduler.tp_worker.model_runner),
        _PRIOR[options.device],
        InstanceLimits(
            page_tokens=scheduler.page_size,
            max_chunk_tokens=max_tokens,
            max_batch_tokens=max_tokens,
            max_requests=min(_max_requests(scheduler, stages), MAX_BATCH_REQUESTS),
            stages=stages,
        ),
    )
    agreement = _agreement(scheduler)
    counts = agreement.is_deciding and scheduler.server_args.enable_metrics
    metrics = PrometheusMetrics.shared() if counts else NoMetrics()
    return LapsInstance(policy, agreement, metrics, stages, build_monitor(scheduler, agreement, NOW_S))


def with_write_cost(options: LapsOptions, scheduler: Any) -> LapsOptions:
    """Return the options with the measured cost of writing a token's KV, where it is wanted and was not given."""
    if options.boundary_tokens is not None or options.write_s is not None:
        return options
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    _, _, page_bytes = pool.get_contiguous_buf_infos()  # as a KV transfer sees it: of each buffer
    token_bytes = max(1, sum(page_bytes) // scheduler.page_size)
    gb_per_s = copy_gb_per_s(scheduler.tp_worker.model_runner.device)
    if gb_per_s is None:
        return options
    logger.info("laps: %d bytes of KV per token, copied at %.1f GB/s", token_bytes, gb_per_s)
    return replace(options, kv_bytes_per_token=token_bytes, kv_bandwidth_gb_per_s=gb_per_s)


def copy_gb_per_s(device: str) -> float | None:
    """Return how fast memory is copied on a device, in 10^9 bytes per second; None where there is no room to try.

    The best of some runs: others may use the machine meanwhile.
    """
    import torch

    try:
        source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
    except RuntimeError:  # out of memory
        return None

    def copy_s() -> float:
        began_s = time.perf_counter()
        target.copy_(source)
        if target.is_cuda:
            torch.cuda.synchronize(target.device)
        return time.perf_counter() - began_s

    return _COPIED_BYTES / min(copy_s() for _ in range(_COPIES)) / 1e9


def _stages(scheduler: Any) -> int:
    return int(scheduler.pp_group.world_size)


def _max_requests(scheduler: Any, stages: int) -> int:
    """Return the largest number of requests in a batch; SGLang divides it among the batches in a pipeline."""
    if stages == 1:
        return int(scheduler.max_running_requests)
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_max_micro_batch_size)


def data_parallel_rank() -> int:
    """Return the number of this scheduler's data-parallel rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank = parallel.attn_dp_rank if parallel.attn_dp_size > 1 else parallel.dp_rank
    return int(rank or 0)


def _agreement(scheduler: Any) -> RankAgreement:
    group = scheduler.attn_tp_group  # with DP attention each data-parallel rank has requests of its own
    own: RankAgreement = SingleRankAgreement()
    if group.world_size > 1:
        own = BroadcastAgreement(group.cpu_group, group.rank_in_group, group.ranks[0])
    pipeline = scheduler.pp_group
    if pipeline.world_size == 1:
        return own
    stage = pipeline.rank_in_group
    return PipelineAgreement(own, StageLink(pipeline.cpu_group, pipeline.ranks, stage), stage)


BUSY_WINDOW_S = 10.0


class _Launched(NamedTuple):
    at_s: float
    length_class: LengthClass
    sample: IterationSample  # its duration is not known yet
    fills_pipeline: bool = False  # nothing was on its way: its result passes all stages, each taking its time
    is_between: bool = False  # behind another one, but not at once: what it took is not known


class IterationClock:
    """Pairs launches with results, in order, and remembers how busy the last ten seconds were.

    An iteration takes from the end of the one before to its own, intake and batch preparation included. After a round
    that launched nothing it begins with the round that does.

    Of a pipeline of several stages an iteration's time is that of one stage: results follow each other at that pace
    while batches do. Of the first batch in an empty pipeline it is the time of its passage, divided by the stages.
    """

    def __init__(self, stages: int = 1) -> None:
        self._stages = stages
        self._launched: deque[_Launched] = deque()
        self._busy: deque[tuple[float, float, LengthClass]] = deque()  # ends and durations within the window
        self._busy_s = dict.fromkeys(LengthClass, 0.0)
        self._started_s: float | None = None
        self._last_end_s = float("-inf")
        self.latest_s = (0.0, 0.0)  # beginning and end of the iteration that ended last
        self._was_idle = True
        self._round_s: float | None = None

    def record_round(self, now_s: float) -> None:
        """A decision about what runs next begins."""
        if self._was_idle:
            self._round_s = now_s

    def record_idle(self) -> None:
        """The instance is idle until its next round, but for what is launched already: this one has launched nothing,
        or has computed what is no batch."""
        self._was_idle = True

    def record_launch(
        self, now_s: float, length_class: LengthClass, new_tokens: Sequence[int], cached_tokens: Sequence[int]
    ) -> None:
        """A batch of one class was launched: `new_tokens` (L) and `cached_tokens` (H) of each of its requests."""
        work = float(sum(new * (new + 2 * cached) for new, cached in zip(new_tokens, cached_tokens, strict=True)))
        at_s, is_first = self._last_end_s, self._was_idle and not self._launched
        if self._was_idle:
            at_s = now_s if self._round_s is None else self._round_s
        sample = IterationSample(work, sum(new_tokens), sum(cached_tokens), len(new_tokens), 0.0, is_first=is_first)
        is_pipeline, is_under_way = self._stages > 1, bool(self._launched)
        self._launched.append(
            _Launched(
                at_s,
                length_class,
                sample,
                fills_pipeline=is_pipeline and not is_under_way,
                is_between=is_pipeline and is_under_way and self._was_idle,
            )
        )
        self._was_idle, self._round_s = False, None
        if self._started_s is None:
            self._started_s = at_s

    def record_replay(self, tokens: int) -> None:
        """The batch that was launched last runs on a captured graph that computes `tokens`, padding included."""
        last = self._launched.pop()
        self._launched.append(last._replace(sample=last.sample._replace(new_tokens=tokens, is_replayed=True)))

    def record_result(self, now_s: float) -> IterationSample | None:
        """The oldest launched batch ended: what it took, or None where that is not known (a pipeline's).

        Raises IndexError when none was launched.
        """
        launched = self._launched.popleft()
        start_s = max(launched.at_s, self._last_end_s)
        duration_s = now_s - start_s
        self._last_end_s = now_s
        self.latest_s = start_s, now_s
        self._busy.append((now_s, duration_s, launched.length_class))
        self._busy_s[launched.length_class] += duration_s
        self._forget(now_s)
        if launched.is_between:
            return None
        return launched.sample._replace(duration_s=duration_s / (self._stages if launched.fills_pipeline else 1))

    def utilisation(self, now_s: float, length_class: LengthClass | None = None) -> float:
        """Share of the last ten seconds spent in forward iterations, of one class or of both: 0 to 1."""
        self._forget(now_s)
        if self._started_s is None or now_s <= self._started_s:
            return 0.0
        busy_s = sum(self._busy_s.values()) if length_class is None else self._busy_s[length_class]
        if self._launched and length_class in {None, self._launched[0].length_class}:
            busy_s += max(0.0, now_s - max(self._launched[0].at_s, self._last_end_s))
        return max(0.0, min(1.0, busy_s / min(BUSY_WINDOW_S, now_s - self._started_s)))

    def _forget(self, now_s: float) -> None:
        while self._busy and self._busy[0][0] < now_s - BUSY_WINDOW_S:
            _, duration_s, length_class = self._busy.popleft()
            self._busy_s[length_class] -= duration_s
