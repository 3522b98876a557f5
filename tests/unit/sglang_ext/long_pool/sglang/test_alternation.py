"""Chunks of a pool and own batches of an instance, in turn."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("sglang_imported")


def test_a_batch_behind_a_chunk_has_what_came_during_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, of what a CPU has not
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        from sglang_ext.laps.sglang.scheduler import LengthAwareScheduler
        from sglang_ext.long_pool.sglang.scheduler import SequenceParallelScheduler

    ran: list[str] = []
    queue: list[str] = []
    steps: list[str] = []

    def plan_batch(_: Any, running_batch: Any) -> NextBatchPlan:
        batch = list(queue)
        queue.clear()
        return NextBatchPlan(batch_to_run=batch or None, running_batch=running_batch)

    def compute() -> list[Any]:
        ran.append(steps.pop(0))
        return []

    class Member:
        take_orders = take_follow_ups = list
        has_step = property(lambda _: bool(steps))

    member: Any = Member()
    member.compute = compute
    scheduler: Any = SequenceParallelScheduler.__new__(SequenceParallelScheduler)
    scheduler._member, scheduler._laps, scheduler._is_batch_next = member, None, False
    scheduler._shared, scheduler._ending, scheduler._sending, scheduler._resumed = {}, {}, {}, []
    monkeypatch.setattr(LengthAwareScheduler, "get_new_batch_prefill", plan_batch)
    monkeypatch.setattr(SequenceParallelScheduler, "_report_load", lambda *_: None)

    def round_of(*arrivals: str) -> None:
        queue.extend(arrivals)
        plan = SequenceParallelScheduler.get_new_batch_prefill(scheduler, None)
        if plan.batch_to_run:
            ran.append("+".join(plan.batch_to_run))

    steps += ["chunk 1", "chunk 2", "chunk 3", "chunk 4"]
    round_of("a")  # the chunk had been ordered before it came
    round_of("b")  # which came during the chunk
    round_of()
    round_of()
    round_of("c")
    round_of("d")
    assert ran == ["chunk 1", "a+b", "chunk 2", "chunk 3", "c", "chunk 4"]
    round_of()
    round_of("e")
    assert ran[6:] == ["d", "e"]


@pytest.mark.parametrize("answer", ["chunk", "prompt", "nothing"])
def test_a_batch_waits_for_the_answer_to_an_offer(answer: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, of what a CPU has not
        from sglang_ext.long_pool.sglang.scheduler import SequenceParallelScheduler

    resumed: list[str] = []

    class Member:
        asked = 0
        has_step = False

        def await_step(self) -> list[str]:
            self.asked += 1
            self.has_step = answer == "chunk"
            return ["prompt"] if answer == "prompt" else []

    class Scheduler(SequenceParallelScheduler):
        def _resume(self, outcome: Any) -> None:
            resumed.append(outcome)

    member: Any = Member()
    scheduler: Any = Scheduler.__new__(Scheduler)
    scheduler._member, scheduler._has_offered = member, False
    assert not scheduler._gives_way()
    assert member.asked == 0, "nothing has been offered"
    scheduler._has_offered = True
    assert scheduler._gives_way() == (answer != "nothing")
    assert (member.asked, resumed) == (1, ["prompt"] if answer == "prompt" else [])


def test_no_batch_is_planned_where_the_answer_to_an_offer_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, of what a CPU has not
        from sglang_ext.laps.sglang.scheduler import LengthAwareScheduler
        from sglang_ext.long_pool.sglang.scheduler import SequenceParallelScheduler

    planned: list[str] = []
    offers = [True, False]

    class Member:
        has_step = False

        def await_step(self) -> list[Any]:
            self.has_step = True
            return []

    def follow_queue(scheduler: Any, _: Any) -> None:
        scheduler._has_offered = offers.pop(0)

    def agree(_: Any) -> Any:
        planned.append("a batch")
        return None, ()

    for name in ("_park", "_end_failed", "_admit_ready_grammars", "_count_arrivals"):
        monkeypatch.setattr(LengthAwareScheduler, name, lambda *_: None)
    monkeypatch.setattr(SequenceParallelScheduler, "_follow_queue", follow_queue)
    scheduler: Any = SequenceParallelScheduler.__new__(SequenceParallelScheduler)
    scheduler._member, scheduler._is_undivided = Member(), True
    scheduler.waiting_queue, scheduler._parked = ["another prompt"], []
    laps: Any = SimpleNamespace(
        stages=1, now_s=lambda: 0.0, publish=lambda *_: None, agreement=SimpleNamespace(agree=agree)
    )
    assert scheduler._plan_batch(laps, None).batch_to_run is None
    assert planned == [], "the chunk comes first"
    scheduler._plan_batch(laps, None)
    assert planned == ["a batch"]


def test_a_prompt_that_is_left_to_its_instance_is_as_old_as_it_is_to_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, of what a CPU has not
        from sglang_ext.long_pool.decide.orders import DeclineReason
        from sglang_ext.long_pool.member.pool_member import Declined
        from sglang_ext.long_pool.sglang import scheduler as pool_scheduler

    scheduler: Any = pool_scheduler.SequenceParallelScheduler.__new__(pool_scheduler.SequenceParallelScheduler)
    request, entry = SimpleNamespace(disagg_kv_sender=None, last_node=None), SimpleNamespace()
    counted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pool_scheduler, "entry_of", lambda _: entry)
    monkeypatch.setattr(pool_scheduler, "count_wait", lambda *arguments: counted.append(arguments))
    for name in ("_send_the_rest", "match_kv_cache", "reclassify"):
        monkeypatch.setattr(pool_scheduler, name, lambda *_, **__: None)
    monkeypatch.setattr(pool_scheduler.SequenceParallelScheduler, "_is_too_long", lambda *_: False)
    scheduler._laps = SimpleNamespace(policy=None, now_s=lambda: 100.0)
    scheduler.tree_cache = SimpleNamespace(lock=lambda _: None, unlock=lambda _: None)
    for waited_s in (2.0, None):
        shared: Any = pool_scheduler._Shared
        scheduler._shared = {1: shared(request, 0, None, None)}
        scheduler._ending, scheduler._sending, scheduler._resumed, scheduler.waiting_queue = {}, {}, [], []
        scheduler._take_over(Declined(1, DeclineReason.ALONE_IS_BEST, waited_s=waited_s))
        assert scheduler.waiting_queue == [request]
    assert counted == [(request, entry, 2.0, 100.0)]
