"""Latent attention on a CPU: the absorbed form for every batch, and rotary embeddings of every kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.cpu.latent_attention import choose_method, make_rotary

pytestmark = pytest.mark.usefixtures("sglang_imported")


@pytest.mark.parametrize(("backend", "expected"), [("torch_native", "MLA"), ("intel_amx", "MHA")])
def test_a_batch_without_a_prefix_attends_to_latent_rows(backend: str, expected: str) -> None:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    attention = SimpleNamespace(current_attention_backend=None)

    def stock(self: Any, forward_batch: Any) -> Any:
        self.current_attention_backend = backend
        return AttnForwardMethod.MHA

    assert choose_method(stock, attention, None) is AttnForwardMethod[expected]


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}])
def test_without_yarn_the_embedding_is_that_of_other_devices(scaling: dict[str, Any] | None) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("Only deepseek_yarn is supported for CPU for now")

    rotary = make_rotary(refuse, 8, 8, 64, 10_000, False, scaling, device="cpu")
    positions = torch.arange(64.0)[:, None]
    angles = positions / 10_000 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(rotary.cos_sin_cache, torch.cat([angles.cos(), angles.sin()], -1))


def test_yarn_stays_sglangs() -> None:
    def stock(*arguments: Any) -> Any:
        return arguments

    scaling = {"rope_type": "deepseek_yarn", "factor": 4.0}
    made = make_rotary(stock, 8, 8, 64, 10_000, is_neox_style=False, rope_scaling=scaling, device="cpu")
    assert made == (8, 8, 64, 10_000, False, scaling, None, 1.0, "cpu")
