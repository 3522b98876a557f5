"""The controller's decision: pressure, who gives, and that it neither oscillates nor sleeps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.types import LengthClass
from sglang_ext_router.decide.instance_pressure import (
    ControllerState,
    Decision,
    DecisionReason,
    InstanceSignals,
    PoolInstance,
    PressureSettings,
    choose_instance,
    decide,
    pressure,
    quantile,
)
from support.examples import examples

SHORT, LONG = LengthClass.SHORT, LengthClass.LONG
AT_ONCE = PressureSettings(confirm_rounds=1)
INTERVAL_S = 5.0


def signals(
    utilisation: float = 0.2,
    short_s: float = 0.0,
    long_s: float = 0.0,
    slo_violation_rate: float = 0.0,
    tardiness: float = 0.0,
) -> InstanceSignals:
    return InstanceSignals(short_s, long_s, slo_violation_rate, tardiness, utilisation)


def member(
    worker_id: int,
    pool: LengthClass,
    told: InstanceSignals | None = None,
    *,
    reports: bool = True,
    is_movable: bool = True,
    in_flight: int = 0,
    joined_s: float = 0.0,
) -> PoolInstance:
    return PoolInstance(worker_id, pool, reports, told, is_movable, in_flight, joined_s)


def pools(short: Sequence[InstanceSignals], long: Sequence[InstanceSignals]) -> list[PoolInstance]:
    told = [(SHORT, one) for one in short] + [(LONG, one) for one in long]
    return [member(i, pool, one) for i, (pool, one) in enumerate(told)]


def once(instances: Sequence[PoolInstance], parameters: PressureSettings = AT_ONCE) -> Decision:
    return decide(instances, parameters, ControllerState(), 100.0)


IDLE = signals()
PRESSED_LONG = signals(1.0, long_s=20.0)
PRESSED_SHORT = signals(1.0, short_s=4.0)


# -- pressure -------------------------------------------------------------------------------------------------


def test_pressure_by_hand() -> None:
    told = InstanceSignals(2.0, 10.0, 0.25, 0.5, 0.8)
    parameters = PressureSettings(
        backlog_weight=2.0, sla_weight=3.0, utilisation_weight=0.5, short_slo_s=0.5, long_slo_s=5.0
    )
    # q = 2 / 0.5 + 10 / 5 = 6; e = 0.25 + 0.5; u = 0.8
    assert pressure(told, parameters) == pytest.approx(2 * 6 + 3 * 0.75 + 0.5 * 0.8)


def test_a_saturated_instance_is_pressed_more_than_an_idle_one() -> None:
    assert pressure(signals(1.0), AT_ONCE) > pressure(signals(0.0), AT_ONCE) == 0.0


def test_one_very_late_prefill_does_not_outweigh_everything() -> None:
    assert pressure(signals(tardiness=500.0), AT_ONCE) == pressure(signals(tardiness=1.0), AT_ONCE)


@pytest.mark.slow
@given(st.builds(InstanceSignals, *[st.floats(0, 1e6)] * 5), st.integers(0, 4), st.floats(0, 1e3))
def test_pressure_never_falls_when_a_signal_grows(told: InstanceSignals, field: int, more: float) -> None:
    values = list(told)
    values[field] += more
    assert pressure(InstanceSignals(*values), AT_ONCE) >= pressure(told, AT_ONCE) >= 0.0


@pytest.mark.parametrize(
    ("values", "expected"), [([3.0], 3.0), ([0.0, 1.0], 0.9), ([5.0, 1.0, 3.0], 4.6), (list(range(11)), 9.0)]
)
def test_p90_interpolates(values: list[float], expected: float) -> None:
    assert quantile(values, 0.9) == pytest.approx(expected)


# -- one decision ---------------------------------------------------------------------------------------------


def test_the_pressed_pool_gets_an_instance() -> None:
    for short, long, source, target in (
        ([IDLE, IDLE], [PRESSED_LONG], SHORT, LONG),
        ([PRESSED_SHORT], [IDLE, IDLE], LONG, SHORT),
    ):
        decision = once(pools(short, long))
        assert decision.reason is DecisionReason.PRESSURE
        assert decision.proposal is not None
        assert (decision.proposal.source, decision.proposal.target) == (source, target)


def reason_of(short: Sequence[InstanceSignals], long: Sequence[InstanceSignals], **changes: float) -> DecisionReason:
    decision = once(pools(short, long), PressureSettings(**{"confirm_rounds": 1, **changes}))  # type: ignore[arg-type]
    assert (decision.proposal is None) == (decision.reason is not DecisionReason.PRESSURE)
    return decision.reason


def test_why_nothing_is_moved() -> None:
    assert reason_of([IDLE, IDLE], [IDLE]) is DecisionReason.BALANCED
    assert reason_of([IDLE, IDLE], [signals(1.0)], min_pressure=0.75) is DecisionReason.NOT_PRESSED
    assert reason_of([IDLE], [PRESSED_LONG]) is DecisionReason.AT_MINIMUM
    assert reason_of([IDLE] * 3, [PRESSED_LONG], min_short=3) is DecisionReason.AT_MINIMUM
    assert reason_of([signals(0.5)] * 2, [PRESSED_LONG]) is DecisionReason.WOULD_OVERLOAD
    assert reason_of([], [PRESSED_LONG, IDLE], min_long=2) is DecisionReason.AT_MINIMUM


def test_the_margin_is_a_shifted_ratio() -> None:
    # P_short = 1.0, so the long pool must exceed 1.25 * 2 - 1 = 1.5
    short = [signals(0.0, short_s=1.0)] * 2
    for long_s, expected in ((7.4, DecisionReason.BALANCED), (7.6, DecisionReason.WOULD_REVERSE)):
        assert reason_of(short, [signals(0.0, long_s=long_s)], max_utilisation=0.9) is expected


def test_no_move_that_turns_the_imbalance_around() -> None:
    # rho 0.4 on two instances becomes 0.8 on one: waiting grows by 2 * 0.6 / 0.2 = 6
    taking = signals(1.0, long_s=9.0)  # 1.8 + 0.5
    assert reason_of([signals(0.4, short_s=0.2)] * 2, [taking]) is DecisionReason.PRESSURE  # 1.2 + 0.4 < 2.3
    assert reason_of([signals(0.4, short_s=0.32)] * 2, [taking]) is DecisionReason.WOULD_REVERSE  # 1.92 + 0.4


def test_a_pool_below_its_minimum_is_filled_without_any_pressure() -> None:
    decision = once(pools([], [IDLE, IDLE]))
    assert decision.reason is DecisionReason.BELOW_MINIMUM
    assert decision.proposal is not None
    assert decision.proposal.target is SHORT


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", range(5))
def test_a_signal_that_is_none_stops_everything(bad: float, field: int) -> None:
    values = list(IDLE)
    values[field] = bad
    decision = once(pools([IDLE, InstanceSignals(*values)], [PRESSED_LONG]))
    assert (decision.proposal, decision.reason) == (None, DecisionReason.SIGNALS_MISSING)


def test_a_missing_report_stops_everything_a_stock_engine_does_not() -> None:
    instances = pools([IDLE, IDLE], [PRESSED_LONG])
    silent = member(9, SHORT, None)
    assert once([*instances, silent]).reason is DecisionReason.SIGNALS_MISSING
    stock = member(9, SHORT, None, reports=False, is_movable=False)
    decision = once([*instances, stock])
    assert decision.proposal is not None
    assert decision.proposal.worker_id != 9
    assert decision.short.instances == 3


def test_pools_of_which_no_instance_reports_are_left_alone() -> None:
    stock = [member(i, SHORT, None, reports=False, is_movable=False) for i in range(2)]
    assert once([*stock, member(5, LONG, PRESSED_LONG)]).reason is DecisionReason.SIGNALS_MISSING


def test_who_leaves() -> None:
    candidates = [
        member(0, SHORT, signals(short_s=0.2), in_flight=0, joined_s=0),
        member(1, SHORT, signals(short_s=0.1), in_flight=2, joined_s=0),
        member(2, SHORT, signals(short_s=0.1), in_flight=1, joined_s=9),
        member(3, SHORT, signals(short_s=0.1), in_flight=1, joined_s=5),
        member(4, SHORT, signals(short_s=0.0), is_movable=False),
    ]
    assert choose_instance(candidates).worker_id == 3
    assert choose_instance(candidates[:3]).worker_id == 2
    assert choose_instance(candidates[:2]).worker_id == 1


def test_no_instance_can_leave() -> None:
    instances = [member(i, SHORT, IDLE, is_movable=False) for i in range(2)] + [member(2, LONG, PRESSED_LONG)]
    assert once(instances).reason is DecisionReason.NO_MOVABLE


# -- over time ------------------------------------------------------------------------------------------------


def test_a_move_must_be_wanted_for_several_rounds_in_a_row() -> None:
    parameters, state = PressureSettings(confirm_rounds=3), ControllerState()
    reasons = []
    for i, long in enumerate([PRESSED_LONG, PRESSED_LONG, IDLE, PRESSED_LONG, PRESSED_LONG, PRESSED_LONG]):
        # A backlog that comes and goes is not one that falls: told as a new instance each time.
        instances = [*pools([IDLE, IDLE], []), member(10 + i, LONG, long)]
        decision = decide(instances, parameters, state, INTERVAL_S * i)
        state = decision.state
        reasons.append(decision.reason.value)
    assert reasons == ["unconfirmed", "unconfirmed", "balanced", "unconfirmed", "unconfirmed", "pressure"]


def test_cool_down_after_a_move_and_after_a_failed_one() -> None:
    instances = pools([IDLE, IDLE, IDLE], [PRESSED_LONG])
    state = decide(instances, AT_ONCE, ControllerState(), 0.0).state
    for after in (state.after_move(LONG, 0.0), state.after_failed_move(0.0)):
        for now_s, expected in ((29.0, DecisionReason.COOL_DOWN), (30.0, DecisionReason.PRESSURE)):
            assert decide(instances, AT_ONCE, after, now_s).reason is expected
        assert after.cooldown_left_s(AT_ONCE, 10.0) == pytest.approx(20.0)


def test_a_move_is_taken_back_only_when_the_load_has_turned() -> None:
    first = pools([signals(0.1)] * 2, [PRESSED_LONG])
    state = decide(first, AT_ONCE, ControllerState(), 0.0).state.after_move(LONG, 0.0)
    moved = [first[0], member(1, LONG, signals(0.5)), member(2, LONG, signals(0.4))]
    late = [member(0, SHORT, signals(0.15, slo_violation_rate=1.0)), *moved[1:]]
    assert decide(late, AT_ONCE, state, 1000.0).reason is DecisionReason.NOT_TURNED
    turned = [member(0, SHORT, signals(0.9, slo_violation_rate=1.0)), *moved[1:]]
    assert decide(turned, AT_ONCE, state, 1000.0).reason is DecisionReason.PRESSURE
    # Another set of instances is another situation.
    others = [*late, member(7, LONG, signals(0.0))]
    assert decide(others, AT_ONCE, state, 1000.0).reason is DecisionReason.PRESSURE


def test_a_backlog_that_is_nearly_gone_gets_no_more_help() -> None:
    state = ControllerState()
    for i, (long_s, expected) in enumerate(
        [(60.0, DecisionReason.PRESSURE), (50.0, DecisionReason.RECOVERING), (40.0, DecisionReason.RECOVERING)]
    ):
        decision = decide(pools([IDLE, IDLE], [signals(1.0, long_s=long_s)]), AT_ONCE, state, INTERVAL_S * i)
        state = decision.state
        assert decision.reason is expected
    # At a second of backlog in five seconds it would take too long.
    slow = decide(pools([IDLE, IDLE], [signals(1.0, long_s=600.0)]), AT_ONCE, ControllerState(), 0.0).state
    assert (
        decide(pools([IDLE, IDLE], [signals(1.0, long_s=598.0)]), AT_ONCE, slow, INTERVAL_S).reason
        is DecisionReason.PRESSURE
    )


def offered(decision: Decision) -> tuple[float, float]:
    short, long = decision.short.offered_instances, decision.long.offered_instances
    assert short is not None
    assert long is not None
    return short, long


def test_the_offered_load_counts_what_piles_up() -> None:
    first = decide(pools([signals(0.5)], [signals(1.0, long_s=10.0)]), AT_ONCE, ControllerState(), 0.0)
    assert offered(first) == pytest.approx((0.5, 1.0))
    # 8 s of work more after 5 s, on an instance that was always busy
    second = decide(pools([signals(0.5)], [signals(1.0, long_s=18.0)]), AT_ONCE, first.state, 5.0)
    assert offered(second) == pytest.approx((0.5, 1.0 + 8 / 5))
    # A stock engine is taken to be as busy as its neighbours.
    instances = [*pools([signals(0.5)], [signals(1.0)]), member(9, SHORT, None, reports=False)]
    assert offered(decide(instances, AT_ONCE, ControllerState(), 0.0)) == pytest.approx((1.0, 1.0))


def test_what_an_instance_brings_along_is_no_growth() -> None:
    before = [member(0, SHORT, IDLE), member(1, SHORT, signals(0.2, short_s=50.0)), member(2, LONG, IDLE)]
    after = [before[0], member(1, LONG, signals(0.2)), before[2]]
    state = decide(before, AT_ONCE, ControllerState(), 0.0).state
    assert offered(decide(after, AT_ONCE, state, 5.0)) == pytest.approx((0.2, 0.4))


# -- a fluid model of both pools ------------------------------------------------------------------------------


class Pools:
    """Two pools under a load given in instances: queues of M/G/1 below saturation, growing ones above."""

    def __init__(self, short: int, long: int, parameters: PressureSettings, noise: Callable[[], float]) -> None:
        self.pool = {i: SHORT if i < short else LONG for i in range(short + long)}
        self.backlog_s = {SHORT: 0.0, LONG: 0.0}
        self.late: dict[LengthClass, list[float]] = {SHORT: [], LONG: []}
        self.parameters = parameters
        self.noise = noise
        self.state = ControllerState()
        self.now_s = 0.0
        self.moves: list[tuple[float, LengthClass]] = []

    def count(self, pool: LengthClass) -> int:
        return sum(one is pool for one in self.pool.values())

    def run(self, seconds: float, short: float, long: float) -> None:
        for _ in range(int(seconds / INTERVAL_S)):
            self.step({SHORT: short, LONG: long})

    def step(self, load: dict[LengthClass, float]) -> None:
        told: dict[LengthClass, InstanceSignals] = {}
        self.now_s += INTERVAL_S
        for pool in (SHORT, LONG):
            count, service_s = self.count(pool), 0.1 if pool is SHORT else 2.0
            slo_s = self.parameters.short_slo_s if pool is SHORT else self.parameters.long_slo_s
            offered = load[pool] * self.noise()
            left_s = self.backlog_s[pool] + (offered - count) * INTERVAL_S
            busy = min(1.0, (offered * INTERVAL_S + self.backlog_s[pool]) / (count * INTERVAL_S))
            self.backlog_s[pool] = max(0.0, left_s)
            rho = min(0.98, load[pool] / count)  # of the mean: work does not come from nowhere
            queue_s = max(self.backlog_s[pool] / count, service_s * rho / (1 - rho))
            self.late[pool] = [*self.late[pool], max(0.0, min(1.0, queue_s / slo_s - 0.5))][-6:]
            share = sum(self.late[pool]) / len(self.late[pool])
            one = (queue_s, 0.0) if pool is SHORT else (0.0, queue_s)
            told[pool] = InstanceSignals(*one, share, share, busy)
        instances = [member(i, pool, told[pool]) for i, pool in self.pool.items()]
        decision = decide(instances, self.parameters, self.state, self.now_s)
        self.state = decision.state
        if decision.proposal is not None:
            moved = decision.proposal
            assert self.pool[moved.worker_id] is moved.source
            self.pool[moved.worker_id] = moved.target
            self.moves.append((self.now_s, moved.target))
            self.state = self.state.after_move(moved.target, self.now_s)
        assert self.count(SHORT) >= self.parameters.min_short
        assert self.count(LONG) >= self.parameters.min_long

    @property
    def directions(self) -> list[LengthClass]:
        return [target for _, target in self.moves]


def steady() -> float:
    return 1.0


SIZES = st.tuples(st.integers(1, 8), st.integers(1, 8))


@pytest.mark.full
@settings(max_examples=examples(100), deadline=None)
@given(SIZES, st.floats(0, 10), st.floats(0, 10), st.floats(0.05, 1.0), st.integers(1, 4))
def test_a_constant_load_is_answered_by_moves_of_one_direction(
    sizes: tuple[int, int], short: float, long: float, hysteresis: float, confirm_rounds: int
) -> None:
    served = Pools(*sizes, PressureSettings(hysteresis=hysteresis, confirm_rounds=confirm_rounds), steady)
    served.run(3600, short, long)
    assert len(set(served.directions)) <= 1
    assert len(served.moves) < sum(sizes)
    assert all(at_s < 1800 for at_s, _ in served.moves)


@pytest.mark.full
@settings(max_examples=examples(50), deadline=None)
@given(SIZES, st.floats(0, 8), st.floats(0, 8), st.integers(0, 1 << 30), st.floats(0, 0.3))
def test_nor_does_it_oscillate_when_the_load_is_noisy(
    sizes: tuple[int, int], short: float, long: float, seed: int, spread: float
) -> None:
    draw = random.Random(seed)
    served = Pools(*sizes, PressureSettings(), lambda: draw.uniform(1 - spread, 1 + spread))
    served.run(3600, short, long)
    changes = sum(a is not b for a, b in zip(served.directions, served.directions[1:], strict=False))
    assert changes <= 2  # noise as large as the load's own turn is answered once
    assert len(served.moves) <= sum(sizes)


@pytest.mark.full
@settings(max_examples=examples(40), deadline=None)
@given(st.integers(3, 10), st.floats(0.0, 0.5))
def test_a_load_that_turns_is_followed(total: int, idle: float) -> None:
    """From a load that needs all but one instance in one pool to the mirror image, and back."""
    served = Pools(total - 1, 1, PressureSettings(), steady)
    heavy = (total - 1) * 0.8
    served.run(600, heavy, idle)
    assert served.moves == []
    for short, long, target in ((idle, heavy, LONG), (heavy, idle, SHORT)):
        turned_s, before = served.now_s, len(served.moves)
        served.run(3600, short, long)
        moved = served.moves[before:]
        assert moved, (served.count(SHORT), served.count(LONG))
        assert {direction for _, direction in moved} == {target}
        assert moved[0][0] - turned_s <= 90.0
        assert served.count(target) >= heavy  # the pool carries its load again
        assert moved[-1][0] - turned_s <= 90.0 + 40.0 * total
        assert served.backlog_s == {SHORT: 0.0, LONG: 0.0}


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1 << 30))
def test_minimums_and_one_at_a_time_whatever_is_reported(
    data: st.DataObject, min_short: int, min_long: int, seed: int
) -> None:
    parameters = PressureSettings(min_short=min_short, min_long=min_long, confirm_rounds=1, hysteresis=0.01)
    number = st.one_of(st.floats(0, 1e9), st.sampled_from([0.0, math.nan, math.inf, -1.0]))
    told = st.one_of(st.none(), st.builds(InstanceSignals, *[number] * 5))
    draw = random.Random(seed)
    instances = [
        member(i, draw.choice((SHORT, LONG)), data.draw(told), is_movable=draw.random() < 0.8)
        for i in range(draw.randint(0, 7))
    ]
    decision = decide(instances, parameters, ControllerState(), 0.0)
    proposal = decision.proposal
    if proposal is None:
        return
    assert all(one.signals is not None and one.signals.is_usable for one in instances)
    (moved,) = [one for one in instances if one.worker_id == proposal.worker_id]
    assert moved.is_movable
    assert moved.pool is proposal.source
    assert sum(one.pool is proposal.source for one in instances) - 1 >= parameters.minimum(proposal.source)
