"""One layout under a load: which objective a prompt has, what counts as late, and where."""

from __future__ import annotations

from itertools import product

import pytest

from sglang_ext.costs.engine_profile import FrontEnd
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.planner.simulation.decode import DecodeSpec
from sglang_ext.planner.simulation.engines import SimEngine
from sglang_ext.planner.simulation.events import SimRequest
from sglang_ext.planner.sizing.load_trial import (
    Breach,
    ClusterLayout,
    LoadTrial,
    ServiceObjective,
    SizedEngine,
    SloTargets,
    TrialSetup,
    run_load_trial,
)
from sglang_ext.types import Role

SHORT, LONG, PER_TOKEN = ServiceObjective
ENGINE = SizedEngine(SimEngine("made up", (), CostCoefficients(0.0, 1e-4, 0.0, 0.01)), 100_000, 4096)
TARGETS = SloTargets(0.2, 3.0, 0.05, 0.9)
DECODE = DecodeSpec(1)
LAYOUT = ClusterLayout(1024, 1, 1, 1, 1, 0, 1)


def setup(requests: list[SimRequest], decode: DecodeSpec = DECODE, targets: SloTargets = TARGETS) -> TrialSetup:
    return TrialSetup(tuple(requests), {1: ENGINE}, decode, targets)


def apart(count: int, tokens: int, output_tokens: int = 2, gap_s: float = 2.0) -> list[SimRequest]:
    return [SimRequest(key, gap_s * key, tokens, output_tokens) for key in range(count)]


def test_a_prompt_is_long_where_the_stretch_gives_it_more() -> None:
    requests = [SimRequest(key, float(key), tokens, 1) for key, tokens in enumerate((100, 560, 580, 8192))]
    deadlines_s = setup(requests).deadlines_s()
    assert [objective for _, objective in deadlines_s] == [SHORT, SHORT, LONG, LONG]
    assert [deadline_s for deadline_s, _ in deadlines_s] == pytest.approx(
        [0.2, 0.2, 3 * (0.01 + 0.058), 3 * (0.02 + 0.8192)]  # the last one takes two iterations
    )


def test_the_objectives_are_those_of_the_reference() -> None:
    fast = SizedEngine(SimEngine("fast", (), CostCoefficients(0.0, 1e-5, 0.0, 0.001)), 100_000, 4096)
    requests = tuple(apart(3, 4000))
    both = TrialSetup(requests, {1: ENGINE, 2: fast}, DECODE, TARGETS)
    alone = TrialSetup(requests, {2: fast}, DECODE, TARGETS)
    given = TrialSetup(requests, {2: fast}, DECODE, TARGETS, reference=ENGINE)
    assert both.deadlines_s() == given.deadlines_s() != alone.deadlines_s()


def test_the_way_of_a_request_counts_for_its_time() -> None:
    slow = SizedEngine(ENGINE.costs._replace(front_end=FrontEnd(0.05, 0.0, 0.07, 1e-5)), 100_000, 4096)
    assert slow.alone_s(1000) == pytest.approx(0.01 + 0.1 + 0.05 + 0.07 + 0.01)
    trial = LoadTrial(LAYOUT, 1.0, is_complete=True)
    quick = run_load_trial(setup(apart(5, 300)), trial).figures[SHORT]
    late = run_load_trial(TrialSetup(tuple(apart(5, 300)), {1: slow}, DECODE, TARGETS, ENGINE), trial).figures[SHORT]
    assert late.p50_s == pytest.approx(quick.p50_s + 0.12 + 0.003)
    assert quick.late == late.late == 0


def test_a_pipeline_keeps_its_rounds_short_for_short_prompts() -> None:
    """LAPS on several stages gives a round its share of the time; with that of one stage these take 0.5 s."""
    costs = SimEngine("made up", (), CostCoefficients(0.0, 4e-5, 0.0, 0.05))
    engine = SizedEngine(costs, 100_000, 16_384, (costs.on_stages(4),))
    shorts = [SimRequest(key, 0.1 + 0.31 * key, 50, 2) for key in range(1, 8)]
    requests = (SimRequest(0, 0.0, 90_000, 2), *shorts)
    targets = SloTargets(0.3, 3.0, 0.05, 1.0)
    layout = ClusterLayout(1024, 1, 1, 0, 0, 1, 1, long_pp=4)
    trial = LoadTrial(layout, 1.0, is_complete=True)
    short = run_load_trial(TrialSetup(requests, {1: engine}, DECODE, targets), trial).figures[SHORT]
    assert short.requests == 7
    assert short.p99_s <= 0.33
    assert engine.compute_s(90_000, 4) == pytest.approx(engine.compute_s(90_000) / 4)


@pytest.mark.parametrize("allowed", [True, False])
def test_as_many_may_be_late_as_the_attainment_leaves(allowed: bool) -> None:
    """Of six prompts at once on one instance some are late; one request in ten may be."""
    calm = apart(94 if allowed else 4, 300)
    start_s = calm[-1].arrival_s + 5.0
    burst = [SimRequest(len(calm) + key, start_s, 1000, 2) for key in range(6)]
    verdict = run_load_trial(setup([*calm, *burst], targets=SloTargets(0.35, 1.0, 0.05, 0.9)), LoadTrial(LAYOUT, 1.0))
    assert verdict.holds is allowed
    if not allowed:
        assert verdict.breach == Breach(SHORT, Role.SHORT)
        assert verdict.figures == {}  # it was not simulated any further


def test_slow_tokens_are_a_breach_of_decode() -> None:
    requests = [SimRequest(key, 0.1 * key, 100, 200) for key in range(20)]
    decode = DecodeSpec(1, 100_000, 0.012, 0.004)
    verdict = run_load_trial(setup(requests, decode), LoadTrial(LAYOUT, 1.0))
    assert verdict.breach == Breach(PER_TOKEN, Role.DECODE)
    assert run_load_trial(setup(requests, decode), LoadTrial(LAYOUT._replace(decode=4), 1.0)).holds


def test_a_first_token_that_waits_for_decode_is_late_there() -> None:
    requests = [SimRequest(key, 0.05 * key, 400, 100) for key in range(30)]
    decode = DecodeSpec(1, 1600)  # three requests at a time
    verdict = run_load_trial(setup(requests, decode), LoadTrial(LAYOUT, 1.0))
    assert verdict.breach == Breach(SHORT, Role.DECODE)


@pytest.mark.parametrize(("short", "load"), list(product((1, 2), (0.5, 1.0, 3.0))))
def test_stopping_early_changes_no_verdict(short: int, load: float) -> None:
    requests = [SimRequest(key, 0.07 * key, 400 if key % 3 else 3000, 20) for key in range(90)]
    layout = LAYOUT._replace(short=short, decode=2)
    early = run_load_trial(setup(requests), LoadTrial(layout, load))
    whole = run_load_trial(setup(requests), LoadTrial(layout, load, is_complete=True))
    assert early.holds == whole.holds == all(one.late <= 0.1 * one.requests for one in whole.figures.values())
    assert early.breach == whole.breach
    assert whole.figures[SHORT].requests + whole.figures[LONG].requests == len(requests)
