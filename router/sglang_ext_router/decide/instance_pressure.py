"""Instance-pressure controller: from what prefill instances report to at most one move between two pools.

LAPS, section 3.2, Algorithm 2, with three departures from the text, each because the printed form misleads:

- Pressure `psi = alpha q + beta e + gamma u` counts utilisation with a plus. As printed (`- gamma u`) a saturated
  instance looks unpressed. All terms are without unit: q is queued work over the class's target time, e the SLO
  violation rate plus the tardiness, u the busy share. So pressures are never negative, and pools compare.
- The margin is a shifted ratio, `1 + P_to > (1 + tau) (1 + P_from)`: a bare ratio of two small numbers is noise.
- A move must not be undone by the next one. The giving pool is predicted after the move, from its offered load
  (busy share plus growth of the backlog, in instances, so it neither saturates nor changes while a backlog drains),
  and the opposite move waits until the offered load itself has turned.

A pool whose minimum is 0 may be emptied: its class is then served by the other pool, as far as that one can carry
both, and is judged by what it leaves waiting there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sglang_ext.types import LengthClass

_SHORT, _LONG = LengthClass.SHORT, LengthClass.LONG
POOLS = (_SHORT, _LONG)
QUANTILE = 0.9  # P90: the paper's robust aggregator
MAX_TARDINESS = 1.0  # a single very late prefill does not outweigh everything else
RECOVERY_COOLDOWNS = 2.0  # a backlog that falls and will be gone within this many cool-downs needs no more help
MIN_RECOVERY_RATE = 0.05  # instances' worth of falling backlog, per instance, that is more than noise


class InstanceSignals(NamedTuple):
    """The load that one instance reports."""

    short_backlog_s: float  # predicted time to prefill what is queued there, by class
    long_backlog_s: float
    slo_violation_rate: float  # recent share of its pool's prefills that ended after their deadline
    tardiness: float  # mean of max(0, end - deadline) / (deadline - arrival) over them
    utilisation: float  # busy share of the last seconds, 0 to 1
    stray_utilisation: float = 0.0  # the part of it that went to the other pool's class

    @property
    def backlog_s(self) -> float:
        return self.short_backlog_s + self.long_backlog_s

    def class_backlog_s(self, length_class: LengthClass) -> float:
        return self.short_backlog_s if length_class is _SHORT else self.long_backlog_s

    @property
    def is_usable(self) -> bool:
        """Return whether a decision may rest on the report: all numbers are finite and none is negative."""
        return all(math.isfinite(value) and value >= 0.0 for value in self)


class PoolInstance(NamedTuple):
    """A prefill instance that serves one pool and takes requests."""

    worker_id: int
    pool: LengthClass
    reports: bool  # whether it can be asked at all: a stock engine cannot, it counts but is not judged
    signals: InstanceSignals | None  # None: it should have reported and did not
    is_movable: bool
    in_flight: int
    joined_s: float  # since when it is in this pool


@dataclass(frozen=True, slots=True)
class PressureSettings:
    """The controller's parameters, with the defaults of the router's options."""

    backlog_weight: float = 1.0  # alpha
    sla_weight: float = 1.0  # beta
    utilisation_weight: float = 0.5  # gamma
    short_slo_s: float = 1.0  # what makes a backlog of one second much or little
    long_slo_s: float = 5.0
    hysteresis: float = 0.25  # tau
    cooldown_s: float = 30.0  # T_cool
    min_short: int = 1
    min_long: int = 1
    min_pressure: float = 0.75  # below it a pool keeps up and gets no more instances
    confirm_rounds: int = 3  # rounds in a row that must want the same move
    max_utilisation: float = 0.9  # of the giving pool afterwards
    turn_instances: float = 0.5  # by how much the offered load must have turned before a move back,
    turn_share: float = 0.25  # and by which share of all of it
    smoothing_cooldowns: float = 0.5  # time constant of the offered load, in cool-downs
    turn_smoothing_cooldowns: float = 2.0  # the same, to judge whether it has turned

    @property
    def smoothing_s(self) -> float:
        return self.smoothing_cooldowns * self.cooldown_s

    @property
    def turn_smoothing_s(self) -> float:
        return self.turn_smoothing_cooldowns * self.cooldown_s

    def minimum(self, pool: LengthClass) -> int:
        return self.min_short if pool is _SHORT else self.min_long


class DecisionReason(StrEnum):
    """The reason why an instance is moved, or none is. Bounded: these are metric labels."""

    PRESSURE = "pressure"  # move: the other pool is pressed more
    BELOW_MINIMUM = "below_minimum"  # move: the other pool has fewer instances than it must
    BALANCED = "balanced"
    NOT_PRESSED = "not_pressed"  # unequal, but the busier pool keeps up
    RECOVERING = "recovering"  # the pressed pool's backlog is falling fast enough
    AT_MINIMUM = "at_minimum"  # the other pool can give none
    NO_MOVABLE = "no_movable"  # no instance of the other pool can be switched now
    WOULD_OVERLOAD = "would_overload"  # the giving pool could not carry its load afterwards
    WOULD_REVERSE = "would_reverse"  # the giving pool would then be the one more pressed
    NOT_TURNED = "not_turned"  # it would take back the last move though the load is the same
    UNCONFIRMED = "unconfirmed"  # not wanted for long enough
    COOL_DOWN = "cool_down"
    SIGNALS_MISSING = "signals_missing"


class MoveProposal(NamedTuple):
    """Move this instance."""

    worker_id: int
    source: LengthClass
    target: LengthClass


class PoolView(NamedTuple):
    """One pool as the decision saw it."""

    instances: int
    pressure: float | None  # P90; None if no instance reports
    offered_instances: float | None  # load offered, in instances' worth of work


class _Estimate(NamedTuple):
    """The smoothed load of one length class on all instances, in instances: seconds of work per second."""

    offered: float
    settled: float  # the same, smoothed for longer: it distinguishes a change of the load from noise
    trend: float | None  # growth of the backlog; None after a single look


class _Memory(NamedTuple):
    """The last move, for as long as the same instances are there."""

    target: LengthClass
    balance: float  # settled load of the target pool minus that of the other, when it was decided
    members: frozenset[int]


class ControllerState(NamedTuple):
    """The state of the controller between two rounds. Start with `ControllerState()`."""

    observed_s: float | None = None
    # worker id → pool, short and long backlog (s) when last observed
    backlogs: Mapping[int, tuple[LengthClass, float, float]] = {}
    estimates: Mapping[LengthClass, _Estimate] = {}
    members: frozenset[int] = frozenset()
    wanted: LengthClass | None = None  # pool that the last rounds wanted to enlarge
    wanted_rounds: int = 0
    last_move_s: float | None = None
    memory: _Memory | None = None

    def cooldown_left_s(self, settings: PressureSettings, now_s: float) -> float:
        return 0.0 if self.last_move_s is None else max(0.0, self.last_move_s + settings.cooldown_s - now_s)

    def after_move(self, target: LengthClass, now_s: float) -> ControllerState:
        """A move to `target` has succeeded: cool down, and do not take it back before the load turns."""
        settled = {pool: estimate.settled for pool, estimate in self.estimates.items()}
        balance = settled.get(target, 0.0) - settled.get(_other(target), 0.0)
        memory = _Memory(target, balance, self.members)
        return self._replace(last_move_s=now_s, memory=memory, wanted=None, wanted_rounds=0)

    def after_failed_move(self, now_s: float) -> ControllerState:
        """A move came to nothing: cool down."""
        return self._replace(last_move_s=now_s, wanted=None, wanted_rounds=0)


class Decision(NamedTuple):
    """The result of one round. Without a proposal, `reason` says why."""

    proposal: MoveProposal | None
    reason: DecisionReason
    wanted: LengthClass | None  # pool that would be enlarged, were it not for `reason`
    short: PoolView
    long: PoolView
    state: ControllerState  # for the next round


def pressure(signals: InstanceSignals, settings: PressureSettings) -> float:
    """psi of one instance; without unit, never negative. LAPS Algorithm 2, see the module's text."""
    return _psi(signals, settings, 1.0, 1.0)


def decide(
    instances: Sequence[PoolInstance], settings: PressureSettings, state: ControllerState, now_s: float
) -> Decision:
    """Run one round of Algorithm 2 over the instances that take requests; called every control period.

    A round with a missing or unusable report decides nothing. The caller carries the proposal out, or not, and
    reports the outcome with `ControllerState.after_move` or `after_failed_move` before it asks again.
    """
    pools = {pool: [instance for instance in instances if instance.pool is pool] for pool in POOLS}
    if any(instance.reports and not (instance.signals and instance.signals.is_usable) for instance in instances):
        views = [PoolView(len(pools[pool]), None, None) for pool in POOLS]
        forgotten = state._replace(wanted=None, wanted_rounds=0)
        return Decision(None, DecisionReason.SIGNALS_MISSING, None, views[0], views[1], forgotten)
    state = _observe(state, instances, settings, now_s)
    views = [
        PoolView(
            len(pools[pool]),
            _pool_pressure(pool, pools, settings),
            state.estimates[pool].offered if pool in state.estimates else None,
        )
        for pool in POOLS
    ]
    target, reason = _wish(pools, views, settings, state)
    is_wish = reason in (DecisionReason.PRESSURE, DecisionReason.BELOW_MINIMUM)
    rounds = 0 if not is_wish else state.wanted_rounds + 1 if target is state.wanted else 1
    state = state._replace(wanted=target if is_wish else None, wanted_rounds=rounds)
    if is_wish and rounds < settings.confirm_rounds:
        reason, is_wish = DecisionReason.UNCONFIRMED, False
    if is_wish and state.cooldown_left_s(settings, now_s) > 0.0:
        reason, is_wish = DecisionReason.COOL_DOWN, False
    proposal = None
    if is_wish:
        assert target is not None
        source = _other(target)
        proposal = MoveProposal(choose_instance(pools[source]).worker_id, source, target)
    return Decision(proposal, reason, target, views[0], views[1], state)


def choose_instance(giving: Sequence[PoolInstance]) -> PoolInstance:
    """Return who leaves a pool: the least backlog, then the fewest in flight, then the longest there.

    ValueError if none is movable.
    """
    movable = [instance for instance in giving if instance.is_movable and instance.signals is not None]
    return min(
        movable, key=lambda instance: (_backlog_s(instance), instance.in_flight, instance.joined_s, instance.worker_id)
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile with linear interpolation between the two nearest; `values` must not be empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# ---- which move is wanted ----


def _wish(
    pools: Mapping[LengthClass, Sequence[PoolInstance]],
    views: Sequence[PoolView],
    settings: PressureSettings,
    state: ControllerState,
) -> tuple[LengthClass | None, DecisionReason]:
    """The pool to enlarge and why, or what speaks against it."""
    for target in POOLS:
        if len(pools[target]) < settings.minimum(target):
            giving = pools[_other(target)]
            if len(giving) <= settings.minimum(_other(target)):
                return target, DecisionReason.AT_MINIMUM
            return target, DecisionReason.BELOW_MINIMUM if _has_movable(giving) else DecisionReason.NO_MOVABLE
    short, long = views[0].pressure, views[1].pressure
    if short is None or long is None:
        return None, DecisionReason.SIGNALS_MISSING
    target = _SHORT if short > long else _LONG
    highest, lowest = max(short, long), min(short, long)
    if 1.0 + highest <= (1.0 + settings.hysteresis) * (1.0 + lowest):
        return None, DecisionReason.BALANCED
    if highest < settings.min_pressure:
        return target, DecisionReason.NOT_PRESSED
    if _is_recovering(target, pools, state.estimates[target], settings):
        return target, DecisionReason.RECOVERING
    return target, _check_giving(pools, highest, target, settings, state)


def _check_giving(
    pools: Mapping[LengthClass, Sequence[PoolInstance]],
    taking_pressure: float,
    target: LengthClass,
    settings: PressureSettings,
    state: ControllerState,
) -> DecisionReason:
    """PRESSURE if the giving pool can spare an instance, else why not."""
    source = _other(target)
    giving = pools[source]
    count = len(giving)
    if count <= settings.minimum(source):
        return DecisionReason.AT_MINIMUM
    if not _has_movable(giving):
        return DecisionReason.NO_MOVABLE
    offered = max(0.0, state.estimates[source].offered)
    if count == 1:
        # No instance is left: the other pool will serve both classes. That takes more than a first look at the load.
        if any(state.estimates[pool].trend is None for pool in POOLS):
            return DecisionReason.UNCONFIRMED
        together = offered + max(0.0, state.estimates[target].offered)
        if together > settings.max_utilisation * (len(pools[target]) + 1):
            return DecisionReason.WOULD_OVERLOAD
    elif offered / (count - 1) > settings.max_utilisation:
        return DecisionReason.WOULD_OVERLOAD
    elif _pressure_after(giving, source, offered, settings) >= taking_pressure:
        return DecisionReason.WOULD_REVERSE
    memory = state.memory
    if memory is not None and memory.target is source:
        there, here = state.estimates[source].settled, state.estimates[target].settled
        turn = max(settings.turn_instances, settings.turn_share * (there + here))
        if memory.balance - (there - here) < turn:
            return DecisionReason.NOT_TURNED
    return DecisionReason.PRESSURE


def _pressure_after(
    giving: Sequence[PoolInstance], source: LengthClass, offered: float, settings: PressureSettings
) -> float:
    """The pool's pressure once it has one instance less and the same load of its own class.

    Waiting in M/G/1 is proportional to rho / (1 - rho) (Pollaczek-Khinchine, with the same service times): a pool
    predicted by n / (n - 1) only would look better than it will be, and the instance would come back.
    """
    count = len(giving)
    growth = count / (count - 1)
    before, after = offered / count, offered / (count - 1)
    queue_growth = growth * (1.0 - before) / (1.0 - after)
    return quantile(
        [
            _psi(_part(instance.signals, source, is_stray=False), settings, queue_growth, growth)
            for instance in giving
            if instance.signals is not None
        ],
        QUANTILE,
    )


def _is_recovering(
    target: LengthClass,
    pools: Mapping[LengthClass, Sequence[PoolInstance]],
    estimate: _Estimate,
    settings: PressureSettings,
) -> bool:
    """Return whether the pool's backlog is shrinking already: more instances would come too late."""
    serving = pools[target] or pools[_other(target)]
    backlog_s = sum(instance.signals.class_backlog_s(target) for instance in serving if instance.signals is not None)
    falling = -(estimate.trend or 0.0)
    if falling <= MIN_RECOVERY_RATE * len(serving):
        return False
    return backlog_s / falling <= RECOVERY_COOLDOWNS * settings.cooldown_s


def _has_movable(pool: Sequence[PoolInstance]) -> bool:
    return any(instance.is_movable and instance.signals is not None for instance in pool)


# ---- measuring ----


def _psi(signals: InstanceSignals, settings: PressureSettings, queue_factor: float, load_factor: float) -> float:
    backlog = signals.short_backlog_s / settings.short_slo_s + signals.long_backlog_s / settings.long_slo_s
    deviation = min(1.0, signals.slo_violation_rate) + min(MAX_TARDINESS, signals.tardiness)
    return (
        settings.backlog_weight * backlog * queue_factor
        + settings.sla_weight * deviation * queue_factor
        + settings.utilisation_weight * min(1.0, signals.utilisation) * load_factor
    )


def _pool_pressure(
    pool: LengthClass, pools: Mapping[LengthClass, Sequence[PoolInstance]], settings: PressureSettings
) -> float | None:
    other = _other(pool)
    if pools[pool] and pools[other]:
        values = [pressure(instance.signals, settings) for instance in pools[pool] if instance.signals is not None]
    else:
        # One pool serves both classes: each is judged by its own part of the work there.
        values = [
            pressure(_part(instance.signals, pool, is_stray=not pools[pool]), settings)
            for instance in pools[pool] or pools[other]
            if instance.signals is not None
        ]
    return quantile(values, QUANTILE) if values else None


def _part(signals: InstanceSignals, length_class: LengthClass, *, is_stray: bool) -> InstanceSignals:
    """Return what one class contributes to an instance's signals; tardiness is known only for its own class."""
    stray, total = signals.stray_utilisation, signals.utilisation
    return signals._replace(
        short_backlog_s=signals.short_backlog_s if length_class is _SHORT else 0.0,
        long_backlog_s=signals.long_backlog_s if length_class is _LONG else 0.0,
        slo_violation_rate=0.0 if is_stray else signals.slo_violation_rate,
        tardiness=0.0 if is_stray else signals.tardiness,
        utilisation=stray if is_stray else max(0.0, total - stray),
    )


def _observe(
    state: ControllerState, instances: Sequence[PoolInstance], settings: PressureSettings, now_s: float
) -> ControllerState:
    """Take a round's reports into the smoothed load of each class."""
    elapsed_s = None if state.observed_s is None else now_s - state.observed_s
    if elapsed_s is not None and elapsed_s <= 0.0:
        return state
    estimates = {}
    for length_class in POOLS:
        latest = _look(state, instances, length_class, elapsed_s)
        if latest is not None:
            known = state.estimates.get(length_class) if elapsed_s is not None else None
            estimates[length_class] = _smooth(known, latest, elapsed_s or 0.0, settings)
    members_now = frozenset(instance.worker_id for instance in instances)
    memory = state.memory
    return state._replace(
        observed_s=now_s,
        backlogs={
            instance.worker_id: (instance.pool, instance.signals.short_backlog_s, instance.signals.long_backlog_s)
            for instance in instances
            if instance.signals is not None
        },
        estimates=estimates,
        members=members_now,
        memory=memory if memory is not None and memory.members == members_now else None,
    )


def _look(
    state: ControllerState, instances: Sequence[PoolInstance], length_class: LengthClass, elapsed_s: float | None
) -> _Estimate | None:
    """The load of a class as this round's reports show it; None where no instance that could serve it reports."""
    own = [instance for instance in instances if instance.pool is length_class]
    reporting = [instance for instance in instances if instance.signals is not None]
    own_reporting = sum(worker.signals is not None for worker in own)
    if not reporting or (own and not own_reporting):
        return None
    # Instances that cannot be asked are taken to be as busy as the others of their pool.
    scale = len(own) / own_reporting if own else 1.0
    busy = grown_s = 0.0
    for worker in reporting:
        signals = worker.signals
        assert signals is not None
        stray = min(signals.stray_utilisation, signals.utilisation)
        busy += scale * (min(1.0, signals.utilisation) - stray) if worker.pool is length_class else stray
        known = state.backlogs.get(worker.worker_id)
        # What an instance brings along into another pool is not growth.
        if known is not None and known[0] is worker.pool:
            grown_s += signals.class_backlog_s(length_class) - (known[1] if length_class is _SHORT else known[2])
    if elapsed_s is None:
        return _Estimate(busy, busy, None)
    growth = scale * grown_s / elapsed_s
    return _Estimate(busy + growth, busy + growth, growth)


def _smooth(known: _Estimate | None, latest: _Estimate, elapsed_s: float, settings: PressureSettings) -> _Estimate:
    if known is None or known.trend is None or latest.trend is None:
        return latest
    weight = 1.0 - math.exp(-elapsed_s / settings.smoothing_s)
    slow_weight = 1.0 - math.exp(-elapsed_s / settings.turn_smoothing_s)
    return _Estimate(
        known.offered + weight * (latest.offered - known.offered),
        known.settled + slow_weight * (latest.settled - known.settled),
        known.trend + weight * (latest.trend - known.trend),
    )


def _backlog_s(instance: PoolInstance) -> float:
    return 0.0 if instance.signals is None else instance.signals.backlog_s


def _other(pool: LengthClass) -> LengthClass:
    return _LONG if pool is _SHORT else _SHORT
