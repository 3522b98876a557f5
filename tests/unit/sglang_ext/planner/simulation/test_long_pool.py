"""The long pool in simulation: overload that ends, KV that waits for decode, noise, offers without tickets."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean, pstdev

import pytest

from baselines.prefill_orders import fcfs
from baselines.systems import ClusterSystem, SystemOptions, build_cluster
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.pool_schedule import fastest_s, min_work_s
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.decide.table1 import fitted_candidates
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec, Failure
from sglang_ext.planner.simulation.decode import DecodeSpec
from sglang_ext.planner.simulation.events import EventLoop, ServedPrefill, SimRequest
from sglang_ext.planner.simulation.long_pool import LongPool, LongPoolOptions
from sglang_ext.planner.simulation.run import Collector, Outcome, RunOptions, simulate

INSTANCES = 16
CANDIDATES = fitted_candidates(INSTANCES)
ALONE = (SpCandidate(1, SpCost(0.0, 1e-3, 0.0, 0.0)),)
LIMIT_FACTOR = 25.0  # of the mean time without a queue: the deadline


class Overload:
    """Poisson arrivals of 4K to 60K tokens at a share of what 16 instances can carry, and `extra` more at 30 s."""

    def __init__(self, requests: int, load: float, extra: int = 0) -> None:
        draws = Random(0)
        low, high = math.log(4096), math.log(60_000)
        tokens = [round(math.exp(draws.uniform(low, high))) for _ in range(requests + extra)]
        rate_per_s = load * INSTANCES / fmean(min_work_s(CANDIDATES, 0, one) for one in tokens)
        arrivals_s = [draws.expovariate(rate_per_s) for _ in range(requests)]
        for at in range(1, requests):
            arrivals_s[at] += arrivals_s[at - 1]
        prompts = sorted(zip([*arrivals_s, *[30.0] * extra], tokens, strict=True))
        self.requests = [SimRequest(key, at_s, count, 1) for key, (at_s, count) in enumerate(prompts)]
        self.limit_s = LIMIT_FACTOR * fmean(fastest_s(CANDIDATES, 0, one) for one in tokens)

    def late(self, failures: tuple[Failure, ...] = ()) -> tuple[int, int]:
        """How many are late of all, and of those that arrived in the last third of the time."""
        options = SystemOptions(ClusterSystem.POOL, slo_s=self.limit_s, slo_stretch=1e-9)
        outcome = simulate(
            self.requests,
            lambda loop, listener: build_cluster(options, loop, ClusterSpec(INSTANCES), CANDIDATES, listener),
            RunOptions(failures=failures),
        )
        assert len(outcome.served) == len(self.requests)
        late = [one.request.arrival_s for one in outcome.served if one.ttft_s > self.limit_s]
        return len(late), sum(at_s > self.requests[-1].arrival_s * 2 / 3 for at_s in late)


@pytest.mark.slow
def test_the_pool_recovers_from_a_burst() -> None:
    late, at_the_end = Overload(1800, 0.75, extra=500).late()
    assert late >= 300  # else there was no overload
    assert at_the_end == 0


@pytest.mark.slow
def test_the_pool_recovers_from_the_loss_of_half_of_its_instances() -> None:
    late, at_the_end = Overload(3200, 0.765).late(tuple(Failure(instance, 30.0, 170.0) for instance in range(8)))
    assert late >= 300
    assert at_the_end == 0


def test_nobody_waits_longer_than_ten_deadlines_for_shorter_prompts() -> None:
    """Of 1.25 times what two instances can carry together, one prompt is eight times as long as all others."""
    together = (SpCandidate(2, SpCost(0.0, 1e-3, 0.0, 0.0)),)
    requests = [SimRequest(0, 0.0, 1000, 1), SimRequest(1, 0.0, 8000, 1)]
    requests += [SimRequest(2 + key, 0.8 * key, 1000, 1) for key in range(600)]
    options = LongPoolOptions(slo_s=2.0, slo_stretch=1e-9)
    outcome = simulate(
        requests, lambda loop, listener: LongPool(loop, ClusterSpec(2), together, options, listener, False)
    )
    ttft_s = {served.request.key: served.ttft_s for served in outcome.served}
    # Then comes what runs, and then its own 8 s.
    assert 10 * 2.0 < ttft_s[1] <= 10 * 2.0 + 1.0 + 8.0
    # Until then those that can be on time come first.
    assert sum(ttft_s[key] <= 2.0 for key in range(2, 26)) >= 15


def test_it_is_simulated_with_the_settings_that_serve() -> None:
    served, pool, system = PoolSettings(), LongPoolOptions(), SystemOptions(ClusterSystem.POOL)
    assert served.cross_node_factor == pool.cross_node_factor == system.cross_node_factor
    assert served.ttft_slo_s == pool.slo_s == system.slo_s
    assert served.slo_stretch == pool.slo_stretch == system.slo_stretch


# ---- until decode has it ----


def behind(system: ClusterSystem, decode_kv_tokens: int) -> Outcome:
    """Three prompts of 600 tokens on an instance that holds one and a half; decode takes 9 s for each."""
    options = SystemOptions(system, sp_size=1)
    decode = DecodeSpec(1, decode_kv_tokens, base_s=1.0, per_request_s=0.0)
    return simulate(
        [SimRequest(key, at_s, 600, 10) for key, at_s in enumerate((0.0, 0.0, 3.0))],
        lambda loop, listener: build_cluster(options, loop, ClusterSpec(1, kv_tokens=1000), ALONE, listener),
        RunOptions(decode=decode),
    )


SHARING = [
    ClusterSystem.FIXED_SP,
    ClusterSystem.LOONGSERVE,
    ClusterSystem.LOONGSERVE_IDLE,
    ClusterSystem.TETRIS,
    ClusterSystem.POOL,
]


@pytest.mark.parametrize("system", SHARING)
def test_prefill_waits_for_decode_where_it_has_no_room_for_more(system: ClusterSystem) -> None:
    outcome = behind(system, 700)
    assert len(outcome.finished) == 3
    last = outcome.served[2]
    assert last.request.key == 2
    transferred_s = {one.request.key: one.transferred_s for one in outcome.finished}
    assert transferred_s[1] >= outcome.finished[0].finished_s
    assert last.start_s == pytest.approx(transferred_s[1])


@pytest.mark.parametrize("system", SHARING)
def test_prefill_does_not_wait_for_decode_that_has_room(system: ClusterSystem) -> None:
    assert [one.start_s for one in behind(system, 10_000).served] == pytest.approx([0.0, 0.6, 3.0], abs=0.01)


@pytest.mark.parametrize("system", SHARING)
def test_what_decode_does_not_take_is_not_kept(system: ClusterSystem) -> None:
    """A prompt of one output token, and one that no decode instance can hold."""
    options = SystemOptions(system, sp_size=1)
    outcome = simulate(
        [SimRequest(key, 2.0 * key, 600, output) for key, output in enumerate((1, 5000, 1, 5000))],
        lambda loop, listener: build_cluster(options, loop, ClusterSpec(1, kv_tokens=700), ALONE, listener),
        RunOptions(decode=DecodeSpec(1, 2000)),
    )
    assert [one.start_s for one in outcome.served] == pytest.approx([0.0, 2.0, 4.0, 6.0])
    assert len(outcome.decode_refused) == 2


# ---- how long chunks take, and who has a prompt ----


def pool_of(instances: int, options: LongPoolOptions, collector: Collector) -> tuple[EventLoop, LongPool]:
    loop = EventLoop()
    return loop, LongPool(loop, ClusterSpec(instances), CANDIDATES[:2], options, collector, is_recorded=False)


def durations(noise: float, seed: int = 0) -> list[float]:
    """Of prompts one after the other, over what is predicted."""
    collector = Collector()
    loop, pool = pool_of(2, LongPoolOptions(order=fcfs, noise=noise, noise_seed=seed), collector)
    for key in range(400):
        pool.arrive(SimRequest(key, loop.now_s, 20_000, 1))
        loop.run()
    predicted_s = fastest_s(CANDIDATES[:2], 0, 20_000)

    def over(one: ServedPrefill) -> float:
        return (one.first_token_s - one.start_s) / predicted_s

    return [over(one) for one in collector.served]


@pytest.mark.slow
def test_noise_is_its_standard_deviation_around_what_is_predicted() -> None:
    assert durations(0.0) == pytest.approx([1.0] * 400)
    found = durations(0.1)
    assert fmean(found) == pytest.approx(1.0, abs=0.02)
    assert pstdev(found) == pytest.approx(0.1, abs=0.02)
    assert found == durations(0.1)
    assert found != durations(0.1, seed=1)


def test_without_tickets_instances_offer_what_came_to_them_in_turn() -> None:
    collector = Collector()
    loop, pool = pool_of(2, LongPoolOptions(is_announced=False), collector)
    for key in range(4):
        pool.arrive(SimRequest(key, 0.0, 20_000, 1))
    assert pool.coordinator.tickets == ()
    assert len(pool.coordinator.requests) == 4
    assert sorted(pool.coordinator.held_by(instance) for instance in (0, 1)) == [0, 0]
    loop.run()
    assert len(collector.served) == 4
