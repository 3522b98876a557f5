"""Ranks and pipeline stages in processes of their own, which agree on random plans over gloo as an engine's do."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import NamedTuple

from sglang_ext.laps.decide.round_plan import (
    Cut,
    DispatchReason,
    PrefillBatch,
    RoundPlan,
)
from sglang_ext.laps.sglang.rank_agreement import (
    MAX_BATCH_REQUESTS,
    BroadcastAgreement,
    PipelineAgreement,
    RankAgreement,
    StageLink,
    Step,
    steps_of,
)
from support.preloaded import preloaded_context

JOIN_TIMEOUT_S = 120.0


class RankReport(NamedTuple):
    """What one rank made of a series of rounds."""

    decisions: int  # how often it was asked to decide
    plans: int  # how often it was handed the plan itself
    steps: list[list[list[object]]]  # per round and step: whole keys and the cut one
    keys: list[list[int]]  # per round in which they were agreed on
    numbers: list[int]  # in every third round, that of the first stage's rank


def random_plan(seed: int) -> RoundPlan:
    """Nothing, one batch or two, with keys of any size; now and then the longest that travels."""
    random = Random(seed)
    batches = []
    for _ in range(random.randrange(3)):
        requests = random.choice((1, 2, random.randrange(1, 65), MAX_BATCH_REQUESTS))
        keys = tuple(random.sample(range(1, 1 << 40), requests))
        cut = Cut(random.randrange(1, 1 << 60), random.randrange(1, 1 << 20)) if random.random() < 0.5 else None
        whole = keys if cut is None else keys[1:]
        batches.append(PrefillBatch(whole, cut, DispatchReason.WINDOW, None, len(whole), requests, 0.1))
    return RoundPlan(tuple(batches), random.random())


def steps_as_json(plan: RoundPlan) -> list[list[object]]:
    """A plan's steps as `RankReport` holds them."""
    return [_step_as_json(step) for step in steps_of(plan)]


def _step_as_json(step: Step) -> list[object]:
    return [list(step.whole), None if step.cut is None else list(step.cut)]


def random_keys(seed: int) -> list[int] | None:
    """None: a round without a parked prefill, in which they are not asked for. Now and then more than travel."""
    random = Random(seed)
    return None if random.random() < 0.5 else [seed * 10_000 + n for n in range(random.choice((0, 1, 5, 2000)))]


def run_ranks(ranks: int, rounds: int, folder: Path, stages: int = 1) -> list[RankReport]:
    """Let `ranks` processes of each stage agree on `random_plan(0)`, `random_plan(1)`, … and on random keys.

    `folder` is empty and theirs. The reports come by stage, and within one by rank. Raises AssertionError when one of
    them fails or is not done in time.
    """
    context = preloaded_context()
    size = ranks * stages
    processes = [
        context.Process(target=_run_rank, args=(rank, ranks, stages, rounds, str(folder))) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(JOIN_TIMEOUT_S)
        assert [process.exitcode for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [RankReport(*json.loads((folder / f"rank{rank}.json").read_text())) for rank in range(size)]


def _agreement(rank: int, ranks: int, stages: int) -> RankAgreement:
    """As SGLang numbers them: the ranks of the first stage, then those of the second, …"""
    import torch.distributed

    size = ranks * stages
    by_stage = [list(range(first, first + ranks)) for first in range(0, size, ranks)]
    by_rank = [list(range(first, size, ranks)) for first in range(ranks)]
    groups = [torch.distributed.new_group(members, backend="gloo") for members in (*by_stage, *by_rank)]
    stage, rank_in_stage = divmod(rank, ranks)
    own = BroadcastAgreement(groups[stage], rank_in_stage, deciding_global_rank=by_stage[stage][0])
    if stages == 1:
        return own
    return PipelineAgreement(own, StageLink(groups[stages + rank_in_stage], by_rank[rank_in_stage], stage), stage)


def _run_rank(rank: int, ranks: int, stages: int, rounds: int, folder: str) -> None:
    import torch.distributed

    size = ranks * stages
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    agreement = _agreement(rank, ranks, stages)
    is_first = rank < ranks
    decisions = plans = 0
    steps, agreed_keys, numbers = [], [], []
    for number in range(rounds):

        def decide(seed: int = number) -> RoundPlan:
            nonlocal decisions
            decisions += 1
            return random_plan(seed)

        if number % 3 == 0:
            numbers.append(agreement.agree_number(1000 * number + rank))
        keys = random_keys(number)
        if keys is not None:
            found = keys if is_first else [-1]
            agreed_keys.append(list(agreement.agree_keys(lambda found=found: found)))
        plan, agreed = agreement.agree(decide)
        plans += plan is not None
        steps.append([_step_as_json(step) for step in agreed])
    Path(folder, f"rank{rank}.json").write_text(json.dumps([decisions, plans, steps, agreed_keys, numbers]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
