"""AROUND `HostKVCache.__init__`: the hierarchical cache (`--enable-hierarchical-cache`) in an engine for CPUs.

SGLang pins the memory of its host tier for CUDA, and copies KV between tiers with a kernel of `sgl_kernel`, which it
does not import for a CPU. There the host tier is ordinary memory, and the rows are copied by torch. Streams and events
of a CPU do nothing, so that a copy is done when it has been submitted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext.cpu.import_hook import absent_packages

if TYPE_CHECKING:
    import torch

IO_BACKEND = "direct"  # of SGLang's: copies with this one function
MEMORY_LAYOUT = "layer_first"  # of the host tier: that of the device
_KERNEL = "transfer_kv_direct"


def allocate(stock: Callable[..., None], host_pool: Any, *arguments: Any, **options: Any) -> None:
    """Make a host pool of ordinary memory, whose module copies rows with `copy_rows`."""
    if absent_packages(("sgl_kernel",)):
        options["pin_memory"] = False
        for base in type(host_pool).__mro__:
            if base.__module__.startswith("sglang.srt.mem_cache.pool_host."):
                vars(sys.modules[base.__module__]).setdefault(_KERNEL, copy_rows)
    stock(host_pool, *arguments, **options)


def copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows of every layer [slots, …]: those at `src_indices` [n] to `dst_indices` [n]. Pages do not matter."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]
