"""`sglang-ext plan`: whether the devices of a pool should be a pipeline or a ring, from costs, links and chunk time."""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sglang_ext import settings
from sglang_ext.costs.engine_profile import ProfileError
from sglang_ext.long_pool.decide.sp_cost import ChunkSample, SpCandidate, SpCost, fit_sp_cost
from sglang_ext.planner.simulation.engines import ENGINE_NAMES, EngineError, SimEngine, load_engine
from sglang_ext.planner.simulation.operator_engine import FITTED_CACHED_TOKENS, FITTED_NEW_TOKENS
from sglang_ext.planner.simulation.scenario import HOP_GB_PER_S, POOL, ScenarioError, engine_doubts, stage_hop
from sglang_ext.planner.simulation.simulate import HOP_SETTINGS
from sglang_ext.planner.sizing.pool_shape import (
    PoolShape,
    RingLinks,
    ShapeChoice,
    ShapeCosts,
    ShapeQuestion,
    choose_shape,
    measured_cost,
    ring_cost,
)
from sglang_ext.settings import Setting, SettingsError

LAYERS = 32  # where the profile does not say
_LARGEST_RING = 1024


class PlanError(ValueError):
    """Options that cannot be used; the text is one line that names the option."""


class PlannedPool(NamedTuple):
    """A pool as it was asked for."""

    name: str
    devices: int
    prompts_tokens: tuple[int, ...]


_LINKS = partial(Setting, "links")
LINK_SETTINGS = (
    *HOP_SETTINGS,
    _LINKS(
        "ring_gb_per_s",
        float,
        HOP_GB_PER_S,
        "bandwidth from member to member of a ring, for SP sizes that were not measured",
    ),
    _LINKS(
        "ring_step_us",
        float,
        20.0,
        "latency of a step of a ring in each layer, for SP sizes that were not measured",
    ),
    _LINKS("ring_bytes_per_token", int, 131_072, "keys and values of a token that go round, all layers together"),
    _LINKS("layers", int, None, f"layers of the model (the profile's, else {LAYERS})"),
)
"""Links of pipelines and rings; `shape_costs` reads them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext plan` to `parser`."""
    parser.add_argument("--profile", required=True, metavar="FILE", help=f"costs: a profile, or {ENGINE_NAMES}")
    parser.add_argument(
        "--pool",
        action="append",
        required=True,
        metavar="NAME:N:TOKENS[,TOKENS]",
        help="a pool of N instances' devices, and the lengths of its prompts, such as long:4:65536,131072; may be "
        "repeated",
    )
    parser.add_argument(
        "--chunk-ms",
        type=float,
        default=500.0,
        metavar="MS",
        help="longest time of a chunk on a ring; stages of a pipeline get what makes short prompts wait as long",
    )
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="chunks of N tokens instead, on either")
    settings.add_arguments(parser, LINK_SETTINGS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")


def run(args: argparse.Namespace) -> int:
    """Print a line for each prompt of each pool, and why."""
    prefix = "sglang-ext plan: error:"
    try:
        args = settings.with_settings(args, LINK_SETTINGS, args.config)
        pools = [read_pool(text) for text in args.pool]
        for name, value in (("--chunk-ms", args.chunk_ms), ("--chunk-tokens", args.chunk_tokens)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise PlanError(f"{name} must be above 0, got {value:g}")
        engine = load_engine(args.profile, _LARGEST_RING)
        for doubt in engine_doubts(POOL, engine):
            print(f"sglang-ext plan: {doubt}", file=sys.stderr)
        choices = {
            pool.name: [
                choose_shape(
                    shape_costs(args, engine, pool.devices),
                    ShapeQuestion(tokens, args.chunk_ms / 1e3, args.chunk_tokens),
                )
                for tokens in pool.prompts_tokens
            ]
            for pool in pools
        }
    except (SettingsError, PlanError, ScenarioError) as error:
        print(f"{prefix} {error}", file=sys.stderr)
        return 2
    except (EngineError, ProfileError) as error:
        print(f"{prefix} --profile: {error}", file=sys.stderr)
        return 2
    print(_table(engine, choices, args))
    if args.json is not None:
        content = {name: [_as_json(choice) for choice in found] for name, found in choices.items()}
        try:
            args.json.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"{prefix} {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
    return 0


def read_pool(text: str) -> PlannedPool:
    """A pool as `--pool` names it. PlanError in one line."""
    parts = text.split(":")
    try:
        name, devices, tokens = parts[0], int(parts[1]), tuple(int(number) for number in parts[2].split(","))
        if len(parts) != 3 or not name or devices < 2 or min(tokens) < 1:
            raise ValueError
    except (ValueError, IndexError):
        raise PlanError(
            f"--pool {text!r} is not NAME:N:TOKENS with N of at least 2, such as long:4:65536,131072"
        ) from None
    return PlannedPool(name, devices, tokens)


def shape_costs(args: argparse.Namespace, engine: SimEngine, devices: int) -> ShapeCosts:
    """Return what a chunk costs on this many devices; ring sizes and numbers of stages that were not measured are
    derived."""
    single = one_instance(engine)
    candidate = next((candidate for candidate in engine.candidates if candidate.size == devices), None)
    return ShapeCosts(
        devices,
        measured_cost(single),
        engine.on_stages(devices, stage_hop(args, engine, devices)),
        measured_cost(candidate.cost)
        if candidate is not None
        else ring_cost(single, devices, ring_links(args, engine)),
    )


def ring_candidates(args: argparse.Namespace, engine: SimEngine, most: int) -> tuple[SpCandidate, ...]:
    """SP sizes that are powers of two up to `most`: as measured, else Eq. 1 fitted to what `ring_cost` says."""
    single, links = one_instance(engine), ring_links(args, engine)
    measured = {candidate.size: candidate for candidate in engine.candidates}
    found = []
    for size in (1 << step for step in range(most.bit_length())):
        cost = ring_cost(single, size, links)
        samples = [
            ChunkSample(cached, new, cost(new, cached)) for cached in FITTED_CACHED_TOKENS for new in FITTED_NEW_TOKENS
        ]
        found.append(measured.get(size) or SpCandidate(size, fit_sp_cost(samples)))
    return tuple(found)


def one_instance(engine: SimEngine) -> SpCost:
    """Return what a chunk costs on one instance, by Eq. 1."""
    for candidate in engine.candidates:
        if candidate.size == 1 and isinstance(candidate.cost, SpCost):
            return candidate.cost
    costs = engine.coefficients
    return SpCost(costs.kappa_s, costs.token_s, 2 * costs.alpha_s, costs.alpha_s)


def ring_links(args: argparse.Namespace, engine: SimEngine) -> RingLinks:
    """Return the links that the settings describe. PlanError names the setting."""
    for name in ("ring_gb_per_s", "ring_bytes_per_token", "layers"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise PlanError(f"links.{name} must be above 0, got {value:g}")
    if not (math.isfinite(args.ring_step_us) and args.ring_step_us >= 0):
        raise PlanError(f"links.ring_step_us must be at least 0, got {args.ring_step_us:g}")
    layers = args.layers or engine.layers or LAYERS
    return RingLinks(args.ring_bytes_per_token, 1e9 * args.ring_gb_per_s, args.ring_step_us / 1e6, layers)


def _table(engine: SimEngine, choices: dict[str, list[ShapeChoice]], args: argparse.Namespace) -> str:
    chunks = f"of {args.chunk_tokens} tokens" if args.chunk_tokens else f"of at most {args.chunk_ms:g} ms on a ring"
    sizes = {candidate.size for candidate in engine.candidates}
    stages = {pipeline.stages.count for pipeline in engine.pipelines}
    lines = [
        f"{engine.name}; chunks {chunks}; first token of a prompt by itself in s (chunks), and prompts a minute",
        f"{'pool':<8} {'devices':>7} {'prompt':>8}  {'one instance':>14} {'/min':>7}  {'pipeline':>14} {'/min':>7}  "
        f"{'ring':>14} {'/min':>7}  better",
    ]
    for name, found in choices.items():
        for choice in found:
            single, pipeline, ring = (
                choice.times[shape] for shape in (PoolShape.ALONE, PoolShape.PIPELINE, PoolShape.RING)
            )
            cells = [f"{times.prompt_s:.3g} ({len(times.chunks)})" for times in (single, pipeline, ring)]
            lines.append(
                f"{name:<8} {choice.devices:>7} {choice.prompt_tokens:>8}  {cells[0]:>14} "
                f"{60 * single.prompts_per_s:>7.3g}  {cells[1]:>14} "
                f"{60 * pipeline.prompts_per_s:>7.3g}  {cells[2]:>14} {60 * ring.prompts_per_s:>7.3g}  {choice.better}"
            )
    lines += [
        f"{name}, {choice.prompt_tokens} tokens: {choice.better}: {choice.reason}"
        for name, found in choices.items()
        for choice in found
    ]
    asked = {choice.devices for found in choices.values() for choice in found}
    derived = [f"pipeline of {size}" for size in sorted(asked - stages)]
    derived += [f"ring of {size}" for size in sorted(asked - sizes)]
    if derived:
        lines.append(f"not measured, but reckoned from one instance and the links: {', '.join(derived)}")
    return "\n".join(lines)


def _as_json(choice: ShapeChoice) -> dict[str, object]:
    return {
        "devices": choice.devices,
        "prompt_tokens": choice.prompt_tokens,
        "better": choice.better.value,
        "reason": choice.reason,
        "times": {
            shape.value: {
                "prompt_s": times.prompt_s,
                "prompts_per_s": times.prompts_per_s,
                "chunks": len(times.chunks),
                "longest_chunk_s": times.longest_chunk_s,
                "lost_s": times.lost_s,
            }
            for shape, times in choice.times.items()
        },
    }
