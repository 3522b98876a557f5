"""The rows of Mamba 2's weights on each rank, against SGLang's own loader where that is right."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.cpu.replicated_groups import load_replicated

pytestmark = [
    pytest.mark.usefixtures("sglang_imported"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
]


def loaded(spec: list[tuple[int, int, bool]], weight: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    from sglang.srt.layers.attention.mamba.mamba import mamba_v2_sharded_weight_loader

    stock = getattr(mamba_v2_sharded_weight_loader, "__wrapped__", mamba_v2_sharded_weight_loader)
    param = torch.full((sum(rows for rows, _, _ in spec) // ranks, 3), -1.0)
    load_replicated(stock, spec, ranks, rank)(param, weight)
    return param


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_its_heads_and_a_copy_of_the_group(ranks: int) -> None:
    group = 16
    weight = torch.arange((128 + 2 * group) * 3.0).view(-1, 3)
    copied = (group * ranks, group * (ranks - 1), True)
    heads, b, c = weight.split([128, group, group])
    share = 128 // ranks
    for rank in range(ranks):
        expected = torch.cat([heads[rank * share : (rank + 1) * share], b, c])
        assert torch.equal(loaded([(128, 0, False), copied, copied], weight, ranks, rank), expected)


def test_groups_that_are_divided_are_loaded_as_sglang_does() -> None:
    weight = torch.arange((128 + 64) * 3.0).view(-1, 3)
    spec = [(128, 0, False), (32, 0, False), (32, 0, False)]
    parts = weight.split([128, 32, 32])
    for rank in range(2):
        expected = torch.cat([part.chunk(2)[rank] for part in parts])
        assert torch.equal(loaded(spec, weight, 2, rank), expected)
