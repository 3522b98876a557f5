"""`sglang-ext profile WHAT`: each kind of profile is a module with `add_arguments(parser)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple


class ProfileKind(NamedTuple):
    """One subcommand."""

    module: str
    summary: str


KINDS = {
    "engine": ProfileKind(
        "sglang_ext.profiling.engine_command", "measure a running instance and fit what its prefills cost"
    ),
    "rates": ProfileKind(
        "sglang_ext.profiling.rates_command", "find the planner's best improvement rate for each load, by simulation"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for each kind of profile to `parser`."""
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for name, kind in KINDS.items():
        module = importlib.import_module(kind.module)
        kind_parser = kinds.add_parser(
            name,
            help=kind.summary,
            description=kind.summary[0].upper() + kind.summary[1:] + ".",
            formatter_class=parser.formatter_class,
        )
        module.add_arguments(kind_parser)
        kind_parser.set_defaults(run_kind=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand and return its exit status."""
    return int(args.run_kind(args))
