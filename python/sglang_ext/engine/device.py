"""The devices of this machine: GPUs, or only cores, and how many."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class MachineFacts:
    """The facts that launch flags depend on."""

    device: Device
    core_ids: tuple[int, ...]  # cores that this process may use
    memory_bytes: int  # of the machine, or of its container where that is less

    def __post_init__(self) -> None:
        if not self.core_ids:
            raise ValueError("a machine has at least one core")


def inspect_machine(device: Device | None = None) -> MachineFacts:
    """Look at this machine. `device` overrides what is found."""
    return MachineFacts(
        device=device or (Device.CUDA if cuda_device_count() and torch_has_cuda() else Device.CPU),
        core_ids=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=memory_bytes(),
    )


def cuda_device_count() -> int:
    """CUDA devices that the driver reports; 0 without a driver. Does not import torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built with CUDA, read from its metadata without importing it."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return "+cpu" not in version


def memory_bytes() -> int:
    """Memory that this process can hope for: the machine's, or its control group's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            text = limit.read().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total
