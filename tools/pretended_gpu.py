"""A Hopper GPU that is not there: what SGLang and flashinfer ask torch about a device before they compile or decide.

Nothing computes on it. Import it in a process of its own, before SGLang: what is asked once is remembered.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

HOPPER_CUDA = "13.0"
GIB = 2**30


def pretend(name: str = "NVIDIA H100 80GB HBM3", memory_bytes: int = 80 * GIB) -> None:
    """Let this process's torch answer as if it had one Hopper GPU of that memory, and were built for CUDA 13."""
    import torch

    facts = SimpleNamespace(
        name=name,
        major=9,
        minor=0,
        total_memory=memory_bytes,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        warp_size=32,
        L2_cache_size=50 * 2**20,
        is_integrated=False,
        uuid="GPU-pretended",
        gcnArchName="",
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": name,
        "get_device_properties": facts,
        "mem_get_info": (memory_bytes - GIB, memory_bytes),
        "is_bf16_supported": True,
        "set_device": None,
    }
    for function, answer in answers.items():
        setattr(torch.cuda, function, lambda *args, _answer=answer, **kwargs: _answer)
    torch.version.cuda = HOPPER_CUDA


def open_package(folder: Path, name: str) -> None:
    """Let `name` be imported from `folder` (which holds the top-level package) without what its `__init__` imports."""
    package = ModuleType(name)
    package.__path__ = [str(folder.joinpath(*name.split(".")))]
    sys.modules[name] = package
