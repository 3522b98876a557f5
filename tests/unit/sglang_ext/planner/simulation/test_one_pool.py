"""One pool in simulation: what is served, on what, and that nothing is lost or leaks, whatever fails."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits
from sglang_ext.long_pool.decide.orders import Order
from sglang_ext.long_pool.decide.row_pulls import Pull
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec, Failure
from sglang_ext.planner.simulation.decode import DecodeSpec
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener, Prefix, ServedPrefill, SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import LapsPolicy
from sglang_ext.planner.simulation.long_pool import LongPool, LongPoolOptions
from sglang_ext.planner.simulation.one_pool import OnePool
from sglang_ext.planner.simulation.pool_instances import OnePoolOptions
from sglang_ext.planner.simulation.run import Outcome, RunOptions, simulate
from sglang_ext.types import Role

COST = CostCoefficients(alpha_s=1e-9, token_s=2e-5, read_s=0.0, kappa_s=0.005)
CANDIDATES = tuple(
    SpCandidate(size, SpCost(0.005, 2e-5 / size + 1e-7, 2e-9 / size, 1e-9 / size)) for size in (1, 2, 4, 8)
)
BOUNDARY = 2048
BLOCK = 64


def policy(role: Role) -> LapsPolicy:
    limits = InstanceLimits(page_tokens=1, max_chunk_tokens=8192, max_batch_tokens=8192, max_requests=64)
    return LapsPolicy(Laps(LapsOptions(boundary_tokens=BOUNDARY), GraphGrid(), COST, limits))


class Run:
    """One simulation of one pool, and the pool after it."""

    def __init__(
        self,
        requests: list[SimRequest],
        *,
        instances: int = 4,
        kv_tokens: int = 1_000_000,
        options: OnePoolOptions = OnePoolOptions(),  # noqa: B008 - frozen
        around: RunOptions = RunOptions(),  # noqa: B008 - frozen
        is_recorded: bool = False,
    ) -> None:
        spec = InstancesSpec((Role.BOTH,) * instances, COST, kv_tokens, BOUNDARY)
        candidates = [candidate for candidate in CANDIDATES if candidate.size <= instances]

        def build(loop: EventLoop, listener: PrefillListener) -> OnePool:
            self.pool = OnePool(loop, spec, candidates, policy, options, listener, is_recorded)
            return self.pool

        self.kv_tokens = kv_tokens
        self.outcome: Outcome = simulate(requests, build, around)

    @property
    def free_tokens(self) -> list[int]:
        return [member.free_tokens for member in self.pool._members]

    def first_tokens_s(self) -> dict[int, float]:
        return {served.request.key: served.first_token_s for served in self.outcome.served}


def mixture(count: int, rate_per_s: float, seed: int = 0, long_share: float = 0.3) -> list[SimRequest]:
    """Conversations of short and long prompts, whose later turns begin with the earlier ones."""
    draws = Random(seed)
    now_s = 0.0
    sessions: list[int] = []  # tokens so far
    requests = []
    for key in range(count):
        now_s += draws.expovariate(rate_per_s)
        new = draws.randint(4000, 60_000) if draws.random() < long_share else draws.randint(20, 1500)
        if sessions and draws.random() < 0.5:
            session = draws.randrange(len(sessions))
        else:
            session = len(sessions)
            sessions.append(0)
        sessions[session] += new
        tokens = sessions[session]
        blocks = tuple(range(session << 32, (session << 32) + tokens // BLOCK))
        requests.append(SimRequest(key, now_s, tokens, 10, 0, Prefix(BLOCK, blocks)))
    return requests


@pytest.mark.slow
def test_equal_runs_have_equal_results() -> None:
    requests = mixture(120, 4.0)
    first, second = Run(requests), Run(requests)
    assert first.first_tokens_s() == second.first_tokens_s()
    assert len(first.outcome.served) == 120


@pytest.mark.slow
def test_short_and_long_prompts_share_the_instances() -> None:
    run = Run(mixture(120, 4.0), is_recorded=True)
    groups = {busy.group for busy in run.outcome.timeline if busy.group}
    batched = {busy.instance for busy in run.outcome.timeline if not busy.group}
    assert len(batched) > 1
    assert {member for group in groups for member in group} == {0, 1, 2, 3}
    assert any(len(group) > 1 for group in groups)


@pytest.mark.slow
def test_an_instance_does_one_thing_at_a_time() -> None:
    run = Run(mixture(120, 6.0), is_recorded=True)
    for instance in range(4):
        ends_s = 0.0
        for busy in sorted(
            (busy for busy in run.outcome.timeline if busy.instance == instance), key=lambda busy: busy.start_s
        ):
            assert busy.start_s >= ends_s - 1e-9
            ends_s = busy.end_s


@pytest.mark.slow
def test_members_of_a_group_wait_little_for_each_other() -> None:
    run = Run(mixture(200, 5.0))
    assert run.outcome.gang_wait_share is not None
    assert 0.0 < run.outcome.gang_wait_share <= 0.05


@pytest.mark.slow
def test_a_prompt_on_all_instances_leaves_short_ones_on_time() -> None:
    """Two thirds of each instance's time go to short prompts: with a chunk in every turn too little would be left."""
    draws = Random(3)
    shorts = [SimRequest(key, key / 200, draws.randint(200, 1000), 1) for key in range(1000)]
    long = SimRequest(1000, 2.0, 100_000, 1)
    run = Run(sorted([*shorts, long], key=lambda request: request.arrival_s))
    ttfts_s = {served.request.key: served.ttft_s for served in run.outcome.served}
    assert set(run.pool.chunks_by_size) == {4}
    assert ttfts_s.pop(1000) <= 5 * min(candidate.cost.predict_s(0, 100_000) for candidate in CANDIDATES)
    assert len(ttfts_s) == 1000
    assert max(ttfts_s.values()) <= 0.4


@pytest.mark.slow
def test_short_prompts_leave_members_that_get_a_chunk() -> None:
    requests = mixture(400, 16.0, long_share=0.1)
    run = Run(requests)
    served = {one.request.key: one.request for one in run.outcome.served}
    assert len(served) == len(run.outcome.served) == 400
    assert run.pool.moved
    assert all(served[key].new_tokens <= BOUNDARY for key in run.pool.moved)


@pytest.mark.slow
def test_a_pull_begins_and_ends_between_batches_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[float, Pull]] = []
    ordered_s: dict[int, float] = {}
    carry_out, end_pull = OnePool._carry_out_one, OnePool._end_pull

    def ordered(pool: OnePool, order: Order) -> Sequence[Order]:
        if isinstance(order, Pull):
            ordered_s[order.pull] = pool._loop.now_s
        return carry_out(pool, order)

    def end(pool: OnePool, order: Pull) -> None:
        ended.append((pool._loop.now_s, order))
        end_pull(pool, order)

    monkeypatch.setattr(OnePool, "_carry_out_one", ordered)
    monkeypatch.setattr(OnePool, "_end_pull", end)
    timeline = Run(mixture(400, 6.0), is_recorded=True).outcome.timeline
    assert ended
    waited = 0
    for ended_s, order in ended:
        began_s = ordered_s[order.pull]
        running = [busy for busy in timeline if busy.instance in order.members and busy.start_s < began_s < busy.end_s]
        waited += bool(running)
        assert all(ended_s >= busy.end_s - 1e-9 for busy in running)
        assert not any(
            busy.instance == order.target and busy.start_s < ended_s < busy.end_s - 1e-9 for busy in timeline
        )
    assert waited


def test_it_is_laps_where_nothing_is_long() -> None:
    """One instance: with several a router chooses, and the two choose by different rules."""
    draws = Random(1)
    requests, now_s = [], 0.0
    for key in range(400):
        now_s += draws.expovariate(30.0)
        requests.append(SimRequest(key, now_s, draws.randint(10, BOUNDARY), 1))
    spec = InstancesSpec((Role.BOTH,), COST, boundary_tokens=BOUNDARY)
    alone = simulate(
        requests,
        lambda loop, listener: InstancePool(loop, spec, router_policy("least_loaded"), policy, listener, 0, False),
    )
    assert Run(requests, instances=1).first_tokens_s() == pytest.approx(
        {served.request.key: served.first_token_s for served in alone.served}
    )


def test_it_is_the_long_pool_where_nothing_is_short() -> None:
    """But for prompts that are computed by one instance, which are batched here and follow each other there."""
    draws = Random(2)
    requests, now_s = [], 0.0
    for key in range(200):
        now_s += draws.expovariate(0.7)
        requests.append(SimRequest(key, now_s, draws.randint(10_000, 90_000), 1))
    long = simulate(
        requests,
        lambda loop, listener: LongPool(loop, ClusterSpec(4), CANDIDATES[:3], LongPoolOptions(), listener, False),
    )
    mean_s = sum(served.ttft_s for served in Run(requests).outcome.served) / 200
    assert mean_s == pytest.approx(sum(served.ttft_s for served in long.served) / 200, rel=0.05)


def test_a_later_turn_finds_what_was_computed() -> None:
    blocks = tuple(range(1000))
    requests = [
        SimRequest(0, 0.0, 40_000, 1, 0, Prefix(BLOCK, blocks[:625])),
        SimRequest(1, 10.0, 44_000, 1, 0, Prefix(BLOCK, blocks[:687])),
    ]
    kept, dropped = Run(requests), Run(requests, options=OnePoolOptions(keeps_rows=False))
    later = next(served for served in kept.outcome.served if served.request.key == 1)
    assert later.request.cached_tokens == 40_000
    assert later.ttft_s < 0.3 * next(served.ttft_s for served in dropped.outcome.served if served.request.key == 1)


@pytest.mark.parametrize(("before", "instance"), [(0, 1), (2000, 0)])
def test_under_load_a_short_prompt_goes_where_its_prefix_is(before: int, instance: int) -> None:
    """Although another instance would end it sooner: what is cached costs nobody time."""
    turns = [Prefix(BLOCK, tuple(range(blocks))) for blocks in (16, 19)]
    requests = [SimRequest(0, 0.0, 16 * BLOCK, 1, 0, turns[0])]
    # Two at a time fill both instances to 0.73 of their time, for a minute.
    arrivals_s = [0.5 + 0.06 * (number // 2) for number in range(before)]
    requests += [SimRequest(1 + key, at_s, 2000, 1) for key, at_s in enumerate(arrivals_s)]
    now_s = 0.5 + 0.06 * (before // 2)
    # The first goes to instance 0, as everything is equal there; what it has is still in its cache.
    requests += [SimRequest(5000, now_s, 2000, 1), SimRequest(5001, now_s + 0.018, 19 * BLOCK, 1, 0, turns[1])]
    run = Run(requests, instances=2, is_recorded=True)
    assert {busy.instance for busy in run.outcome.timeline if 5001 in (busy.key, *busy.others)} == {instance}


@pytest.mark.slow
def test_history_on_its_way_takes_time_that_computing_does_not_hide() -> None:
    requests = mixture(100, 4.0)
    fast = Run(requests, options=OnePoolOptions(link_bytes_per_s=1e12))
    slow = Run(requests, options=OnePoolOptions(link_bytes_per_s=1e8))
    total_s = [sum(served.ttft_s for served in run.outcome.served) for run in (fast, slow)]
    assert total_s[0] < total_s[1]


def test_what_no_group_can_hold_is_refused() -> None:
    run = Run([SimRequest(0, 0.0, 4001, 1), SimRequest(1, 0.0, 3999, 1)], kv_tokens=1000)
    assert [request.key for request in run.outcome.refused] == [0]
    assert [served.request.key for served in run.outcome.served] == [1]


def test_prompts_wait_for_memory_until_decode_has_those_before() -> None:
    """Short ones too: what is behind them in decode takes 9 s for each."""
    requests = [SimRequest(key, 0.1 * key, 600, 10) for key in range(4)]
    around = RunOptions(decode=DecodeSpec(1, 700, base_s=1.0, per_request_s=0.0))
    run = Run(requests, instances=1, kv_tokens=1300, around=around)
    assert len(run.outcome.finished) == 4
    assert [served.first_token_s > 9.0 for served in run.outcome.served] == [False, False, False, True]
    assert run.free_tokens == [1300]


def test_what_has_no_memory_is_no_backlog() -> None:
    """It would never end: a shared prompt may hold the memory, and wait for the member to have no backlog."""
    loop = EventLoop()
    spec = InstancesSpec((Role.BOTH,), COST, 1300, BOUNDARY)
    served: list[int] = []

    class Listener:
        def on_first_token(self, prefill: ServedPrefill) -> None:
            served.append(prefill.request.key)

        def on_refused(self, request: SimRequest) -> None:
            raise AssertionError(request)

    pool = OnePool(loop, spec, CANDIDATES[:1], policy, OnePoolOptions(), Listener(), False)
    pool.keep_until_transferred()
    requests = [SimRequest(key, 0.0, 1000, 1) for key in range(2)]
    for request in requests:
        pool.arrive(request)
    (member,) = pool._members
    assert pool._report_of(member).backlog_s > 0.0
    loop.run()
    assert (served, list(pool.unfinished())) == ([0], [requests[1]])
    assert pool._report_of(member).backlog_s == 0.0
    pool.transferred(requests[0])
    loop.run()
    assert served == [0, 1]


def test_a_failure_of_an_instance_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="instance 4 does not exist, there are 4"):
        Run([], around=RunOptions(failures=(Failure(4, 1.0, 1.0),)))


def test_pools_set_apart_are_refused() -> None:
    spec = InstancesSpec((Role.SHORT, Role.LONG), COST)
    with pytest.raises(ValueError, match="every instance of one pool"):
        simulate(
            [],
            lambda loop, listener: OnePool(loop, spec, CANDIDATES[:2], policy, OnePoolOptions(), listener, False),
        )


@pytest.mark.parametrize("name", ["slo_s", "slo_stretch", "short_slo_s", "chunk_s", "per_node", "link_bytes_per_s"])
def test_options_must_be_above_0(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0 is not above 0"):
        OnePoolOptions(**{name: 0})


@pytest.mark.parametrize("pace", [0.0, -1.0, float("inf"), float("nan")])
def test_paces_must_be_finite_and_above_0(pace: float) -> None:
    with pytest.raises(ValueError, match="paces"):
        OnePoolOptions(paces=(1.0, pace))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 8),
    st.sampled_from([90_000, 300_000, 1_000_000]),
    st.lists(st.tuples(st.integers(0, 7), st.floats(0.0, 12.0), st.floats(0.01, 5.0)), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_nothing_is_lost_and_no_slot_leaks(
    seed: int,
    instances: int,
    kv_tokens: int,
    failures: list[tuple[int, float, float]],
    keeps_rows: bool,
    has_decode: bool,
) -> None:
    requests = mixture(40, 8.0, seed)
    requests = [request for request in requests if request.prompt_tokens <= kv_tokens]
    around = RunOptions(
        failures=tuple(Failure(instance % instances, at_s, down_s) for instance, at_s, down_s in failures),
        decode=DecodeSpec(2) if has_decode else None,
    )
    run = Run(
        requests,
        instances=instances,
        kv_tokens=kv_tokens,
        options=OnePoolOptions(keeps_rows=keeps_rows),
        around=around,
        is_recorded=True,
    )
    outcome = run.outcome
    assert sorted(served.request.key for served in outcome.served) == [request.key for request in requests]
    assert not outcome.refused
    assert not outcome.unfinished
    assert run.free_tokens == [kv_tokens] * instances
    assert not run.pool.coordinator.requests
    assert all(busy.end_s >= busy.start_s for busy in outcome.timeline)
