"""AROUND `KVCacheConfigurator.configure`: keys and values in FP8 (`--kv-cache-dtype fp8_e4m3`) on a CPU without AMX.

SGLang admits them there for its AMX kernels and for keys and values of heads only. Its pools of other devices keep
rows of any kind as bytes; a CPU gets the same pools, and attention widens the rows that it reads to the type that it
computes in. Values are stored unscaled, as on other devices where a model has no scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.cpu.import_hook import absent_packages


def configure(stock: Callable[..., Any], configurator: Any, *arguments: Any, **options: Any) -> Any:
    """Return what SGLang sets up; where KV is FP8, it sees a platform that is no CPU."""
    from sglang.srt.mem_cache import kv_cache_configurator as module

    if configurator.kv_cache_dtype != torch.float8_e4m3fn or not absent_packages(("sgl_kernel",)):
        return stock(configurator, *arguments, **options)
    platform = module.current_platform
    module.current_platform = _OtherDevice(platform)
    try:
        return stock(configurator, *arguments, **options)
    finally:
        module.current_platform = platform


class _OtherDevice:
    """A platform that does not say that it is a CPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False


def take_rows(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows [n, …] of a pool [slots, …] at `slots` [n], in `dtype`; torch selects rows of FP8 as bytes."""
    if pool.element_size() > 1:
        return pool.index_select(0, slots).to(dtype)
    return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).to(dtype)
