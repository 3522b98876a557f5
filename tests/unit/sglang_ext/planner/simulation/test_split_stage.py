"""Two pools: who goes where, whose times they are, and the options that make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from baselines.prefill_orders import fcfs
from baselines.systems import ClusterSystem, SystemOptions, build_cluster
from sglang_ext.cli import main
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec
from sglang_ext.planner.simulation.events import EventLoop, PrefillListener, SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, QueueOrder
from sglang_ext.planner.simulation.run import RunOptions, simulate
from sglang_ext.planner.simulation.scenario import SplitStage
from sglang_ext.types import Role
from support.settings import sets

COSTS = CostCoefficients(alpha_s=0.0, token_s=1e-3, read_s=0.0, kappa_s=0.0)
CANDIDATES = (SpCandidate(1, SpCost(0.0, 1e-3, 0.0, 0.0)), SpCandidate(2, SpCost(0.1, 0.5e-3, 0.0, 0.0)))


def split(loop: EventLoop, listener: PrefillListener) -> SplitStage:
    """One instance for up to 100 new tokens, two for longer prompts."""
    spec = InstancesSpec((Role.BOTH,), COSTS, boundary_tokens=100)
    short = InstancePool(
        loop, spec, router_policy("least_loaded"), lambda _: ChunkedPrefill(QueueOrder.FCFS, 8192), listener, 0, True
    )
    options = SystemOptions(ClusterSystem.POOL, order=fcfs)
    return SplitStage(
        100, short, build_cluster(options, loop, ClusterSpec(2), CANDIDATES, listener, is_recorded=True), 1
    )


def test_each_pool_serves_its_class_and_does_not_wait_for_the_other() -> None:
    requests = [SimRequest(0, 0.0, 10_000, 1), SimRequest(1, 0.0, 101, 1), SimRequest(2, 0.0, 100, 1)]
    requests.append(SimRequest(3, 0.01, 5_000, 1, cached_tokens=4_950))
    outcome = simulate(requests, split)
    ttfts_s = {one.request.key: one.ttft_s for one in outcome.served}
    # 10,000 on both, then 101; 100, then the 50 that are not cached.
    assert ttfts_s == pytest.approx({0: 5.1, 1: 5.201, 2: 0.1, 3: 0.14})
    assert {busy.key: busy.instance for busy in outcome.timeline if busy.key >= 2} == {2: 0, 3: 0}
    assert {busy.instance for busy in outcome.timeline if busy.key == 0} == {1, 2}
    assert not outcome.unfinished


def test_what_has_not_ended_is_unfinished_in_either() -> None:
    requests = [SimRequest(0, 0.0, 10_000, 1), SimRequest(1, 0.0, 50, 1), SimRequest(2, 0.9, 100, 1)]
    outcome = simulate(requests, split, RunOptions(until_s=0.95))
    assert sorted(one.key for one in outcome.unfinished) == [0, 2]
    assert [one.request.key for one in outcome.served] == [1]


@pytest.mark.slow
def test_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "lengths.csv"
    workload.write_text("num_prefill_tokens,num_decode_tokens\n100,1\n200000,1\n", encoding="utf-8")
    arguments = [
        "simulate",
        *sets(f"workload.file={workload}", "workload.rate=0.5", "workload.requests=200", "policy.name=pool"),
    ]
    worst_short_s = []
    for more in ([], sets("instances.short=1")):
        assert main([*arguments, *more]) == 0
        short = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("short"))
        worst_short_s.append(float(short.split()[9]))
    assert worst_short_s[1] < 0.5 < 2.0 < worst_short_s[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            sets("instances.short=16", "policy.name=pool"),
            "instances.short must be at least 1 and leave one of 16, got 16",
        ),
        (
            sets("instances.short=-1", "policy.name=pool"),
            "instances.short must be at least 1 and leave one of 16, got -1",
        ),
        (sets("instances.short=2", "policy.name=hrrn"), "instances.short: policy.name hrrn keeps no classes apart"),
        (
            sets("instances.short=2", "instances.fail=0:1:1", "policy.name=pool"),
            "instances.fail is not simulated with instances.short",
        ),
        (sets("policy.move_pools=true"), "policy.move_pools needs policy.name laps"),
        (sets("policy.chunk_s=1", "policy.name=laps"), "policy.chunk_s needs policy.name pool or one, not laps"),
        (sets("policy.chunk_s=0", "policy.name=pool"), "policy.chunk_s must be above 0, got 0"),
        (sets("workload.think_s=nan"), "workload.think_s must be above 0, got nan"),
    ],
)
def test_an_impossible_pool_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tmp_path / "lengths.csv"
    workload.write_text("num_prefill_tokens,num_decode_tokens\n100,1\n", encoding="utf-8")
    assert main(["simulate", *sets(f"workload.file={workload}", "workload.rate=1"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
