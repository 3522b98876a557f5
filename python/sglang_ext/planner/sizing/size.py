"""`sglang-ext size`: from a trace and a profile to the cheapest pools that hold their objectives, with headroom."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from sglang_ext.cluster.config import ConfigError
from sglang_ext.costs.engine_profile import MeasuredServer, ProfileError, load_measured_server
from sglang_ext.planner.simulation.engines import ENGINE_NAMES, EngineError, load_engine
from sglang_ext.planner.simulation.pictures import PicturesError, check_pictures, draw_cost
from sglang_ext.planner.simulation.scenario import (
    LAPS,
    ScenarioError,
    decode_spec,
    engine_doubts,
    make_requests,
    stage_hop,
)
from sglang_ext.planner.simulation.simulate import add_decode_instance_arguments
from sglang_ext.planner.simulation.workload import WorkloadError, load_workload
from sglang_ext.planner.sizing.deployment import DeployedModel, cluster_config, helm_values, write_cluster, write_values
from sglang_ext.planner.sizing.load_trial import (
    ClusterLayout,
    LoadTrial,
    LoadVerdict,
    ServiceObjective,
    SizedEngine,
    SloTargets,
    TrialSetup,
    run_load_trial,
)
from sglang_ext.planner.sizing.plan import PlanError, add_link_arguments, ring_candidates
from sglang_ext.planner.sizing.search import LayoutFamily, LayoutSearch, SizedLayout, guessed_sizes, parts_of

T = TypeVar("T")
BOUNDARIES = (256, 512, 1024, 2048, 4096, 8192)
LEAST_SHARE = 0.01  # of the prompts, on each side of a boundary that is tried unasked
KV_TOKENS, CHUNK_TOKENS = 1_000_000, 8192  # where the profile does not tell
LARGEST_RING = 8  # instances that share a chunk
MOST_DRAWN = 3  # kinds of layout
PICTURE_LOADS = (0.5, 1.0)  # times the trace's: what these cost is drawn, too


class SizingError(ValueError):
    """Options that cannot be used; the text is one line that names the option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext size` to `parser`."""
    load = parser.add_argument_group("load")
    load.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a workload, as for `simulate`")
    load.add_argument("--rate", type=float, help="requests per second: needed for lengths without times")
    load.add_argument("--requests", type=int, help="how many: drawn from lengths (2000), or the first of a trace (all)")
    load.add_argument("--burst-shape", type=float, default=1.0, help="of drawn arrivals, as for `simulate`")
    load.add_argument("--think-s", type=float, default=30.0, help="turns of sessions, as for `simulate`")
    load.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    slo = parser.add_argument_group("objectives")
    slo.add_argument(
        "--slo-short-ms", type=float, required=True, metavar="MS", help="time to first token of short prompts"
    )
    slo.add_argument(
        "--slo-long-stretch",
        type=float,
        required=True,
        metavar="X",
        help="time to first token of long prompts, for which this is more: times what it takes on an idle instance",
    )
    slo.add_argument("--slo-token-ms", type=float, default=50.0, metavar="MS", help="mean time per output token")
    slo.add_argument(
        "--attainment", type=float, default=0.99, help="share of the requests of each kind that must meet theirs"
    )
    slo.add_argument("--headroom", type=float, default=1.25, help="times the trace's load that must hold")
    space = parser.add_argument_group("what is searched")
    space.add_argument(
        "--profile",
        action="append",
        required=True,
        metavar="[TP:]FILE",
        help=f"a profile of a prefill instance, or {ENGINE_NAMES}; one for each TP (which the file tells; else 1)",
    )
    space.add_argument("--max-gpus", type=int, default=64, metavar="N", help="most GPUs of a layout")
    space.add_argument(
        "--boundary-tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="boundaries to try (powers of two that part the trace)",
    )
    space.add_argument(
        "--long-pp",
        type=int,
        nargs="+",
        metavar="P",
        help="pipeline stages of instances that serve long prompts, or all (1, and what the profile has)",
    )
    space.add_argument(
        "--ring", action="store_true", help="long pools whose instances share prompts (a coordinator), too"
    )
    space.add_argument("--show", type=int, default=5, help="how many layouts to print; more are searched for longer")
    space.add_argument("--processes", type=int, help="simulations at a time (one per core)")
    instances = parser.add_argument_group("instances")
    instances.add_argument("--kv-tokens", type=int, help="KV tokens of a prefill instance (the profile's)")
    instances.add_argument("--chunk-tokens", type=int, help="most tokens of an iteration (the profile's)")
    instances.add_argument("--decode-tp", type=int, help="GPUs of a decode instance (the smallest TP of the profiles)")
    add_decode_instance_arguments(instances)
    add_link_arguments(parser.add_argument_group("links of pipelines and rings"))
    output = parser.add_argument_group("output")
    output.add_argument("--model", help="what the written files serve: folder or name on the Hub (the profile's)")
    output.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write values.yaml (Helm) and cluster.yaml (`up`) of the cheapest layout, layouts.json and cost.png",
    )


def run(args: argparse.Namespace) -> int:
    """Search, print the layouts on standard output; progress goes to standard error. 1: no layout holds."""
    prefix = "sglang-ext size: error:"
    try:
        return _run(args)
    except (SizingError, PlanError, ScenarioError, WorkloadError, EngineError, ProfileError, PicturesError) as error:
        option = {
            WorkloadError: "--trace: ",
            EngineError: "--profile: ",
            ProfileError: "--profile: ",
            PicturesError: "--out: ",
        }
        print(f"{prefix} {option.get(type(error), '')}{error}", file=sys.stderr)
    except OSError as error:
        print(f"{prefix} {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nsglang-ext size: interrupted", file=sys.stderr)
        return 130
    return 2


class Sizing(NamedTuple):
    """Describes what the options ask for."""

    setup: TrialSetup
    families: tuple[LayoutFamily, ...]
    model: DeployedModel


def _run(args: argparse.Namespace) -> int:
    sizing = read_sizing(args)
    if args.out is not None:
        check_pictures()
        args.out.mkdir(parents=True, exist_ok=True)
    for tp, engine in sizing.setup.engines.items():
        for doubt in engine_doubts(LAPS, engine.costs):
            print(f"sglang-ext size: TP {tp}: {doubt}", file=sys.stderr)
    setups = parts_of(sizing.setup)
    processes = args.processes or len(os.sched_getaffinity(0))
    started_s = time.monotonic()
    with _Simulations(setups, processes) as simulations:
        search = LayoutSearch(setups, simulations, simulations.in_parallel, args.max_gpus, args.show)
        layouts = search.cheapest(sizing.families, args.headroom)
        if not layouts:
            simulations.clear()
            print(f"sglang-ext size: {_shortage(sizing, simulations, args)}", file=sys.stderr)
            return 1
        sized = [search.measured(layout, args.headroom) for layout in layouts]
        sized.sort(key=lambda one: (one.layout.gpus, -one.load))
        points = _points(search, sizing, sized) if args.out is not None else {}
        simulations.clear()
        done = simulations.done
    rate_per_s = _rate_per_s(sizing.setup)
    print(_table(sized, sizing.setup, args.headroom, rate_per_s))
    print(f"{done} simulations in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    if args.out is not None:
        _write(args, sizing, sized, points, rate_per_s)
        has_values = (args.out / "values.yaml").exists()
        print(f"wrote {'values.yaml, ' * has_values}cluster.yaml, layouts.json and cost.png in {args.out}")
        if not has_values:
            print("no values.yaml: in the chart CPU engines alone share long prompts so far")
    return 0


# ---- options ----


def read_sizing(args: argparse.Namespace) -> Sizing:
    """Return what the options ask for. An error is one line that names the option, or the file and what is wrong in
    it."""
    for name in ("max_gpus", "show", "processes", "kv_tokens", "chunk_tokens", "decode_tp"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise SizingError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not (math.isfinite(args.headroom) and args.headroom >= 1):
        raise SizingError(f"--headroom must be at least 1, got {args.headroom:g}")
    try:
        targets = SloTargets(args.slo_short_ms / 1e3, args.slo_long_stretch, args.slo_token_ms / 1e3, args.attainment)
    except ValueError as error:
        raise SizingError(str(error)) from None
    engines, server = _engines(args)
    engines = {tp: _with_long_shapes(args, tp, engine) for tp, engine in engines.items()}
    requests = make_requests(load_workload(args.trace), args, args.rate)
    if not requests[-1].arrival_s > requests[0].arrival_s:
        raise SizingError("--trace: all requests arrive at once, so there is no load to size for")
    try:
        setup = TrialSetup(tuple(requests), engines, decode_spec(args, 1), targets)
    except ValueError as error:
        raise SizingError(str(error)) from None
    decode_tp = args.decode_tp or min(engines)
    families = _families(args, setup, decode_tp)
    least = min(sum(family.gpus_each) for family in families)
    if args.max_gpus < least:
        raise SizingError(f"--max-gpus: the smallest layout takes {least} GPUs, got {args.max_gpus}")
    chunk_tokens = args.chunk_tokens or server.chunk_tokens
    model = args.model or engines[min(engines)].costs.name.partition(" on ")[0]
    sizes = tuple(one.size for one in engines[min(engines)].ring)
    return Sizing(setup, families, DeployedModel(model, chunk_tokens, server.is_cpu, sizes))


def _with_long_shapes(args: argparse.Namespace, tp: int, engine: SizedEngine) -> SizedEngine:
    """The instance with what it may be for long prompts: pipelines, and groups that share a prompt."""
    counts = set(args.long_pp or (1, *(one.stages.count for one in engine.costs.pipelines)))
    for count in counts:
        if count < 1:
            raise SizingError(f"--long-pp must be at least 1, got {count}")
    try:
        pipelines = tuple(
            engine.costs.on_stages(count, stage_hop(args, engine.costs, count)) for count in sorted(counts - {1})
        )
    except EngineError as error:
        raise SizingError(f"--long-pp: {error}") from None
    ring = ring_candidates(args, engine.costs, min(LARGEST_RING, args.max_gpus // tp)) if args.ring else ()
    return engine._replace(pipelines=pipelines, ring=ring)


def _engines(args: argparse.Namespace) -> tuple[dict[int, SizedEngine], MeasuredServer]:
    """Return the engines by TP, and the server on which the smallest was measured."""
    engines: dict[int, SizedEngine] = {}
    servers: dict[int, MeasuredServer] = {}
    for text in args.profile:
        given, colon, name = text.partition(":")
        if not (colon and given.isdecimal()):
            given, name = "", text
        server = _server(name)
        if given and server.tp is not None and int(given) != server.tp:
            raise SizingError(f"--profile {text}: the profile was measured with TP {server.tp}")
        tp = int(given or server.tp or 1)
        if tp < 1:
            raise SizingError(f"--profile {text}: TP must be at least 1")
        if tp in engines:
            raise SizingError(f"--profile {text}: there is another profile of TP {tp}; TP:FILE tells them apart")
        servers[tp] = server
        engines[tp] = sized_engine(name, args.kv_tokens, args.chunk_tokens)
    return dict(sorted(engines.items())), servers[min(servers)]


def sized_engine(name: str, kv_tokens: int | None = None, chunk_tokens: int | None = None) -> SizedEngine:
    """An instance of the profile or engine `name`; what is not given is the profile's. EngineError, ProfileError."""
    costs, server = load_engine(name), _server(name)
    # A pipeline holds as much as all its stages.
    measured_tokens = server.kv_tokens and max(1, server.kv_tokens // (server.pp or 1))
    return SizedEngine(
        costs, kv_tokens or measured_tokens or KV_TOKENS, chunk_tokens or server.chunk_tokens or CHUNK_TOKENS
    )


def _server(name: str) -> MeasuredServer:
    path = Path(name)
    return load_measured_server(path) if path.is_file() else MeasuredServer(None, None, None, False)


def _families(args: argparse.Namespace, setup: TrialSetup, decode_tp: int) -> tuple[LayoutFamily, ...]:
    """Split pools at every boundary, and one pool for all lengths, with each TP."""
    prompts = sorted(one.prompt_tokens for one in setup.requests)
    short = [
        request.prompt_tokens
        for request, (_, objective) in zip(setup.requests, setup.deadlines_s(), strict=True)
        if objective is ServiceObjective.SHORT_TTFT
    ]
    if args.boundary_tokens is not None:
        boundaries = sorted(set(args.boundary_tokens))
        for boundary in boundaries:
            if not prompts[0] <= boundary < prompts[-1]:
                raise SizingError(
                    f"--boundary-tokens {boundary}: all prompts are on one side: {prompts[0]} to {prompts[-1]} tokens"
                )
    else:
        least = LEAST_SHARE * len(prompts)
        boundaries = [
            one for one in BOUNDARIES if least <= sum(tokens <= one for tokens in prompts) <= len(prompts) - least
        ]
    # Of one pool the boundary says only what is scheduled as short: where the objectives change.
    common = min(boundaries or BOUNDARIES, key=lambda one: abs(one - max(short, default=prompts[0])))
    families: list[LayoutFamily] = []
    for is_split, of in ((True, boundaries), (False, [common])):
        for tp, engine in setup.engines.items():
            counts = args.long_pp or (1, *(one.stages.count for one in engine.pipelines))
            for boundary in of:
                families += [LayoutFamily(boundary, tp, decode_tp, is_split, count) for count in sorted(set(counts))]
                if is_split and engine.ring:
                    families.append(LayoutFamily(boundary, tp, decode_tp, True, is_ring=True))
    return tuple(families)


# ---- simulations at the same time ----


class _TrialProcess:
    """Describes what a process of the search knows; set once in each."""

    setups: tuple[TrialSetup, ...] = ()


def _prepare(setups: tuple[TrialSetup, ...]) -> None:
    _TrialProcess.setups = setups
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that was started by hand reports it


def _work(part: int, trial: LoadTrial) -> LoadVerdict:
    return run_load_trial(_TrialProcess.setups[part], trial)


class _Simulations:
    """Trials in other processes; with one process, in this one. Each is carried out once."""

    def __init__(self, setups: tuple[TrialSetup, ...], processes: int) -> None:
        self.done = 0
        self._setups = setups
        self._processes = processes
        self._futures: dict[tuple[int, LoadTrial], Future[LoadVerdict]] = {}
        self._lock = Lock()
        self._executor: Executor
        if processes == 1:
            self._executor = ThreadPoolExecutor(1)
        else:
            self._executor = ProcessPoolExecutor(processes, get_context("spawn"), _prepare, (setups,))
        self._families = ""
        self._is_abandoned = False

    def __enter__(self) -> _Simulations:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def verdict(self, part: int, trial: LoadTrial) -> LoadVerdict:
        with self._lock:
            future = self._futures.get((part, trial))
            if future is None and self._is_abandoned:
                raise CancelledError
            if future is None:
                if self._processes == 1:
                    future = self._executor.submit(run_load_trial, self._setups[part], trial)
                else:
                    future = self._executor.submit(_work, part, trial)
                self._futures[part, trial] = future
                future.add_done_callback(self._count)
        return future.result()

    def in_parallel(self, function: Callable[[int], T], values: Iterable[int]) -> list[T]:
        """One more at a time than there are processes, so that none waits for work."""
        numbers = list(values)
        with ThreadPoolExecutor(max(1, min(len(numbers), self._processes + 1))) as threads:
            try:
                return list(threads.map(function, numbers))
            except BaseException:
                self._abandon()
                raise

    def _abandon(self) -> None:
        """End what runs, so that the threads that wait for it end, too."""
        with self._lock:
            self._is_abandoned = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.terminate()

    def families_done(self, done: int, of: int) -> None:
        filled = 30 * done // of
        self._families = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{of} kinds of layout"
        self._show()
        if not sys.stderr.isatty():
            print(f"{done} of {of} kinds of layout, {self.done} simulations", file=sys.stderr)

    def clear(self) -> None:
        """End the line of the bar."""
        if sys.stderr.isatty():
            print(f"\r{' ' * 79}\r", end="", file=sys.stderr)

    def _count(self, _: Future[LoadVerdict]) -> None:
        self.done += 1
        self._show()

    def _show(self) -> None:
        if sys.stderr.isatty():
            print(f"\r{self._families} {self.done} simulations", end="", file=sys.stderr, flush=True)


# ---- results ----


def _rate_per_s(setup: TrialSetup) -> float:
    requests = setup.requests
    return (len(requests) - 1) / (requests[-1].arrival_s - requests[0].arrival_s)


def _shortage(sizing: Sizing, simulations: _Simulations, args: argparse.Namespace) -> str:
    """Return what breaks though all GPUs are used, shared out by the work of the pools."""
    family = sizing.families[0]
    guess = guessed_sizes(family, sizing.setup, args.headroom)
    spare = args.max_gpus - sum(family.gpus_each)
    weights = [size * each for size, each in zip(guess, family.gpus_each, strict=True)]
    sizes = tuple(
        1 + int(max(0, spare) * weight / sum(weights)) // each
        for weight, each in zip(weights, family.gpus_each, strict=True)
    )
    layout = family.layout(sizes)
    verdict = simulations.verdict(len(parts_of(sizing.setup)) - 1, LoadTrial(layout, args.headroom))
    cause = f"; of {layout.describe()}, what breaks first: {verdict.breach.describe()}" if verdict.breach else ""
    return f"no layout of at most {args.max_gpus} GPUs holds at x{args.headroom:g} of the load{cause}"


def _points(
    search: LayoutSearch, sizing: Sizing, sized: Sequence[SizedLayout]
) -> dict[LayoutFamily, list[tuple[int, float]]]:
    """Return what smaller loads take with the kinds of layout that were found: (GPUs, times the load that holds)."""
    points: dict[LayoutFamily, list[tuple[int, float]]] = defaultdict(list)
    families = {_family(one.layout): one for one in sized[:MOST_DRAWN]}
    for family, one in families.items():
        points[family].append((one.layout.gpus, one.load))
    for load in PICTURE_LOADS:
        for layout in search.cheapest(list(families), load):
            points[_family(layout)].append((layout.gpus, load))
    return points


def _family(layout: ClusterLayout) -> LayoutFamily:
    is_split = layout.both == 0
    return LayoutFamily(layout.boundary_tokens, layout.tp, layout.decode_tp, is_split, layout.long_pp, layout.is_ring)


def _table(sized: Sequence[SizedLayout], setup: TrialSetup, headroom: float, rate_per_s: float) -> str:
    targets = setup.targets
    counts = [objective for _, objective in setup.deadlines_s()]
    short = counts.count(ServiceObjective.SHORT_TTFT)
    lines = [
        f"{len(counts)} requests, {rate_per_s:.3g}/s; first token: {short} short prompts within "
        f"{1e3 * targets.short_ttft_s:g} ms, {len(counts) - short} long ones within {targets.long_stretch:g} times an "
        f"idle instance's; {1e3 * targets.time_per_token_s:g} ms per token; {targets.attainment:.4g} of each, at "
        f"x{headroom:g} of the load",
        f"{'GPUs':>5} {'layout':<58} {'holds up to':<18} {'P99 short, long (s)':<20} breaks first beyond",
    ]
    for one in sized:
        carried = f"x{one.load:.2f} ({one.load * rate_per_s:.3g}/s)"
        times = ", ".join(
            f"{one.as_recorded[objective].p99_s:.3f}" if objective in one.as_recorded else "-"
            for objective in (ServiceObjective.SHORT_TTFT, ServiceObjective.LONG_TTFT)
        )
        breach = "nothing that was tried" if one.breach is None else one.breach.describe()
        lines.append(f"{one.layout.gpus:>5} {one.layout.describe():<58} {carried:<18} {times:<20} {breach}")
    return "\n".join(lines)


def _write(
    args: argparse.Namespace,
    sizing: Sizing,
    sized: Sequence[SizedLayout],
    points: dict[LayoutFamily, list[tuple[int, float]]],
    rate_per_s: float,
) -> None:
    best, targets = sized[0], sizing.setup.targets
    heading = (
        f"{best.layout.describe()}: {best.layout.gpus} GPUs\nfound by: "
        f"{shlex.join(['sglang-ext', *sys.argv[1:]])}\nholds up to x{best.load:.2f} of the trace's load"
    )
    if best.layout.is_ring and not sizing.model.is_cpu:
        (args.out / "values.yaml").unlink(missing_ok=True)
    else:
        write_values(args.out / "values.yaml", heading, helm_values(best.layout, sizing.model, targets))
    try:
        config = cluster_config(best.layout, sizing.model, targets)
    except ConfigError as error:
        raise SizingError(f"--model: {error}") from None
    write_cluster(args.out / "cluster.yaml", heading, config)
    content = {
        "rate_per_s": rate_per_s,
        "requests": len(sizing.setup.requests),
        "headroom": args.headroom,
        "targets": {name: getattr(targets, name) for name in targets.__slots__},
        "layouts": [
            {
                **one.layout._asdict(),
                "gpus": one.layout.gpus,
                "load": one.load,
                "goodput_per_s": one.load * rate_per_s,
                "breaks_first": None if one.breach is None else one.breach._asdict(),
                "as_recorded": {name.value: figures._asdict() for name, figures in one.as_recorded.items()},
            }
            for one in sized
        ],
    }
    (args.out / "layouts.json").write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    series = {}
    for family, found in points.items():
        name = f"{'split at' if family.is_split else 'one pool,'} {family.boundary_tokens}, TP {family.tp}"
        if family.long_pp > 1 or family.is_ring:
            name += ", ring" if family.is_ring else f", PP {family.long_pp}"
        most = {gpus: max(load for cost, load in found if cost == gpus) for gpus, _ in found}
        series[name] = [(gpus, load * rate_per_s) for gpus, load in most.items()]
    draw_cost(series, rate_per_s, args.headroom * rate_per_s, args.out / "cost.png")
