"""The part of `triton` that runs while SGLang is imported: decorators that define kernels, and small helpers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_ext.sglang_plugin.cpu_platform.missing import MissingKernel

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
# Definitions by module name.
DEFINITIONS: dict[str, dict[str, Any]] = {
    "triton": TOP_LEVEL,
    "triton.language": LANGUAGE,
    "triton.experimental.gluon": {"jit": jit},
    # torch looks here for a device that triton can compile for.
    "triton.backends": {"backends": {}},
}


def populate(module: ModuleType) -> None:
    """Add to a stand-in module of the triton family what this file defines for it."""
    vars(module).update(DEFINITIONS.get(module.__name__, {}))
