"""`sglang-ext profile rates`: the table of improvement rates for a cluster, its engine and its prompts."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
from multiprocessing import get_context
from pathlib import Path

from sglang_ext.policy.cdsp.sp_cost import SpCandidate
from sglang_ext.profiling.rates import (
    Objective,
    Provenance,
    RateChoice,
    RatesSearch,
    Trial,
    TrialError,
    TrialNotes,
    TrialNotesError,
    TrialTtft,
    carrying_rate_per_s,
    choose_rate,
    file_digest,
    run_trial,
    write_rates,
)
from sglang_ext.simulation.cluster import ClusterSpec
from sglang_ext.simulation.engines import ENGINE_NAMES, EngineError, load_engine
from sglang_ext.simulation.systems import ClusterSystem
from sglang_ext.simulation.workload import WorkloadError, load_workload

STEP_PER_S = 0.5
IMPROVEMENT_RATES = tuple(round(0.05 * step, 2) for step in range(1, 16))  # as in Tetris, section 7.1
MOST_TRIALS = 1_000_000
_SYSTEMS = tuple(system.value for system in ClusterSystem if system.uses_improvement_rate)


class RatesError(ValueError):
    """Options that cannot be used; the text is one line that names the option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext profile rates` to `parser`."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="write the table here (JSON)")
    parser.add_argument(
        "--workload",
        type=Path,
        required=True,
        metavar="FILE",
        help="whose prompt lengths are drawn from, as for `simulate`; the times of a trace are not used",
    )
    parser.add_argument("--engine", default="table1", help=f"{ENGINE_NAMES}, or a profile (JSON file)")
    parser.add_argument("--system", choices=_SYSTEMS, default=ClusterSystem.TETRIS.value, help="who plans")
    parser.add_argument("--prefill", type=int, default=16, help="prefill instances")
    parser.add_argument("--instances-per-node", type=int, default=8, help="prefill instances on one node")
    parser.add_argument("--kv-tokens", type=int, default=1_000_000, help="KV tokens that a prefill instance holds")
    parser.add_argument("--sp-sizes", type=int, nargs="+", metavar="N", help="of the engine's, those to use (all)")
    parser.add_argument(
        "--arrival-rates",
        type=float,
        nargs=2,
        metavar=("FROM", "TO"),
        help=f"requests per second, in steps of {STEP_PER_S} (from {STEP_PER_S} to what the instances can carry)",
    )
    parser.add_argument(
        "--candidates",
        type=float,
        nargs="+",
        default=list(IMPROVEMENT_RATES),
        metavar="RATE",
        help="improvement rates to try",
    )
    parser.add_argument(
        "--objective", choices=[one.value for one in Objective], default="mean", help="TTFT to minimise"
    )
    parser.add_argument("--requests", type=int, default=4000, help="arrivals of one simulation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the arrivals and lengths")
    parser.add_argument("--processes", type=int, help="simulations at a time (one per core)")


def run(args: argparse.Namespace) -> int:
    """Search and write the table; progress goes to standard error, the table in short to standard output."""
    try:
        return _run(args)
    except (RatesError, WorkloadError, EngineError, TrialNotesError, TrialError) as error:
        option = {WorkloadError: "--workload: ", EngineError: "--engine: ", TrialNotesError: "--out: "}
        print(f"sglang-ext profile rates: error: {option.get(type(error), '')}{error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sglang-ext profile rates: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nsglang-ext profile rates: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    engine = load_engine(args.engine, largest_size=1 << max(0, min(args.prefill, 1024).bit_length() - 1))
    search = make_search(args, engine.candidates)
    provenance = Provenance(
        " ".join(["sglang-ext", *map(shlex.quote, sys.argv[1:])]),
        engine.name,
        file_digest(Path(args.engine)) if Path(args.engine).is_file() else None,
        str(args.workload),
        file_digest(args.workload),
    )
    notes = TrialNotes(Path(f"{args.out}.partial"), search, provenance)
    with notes:
        results = _carry_out(search, notes, args.processes or len(os.sched_getaffinity(0)))
    objective = Objective(args.objective)
    choices = [choose_rate(search, one, results, objective) for one in search.arrival_rates]
    write_rates(args.out, search, objective, choices, provenance)
    notes.remove()
    print(_table(choices))
    return 0


def make_search(args: argparse.Namespace, candidates: tuple[SpCandidate, ...]) -> RatesSearch:
    """What the options ask for. RatesError names the option."""
    for name in ("prefill", "instances_per_node", "kv_tokens", "requests", "processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise RatesError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("candidates", "seeds", "sp_sizes"):
        values = getattr(args, name) or []
        if len(set(values)) < len(values):
            raise RatesError(f"--{name.replace('_', '-')}: a value is there twice")
    for rate in args.candidates:
        if not 0 <= rate < 1:
            raise RatesError(f"--candidates must be at least 0 and below 1, got {rate:g}")
    usable = _usable(args, candidates)
    lengths = load_workload(args.workload).drawn_lengths()
    return RatesSearch(
        ClusterSystem(args.system),
        ClusterSpec(args.prefill, args.instances_per_node, args.kv_tokens),
        usable,
        lengths,
        args.requests,
        tuple(args.seeds),
        _arrival_rates(args, usable, lengths),
        tuple(sorted(args.candidates)),
    )


def _usable(args: argparse.Namespace, candidates: tuple[SpCandidate, ...]) -> tuple[SpCandidate, ...]:
    sizes = [one.size for one in candidates]
    for size in args.sp_sizes or ():
        if size not in sizes:
            raise RatesError(f"--sp-sizes: the engine has no SP size {size}, only {', '.join(map(str, sizes))}")
        if size > args.prefill:
            raise RatesError(f"--sp-sizes: {size} is more than the instances, {args.prefill}")
    usable = tuple(one for one in candidates if one.size <= args.prefill and one.size in (args.sp_sizes or sizes))
    if not usable:
        raise RatesError(
            f"--prefill: the engine's smallest SP size is {min(sizes)}, there are {args.prefill} instances"
        )
    return usable


def _arrival_rates(
    args: argparse.Namespace, candidates: tuple[SpCandidate, ...], lengths: tuple[tuple[int, int], ...]
) -> tuple[float, ...]:
    if args.arrival_rates is None:
        first, last = STEP_PER_S, max(STEP_PER_S, carrying_rate_per_s(candidates, args.prefill, lengths))
    else:
        first, last = args.arrival_rates
        if not (math.isfinite(last) and 0 < first <= last):
            raise RatesError(f"--arrival-rates must be above 0 and FROM at most TO, got {first:g} and {last:g}")
    steps = int((last - first) / STEP_PER_S + 1e-9) + 1
    trials = steps * len(args.candidates) * len(args.seeds)
    if trials > MOST_TRIALS:
        raise RatesError(f"--arrival-rates: {steps} steps to {last:g}/s are {trials} simulations, too many")
    return tuple(first + STEP_PER_S * step for step in range(steps))


class _Worker:
    """What a process of the search knows; set once in each."""

    search: RatesSearch


def _prepare(search: RatesSearch) -> None:
    _Worker.search = search
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that was started by hand says what there is to say


def _work(trial: Trial) -> tuple[Trial, TrialTtft]:
    return trial, run_trial(_Worker.search, trial)


def _carry_out(search: RatesSearch, notes: TrialNotes, processes: int) -> dict[Trial, TrialTtft]:
    results = dict(notes.results)
    trials = search.trials()
    left = [trial for trial in trials if trial not in results]
    if len(left) < len(trials):
        print(f"{len(trials) - len(left)} of {len(trials)} simulations were made before", file=sys.stderr)
    if not left:
        return results
    with get_context("spawn").Pool(min(processes, len(left)), _prepare, (search,)) as pool:
        for trial, ttft in pool.imap_unordered(_work, left):
            notes.add(trial, ttft)
            results[trial] = ttft
            _show_progress(len(results), len(trials))
    return results


def _show_progress(done: int, total: int) -> None:
    """A bar on a terminal, a line per tenth elsewhere."""
    if sys.stderr.isatty():
        filled = 40 * done // total
        end = "\n" if done == total else ""
        print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {done}/{total} simulations", end=end, file=sys.stderr)
    elif 10 * done // total > 10 * (done - 1) // total:
        print(f"{done} of {total} simulations", file=sys.stderr)


def _table(choices: list[RateChoice]) -> str:
    lines = [f"{'requests/s':>10} {'improvement rate':>17} {'mean TTFT s':>12} {'P50':>9} {'P99':>9}"]
    for one in choices:
        ttft_s = one.best.ttft_s
        lines.append(
            f"{one.arrivals_per_s:>10g} {one.best.improvement_rate:>17g} {ttft_s.mean:>12.3f} {ttft_s.p50:>9.3f} "
            f"{ttft_s.p99:>9.3f}"
        )
    return "\n".join(lines)
