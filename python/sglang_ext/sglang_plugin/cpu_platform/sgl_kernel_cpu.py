"""The CPU functions of `sgl_kernel` that serving reaches, in plain torch.

SGLang imports about ten CPU functions from `sgl_kernel` at module level. Ordinary serving calls only
`assign_req_to_token_pool_cpu`; the others belong to speculative decoding.
"""

from __future__ import annotations

from types import ModuleType

import torch

from sglang_ext.sglang_plugin.cpu_platform.missing import MissingObject

VERSION = "0+absent"


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


def populate(module: ModuleType) -> None:
    """Give the stand-in `sgl_kernel` what this file implements."""
    vars(module)["__version__"] = VERSION
    vars(module)["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool_cpu


def lookup(name: str) -> MissingObject:
    """A CPU function that is not implemented here; anything else does not exist in a CPU build.

    Raises AttributeError for a name that is not a CPU function, so that `try: from sgl_kernel import …`
    takes its fallback.
    """
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r} (stand-in of sglang-ext for the CPU)")
    return MissingObject(f"sgl_kernel.{name}")
