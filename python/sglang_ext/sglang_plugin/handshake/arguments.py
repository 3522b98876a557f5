"""The `--transfer-…` options of `sglang-ext worker`: how the handshake backend receives and moves KV."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from sglang_ext.kv_transfer.transport import TRANSPORTS
from sglang_ext.sglang_plugin.transfer_backend import HANDSHAKE
from sglang_ext.types import Role

_DEFAULT_TRANSPORT = "tcp"


@dataclass(frozen=True)
class TransferOptions:
    """What the handshake backend is told."""

    transport: str = _DEFAULT_TRANSPORT
    receive_backends: int | None = None  # None: no limit


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group(f"KV transfer with --transfer-backend {HANDSHAKE}")
    group.add_argument(
        "--transfer-transport",
        choices=TRANSPORTS,
        default=None,
        help="what moves the bytes; the same on prefill and decode. shared_memory: between instances on one machine "
        f"(default: {_DEFAULT_TRANSPORT})",
    )
    group.add_argument(
        "--transfer-receive-backends",
        metavar="N",
        type=int,
        default=None,
        help="transfers that a decode rank receives at a time; others wait in the order of their first handshake "
        "(default: no limit)",
    )


def transfer_options(arguments: argparse.Namespace, role: Role) -> TransferOptions | None:
    """The options, None with another backend. Raises ValueError, in one line that names the option."""
    transport, receive_backends = arguments.transfer_transport, arguments.transfer_receive_backends
    if arguments.transfer_backend != HANDSHAKE:
        for value, option in ((transport, "--transfer-transport"), (receive_backends, "--transfer-receive-backends")):
            if value is not None:
                raise ValueError(f"{option} needs --transfer-backend {HANDSHAKE}")
        return None
    if receive_backends is not None:
        if receive_backends < 1:
            raise ValueError(f"--transfer-receive-backends must be at least 1, got {receive_backends}")
        if role.is_prefill:
            raise ValueError("--transfer-receive-backends: prefill instances receive no KV")
    return TransferOptions(transport or _DEFAULT_TRANSPORT, receive_backends)
