"""Short follow-ups that the pool computes count as arrivals of short prefills at the instances that compute them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits
from sglang_ext.long_pool.member.pool_member import FollowUp

pytestmark = pytest.mark.usefixtures("sglang_imported")


def test_short_ones_raise_the_rate_and_long_ones_do_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, of what a CPU has not
        from sglang_ext.long_pool.sglang.scheduler import SequenceParallelScheduler

    limits = InstanceLimits(page_tokens=1, max_chunk_tokens=8192, max_batch_tokens=8192, max_requests=64)
    prior = CostCoefficients(alpha_s=1e-8, token_s=1e-4, read_s=0.0, kappa_s=0.01, request_s=0.0)
    laps = Laps(LapsOptions(boundary_tokens=512), GraphGrid(), prior, limits)
    now_s = 100.0
    scheduler: Any = SimpleNamespace(_laps=SimpleNamespace(policy=laps, now_s=lambda: now_s))

    def computed(*follow_ups: FollowUp) -> None:
        member: Any = SimpleNamespace(take_follow_ups=lambda: list(follow_ups))
        SequenceParallelScheduler._count_follow_ups(scheduler, member)

    for _ in range(4):
        computed(FollowUp(2000, 4000))
        now_s += 0.5
    assert laps.short_per_s(now_s) == 0.0
    for _ in range(4):
        computed(FollowUp(50, 4000))
        now_s += 0.5
    assert laps.short_per_s(now_s) > 1.0
    assert laps.short_work_s(now_s) > 0.0
