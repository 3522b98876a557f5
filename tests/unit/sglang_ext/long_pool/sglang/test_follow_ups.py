"""Work of an instance's own queues is counted there, and what a pool computes is not."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, PriorityClass
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


def test_a_prompt_that_goes_to_the_pool_is_work_of_its_instance_once_it_comes_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, of what a CPU has not
        from sglang_ext.laps.sglang.queued_request import LapsEntry, remember
        from sglang_ext.long_pool.sglang.scheduler import SequenceParallelScheduler
        from sglang_ext.types import LengthClass

    counted: list[tuple[Any, ...]] = []
    laps: Any = SimpleNamespace(
        policy=SimpleNamespace(record_arrival=lambda *arrival: counted.append(arrival)), now_s=lambda: 7.0
    )
    requests = [
        SimpleNamespace(
            origin_input_ids=[0] * tokens, output_ids=[], prefix_indices=[], host_hit_length=0, prefix_len=0
        )
        for tokens in (900, 30)
    ]
    for key, request in enumerate(requests):
        length_class = LengthClass.SHORT if key else LengthClass.LONG
        remember(request, LapsEntry(key, length_class, 0, 0.0, 9.0, PriorityClass.NORMAL))
    scheduler: Any = SimpleNamespace(_uncounted=list(requests), _waiting={1})  # the first has been offered
    SequenceParallelScheduler._count_arrivals(scheduler, laps)
    assert counted == [(7.0, LengthClass.SHORT, 30, 0, 9.0)]
    scheduler._uncounted, scheduler._waiting = list(requests), {0, 1}
    SequenceParallelScheduler._count_arrivals(scheduler, laps)
    assert counted[1:] == [(7.0, LengthClass.LONG, 900, 0, 9.0)]
    assert scheduler._uncounted == []


def test_a_chunk_of_the_pool_is_no_part_of_the_next_batch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, of what a CPU has not
        from sglang_ext.laps.sglang.instance import IterationClock
        from sglang_ext.long_pool.sglang.scheduler import SequenceParallelScheduler
        from sglang_ext.types import LengthClass

    clock = IterationClock()
    scheduler: Any = SimpleNamespace(_laps=SimpleNamespace(clock=clock), _resume=lambda outcome: None)

    def batch_after_a_round(now_s: float, *, has_step: bool) -> float:
        """A round that begins then, with a chunk of three seconds if there is one, and a batch of one second."""
        member: Any = SimpleNamespace(has_step=has_step, compute=list)
        SequenceParallelScheduler._compute_shared(scheduler, member)
        if has_step:
            now_s += 3.0
        clock.record_round(now_s)
        clock.record_launch(now_s, LengthClass.SHORT, [8], [0])
        sample = clock.record_result(now_s + 1.0)
        assert sample is not None
        return sample.duration_s

    assert batch_after_a_round(0.0, has_step=False) == 1.0
    assert batch_after_a_round(1.0, has_step=True) == 1.0
    assert batch_after_a_round(5.5, has_step=False) == 1.5  # of a busy instance: what passes between is in it
