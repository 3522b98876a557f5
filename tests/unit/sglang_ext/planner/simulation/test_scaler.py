"""An autoscaler beside the pressure controller: with the rule they settle, without it they answer each other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from sglang_ext.cli import main
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, LapsMode
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener, ServedPrefill, SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, LapsPolicy, QueueOrder
from sglang_ext.planner.simulation.run import Outcome, RunOptions, simulate
from sglang_ext.planner.simulation.scaler import SCALE_POOLS, SCALE_TOTAL, ScalerSettings
from sglang_ext.types import LengthClass, Role
from sglang_ext_router.decide.instance_pressure import PressureSettings
from support.settings import sets

COST = CostCoefficients(1e-9, 2e-3, 0.0, 0.02)
SHORT_TOKENS, LONG_TOKENS, BOUNDARY_TOKENS = 300, 3000, 1024
LOOSE = PressureSettings(short_slo_s=4.0, long_slo_s=30.0)


def requests(phases: list[tuple[float, float, float]], seed: int = 0) -> list[SimRequest]:
    """Phases of (duration in s, load of short prompts, of long ones), loads in instances."""
    draw = Random(seed)
    start_s, made = 0.0, []
    for duration_s, short, long in phases:
        for load, tokens in ((short, SHORT_TOKENS), (long, LONG_TOKENS)):
            at_s = start_s
            while load:
                at_s += draw.expovariate(load / COST.chunk_s(tokens, 0))
                if at_s >= start_s + duration_s:
                    break
                made.append((at_s, round(tokens * draw.uniform(0.5, 1.5))))
        start_s += duration_s
    return [SimRequest(key, at_s, tokens, 1) for key, (at_s, tokens) in enumerate(sorted(made))]


def run(arriving: list[SimRequest], scaler: ScalerSettings | None, *, is_moving: bool, instances: int = 2) -> Outcome:
    def policy(role: Role) -> LapsPolicy:
        options = LapsOptions(mode=LapsMode(role.value), boundary_tokens=BOUNDARY_TOKENS, short_ttft_slo_ms=4000)
        return LapsPolicy(Laps(options, GraphGrid(), COST, InstanceLimits(1, 8192, 8192, 64)))

    spec = InstancesSpec((Role.SHORT,) * instances + (Role.LONG,) * instances, COST, boundary_tokens=BOUNDARY_TOKENS)

    def build(loop: EventLoop, listener: PrefillListener) -> InstancePool:
        return InstancePool(loop, spec, router_policy("predicted_wait"), policy, listener, 0, False)

    return simulate(arriving, build, RunOptions(pressure=LOOSE, is_moving=is_moving, scaler=scaler))


def turns(outcome: Outcome) -> int:
    """How often a pool's replicas go up after they went down, or the other way round."""
    count = 0
    for pool in LengthClass:
        replicas = [one.replicas for one in outcome.scalings if one.pool is pool]
        steps = [b - a for a, b in pairwise(replicas)]
        count += sum(a * b < 0 for a, b in pairwise(steps))
    return count


TURNING = [(400.0, 2.2, 0.8), (400.0, 0.8, 2.2)] * 2
FREE = ScalerSettings(SCALE_POOLS, queue_s=15.0, up_stabilisation_s=0.0)
RULE = ScalerSettings(SCALE_TOTAL, queue_s=15.0)


@pytest.mark.full
@pytest.mark.slow
def test_a_scaler_of_each_pool_fights_the_controller_and_one_of_the_total_does_not() -> None:
    """The load is the same all the time, only its mix turns: nothing is to be scaled for long."""
    arriving = requests(TURNING)
    free, by_rule = (run(arriving, scaler, is_moving=True) for scaler in (FREE, RULE))
    assert free.moves
    assert by_rule.moves
    assert turns(free) >= 4
    assert turns(by_rule) <= 1
    assert len(by_rule.scalings) < len(free.scalings) / 2
    assert len(by_rule.moves) <= len(free.moves)


@pytest.mark.slow
def test_a_load_that_grows_gets_instances_and_loses_them_again() -> None:
    arriving = requests([(300.0, 0.5, 0.5), (900.0, 2.0, 3.0), (1500.0, 0.4, 0.4)])
    outcome = run(arriving, RULE, is_moving=True)
    totals = [one.short + one.long for one in outcome.pool_sizes]
    assert max(totals) >= 7  # 5 / 0.7
    assert totals[-1] <= 3
    # A replica of the long pool that is ended may serve short prompts just then: the controller moves another one.
    empty_s = [after.at_s - one.at_s for one, after in pairwise(outcome.pool_sizes) if not (one.short and one.long)]
    assert max(empty_s, default=0.0) <= LOOSE.cooldown_s + 5.0
    assert len(outcome.served) == len(arriving)  # a replica that is ended finishes what it has
    first = next(one for one in outcome.scalings if one.at_s > 0 and one.replicas > 2)
    ready = next(one for one in outcome.pool_sizes if one.short + one.long > 4)
    assert ready.at_s == pytest.approx(first.at_s + RULE.startup_s)


@pytest.mark.slow
def test_without_requests_a_pool_keeps_one_instance() -> None:
    arriving = [SimRequest(key, 300.0 * key, 100, 1) for key in range(8)]
    for scaler in (SCALE_POOLS, SCALE_TOTAL):
        outcome = run(arriving, ScalerSettings(scaler), is_moving=False)
        last = outcome.pool_sizes[-1]
        assert last.long == 1
        assert last.short == (1 if scaler == SCALE_POOLS else 2)
        assert len(outcome.served) == len(arriving)


@pytest.mark.slow
def test_a_replica_is_not_started_for_a_moment_s_queue() -> None:
    """What the controller can do in that time is left to it."""
    arriving = requests([(60.0, 0.5, 0.5), (45.0, 4.0, 0.5), (400.0, 0.5, 0.5)])
    outcome = run(arriving, ScalerSettings(SCALE_TOTAL, queue_s=15.0, up_stabilisation_s=120.0), is_moving=True)
    assert all(one.replicas <= 2 for one in outcome.scalings)


ERRORS = {
    "no pools": (sets("scaler.kind=total"), "scaler.kind needs policy.name laps and instances.short"),
    "no queue": (sets("instances.short=1", "scaler.kind=pools", "scaler.queue_s=0"), "scaler.queue_s must be"),
    "too busy": (
        sets("instances.short=1", "scaler.kind=pools", "scaler.utilisation=1.5"),
        "scaler.utilisation must be above 0 and at most 1, got 1.5",
    ),
    "back in time": (
        sets("instances.short=1", "scaler.kind=pools", "scaler.startup_s=-1"),
        "scaler.startup_s must be at least 0, got -1",
    ),
    "no window": (
        sets("instances.short=1", "scaler.kind=total", "scaler.up_stabilisation_s=nan"),
        "scaler.up_stabilisation_s must be at least 0, got nan",
    ),
    "none": (sets("instances.short=1", "scaler.kind=pools", "scaler.max=0"), "scaler.max must be at least 1"),
}


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n4000,20\n200,5\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_option(name: str, lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = ERRORS[name]
    arguments = [
        "simulate",
        *sets(f"workload.file={lengths}", "workload.rate=1", "workload.requests=20", "policy.name=laps"),
    ]
    assert main([*arguments, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: {message}" in line


def test_the_command_tells_what_controller_and_scaler_did(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "simulate",
        *sets(f"workload.file={lengths}", "workload.rate=2", "workload.requests=60", "policy.name=laps"),
    ]
    assert (
        main(
            [
                *arguments,
                *sets("instances.prefill=4", "instances.short=2", "policy.move_pools=true", "scaler.kind=total"),
            ]
        )
        == 0
    )
    assert "pools: 0 moves, 0 scalings, 4.00 instances on average" in capsys.readouterr().out


def test_an_instance_that_is_ended_gets_nothing_new_and_finishes_what_it_has() -> None:
    loop, served = EventLoop(), []

    class Listener:
        def on_first_token(self, one: ServedPrefill) -> None:
            served.append(one.request.key)

        def on_refused(self, request: SimRequest) -> None:
            raise AssertionError(request)

    spec = InstancesSpec((Role.BOTH,) * 2, COST)
    fcfs = ChunkedPrefill(QueueOrder.FCFS, 8192)
    pool = InstancePool(loop, spec, router_policy("round_robin"), lambda _: fcfs, Listener(), 0, False)
    first = pool.instances[0]
    for key in range(4):
        pool.arrive(SimRequest(key, 0.0, 1000, 1))
    assert len(first.items) == 2
    pool.drain_instance(first)
    assert first.is_alive
    for key in range(4, 8):
        pool.arrive(SimRequest(key, 0.0, 1000, 1))
    assert len(first.items) == 2
    added = pool.add_instance(Role.BOTH)
    pool.arrive(SimRequest(8, 0.0, 1000, 1))
    pool.arrive(SimRequest(9, 0.0, 1000, 1))
    assert added.items
    loop.run()
    assert sorted(served) == list(range(10))
    assert not first.is_alive
    assert pool.serving == [pool.instances[1], added]
