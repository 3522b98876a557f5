"""Which instance changes between prefill and decode: the empty side, the pressed side, and the way home."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.instance_pressure import PressureSettings
from sglang_ext_router.decide.role_choice import (
    RoleInstance,
    RoleState,
    RoleSwitch,
    Side,
    SwitchReason,
    choose_switch,
)

PREFILL, DECODE = Side.PREFILL, Side.DECODE
SETTINGS = PressureSettings(confirm_rounds=1)  # pressed from 0.75 on, spares up to 0.6


def instance(
    number: int,
    side: Side,
    used_share: float = 0.0,
    *,
    home: Side | None = None,
    movable: bool = True,
    in_flight: int = 0,
) -> RoleInstance:
    return RoleInstance(number, side, home or side, movable, used_share, in_flight)


def chosen(*instances: RoleInstance, settings: PressureSettings = SETTINGS) -> RoleSwitch | None:
    return choose_switch(instances, settings, RoleState(), 0.0)[0]


def test_without_prefill_the_decode_instance_with_the_fewest_requests_is_switched() -> None:
    given = (instance(1, DECODE, in_flight=3), instance(2, DECODE, in_flight=1), instance(3, DECODE, movable=False))
    assert chosen(*given) == RoleSwitch(2, PREFILL, SwitchReason.BELOW_MINIMUM)


def test_a_side_never_gives_its_last_instance() -> None:
    assert chosen(instance(1, DECODE)) is None
    assert chosen(instance(1, DECODE), instance(2, PREFILL, 1.0)) is None
    assert chosen(instance(1, DECODE, home=PREFILL), instance(2, PREFILL)) is None


def test_the_pressed_side_gets_one_that_the_other_can_spare() -> None:
    pressed = (instance(1, PREFILL, 0.8), instance(2, DECODE, 0.3), instance(3, DECODE, 0.2))
    assert chosen(*pressed) == RoleSwitch(3, PREFILL, SwitchReason.PRESSURE)
    assert chosen(pressed[0]._replace(used_share=0.7), *pressed[1:]) is None
    assert chosen(*pressed[:2], instance(3, DECODE, 0.4)) is None  # the one left would use 0.7
    mirrored = [entry._replace(side=entry.side.other, home=entry.side.other) for entry in pressed]
    assert chosen(*mirrored) == RoleSwitch(3, DECODE, SwitchReason.PRESSURE)


def test_an_instance_goes_home_once_it_is_not_needed() -> None:
    helping = instance(2, PREFILL, 0.2, home=DECODE)
    assert chosen(instance(1, PREFILL, 0.3), helping, instance(3, DECODE)) == RoleSwitch(2, DECODE, SwitchReason.RETURN)
    assert chosen(instance(1, PREFILL, 0.5), helping, instance(3, DECODE)) is None
    assert chosen(helping, instance(3, DECODE)) is None  # it is the only one that prefills


def test_a_switch_is_confirmed_and_cools_down_but_for_an_empty_side() -> None:
    settings = PressureSettings(confirm_rounds=3, cooldown_s=30.0)
    pressed = (instance(1, PREFILL, 1.0), instance(2, DECODE), instance(3, DECODE))
    state, switches = RoleState(last_switch_s=0.0), []
    for now_s in (10.0, 15.0, 20.0, 31.0):
        switch, state = choose_switch(pressed, settings, state, now_s)
        switches.append(switch is not None)
    assert switches == [False, False, False, True]
    state, switches = RoleState(last_switch_s=0.0), []
    for now_s in (1.0, 2.0, 3.0):
        switch, state = choose_switch(pressed[1:], settings, state, now_s)
        switches.append(switch is not None)
    assert switches == [False, False, True]
    _, state = choose_switch((instance(1, PREFILL), instance(2, DECODE)), settings, state, 4.0)
    assert state.wanted_rounds == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(Side), st.sampled_from(Side), st.floats(0.0, 1.0), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_under_a_constant_load_no_instance_goes_back_and_forth(drawn: list[tuple[Side, Side, float, bool]]) -> None:
    """A side uses the same capacity with any number of instances: after some switches there is nothing to do."""
    loads = {side: sum(used for own, _, used, _ in drawn if own is side) for side in Side}
    sides = [own for own, _, _, _ in drawn]
    seen = []
    for _ in range(2 * len(drawn) + 1):
        shares = {side: min(1.0, loads[side] / max(1, sides.count(side))) for side in Side}
        instances = [
            instance(number, sides[number], shares[sides[number]], home=home, movable=movable)
            for number, (_, home, _, movable) in enumerate(drawn)
        ]
        switch = chosen(*instances)
        if switch is None:
            return
        seen.append(switch)
        assert instances[switch.worker_id].is_movable
        sides[switch.worker_id] = switch.target
        assert sides.count(switch.target.other) >= 1
    raise AssertionError(f"no end: {seen}")
