"""The fused merge against the plain one, also where one side or both have seen nothing."""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels.merge_states import merge_states_, merge_states_reference_


@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 16), (13, 3, 64), (9, 2, 80)])
def test_it_is_the_reference(generator: torch.Generator, tokens: int, heads: int, size: int) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    out, lse = draw(tokens, heads, size), 5 * draw(tokens, heads)
    other, other_lse = draw(tokens, heads, size), 5 * draw(tokens, heads)
    lse[::2] = float("-inf")
    out[::2] = 0
    other_lse[::3] = float("-inf")
    other[::3] = 0
    wanted, wanted_lse = out.clone(), lse.clone()
    merge_states_reference_(wanted, wanted_lse, other, other_lse)
    merge_states_(out, lse, other, other_lse)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-6, rtol=1e-6)


def test_far_apart_sums_do_not_overflow(generator: torch.Generator) -> None:
    out, lse = torch.ones(1, 1, 16, device=generator.device), torch.full((1, 1), 1e4, device=generator.device)
    merge_states_(out, lse, torch.zeros_like(out), -lse)
    assert torch.equal(out, torch.ones_like(out))
    assert torch.equal(lse, torch.full_like(lse, 1e4))
