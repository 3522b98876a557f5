"""The kernels against their plain references, on a GPU or in Triton's interpreter.

Without a GPU these run in a process and an environment of their own, which has Triton
(`tests/unit/sglang_ext_kernels/test_in_interpreter.py`): the engine on a CPU does without it.
"""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels import triton_support

if not (triton_support.is_interpreted() or (triton_support.is_installed() and torch.cuda.is_available())):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    """Where the tensors are."""
    return "cpu" if triton_support.is_interpreted() else "cuda"


@pytest.fixture
def float32_error(device: str) -> float:
    """What float32 results may differ by: a GPU adds in another order, and its exp2 and log2 are approximate."""
    return 2e-6 if device == "cpu" else 1e-5


@pytest.fixture
def generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(7)
