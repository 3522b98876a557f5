"""Ranks of one instance in processes of their own, which share random values over gloo as an engine's ranks do."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from support.preloaded import preloaded_context

JOIN_TIMEOUT_S = 120.0
ROUNDS = 60


def value_of(number: int) -> Any:
    """Small and large ones, around the size of the first broadcast."""
    draw = Random(number)
    return [draw.randrange(256) for _ in range(draw.choice((0, 1, 60, 118, 119, 120, 121, 122, 5000)))]


def run_ranks(size: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank has seen. Raises AssertionError when one of them fails or is not done in time."""
    context = preloaded_context()
    processes = [context.Process(target=_run, args=(rank, size, str(folder))) for rank in range(size)]
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
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def _run(rank: int, size: int, folder: str) -> None:
    import torch.distributed

    from sglang_ext.long_pool.member.ranks import GroupRanks, all_ranks_or_raise
    from sglang_ext.long_pool.mesh.mesh import MeshError

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    ranks = GroupRanks(torch.distributed.new_group(list(range(size)), backend="gloo"), first_global_rank=0)
    asked = 0
    shared = []
    for number in range(ROUNDS):

        def decide(seed: int = number) -> Any:
            nonlocal asked
            asked += 1
            return value_of(seed)

        shared.append(ranks.share(decide))
    votes = [ranks.all(rank != number) for number in range(size + 1)]
    pairs = ranks.all_of([True, rank != 0, False]), ranks.all_of([])
    gathered = ranks.gather({"rank": rank})
    errors = []
    for number in range(size + 1):
        try:
            with all_ranks_or_raise(ranks, ValueError):
                if rank == number:
                    raise ValueError("mine")
        except (ValueError, MeshError) as error:
            errors.append(str(error))
        else:
            errors.append("none")
    result = {"size": ranks.size, "rank": ranks.rank, "asked": asked, "shared": shared, "votes": votes}
    result |= {"pairs": pairs, "gathered": gathered}
    Path(folder, f"rank{rank}.json").write_text(json.dumps({**result, "errors": errors}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
