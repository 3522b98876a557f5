"""`sglang-ext COMMAND`: each command is a module with `add_arguments(parser)` and `run(args) -> int`.

A command that passes words to other programs also has `arrange_arguments(parser, words)`, which returns the words
that the parser reads.

Only the chosen command's module is imported, so that the router starts without an engine installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import NamedTuple

from sglang_ext import __version__
from sglang_ext.command_parser import CommandParser


class Command(NamedTuple):
    """A command: its module, or its kinds."""

    module: str
    summary: str
    kinds: Mapping[str, Command] = MappingProxyType({})  # `sglang-ext COMMAND KIND`


_BATCHES = {
    "run": Command("sglang_ext.batch.run_command", "send a file of requests through an endpoint, nothing lost"),
    "serve": Command("sglang_ext.batch.serve_command", "serve OpenAI's files and batches in front of an endpoint"),
}
_LIVE = {
    "top": Command("sglang_ext.live.top_command", "show pools and requests of a running router in the terminal"),
    "record": Command("sglang_ext.live.record_command", "write what the live page of a router shows to a file"),
    "timeline": Command(
        "sglang_ext.live.timeline",
        "draw who computed what when in a long pool, in a pipeline, or in a recording",
    ),
}
COMMANDS = {
    "up": Command("sglang_ext.cluster.up", "start a whole cluster (pools and router) and keep it healthy"),
    "router": Command("sglang_ext_router.main", "serve the OpenAI-compatible endpoint over prefill and decode pools"),
    "worker": Command("sglang_ext.engine.worker", "start one SGLang instance with a role"),
    "mock-engine": Command("sglang_ext.engine.mock_engine", "imitate an instance, to develop a router against"),
    "coordinator": Command(
        "sglang_ext.long_pool.coordinator.coordinator_command",
        "let several instances of a long pool share long prefills",
    ),
    "live": Command("", "watch, record or draw what a running cluster does", _LIVE),
    "doctor": Command("sglang_ext.engine.doctor", "report what this machine can run and what is missing"),
    "profile": Command(
        "sglang_ext.planner.profiling.profile_engine", "measure a running instance and fit what its prefills cost"
    ),
    "batch": Command("", "offline runs: files of requests, and scores of a teacher", _BATCHES),
    "simulate": Command("sglang_ext.planner.simulation.simulate", "simulate a workload on any number of instances"),
    "plan": Command("sglang_ext.planner.sizing.plan", "compare a pipeline and a ring for a pool, and say why"),
    "size": Command(
        "sglang_ext.planner.sizing.size", "find the cheapest pools that hold latency objectives under a trace"
    ),
}


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show each default that is not empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, "", False, []):
            return action.help
        return super()._get_help_string(action)


def _overview() -> str:
    lines = [
        "usage: sglang-ext COMMAND [options]",
        "",
        "Prefill disaggregation by prompt length for SGLang.",
        "",
        "commands:",
    ]
    lines += [f"  {name:<11} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "`sglang-ext COMMAND --help` explains each; `sglang-ext --version` prints the version."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(_overview())
        return 0
    if arguments[0] in {"-V", "--version"}:
        print(f"sglang-ext {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    command = COMMANDS.get(name)
    if command is None:
        print(f"sglang-ext: unknown command {name!r}; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    arrange: Callable[[argparse.ArgumentParser, Sequence[str]], list[str]] | None = None
    parser = CommandParser(prog=f"sglang-ext {name}", description=_description(command), formatter_class=_HelpFormatter)
    if command.kinds:
        kinds = parser.add_subparsers(metavar="WHAT", required=True)
        for kind, kind_command in command.kinds.items():
            kind_parser = kinds.add_parser(
                kind,
                help=kind_command.summary,
                description=_description(kind_command),
                formatter_class=_HelpFormatter,
            )
            if kind in rest[:1]:
                _fill(kind_parser, kind_command)
    else:
        arrange = getattr(_fill(parser, command), "arrange_arguments", None)
    parsed = parser.parse_args(rest if arrange is None else arrange(parser, rest))
    return int(parsed.run_command(parsed) or 0)


def _fill(parser: argparse.ArgumentParser, command: Command) -> ModuleType:
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sglang_ext"):
            raise
        extra = "batch" if command in _BATCHES.values() else "cpu] or [cuda"
        parser.exit(1, f"{parser.prog}: {error.name} is not installed: install the wheel with [{extra}]\n")
    module.add_arguments(parser)
    parser.set_defaults(run_command=module.run)
    return module


def _description(command: Command) -> str:
    return command.summary[0].upper() + command.summary[1:] + "."


if __name__ == "__main__":
    sys.exit(main())
