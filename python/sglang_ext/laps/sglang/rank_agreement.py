"""One rank decides, every rank carries the same decision out.

The policy, its clock and its measurements exist only on the first tensor-parallel rank, of the first stage where the
instance is a pipeline. A decision travels to the others as one tensor of fixed length, so that a round costs one
broadcast and the ranks need not agree on a size first. From stage to stage it goes with the round: a later stage has
the same queue in its round k as the first had in its own, since requests and aborts travel in that order too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from sglang_ext.laps.decide.round_plan import Cut, PrefillBatch, RoundPlan

PLAN_NUMBERS = 1024
_STEP_HEAD = 3  # numbers of a step before its keys
_STEPS = 3
_MESSAGES_PER_ROUND = 3  # at most: for how long there has been work, the keys of prefills that have failed, a plan
_STAGE_TAG = int.from_bytes(b"SxLp", byteorder="big")  # SGLang's own tags are made in this way
# Most requests of a batch whose plan travels: two of that size, and a single long prefill (see `encode`).
MAX_BATCH_REQUESTS = (PLAN_NUMBERS - 1 - _STEPS * _STEP_HEAD - 1) // 2


class Step(NamedTuple):
    """Describes what a rank needs to know of a batch: which requests run whole, and this many tokens of which one does
    not."""

    whole: tuple[int, ...]
    cut: Cut | None


class PlanTooLongError(ValueError):
    """A plan names more requests than the agreement carries."""


class RankAgreement(Protocol):
    """Describes how a rank learns the steps of a round."""

    @property
    def is_deciding(self) -> bool: ...

    def agree(self, decide: Callable[[], RoundPlan]) -> tuple[RoundPlan | None, tuple[Step, ...]]:
        """The plan (only on the deciding rank) and its steps, the same on every rank."""
        ...

    def agree_keys(self, find: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return what `find` says on the first stage, the same on every stage. Its ranks find the same by
        themselves."""
        ...

    def agree_number(self, number: int) -> int:
        """Return the number of the same rank of the first stage."""
        ...


class SingleRankAgreement:
    """No tensor parallelism: nothing travels."""

    is_deciding = True

    def agree(self, decide: Callable[[], RoundPlan]) -> tuple[RoundPlan | None, tuple[Step, ...]]:
        plan = decide()
        return plan, steps_of(plan)

    def agree_keys(self, find: Callable[[], Sequence[int]]) -> Sequence[int]:
        return find()

    def agree_number(self, number: int) -> int:
        return number


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

    def agree_keys(self, find: Callable[[], Sequence[int]]) -> Sequence[int]:
        return find()

    def agree_number(self, number: int) -> int:
        return number


class StageLink:
    """Numbers from one pipeline stage to the next, on a tag of their own next to SGLang's messages.

    Each tensor-parallel rank passes them to the same rank of the next stage.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, stage_ranks: Sequence[int], stage: int) -> None:
        self._group = group
        self._before = stage_ranks[stage - 1] if stage > 0 else None
        self._behind = stage_ranks[stage + 1] if stage + 1 < len(stage_ranks) else None
        self._sent: deque[tuple[torch.distributed.Work, torch.Tensor]] = deque()  # tensors live until they are received

    def pass_on(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of the first stage, on every one; `numbers` counts only there. At most PLAN_NUMBERS."""
        tensor = torch.zeros(PLAN_NUMBERS, dtype=torch.int64)
        if self._before is None:
            tensor[: len(numbers)] = torch.tensor(list(numbers), dtype=torch.int64)
        else:
            torch.distributed.recv(tensor, src=self._before, group=self._group, tag=_STAGE_TAG)
        if self._behind is not None:
            # The next stage receives those of this round once this one has ended its own: wait only for earlier ones.
            while len(self._sent) >= _MESSAGES_PER_ROUND:
                self._sent.popleft()[0].wait()
            work = torch.distributed.isend(tensor, dst=self._behind, group=self._group, tag=_STAGE_TAG)
            self._sent.append((work, tensor))
        passed: list[int] = tensor.tolist()
        return passed


class PipelineAgreement:
    """The first stage decides by its own agreement; the others get each decision from the stage before."""

    def __init__(self, own: RankAgreement, link: StageLink, stage: int) -> None:
        self._own, self._link = own, link
        self._is_first = stage == 0
        self.is_deciding = self._is_first and own.is_deciding

    def agree(self, decide: Callable[[], RoundPlan]) -> tuple[RoundPlan | None, tuple[Step, ...]]:
        if not self._is_first:
            return None, decode(self._link.pass_on(()))
        plan, steps = self._own.agree(decide)
        self._link.pass_on(encode(steps))
        return plan, steps

    def agree_keys(self, find: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Agree on at most PLAN_NUMBERS - 1 keys; further keys are left to the next round."""
        keys = list(find())[: PLAN_NUMBERS - 1] if self._is_first else []
        numbers = self._link.pass_on((len(keys), *keys))
        return numbers[1 : 1 + numbers[0]]

    def agree_number(self, number: int) -> int:
        return self._link.pass_on((number,))[0]


def steps_of(plan: RoundPlan) -> tuple[Step, ...]:
    """The steps of a plan, in its order of preference."""
    return tuple([_step(batch) for batch in plan.batches])


def encode(steps: tuple[Step, ...]) -> list[int]:
    """Return at most PLAN_NUMBERS numbers: the number of steps, then for each the key and tokens of the cut request
    (0 and 0: none), the number of whole requests and their keys.

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
