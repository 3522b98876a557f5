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
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from sglang_ext import settings
from sglang_ext.cluster.config import ConfigError
from sglang_ext.costs.engine_profile import MeasuredServer, ProfileError, load_measured_server
from sglang_ext.planner.simulation.engines import ENGINE_NAMES, EngineError, load_engine
from sglang_ext.planner.simulation.operator_engine import operator_model
from sglang_ext.planner.simulation.pictures import PicturesError, check_pictures, draw_cost
from sglang_ext.planner.simulation.scenario import (
    LAPS,
    ScenarioError,
    decode_spec,
    engine_doubts,
    make_requests,
    stage_hop,
)
from sglang_ext.planner.simulation.simulate import ARRIVAL_SETTINGS, DECODE_SETTINGS
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
from sglang_ext.planner.sizing.plan import LINK_SETTINGS, PlanError, ring_candidates
from sglang_ext.planner.sizing.search import LayoutFamily, LayoutSearch, SizedLayout, guessed_sizes, parts_of
from sglang_ext.settings import REQUIRED, Setting, SettingsError

T = TypeVar("T")
BOUNDARIES = (256, 512, 1024, 2048, 4096, 8192)
LEAST_SHARE = 0.01  # of the prompts, on each side of a boundary that is tried unasked
KV_TOKENS, CHUNK_TOKENS = 1_000_000, 8192  # where the profile does not say
LARGEST_RING = 8  # instances that share a chunk
MOST_DRAWN = 3  # kinds of layout
PICTURE_LOADS = (0.5, 1.0)  # times the trace's: what these cost is drawn, too


class SizingError(ValueError):
    """Settings that cannot be used; the text is one line that names the setting."""


_WORKLOAD = partial(Setting, "workload")
_OBJECTIVES = partial(Setting, "objectives")
_SEARCH = partial(Setting, "search")
_INSTANCES = partial(Setting, "instances")
SETTINGS = (
    _WORKLOAD("file", Path, REQUIRED, "a workload, as for `simulate`", dest="trace"),
    _WORKLOAD("rate", float, None, "requests per second: needed for lengths without times"),
    *ARRIVAL_SETTINGS,
    _OBJECTIVES("short_ms", float, REQUIRED, "time to first token of short prompts", dest="slo_short_ms"),
    _OBJECTIVES(
        "long_stretch",
        float,
        REQUIRED,
        "time to first token of long prompts, for which this is more: times what it takes on an idle instance",
        dest="slo_long_stretch",
    ),
    _OBJECTIVES("token_ms", float, 50.0, "mean time per output token", dest="slo_token_ms"),
    _OBJECTIVES("attainment", float, 0.99, "share of the requests of each kind that must meet theirs"),
    _OBJECTIVES("headroom", float, 1.25, "times the trace's load that must hold"),
    _SEARCH(
        "profiles",
        str,
        REQUIRED,
        f"[TP:]FILE: a profile of a prefill instance, or {ENGINE_NAMES}; one for each TP (which the file says; else 1)",
        is_list=True,
        dest="profile",
    ),
    _SEARCH("max_gpus", int, 64, "maximum GPUs of a layout"),
    _SEARCH("boundary_tokens", int, None, "boundaries to try (powers of two that part the trace)", is_list=True),
    _SEARCH(
        "long_pp",
        int,
        None,
        "pipeline stages of instances that serve long prompts, or all (1, and what the profile has)",
        is_list=True,
    ),
    _SEARCH("ring", bool, False, "also try pools whose instances share long prompts (a coordinator)"),
    _SEARCH("show", int, 5, "layouts to print; more are searched for longer"),
    _SEARCH("processes", int, None, "simulations at a time (one per core)"),
    _INSTANCES("kv_tokens", int, None, "KV tokens of a prefill instance (the profile's)"),
    _INSTANCES("chunk_tokens", int, None, "maximum tokens of an iteration (the profile's)"),
    _INSTANCES("decode_tp", int, None, "GPUs of a decode instance (the smallest TP of the profiles)"),
    _INSTANCES("model", str, None, "what the written files serve: folder or name on the Hub (the profile's)"),
    *DECODE_SETTINGS,
    *LINK_SETTINGS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext size` to `parser`."""
    settings.add_arguments(parser, SETTINGS, file="scenario")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write values.yaml (Helm) and cluster.yaml (`up`) of the cheapest layout, layouts.json and cost.png",
    )


def run(args: argparse.Namespace) -> int:
    """Search, print the layouts on standard output; progress goes to standard error. 1: no layout holds."""
    prefix = "sglang-ext size: error:"
    try:
        return _run(with_settings(args))
    except (
        SettingsError,
        SizingError,
        PlanError,
        ScenarioError,
        WorkloadError,
        EngineError,
        ProfileError,
        PicturesError,
    ) as error:
        option = {
            WorkloadError: "workload.file: ",
            EngineError: "search.profiles: ",
            ProfileError: "search.profiles: ",
            PicturesError: "--out: ",
        }
        print(f"{prefix} {option.get(type(error), '')}{error}", file=sys.stderr)
    except OSError as error:
        print(f"{prefix} {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nsglang-ext size: interrupted", file=sys.stderr)
        return 130
    return 2


def with_settings(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments and the settings of their scenario. SettingsError is one line that names the setting."""
    return settings.with_settings(args, SETTINGS, args.scenario, "the scenario")


class Sizing(NamedTuple):
    """Describes what the settings ask for."""

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
        sized.sort(key=lambda sized_layout: (sized_layout.layout.gpus, -sized_layout.load))
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
            print("no values.yaml: in the chart only CPU engines share long prompts so far")
    return 0


# ---- settings ----


def read_sizing(args: argparse.Namespace) -> Sizing:
    """Return what the settings ask for. An error is one line that names the setting, or the file and what is wrong in
    it."""
    for section, names in (
        ("search", ("max_gpus", "show", "processes")),
        ("instances", ("kv_tokens", "chunk_tokens", "decode_tp")),
    ):
        for name in names:
            value = getattr(args, name)
            if value is not None and value < 1:
                raise SizingError(f"{section}.{name} must be at least 1, got {value}")
    if not (math.isfinite(args.headroom) and args.headroom >= 1):
        raise SizingError(f"objectives.headroom must be at least 1, got {args.headroom:g}")
    try:
        targets = SloTargets(args.slo_short_ms / 1e3, args.slo_long_stretch, args.slo_token_ms / 1e3, args.attainment)
    except ValueError as error:
        raise SizingError(str(error)) from None
    engines, server = _engines(args)
    engines = {tp: _with_long_shapes(args, tp, engine) for tp, engine in engines.items()}
    requests = make_requests(load_workload(args.trace), args, args.rate)
    if not requests[-1].arrival_s > requests[0].arrival_s:
        raise SizingError("workload.file: all requests arrive at once, so there is no load to size for")
    try:
        setup = TrialSetup(tuple(requests), engines, decode_spec(args, 1), targets)
    except ValueError as error:
        raise SizingError(str(error)) from None
    decode_tp = args.decode_tp or min(engines)
    families = _families(args, setup, decode_tp)
    least = min(sum(family.gpus_each) for family in families)
    if args.max_gpus < least:
        raise SizingError(f"search.max_gpus: the smallest layout takes {least} GPUs, got {args.max_gpus}")
    chunk_tokens = args.chunk_tokens or server.chunk_tokens
    model = args.model or engines[min(engines)].costs.name.partition(" on ")[0]
    sizes = tuple(candidate.size for candidate in engines[min(engines)].ring)
    return Sizing(setup, families, DeployedModel(model, chunk_tokens, server.is_cpu, sizes))


def _with_long_shapes(args: argparse.Namespace, tp: int, engine: SizedEngine) -> SizedEngine:
    """The instance with what it may be for long prompts: pipelines, and groups that share a prompt."""
    counts = set(args.long_pp or (1, *(pipeline.stages.count for pipeline in engine.costs.pipelines)))
    for count in counts:
        if count < 1:
            raise SizingError(f"search.long_pp must be at least 1, got {count}")
    try:
        pipelines = tuple(
            engine.costs.on_stages(count, stage_hop(args, engine.costs, count)) for count in sorted(counts - {1})
        )
    except EngineError as error:
        raise SizingError(f"search.long_pp: {error}") from None
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
            raise SizingError(f"search.profiles {text}: the profile was measured with TP {server.tp}")
        tp = int(given or server.tp or 1)
        if tp < 1:
            raise SizingError(f"search.profiles {text}: TP must be at least 1")
        if tp in engines:
            raise SizingError(
                f"search.profiles {text}: there is another profile of TP {tp}; TP:FILE distinguishes them"
            )
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
    if path.is_file():
        return load_measured_server(path)
    operators = operator_model(name)
    return MeasuredServer(None if operators is None else operators.shape.tp, None, None, False)


def _families(args: argparse.Namespace, setup: TrialSetup, decode_tp: int) -> tuple[LayoutFamily, ...]:
    """Split pools at every boundary, and one pool for all lengths, with each TP."""
    prompts = sorted(request.prompt_tokens for request in setup.requests)
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
                    f"search.boundary_tokens {boundary}: all prompts are on one side: {prompts[0]} to "
                    f"{prompts[-1]} tokens"
                )
    else:
        least = LEAST_SHARE * len(prompts)
        boundaries = [
            boundary
            for boundary in BOUNDARIES
            if least <= sum(tokens <= boundary for tokens in prompts) <= len(prompts) - least
        ]
    # Of one pool the boundary says only what is scheduled as short: where the objectives change.
    common = min(boundaries or BOUNDARIES, key=lambda sized_layout: abs(sized_layout - max(short, default=prompts[0])))
    families: list[LayoutFamily] = []
    for is_split, of in ((True, boundaries), (False, [common])):
        for tp, engine in setup.engines.items():
            counts = args.long_pp or (1, *(pipeline.stages.count for pipeline in engine.pipelines))
            for boundary in of:
                families += [LayoutFamily(boundary, tp, decode_tp, is_split, count) for count in sorted(set(counts))]
                if engine.ring:
                    families.append(LayoutFamily(boundary, tp, decode_tp, is_split, is_ring=True))
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
    families = {_family(sized_layout.layout): sized_layout for sized_layout in sized[:MOST_DRAWN]}
    for family, sized_layout in families.items():
        points[family].append((sized_layout.layout.gpus, sized_layout.load))
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
    for layout in sized:
        carried = f"x{layout.load:.2f} ({layout.load * rate_per_s:.3g}/s)"
        times = ", ".join(
            f"{layout.as_recorded[objective].p99_s:.3f}" if objective in layout.as_recorded else "-"
            for objective in (ServiceObjective.SHORT_TTFT, ServiceObjective.LONG_TTFT)
        )
        breach = "nothing that was tried" if layout.breach is None else layout.breach.describe()
        lines.append(f"{layout.layout.gpus:>5} {layout.layout.describe():<58} {carried:<18} {times:<20} {breach}")
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
    write_values(args.out / "values.yaml", heading, helm_values(best.layout, sizing.model, targets))
    try:
        config = cluster_config(best.layout, sizing.model, targets)
    except ConfigError as error:
        raise SizingError(f"instances.model: {error}") from None
    write_cluster(args.out / "cluster.yaml", heading, config)
    content = {
        "rate_per_s": rate_per_s,
        "requests": len(sizing.setup.requests),
        "headroom": args.headroom,
        "targets": {name: getattr(targets, name) for name in targets.__slots__},
        "layouts": [
            {
                **layout.layout._asdict(),
                "gpus": layout.layout.gpus,
                "load": layout.load,
                "goodput_per_s": layout.load * rate_per_s,
                "breaks_first": None if layout.breach is None else layout.breach._asdict(),
                "as_recorded": {name.value: figures._asdict() for name, figures in layout.as_recorded.items()},
            }
            for layout in sized
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
