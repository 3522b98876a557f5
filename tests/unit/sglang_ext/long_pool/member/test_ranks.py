"""Ranks decide, vote and fail together."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from sglang_ext.long_pool.member.ranks import SINGLE_RANK, all_ranks_or_raise
from sglang_ext.long_pool.member.ring_attention import AttentionRule, DeferredErrorAttention
from sglang_ext.long_pool.mesh.mesh import MeshError
from support.group_ranks import ROUNDS, run_ranks, value_of


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_processes(size: int, tmp_path: Path) -> None:
    for rank, seen in enumerate(run_ranks(size, tmp_path)):
        assert (seen["size"], seen["rank"]) == (size, rank)
        assert seen["asked"] == (ROUNDS if rank == 0 else 0), "the first rank alone decides"
        assert seen["shared"] == [value_of(number) for number in range(ROUNDS)]
        assert seen["votes"] == [False] * size + [True]
        assert seen["pairs"] == [[True, False, False], []]
        assert seen["gathered"] == [{"rank": other} for other in range(size)]
        other = "another rank of this instance has failed"
        assert seen["errors"] == ["mine" if rank == number else other for number in range(size)] + ["none"]


def test_alone() -> None:
    assert SINGLE_RANK.share(lambda: 5) == 5
    assert SINGLE_RANK.all(True)
    assert SINGLE_RANK.all_of([True, False]) == [True, False]
    assert SINGLE_RANK.gather(5) == [5]
    with pytest.raises(MeshError, match="mine"), all_ranks_or_raise(SINGLE_RANK, MeshError):
        raise MeshError("mine")


def test_what_a_failed_step_has_used_does_not_live_on() -> None:
    """Its connections close when the step has failed, not when Python collects its garbage."""

    class Mesh:
        pass

    def step() -> weakref.ref[Mesh]:
        mesh = Mesh()
        reference = weakref.ref(mesh)
        try:
            with all_ranks_or_raise(SINGLE_RANK, MeshError):
                raise MeshError(f"with {mesh}")
        except MeshError:
            return reference

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


class Breaking:
    """Attention whose ring breaks in the second layer."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def attend(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        self.asked.append(layer)
        if layer == 1:
            raise MeshError("broken")
        return q * 2


def test_a_broken_ring_does_not_end_the_forward() -> None:
    ring = Breaking()
    attention = DeferredErrorAttention(ring)
    q = torch.ones(2, 1, 4, dtype=torch.bfloat16)
    assert (attention.attend(0, q, AttentionRule(1.0)) == 2).all()
    attention.check()
    for layer in (1, 2, 3):
        out = attention.attend(layer, q, AttentionRule(1.0))
        assert (out.shape, out.dtype) == (q.shape, torch.float32)
        assert not out.any()
    assert ring.asked == [0, 1], "a broken ring is not asked again"
    with pytest.raises(MeshError, match="broken"):
        attention.check()
