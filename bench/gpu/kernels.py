"""The kernels on a GPU: right against float64, and fast against what the device can do.

    python bench/gpu/kernels.py [--out FILE] [--dry-run]

In this order: the device's ceilings; gather, scatter and merge against the bandwidth of a copy; attention of a few new
tokens behind long prefixes, divided among programs and whole, a layer after the other as a model has them; attention
between two shards of a prompt against FlashAttention 2 (torch's). Needs torch and Triton, no engine.

A bad number: an error above its bound is a wrong kernel. A copy far below 2.8 TB/s on an H100 is a device that others
use; judge ratios only. Gather or scatter far below a copy: the kernel, or slots that are not drawn at random.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import gpu.checkout  # noqa: F401
from gpu.attention_cases import DTYPE, HEAD_SIZE, HEADS, KV_HEADS, SCALE, attention_in_double, draw
from gpu.measure import (
    DEVICE,
    HAS_GPU,
    Ceilings,
    Report,
    measure_ceilings,
    median_s,
    parser,
    relative_error,
    synchronize,
)
from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext_cuda_graphs.recorders import CudaRecorder
from sglang_ext_kernels import triton_support
from sglang_ext_kernels.block_attention import (
    BlockSizes,
    default_sizes,
    gather_kv,
    merge_states_,
    merge_states_reference_,
    plan_block,
    positioned_block,
    scatter_kv_,
)
from sglang_ext_kernels.padded_batch import PaddedBatch, RaggedBatch, allocate, pad_batch_
from sglang_ext_kernels.prefix_attention import (
    SplitSizes,
    prefix_attention_reference,
    split_prefix_attention_,
    splits_of,
)

MOVED_TOKENS = 65536 if HAS_GPU else 256
BLOCK_TOKENS = (4096, 16384) if HAS_GPU else (64,)
BLOCK_SIZES = (BlockSizes(128, 64), BlockSizes(128, 128), BlockSizes(64, 64)) if HAS_GPU else (BlockSizes(16, 16),)
LAYERS = 28 if HAS_GPU else 1
# New tokens x requests, cached tokens of each.
PREFIXES = (
    *((GraphShape(8, 1), 0), (GraphShape(16, 1), 1024), (GraphShape(16, 1), 4096)),
    *((GraphShape(16, 4), 4096), (GraphShape(64, 4), 4096)),
)
SMALL_PREFIXES = ((GraphShape(4, 1), 0), (GraphShape(4, 2), 150))
CHECKED_ROWS = 48
# In bfloat16; float32 in a dry run is far below.
MAX_ERROR, MAX_LSE_ERROR = 1e-2, 2e-2


def moves(report: Report, ceilings: Ceilings) -> None:
    """Gather, scatter and merge: exact, and their bytes read and written against a copy's."""
    sets = [
        (draw(2 * MOVED_TOKENS, KV_HEADS), draw(2 * MOVED_TOKENS, KV_HEADS), slots)
        for slots in (torch.randperm(2 * MOVED_TOKENS, device=DEVICE)[:MOVED_TOKENS] for _ in range(3))
    ]
    packed = [gather_kv(*one) for one in sets]
    is_equal = all(
        torch.equal(got, torch.stack([keys[slots], values[slots]]))
        for got, (keys, values, slots) in zip(packed, sets, strict=True)
    )
    keys, values = (torch.full_like(pool, float("nan")) for pool in sets[0][:2])
    scatter_kv_(keys, values, sets[0][2], packed[0])
    is_equal &= torch.equal(keys[sets[0][2]], packed[0][0]) and torch.equal(values[sets[0][2]], packed[0][1])
    is_equal &= int(keys.isnan().all(-1).all(-1).sum()) == MOVED_TOKENS
    report.check("gathered and scattered rows that are equal", float(is_equal), at_least=1)

    out, other = (torch.randn(MOVED_TOKENS, HEADS, HEAD_SIZE, device=DEVICE) for _ in range(2))
    lse, other_lse = (torch.randn(MOVED_TOKENS, HEADS, device=DEVICE) for _ in range(2))
    wanted, wanted_lse = out.double(), lse.double()
    merge_states_reference_(wanted, wanted_lse, other.double(), other_lse.double())
    merge_states_(out, lse, other, other_lse)
    report.check("error of merging", max(relative_error(out, wanted), relative_error(lse, wanted_lse)), at_most=1e-5)
    del wanted, wanted_lse

    moved_bytes = 2 * packed[0].numel() * packed[0].element_size()
    merged_bytes = 3 * (out.numel() + lse.numel()) * 4
    seconds = {
        "gather": median_s([lambda one=one: gather_kv(*one) for one in sets]),
        "scatter": median_s(
            [lambda one=one, got=got: scatter_kv_(*one, got) for one, got in zip(sets, packed, strict=True)]
        ),
        "merge": median_s(lambda: merge_states_(out, lse, other, other_lse)),
    }
    rates = {name: (merged_bytes if name == "merge" else moved_bytes) / each for name, each in seconds.items()}
    report.record(moves_bytes_per_s=rates)
    for name, rate in rates.items():
        report.check(f"{name} over a copy", rate / ceilings.copy_bytes_per_s, at_least=0.85, is_speed=True)


def prefixes(report: Report, ceilings: Ceilings) -> None:
    """Calls of all layers in one graph, each over a pool of its own: one layer's would be read from the L2 cache."""
    rows: list[dict[str, Any]] = []
    for shape, prefix_tokens in PREFIXES if HAS_GPU else SMALL_PREFIXES:
        batch = prefix_batch(shape, prefix_tokens)
        q, k, v = draw(shape.tokens, HEADS + 2 * KV_HEADS).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        slots = shape.requests * prefix_tokens + 1
        pools = [(draw(slots, KV_HEADS), draw(slots, KV_HEADS)) for _ in range(LAYERS)]
        wanted = torch.zeros(shape.tokens, HEADS, HEAD_SIZE, dtype=DTYPE, device=DEVICE)
        prefix_attention_reference(wanted, q, k, v, *pools[-1], batch, SCALE)
        sizes = splits_of(shape.length_tokens, shape.requests, HEADS, KV_HEADS, HEAD_SIZE, DTYPE)
        read_bytes = 2 * shape.requests * (prefix_tokens + shape.length_tokens) * KV_HEADS * HEAD_SIZE * 2
        row: dict[str, Any] = {"shape": [*shape, prefix_tokens], "splits": sizes.splits}
        row["read_s"] = read_bytes / ceilings.read_bytes_per_s
        for name, used in (("split", sizes), ("whole", sizes._replace(splits=1))):
            out = torch.full_like(wanted, float("nan"))
            layers = Layers(out, (q, k, v), pools, batch, shape, used)
            row[f"{name}_s"] = seconds_in_a_graph(layers) / LAYERS
            row[f"{name}_error"] = relative_error(out, wanted)
        rows.append(row)
        report.record(prefixes=rows)
        label = f"{shape.length_tokens} x {shape.requests} behind {prefix_tokens}"
        report.check(f"error, {label}", max(row["split_error"], row["whole_error"]), at_most=MAX_ERROR)
        if (shape, prefix_tokens) == (GraphShape(16, 1), 4096):
            report.check(f"us a layer, {label}", row["split_s"] * 1e6, at_most=15, is_speed=True)
            report.check(f"divided over whole, {label}", row["split_s"] / row["whole_s"], at_most=0.5, is_speed=True)


class Layers(NamedTuple):
    """Attention of all layers of a batch, one after the other."""

    out: torch.Tensor
    qkv: tuple[torch.Tensor, ...]
    pools: list[tuple[torch.Tensor, torch.Tensor]]
    batch: PaddedBatch
    shape: GraphShape
    sizes: SplitSizes

    def __call__(self) -> None:
        """Start them all."""
        for pool in self.pools:
            split_prefix_attention_(self.out, *self.qkv, *pool, self.batch, SCALE, self.shape.length_tokens, self.sizes)


def seconds_in_a_graph(run: Callable[[], None]) -> float:
    """Seconds of what a captured pass would start, so that the launches do not count."""
    if not HAS_GPU:
        return median_s(run)
    recorder = CudaRecorder()
    with recorder.session():
        recorder.warm_up(run)
        recording = recorder.record(run)
    return median_s(recording.replay, 10)


def prefix_batch(shape: GraphShape, prefix_tokens: int) -> PaddedBatch:
    """All requests as long as they may be, the slots of their prefixes scattered."""
    cached = shape.requests * prefix_tokens
    padded = allocate(shape.tokens, shape.slots, cached, DEVICE).of(shape.tokens, shape.slots)
    table = (torch.randperm(cached, device=DEVICE).int() + 1).view(shape.requests, prefix_tokens)
    nothing = torch.zeros(shape.tokens, dtype=torch.int64, device=DEVICE)
    each = torch.ones(shape.requests, dtype=torch.int64, device=DEVICE)
    pad_batch_(
        padded,
        RaggedBatch(
            ids=nothing,
            positions=nothing,
            cache_slots=nothing,
            rows=torch.arange(shape.requests, device=DEVICE),
            new_lens=each * shape.length_tokens,
            prefix_lens=each * prefix_tokens,
            table=torch.nn.functional.pad(table, (0, 1)),
            longest_prefix_tokens=prefix_tokens,
        ),
    )
    return padded


def blocks(report: Report) -> None:
    """Attention between two shards, along the diagonal, whole and striped, by several sizes of its blocks."""
    found: dict[str, Any] = {}
    for tokens in BLOCK_TOKENS:
        q, k, v = draw(tokens, HEADS), draw(tokens, KV_HEADS), draw(tokens, KV_HEADS)
        at = torch.arange(tokens, device=DEVICE)
        kinds = {"causal": (at, at), "whole": (at + tokens, at), "striped": (4 * at + 1, 4 * at + 2)}
        for kind, (q_at, k_at) in kinds.items():
            one = found[f"{kind}_{tokens}"] = block(report, f"{kind} block of {tokens}", (q, k, v), q_at, k_at)
            if HAS_GPU and kind != "striped":
                one["flash_attention_2"] = flash_attention_rate(q, k, v, kind == "causal")
                share = one[name_of(default_sizes(HEAD_SIZE, DTYPE))]["operations_per_s"] / one["flash_attention_2"]
                report.check(f"over FlashAttention 2, {kind} block of {tokens}", share, at_least=0.8, is_speed=True)
            report.record(blocks=found)


def block(
    report: Report,
    label: str,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q_at: torch.Tensor,
    k_at: torch.Tensor,
) -> dict[str, Any]:
    """Rate, error and the seconds of the first call, which compiles, by sizes of blocks."""
    q, k, v = qkv
    pairs = int(torch.searchsorted(k_at, q_at, right=True).sum())
    # The first query of a striped block sees nothing.
    rows = torch.linspace(1, q.shape[0] - 1, CHECKED_ROWS, device=DEVICE).long()
    wanted, wanted_lse = attention_in_double(q[rows], k, v, q_at[rows], k_at)
    found: dict[str, Any] = {}
    for sizes in BLOCK_SIZES:
        plan = plan_block(q_at, k_at, sizes)
        started_s = time.perf_counter()
        out, lse = positioned_block(q, k, v, plan, SCALE)
        synchronize()
        first_s = time.perf_counter() - started_s
        rate = 4.0 * pairs * HEADS * HEAD_SIZE / median_s(lambda plan=plan: positioned_block(q, k, v, plan, SCALE), 10)
        error, lse_error = relative_error(out[rows], wanted), float((lse[rows].double() - wanted_lse).abs().max())
        name = name_of(sizes)
        found[name] = {"operations_per_s": rate, "first_s": first_s, "error": error, "lse_error": lse_error}
        report.check(f"error, {label} by {name}", error, at_most=MAX_ERROR)
        report.check(f"error of the log-sum-exp, {label} by {name}", lse_error, at_most=MAX_LSE_ERROR)
    return found


def name_of(sizes: BlockSizes) -> str:
    return f"{sizes.queries}x{sizes.keys}"


def flash_attention_rate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> float:
    """Operations per second of torch's FlashAttention 2 on the same block."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tokens = q.shape[0]
    pairs = tokens * (tokens + 1) / 2 if is_causal else float(tokens**2)
    ours = [x.transpose(0, 1)[None] for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        seconds = median_s(
            lambda: torch.nn.functional.scaled_dot_product_attention(*ours, is_causal=is_causal, enable_gqa=True), 10
        )
    return 4.0 * pairs * HEADS * HEAD_SIZE / seconds


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("kernels", arguments.out, arguments.dry_run)
    report.expect("a copy", "at least 2.8 TB/s on an H100, 4.2 on an H200; a product 700 TFLOP/s")
    report.expect("gather, scatter, merge", "at least 0.85 of a copy (89, 89, 947 us on an H100)")
    report.expect("16 new tokens behind 4,096", "at most 15 us a layer where divided (2.8 us of reading), 60-120 whole")
    report.expect("a causal block of 16,384", "at least 300 TFLOP/s or 0.8 of FlashAttention 2")
    report.record(is_interpreted=triton_support.is_interpreted())
    ceilings = measure_ceilings()
    report.record(ceilings=ceilings._asdict())
    report.check("TB/s of a copy", ceilings.copy_bytes_per_s / 1e12, at_least=2.5, is_speed=True)
    report.check("TFLOP/s of a product", ceilings.operations_per_s / 1e12, at_least=600, is_speed=True)
    parts: dict[str, Callable[[], None]] = {
        "moves": lambda: moves(report, ceilings),
        "prefixes": lambda: prefixes(report, ceilings),
        "blocks": lambda: blocks(report),
    }
    for name, run in parts.items():
        started_s = time.perf_counter()
        try:
            run()
        except Exception as error:
            report.fail(name, error)
        report.record(**{f"{name}_took_s": time.perf_counter() - started_s})
        if HAS_GPU:
            torch.cuda.empty_cache()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
