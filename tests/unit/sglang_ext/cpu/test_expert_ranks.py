"""Experts that are divided among ranks, against one rank that has all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.cpu.expert_ranks import skip_experts_of_others

pytestmark = pytest.mark.usefixtures("sglang_imported")

EXPERTS, HIDDEN, INNER, TOKENS = 4, 8, 6, 20
CONFIG = SimpleNamespace(
    apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None, gemm1_clamp_limit=None
)


@pytest.mark.parametrize("places", [1, 2, 3])
def test_the_contributions_of_all_ranks_add_up(places: int) -> None:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    torch.manual_seed(places)
    inward, outward = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    x, weights = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, places)
    experts = torch.stack([torch.randperm(EXPERTS)[:places] for _ in range(TOKENS)]).to(torch.int32)

    def computed(kept: slice, numbers: torch.Tensor) -> torch.Tensor:
        ranks = 1 if kept == slice(0, EXPERTS) else 2
        weights_of = {"w13_weight": inward[kept], "w2_weight": outward[kept]}
        layer: Any = SimpleNamespace(num_experts=EXPERTS, moe_ep_size=ranks, **weights_of)
        chosen = StandardTopKOutput(weights, numbers, torch.empty(0))
        out: torch.Tensor = skip_experts_of_others(moe_forward_native, layer, x, chosen, CONFIG)
        assert out.shape == x.shape
        return out

    whole = computed(slice(0, EXPERTS), experts)
    for own in (1, 2, 3):  # experts of the first rank
        first = computed(slice(0, own), experts.where(experts < own, -1))
        second = computed(slice(own, EXPERTS), (experts - own).where(experts >= own, -1))
        torch.testing.assert_close(first + second, whole)
    nothing = computed(slice(0, 0), torch.full_like(experts, -1))
    assert not nothing.any()
