"""Describes what one prefill instance runs next: SGLang's chunked prefill in three orders, or the LAPS policy object.

The orders and the chunk rule are those of SGLang 0.5.23, `schedule_policy.py`: at most one prompt is cut at a time, and
it goes on first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

from sglang_ext.laps.decide.cost_model import IterationSample
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import (
    PrefillBatch,
    PriorityClass,
    QueuedPrefill,
    RoundSnapshot,
)
from sglang_ext.planner.simulation.events import SimRequest
from sglang_ext.types import LengthClass


@dataclass(slots=True, eq=False)
class WorkItem:
    """A request on an instance that has tokens left to compute."""

    request: SimRequest
    new_tokens: int  # left
    cached_tokens: int  # H of its next chunk
    counter_tokens: int  # that the instance had computed when this one arrived
    start_s: float | None = None  # of its first chunk
    length_class: LengthClass = LengthClass.LONG
    deadline_s: float = float("inf")
    is_current: bool = False  # it is the prompt that was cut last


class Slice(NamedTuple):
    """Compute this many tokens of this request in the next iteration."""

    item: WorkItem
    tokens: int


class Iteration(NamedTuple):
    """Describes what runs next. Without slices, nothing before `wake_s` (infinity: before something arrives)."""

    slices: tuple[Slice, ...]
    wake_s: float
    # What is computed: sum of L (L + 2 H), sum of L, with the padding to a captured graph.
    padded_requests: int = 0
    padded_tokens: int = 0  # of each


class IterationPolicy(Protocol):
    """Decides for one instance. Only the `note_…` methods change something."""

    def record_arrival(self, item: WorkItem, now_s: float) -> None: ...

    def choose(self, items: Sequence[WorkItem], free_kv_tokens: int, computed_tokens: int, now_s: float) -> Iteration:
        """`computed_tokens` is how many the instance has computed so far."""
        ...

    def note_end(self, sample: IterationSample, ended: Sequence[WorkItem], now_s: float) -> None: ...


class QueueOrder(StrEnum):
    """The order in which waiting prompts join a batch (names as SGLang's --schedule-policy)."""

    FCFS = "fcfs"
    HRRN = "hrrn"
    SHORTEST_PREFILL_FIRST = "shortest-prefill-first"


class ChunkedPrefill:
    """Fills `chunk_tokens` per iteration; the last prompt that does not fit whole is cut."""

    def __init__(self, order: QueueOrder, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        self._order = order
        self._chunk_tokens = chunk_tokens

    def record_arrival(self, item: WorkItem, now_s: float) -> None:
        pass

    def choose(self, items: Sequence[WorkItem], free_kv_tokens: int, computed_tokens: int, now_s: float) -> Iteration:
        current = next((item for item in items if item.is_current), None)
        waiting = self._ordered([item for item in items if item is not current], computed_tokens)
        budget = self._chunk_tokens
        free_tokens = free_kv_tokens
        slices = []
        if current is not None:
            reserved = self._reserved_tokens(current, waiting)
            tokens = min(current.new_tokens, budget - reserved, free_tokens)
            if tokens > 0:
                slices.append(Slice(current, tokens))
            budget -= tokens
            free_tokens -= tokens
        is_cut = current is not None and bool(slices) and slices[0].tokens < current.new_tokens
        for item in waiting:
            if budget <= 0 or free_tokens <= 0:
                break
            tokens = min(item.new_tokens, budget, free_tokens)
            if tokens < item.new_tokens and is_cut:
                break
            slices.append(Slice(item, tokens))
            budget -= tokens
            free_tokens -= tokens
            is_cut = is_cut or tokens < item.new_tokens
        return Iteration(tuple(slices), float("inf"))

    def note_end(self, sample: IterationSample, ended: Sequence[WorkItem], now_s: float) -> None:
        pass

    def _ordered(self, items: list[WorkItem], computed_tokens: int) -> list[WorkItem]:
        match self._order:
            case QueueOrder.FCFS:
                return items
            case QueueOrder.HRRN:
                return sorted(items, key=lambda item: -(computed_tokens - item.counter_tokens) / item.new_tokens)
            case QueueOrder.SHORTEST_PREFILL_FIRST:
                return sorted(items, key=lambda item: (item.new_tokens, item.request.arrival_s))

    def _reserved_tokens(self, current: WorkItem, waiting: Sequence[WorkItem]) -> int:
        """Return what a cut prompt leaves of the budget to shorter ones (`shortest_prefill_chunk_limit`)."""
        reserved = 0
        if self._order is QueueOrder.SHORTEST_PREFILL_FIRST and self._chunk_tokens >= 2:
            for item in waiting:
                if item.new_tokens >= current.new_tokens or reserved + item.new_tokens > self._chunk_tokens - 1:
                    break
                reserved += item.new_tokens
        return reserved


class LapsPolicy:
    """The engine's own policy object, on the simulator's queue."""

    def __init__(self, laps: Laps, ttft_slo_s: float | None = None) -> None:
        self.laps = laps
        self._ttft_slo_s = ttft_slo_s  # objective of every request; None: the policy's own, by class

    def record_arrival(self, item: WorkItem, now_s: float) -> None:
        laps = self.laps
        item.length_class = laps.classify(item.new_tokens, item.cached_tokens)
        item.deadline_s = laps.deadline_s(
            item.length_class, item.new_tokens, item.cached_tokens, item.request.arrival_s, self._ttft_slo_s
        )
        laps.record_arrival(now_s, item.length_class, item.new_tokens, item.cached_tokens, item.deadline_s)
        laps.put(_queued(item), now_s)

    def choose(self, items: Sequence[WorkItem], free_kv_tokens: int, computed_tokens: int, now_s: float) -> Iteration:
        return self.choose_within(items, free_kv_tokens, now_s, float("inf"))

    def choose_within(
        self, items: Sequence[WorkItem], free_kv_tokens: int, now_s: float, longest_s: float
    ) -> Iteration:
        """The same, but nothing that takes longer than `longest_s`."""
        by_key = {item.request.key: item for item in items}
        queue = self.laps.queue
        if len(queue) != len(by_key):  # the instance has failed meanwhile
            for key in [ranked.request.key for ranked in queue if ranked.request.key not in by_key]:
                self.laps.remove(key)
        plan = self.laps.choose(now_s, free_kv_tokens)
        for batch in plan.batches:
            if batch.new_tokens <= free_kv_tokens and batch.predicted_s <= longest_s:
                slices = [Slice(by_key[key], by_key[key].new_tokens) for key in batch.whole]
                if batch.cut is not None:
                    slices.append(Slice(by_key[batch.cut.key], batch.cut.tokens))
                self.laps.record_dispatch(now_s, batch)
                return _iteration(slices, batch, plan.wake_s)
        return Iteration((), float("inf") if plan.batches else plan.wake_s)

    def correct(self, item: WorkItem, computed_tokens: int, now_s: float) -> None:
        """Record that the iteration which begins now computes this much of a prompt, and not what was chosen."""
        if any(ranked.request.key == item.request.key for ranked in self.laps.queue):
            self.laps.remove(item.request.key)
        if computed_tokens < item.new_tokens:
            queued = _queued(item)
            left, done = queued.new_tokens - computed_tokens, queued.cached_tokens + computed_tokens
            self.laps.put(replace(queued, new_tokens=left, cached_tokens=done), now_s)

    def note_end(self, sample: IterationSample, ended: Sequence[WorkItem], now_s: float) -> None:
        self.laps.record_iteration(sample)
        for item in ended:
            self.laps.record_first_token(now_s, item.length_class, item.request.arrival_s, item.deadline_s)

    @staticmethod
    def snapshot(items: Sequence[WorkItem], free_kv_tokens: int, now_s: float) -> RoundSnapshot:
        """The queue as the policy wants it."""
        return RoundSnapshot(now_s, tuple([_queued(item) for item in items]), free_kv_tokens)


def _queued(item: WorkItem) -> QueuedPrefill:
    return QueuedPrefill(
        item.request.key,
        item.length_class,
        item.new_tokens,
        item.cached_tokens,
        item.request.new_tokens,
        item.request.arrival_s,
        item.deadline_s,
        PriorityClass.NORMAL,
        item.start_s is not None,
        item.is_current,
    )


def _iteration(slices: Sequence[Slice], batch: PrefillBatch, wake_s: float) -> Iteration:
    if batch.shape is None:
        return Iteration(tuple(slices), wake_s)
    return Iteration(tuple(slices), wake_s, batch.shape.requests, batch.shape.length_tokens)
