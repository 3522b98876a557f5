"""The `--laps-…` options of `sglang-ext worker`: one for each field of `LapsOptions`, whose help they show.

They may also stand among the engine's own arguments (after `--`), where a cluster file puts them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from enum import StrEnum
from typing import Any, get_args, get_type_hints

from sglang_ext.policy.laps.options import LapsOptions, option_name
from sglang_ext.policy.laps.round_plan import LapsMode
from sglang_ext.types import Role

AUTO, OFF = "auto", "off"
_PREFIX = "laps_"


def add_laps_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--laps-mode` and the rest; defaults are absent from the namespace, so that a later one wins."""
    group = parser.add_argument_group("LAPS: short and long prefills on one instance")
    group.add_argument(
        "--laps-mode",
        choices=[AUTO, OFF, *(mode.value for mode in LapsMode)],
        default=argparse.SUPPRESS,
        help="what the instance prefers; auto: as its role; off: SGLang's own scheduler (default: auto)",
    )
    types = get_type_hints(LapsOptions)
    for field in fields(LapsOptions):
        if field.name != "mode":
            _add_argument(group, field, types[field.name])


def laps_options(
    role: Role, given: argparse.Namespace, engine_arguments: Sequence[str]
) -> tuple[LapsOptions | None, tuple[str, ...]]:
    """LAPS's options, or None where it is off, and the engine arguments that are not LAPS's.

    `engine_arguments` win over `given`. Raises ValueError with one line that names the option.
    """
    values = _values(given)
    if any(argument.startswith("--laps-") for argument in engine_arguments):
        parser = _RaisingParser(add_help=False, allow_abbrev=False)
        add_laps_arguments(parser)
        found, rest = parser.parse_known_args(list(engine_arguments))
        values |= _values(found)
        engine_arguments = rest
    mode = values.pop("mode", AUTO)
    if mode == OFF or not role.is_prefill:
        if values or (mode not in {AUTO, OFF}):
            names = ", ".join(map(option_name, values)) or "--laps-mode"
            raise ValueError(f"{names}: {'LAPS is off' if mode == OFF else 'LAPS schedules prefills, not decodes'}")
        return None, tuple(engine_arguments)
    return LapsOptions(mode=LapsMode(role.value if mode == AUTO else mode), **values), tuple(engine_arguments)


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def _add_argument(group: Any, field: Field[Any], kind: Any) -> None:
    kind = next(one for one in (get_args(kind) or (kind,)) if one is not type(None))
    default = "" if field.default is None else f" (default: {field.default})"
    options: dict[str, Any] = {
        "type": kind,
        "default": argparse.SUPPRESS,
        "help": f"{field.metadata['help']}{default}".replace("%", "%%"),
    }
    if issubclass(kind, StrEnum):
        options |= {"type": _one_of(kind), "metavar": f"{{{','.join(kind)}}}"}
    else:
        options["metavar"] = _unit(field.name).upper()
    group.add_argument(option_name(field.name), **options)


def _unit(name: str) -> str:
    """What an option's name ends with: its unit, which may be a rate (`gb_per_s`)."""
    words = name.split("_")
    return "_".join(words[-3:] if words[-2:-1] == ["per"] else words[-1:])


def _one_of(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    """A type for argparse whose error lists the choices."""

    def convert(text: str) -> StrEnum:
        if text not in list(kind):
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(kind)}, got {text!r}")
        return kind(text)

    return convert


def _values(namespace: argparse.Namespace) -> dict[str, Any]:
    return {name.removeprefix(_PREFIX): value for name, value in vars(namespace).items() if name.startswith(_PREFIX)}
