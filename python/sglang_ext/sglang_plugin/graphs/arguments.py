"""The `--laps-graph…` options of `sglang-ext worker`: which prefills are captured, when, and in how much memory.

They may also stand among the engine's own arguments (after `--`), where a cluster file puts them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sglang_ext.types import Role
from sglang_ext_cuda_graphs.capture_plan import DEFAULT_BATCH_SIZES, DEFAULT_LENGTHS_TOKENS


class Capture(StrEnum):
    """When graphs are captured."""

    OFF = "off"
    LAZY = "lazy"
    START = "start"


@dataclass(frozen=True)
class GraphOptions:
    """The grid of an instance. Absent where there is none."""

    capture: Capture
    lengths_tokens: tuple[int, ...] = DEFAULT_LENGTHS_TOKENS
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    memory_gb: float | None = None  # None: half of what is free


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; defaults are absent from the namespace, so that a later one wins."""
    group = parser.add_argument_group("LAPS: prefill graphs by length and batch size (CUDA)")
    group.add_argument(
        "--laps-graphs",
        dest="graphs_capture",
        choices=list(Capture),
        default=argparse.SUPPRESS,
        help="capture short prefills as CUDA graphs: all at start, each when first wanted (lazy), or none "
        "(default: off)",
    )
    group.add_argument(
        "--laps-graph-lengths",
        dest="graphs_lengths_tokens",
        type=_numbers,
        metavar="TOKENS,...",
        default=argparse.SUPPRESS,
        help=f"new tokens of a request (default: {_text(DEFAULT_LENGTHS_TOKENS)})",
    )
    group.add_argument(
        "--laps-graph-batches",
        dest="graphs_batch_sizes",
        type=_numbers,
        metavar="REQUESTS,...",
        default=argparse.SUPPRESS,
        help=f"requests of a batch (default: {_text(DEFAULT_BATCH_SIZES)})",
    )
    group.add_argument(
        "--laps-graph-memory-gb",
        dest="graphs_memory_gb",
        type=_positive,
        metavar="GB",
        default=argparse.SUPPRESS,
        help="device memory for all graphs (default: half of what is free when they are captured)",
    )


def graph_options(
    role: Role, given: argparse.Namespace, engine_arguments: Sequence[str]
) -> tuple[GraphOptions | None, tuple[str, ...]]:
    """The options, or None without graphs, and the engine arguments that are none of them.

    `engine_arguments` win over `given`. Raises ValueError with one line that names the option.
    """
    values = _values(given)
    if any(argument.startswith("--laps-graph") for argument in engine_arguments):
        parser = _RaisingParser(add_help=False, allow_abbrev=False)
        add_graph_arguments(parser)
        found, rest = parser.parse_known_args(list(engine_arguments))
        values |= _values(found)
        engine_arguments = rest
    capture = Capture(values.pop("capture", Capture.OFF))
    if capture is Capture.OFF:
        if values:
            raise ValueError(f"{_OPTIONS[next(iter(values))]} needs --laps-graphs start or lazy")
        return None, tuple(engine_arguments)
    if not role.is_prefill:
        raise ValueError("--laps-graphs: these graphs are of prefills, not of decodes")
    return GraphOptions(capture, **values), tuple(engine_arguments)


_OPTIONS = {
    "lengths_tokens": "--laps-graph-lengths",
    "batch_sizes": "--laps-graph-batches",
    "memory_gb": "--laps-graph-memory-gb",
}


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def _values(namespace: argparse.Namespace) -> dict[str, Any]:
    prefix = "graphs_"
    return {name.removeprefix(prefix): value for name, value in vars(namespace).items() if name.startswith(prefix)}


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers with commas between")
    return tuple(sorted({int(part) for part in parts}))


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
