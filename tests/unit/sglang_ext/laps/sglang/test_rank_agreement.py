"""Every rank gets the steps that the first one decides on, whatever the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.laps.decide.round_plan import (
    Cut,
    DispatchReason,
    PrefillBatch,
    RoundPlan,
)
from sglang_ext.laps.sglang.rank_agreement import (
    MAX_BATCH_REQUESTS,
    PLAN_NUMBERS,
    PlanTooLongError,
    SingleRankAgreement,
    Step,
    decode,
    encode,
    steps_of,
)
from support.rank_processes import random_keys, random_plan, run_ranks, steps_as_json

keys = st.integers(1, 2**63 - 1)
steps = st.one_of(
    st.builds(Step, st.lists(keys, min_size=1, max_size=64).map(tuple), st.none()),
    st.builds(Step, st.lists(keys, max_size=8).map(tuple), st.builds(Cut, keys, st.integers(1, 2**31))),
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(steps, max_size=6).map(tuple))
def test_steps_survive_the_journey(sent: tuple[Step, ...]) -> None:
    numbers = encode(sent)
    assert all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers)
    assert decode(numbers) == sent
    assert decode(numbers + [0] * (PLAN_NUMBERS - len(numbers))) == sent
    assert decode([*numbers, 5, 6, 7]) == sent


def short_batch(requests: int) -> PrefillBatch:
    return PrefillBatch(tuple(range(1, requests + 1)), None, DispatchReason.DEPTH, None, requests, requests, 0.1)


def mixed_batch(requests: int) -> PrefillBatch:
    return short_batch(requests - 1)._replace(cut=Cut(9, 256))


CHUNK = PrefillBatch((), Cut(9, 256), DispatchReason.SHARE, None, 0, 256, 0.2)


def test_steps_keep_the_order_of_preference() -> None:
    assert steps_of(RoundPlan((short_batch(2), CHUNK), 0.0)) == (Step((1, 2), None), Step((), Cut(9, 256)))
    assert steps_of(RoundPlan((CHUNK, short_batch(1)), 0.0)) == (Step((), Cut(9, 256)), Step((1,), None))
    assert steps_of(RoundPlan((mixed_batch(2),), 0.0)) == (Step((1,), Cut(9, 256)),)
    assert steps_of(RoundPlan((), 5.0)) == ()


def test_the_longest_plan_of_a_policy_travels_and_no_longer_one() -> None:
    """A policy is told this bound, so that it never makes a plan that the other ranks would wait for in vain."""
    most = MAX_BATCH_REQUESTS
    longest = steps_of(RoundPlan((mixed_batch(most), short_batch(most), CHUNK), 0.0))
    assert len(encode(longest)) <= PLAN_NUMBERS
    assert decode(encode(longest)) == longest
    with pytest.raises(PlanTooLongError):
        encode(steps_of(RoundPlan((mixed_batch(most + 2), short_batch(most + 2), CHUNK), 0.0)))


def test_a_single_rank_decides_for_itself() -> None:
    plan = RoundPlan((short_batch(3),), 0.0)
    agreement = SingleRankAgreement()
    assert agreement.is_deciding
    assert agreement.agree(lambda: plan) == (plan, (Step((1, 2, 3), None),))


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_two_processes_agree_over_random_decisions(rounds: int, tmp_path: Path) -> None:
    deciding, following = run_ranks(2, rounds, tmp_path)
    expected = [steps_as_json(random_plan(seed)) for seed in range(rounds)]
    assert {len(steps) for steps in expected} == {0, 1, 2}
    assert deciding.steps == expected
    assert following.steps == expected
    assert (deciding.decisions, deciding.plans) == (rounds, rounds)
    assert (following.decisions, following.plans) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (3, 2)])
def test_every_stage_follows_the_first_one(stages: int, ranks: int, tmp_path: Path) -> None:
    """What a later stage finds itself does not count, and keys that are too many for a round wait for the next."""
    rounds = 200
    reports = run_ranks(ranks, rounds, tmp_path, stages)
    expected = [steps_as_json(random_plan(seed)) for seed in range(rounds)]
    keys = [found[: PLAN_NUMBERS - 1] for seed in range(rounds) if (found := random_keys(seed)) is not None]
    assert {len(found) for found in keys} == {0, 1, 5, PLAN_NUMBERS - 1}
    for position, report in enumerate(reports):
        assert report.steps == expected
        assert report.keys == keys
        assert report.numbers == [1000 * number + position % ranks for number in range(0, rounds, 3)]
        assert (report.decisions, report.plans) == ((rounds, rounds) if position == 0 else (0, 0))
