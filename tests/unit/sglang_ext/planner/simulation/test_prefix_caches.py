"""Prefix caches of simulated instances: what is found where, what routers make of it, and when it is gone."""

from __future__ import annotations

import pytest

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.planner.simulation.cluster_spec import Failure
from sglang_ext.planner.simulation.events import Prefix, ServedPrefill, SimRequest
from sglang_ext.planner.simulation.instances import InstancePool, InstancesSpec, router_policy
from sglang_ext.planner.simulation.iteration_policies import ChunkedPrefill, QueueOrder
from sglang_ext.planner.simulation.report import as_json, make_report, table
from sglang_ext.planner.simulation.run import Outcome, RunOptions, simulate
from sglang_ext.types import Role

# 1 ms per token and 0.1 s per iteration.
COSTS = CostCoefficients(alpha_s=0.0, token_s=1e-3, read_s=0.0, kappa_s=0.1)


def turn(key: int, at_s: float, tokens: int, session: int = 0) -> SimRequest:
    """A prompt whose full blocks of 64 tokens are its session's."""
    blocks = tuple(1000 * session + block for block in range(tokens // 64))
    return SimRequest(key, at_s, tokens, 1, 0, Prefix(64, blocks))


def serve(
    requests: list[SimRequest],
    roles: tuple[Role, ...] = (Role.BOTH,),
    router: str = "predicted_wait",
    kv_tokens: int = 1_000_000,
    failures: tuple[Failure, ...] = (),
) -> Outcome:
    spec = InstancesSpec(roles, COSTS, kv_tokens)
    return simulate(
        requests,
        lambda loop, listener: InstancePool(
            loop,
            spec,
            router_policy(router),
            lambda _: ChunkedPrefill(QueueOrder.FCFS, 8192),
            listener,
            0,
            is_recorded=True,
        ),
        RunOptions(failures=failures),
    )


def by_key(outcome: Outcome) -> list[ServedPrefill]:
    return sorted(outcome.served, key=lambda one: one.request.key)


def cached_tokens(outcome: Outcome) -> list[int]:
    return [one.request.cached_tokens for one in by_key(outcome)]


def test_a_later_turn_computes_what_is_new_and_what_did_not_fill_a_block() -> None:
    outcome = serve([turn(0, 0.0, 1000), turn(1, 10.0, 1500)])
    assert cached_tokens(outcome) == [0, 960]
    assert [one.ttft_s for one in by_key(outcome)] == pytest.approx([1.1, 0.64])


def test_the_last_token_is_always_computed() -> None:
    outcome = serve([turn(0, 0.0, 640), turn(1, 10.0, 640)])
    assert cached_tokens(outcome) == [0, 639]


def test_a_prompt_that_has_not_ended_is_in_no_cache() -> None:
    assert cached_tokens(serve([turn(0, 0.0, 1000), turn(1, 0.5, 1000), turn(2, 5.0, 1000)])) == [0, 0, 960]


def test_a_router_that_knows_sends_a_turn_where_its_prefix_is_unless_the_queue_is_longer_than_it_saves() -> None:
    requests = [turn(0, 0.0, 1000), turn(1, 5.0, 1000, session=1), turn(2, 10.0, 1500), turn(3, 20.0, 1500)]
    both = (Role.BOTH, Role.BOTH)
    assert cached_tokens(serve(requests, both)) == [0, 0, 960, 1472]
    assert cached_tokens(serve(requests, both, "round_robin")) == [0, 0, 960, 0]
    queued = [turn(0, 0.0, 1000), turn(1, 10.0, 8000), turn(2, 10.1, 1500)]
    outcome = serve([queued[0], queued[1]._replace(prefix=Prefix(64, queued[0].prefix.blocks)), queued[2]], both)  # type: ignore[union-attr]
    # The other instance is idle: 1,500 tokens there are less than the 7,040 before it here.
    assert cached_tokens(outcome) == [0, 960, 0]


def test_what_was_used_least_recently_makes_room() -> None:
    requests = [turn(0, 0.0, 960), turn(1, 10.0, 640, session=1), turn(2, 20.0, 960), turn(3, 30.0, 640, session=1)]
    # 20 blocks: the second session takes 10, so the end of the first one is dropped; then the end of the second.
    assert cached_tokens(serve(requests, kv_tokens=1280)) == [0, 0, 640, 320]


def test_a_failed_instance_has_nothing_left() -> None:
    requests = [turn(0, 0.0, 1000), turn(1, 10.0, 1500)]
    assert cached_tokens(serve(requests, failures=(Failure(0, 5.0, 1.0),))) == [0, 0]
    # What was lost on the way is computed whole, although part of it was cached where it began.
    outcome = serve(requests, failures=(Failure(0, 10.1, 1.0),))
    assert cached_tokens(outcome) == [0, 0]
    assert by_key(outcome)[1].first_token_s == pytest.approx(11.1 + 1.6)


def test_a_long_conversation_stays_on_the_long_instance_that_holds_it() -> None:
    requests = [turn(0, 0.0, 1000), turn(1, 10.0, 1050), turn(2, 20.0, 100, session=1)]
    outcome = serve(requests, (Role.SHORT, Role.LONG))
    assert {busy.key: busy.instance for busy in outcome.timeline} == {0: 1, 1: 1, 2: 0}
    assert by_key(outcome)[1].request.new_tokens == 1050 - 960


def test_the_report_says_how_much_was_cached() -> None:
    report = make_report(serve([turn(0, 0.0, 1000), turn(1, 10.0, 1000)]), None, 1.0, 256)
    assert report.cached_share == pytest.approx(0.48)
    assert "prefix caches had 48.0% of the prompts' tokens" in table([report])
    assert as_json(report)["cached_share"] == pytest.approx(0.48)
    # With it the second is short.
    assert [one.requests for one in report.classes] == [2, 1, 1]


def test_requests_without_a_prefix_keep_what_the_workload_says() -> None:
    outcome = serve([SimRequest(0, 0.0, 1000, 1, 400), SimRequest(1, 10.0, 1000, 1)])
    assert cached_tokens(outcome) == [400, 0]
