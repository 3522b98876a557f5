"""Describes whether Triton's kernels can run on a tensor here: on a CUDA device, or anywhere under Triton's
interpreter."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch


@cache
def is_installed() -> bool:
    """Return whether the triton package is there; a stand-in for it is not found this way."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether kernels run on the CPU, in Triton's interpreter."""
    return is_installed() and os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(x: torch.Tensor) -> bool:
    """Return whether operations on `x` take their Triton kernel; if not, the plain one."""
    return is_installed() and (x.is_cuda or is_interpreted())
