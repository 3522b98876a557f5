"""Describes how busy each stage of a pipeline is: its rounds, its bubbles, as metrics and in `GET /laps/stages`.

A stage is busy while it computes a batch. The instance has work from the launch of a batch on the first stage until its
result has come back there; what a stage does not compute meanwhile is its bubble. The first stage measures how long the
instance has had work, and passes that on with its rounds: no clocks of two stages are compared.

The stages are processes of their own, and only the first one answers questions of the HTTP server. So each writes its
latest rounds to a file next to those of its metrics, at most twice a second.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sglang_ext.laps.sglang.rank_agreement import RankAgreement

KEPT_ROUNDS = 256
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # of SGLang, with --enable-metrics: one folder for each instance
_FILE_NAME = "sglang_ext_stage_{}.json"
_PUBLISH_INTERVAL_S = 0.5
_MICROSECONDS = 1_000_000


class BatchSize(NamedTuple):
    """Describes what a stage computes in one round."""

    requests: int
    new_tokens: int
    prefix_tokens: int


class StageRound(NamedTuple):
    """A batch on one stage, from the beginning to the end of its computation; seconds of one clock."""

    start_s: float
    end_s: float
    size: BatchSize


class StageTimes:
    """Busy and idle time of one stage. Seconds of the process's clock."""

    def __init__(self, kept_rounds: int = KEPT_ROUNDS) -> None:
        self.under_way = 0  # batches that this stage has launched and whose results it has not seen
        self.busy_s = 0.0
        self.bubble_s = 0.0  # idle while the instance had work
        self.rounds: deque[StageRound] = deque(maxlen=kept_rounds)
        self.computed = 0  # rounds so far; the same batch has the same number on every stage
        self._work_s = 0.0  # of what has ended
        self._work_began_s = 0.0

    def record_launch(self, now_s: float) -> None:
        """A batch begins."""
        if not self.under_way:
            self._work_began_s = now_s
        self.under_way += 1

    def record_computed(self, computed: StageRound) -> None:
        """This stage has computed a batch."""
        self.busy_s += computed.end_s - computed.start_s
        self.computed += 1
        self.rounds.append(computed)

    def record_result(self, now_s: float) -> None:
        """The oldest batch under way has passed all stages."""
        self.under_way -= 1
        if not self.under_way:
            self._work_s += now_s - self._work_began_s

    def work_s(self, now_s: float) -> float:
        """Return how long batches have been under way so far, as this stage sees it."""
        return self._work_s + (now_s - self._work_began_s if self.under_way else 0.0)

    def record_work(self, work_s: float) -> None:
        """The instance has had work for this long, as the first stage saw it when this round began there.

        This stage may have computed since, so the bubble lags behind while batches are under way; it never shrinks.
        """
        self.bubble_s = max(self.bubble_s, work_s - self.busy_s)


class ComputeTimer(Protocol):
    """Describes when a stage's device computes."""

    def begin(self) -> None:
        """Begin a batch: kernels that are launched from now on belong to it."""
        ...

    def end(self, size: BatchSize) -> None:
        """The batch has been launched."""
        ...

    def ended(self) -> Iterator[StageRound]:
        """The batches that have been computed since the last call, in order."""
        ...


class HostTimer:
    """A CPU engine: a launch returns when the batch has been computed."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._began_s = 0.0
        self._ended: list[StageRound] = []

    def begin(self) -> None:
        self._began_s = self._now_s()

    def end(self, size: BatchSize) -> None:
        self._ended.append(StageRound(self._began_s, self._now_s(), size))

    def ended(self) -> Iterator[StageRound]:
        ended, self._ended = self._ended, []
        yield from ended


class EventTimer:
    """A GPU: events in the stream of the launch, read when they have passed. `new_event` makes a timed event."""

    def __init__(self, now_s: Callable[[], float], new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._reference = new_event()  # passed at `_reference_s`
        self._reference.record()
        self._reference.synchronize()
        self._reference_s = now_s()
        self._start = self._reference
        self._launched: deque[tuple[Any, Any, BatchSize]] = deque()

    def begin(self) -> None:
        self._start = self._new_event()
        self._start.record()

    def end(self, size: BatchSize) -> None:
        end = self._new_event()
        end.record()
        self._launched.append((self._start, end, size))

    def ended(self) -> Iterator[StageRound]:
        while self._launched and self._launched[0][1].query():
            start, end, size = self._launched.popleft()
            start_s = self._reference_s + self._reference.elapsed_time(start) / 1e3
            # Times of events are single floats in milliseconds: measured from the last one they stay exact.
            self._reference, self._reference_s = end, start_s + start.elapsed_time(end) / 1e3
            yield StageRound(start_s, self._reference_s, size)


class StageOutlet(Protocol):
    """Describes where a stage's times go."""

    def publish(self, times: StageTimes) -> None: ...


class StageMonitor:
    """Follows one rank of one stage; every rank of every stage has one, since what is passed on goes from rank to rank.

    Whether a round passes something on depends only on launches and results, which come in the same rounds on every
    stage.
    """

    def __init__(
        self,
        agreement: RankAgreement,
        timer: ComputeTimer,
        outlets: Sequence[StageOutlet],
        now_s: Callable[[], float],
    ) -> None:
        self.times = StageTimes()
        self._agreement, self._timer, self._outlets, self._now_s = agreement, timer, outlets, now_s
        self._has_news = False  # something is under way, or was when a round began last
        self._is_changed = False
        self._published_s = float("-inf")

    def begin_round(self) -> None:
        """Once in each round of every stage, before anything else is agreed on in it."""
        now_s, times = self._now_s(), self.times
        for computed in self._timer.ended():
            times.record_computed(computed)
        if self._has_news:
            work_us = self._agreement.agree_number(round(times.work_s(now_s) * _MICROSECONDS))
            times.record_work(work_us / _MICROSECONDS)
            self._is_changed = True
            self._has_news = times.under_way > 0
        if self._is_changed and now_s - self._published_s >= _PUBLISH_INTERVAL_S:
            for outlet in self._outlets:
                outlet.publish(times)
            self._published_s, self._is_changed = now_s, False

    def record_launch(self) -> None:
        self._has_news = True
        self.times.record_launch(self._now_s())
        self._timer.begin()

    def record_launched(self, new_tokens: Sequence[int], prefix_tokens: Sequence[int]) -> None:
        self._timer.end(BatchSize(len(new_tokens), sum(new_tokens), sum(prefix_tokens)))

    def record_result(self) -> None:
        self.times.record_result(self._now_s())


class StageMetrics:
    """Counters of one stage, next to SGLang's own metrics; made once in a process."""

    def __init__(self, stage: int) -> None:
        from prometheus_client import Counter, Gauge

        label = str(stage)
        self._busy = Counter(
            "sglang_ext:stage_busy_seconds", "Time in which a pipeline stage computed", ["pp_rank"]
        ).labels(label)
        self._bubble = Counter(
            "sglang_ext:stage_bubble_seconds", "Time in which it did not, while a batch was under way", ["pp_rank"]
        ).labels(label)
        self._under_way = Gauge(
            "sglang_ext:stage_rounds_under_way",
            "Batches that it has launched and whose results it has not seen",
            ["pp_rank"],
            multiprocess_mode="mostrecent",
        ).labels(label)
        self._counted_busy_s = self._counted_bubble_s = 0.0

    def publish(self, times: StageTimes) -> None:
        self._busy.inc(times.busy_s - self._counted_busy_s)
        self._bubble.inc(times.bubble_s - self._counted_bubble_s)
        self._counted_busy_s, self._counted_bubble_s = times.busy_s, times.bubble_s
        self._under_way.set(times.under_way)


class StageFile:
    """A stage's latest rounds in a file, for the process that serves HTTP on the same machine."""

    def __init__(self, folder: Path, stage: int, now_s: Callable[[], float]) -> None:
        self._path, self._stage = folder / _FILE_NAME.format(stage), stage
        self._to_unix_s = time.time() - now_s()

    def publish(self, times: StageTimes) -> None:
        part = self._path.with_suffix(".part")
        try:
            part.write_text(json.dumps(stage_status(self._stage, times, self._to_unix_s)), encoding="ascii")
            part.replace(self._path)
        except OSError:
            pass  # a full disk, or the engine's folder is gone: it ends


def stage_status(stage: int, times: StageTimes, to_unix_s: float) -> dict[str, Any]:
    """One entry of `GET /laps/stages`; `to_unix_s` is added to every time."""
    return {
        "pp_rank": stage,
        "busy_s": times.busy_s,
        "bubble_s": times.bubble_s,
        "rounds_under_way": times.under_way,
        "rounds": [
            {
                "number": number,
                "start_s": round(computed.start_s + to_unix_s, 6),
                "end_s": round(computed.end_s + to_unix_s, 6),
                **computed.size._asdict(),
            }
            for number, computed in enumerate(times.rounds, times.computed - len(times.rounds))
        ],
    }


def read_stages(folder: str | None) -> list[dict[str, Any]]:
    """Return what the stages of an instance have written to its folder, the first stage first; none without a
    pipeline."""
    if folder is None:
        return []
    found = [json.loads(path.read_text(encoding="ascii")) for path in Path(folder).glob(_FILE_NAME.format("*"))]
    return sorted(found, key=lambda computed: int(computed["pp_rank"]))


def build_monitor(scheduler: Any, agreement: RankAgreement, now_s: Callable[[], float]) -> StageMonitor | None:
    """Return the monitor of a scheduler that has been set up; None with a single stage."""
    pipeline = scheduler.pp_group
    if pipeline.world_size == 1:
        return None
    timer: ComputeTimer = HostTimer(now_s)
    if str(scheduler.tp_worker.model_runner.device).startswith("cuda"):
        import torch

        timer = EventTimer(now_s, lambda: torch.cuda.Event(enable_timing=True))
    outlets: list[StageOutlet] = []
    if scheduler.tp_group.rank_in_group == 0 and scheduler.server_args.enable_metrics:
        stage = int(pipeline.rank_in_group)
        outlets.append(StageMetrics(stage))
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is not None:
            outlets.append(StageFile(Path(folder), stage, now_s))
    return StageMonitor(agreement, timer, outlets, now_s)
