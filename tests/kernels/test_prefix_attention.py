"""The Triton kernels of short prompts behind long prefixes: divided prefixes, grouped heads, ragged batches."""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels.padded_batch import RaggedBatch, allocate, pad_batch_, prefixes_in_window
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
    window: int | None = None,
    cap: float = 0.0,
    has_sinks: bool = False,
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
    sinks = 2 * draw(heads) if has_sinks else None
    seen = None if window is None else prefixes_in_window(batch, window)
    split_prefix_attention_(
        *(got, q, k, v, pools[0], pools[1], batch, SCALE, max(new), sizes),
        prefixes=seen,
        window=window,
        cap=cap,
        sinks=sinks,
    )
    prefix_attention_reference(wanted, q, k, v, pools[0], pools[1], batch, SCALE, window=window, cap=cap, sinks=sinks)
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


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 15, 16, 40, 64, 200])
def test_windows(generator: torch.Generator, float32_error: float, window: int, splits: int) -> None:
    """Shorter and longer than the new tokens, than the prefixes, and than a program's part of a prefix."""
    check(generator, [20, 1, 45], [130, 64, 0], SplitSizes(splits, 16, 16, 16), float32_error, window=window)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("window", "cap", "has_sinks"), [(None, 0.0, True), (None, 1.5, False), (24, 0.0, True), (24, 1.5, True)]
)
def test_caps_and_sinks(
    generator: torch.Generator, float32_error: float, window: int | None, cap: float, has_sinks: bool, splits: int
) -> None:
    sizes = SplitSizes(splits, 16, 16, 16)
    check(generator, [7, 20], [70, 0], sizes, float32_error, window=window, cap=cap, has_sinks=has_sinks)


def test_sinks_in_half_precision(generator: torch.Generator) -> None:
    dtype = torch.float16 if generator.device.type == "cpu" else torch.bfloat16
    sizes = SplitSizes(4, 16, 16, 16)
    check(generator, [7, 20], [70, 0], sizes, 2e-2, dtype=dtype, window=24, cap=1.5, has_sinks=True)
