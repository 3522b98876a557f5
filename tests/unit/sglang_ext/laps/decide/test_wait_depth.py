"""Adaptive wait-depth: when a batch leaves, and that W and D follow the load without ratchet or oscillation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.round_plan import DispatchReason
from sglang_ext.laps.decide.wait_depth import (
    AdaptiveWaitDepth,
    ArrivalRate,
    BusyShare,
    Evidence,
    GatheringBatch,
    LongWork,
    OfferedLoad,
    OfferedWork,
    WindowLimits,
    break_even_gap_s,
    others_served,
)

LIMITS = WindowLimits(w_min_s=0.0, w_max_s=0.03, t_max_s=0.1, sigma_s=0.02, delta_s=0.01)
DEPTHS = (1, 2, 4, 8, 16, 32, 64)


def gathering(
    depth: int = 1,
    *,
    tokens: int = 100,
    full: bool = False,
    oldest_s: float = 0.0,
    newest_s: float | None = None,
    latest_start_s: float = 10.0,
    gap_s: float = 1.0,
) -> GatheringBatch:
    newest = oldest_s if newest_s is None else newest_s
    return GatheringBatch(depth, tokens, full, oldest_s, newest, latest_start_s, gap_s)


def awd(limits: WindowLimits = LIMITS) -> AdaptiveWaitDepth:
    return AdaptiveWaitDepth(limits, DEPTHS)


def test_the_start_is_the_deepest_graph_and_the_longest_window() -> None:
    assert awd().depth == 64
    assert awd().learned_window_s == 0.03


def test_depths_that_are_gone_are_not_aimed_at() -> None:
    policy = awd()
    policy.use_depths((4, 16))
    assert policy.depth == 16
    policy.use_depths((4, 32))
    assert policy.depth == 4
    policy.use_depths((8,))
    assert policy.depth == 1
    for _ in range(100):
        policy.learn(Evidence.REACHED, 8, 0.001)
    assert policy.depth == 8


@pytest.mark.parametrize("depths", [(), (0, 1)])
def test_no_depths_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="depths"):
        AdaptiveWaitDepth(LIMITS, depths)


@pytest.mark.parametrize(
    ("now_s", "batch", "reason"),
    [
        (0.001, gathering(), None),
        (0.001, gathering(64), DispatchReason.DEPTH),
        (0.001, gathering(full=True), DispatchReason.FULL_SHAPE),
        (0.031, gathering(), DispatchReason.WINDOW),
        (0.101, gathering(), DispatchReason.HEAD_WAIT),
        (0.001, gathering(latest_start_s=0.02), DispatchReason.SLACK),  # sigma
        (0.001, gathering(latest_start_s=-5.0), DispatchReason.SLACK),  # late already
        (0.018, gathering(latest_start_s=0.0382), None),
        (0.018, gathering(gap_s=0.0), DispatchReason.NO_GAIN),
        (0.001, gathering(gap_s=0.0009), DispatchReason.NO_GAIN),  # the next is expected after 1 ms
        (0.006, gathering(newest_s=0.001, gap_s=0.004), DispatchReason.NO_GAIN),  # and has not come for 5
        (0.004, gathering(newest_s=0.001, gap_s=0.004), None),
    ],
)
def test_when_a_batch_leaves(now_s: float, batch: GatheringBatch, reason: DispatchReason | None) -> None:
    verdict = awd().choose(now_s, batch, arrivals_per_s=1000.0)
    assert verdict.reason is reason
    assert verdict.wake_s >= now_s
    if reason is None:
        assert verdict.wake_s > now_s


def test_the_margin_delta_ends_a_window_before_a_deadline() -> None:
    limits = LIMITS._replace(delta_s=0.05)
    assert awd(limits).choose(0.012, gathering(latest_start_s=0.06), 1000.0).reason is DispatchReason.SLACK
    assert awd(limits).choose(0.009, gathering(latest_start_s=0.06), 1000.0).wake_s == pytest.approx(0.01)


def test_w_graph_ends_a_window_that_should_have_filled() -> None:
    controller = AdaptiveWaitDepth(LIMITS, (1, 2, 4))
    verdict = controller.choose(0.0, gathering(), 1000.0)
    assert verdict.reason is None
    assert verdict.wake_s == pytest.approx(0.0045)


def test_a_minimum_window_is_waited_out_even_in_vain_but_not_past_a_deadline() -> None:
    limits = LIMITS._replace(w_min_s=0.02)
    assert awd(limits).choose(0.019, gathering(gap_s=0.0), 1.0).reason is None
    assert awd(limits).choose(0.021, gathering(gap_s=0.0), 1.0).reason is DispatchReason.NO_GAIN
    assert awd(limits).choose(0.001, gathering(latest_start_s=0.02), 1.0).reason is DispatchReason.SLACK


@pytest.mark.parametrize(
    ("now_s", "batch", "reason"),
    [
        (0.01, gathering(tokens=8192), DispatchReason.TOKENS),
        (0.01, gathering(tokens=8191), None),
        (0.05, gathering(newest_s=0.03), None),
        (0.061, gathering(newest_s=0.03), DispatchReason.WINDOW),  # drained
        (0.101, gathering(newest_s=0.1), DispatchReason.HEAD_WAIT),
        (0.01, gathering(full=True), DispatchReason.FULL_SHAPE),
        (0.01, gathering(latest_start_s=inf, gap_s=0.0), None),
    ],
)
def test_token_max(now_s: float, batch: GatheringBatch, reason: DispatchReason | None) -> None:
    assert awd().choose_token_max(now_s, batch, 8192).reason is reason


@given(
    depth=st.integers(1, 64),
    alone_s=st.floats(1e-4, 1.0),
    marginal=st.floats(0, 1),
    gap_s=st.floats(0, 2),
)
def test_waiting_pays_exactly_below_the_break_even_gap(
    depth: int, alone_s: float, marginal: float, gap_s: float
) -> None:
    """The sums of latencies, written out: d leave now and the next follows, or all leave with the next."""
    batch_s = alone_s * (1 + marginal * (depth - 1))
    joined_s = alone_s * (1 + marginal * depth)
    at_once_s = depth * batch_s + max(gap_s, batch_s) + alone_s - gap_s
    waiting_s = depth * (gap_s + joined_s) + joined_s
    break_even_s = break_even_gap_s(depth, alone_s, batch_s, joined_s)
    if abs(gap_s - break_even_s) > 1e-9:
        assert (gap_s < break_even_s) == (waiting_s < at_once_s - 1e-12)


def test_linear_cost_never_pays_and_free_seats_do() -> None:
    assert break_even_gap_s(1, 0.25, 0.25, 0.45) == 0.0  # a CPU: 50 ms and 200 ms of tokens
    assert break_even_gap_s(3, 0.02, 0.02, 0.02) == pytest.approx(0.005)  # a padded graph


@given(
    depth=st.integers(1, 64),
    alone_s=st.floats(1e-4, 1.0),
    marginal=st.floats(0, 1),
    others=st.floats(0, 5),
    gap_s=st.floats(0, 2),
)
def test_others_count_with_the_time_that_waiting_saves(
    depth: int, alone_s: float, marginal: float, others: float, gap_s: float
) -> None:
    """Written out: each of the others ends when the machine has computed both."""
    batch_s = alone_s * (1 + marginal * (depth - 1))
    joined_s = alone_s * (1 + marginal * depth)
    at_once_s = depth * batch_s + batch_s + alone_s - gap_s + others * (batch_s + alone_s)
    waiting_s = depth * (gap_s + joined_s) + joined_s + others * (gap_s + joined_s)
    break_even_s = break_even_gap_s(depth, alone_s, batch_s, joined_s, others)
    assert break_even_s >= break_even_gap_s(depth, alone_s, batch_s, joined_s)
    if abs(gap_s - break_even_s) > 1e-9:
        assert (gap_s < break_even_s) == (waiting_s < at_once_s - 1e-12)


def test_the_share_of_time_that_is_busy() -> None:
    busy = BusyShare(horizon_s=2.0)
    assert busy.share == 0.0
    for step in range(400):
        busy.add(0.05 * step, 0.04)
    assert busy.share == pytest.approx(0.8, abs=0.01)
    for step in range(400):
        busy.add(20.0 + 0.05 * step, 0.06)  # predicted to take longer than it does
    assert busy.share == pytest.approx(1.0, abs=0.01)
    busy.add(100.0, 0.05)
    assert busy.share < 0.01
    with pytest.raises(ValueError, match="horizon"):
        BusyShare(horizon_s=0.0)


class Round(NamedTuple):
    at_s: float
    depth: int
    waited_s: float
    reason: DispatchReason
    target: int
    window_s: float


def serve(
    arrivals_s: list[float],
    time_s: Callable[[int], float],
    controller: AdaptiveWaitDepth,
    slo_s: float = 10.0,
    *,
    counts_others: bool = True,
) -> list[Round]:
    """One machine that does nothing else; every batch is learned from."""
    rate = ArrivalRate()
    busy = BusyShare()
    rounds: list[Round] = []
    queue: list[float] = []
    now_s, index = 0.0, 0
    while index < len(arrivals_s) or queue:
        while index < len(arrivals_s) and arrivals_s[index] <= now_s:
            rate.add(arrivals_s[index])
            queue.append(arrivals_s[index])
            index += 1
        next_s = arrivals_s[index] if index < len(arrivals_s) else inf
        if not queue:
            now_s = next_s
            continue
        depth = min(len(queue), 64)
        per_s = rate.per_s(now_s)
        others = others_served(per_s, time_s(depth), busy.share) if counts_others else 0.0
        batch = GatheringBatch(
            depth,
            depth,
            depth == 64,
            queue[0],
            queue[depth - 1],
            queue[0] + slo_s - time_s(depth),
            break_even_gap_s(depth, time_s(1), time_s(depth), time_s(depth + 1), others),
        )
        verdict = controller.choose(now_s, batch, per_s)
        if verdict.reason is None:
            assert verdict.wake_s > now_s
            now_s = min(next_s, verdict.wake_s)
            continue
        controller.learn(controller.evidence(verdict.reason, depth, per_s), depth, queue[depth - 1] - queue[0])
        rounds.append(
            Round(now_s, depth, now_s - queue[0], verdict.reason, controller.depth, controller.learned_window_s)
        )
        assert controller.depth >= 1
        assert LIMITS.w_min_s <= controller.learned_window_s <= LIMITS.w_max_s
        del queue[:depth]
        busy.add(now_s, time_s(depth))
        now_s += time_s(depth)
    return rounds


def gpu_s(depth: int) -> float:
    """Overhead-bound: one more costs next to nothing."""
    return 0.012 + 0.0001 * depth


def cpu_s(depth: int) -> float:
    """Linear in tokens, with a small fixed cost."""
    return 0.002 + 0.01 * depth


def poisson_s(random: Random, per_s: float, start_s: float, end_s: float) -> list[float]:
    times_s: list[float] = []
    now_s = start_s
    while (now_s := now_s + random.expovariate(per_s)) < end_s:
        times_s.append(now_s)
    return times_s


def graph_s(depth: int) -> float:
    """On captured graphs: 3 ms to read the weights, and padding to powers of two."""
    return 0.003 + 3e-5 * (1 << (depth - 1).bit_length())


def mean_and_busy(rounds: list[Round], time_s: Callable[[int], float], arrivals_s: list[float]) -> tuple[float, float]:
    """Mean TTFT, s, and the time in which the machine computes, s."""
    total_s, first = 0.0, 0
    for one in rounds:
        total_s += sum(one.at_s + time_s(one.depth) - at_s for at_s in arrivals_s[first : first + one.depth])
        first += one.depth
    return total_s / len(arrivals_s), sum(time_s(one.depth) for one in rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("time_s", "per_s", "least_saved", "most_lost"),
    [
        (graph_s, 20, 0.0, 0.0),
        (graph_s, 100, 0.0, 0.0),
        (graph_s, 300, 0.0, 0.001),
        (graph_s, 700, 0.015, 0.01),
        (graph_s, 900, 0.025, 0.015),
        (gpu_s, 20, 0.0, 0.0),
        (gpu_s, 60, 0.0, 0.001),
        (gpu_s, 200, 0.03, 0.015),
        (gpu_s, 450, 0.05, 0.03),
    ],
)
def test_the_machines_time_counts_where_it_is_scarce(
    time_s: Callable[[int], float], per_s: float, least_saved: float, most_lost: float
) -> None:
    """Against waiting for the batch's own sake: at high rates time is saved for little, at low ones nothing changes."""
    arrivals_s = poisson_s(Random(5), per_s, 0.0, 6000 / per_s)
    without, counting = (
        mean_and_busy(serve(arrivals_s, time_s, awd(), counts_others=counts), time_s, arrivals_s)
        for counts in (False, True)
    )
    assert counting[0] <= (1 + most_lost) * without[0]
    assert counting[1] <= (1 - least_saved) * without[1]


@pytest.mark.slow
@given(per_s=st.floats(1, 2000), seed=st.integers(0, 10_000))
def test_a_stationary_load_settles(per_s: float, seed: int) -> None:
    random = Random(seed)
    rounds = serve(poisson_s(random, per_s, 0.0, min(1500 / per_s, 60.0)), gpu_s, awd())
    last = rounds[len(rounds) // 2 :]
    changes = sum(before.target != after.target for before, after in pairwise(last))
    assert changes <= max(3, len(last) // 8)
    levels = sorted({DEPTHS.index(item.target) for item in last})
    if len(last) > 20:
        assert levels[-1] - levels[0] <= 2
    steps_s = [abs(after.window_s - before.window_s) for before, after in pairwise(last)]
    assert max(steps_s, default=0.0) <= LIMITS.w_max_s / 8 + 1e-9


@pytest.mark.slow
@given(
    phases=st.lists(st.tuples(st.floats(0.5, 3000), st.floats(0.05, 0.5)), min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
    is_gpu=st.booleans(),
)
def test_no_request_waits_longer_than_a_window_on_an_idle_machine(
    phases: list[tuple[float, float]], seed: int, is_gpu: bool
) -> None:
    random = Random(seed)
    arrivals_s: list[float] = []
    start_s = 0.0
    for per_s, length_s in phases:
        arrivals_s += poisson_s(random, per_s, start_s, start_s + length_s)
        start_s += length_s
    time_s = gpu_s if is_gpu else cpu_s
    busy_until_s = 0.0
    for item in serve(arrivals_s, time_s, awd()):
        arrived_s = item.at_s - item.waited_s
        idle_wait_s = item.at_s - max(arrived_s, busy_until_s)
        assert idle_wait_s <= LIMITS.w_max_s + 1e-9
        busy_until_s = item.at_s + time_s(item.depth)


def test_after_a_quiet_minute_a_burst_finds_its_depth_again() -> None:
    random = Random(1)
    busy = poisson_s(random, 1000.0, 0.0, 3.0)
    quiet = poisson_s(random, 1.0, 3.0, 63.0)
    burst = poisson_s(random, 1000.0, 63.0, 66.0)
    rounds = serve(busy + quiet + burst, gpu_s, awd())
    before = [item for item in rounds if 2.0 < item.at_s < 3.0]
    again = [item for item in rounds if 64.0 < item.at_s < 65.0]

    def mean_depth(items: list[Round]) -> float:
        return sum(item.depth for item in items) / len(items)

    assert mean_depth(before) > 5
    assert mean_depth(again) == pytest.approx(mean_depth(before), rel=0.2)


def test_depth_grows_back_from_one() -> None:
    """As printed, Algorithm 1 could never leave D = 1 again."""
    controller = awd()
    for _ in range(100):
        controller.learn(Evidence.MISSED, 1, 0.03)
    assert controller.depth == 1
    for _ in range(100):
        controller.learn(Evidence.REACHED, 20, 0.02)
    assert controller.depth >= 16


def at_depth(depth: int) -> AdaptiveWaitDepth:
    """One that has seen windows reach this depth for long."""
    controller = awd()
    for _ in range(200):
        controller.learn(Evidence.MISSED, depth, 0.03)
    assert controller.depth == depth
    return controller


def test_depth_that_is_reached_early_goes_on_growing() -> None:
    quick, slow = at_depth(2), at_depth(2)
    for _ in range(30):
        quick.learn(Evidence.REACHED, quick.depth, 0.005)
        slow.learn(Evidence.REACHED, slow.depth, 0.02)
    assert quick.depth >= 8
    assert slow.depth == 2


def test_between_two_depths_the_present_one_stays() -> None:
    for depth in (4, 8):
        controller = at_depth(depth)
        for _ in range(50):
            controller.learn(Evidence.REACHED, 5, 0.02)
            controller.learn(Evidence.REACHED, 6, 0.02)
        assert controller.depth == depth


def test_the_window_grows_back_from_nothing() -> None:
    controller = awd()
    for _ in range(100):
        controller.learn(Evidence.REACHED, 64, 0.0)
    assert controller.learned_window_s < 0.001
    for _ in range(50):
        controller.learn(Evidence.MISSED, 60, 0.03)
    assert controller.learned_window_s > 0.029


def test_drained_and_cut_rounds_teach_nothing() -> None:
    controller = awd()
    assert controller.evidence(DispatchReason.WINDOW, 1, arrivals_per_s=5.0) is Evidence.NONE
    assert controller.evidence(DispatchReason.WINDOW, 1, arrivals_per_s=50.0) is Evidence.MISSED
    for reason in (DispatchReason.SLACK, DispatchReason.HEAD_WAIT, DispatchReason.NO_GAIN, DispatchReason.SHARE):
        assert controller.evidence(reason, 1, arrivals_per_s=50.0) is Evidence.NONE
        assert controller.evidence(reason, 64, arrivals_per_s=50.0) is Evidence.REACHED
    controller.learn(Evidence.NONE, 1, 0.0)
    assert controller.depth == 64


@pytest.mark.slow
@given(per_s=st.floats(1, 80), seed=st.integers(0, 1000))
def test_on_a_linear_machine_no_request_ever_waits(per_s: float, seed: int) -> None:
    rounds = serve(poisson_s(Random(seed), per_s, 0.0, 10.0), cpu_s, awd())
    busy_until_s = 0.0
    for item in rounds:
        assert item.at_s == pytest.approx(max(item.at_s - item.waited_s, busy_until_s))
        busy_until_s = item.at_s + cpu_s(item.depth)


def test_waiting_does_not_feed_itself() -> None:
    """A prefill delayer became unstable in production by this loop: a delay lets the machine run empty, and the empty
    state is what makes it delay again, so that the waiting never ends. Here each closed-loop client sends its next
    request only after its last one is served: waiting lowers the arrival rate, which could justify more waiting.
    """
    controller = awd()
    rate = ArrivalRate()
    clients = 4
    ready_s = [0.0] * clients  # when each client's request arrives
    now_s, served, idle_waits = 0.0, 0, []
    for _ in range(600):
        now_s = max(now_s, min(ready_s))
        idle_since_s = now_s
        seen = 0
        while True:
            queue = sorted(time_s for time_s in ready_s if time_s <= now_s)
            for time_s in queue[seen:]:
                rate.add(time_s)
            seen = len(queue)
            depth = len(queue)
            gap_s = break_even_gap_s(depth, gpu_s(1), gpu_s(depth), gpu_s(depth + 1))
            batch = GatheringBatch(depth, depth, False, queue[0], queue[-1], now_s + 10.0, gap_s)
            verdict = controller.choose(now_s, batch, rate.per_s(now_s))
            if verdict.reason is not None:
                break
            now_s = min([verdict.wake_s, *(time_s for time_s in ready_s if time_s > now_s)])
        idle_waits.append(now_s - idle_since_s)
        controller.learn(controller.evidence(verdict.reason, depth, rate.per_s(now_s)), depth, queue[-1] - queue[0])
        now_s += gpu_s(depth)
        served += depth
        ready_s = [
            now_s + 1e-4 * (index + 1) if time_s <= now_s - gpu_s(depth) else time_s
            for index, time_s in enumerate(ready_s)
        ]
    assert max(idle_waits) <= LIMITS.w_max_s + 1e-9
    assert sum(idle_waits[-200:]) < 0.5 * sum(gpu_s(1) for _ in range(200))
    # and with the burst over, a lone client is served without any window
    now_s += 60.0
    lone = GatheringBatch(1, 1, False, now_s, now_s, now_s + 10.0, break_even_gap_s(1, gpu_s(1), gpu_s(1), gpu_s(2)))
    rate.add(now_s)
    assert controller.choose(now_s, lone, rate.per_s(now_s)).reason is DispatchReason.NO_GAIN


def test_nothing_has_arrived() -> None:
    assert ArrivalRate().per_s(5.0) == 0.0


def test_even_arrivals() -> None:
    rate = ArrivalRate()
    for index in range(20):
        rate.add(0.1 * index)
    assert rate.per_s(1.9) == pytest.approx(10.0)


def test_time_without_arrivals_lowers_it_and_ends_it() -> None:
    rate = ArrivalRate(horizon_s=10.0)
    for index in range(20):
        rate.add(0.1 * index)
    assert rate.per_s(3.9) == pytest.approx(19 / 3.9)
    assert rate.per_s(100.0) == 0.0


def test_a_burst_after_a_quiet_minute_shows_at_once() -> None:
    rate = ArrivalRate()
    for index in range(30):
        rate.add(float(index))
    for index in range(5):
        rate.add(90.0 + 0.01 * index)
    assert rate.per_s(90.04) == pytest.approx(100.0)


def test_one_instant_is_a_finite_rate() -> None:
    rate = ArrivalRate()
    for _ in range(10):
        rate.add(1.0)
    assert rate.per_s(1.0) == pytest.approx(9000.0)


def test_time_does_not_run_backwards() -> None:
    rate = ArrivalRate()
    rate.add(5.0)
    rate.add(4.0)
    assert rate.per_s(6.0) == pytest.approx(1.0)


def test_a_poisson_process() -> None:
    random = Random(1)
    rate = ArrivalRate(arrivals=64)
    now_s, estimates = 0.0, []
    for _ in range(2000):
        now_s += random.expovariate(20.0)
        rate.add(now_s)
        estimates.append(rate.per_s(now_s))
    settled = estimates[100:]
    assert sum(settled) / len(settled) == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize(("arrivals", "horizon_s", "name"), [(1, 1.0, "arrivals"), (5, 0.0, "horizon_s")])
def test_a_window_without_room_is_refused(arrivals: int, horizon_s: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ArrivalRate(arrivals, horizon_s)


def test_before_anything_has_come_others_may_come_at_once() -> None:
    offered = OfferedWork()
    assert offered.load(5.0) == OfferedLoad(inf, 0.0)
    offered.add(5.0, 3.0)
    assert offered.load(7.0) == OfferedLoad(0.5, 0.0)  # the longer none follows, the less it is expected


def test_the_load_is_that_of_the_latest_requests() -> None:
    offered = OfferedWork()
    for number in range(41):
        offered.add(0.5 * number, 0.25)
    load = offered.load(20.0)
    assert load.requests_per_s == pytest.approx(41 / 20)
    assert load.utilisation == pytest.approx(0.5)
    # A minute later the latest 32 are left; the first of them came at 5 s.
    offered.add(80.0, 1.0)
    assert offered.load(80.0) == OfferedLoad(pytest.approx(32 / 75), pytest.approx((30 * 0.25 + 1.0) / 75))


def test_however_many_come_few_are_remembered() -> None:
    offered = OfferedWork()
    for number in range(10_000):
        offered.add(1e-3 * number, 0.1)
    load = offered.load(9.999)
    assert load.requests_per_s == pytest.approx(256 / 0.255)
    assert load.utilisation == pytest.approx(100.0)


def test_a_time_before_the_latest_request_counts_as_that_one_s() -> None:
    offered = OfferedWork()
    offered.add(2.0, 1.0)
    offered.add(1.0, 1.0)
    assert offered.load(4.0) == OfferedLoad(1.0, 0.5)


def test_a_typical_long_prefill_is_one_that_a_second_of_work_belongs_to() -> None:
    longs = LongWork()
    assert longs.typical_s == 0.0
    for tokens in (1, 1, 1, 9):
        longs.add(0.5 * tokens, tokens, 0)
    # 3 x 0.5 s and 4.5 s: of 6 s of work a quarter belongs to the former.
    assert longs.typical_s == pytest.approx(0.25 * 0.5 + 0.75 * 4.5)
    longs.predict_again(lambda new, cached: 2.0 * new)
    assert longs.typical_s == pytest.approx(0.25 * 2.0 + 0.75 * 18.0)
    for _ in range(64):
        longs.add(3.0, 3, 0)
    assert longs.typical_s == pytest.approx(3.0)  # the earlier ones are forgotten
