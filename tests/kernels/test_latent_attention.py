"""SGLang's kernel as captured passes start it for latent attention: values that are the first part of their keys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_ext.graphs.sglang.attention import attend_as_sglang_
from sglang_ext_kernels import triton_support
from sglang_ext_kernels.padded_batch import RaggedBatch, allocate, pad_batch_
from sglang_ext_kernels.prefix_attention import prefix_attention_reference

SLOTS, HEADS, LATENT, ROTARY = 200, 5, 64, 16


@pytest.fixture(autouse=True, scope="module")
def _sglang() -> Iterator[None]:
    """Make SGLang's kernel importable where there is no GPU, without which the rest of SGLang does not start."""
    if not triton_support.is_interpreted():
        yield
        return
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
    from compile_kernels import sglang_extend
    from pretended_gpu import pretend

    cuda, version, modules = dict(vars(torch.cuda)), torch.version.cuda, dict(sys.modules)
    pretend()
    sglang_extend()
    vars(torch.cuda).update(cuda)
    torch.version.cuda = version
    yield
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


@pytest.mark.parametrize(("new", "prefix"), [([3], [70]), ([7, 1, 140], [0, 65, 33]), ([4, 4], [0, 0])])
def test_latent_rows(generator: torch.Generator, float32_error: float, new: list[int], prefix: list[int]) -> None:
    device, tokens = generator.device, sum(new) + 3

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    table = torch.stack([torch.randperm(SLOTS, generator=generator, device=device).int() for _ in new])
    batch = allocate(tokens, len(new) + 2, sum(prefix) + 5, str(device))
    ids = torch.zeros(sum(new), dtype=torch.int64, device=device)
    rows, new_lens, prefix_lens = (torch.tensor(x, device=device) for x in (range(len(new)), new, prefix))
    pad_batch_(batch, RaggedBatch(ids, ids, ids, rows, new_lens, prefix_lens, table, max(prefix)))
    q, k, pool = draw(tokens, HEADS, LATENT + ROTARY), draw(tokens, 1, LATENT + ROTARY), draw(SLOTS, 1, LATENT + ROTARY)
    parts = q, k, k[..., :LATENT], pool, pool[..., :LATENT], batch, 0.1
    got, wanted = (torch.full((tokens, HEADS, LATENT), 7.0, device=device) for _ in range(2))
    attend_as_sglang_(got, *parts, max(new))
    prefix_attention_reference(wanted, *parts)
    torch.testing.assert_close(got, wanted, atol=10 * float32_error, rtol=1e-5)
