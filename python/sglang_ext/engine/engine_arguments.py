"""Options of this project that may also stand among the engine's own arguments (after `--`), where they win.

A cluster file puts them there. Options so read have no default in the namespace: absent means not given.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ext.command_parser import RaisingParser


def split_options(
    given: argparse.Namespace,
    engine_arguments: Sequence[str],
    *,
    flag: str,
    destination: str,
    declare: Callable[[argparse.ArgumentParser], None],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values by name, `destination` cut off, of the options that begin with `flag`, and the arguments that are left.

    `declare` adds these options to a parser, each with a `dest` that begins with `destination`; `engine_arguments` win
    over `given`. Raises ValueError with one line that names the option.
    """
    values = _values(given, destination)
    if any(argument.startswith(flag) for argument in engine_arguments):
        parser = RaisingParser(add_help=False, allow_abbrev=False)
        declare(parser)
        found, engine_arguments = parser.parse_known_args(list(engine_arguments))
        values |= _values(found, destination)
    return values, tuple(engine_arguments)


def _values(namespace: argparse.Namespace, destination: str) -> dict[str, Any]:
    return {
        name.removeprefix(destination): value for name, value in vars(namespace).items() if name.startswith(destination)
    }
