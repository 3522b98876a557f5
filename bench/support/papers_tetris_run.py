"""Runs Tetris's experiment over traces and systems in several processes, and puts the figures together."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from statistics import fmean
from typing import NamedTuple

from sglang_ext.planner.simulation.engines import ENGINE_NAMES, EngineError, load_engine
from sglang_ext.planner.simulation.workload import WorkloadError
from support.papers_tetris import FLUID, Measured, Scale, Trace, Ttft, load_trace, measure, measure_ttft, systems
from support.result import give_up, progress

TRACES = ("short", "medium", "long")
OURS = "pool"
PAPER_BASELINES = ("fixed-sp16", "fixed-sp8", "loongserve")
OTHER_BASELINES = ("fixed-sp2", "fixed-sp4", "loongserve-idle")
UNTUNED_SEEDS = (200, 201)  # nothing was ever chosen by them
PAPER_SYSTEMS = ("tetris-single", "tetris")
ALL_OTHERS = (*PAPER_BASELINES, *OTHER_BASELINES, *PAPER_SYSTEMS)
SEEDS = (0, 1, 2, *UNTUNED_SEEDS)
SMALL = Scale(20_000, SEEDS, 4_000, (0.1, 0.2, 0.35, 0.5, 0.65))
FULL = Scale(20_000, SEEDS, 20_000, tuple(round(0.05 * step, 2) for step in range(1, 16)))


class _Task(NamedTuple):
    name: str
    trace: Trace
    scale: Scale
    rate_per_s: float | None  # None: find the critical rate


class Outcome(NamedTuple):
    """Of a task: a critical rate, or times at a load and the improvement rate that they are with."""

    task: _Task
    measured: Measured | None
    ttft: Ttft | None
    improvement_rate: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--full", action="store_true", help="improvement rates in steps of 0.05, on 20,000 arrivals")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="of the arrivals")
    parser.add_argument("--engine", default="table1", help=f"costs: {ENGINE_NAMES}, or a profile")
    parser.set_defaults(experiment=run)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Return the figures of all traces; prints a line per system."""
    try:
        engine = load_engine(args.engine)
    except EngineError as error:
        give_up(f"--engine: {error}")
    scale = (FULL if args.full else SMALL)._replace(engine=args.engine, seeds=tuple(args.seeds))
    every = systems(engine)
    try:
        traces = {name: load_trace(args.data / "tetris_like", name, engine) for name in args.traces}
    except WorkloadError as error:
        give_up(f"--data: {error}")
    with get_context("spawn").Pool(args.processes) as pool:
        # The longest tasks first, so that both processes end together.
        names = list(reversed(every))
        tasks = [_Task(name, trace, scale, None) for name in names for trace in traces.values()]
        critical: dict[str, dict[str, Measured]] = {name: {} for name in traces}
        for done in pool.imap_unordered(_carry_out, tasks):
            assert done.measured is not None
            critical[done.task.trace.name][done.task.name] = done.measured
            _tell_critical(done.task.trace, done.measured)
        rates = {name: _rate_of_best(found, PAPER_BASELINES) for name, found in critical.items()}
        rates_of_all = {name: _rate_of_best(found, ALL_OTHERS) for name, found in critical.items()}
        measured = [name for name in names if name != FLUID]
        tasks = [_Task(name, trace, scale, rates[trace.name]) for name in measured for trace in traces.values()]
        tasks += [
            _Task(name, trace, scale, rates_of_all[trace.name])
            for name in measured
            if name in (OURS, *ALL_OTHERS)
            for trace in traces.values()
        ]
        ttfts: dict[str, dict[str, Ttft]] = {name: {} for name in traces}
        ttfts_of_all: dict[str, dict[str, Ttft]] = {name: {} for name in traces}
        for done in pool.imap_unordered(_carry_out, tasks):
            assert done.ttft is not None
            trace_name = done.task.trace.name
            found = ttfts if done.task.rate_per_s == rates[trace_name] else ttfts_of_all
            found[trace_name][done.task.name] = done.ttft
            progress(
                f"{done.task.trace.name:7} {done.task.name:16} at {done.task.rate_per_s:.3f}/s: "
                f"P50 {done.ttft.p50_s:.3f} s, P99 {done.ttft.p99_s:.3f} s"
            )
    return {
        "engine": engine.name,
        "requests": scale.requests,
        "seeds": list(scale.seeds),
        "improvement_rates": list(scale.improvement_rates),
        "calibration_requests": scale.calibration_requests,
        **{
            name: figures(trace, critical[name], rates[name], ttfts[name])
            | figures_at_best_of_all(rates_of_all[name], ttfts_of_all[name] or ttfts[name])
            for name, trace in traces.items()
        },
    }


def _rate_of_best(critical: Mapping[str, Measured], names: Sequence[str]) -> float:
    return critical[best_of(critical, _known(critical, names))].mean_critical_per_s


def _carry_out(task: _Task) -> Outcome:
    options = systems(load_engine(task.scale.engine))[task.name]
    if task.rate_per_s is None:
        return Outcome(task, measure(task.name, options, task.trace, task.scale), None, None)
    assert options is not None
    ttft, rate = measure_ttft(options, task.trace, task.rate_per_s, task.scale)
    return Outcome(task, None, ttft, rate)


def _tell_critical(trace: Trace, measured: Measured) -> None:
    rate = "" if measured.improvement_rate is None else f", improvement rate {measured.improvement_rate}"
    progress(
        f"{trace.name:7} {measured.name:16} critical rate {measured.mean_critical_per_s:.3f}/s, "
        f"{measured.mean_critical_per_s / trace.bound_per_s:.3f} of the bound{rate}"
    )


def best_of(critical: Mapping[str, Measured], names: Sequence[str]) -> str:
    """The system among `names` with the highest critical rate."""
    return max(names, key=lambda name: critical[name].mean_critical_per_s)


def figures(
    trace: Trace, critical: Mapping[str, Measured], rate_per_s: float, times: Mapping[str, Ttft]
) -> dict[str, object]:
    """The figures of one trace. Ratios of rates are means over seeds of the ratio of one seed."""
    ours = critical[OURS]
    best = best_of(critical, _known(critical, PAPER_BASELINES))
    best_of_all = best_of(critical, _known(critical, ALL_OTHERS))
    return {
        "light_load_mean_s": trace.light_s,
        "limit_s": trace.limit_s,
        "bound_per_s": trace.bound_per_s,
        "critical_over_fluid": _ratio(ours, critical[FLUID]),
        "critical_over_fluid_by_seed": _ratios(ours, critical[FLUID]),
        "critical_over_fluid_round_robin": _ratio(critical["pool-round-robin"], critical[FLUID]),
        "critical_over_fluid_noise_5": _ratio(critical["pool-noise-5"], critical[FLUID]),
        "critical_over_fluid_noise_10": _ratio(critical["pool-noise-10"], critical[FLUID]),
        "critical_over_bound": ours.mean_critical_per_s / trace.bound_per_s,
        "best_baseline": best,
        "critical_over_best_baseline": _ratio(ours, critical[best]),
        "best_of_all": best_of_all,
        "critical_over_best_of_all": _ratio(ours, critical[best_of_all]),
        "at_rate_per_s": rate_per_s,
        "p99_over_lowest_baseline": _p99_over_lowest(times),
        "p50_gain": times[best].p50_s / times[OURS].p50_s,
        "p99_gain": times[best].p99_s / times[OURS].p99_s,
        "chunking_p50_gain": times["tetris-single"].p50_s / times["tetris"].p50_s,
        "chunking_p99_gain": times["tetris-single"].p99_s / times["tetris"].p99_s,
        "price_p50_gain": times["tetris"].p50_s / times[OURS].p50_s,
        "price_p99_gain": times["tetris"].p99_s / times[OURS].p99_s,
        "systems": {
            name: {
                "critical_per_s": list(one.critical_per_s),
                "improvement_rate": one.improvement_rate,
                **({"p50_s": times[name].p50_s, "p99_s": times[name].p99_s} if name in times else {}),
            }
            for name, one in sorted(critical.items())
        },
    }


def figures_at_best_of_all(rate_per_s: float, times: Mapping[str, Ttft]) -> dict[str, object]:
    """Times at the critical rate of the best other system, where the best of the paper's would not keep up."""
    return {
        "at_best_of_all_per_s": rate_per_s,
        "p99_over_lowest_at_best_of_all": _p99_over_lowest(times),
        "systems_at_best_of_all": {
            name: {"p50_s": one.p50_s, "p99_s": one.p99_s} for name, one in sorted(times.items())
        },
    }


def _p99_over_lowest(times: Mapping[str, Ttft]) -> float:
    return times[OURS].p99_s / min(times[name].p99_s for name in _known(times, ALL_OTHERS))


def _known(found: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Those that there are costs for."""
    return [name for name in names if name in found]


def _ratio(measured: Measured, other: Measured) -> float:
    return fmean(_ratios(measured, other))


def _ratios(measured: Measured, other: Measured) -> list[float]:
    return [x / y for x, y in zip(measured.critical_per_s, other.critical_per_s, strict=True)]
