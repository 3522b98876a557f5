"""Parts of absent packages that run on a CPU: `triton`'s definitions of kernels, and functions of `sgl_kernel`.

SGLang decorates kernels and calls small helpers of `triton` while it is imported, and imports about ten CPU functions
from `sgl_kernel` at module level. Ordinary serving calls only `assign_req_to_token_pool_cpu`; those of speculative
decoding are in `draft_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sglang_ext.cpu import draft_kernels
from sglang_ext.cpu.missing import MissingKernel, MissingObject

if TYPE_CHECKING:
    import torch

# Local version labels sort below every release, so version checks see an old triton.
VERSION = "0+absent"


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 0 for n <= 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`@triton.jit` and `@triton.jit(...)`: the kernel is kept as an object that refuses to be launched."""
    if function is None:
        return MissingKernel
    return MissingKernel(function)


def decorate_kernel(*args: Any, **options: Any) -> Callable[[Any], Any]:
    """`@triton.autotune(...)`, `@triton.heuristics(...)`: leave the kernel below as it is."""
    return lambda kernel: kernel


class Config:
    """Arguments of one autotuning candidate, stored and never used."""

    def __init__(
        self, kwargs: dict[str, Any] | None = None, num_warps: int = 4, num_stages: int = 2, **more: Any
    ) -> None:
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages


class Constexpr:
    """`tl.constexpr(value)`; also used as an annotation."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new KV slots into its row of the request-to-token table.

    `req_pool_indices`, `start_offset` and `end_offset` have shape (batch,); `req_to_token` has shape
    (rows, pool_len) and is modified in place: row `req_pool_indices[i]`, columns `start_offset[i]` to
    `end_offset[i]`, takes the next slots of `out_cache_loc`, whose length is the sum of the spans.

    Raises ValueError when the spans do not add up to `out_cache_loc` or leave the row.
    """
    rows, starts, ends = req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    spans = [end - start for start, end in zip(starts, ends, strict=True)]
    if sum(spans) != out_cache_loc.numel():
        raise ValueError(f"spans add up to {sum(spans)} slots, but {out_cache_loc.numel()} were given")
    if any(start < 0 or end < start or end > pool_len for start, end in zip(starts, ends, strict=True)):
        raise ValueError(f"a span lies outside a row of {pool_len} tokens")
    slots = out_cache_loc.to(req_to_token.dtype).split(spans)
    for row, start, end, row_slots in zip(rows, starts, ends, slots, strict=True):
        req_to_token[row, start:end] = row_slots


TOP_LEVEL: dict[str, Any] = {
    "__version__": VERSION,
    "cdiv": cdiv,
    "next_power_of_2": next_power_of_2,
    "jit": jit,
    "autotune": decorate_kernel,
    "heuristics": decorate_kernel,
    "Config": Config,
}
LANGUAGE: dict[str, Any] = {"constexpr": Constexpr, "cdiv": cdiv}
RECURRENT = "sgl_kernel.mamba"
# Definitions by module name.
DEFINITIONS: dict[str, dict[str, Any]] = {
    "triton": TOP_LEVEL,
    "triton.language": LANGUAGE,
    "triton.experimental.gluon": {"jit": jit},
    # torch looks here for a device that triton can compile for.
    "triton.backends": {"backends": {}},
    "sgl_kernel": {
        "__version__": VERSION,
        "assign_req_to_token_pool_cpu": assign_req_to_token_pool_cpu,
        **draft_kernels.FUNCTIONS,
    },
}


def populate(module: ModuleType) -> None:
    """Add to a stand-in module what this file, and `recurrent_kernels`, define for it."""
    vars(module).update(DEFINITIONS.get(module.__name__, {}))
    if module.__name__ == "sgl_kernel":
        from sglang_ext.cpu import recurrent_kernels

        recurrent_kernels.register_operators()
    elif module.__name__ == RECURRENT:
        from sglang_ext.cpu import recurrent_kernels

        vars(module).update(recurrent_kernels.FUNCTIONS)


def lookup_sgl_kernel(name: str) -> MissingObject:
    """A CPU function of `sgl_kernel` that is not implemented here; anything else does not exist in a CPU build.

    Raises AttributeError for a name that is not a CPU function, so that `try: from sgl_kernel import …`
    takes its fallback.
    """
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r} (stand-in of sglang-ext for the CPU)")
    return MissingObject(f"sgl_kernel.{name}")
