"""`sglang-ext simulate`: a workload on simulated instances, with the policies of the router and the engine."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from sglang_ext import settings
from sglang_ext.laps.decide.boundary import expected_boundary_tokens
from sglang_ext.planner.simulation.engines import ENGINE_NAMES, EngineError, load_engine
from sglang_ext.planner.simulation.events import ServedPrefill, SimRequest
from sglang_ext.planner.simulation.instances import LEAST_LOADED, ROUTERS
from sglang_ext.planner.simulation.pictures import (
    PicturesError,
    check_pictures,
    draw_load,
    draw_pools,
    draw_timeline,
    draw_ttft,
)
from sglang_ext.planner.simulation.recording import WATCH_S, RecordedRun, write_recording
from sglang_ext.planner.simulation.report import LoadReport, as_json, make_report, table
from sglang_ext.planner.simulation.run import simulate_for_clients
from sglang_ext.planner.simulation.scaler import SCALERS
from sglang_ext.planner.simulation.scenario import (
    ACTIVATION_BYTES_PER_TOKEN,
    HOP_GB_PER_S,
    HOP_MS,
    ONE,
    POLICIES,
    ScenarioError,
    engine_doubts,
    make_requests,
    run_options,
    stage_builder,
)
from sglang_ext.planner.simulation.workload import Workload, WorkloadError, load_workload
from sglang_ext.settings import REQUIRED, Setting, SettingsError
from sglang_ext_router.decide.decode_choice import DECODE_POLICIES

_DECODE = partial(Setting, "decode")
_LINKS = partial(Setting, "links")

HOP_SETTINGS = (
    _LINKS("hop_ms", float, None, f"latency from pipeline stage to stage (as measured, else {HOP_MS:g})"),
    _LINKS("hop_gb_per_s", float, None, f"bandwidth from stage to stage (as measured, else {HOP_GB_PER_S:g})"),
    _LINKS(
        "activation_bytes_per_token",
        int,
        None,
        f"bytes from stage to stage (4 for each value of the hidden state, else {ACTIVATION_BYTES_PER_TOKEN})",
    ),
)
"""Settings of the links between pipeline stages; `scenario.stage_hop` reads them."""

DECODE_SETTINGS = (
    _DECODE("kv_tokens", int, 1_000_000, "KV tokens that a decode instance holds", dest="decode_kv_tokens"),
    _DECODE("step_ms", float, 12.0, "time of a decode step of an empty batch", dest="decode_step_ms"),
    _DECODE(
        "step_per_request_ms", float, 0.2, "time that each request adds to a step", dest="decode_step_per_request_ms"
    ),
    _DECODE("kv_bytes_per_token", int, 131_072, "KV bytes that are transferred"),
    _DECODE("transfer_gb_per_s", float, 25.0, "bandwidth of a transfer"),
    _DECODE("transfer_backends", int, 4, "transfers at a time into one instance"),
)
"""Settings of a decode instance; `scenario.decode_spec` reads them."""

_WORKLOAD = partial(Setting, "workload")
ARRIVAL_SETTINGS = (
    _WORKLOAD("requests", int, None, "requests: drawn from lengths (2000), or the first of a trace (all)"),
    _WORKLOAD("burst_shape", float, 1.0, "gamma shape of the gaps; 1 is Poisson, less is bursty"),
    _WORKLOAD("think_s", float, 30.0, "turns of sessions: mean time between an answer and the next turn"),
    _WORKLOAD("seed", int, 0, "seed of all that is drawn"),
)
"""Settings of the requests that are made of a workload; `scenario.make_requests` reads them."""

_INSTANCES = partial(Setting, "instances")
_POLICY = partial(Setting, "policy")
_SCALER = partial(Setting, "scaler")
SETTINGS = (
    _WORKLOAD(
        "file",
        Path,
        REQUIRED,
        "Mooncake JSONL, Azure CSV, CSV with arrived_at, num_prefill_tokens, num_decode_tokens, or with the lengths "
        "only, CSV of turns: conv, turn, new_input_tokens, history_tokens, output_tokens",
        dest="workload",
    ),
    _WORKLOAD(
        "rate",
        float,
        (),
        "requests per second, one run for each: of lengths drawn from the file, or the trace stretched to it",
        is_list=True,
        dest="rates",
    ),
    *ARRIVAL_SETTINGS,
    _WORKLOAD(
        "concurrency",
        int,
        None,
        "clients that each send the next request as soon as they have a reply (with decode instances all of it), in "
        "place of arrivals at their own times",
    ),
    _WORKLOAD("warm_up", float, 0.0, "share of the requests, the first, that is not counted"),
    _INSTANCES("engine", str, "table1", f"{ENGINE_NAMES}, or a profile (JSON file)"),
    _INSTANCES("model", str, None, "name or folder of the model that the engine must be of"),
    _INSTANCES("prefill", int, 16, "prefill instances"),
    _INSTANCES("per_node", int, 8, "prefill instances on one node", dest="instances_per_node"),
    _INSTANCES("kv_tokens", int, 1_000_000, "KV tokens that a prefill instance holds: for each stage"),
    _INSTANCES("chunk_tokens", int, 8192, "maximum tokens of an iteration"),
    _INSTANCES(
        "short",
        int,
        0,
        "laps: instances that serve only short prompts, while the others serve long ones (0: all serve both); policies "
        "that share prompts: instances that serve short prompts under laps, while the others share long ones",
        dest="short_instances",
    ),
    _INSTANCES("long_pp", int, 1, "pipeline stages, each a device, of instances that serve long prompts, or all"),
    _INSTANCES("short_pp", int, 1, "pipeline stages of the instances that serve only short prompts"),
    _INSTANCES(
        "fail", str, (), "INSTANCE:AT:FOR: an instance is down from a second on for this many seconds", is_list=True
    ),
    _POLICY("name", str, ONE, "how prefills are scheduled", POLICIES, dest="policy"),
    _POLICY(
        "chunk_s",
        float,
        None,
        "pool, one: longest time of a chunk, or ten times its overhead if that is more; then all is decided again",
    ),
    _POLICY(
        "router",
        str,
        LEAST_LOADED,
        "fcfs, hrrn, shortest-prefill-first, laps: how the instance of a prompt is chosen",
        ROUTERS,
    ),
    _POLICY("move_pools", bool, False, "laps: the pressure controller moves instances"),
    _POLICY(
        "boundary_tokens",
        int,
        None,
        "maximum new tokens of a short prompt (default: what instances of this engine find, half of slo_s)",
    ),
    _POLICY("slo_s", float, 1.0, "TTFT objective, counted for all requests", dest="slo"),
    _SCALER(
        "kind",
        str,
        None,
        "laps with instances.short: an autoscaler of each pool, or of the total, which goes by the work of both and "
        "adds only to the long one",
        SCALERS,
        dest="scaler",
    ),
    _SCALER("queue_s", float, 2.0, "seconds of queued work for each instance", dest="scaler_queue_s"),
    _SCALER("utilisation", float, 0.7, "busy share for each instance", dest="scaler_utilisation"),
    _SCALER("startup_s", float, 120.0, "time until an instance takes requests", dest="scaler_startup_s"),
    _SCALER(
        "up_stabilisation_s",
        float,
        90.0,
        "time for which more instances are needed before more are started",
        dest="scaler_up_stabilisation_s",
    ),
    _SCALER(
        "stabilisation_s",
        float,
        300.0,
        "time for which fewer instances are needed before one is ended",
        dest="scaler_stabilisation_s",
    ),
    _SCALER("max", int, 32, "maximum instances of a pool", dest="scaler_max"),
    *HOP_SETTINGS,
    _LINKS(
        "kv_gb_per_s", float, 50.0, "one: bandwidth at which history of a shared prompt leaves or reaches an instance"
    ),
    _DECODE("instances", int, 0, "decode instances; 0: only prefill is simulated", dest="decode"),
    _DECODE("policy", str, "freeness", "how a decode instance is chosen", DECODE_POLICIES, dest="decode_policy"),
    *DECODE_SETTINGS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext simulate` to `parser`."""
    settings.add_arguments(parser, SETTINGS, file="scenario")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write what the live page shows of a cluster here, for `sglang-ext live timeline --recording`",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="draw the TTFT distribution, the timeline of instances, latency against load (of several rates), pool "
        "sizes (with policy.move_pools)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, print the table on standard output; progress goes to standard error."""
    try:
        return _run(settings.with_settings(args, SETTINGS, args.scenario, "the scenario"))
    except (SettingsError, ScenarioError, WorkloadError, EngineError, PicturesError) as error:
        option = {WorkloadError: "workload.file: ", EngineError: "instances.engine: ", PicturesError: "--pictures: "}
        print(f"sglang-ext simulate: error: {option.get(type(error), '')}{error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sglang-ext simulate: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    rates: list[float | None] = list(args.rates) or [None]
    if args.record is not None and len(rates) > 1:
        raise ScenarioError("--record takes one run, not the several of workload.rate")
    if not (math.isfinite(args.slo) and args.slo > 0):
        raise ScenarioError(f"policy.slo_s must be above 0, got {args.slo:g}")
    if args.pictures is not None:
        check_pictures()
        args.pictures.mkdir(parents=True, exist_ok=True)
    engine = load_engine(
        args.engine, largest_size=1 << max(0, min(args.prefill, 1024).bit_length() - 1), model=args.model
    )
    if args.boundary_tokens is None:
        args.boundary_tokens = expected_boundary_tokens(engine.coefficients, args.slo, args.chunk_tokens)
    for doubt in engine_doubts(args.policy, engine):
        print(f"sglang-ext simulate: {doubt}", file=sys.stderr)
    workload = load_workload(args.workload)
    if args.concurrency is not None:
        rates = [_closed_rate(args, workload)]
    runs: list[tuple[LoadReport, list[ServedPrefill]]] = []
    for rate in rates:
        requests = make_requests(workload, args, rate)
        builder = stage_builder(args, engine, is_recorded=args.pictures is not None or args.record is not None)
        started_s = time.monotonic()
        options = run_options(args, len(requests))
        if args.record is not None:
            options = replace(options, watch_every_s=WATCH_S)
        try:
            outcome = simulate_for_clients(engine.front_end, requests, builder, options, _progress(requests))
        except ValueError as error:
            raise ScenarioError(f"policy.name {args.policy}: {error}") from None
        _clear_progress(requests, time.monotonic() - started_s)
        if args.record is not None:
            run = RecordedRun(
                *(engine.name, args.policy, args.prefill, args.short_instances, args.boundary_tokens, args.slo),
                *(args.decode, args.decode_kv_tokens),
            )
            write_recording(outcome, run, args.record)
        runs.append(
            (
                make_report(
                    outcome, None if args.concurrency else rate, args.slo, args.boundary_tokens, args.concurrency
                ),
                outcome.served,
            )
        )
        if args.pictures is not None:
            suffix = f"-{rate:g}" if len(rates) > 1 else ""
            draw_timeline(outcome.timeline, args.pictures / f"timeline{suffix}.png")
            if outcome.pool_sizes:
                draw_pools(outcome.pool_sizes, outcome.end_s, args.pictures / f"pools{suffix}.png")
    reports = [report for report, _ in runs]
    stages = f" of {args.long_pp} stages" if args.long_pp > 1 else ""
    if args.short_pp > 1:
        stages += f" (short: {args.short_pp})"
    print(
        f"{engine.name}; {args.prefill} prefill instances{stages}, policy {args.policy}; short: up to "
        f"{args.boundary_tokens} new tokens; time to first token in seconds"
    )
    print(table(reports))
    if args.json is not None:
        content = {"engine": engine.name, "policy": args.policy, "runs": [as_json(report) for report in reports]}
        args.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if args.pictures is not None:
        draw_ttft([served_run for served_run in runs if served_run[1]], args.pictures / "ttft.png")
        if args.rates:
            draw_load(reports, args.pictures / "load.png")
    return 0


def _closed_rate(args: argparse.Namespace, workload: Workload) -> float | None:
    """Return a rate for requests whose times do not count, as clients wait for replies. ScenarioError names what
    contradicts that."""
    if args.concurrency < 1:
        raise ScenarioError(f"workload.concurrency must be at least 1, got {args.concurrency}")
    if args.rates:
        raise ScenarioError("workload.rate: with workload.concurrency a request comes when a reply has come")
    if workload.sessions:
        raise ScenarioError("workload.concurrency: turns of sessions wait for their own answers")
    return None if workload.requests else 1.0


def _progress(requests: list[SimRequest]) -> Callable[[int], None] | None:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        return None
    total = len(requests)

    def show(arrived: int) -> None:
        filled = 40 * arrived // total
        print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {arrived}/{total} requests", end="", file=sys.stderr)

    return show


def _clear_progress(requests: list[SimRequest], taken_s: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{len(requests)} requests simulated in {taken_s:.1f} s{' ' * 40}", file=sys.stderr)
