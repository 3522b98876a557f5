"""The `--cdsp-…` options of `sglang-ext worker`: whether, and how, it shares long prefills with other instances."""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass

from sglang_ext.types import Role

_DEFAULT_MIN_TOKENS = 2048
_DEFAULT_STEP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class CdspOptions:
    """A member of a long pool."""

    coordinator_host: str
    coordinator_port: int
    name: str  # of this instance, unique in the pool
    node: str
    min_tokens: int
    step_timeout_s: float


def add_cdsp_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("CDSP: one long prefill on several instances")
    group.add_argument(
        "--cdsp-coordinator",
        metavar="HOST:PORT",
        default=None,
        help="coordinator of the long pool that this prefill instance belongs to (default: none, it computes alone)",
    )
    group.add_argument(
        "--cdsp-min-tokens",
        metavar="TOKENS",
        type=int,
        default=_DEFAULT_MIN_TOKENS,
        help=f"uncached tokens from which on a prefill may be shared (default: {_DEFAULT_MIN_TOKENS})",
    )
    group.add_argument(
        "--cdsp-node",
        metavar="NAME",
        default=None,
        help="machine or rack of this instance; groups keep within one as far as they can (default: the host's name)",
    )
    group.add_argument(
        "--cdsp-step-timeout-s",
        metavar="S",
        type=float,
        default=_DEFAULT_STEP_TIMEOUT_S,
        help="longest silence of another instance in the middle of a chunk; above the longest iteration "
        f"(default: {_DEFAULT_STEP_TIMEOUT_S:g})",
    )


def cdsp_options(arguments: argparse.Namespace, role: Role, name: str) -> CdspOptions | None:
    """The options, or None where the instance computes alone. ValueError with one line that names the option."""
    address = arguments.cdsp_coordinator
    if address is None:
        return None
    if not role.is_prefill:
        raise ValueError("--cdsp-coordinator: decode instances compute no prefills")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--cdsp-coordinator: {address!r} is not of the form HOST:PORT")
    if arguments.cdsp_min_tokens < 1:
        raise ValueError(f"--cdsp-min-tokens must be at least 1, got {arguments.cdsp_min_tokens}")
    if not 0.1 <= arguments.cdsp_step_timeout_s < float("inf"):
        raise ValueError(f"--cdsp-step-timeout-s must be at least 0.1, got {arguments.cdsp_step_timeout_s}")
    return CdspOptions(
        host.strip("[]"),
        int(port),
        name,
        arguments.cdsp_node or socket.gethostname(),
        arguments.cdsp_min_tokens,
        arguments.cdsp_step_timeout_s,
    )
