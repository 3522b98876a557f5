"""Attention of a CPU engine's new tokens behind a cached prefix, against SGLang's own path on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.cpu.prefix_attention import STOCK_ATTENTION_VARIABLE, run_extend
from support.examples import examples

pytestmark = pytest.mark.usefixtures("sglang_imported")

HEAD_SIZE = 16


class Batch(NamedTuple):
    """(cached, new) tokens of each request, query and KV heads, tokens of a page, element type."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    page_tokens: int = 1
    dtype: torch.dtype = torch.float32
    computed_in: torch.dtype | None = None  # None: dtype, in which the tensors are drawn


def batches() -> st.SearchStrategy[Batch]:
    lengths = st.lists(st.tuples(st.integers(0, 130), st.integers(1, 70)), min_size=1, max_size=5).map(tuple)
    heads = st.sampled_from([(4, 4), (4, 2), (6, 2), (9, 3), (3, 1)])
    return st.tuples(lengths, heads, st.sampled_from([1, 16])).map(lambda one: Batch(one[0], *one[1], one[2]))


class Run(NamedTuple):
    output: torch.Tensor
    asked_stock: bool


def sglangs(batch: Batch, **special: Any) -> torch.Tensor:
    return run(batch, lambda stock, *args, **kwargs: stock(*args, **kwargs), **special).output


def ours(batch: Batch, **special: Any) -> Run:
    return run(batch, run_extend, **special)


def run(batch: Batch, implementation: Callable[..., torch.Tensor], **special: Any) -> Run:
    """The same random tensors for the same batch, in pages that lie anywhere in a pool."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    generator = torch.Generator().manual_seed(1)
    totals = [cached + new for cached, new in batch.lengths]
    page = batch.page_tokens
    pages = [-(-total // page) for total in totals]
    order = torch.randperm(sum(pages) + 5, generator=generator)
    table = torch.zeros(len(totals) + 2, max(pages) * page, dtype=torch.int32)
    rows = torch.randperm(len(totals) + 2, generator=generator)[: len(totals)]
    for row, own in zip(rows.tolist(), order[: sum(pages)].split(pages), strict=True):
        table[row, : len(own) * page] = (own[:, None] * page + torch.arange(page)).flatten()
    new = torch.tensor([length for _, length in batch.lengths])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(batch.dtype).to(batch.computed_in or batch.dtype)

    value_size = special.pop("value_size", HEAD_SIZE)
    k_cache = random(len(order) * page, batch.kv_heads, HEAD_SIZE)
    v_cache = random(len(order) * page, batch.kv_heads, value_size)
    query = random(int(new.sum()), batch.heads, HEAD_SIZE)
    output = query.new_full((len(query), batch.heads, value_size), float("nan"))
    asked: list[bool] = []

    def stock(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(True)
        # The hook may be in force in this process: what it wraps is SGLang's.
        original = TorchNativeAttnBackend._run_sdpa_forward_extend
        result: torch.Tensor = getattr(original, "__wrapped__", original)(*args, **kwargs)
        return result

    result = implementation(
        stock,
        object.__new__(TorchNativeAttnBackend),
        *(query, output, k_cache, v_cache, table, rows, torch.tensor(totals), torch.tensor(totals) - new, new),
        **{"scaling": 0.3, "enable_gqa": batch.heads != batch.kv_heads, "causal": True, **special},
    )
    assert result is output
    return Run(output, bool(asked))


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(batches())
def test_it_is_what_sglang_computes(batch: Batch) -> None:
    found = ours(batch)
    assert not found.asked_stock
    torch.testing.assert_close(found.output, sglangs(batch), atol=2e-6, rtol=1e-5)


MIXED = Batch(((40, 24), (0, 7), (5, 1), (0, 33), (300, 2)), 6, 2)


@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_prefixes_of_all_kinds_in_one_batch(page_tokens: int, scaling: float | None) -> None:
    batch = MIXED._replace(page_tokens=page_tokens)
    found = ours(batch, scaling=scaling)
    torch.testing.assert_close(found.output, sglangs(batch, scaling=scaling), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float32_as_sglangs(dtype: torch.dtype) -> None:
    batch = MIXED._replace(dtype=dtype)
    exact = sglangs(batch._replace(computed_in=torch.float32))
    error, sglangs_error = ((output.float() - exact).abs().max() for output in (ours(batch).output, sglangs(batch)))
    assert 0 < error <= sglangs_error


def test_a_prompt_without_prefix_is_bit_by_bit_sglangs() -> None:
    batch = Batch(((0, 64), (0, 3)))
    found = ours(batch)
    assert not found.asked_stock
    assert torch.equal(found.output, sglangs(batch))


@pytest.mark.parametrize(
    "special",
    [
        {"causal": False},
        {"sliding_window_size": 7},
        {"value_size": 8},
        {"encoder_lens": torch.tensor([3, 0, 2, 0, 1]), "is_cross_attn": True, "causal": False},
    ],
    ids=["bidirectional", "sliding-window", "smaller-values", "cross-attention"],
)
def test_anything_but_plain_causal_attention_is_sglangs(special: dict[str, Any]) -> None:
    found = ours(MIXED, **dict(special))
    assert found.asked_stock
    assert torch.equal(found.output, sglangs(MIXED, **dict(special)))


def test_a_variable_leaves_all_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ours(MIXED).asked_stock
    monkeypatch.setenv(STOCK_ATTENTION_VARIABLE, "1")
    assert ours(MIXED).asked_stock
