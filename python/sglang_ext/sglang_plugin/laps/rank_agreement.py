"""One rank decides, every rank carries the same decision out.

The policy, its clock and its measurements exist on the first tensor-parallel rank alone. A decision travels to
the others as one tensor of fixed length, so that a round costs one broadcast and the ranks need not agree
on a size first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from sglang_ext.policy.laps.round_plan import LongChunk, RoundPlan, ShortBatch

PLAN_NUMBERS = 512
_STEP_HEAD = 3  # numbers of a step before its keys
# Most requests of a short batch whose plan, with a long chunk beside it, travels: see `encode`.
MAX_BATCH_REQUESTS = PLAN_NUMBERS - 1 - _STEP_HEAD - (_STEP_HEAD + 1)
_SHORT_BATCH, _LONG_CHUNK = 1, 2


class Step(NamedTuple):
    """What a rank needs to know of an action: which requests, and how many tokens of a long one."""

    keys: tuple[int, ...]
    chunk_tokens: int | None  # None: the requests run whole


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
    return tuple(_step(action) for action in plan.actions)


def encode(steps: tuple[Step, ...]) -> list[int]:
    """At most PLAN_NUMBERS numbers: the number of steps, then kind, tokens, number of keys and keys of each.

    Raises PlanTooLongError.
    """
    numbers = [len(steps)]
    for step in steps:
        kind = _SHORT_BATCH if step.chunk_tokens is None else _LONG_CHUNK
        numbers += [kind, step.chunk_tokens or 0, len(step.keys), *step.keys]
    if len(numbers) > PLAN_NUMBERS:
        raise PlanTooLongError(f"a plan of {len(numbers)} numbers; {PLAN_NUMBERS} travel")
    return numbers


def decode(numbers: list[int]) -> tuple[Step, ...]:
    """The inverse of `encode`; trailing numbers are ignored."""
    steps = []
    position = 1
    for _ in range(numbers[0]):
        kind, chunk_tokens, count = numbers[position : position + _STEP_HEAD]
        position += _STEP_HEAD
        steps.append(Step(tuple(numbers[position : position + count]), chunk_tokens if kind == _LONG_CHUNK else None))
        position += count
    return tuple(steps)


def _step(action: ShortBatch | LongChunk) -> Step:
    if isinstance(action, LongChunk):
        return Step((action.key,), action.chunk_tokens)
    return Step(action.keys, None)
