"""Ordered steps that not everybody has answered for."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.policy.cdsp.coordination import Collect, RunChunk
from sglang_ext.sequence_parallel.pool_records import StepRecord


@dataclass(slots=True)
class OpenStep:
    """One of them."""

    order: RunChunk | Collect
    record: StepRecord
    waiting: set[int]  # members that have not answered
    failed_s: float | None = None  # when the first one has failed


class OpenSteps:
    """All of them, by sequence."""

    def __init__(self) -> None:
        self._steps: dict[int, OpenStep] = {}

    def begin(self, order: RunChunk | Collect, record: StepRecord) -> None:
        """A step has been ordered."""
        self._steps[order.sequence] = OpenStep(order, record, set(record.members))

    def answer(self, sequence: int, instance: int, now_s: float, *, is_done: bool) -> OpenStep | None:
        """The step that a member has answered for, with `record.ended_s` where it was the last one to.

        None for an answer that is late, comes twice or from a member that was not asked.
        """
        step = self._steps.get(sequence)
        if step is None or instance not in step.waiting:
            return None
        step.waiting.discard(instance)
        if not is_done:
            self._fail(step, now_s)
        self._close(sequence, step, now_s)
        return step

    def lose(self, instance: int, now_s: float) -> list[OpenStep]:
        """A member has gone: the steps that it was in have failed, also where it had answered."""
        concerned = [(sequence, step) for sequence, step in self._steps.items() if instance in step.record.members]
        for sequence, step in concerned:
            step.waiting.discard(instance)
            self._fail(step, now_s)
            self._close(sequence, step, now_s)
        return [step for _, step in concerned]

    def stuck(self, failed_before_s: float) -> list[int]:
        """Members that have not answered for steps in which another one failed before this time."""
        late = (step for step in self._steps.values() if step.failed_s is not None and step.failed_s < failed_before_s)
        return [instance for step in late for instance in sorted(step.waiting)]

    def _fail(self, step: OpenStep, now_s: float) -> None:
        step.record.has_failed = True
        step.failed_s = now_s if step.failed_s is None else step.failed_s

    def _close(self, sequence: int, step: OpenStep, now_s: float) -> None:
        if not step.waiting:
            step.record.ended_s = now_s
            del self._steps[sequence]
