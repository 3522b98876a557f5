"""Tetris's experiment: the critical rate of each system, and times to first token at the best baseline's.

Light-load time: no queue, best SP size. Limit: 25 times its mean. Critical rate: the highest at which the P99 TTFT is
within the limit and none is above three times the limit, bisected to 1%. Systems that go by deadlines are given the
limit as every prompt's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from baselines.prefill_orders import fcfs
from baselines.systems import ClusterSystem, SystemOptions, build_cluster
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec
from sglang_ext.planner.simulation.engines import SimEngine, load_engine
from sglang_ext.planner.simulation.events import (
    EventLoop,
    PrefillListener,
    ServedPrefill,
    SimRequest,
    feed,
)
from sglang_ext.planner.simulation.run import Collector
from sglang_ext.planner.simulation.workload import drawn_requests, load_workload
from sglang_ext_router.decide.instance_pressure import quantile

INSTANCES = 16
LIMIT_FACTOR = 25.0
WARM_UP_SHARE = 0.1
PRECISION = 0.01
CALIBRATION_SEED = 1000  # improvement rates are chosen on arrivals that are not measured with
FLUID = "fluid"

Lengths = tuple[tuple[int, int], ...]


class Scale(NamedTuple):
    """Describes how much is run."""

    requests: int
    seeds: tuple[int, ...]
    calibration_requests: int
    improvement_rates: tuple[float, ...]
    engine: str = "table1"


class Trace(NamedTuple):
    """Lengths, and what follows from them and the costs."""

    name: str
    lengths: Lengths
    bound_per_s: float  # no schedule of whole instances serves more
    light_s: float  # mean time without a queue on the best size
    limit_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One system on one trace."""

    name: str
    improvement_rate: float | None  # with the highest critical rate on the calibration arrivals
    critical_per_s: tuple[float, ...]  # by seed

    @property
    def mean_critical_per_s(self) -> float:
        return fmean(self.critical_per_s)


class Ttft(NamedTuple):
    """At one load, over all seeds together."""

    mean_s: float
    p50_s: float
    p99_s: float


def load_trace(folder: Path, name: str, engine: SimEngine) -> Trace:
    """Read `tetris_like_{name}.csv`. WorkloadError as `load_workload`."""
    lengths = load_workload(folder / f"tetris_like_{name}.csv").lengths
    cheapest_s = fmean(_cheapest_s(engine, prompt) for prompt, _ in lengths)
    light_s = fmean(
        min(candidate.cost.predict_s(0, prompt) for candidate in engine.candidates) for prompt, _ in lengths
    )
    return Trace(name, lengths, INSTANCES / cheapest_s, light_s, LIMIT_FACTOR * light_s)


def _cheapest_s(engine: SimEngine, prompt_tokens: int) -> float:
    """min_s s T_s(0, L): the least time of instances that a prompt takes."""
    return min(candidate.size * candidate.cost.predict_s(0, prompt_tokens) for candidate in engine.candidates)


def arrivals(trace: Trace, rate_per_s: float, requests: int, seed: int) -> Iterable[SimRequest]:
    return drawn_requests(trace.lengths, requests, rate_per_s, seed)


# ---- runs ----


def run_system(
    options: SystemOptions,
    engine: SimEngine,
    requests: Iterable[SimRequest],
    loop: EventLoop,
    listener: PrefillListener,
) -> None:
    stage = build_cluster(options, loop, ClusterSpec(INSTANCES), engine.candidates, listener)
    feed(loop, requests, stage)
    loop.run()


class CriticalLoad:
    """A PrefillListener for one question: is the load below the critical one (P99 within the limit, none above 3x)?

    `give_up` is called as soon as it is not: one request above 3 times the limit decides it, or more than 1% of all
    that count above the limit.
    """

    MAX_FACTOR = 3.0
    LATE_SHARE = 0.01

    def __init__(self, limit_s: float, requests: int, from_key: int, give_up: Callable[[], None]) -> None:
        self.limit_s = limit_s
        self.from_key = from_key
        self._max_late = self.LATE_SHARE * (requests - from_key)
        self._give_up = give_up
        self.late = 0
        self.is_above = False

    def on_first_token(self, served: ServedPrefill) -> None:
        if served.request.key < self.from_key:
            return
        ttft_s = served.first_token_s - served.request.arrival_s
        if ttft_s > self.limit_s:
            self.late += 1
            if self.late > self._max_late or ttft_s > self.MAX_FACTOR * self.limit_s:
                self._fail()

    def on_refused(self, request: SimRequest) -> None:
        self._fail()

    def _fail(self) -> None:
        self.is_above = True
        self._give_up()


def run_fluid(engine: SimEngine, requests: Iterable[SimRequest], listener: PrefillListener) -> None:
    """One first-come first-served machine that serves min_s s T_s(0, L) / 16 per request."""
    end_s = 0.0
    for request in requests:
        start_s = max(end_s, request.arrival_s)
        end_s = start_s + _cheapest_s(engine, request.new_tokens) / INSTANCES
        listener.on_first_token(ServedPrefill(request, start_s, end_s))
        if isinstance(listener, CriticalLoad) and listener.is_above:
            return


def is_below_critical(
    options: SystemOptions | None, engine: SimEngine, trace: Trace, rate_per_s: float, requests: int, seed: int
) -> bool:
    """Return whether the criterion holds; `options` None is the fluid reference."""
    loop = EventLoop()
    listener = CriticalLoad(trace.limit_s, requests, int(WARM_UP_SHARE * requests), loop.stop)
    workload = arrivals(trace, rate_per_s, requests, seed)
    if options is None:
        run_fluid(engine, workload, listener)
    else:
        run_system(options, engine, workload, loop, listener)
    return not listener.is_above


def bisect_rate(holds: Callable[[float], bool], low_per_s: float, high_per_s: float, precision: float) -> float:
    """Return the highest rate known to hold, within `precision` of one that does not.

    `low_per_s` and `high_per_s` are a guess, widened until it holds at one and not at the other.
    """
    while not holds(low_per_s):
        low_per_s, high_per_s = low_per_s / 2, low_per_s
    while holds(high_per_s):
        low_per_s, high_per_s = high_per_s, high_per_s * 1.2
    while high_per_s / low_per_s > 1 + precision:
        middle_per_s = math.sqrt(low_per_s * high_per_s)
        if holds(middle_per_s):
            low_per_s = middle_per_s
        else:
            high_per_s = middle_per_s
    return low_per_s


# ---- the experiment ----


def judged_by(options: SystemOptions, trace: Trace) -> SystemOptions:
    """The system with the deadline that it is judged by: the limit, for every prompt."""
    return replace(options, slo_s=trace.limit_s, slo_stretch=1e-9)


def measure(name: str, options: SystemOptions | None, trace: Trace, scale: Scale) -> Measured:
    """Critical rates of one system, with the improvement rate that the calibration arrivals say is best."""
    engine = load_engine(scale.engine)
    if options is not None:
        options = judged_by(options, trace)

    def critical(
        chosen: SystemOptions | None, requests: int, seed: int, low: float, high: float, precision: float
    ) -> float:
        def holds(rate_per_s: float) -> bool:
            return is_below_critical(chosen, engine, trace, rate_per_s, requests, seed)

        return bisect_rate(holds, low, high, precision)

    bound = trace.bound_per_s
    guess = (0.5 * bound, bound)
    rate = None
    if options is not None and options.system.uses_improvement_rate:
        found = {}
        for candidate in scale.improvement_rates:
            found[candidate] = critical(
                replace(options, improvement_rate=candidate),
                scale.calibration_requests,
                CALIBRATION_SEED,
                *guess,
                2 * PRECISION,
            )
        rate = max(found, key=lambda one: found[one])
        options = replace(options, improvement_rate=rate)
        guess = (0.93 * found[rate], 1.07 * found[rate])
    criticals = []
    for seed in scale.seeds:
        criticals.append(critical(options, scale.requests, seed, *guess, PRECISION))
        guess = (0.95 * criticals[-1], 1.05 * criticals[-1])
    return Measured(name, rate, tuple(criticals))


def measure_ttft(options: SystemOptions, trace: Trace, rate_per_s: float, scale: Scale) -> tuple[Ttft, float | None]:
    """TTFT at a load, and the improvement rate that gives the lowest mean on the calibration arrivals."""
    engine = load_engine(scale.engine)
    options = judged_by(options, trace)

    def at(chosen: SystemOptions, requests: int, seeds: Sequence[int]) -> Ttft:
        ttfts_s: list[float] = []
        for seed in seeds:
            listener = Collector(int(WARM_UP_SHARE * requests))
            run_system(chosen, engine, arrivals(trace, rate_per_s, requests, seed), EventLoop(), listener)
            ttfts_s += [prefill.ttft_s for prefill in listener.served]
        ttfts_s.sort()
        return Ttft(fmean(ttfts_s), quantile(ttfts_s, 0.5), quantile(ttfts_s, 0.99))

    rate = None
    if options.system.uses_improvement_rate:
        rates = scale.improvement_rates
        tried = [
            at(replace(options, improvement_rate=one), scale.calibration_requests, (CALIBRATION_SEED,)).mean_s
            for one in rates
        ]
        rate = rates[tried.index(min(tried))]
        options = replace(options, improvement_rate=rate)
    return at(options, scale.requests, scale.seeds), rate


def systems(engine: SimEngine) -> dict[str, SystemOptions | None]:
    """All that is measured, by name; None is the fluid reference. Fixed sizes that have no cost are left out."""
    sizes = {candidate.size for candidate in engine.candidates}
    return {
        name: options
        for name, options in _SYSTEMS.items()
        if options is None or options.system is not ClusterSystem.FIXED_SP or options.sp_size in sizes
    }


_SYSTEMS: dict[str, SystemOptions | None] = {
    FLUID: None,
    "fixed-sp16": SystemOptions(ClusterSystem.FIXED_SP, sp_size=16),
    "fixed-sp8": SystemOptions(ClusterSystem.FIXED_SP, sp_size=8),
    "fixed-sp4": SystemOptions(ClusterSystem.FIXED_SP, sp_size=4),
    "fixed-sp2": SystemOptions(ClusterSystem.FIXED_SP, sp_size=2),
    "loongserve": SystemOptions(ClusterSystem.LOONGSERVE),
    "loongserve-idle": SystemOptions(ClusterSystem.LOONGSERVE_IDLE),
    "tetris-single": SystemOptions(ClusterSystem.TETRIS_SINGLE),
    "tetris": SystemOptions(ClusterSystem.TETRIS),
    "pool": SystemOptions(ClusterSystem.POOL),
    "pool-fcfs": SystemOptions(ClusterSystem.POOL, order=fcfs),
    "pool-round-robin": SystemOptions(ClusterSystem.POOL, is_announced=False),
    "pool-noise-5": SystemOptions(ClusterSystem.POOL, noise=0.05),
    "pool-noise-10": SystemOptions(ClusterSystem.POOL, noise=0.1),
}
