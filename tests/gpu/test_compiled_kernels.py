"""What a first chunk has compiled serves the chunks of other sizes after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_ext_kernels.block_attention import (
    default_sizes,
    gather_kv,
    merge_states_,
    plan_block,
    positioned_block,
    scatter_kv_,
)

pytestmark = pytest.mark.gpu


def compiled(kernel: Any) -> int:
    """Return how many versions of a Triton kernel this process has compiled or loaded."""
    return sum(len(caches[0]) for caches in kernel.device_caches.values())


def attend(queries: int, keys: int) -> None:
    dtype = torch.bfloat16
    q = torch.randn(queries, 4, 64, device="cuda", dtype=dtype)
    kv = torch.randn(2, keys, 2, 64, device="cuda", dtype=dtype)
    plan = plan_block(
        torch.arange(keys, keys + queries, device="cuda"), torch.arange(keys, device="cuda"), default_sizes(64, dtype)
    )
    positioned_block(q, kv[0], kv[1], plan, 0.125)


def merge(first: int, last: int) -> None:
    """An odd number of heads: the sums of a row in the middle are not aligned."""
    out, lse = torch.zeros(200, 3, 64, device="cuda"), torch.zeros(200, 3, device="cuda")
    merge_states_(out[first:last], lse[first:last], out[first:last], lse[first:last])


def move(first: int, last: int) -> None:
    pool, slots = torch.zeros(200, 2, 64, device="cuda"), torch.arange(200, device="cuda")[first:last]
    scatter_kv_(pool, pool, slots, gather_kv(pool, pool, slots))


@pytest.mark.parametrize(
    ("kernel", "launch", "versions"),
    [("_positioned_block", attend, 1), ("_merge_states", merge, 1), ("_move_kv", move, 2)],
)
def test_no_layer_waits_for_a_kernel_of_other_sizes(
    kernel: str, launch: Callable[[int, int], None], versions: int
) -> None:
    from sglang_ext_kernels.on_gpu import attention_kernels, moving_kernels

    function = getattr(attention_kernels, kernel, None) or getattr(moving_kernels, kernel)
    before = compiled(function)
    launch(16, 128)
    first = compiled(function)
    assert first <= before + versions
    for sizes in ((1, 128), (1, 7), (16, 33), (5, 80), (32, 160)):
        launch(*sizes)
    assert compiled(function) == first
