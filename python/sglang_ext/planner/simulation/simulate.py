"""`sglang-ext simulate`: a workload on simulated instances, with the policies of the router and the engine."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
    POLICIES,
    ScenarioError,
    engine_doubts,
    make_requests,
    run_options,
    stage_builder,
)
from sglang_ext.planner.simulation.workload import WorkloadError, load_workload
from sglang_ext_router.decide.decode_choice import DECODE_POLICIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext simulate` to `parser`."""
    load = parser.add_argument_group("workload")
    load.add_argument(
        "--workload",
        type=Path,
        required=True,
        metavar="FILE",
        help="Mooncake JSONL, Azure CSV, CSV with arrived_at, num_prefill_tokens, num_decode_tokens, or with the "
        "lengths alone, CSV of turns: conv, turn, new_input_tokens, history_tokens, output_tokens",
    )
    load.add_argument(
        "--rate", type=float, help="requests per second: of lengths drawn from the file, or the trace stretched to it"
    )
    load.add_argument("--rates", type=float, nargs="+", help="several of them, one run each")
    load.add_argument("--requests", type=int, help="how many: drawn from lengths (2000), or the first of a trace (all)")
    load.add_argument(
        "--burst-shape", type=float, default=1.0, help="gamma shape of the gaps; 1 is Poisson, less bursts"
    )
    load.add_argument(
        "--think-s", type=float, default=30.0, help="turns of sessions: mean time between an answer and the next turn"
    )
    load.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    load.add_argument(
        "--warm-up", type=float, default=0.0, help="share of the requests, the first, that is not counted"
    )
    engine = parser.add_argument_group("instances")
    engine.add_argument("--engine", default="table1", help=f"{ENGINE_NAMES}, or a profile (JSON file)")
    engine.add_argument("--model", help="name or folder of the model that the engine must be of")
    engine.add_argument("--prefill", type=int, default=16, help="prefill instances")
    engine.add_argument("--instances-per-node", type=int, default=8, help="prefill instances on one node")
    engine.add_argument(
        "--kv-tokens", type=int, default=1_000_000, help="KV tokens that a prefill instance holds: for each stage"
    )
    engine.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="INSTANCE:AT:FOR",
        help="an instance is down from a second on for so many seconds; may be repeated",
    )
    policy = parser.add_argument_group("policy")
    policy.add_argument("--policy", choices=POLICIES, default="tetris", help="who decides over prefill")
    policy.add_argument(
        "--improvement-rate", type=float, default=0.5, help="tetris…: gain that a larger SP size must bring"
    )
    policy.add_argument(
        "--chunk-s",
        type=float,
        help="pool…: longest time of a chunk, or ten times its overhead if that is more; then all is decided again",
    )
    policy.add_argument("--sp-size", type=int, default=8, help="fixed-sp: instances of a group")
    policy.add_argument(
        "--router",
        choices=ROUTERS,
        default=LEAST_LOADED,
        help="fcfs, hrrn, shortest-prefill-first, laps: which instance a prompt goes to",
    )
    policy.add_argument("--chunk-tokens", type=int, default=8192, help="most tokens of an iteration")
    policy.add_argument(
        "--short-instances",
        type=int,
        default=0,
        help="laps: so many serve short prompts alone, the others long ones, 0: all serve both; policies that share "
        "prompts: so many serve short prompts under laps, the others share long ones",
    )
    policy.add_argument(
        "--long-pp",
        type=int,
        default=1,
        metavar="P",
        help="instances that serve long prompts, or all, alone: pipeline stages of each, so many devices",
    )
    policy.add_argument(
        "--short-pp", type=int, default=1, metavar="P", help="--short-instances: pipeline stages of each"
    )
    add_hop_arguments(policy)
    policy.add_argument("--move-pools", action="store_true", help="laps: the pressure controller moves instances")
    policy.add_argument(
        "--scaler",
        choices=SCALERS,
        help="laps with --short-instances: an autoscaler of each pool, or of the total, which goes by the work of both "
        "and adds to the long one alone",
    )
    policy.add_argument("--scaler-queue-s", type=float, default=2.0, help="seconds of queued work for each instance")
    policy.add_argument("--scaler-utilisation", type=float, default=0.7, help="busy share for each instance")
    policy.add_argument("--scaler-startup-s", type=float, default=120.0, help="until an instance takes requests")
    policy.add_argument(
        "--scaler-up-stabilisation-s", type=float, default=90.0, help="so long more are needed before more are started"
    )
    policy.add_argument(
        "--scaler-stabilisation-s", type=float, default=300.0, help="so long fewer are needed before one is ended"
    )
    policy.add_argument("--scaler-max", type=int, default=32, help="most instances of a pool")
    policy.add_argument(
        "--boundary-tokens",
        type=int,
        help="most new tokens of a short prompt (default: what instances of this engine find, half of --slo)",
    )
    policy.add_argument("--slo", type=float, default=1.0, help="TTFT objective (s), counted for all requests")
    decode = parser.add_argument_group("decode")
    decode.add_argument("--decode", type=int, default=0, help="decode instances; 0: prefill alone")
    decode.add_argument(
        "--decode-policy", choices=DECODE_POLICIES, default="freeness", help="which one a request goes to"
    )
    add_decode_instance_arguments(decode)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    output.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write what the live page shows of a cluster here, for `sglang-ext live timeline --recording`",
    )
    output.add_argument(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="draw the TTFT distribution, the timeline of "
        "instances, latency against load (with --rates), pool sizes (with --move-pools)",
    )


def add_hop_arguments(group: argparse._ArgumentGroup) -> None:
    """Add what activations take from stage to stage to a group of arguments; `scenario.stage_hop` reads it."""
    group.add_argument(
        "--hop-ms", type=float, metavar="MS", help=f"latency from stage to stage (as measured, else {HOP_MS:g})"
    )
    group.add_argument(
        "--hop-gb-per-s",
        type=float,
        metavar="GB",
        help=f"bandwidth from stage to stage (as measured, else {HOP_GB_PER_S:g})",
    )
    group.add_argument(
        "--activation-bytes-per-token",
        type=int,
        metavar="BYTES",
        help=f"that go from stage to stage (4 for each value of the hidden state, else {ACTIVATION_BYTES_PER_TOKEN})",
    )


def add_decode_instance_arguments(decode: argparse._ArgumentGroup) -> None:
    """Add what a decode instance is to a group of arguments; `scenario.decode_spec` reads it."""
    decode.add_argument(
        "--decode-kv-tokens", type=int, default=1_000_000, help="KV tokens that a decode instance holds"
    )
    decode.add_argument("--decode-step-ms", type=float, default=12.0, help="a decode step of an empty batch")
    decode.add_argument("--decode-step-per-request-ms", type=float, default=0.2, help="and what each member adds")
    decode.add_argument("--kv-bytes-per-token", type=int, default=131_072, help="KV bytes that are transferred")
    decode.add_argument("--transfer-gb-per-s", type=float, default=25.0, help="bandwidth of a transfer")
    decode.add_argument("--transfer-backends", type=int, default=4, help="transfers at a time into one instance")


def run(args: argparse.Namespace) -> int:
    """Simulate, print the table on standard output; progress goes to standard error."""
    try:
        return _run(args)
    except (ScenarioError, WorkloadError, EngineError, PicturesError) as error:
        option = {WorkloadError: "--workload: ", EngineError: "--engine: ", PicturesError: "--pictures: "}
        print(f"sglang-ext simulate: error: {option.get(type(error), '')}{error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sglang-ext simulate: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.rate is not None and args.rates:
        raise ScenarioError("--rate and --rates exclude each other")
    rates: list[float | None] = list(args.rates) if args.rates else [args.rate]
    if args.record is not None and args.rates:
        raise ScenarioError("--record takes one run, not the several of --rates")
    if not (math.isfinite(args.slo) and args.slo > 0):
        raise ScenarioError(f"--slo must be above 0, got {args.slo:g}")
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
            raise ScenarioError(f"--policy {args.policy}: {error}") from None
        _clear_progress(requests, time.monotonic() - started_s)
        if args.record is not None:
            run = RecordedRun(
                *(engine.name, args.policy, args.prefill, args.short_instances, args.boundary_tokens, args.slo),
                *(args.decode, args.decode_kv_tokens),
            )
            write_recording(outcome, run, args.record)
        runs.append((make_report(outcome, rate, args.slo, args.boundary_tokens), outcome.served))
        if args.pictures is not None:
            suffix = f"-{rate:g}" if args.rates else ""
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
        draw_ttft([one for one in runs if one[1]], args.pictures / "ttft.png")
        if args.rates:
            draw_load(reports, args.pictures / "load.png")
    return 0


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
