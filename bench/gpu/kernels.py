"""The kernels of this project against what the device can do: correctness first, then rates.

    python -m gpu.kernels --out FILE [--small]

Attention: Triton on zigzag and striped blocks, flashinfer with log-sum-exp where it is installed, each against
FlashAttention 2 (torch's) on the same block; merge, gather and scatter against the measured copy bandwidth; a few
tokens behind long prefixes against SGLang's kernel.
`--small` takes sizes for a dry run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu.ceilings import measure, median_s
from gpu.prefixes import measure_prefixes
from sglang_ext_kernels import flashinfer_block, triton_support
from sglang_ext_kernels.block_attention import (
    BlockSizes,
    attention_block_reference,
    default_sizes,
    gather_kv,
    merge_states_,
    plan_block,
    positioned_block,
    scatter_kv_,
)
from support.result import write_json

HEADS, KV_HEADS, SIZE = 28, 4, 128
SCALE = SIZE**-0.5
CANDIDATES = (BlockSizes(128, 64), BlockSizes(128, 128), BlockSizes(64, 64))
Attend = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def draw(tokens: int, heads: int, device: str) -> torch.Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(tokens, heads, SIZE, device=device, dtype=dtype)


def visible_pairs(q_at: torch.Tensor, k_at: torch.Tensor) -> int:
    return int(torch.searchsorted(k_at.contiguous(), q_at.contiguous(), right=True).sum())


def relative_error(
    got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> float:
    """Against float64 on the CPU, over a sample of the queries."""
    rows = torch.linspace(0, q.shape[0] - 1, min(64, q.shape[0])).long()
    arguments = (q[rows.to(q.device)].cpu().double(), k.cpu().double(), v.cpu().double())
    wanted = attention_in_double(*arguments, visible.cpu()[rows])
    sample = got.cpu().double()[rows]
    return float((sample - wanted).norm() / wanted.norm())


def attention_in_double(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def attention(tokens: int, device: str) -> dict[str, Any]:
    """A causal block, a whole block and a striped one of `tokens` queries and keys."""
    q, k, v = draw(tokens, HEADS, device), draw(tokens, KV_HEADS, device), draw(tokens, KV_HEADS, device)
    at = torch.arange(tokens, device=device)
    kinds = {"causal": (at, at), "whole": (at + tokens, at), "striped": (4 * at + 1, 4 * at + 2)}
    found: dict[str, Any] = {"tokens": tokens}
    for kind, (q_at, k_at) in kinds.items():
        operations = 4.0 * visible_pairs(q_at, k_at) * HEADS * SIZE
        visible = k_at[None, :] <= q_at[:, None]
        rates = {}
        for sizes in CANDIDATES if device == "cuda" else (default_sizes(SIZE, q.dtype),):
            plan = plan_block(q_at, k_at, sizes)
            out, _ = positioned_block(q, k, v, plan, SCALE)
            seen = visible.any(dim=1)
            rates[f"triton_{sizes.queries}x{sizes.keys}"] = operations / median_s(
                lambda plan=plan: positioned_block(q, k, v, plan, SCALE), *repeats(device)
            )
            found[f"{kind}_error"] = relative_error(out[seen], q[seen], k, v, visible[seen])
        is_causal = kind != "whole"
        rates["flash_attention_2"] = _sdpa_operations(tokens, is_causal) / median_s(
            lambda is_causal=is_causal: _sdpa(q, k, v, is_causal), *repeats(device)
        )
        if kind != "striped" and flashinfer_block.can_run(q, v) and "flashinfer_failed" not in found:
            try:
                of_rates, of_errors = flashinfer(q, k, v, visible, operations, is_causal)
            except Exception as error:
                # Its kernels are compiled where they run, and a machine may lack what that needs.
                found["flashinfer_failed"] = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            else:
                rates |= of_rates
                found |= {f"{kind}_{name}": value for name, value in of_errors.items()}
        found[kind] = rates
    return found


def flashinfer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, operations: float, is_causal: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Its rates with and without log-sum-exp, and its errors."""
    out, lse = flashinfer_block.flashinfer_block(q, k, v, SCALE, is_causal)
    rates = {
        "flashinfer_lse": operations / median_s(lambda: flashinfer_block.flashinfer_block(q, k, v, SCALE, is_causal)),
        "flashinfer": operations / median_s(lambda: _flashinfer(q, k, v, is_causal)),
    }
    rows = slice(q.shape[0] - 16, q.shape[0])
    _, wanted_lse = attention_block_reference(q[rows], k, v, SCALE, visible[rows])
    errors = {
        "flashinfer_error": relative_error(out, q, k, v, visible),
        "flashinfer_lse_error": float((lse[rows] - wanted_lse).abs().max()),
    }
    return rates, errors


def repeats(device: str) -> tuple[int, int]:
    return (20, 3) if device == "cuda" else (1, 0)


def moves(tokens: int, device: str) -> dict[str, float]:
    """Bytes per second, read and written, of merge, gather and scatter."""
    out, other = (torch.randn(tokens, HEADS, SIZE, device=device) for _ in range(2))
    lse, other_lse = (torch.randn(tokens, HEADS, device=device) for _ in range(2))
    pools = [draw(2 * tokens, KV_HEADS, device) for _ in range(2)]
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    packed = gather_kv(*pools, slots)
    merged_bytes = 3 * out.numel() * 4 + 3 * lse.numel() * 4
    moved_bytes = 2 * packed.numel() * packed.element_size()
    return {
        "merge": merged_bytes / median_s(lambda: merge_states_(out, lse, other, other_lse), *repeats(device)),
        "gather": moved_bytes / median_s(lambda: gather_kv(*pools, slots), *repeats(device)),
        "scatter": moved_bytes / median_s(lambda: scatter_kv_(*pools, slots, packed), *repeats(device)),
    }


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    backend = SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _sdpa_operations(tokens: int, is_causal: bool) -> float:
    pairs = tokens * (tokens + 1) // 2 if is_causal else tokens * tokens
    return 4.0 * pairs * HEADS * SIZE


def _flashinfer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> object:
    import flashinfer

    return flashinfer.single_prefill_with_kv_cache(q, k, v, causal=is_causal, sm_scale=SCALE)


def ratios(blocks: list[dict[str, Any]], rates: dict[str, float], copy_bytes_per_s: float) -> dict[str, float]:
    """Return what the aims are about, worst of the sizes."""
    found = {f"{name}_ratio": rate / copy_bytes_per_s for name, rate in rates.items()}
    striped = [
        max(rate for name, rate in block["striped"].items() if name.startswith("triton"))
        / block["striped"]["flash_attention_2"]
        for block in blocks
    ]
    if striped:
        found["striped_ratio"] = min(striped)
    with_lse = [
        block[kind]["flashinfer_lse"] / block[kind]["flashinfer"]
        for block in blocks
        for kind in ("causal", "whole")
        if "flashinfer" in block[kind]
    ]
    if with_lse:
        found["flashinfer_ratio"] = min(with_lse)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--within", type=float, default=500.0, help="no size is begun later (s; default: 500)")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, move_tokens = ([64], 256) if arguments.small else ([4096, 8192, 16384], 65536)
    end_s = time.perf_counter() + arguments.within
    found = measure()
    blocks: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    prefixes: list[dict[str, Any]] = []

    def record() -> None:
        values = {
            "device": found.name,
            "is_interpreted": triton_support.is_interpreted(),
            "copy_bytes_per_s": found.copy_bytes_per_s,
            "blocks": blocks,
            "moves_bytes_per_s": rates,
            "prefixes": prefixes,
            "ratios": ratios(blocks, rates, found.copy_bytes_per_s),
        }
        write_json(arguments.out, values)

    rates |= moves(move_tokens, device)
    record()
    prefixes += measure_prefixes(device, found.ceilings.read_bytes_per_s)
    record()
    for tokens in sizes:
        if time.perf_counter() > end_s:
            break
        blocks.append(attention(tokens, device))
        record()
    return 0


if __name__ == "__main__":
    sys.exit(main())
