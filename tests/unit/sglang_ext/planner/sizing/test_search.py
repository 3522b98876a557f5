"""The search finds what trying all sizes finds: with made-up clusters of any shape, and with simulated ones."""

from __future__ import annotations

from itertools import product
from random import Random
from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.planner.simulation.decode import DecodeSpec
from sglang_ext.planner.simulation.engines import SimEngine
from sglang_ext.planner.simulation.events import SimRequest
from sglang_ext.planner.sizing.load_trial import (
    ClusterLayout,
    LoadTrial,
    LoadVerdict,
    SizedEngine,
    SloTargets,
    TrialSetup,
    run_load_trial,
)
from sglang_ext.planner.sizing.search import (
    LayoutFamily,
    LayoutSearch,
    Sizes,
    busiest_part,
    cheapest_sizes,
    largest_load_step,
)
from sglang_ext.types import Role

MOST = 6


def all_sizes(gpus_each: Sizes, max_gpus: int) -> list[tuple[int, Sizes]]:
    ranges = [range(1, max_gpus // each + 1) for each in gpus_each]
    costs = [(sum(n * each for n, each in zip(sizes, gpus_each, strict=True)), sizes) for sizes in product(*ranges)]
    return sorted(one for one in costs if one[0] <= max_gpus)


@pytest.mark.slow
@given(
    gpus_each=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    least=st.lists(st.tuples(*[st.integers(0, MOST)] * 3), min_size=0, max_size=3),
    guess=st.tuples(*[st.integers(0, 20)] * 3),
    max_gpus=st.integers(1, 14),
)
def test_the_cheapest_of_any_monotone_space_is_found(
    gpus_each: Sizes, least: list[Sizes], guess: Sizes, max_gpus: int
) -> None:
    """What holds is everything above one of some corners: so pools may stand in for each other."""

    def holds(sizes: Sizes) -> bool:
        return any(all(a >= b for a, b in zip(sizes, corner, strict=False)) for corner in least)

    expected = [cost for cost, sizes in all_sizes(gpus_each, max_gpus) if holds(sizes)]
    found = cheapest_sizes(gpus_each, max_gpus, guess[: len(gpus_each)], holds)
    if not expected:
        assert found is None
    else:
        assert found is not None
        assert holds(found)
        assert sum(n * each for n, each in zip(found, gpus_each, strict=True)) == expected[0]


@given(at=st.integers(1, 60), guess=st.integers(1, 60))
def test_a_good_guess_takes_few_trials(at: int, guess: int) -> None:
    asked = []

    def holds(sizes: Sizes) -> bool:
        asked.append(sizes)
        return sizes[0] >= at

    assert cheapest_sizes((1,), 64, (guess,), holds) == (at,)
    assert len(asked) <= 4 + 4 * abs(at - guess).bit_length()


def test_what_is_too_dear_is_not_looked_at_any_further() -> None:
    asked: list[Sizes] = []

    def holds(sizes: Sizes) -> bool:
        asked.append(sizes)
        return sizes[0] >= 10

    assert cheapest_sizes((2, 1), 64, (10, 1), holds, is_too_dear=lambda gpus: gpus > 20) is None
    assert asked == [(9, 62)]


@given(last=st.integers(0, 40), most=st.integers(0, 40))
def test_the_largest_load_is_the_last_that_holds(last: int, most: int) -> None:
    assert largest_load_step(lambda step: step <= last, most) == min(last, most)


# ---- simulated clusters ----

COSTS = SimEngine("made up", (), CostCoefficients(2e-9, 4e-5, 0.0, 0.01))
FAST = SimEngine("made up, twice as fast", (), CostCoefficients(1e-9, 2e-5, 0.0, 0.006))
TARGETS = SloTargets(0.3, 3.0, 0.04, 0.95)
DECODE = DecodeSpec(1, 60_000, 0.012, 0.0015)


def trace(seed: int, requests: int = 100, per_s: float = 14.0) -> tuple[SimRequest, ...]:
    draw = Random(seed)
    now_s, made = 0.0, []
    for key in range(requests):
        now_s += draw.expovariate(per_s)
        tokens = draw.randrange(4000, 9000) if draw.random() < 0.15 else draw.randrange(20, 900)
        made.append(SimRequest(key, now_s, tokens, draw.randrange(2, 60)))
    return tuple(made)


def setup(seed: int, requests: tuple[SimRequest, ...] | None = None) -> TrialSetup:
    engines = {1: SizedEngine(COSTS, 200_000, 4096), 2: SizedEngine(FAST, 400_000, 4096)}
    return TrialSetup(requests or trace(seed), engines, DECODE, TARGETS)


class Direct:
    """Trials in this process, each once."""

    def __init__(self, *setups: TrialSetup) -> None:
        self.setups = setups
        self.verdicts: dict[tuple[int, LoadTrial], LoadVerdict] = {}
        self._lock = Lock()

    def verdict(self, part: int, trial: LoadTrial) -> LoadVerdict:
        with self._lock:
            if (part, trial) not in self.verdicts:
                self.verdicts[part, trial] = run_load_trial(self.setups[part], trial)
            return self.verdicts[part, trial]

    def families_done(self, done: int, of: int) -> None:
        assert 0 < done <= of


FAMILIES = (
    LayoutFamily(512, 1, 1, True),
    LayoutFamily(1024, 1, 1, True),
    LayoutFamily(1024, 1, 1, False),
    LayoutFamily(1024, 2, 1, False),
)


def test_the_gpus_of_a_family_are_those_of_its_layouts() -> None:
    for is_split, pp, is_ring in (
        (True, 1, False),
        (True, 4, False),
        (True, 1, True),
        (False, 1, False),
        (False, 4, False),
        (False, 1, True),
    ):
        family = LayoutFamily(512, 2, 3, is_split, pp, is_ring)
        sizes = (5, 3, 2) if is_split else (5, 2)
        assert family.layout(sizes).gpus == sum(a * b for a, b in zip(family.gpus_each, sizes, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_of_simulated_layouts_the_cheapest_is_that_of_trying_all(seed: int) -> None:
    max_gpus = 7
    trials = Direct(setup(seed))
    found = LayoutSearch(trials.setups, trials, map, max_gpus, len(FAMILIES)).cheapest(FAMILIES, 1.1)
    searched = len(trials.verdicts)
    everything = [
        (cost, family.layout(sizes)) for family in FAMILIES for cost, sizes in all_sizes(family.gpus_each, max_gpus)
    ]
    holding = [(cost, layout) for cost, layout in everything if trials.verdict(0, LoadTrial(layout, 1.1)).holds]
    assert holding
    assert [layout.gpus for layout in found] == sorted(layout.gpus for layout in found)
    by_family = {}
    for cost, layout in holding:
        key = (layout.boundary_tokens, layout.tp, layout.both == 0)
        by_family[key] = min(cost, by_family.get(key, cost))
    assert {(one.boundary_tokens, one.tp, one.both == 0): one.gpus for one in found} == by_family
    assert found[0].gpus == min(by_family.values())
    assert searched < len(everything) / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_more_instances_and_less_load_do_not_hurt(seed: int) -> None:
    """What the search rests on, on simulated clusters: no layout holds where a larger one does not."""
    trials = Direct(setup(seed))
    sizes = [
        ClusterLayout(1024, 1, 1, short, long, 0, decode) for short, long, decode in product((1, 2), (1, 2, 3), (1, 2))
    ]
    holds = {
        (one, load): trials.verdict(0, LoadTrial(one, load)).holds for one in sizes for load in (0.6, 0.9, 1.2, 2.5)
    }
    for (small, load), is_enough in holds.items():
        for (large, less), is_enough_too in holds.items():
            if is_enough and less <= load and all(a <= b for a, b in zip(small, large, strict=True)):
                assert is_enough_too, f"{small} holds at {load}, {large} does not at {less}"
    assert len(set(holds.values())) == 2


@pytest.mark.slow
def test_a_long_trace_is_compared_on_its_busiest_part_first() -> None:
    calm = [SimRequest(key, float(key), 100, 2) for key in range(400)]
    busy = [SimRequest(400 + key, 400 + 0.1 * key, 3000, 2) for key in range(200)]
    part = busiest_part([*calm, *busy], 160, SizedEngine(COSTS, 200_000, 4096))
    assert len(part) == 160
    assert part[0].arrival_s == 0.0
    assert all(one.prompt_tokens == 3000 for one in part)
    whole = setup(5)
    setups = (setup(5, whole.requests[:60]), whole)
    trials = Direct(*setups)
    found = LayoutSearch(setups, trials, map, 7, 2).cheapest(FAMILIES, 1.0)
    assert len(found) == 2
    assert {part for part, _ in trials.verdicts} == {0, 1}
    assert all(trials.verdict(1, LoadTrial(one, 1.0)).holds for one in found)


@pytest.mark.slow
def test_what_breaks_first_is_named_with_its_pool() -> None:
    trials = Direct(setup(1))
    search = LayoutSearch(trials.setups, trials, map, 30, 1)
    for layout, pool, load in (
        (ClusterLayout(1024, 1, 1, 1, 6, 0, 6), Role.SHORT, 1.0),
        (ClusterLayout(1024, 1, 1, 6, 1, 0, 6), Role.LONG, 0.3),
        (ClusterLayout(1024, 1, 1, 6, 6, 0, 1), Role.DECODE, 0.3),
    ):
        sized = search.measured(layout, load)
        assert sized.breach is not None
        assert sized.breach.pool is pool
        assert trials.verdict(0, LoadTrial(layout, sized.load)).holds
