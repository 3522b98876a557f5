"""The Triton kernels of short prompts behind long prefixes: divided prefixes, grouped heads, ragged batches."""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels.padded_batch import RaggedBatch, allocate, pad_batch_
from sglang_ext_kernels.prefix_attention import SplitSizes, prefix_attention_reference, split_prefix_attention_

SLOTS = 400
SCALE = 0.2


def check(
    generator: torch.Generator,
    new: list[int],
    prefix: list[int],
    sizes: SplitSizes,
    error: float,
    heads: int = 6,
    kv_heads: int = 2,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Against the reference, for a shape with room for more tokens and requests than there are."""
    device, tokens = generator.device, sum(new) + 3

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def whole(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    table = torch.stack([torch.randperm(SLOTS, generator=generator, device=device).int() for _ in new])
    batch = allocate(tokens, len(new) + 2, sum(prefix) + 5, str(device))
    ragged = RaggedBatch(
        ids=torch.zeros(sum(new), dtype=torch.int64, device=device),
        positions=torch.zeros(sum(new), dtype=torch.int64, device=device),
        cache_slots=torch.zeros(sum(new), dtype=torch.int64, device=device),
        rows=torch.arange(len(new), device=device),
        new_lens=whole(new),
        prefix_lens=whole(prefix),
        table=table,
        longest_prefix_tokens=max(prefix),
    )
    pad_batch_(batch, ragged)
    # as they come out of one projection, so that their rows are strided
    projected = draw(tokens, heads + 2 * kv_heads, size)
    q, k, v = projected.split([heads, kv_heads, kv_heads], dim=1)
    pools = draw(2, SLOTS, kv_heads, size)
    got, wanted = (torch.full((tokens, heads, size), 7.0, dtype=dtype, device=device) for _ in range(2))
    split_prefix_attention_(got, q, k, v, pools[0], pools[1], batch, SCALE, max(new), sizes)
    prefix_attention_reference(wanted, q, k, v, pools[0], pools[1], batch, SCALE)
    assert torch.equal(got[sum(new) :], wanted[sum(new) :])  # padding is left as it is
    torch.testing.assert_close(got, wanted, atol=error, rtol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize(
    ("new", "prefix"),
    [
        ([3], [300]),
        ([7, 1, 20], [0, 65, 130]),
        ([20, 2, 2, 9], [64, 0, 31, 33]),
    ],
)
def test_ragged_batches(
    generator: torch.Generator, float32_error: float, new: list[int], prefix: list[int], splits: int
) -> None:
    check(generator, new, prefix, SplitSizes(splits, 32, 32, 32), float32_error)


@pytest.mark.parametrize("prefix", [64, 65, 129, 256])
def test_prefixes_that_end_at_a_split(generator: torch.Generator, float32_error: float, prefix: int) -> None:
    check(generator, [2, 5], [prefix, prefix - 1], SplitSizes(4, 16, 16, 64), float32_error)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 32), (7, 1, 80)])
def test_heads(generator: torch.Generator, float32_error: float, heads: int, kv_heads: int, size: int) -> None:
    check(generator, [5, 11], [70, 3], SplitSizes(3, 16, 16, 16), float32_error, heads, kv_heads, size)


def test_half_precision(generator: torch.Generator) -> None:
    # the interpreter multiplies no bfloat16
    dtype = torch.bfloat16 if generator.device.type == "cuda" else torch.float16
    error = 2e-2 if dtype == torch.bfloat16 else 3e-3
    check(generator, [5, 16], [200, 90], SplitSizes(4, 64, 64, 64), error, size=64, dtype=dtype)
