"""The `--transfer-…` options and `transfer.…` settings of `sglang-ext worker`, and what the handshake does not move."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang_ext.engine.device import Device
from sglang_ext.settings import Setting
from sglang_ext.transfer.sglang.transfer_backend import HANDSHAKE, RECURRENT, WINDOWS
from sglang_ext.transfer.transports.registry import DEVICE_TRANSPORTS, TRANSPORTS, unavailable_reason
from sglang_ext.types import Role

_DEFAULT_TRANSPORT = "tcp"
_DEVICE_TRANSPORT = "nixl"
# A part costs some tenths of a millisecond of Python at either end: as long as 1 MiB takes to move.
_STREAM_LAYER_BYTES = 1 << 20
# About a second of prefill for a model of 8B on a current GPU: to take slots late costs an iteration of decode.
_LATE_SLOTS_TOKENS = 16_384
_NEVER = "never"


@dataclass(frozen=True)
class TransferOptions:
    """Settings of the handshake backend."""

    transport: str = _DEFAULT_TRANSPORT
    receive_backends: int | None = None  # None: no limit
    # A chunk with at least this many bytes of keys and values in a layer leaves layer by layer; None: none does.
    stream_layer_bytes: int | None = _STREAM_LAYER_BYTES
    # Decode: a prompt of at least this length takes slots when its turn in prefill is near; None: none does.
    late_slots_tokens: int | None = _LATE_SLOTS_TOKENS
    # Prefill: its turn is near when no more tokens are to be computed before it.
    slots_lookahead_tokens: int = _LATE_SLOTS_TOKENS


SETTINGS = (
    Setting(
        "transfer",
        "receive_backends",
        int,
        None,
        "transfers that a decode rank receives at a time; others wait in the order of their first handshake (default: "
        "no limit)",
        dest="transfer_receive_backends",
    ),
    Setting(
        "transfer",
        "stream_layer_kib",
        str,
        None,
        "prefill: a chunk of a prompt with at least this many KiB of keys and values in a layer is sent layer by "
        f"layer while it is computed, others once they are; {_NEVER}: none is (default: {_STREAM_LAYER_BYTES >> 10})",
        dest="transfer_stream_layer_kib",
    ),
    Setting(
        "transfer",
        "late_slots_tokens",
        str,
        None,
        "decode: a prompt of at least this many tokens takes slots when its turn in the prefill instance is near, "
        f"instead of when it arrives; {_NEVER}: none does. Prefill: its turn is near when no more than this many "
        f"tokens are to be computed before it (default: {_LATE_SLOTS_TOKENS})",
        dest="transfer_late_slots_tokens",
    ),
)


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group(f"KV transfer with --transfer-backend {HANDSHAKE}")
    group.add_argument(
        "--transfer-transport",
        choices=TRANSPORTS,
        default=None,
        help="what moves the bytes; the same on prefill and decode. shared_memory: between instances on one machine; "
        "nixl, mooncake: NIXL and Mooncake, where they are installed "
        f"(default: {_DEFAULT_TRANSPORT}; on GPUs, whose memory only these two move, {_DEVICE_TRANSPORT})",
    )


def transfer_options(arguments: argparse.Namespace, role: Role, device: Device = Device.CPU) -> TransferOptions | None:
    """The options, None with another backend. Raises ValueError, in one line that names the option."""
    default = _DEFAULT_TRANSPORT if device is Device.CPU else _DEVICE_TRANSPORT
    transport, receive_backends = arguments.transfer_transport, arguments.transfer_receive_backends
    stream_kib: str | None = arguments.transfer_stream_layer_kib
    if arguments.transfer_backend != HANDSHAKE:
        for value, option in (
            (transport, "--transfer-transport"),
            (receive_backends, "transfer.receive_backends"),
            (stream_kib, "transfer.stream_layer_kib"),
            (arguments.transfer_late_slots_tokens, "transfer.late_slots_tokens"),
        ):
            if value is not None:
                raise ValueError(f"{option} needs --transfer-backend {HANDSHAKE}")
        return None
    if receive_backends is not None:
        if receive_backends < 1:
            raise ValueError(f"transfer.receive_backends must be at least 1, got {receive_backends}")
        if role.is_prefill:
            raise ValueError("transfer.receive_backends: prefill instances receive no KV")
    problem = unavailable_reason(transport or default)
    if problem is not None:
        raise ValueError(f"--transfer-transport: {problem}")
    if device is not Device.CPU and (transport or default) not in DEVICE_TRANSPORTS:
        choice = " or ".join(DEVICE_TRANSPORTS)
        raise ValueError(f"--transfer-transport {transport} moves host memory only; on {device} choose {choice}")
    if stream_kib is not None and not role.is_prefill:
        raise ValueError("transfer.stream_layer_kib: decode instances send no KV")
    late_slots_tokens = _late_slots_tokens(arguments.transfer_late_slots_tokens, role)
    return TransferOptions(
        transport or default,
        receive_backends,
        _stream_layer_bytes(stream_kib),
        late_slots_tokens,
        _LATE_SLOTS_TOKENS if late_slots_tokens is None else late_slots_tokens,
    )


def _late_slots_tokens(tokens: str | None, role: Role) -> int | None:
    if tokens is None:
        return _LATE_SLOTS_TOKENS
    if tokens == _NEVER and not role.is_prefill:
        return None
    if not tokens.isdecimal() or int(tokens) < 1:
        choice = "a positive number of tokens" + ("" if role.is_prefill else f" or {_NEVER!r}")
        raise ValueError(f"transfer.late_slots_tokens must be {choice}, got {tokens!r}")
    return int(tokens)


def _stream_layer_bytes(kib: str | None) -> int | None:
    if kib is None:
        return _STREAM_LAYER_BYTES
    if kib == _NEVER:
        return None
    if not kib.isdecimal():
        raise ValueError(f"transfer.stream_layer_kib must be a number of KiB or {_NEVER!r}, got {kib!r}")
    return int(kib) << 10


_PREFIX = "does not go with --transfer-backend handshake"
# By SGLang's names; NEXTN and MTP are EAGLE to it.
WITH_DRAFT_KV = ("EAGLE", "EAGLE3")
_BLOCK_SCALED = frozenset({"mxfp8", "nvfp4", "fp4_mx_block16"})


def conflict(server_args: Any, *, has_staging_buffer: bool) -> str | None:
    """Return why these SGLang arguments exclude the backend, before the engine starts; None when they do not."""
    return _first(
        (server_args.attn_cp_size > 1, "--attn-cp-size", "a rank holds every token of its heads"),
        (server_args.dcp_size > 1, "--dcp-size", "a decode rank holds every token of its heads"),
        (server_args.enable_hisparse, "--enable-hisparse", "KV goes to the device's pool"),
        (
            server_args.speculative_algorithm not in (None, *WITH_DRAFT_KV),
            f"--speculative-algorithm {server_args.speculative_algorithm}",
            f"what drafts need of a prompt travels with {', '.join(WITH_DRAFT_KV)}",
        ),
        (
            server_args.kv_cache_dtype in _BLOCK_SCALED,
            f"--kv-cache-dtype {server_args.kv_cache_dtype}",
            "the scales of its blocks stay behind",
        ),
        (server_args.enable_pd_role_switch, "--enable-pd-role-switch", "an endpoint keeps its role"),
        (
            server_args.disaggregation_decode_allocation_policy != "early",
            "--disaggregation-decode-allocation-policy",
            "decode allocates early, then invites",
        ),
        (has_staging_buffer, "SGLANG_DISAGG_STAGING_BUFFER", "heads are cut from their rows without one"),
    )


def model_conflict(kv_args: Any, stages: int) -> str | None:
    """Return why a model's KV pool cannot be transferred by an instance of `stages`; None when it can."""
    kinds = {str(getattr(kind, "value", kind)) for kind in kv_args.state_types}
    unmoved = ", ".join(sorted(kinds - {WINDOWS, RECURRENT}))
    return _first(
        (
            bool(unmoved),
            f"a model with extra state ({unmoved})",
            "keys, values, latent rows and recurrent states travel",
        ),
        (
            WINDOWS in kinds and kv_args.swa_kv_cache_layout != "nhd",
            "a model whose sliding windows are not kept by token",
            "they travel as keys and values of tokens",
        ),
        (WINDOWS in kinds and stages > 1, "--pp-size above 1 with sliding windows", "one rank sends them all"),
        (RECURRENT in kinds and stages > 1, "--pp-size above 1 with recurrent states", "one rank sends them all"),
        (kv_args.num_draft_entries > 0 and stages > 1, "--pp-size above 1 with a draft model", "one stage has its KV"),
    )


def _first(*conflicts: tuple[bool, str, str]) -> str | None:
    matching: Iterable[str] = (f"{what} {_PREFIX} ({why})" for is_so, what, why in conflicts if is_so)
    return next(iter(matching), None)
