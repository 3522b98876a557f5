"""Names of `model_shapes` for scripts that still ask for them here."""

from __future__ import annotations

from typing import NamedTuple

from gpu.model_shapes import Shape, floor_s, prefill_bytes, prefill_operations

__all__ = ["Ceilings", "Shape", "floor_s", "prefill_bytes", "prefill_operations"]


class Ceilings(NamedTuple):
    """Of the device, as measured."""

    read_bytes_per_s: float
    operations_per_s: float
