"""The `--laps-…` options and `laps.…` settings of `sglang-ext worker`, and the arguments they exclude.

The options may also stand among the engine's own arguments (after `--`), where a cluster file puts them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import Field, fields
from enum import StrEnum
from typing import Any, get_args, get_type_hints

from sglang_ext.engine.engine_arguments import split_options
from sglang_ext.laps.decide.options import FLAGS, Batching, LapsOptions, option_name
from sglang_ext.laps.decide.round_plan import LapsMode
from sglang_ext.settings import UNSET, Setting
from sglang_ext.types import Role

AUTO, OFF = "auto", "off"
_PREFIX = "laps_"
# Fields of `LapsOptions` that an operator has no reason to change: the margins and the depth of a window follow from
# the objectives, ageing only has to exist, and the time to write KV is part of the fitted costs.
CONSTANTS = frozenset(
    {
        *("sigma_ms", "delta_ms", "depth_max", "token_max", "max_parked", "age_s"),
        *("kv_bytes_per_token", "kv_bandwidth_gb_per_s"),
    }
)


def _settings() -> tuple[Setting, ...]:
    types = get_type_hints(LapsOptions)
    found = []
    for field in fields(LapsOptions):
        if field.name in FLAGS or field.name in CONSTANTS:
            continue
        kind = _kind(types[field.name])
        choices = tuple(kind) if issubclass(kind, StrEnum) else ()
        default = "" if field.default is None else f" (default: {field.default})"
        what = f"{field.metadata['help']}{default}"
        found.append(
            Setting("laps", field.name, str if choices else kind, UNSET, what, choices, dest=_PREFIX + field.name)
        )
    return tuple(found)


def _kind(annotation: Any) -> type:
    kind: type = next(option for option in (get_args(annotation) or (annotation,)) if option is not type(None))
    return kind


SETTINGS = _settings()


def add_laps_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; defaults are absent from the namespace, so that a later one wins."""
    group = parser.add_argument_group("LAPS: short and long prefills on one instance")
    group.add_argument(
        "--laps-mode",
        choices=[AUTO, OFF, *(mode.value for mode in LapsMode)],
        default=argparse.SUPPRESS,
        help="what the instance prefers; auto: as its role (plain: off); off: SGLang's own scheduler (default: auto)",
    )
    types = get_type_hints(LapsOptions)
    for field in fields(LapsOptions):
        if field.name != "mode" and field.name in FLAGS:
            _add_argument(group, field, types[field.name])


def laps_options(
    role: Role, given: argparse.Namespace, engine_arguments: Sequence[str]
) -> tuple[LapsOptions | None, tuple[str, ...]]:
    """LAPS's options, or None where it is off, and the engine arguments that are not LAPS's.

    `engine_arguments` win over `given`. Raises ValueError with one line that names the option.
    """
    values, engine_arguments = split_options(
        given, engine_arguments, flag="--laps-", destination=_PREFIX, declare=add_laps_arguments
    )
    mode = values.pop("mode", AUTO)
    is_wanted = role.is_prefill or (role is Role.PLAIN and mode != AUTO)
    if mode == OFF or not is_wanted:
        if values or (mode not in {AUTO, OFF}):
            names = ", ".join(map(option_name, values)) or "--laps-mode"
            reason = "LAPS schedules prefills, not decodes"
            if mode == OFF or role is Role.PLAIN:
                reason = "LAPS is off" if mode == OFF else "an undivided instance has LAPS with --laps-mode both"
            raise ValueError(f"{names}: {reason}")
        return None, engine_arguments
    if "batching" in values:
        values["batching"] = Batching(values["batching"])
    return LapsOptions(mode=LapsMode(role.value if mode == AUTO else mode), **values), engine_arguments


def _add_argument(group: Any, field: Field[Any], kind: Any) -> None:
    kind = _kind(kind)
    default = "" if field.default is None else f" (default: {field.default})"
    options: dict[str, Any] = {
        "type": kind,
        "default": argparse.SUPPRESS,
        "help": f"{field.metadata['help']}{default}".replace("%", "%%"),
    }
    options["metavar"] = _unit(field.name).upper()
    group.add_argument(option_name(field.name), **options)


def _unit(name: str) -> str:
    """Return the unit that an option's name ends with, which may be a rate (`gb_per_s`)."""
    words = name.split("_")
    return "_".join(words[-3:] if words[-2:-1] == ["per"] else words[-1:])


def conflict(server_args: Any) -> str | None:
    """Return why these SGLang arguments and LAPS exclude each other; None when they do not.

    They may be ServerArgs that SGLang has not resolved yet: what it derives from another argument is looked for there.
    """
    for is_conflicting, argument, reason in (
        (server_args.disaggregation_mode == "decode", "--disaggregation-mode", "LAPS schedules prefills, not decodes"),
        (
            server_args.schedule_policy != "fcfs",
            f"--schedule-policy {server_args.schedule_policy}",
            "LAPS orders the queue itself",
        ),
        (
            server_args.pp_size > 1 and server_args.pp_async_batch_depth > 0,
            "--pp-async-batch-depth",
            "several rounds are under way in a pipeline as it is",
        ),
        (
            server_args.pp_size > 1 and server_args.dp_size > 1,
            "--dp-size above 1 with --pp-size above 1",
            "what a stage was busy with is kept for one pipeline",
        ),
        (
            server_args.pp_size > 1 and server_args.enable_dynamic_chunking,
            "--enable-dynamic-chunking",
            "LAPS decides how long a chunk is",
        ),
        (server_args.enable_mixed_chunk, "--enable-mixed-chunk", "a LAPS batch is never mixed"),
        (
            server_args.enable_priority_scheduling,
            "--enable-priority-scheduling",
            "priorities come with the request instead (header x-sgl-priority)",
        ),
        (server_args.enable_prefill_delayer, "--enable-prefill-delayer", "the waiting window takes its place"),
        (
            server_args.optimistic_prefill_attempts > 0,
            "--optimistic-prefill-attempts",
            "a parked prefill must have its decode instance",
        ),
        (
            # SGLang derives optimistic prefill from it.
            server_args.disaggregation_decode_allocation_policy == "prefill_complete",
            "--disaggregation-decode-allocation-policy prefill_complete",
            "a parked prefill must have its decode instance",
        ),
        (
            server_args.chunked_prefill_size is not None and server_args.chunked_prefill_size <= 0,
            "--chunked-prefill-size",
            "long prefills must run in chunks to yield between them",
        ),
    ):
        if is_conflicting:
            return f"{argument} does not go with --laps-mode ({reason}); use --laps-mode off"
    return None
