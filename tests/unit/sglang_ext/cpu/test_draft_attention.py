"""What the target draws behind drafts has the distribution that each request asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.cpu.draft_attention import draw_tokens

pytestmark = pytest.mark.usefixtures("sglang_imported")
DRAWS = 4000


def test_tokens_are_drawn_by_temperature_and_limits_of_each_request() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(3 * DRAWS, 1)
    info = SimpleNamespace(
        temperatures=torch.tensor([[2.0], [1.0], [1.0]]),
        top_ks=torch.tensor([4, 2, 1]),
        top_ps=torch.ones(3),
        min_ps=torch.zeros(3),
        need_min_p_sampling=False,
        sampling_seed=None,
    )
    tokens = draw_tokens(logits, info, DRAWS, torch.zeros(3 * DRAWS)).view(3, DRAWS)
    warm = torch.softmax(logits[0] / 2, 0)
    two = torch.softmax(torch.tensor([-torch.inf, 1.0, 2.0, -torch.inf]), 0)
    for row, wanted in enumerate((warm, two, torch.tensor([0.0, 0.0, 1.0, 0.0]))):
        shares = torch.bincount(tokens[row].long(), minlength=4) / DRAWS
        torch.testing.assert_close(shares, wanted, atol=0.03, rtol=0)
