"""The policy in a loop with a cost model for the machine: bounded waits, shares, memory, no starvation."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import Batching, LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import (
    DispatchReason,
    LapsMode,
    PriorityClass,
    RoundSnapshot,
)
from sglang_ext.types import LengthClass
from support.examples import examples
from support.prefill_loop import (
    CPU,
    GPU,
    GRID,
    LIMITS,
    LONG,
    SHORT,
    Arrival,
    Outcome,
    mixed,
    policy,
    run_laps,
)


def waits_s(outcome: Outcome, length_class: LengthClass) -> dict[int, float]:
    """Time from arrival to the first action that took the request."""
    waits: dict[int, float] = {}
    for step in outcome.steps:
        queue = {request.key: request for request in step.snapshot.queue}
        keys = step.batch.keys
        for key in keys:
            if queue[key].length_class is length_class:
                waits.setdefault(key, step.now_s - queue[key].arrival_s)
    return waits


def test_shorts_wait_for_little_more_than_a_chunk() -> None:
    random = Random(1)
    laps = policy(round_ms=50.0)
    outcome = run_laps(laps, mixed(random, 1500, 0.8, CPU), CPU, noise=lambda: random.lognormvariate(0, 0.05))
    waits = sorted(waits_s(outcome, SHORT).values())
    assert waits[int(0.9 * len(waits))] < 0.05
    assert waits[-1] < 0.2


@pytest.mark.slow
def test_shorts_gain_and_longs_hardly_lose_against_first_come_first_served() -> None:
    random = Random(2)
    arrivals = mixed(random, 3000, 0.9, CPU)
    ours = run_laps(policy(), arrivals, CPU)
    fcfs = first_come_first_served(arrivals, CPU, 2048)
    assert 3 * ours.ttft_s(SHORT, 0.9) < _quantile(fcfs[SHORT], 0.9)
    assert ours.ttft_s(LONG, 0.9) < 1.15 * _quantile(fcfs[LONG], 0.9)


def first_come_first_served(
    arrivals: Sequence[Arrival], truth: CostCoefficients, chunk_tokens: int
) -> dict[LengthClass, list[float]]:
    """Chunked prefill that mixes everybody in order of arrival: what an engine does without this policy."""
    ttfts_s: dict[LengthClass, list[float]] = {SHORT: [], LONG: []}
    now_s, index = 0.0, 0
    queue: list[tuple[Arrival, int]] = []  # and the tokens done
    while index < len(arrivals) or queue:
        while index < len(arrivals) and arrivals[index].at_s <= now_s:
            queue.append((arrivals[index], 0))
            index += 1
        if not queue:
            now_s = arrivals[index].at_s
            continue
        room, work, cached = chunk_tokens, 0, 0
        left: list[tuple[Arrival, int]] = []
        ended: list[Arrival] = []
        for arrival, done in queue:
            tokens = min(room, arrival.new_tokens - done)
            room -= tokens
            work += tokens * (tokens + 2 * done)
            cached += done if tokens else 0
            if done + tokens == arrival.new_tokens:
                ended.append(arrival)
            else:
                left.append((arrival, done + tokens))
        now_s += truth.iteration_s(float(work), chunk_tokens - room, cached)
        for arrival in ended:
            ttfts_s[SHORT if arrival.new_tokens <= 256 else LONG].append(now_s - arrival.at_s)
        queue = left
    return ttfts_s


def _quantile(values: list[float], quantile: float) -> float:
    return sorted(values)[int(quantile * len(values))]


@pytest.mark.slow
def test_longs_progress_at_their_share_against_any_number_of_shorts() -> None:
    """More shorts than the machine can serve: a long prefill still gets (1 - rho_max) of the time."""
    arrivals = [Arrival(0.0, 10_000)] + [Arrival(0.005 * index, 200) for index in range(500)]
    outcome = run_laps(policy(round_ms=50.0), arrivals, CPU)
    (long_s,) = outcome.ttfts_s(LONG)
    alone_s = run_laps(policy(round_ms=50.0), arrivals[:1], CPU).ttfts_s(LONG)[0]
    share = 1 - LapsOptions().rho_max
    assert long_s < alone_s / share * 1.15 + 0.1


@pytest.mark.slow
# What has begun holds the memory that prefills with deadlines wait for.
@example(37230, 0.8647527258743541, 0.9424106827715744, LapsMode.SHORT, False, 4096, Batching.SLA)
@example(36295, 0.6790087908791927, 0.6406492911525408, LapsMode.BOTH, False, 4096, Batching.TOKEN_MAX)
@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 100_000),
    load=st.floats(0.1, 0.95),
    long_share=st.floats(0, 1),
    mode=st.sampled_from(LapsMode),
    is_gpu=st.booleans(),
    kv_tokens=st.sampled_from([4096, 9000, 1_000_000]),
    batching=st.sampled_from(Batching),
)
def test_nothing_starves_within_capacity(
    seed: int,
    load: float,
    long_share: float,
    mode: LapsMode,
    is_gpu: bool,
    kv_tokens: int,
    batching: Batching,
) -> None:
    """Any arrival sequence within capacity: everybody ends, at most a few busy periods after arrival. Plans, memory
    and progress are asserted at every step by the loop.
    """
    random = Random(seed)
    truth = GPU if is_gpu else CPU
    arrivals = [
        arrival._replace(
            priority=random.choice(list(PriorityClass)), ttft_slo_s=random.choice([None, None, 0.001, 0.5, 60.0])
        )
        for arrival in mixed(random, 150, load, truth, long_share)
    ]
    page = random.choice([1, 16])
    limits = LIMITS._replace(page_tokens=page)
    laps = policy(truth, GRID if is_gpu else None, limits, mode=mode, batching=batching)
    outcome = run_laps(laps, arrivals, truth, kv_tokens=kv_tokens, limits=limits)
    assert len(outcome.ended) == 150
    work_s = sum(step.duration_s for step in outcome.steps)
    assert max(item.ttft_s for item in outcome.ended) <= work_s + 0.1 * len(outcome.steps) + 1.0


@pytest.mark.slow
@pytest.mark.parametrize("priority", PriorityClass)
def test_the_least_urgent_waits_a_bounded_time_at_full_load(priority: PriorityClass) -> None:
    """One prefill of each kind without a deadline of any use, against a stream of urgent ones at 95 % load."""
    random = Random(9)
    stream = [
        arrival._replace(priority=PriorityClass.REAL_TIME, ttft_slo_s=0.01)
        for arrival in mixed(random, 2000, 0.95, CPU, 0.3)
    ]
    for tokens in (100, 3000):
        victim = Arrival(stream[100].at_s, tokens, priority=priority, ttft_slo_s=1e6)
        outcome = run_laps(policy(age_s=1.0), [*stream, victim], CPU)
        ended = [item for item in outcome.ended if item.total_tokens == tokens]
        assert max(item.ttft_s for item in ended) < (priority + 2) * 1.0 + 5.0
    assert outcome.end_s > 30


def test_memory_is_never_promised_twice() -> None:
    random = Random(11)
    arrivals = mixed(random, 300, 0.95, CPU, 0.8)
    outcome = run_laps(policy(max_parked=8), arrivals, CPU, kv_tokens=9000)
    assert len(outcome.ended) == 300
    parked = [sum(request.is_started for request in step.snapshot.queue) for step in outcome.steps]
    assert max(parked) >= 2
    for step in outcome.steps:
        held = sum(r.total_tokens - r.new_tokens for r in step.snapshot.queue if r.is_started)
        assert held + step.snapshot.free_kv_tokens == 9000


def test_no_more_are_parked_than_allowed() -> None:
    outcome = run_laps(policy(max_parked=1), mixed(Random(12), 300, 0.95, CPU, 0.8), CPU)
    assert max(sum(r.is_started for r in step.snapshot.queue) for step in outcome.steps) == 2


def test_batches_deepen_where_seats_are_free_and_waiting_pays() -> None:
    random = Random(13)
    now_s, arrivals = 0.0, []
    for _ in range(3000):
        now_s += random.expovariate(1500.0)
        arrivals.append(Arrival(now_s, random.randint(40, 64)))
    laps = policy(GPU, GRID)
    outcome = run_laps(laps, arrivals, GPU)
    batches = [step.batch for step in outcome.steps if step.batch.is_short]
    assert 3000 / len(batches) > 8
    assert sum(batch.shape == (64, 32) for batch in batches) > len(batches) / 2
    for batch in batches:  # the others would compute more than twice their tokens
        assert batch.shape is not None or len(batch.keys) > 32 or 2 * batch.new_tokens < 64 * 32
    assert outcome.ttft_s(SHORT, 0.99) < 0.1


def test_token_max_gathers_tokens() -> None:
    arrivals = [Arrival(0.001 * index, 50) for index in range(1000)]
    laps = policy(GPU, batching=Batching.TOKEN_MAX, token_max=1000, t_max_ms=1000.0)
    outcome = run_laps(laps, arrivals, GPU)
    actions = [step.batch for step in outcome.steps]
    assert {action.reason for action in actions} <= {DispatchReason.TOKENS, DispatchReason.WINDOW}
    tokens = [action.new_tokens for action in actions[:-1] if action.is_short]
    assert min(tokens) >= 1000
    assert not any(item.is_late for item in outcome.ended)


def test_a_wrong_prior_is_unlearned() -> None:
    random = Random(14)
    prior = CostCoefficients.from_throughput(200_000, 0.0001)
    laps = Laps(LapsOptions(), GraphGrid(), prior, LIMITS)
    run_laps(laps, mixed(random, 600, 0.7, CPU), CPU, noise=lambda: random.lognormvariate(0, 0.03))
    fit = laps.report(RoundSnapshot(1e6, (), 1000)).fit
    assert fit.error_p50 is not None
    assert fit.error_p50 < 0.1
    assert fit.token_s == pytest.approx(CPU.token_s, rel=0.1)
