"""AROUND `mamba_v2_sharded_weight_loader`: layers of Mamba 2 whose ranks all have the one group of B and C, on a CPU.

With more ranks than groups each rank has a copy of the group, so the ranks have more rows together than the weights.
SGLang's loader for CPUs takes that for rows to be padded with zeros, and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def load_replicated(
    stock: Callable[..., Any], shard_spec: Sequence[tuple[int, int, bool]], tp_size: int, tp_rank: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return the function that copies a rank's rows of a weight, [rows of all parts, ...], into its parameter.

    `shard_spec` has for each part the rows of all ranks together, how many of these are copies, and whether each rank
    has the first rows.
    """
    load_padded = stock(shard_spec, tp_size, tp_rank)

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        parts = [rows - copies for rows, copies, _ in shard_spec]
        if len(loaded_weight) != sum(parts) or not any(copies for _, copies, _ in shard_spec):
            load_padded(param, loaded_weight)
            return
        begin = 0
        weights = loaded_weight.split(parts)
        for (rows, _, has_first), weight in zip(shard_spec, weights, strict=True):
            share = rows // tp_size
            own = weight[(0 if has_first else tp_rank) * share :][:share]
            param.data[begin : begin + len(own)] = own
            begin += share

    return load
