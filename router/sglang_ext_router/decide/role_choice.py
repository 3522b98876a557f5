"""Decides which instance changes between prefill and decode, where SGLang can switch its role.

A side (prefill or decode) without a ready instance is given one of the other side. A side that uses most of its
capacity is given one where the other side can spare it. An instance that serves on the other side than it was started
for goes back as soon as that side can do without it. A side never gives its last instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from sglang_ext_router.decide.instance_pressure import PressureSettings


class Side(StrEnum):
    """The two halves of a divided request. The values are SGLang's `--disaggregation-mode`."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Side:
        return Side.DECODE if self is Side.PREFILL else Side.PREFILL


class RoleInstance(NamedTuple):
    """One ready instance of a model and revision."""

    worker_id: int
    side: Side
    home: Side  # that it was given to the router for
    is_movable: bool
    used_share: float  # of its capacity, 0 to 1: the busy share of prefill, KV cache or running requests of decode
    in_flight: int


class SwitchReason(StrEnum):
    """The reason for a switch. Bounded: these are metric labels."""

    BELOW_MINIMUM = "below_minimum"  # the side has no instance
    PRESSURE = "pressure"
    RETURN = "return"  # home, where it is not needed any more


class RoleSwitch(NamedTuple):
    """An instance that shall change its side."""

    worker_id: int
    target: Side
    reason: SwitchReason


class RoleState(NamedTuple):
    """The state between two rounds. Start with `RoleState()`."""

    wanted: tuple[Side, SwitchReason] | None = None  # by the last rounds
    wanted_rounds: int = 0
    last_switch_s: float = float("-inf")


def choose_switch(
    instances: Sequence[RoleInstance], settings: PressureSettings, state: RoleState, now_s: float
) -> tuple[RoleSwitch | None, RoleState]:
    """Return the switch to make now, if any, and the state for the next round.

    A switch must be wanted in `confirm_rounds` rounds in a row, and waits for the cool-down of the one before, unless a
    side has no instance.
    """
    switch = _wish(instances, settings)
    if switch is None:
        return None, state._replace(wanted=None, wanted_rounds=0)
    wanted = (switch.target, switch.reason)
    rounds = state.wanted_rounds + 1 if wanted == state.wanted else 1
    state = state._replace(wanted=wanted, wanted_rounds=rounds)
    is_cooling = switch.reason is not SwitchReason.BELOW_MINIMUM and now_s < state.last_switch_s + settings.cooldown_s
    return (None if rounds < settings.confirm_rounds or is_cooling else switch), state


def _wish(instances: Sequence[RoleInstance], settings: PressureSettings) -> RoleSwitch | None:
    sides = {side: [instance for instance in instances if instance.side is side] for side in Side}
    for target in Side:
        giving = sides[target.other]
        if not sides[target] and len(giving) > 1 and (chosen := _choose(giving)):
            return RoleSwitch(chosen.worker_id, target, SwitchReason.BELOW_MINIMUM)
    spare_share = settings.min_pressure / (1.0 + settings.hysteresis)
    for target in Side:
        giving, taking = sides[target.other], sides[target]
        if len(giving) < 2 or not taking or _used(giving) / (len(giving) - 1) > spare_share:
            continue
        if chosen := _choose([instance for instance in giving if instance.home is target]):
            return RoleSwitch(chosen.worker_id, target, SwitchReason.RETURN)
        if _used(taking) / len(taking) >= settings.min_pressure and (chosen := _choose(giving)):
            return RoleSwitch(chosen.worker_id, target, SwitchReason.PRESSURE)
    return None


def _used(side: Sequence[RoleInstance]) -> float:
    """Return the capacity that a side uses, in instances."""
    return sum(instance.used_share for instance in side)


def _choose(giving: Sequence[RoleInstance]) -> RoleInstance | None:
    """Return the movable instance with the fewest requests; None if there is none."""
    movable = [instance for instance in giving if instance.is_movable]
    return min(
        movable, key=lambda instance: (instance.in_flight, instance.used_share, instance.worker_id), default=None
    )
