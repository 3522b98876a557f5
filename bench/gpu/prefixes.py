"""A few new tokens behind long prefixes: our kernel, which divides a prefix among programs, beside SGLang's.

Both as a captured pass runs them, some calls in one graph, so that what starting them takes does not count. SGLang's is
absent where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu.ceilings import median_s
from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext_cuda_graphs.recorders import CudaRecorder
from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch, allocate, pad_batch_
from sglang_ext_kernels.prefix_attention import prefix_attention_reference, split_prefix_attention_, splits_of

HEADS, KV_HEADS, SIZE = 28, 4, 128  # a 7B model
SCALE = SIZE**-0.5
CALLS = 20
# new tokens x requests, cached tokens of each
BATCHES = (
    *((GraphShape(8, 1), 0), (GraphShape(16, 1), 0), (GraphShape(64, 1), 0), (GraphShape(16, 4), 0)),
    *((GraphShape(16, 1), 1024), (GraphShape(16, 1), 4096), (GraphShape(16, 4), 4096), (GraphShape(64, 4), 4096)),
)
SMALL_BATCHES = ((GraphShape(4, 1), 0), (GraphShape(4, 2), 150))


def measure_prefixes(device: str, read_bytes_per_s: float) -> list[dict[str, Any]]:
    """Seconds of a call, beside those of reading the keys and values, and the error against plain mathematics."""
    batches = BATCHES if device == "cuda" else SMALL_BATCHES
    return [_measure(shape, prefix_tokens, device, read_bytes_per_s) for shape, prefix_tokens in batches]


def _measure(shape: GraphShape, prefix_tokens: int, device: str, read_bytes_per_s: float) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    slots = shape.requests * prefix_tokens + 1

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=dtype, device=device)

    batch = _batch(shape, prefix_tokens, device)
    q, k, v = draw(shape.tokens, HEADS + 2 * KV_HEADS, SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    k_pool, v_pool = draw(slots, KV_HEADS, SIZE), draw(slots, KV_HEADS, SIZE)
    sizes = splits_of(shape.length_tokens, shape.requests, HEADS, KV_HEADS, SIZE, dtype)
    outs = [torch.zeros(shape.tokens, HEADS, SIZE, dtype=dtype, device=device) for _ in range(3)]
    tensors = q, k, v, k_pool, v_pool

    def ours() -> None:
        split_prefix_attention_(outs[0], *tensors, batch, SCALE, shape.length_tokens, sizes)

    def sglangs() -> None:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        indices = batch.qo_indptr, batch.kv_indptr, batch.kv_indices
        contiguous = q, k.contiguous(), v.contiguous(), outs[1], k_pool, v_pool
        extend_attention_fwd(
            *contiguous, *indices, None, True, None, shape.length_tokens, 1.0, 1.0, sm_scale=SCALE, logit_cap=0.0
        )

    prefix_attention_reference(outs[2], *tensors, batch, SCALE)
    read_bytes = 2 * shape.requests * (prefix_tokens + shape.length_tokens) * KV_HEADS * SIZE * q.element_size()
    found = {
        "shape": [*shape, prefix_tokens],
        "splits": sizes.splits,
        "read_s": read_bytes / read_bytes_per_s,
        "split_s": _seconds(ours, device),
        "split_error": _error(outs[0], outs[2]),
    }
    if device == "cuda":
        found |= {"sglang_s": _seconds(sglangs, device), "sglang_error": _error(outs[1], outs[2])}
    return found


def _batch(shape: GraphShape, prefix_tokens: int, device: str) -> PaddedBatch:
    """All requests as long as they may be, the slots of their prefixes scattered."""
    padded = allocate(shape.tokens, shape.slots, shape.requests * prefix_tokens, device).of(shape.tokens, shape.slots)
    order = torch.randperm(shape.requests * prefix_tokens, device=device).int() + 1
    nothing = torch.zeros(shape.tokens, dtype=torch.int64, device=device)
    each = torch.ones(shape.requests, dtype=torch.int64, device=device)
    pad_batch_(
        padded,
        RaggedBatch(
            ids=nothing,
            positions=nothing,
            cache_slots=nothing,
            rows=torch.arange(shape.requests, device=device),
            new_lens=each * shape.length_tokens,
            prefix_lens=each * prefix_tokens,
            table=torch.nn.functional.pad(order.view(shape.requests, prefix_tokens), (0, 1)),
            longest_prefix_tokens=prefix_tokens,
        ),
    )
    return padded


def _seconds(run: Any, device: str) -> float:
    """Of one call, out of several in a graph."""
    if device != "cuda":
        return median_s(run, 1, 0)

    def calls() -> None:
        for _ in range(CALLS):
            run()

    recorder = CudaRecorder()
    with recorder.session():
        recorder.warm_up(calls)
        recording = recorder.record(calls)
    return median_s(recording.replay) / CALLS


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
