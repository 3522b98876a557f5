"""The floor of a prefill on a device: bytes and operations that cannot be saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from gpu.measure import Ceilings
from gpu.model_shapes import SHAPES, Shape, floor_s, prefill_bytes, prefill_operations

SMALL = Shape(hidden=4, layers=2, heads=2, kv_heads=1, intermediate=8, vocabulary=10)


def test_bytes_and_operations_by_hand() -> None:
    # two layers of q, o: 2 x 16; k, v: 2 x 8; gate, up, down: 3 x 32
    assert SMALL.body_parameters == 2 * (32 + 16 + 96)
    assert SMALL.kv_bytes_per_token == 2 * 2 * 1 * 2 * 2
    weights = (288 + 40) * 2
    assert prefill_bytes(SMALL, 3, 2) == weights + 6 * 16 + 6 * 8
    assert prefill_bytes(SMALL, 3, 2, prefix_tokens=5) == weights + 16 * 16 + 6 * 8
    products = 2 * (6 * 288 + 2 * 40)
    assert prefill_operations(SMALL, 3, 2) == products + 4 * (2 * 6) * 4 * 2
    assert prefill_operations(SMALL, 3, 2, prefix_tokens=5) == products + 4 * (2 * 21) * 4 * 2


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"), [("qwen2.5-7b", 7.62, 56), ("qwen2.5-14b", 14.77, 192), ("qwen2.5-32b", 32.76, 256)]
)
def test_the_models_are_those(name: str, billions: float, kv_kib: int) -> None:
    shape = SHAPES[name]
    assert (shape.body_parameters + 2 * shape.head_parameters) / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.kv_bytes_per_token == kv_kib * 1024


def test_a_short_prefill_is_bound_by_memory_a_long_one_by_arithmetic() -> None:
    shape, ceilings = (
        SHAPES["qwen2.5-7b"],
        Ceilings(copy_bytes_per_s=4.0e12, read_bytes_per_s=4.0e12, operations_per_s=8.0e14),
    )
    assert floor_s(shape, ceilings, 8, 1) == prefill_bytes(shape, 8, 1) / 4.0e12
    assert floor_s(shape, ceilings, 256, 64) == prefill_operations(shape, 256, 64) / 8.0e14
    assert floor_s(shape, ceilings, 8, 1) == pytest.approx(3.53e-3, rel=0.01)
