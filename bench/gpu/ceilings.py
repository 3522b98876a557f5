"""The device's read bandwidth, copy bandwidth and rate of matrix products, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from gpu.floor import Ceilings


class Device(NamedTuple):
    """Describes what was measured of it."""

    name: str
    ceilings: Ceilings
    copy_bytes_per_s: float  # bytes read plus bytes written


def median_s(run: Callable[[], object], repeats: int = 20, warm_ups: int = 3) -> float:
    """Median time of `run`, to the end of what it starts on the device."""
    for _ in range(warm_ups):
        run()
    times = []
    for _ in range(repeats):
        synchronize()
        started_s = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure() -> Device:
    """On random numbers, several times the size of the caches; a hundredth of it without a GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    read, copy = _bandwidths()
    rate = _product_rate()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # or an engine in this process would find 8 GB less
    # a copy reads too: whichever way reads fastest is the ceiling
    return Device(name, Ceilings(max(read, copy), rate), copy)


def _bandwidths() -> tuple[float, float]:
    has_gpu = torch.cuda.is_available()
    elements = 2**31 if has_gpu else 2**24
    source = torch.empty(elements, dtype=torch.bfloat16, device="cuda" if has_gpu else "cpu").uniform_()
    target = torch.empty_like(source)
    words = source.view(torch.int32)
    total_bytes = elements * source.element_size()
    return (
        total_bytes / median_s(lambda: torch.amax(words)),
        2 * total_bytes / median_s(lambda: target.copy_(source)),
    )


def _product_rate() -> float:
    has_gpu = torch.cuda.is_available()
    size, dtype, device = (8192, torch.bfloat16, "cuda") if has_gpu else (512, torch.float32, "cpu")
    a = torch.randn(size, size, dtype=dtype, device=device)
    b = torch.randn(size, size, dtype=dtype, device=device)
    return 2.0 * size**3 / median_s(lambda: a @ b)
