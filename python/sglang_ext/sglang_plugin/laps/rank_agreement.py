"""One rank decides, every rank carries the same decision out.

The policy, its clock and its measurements exist on the first tensor-parallel rank alone. A decision travels to
the others as one tensor of fixed length, so that a round costs one broadcast and the ranks need not agree
on a size first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from sglang_ext.policy.laps.round_plan import Cut, PrefillBatch, RoundPlan

PLAN_NUMBERS = 1024
_STEP_HEAD = 3  # numbers of a step before its keys
_STEPS = 3
# Most requests of a batch whose plan travels: two of that size, and one long prefill alone (see `encode`).
MAX_BATCH_REQUESTS = (PLAN_NUMBERS - 1 - _STEPS * _STEP_HEAD - 1) // 2


class Step(NamedTuple):
    """What a rank needs to know of a batch: which requests run whole, and so many tokens of which one does not."""

    whole: tuple[int, ...]
    cut: Cut | None


class PlanTooLongError(ValueError):
    """A plan names more requests than the agreement carries."""


class RankAgreement(Protocol):
    """How a rank learns the steps of a round."""

    @property
    def is_deciding(self) -> bool: ...

    def agree(self, decide: Callable[[], RoundPlan]) -> tuple[RoundPlan | None, tuple[Step, ...]]:
        """The plan (on the deciding rank alone) and its steps, the same on every rank."""
        ...


class SingleRankAgreement:
    """No tensor parallelism: nothing travels."""

    is_deciding = True

    def agree(self, decide: Callable[[], RoundPlan]) -> tuple[RoundPlan | None, tuple[Step, ...]]:
        plan = decide()
        return plan, steps_of(plan)


class BroadcastAgreement:
    """Rank 0 of a CPU process group decides; `agree` is a collective operation of that group."""

    def __init__(self, group: torch.distributed.ProcessGroup, rank: int, deciding_global_rank: int) -> None:
        self._group = group
        self._source = deciding_global_rank
        self.is_deciding = rank == 0

    def agree(self, decide: Callable[[], RoundPlan]) -> tuple[RoundPlan | None, tuple[Step, ...]]:
        plan = decide() if self.is_deciding else None
        numbers = torch.zeros(PLAN_NUMBERS, dtype=torch.int64)
        if plan is not None:
            encoded = encode(steps_of(plan))
            numbers[: len(encoded)] = torch.tensor(encoded, dtype=torch.int64)
        torch.distributed.broadcast(numbers, src=self._source, group=self._group)
        return plan, decode(numbers.tolist())


def steps_of(plan: RoundPlan) -> tuple[Step, ...]:
    """The steps of a plan, in its order of preference."""
    return tuple([_step(batch) for batch in plan.batches])


def encode(steps: tuple[Step, ...]) -> list[int]:
    """At most PLAN_NUMBERS numbers: the number of steps, then key and tokens of the cut request (0 and 0: none), the
    number of whole ones and their keys, of each.

    Raises PlanTooLongError.
    """
    numbers = [len(steps)]
    for step in steps:
        key, tokens = (0, 0) if step.cut is None else step.cut
        numbers += [key, tokens, len(step.whole), *step.whole]
    if len(numbers) > PLAN_NUMBERS:
        raise PlanTooLongError(f"a plan of {len(numbers)} numbers; {PLAN_NUMBERS} travel")
    return numbers


def decode(numbers: list[int]) -> tuple[Step, ...]:
    """The inverse of `encode`; trailing numbers are ignored."""
    steps = []
    position = 1
    for _ in range(numbers[0]):
        key, tokens, count = numbers[position : position + _STEP_HEAD]
        position += _STEP_HEAD
        steps.append(Step(tuple(numbers[position : position + count]), Cut(key, tokens) if tokens else None))
        position += count
    return tuple(steps)


def _step(batch: PrefillBatch) -> Step:
    return Step(batch.whole, batch.cut)
