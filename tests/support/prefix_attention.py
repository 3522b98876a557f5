"""SGLang's attention for CPUs, as it is and as members of a long pool have it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

TIMEOUT_S = 120.0


class Batch(NamedTuple):
    """(cached, new) tokens of each request, query and KV heads, element type."""

    lengths: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dtype: str = "float32"


class Difference(NamedTuple):
    """Largest absolute difference from SGLang's; whether SGLang's was asked."""

    largest: float
    was_asked: bool


def differences(batches: Sequence[Batch]) -> list[Difference]:
    """In a process of its own, as SGLang changes the one that it is imported into."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, list(batches)).result(TIMEOUT_S)


def _run(batches: Sequence[Batch]) -> list[Difference]:
    from sglang_ext.sglang_plugin import cpu_platform

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    cpu_platform.install((*cpu_platform.CANDIDATES, *cpu_platform.BENCHMARK_CANDIDATES))
    return [_difference(batch, seed) for seed, batch in enumerate(batches)]


def _difference(batch: Batch, seed: int) -> Difference:
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sglang_ext.sglang_plugin.cdsp.prefix_attention import use_prefix_attention

    torch.manual_seed(seed)
    size, dtype = 16, getattr(torch, batch.dtype)
    totals = [cached + new for cached, new in batch.lengths]
    slots = torch.randperm(sum(totals) + 5)
    table = torch.zeros(len(totals) + 2, max(totals), dtype=torch.int64)
    rows = torch.randperm(len(totals) + 2)[: len(totals)]
    for row, of_request in zip(rows.tolist(), slots[: sum(totals)].split(totals), strict=True):
        table[row, : len(of_request)] = of_request
    new = torch.tensor([length for _, length in batch.lengths])
    arguments = (
        torch.randn(len(slots), batch.kv_heads, size).to(dtype),
        torch.randn(len(slots), batch.kv_heads, size).to(dtype),
        *(table, rows, torch.tensor(totals), torch.tensor(totals) - new, new),
    )
    query = torch.randn(int(new.sum()), batch.heads, size).to(dtype)
    options = {"scaling": 0.3, "enable_gqa": batch.heads != batch.kv_heads, "causal": True}

    backend = object.__new__(TorchNativeAttnBackend)
    expected = backend._run_sdpa_forward_extend(query, torch.empty_like(query), *arguments, **options)
    asked = []
    original = backend._run_sdpa_forward_extend

    def ask(*args: object, **kwargs: object) -> torch.Tensor:
        asked.append(1)
        result: torch.Tensor = original(*args, **kwargs)
        return result

    backend._run_sdpa_forward_extend = ask
    use_prefix_attention(backend)
    found = backend._run_sdpa_forward_extend(query, torch.empty_like(query), *arguments, **options)
    return Difference(float((found.float() - expected.float()).abs().max()), bool(asked))
