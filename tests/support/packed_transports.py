"""Transports that pack short rows, over memory of the host: what GPUs do with theirs."""

from __future__ import annotations

import torch

from sglang_ext.transfer.transports.nixl import NixlTransport
from sglang_ext.transfer.transports.packed import PackedTransport
from sglang_ext.transfer.transports.registry import create_transport
from sglang_ext.transfer.transports.transport import Transport
from support.one_sided import OneSidedTransport

# So small that a chunk needs several halves.
BLOCK_BYTES = 1000


def make_transport(name: str) -> Transport:
    """Return the transport of this name, or `packed` (within this process) or `packed_nixl`."""
    if name == "packed":
        direct: Transport = OneSidedTransport()
        return PackedTransport(
            direct, lambda _: OneSidedTransport(), "127.0.0.1", torch.device("cpu"), None, block_bytes=BLOCK_BYTES
        )
    if name == "packed_nixl":
        return PackedTransport(
            NixlTransport(), lambda _: NixlTransport(), "127.0.0.1", torch.device("cpu"), None, block_bytes=BLOCK_BYTES
        )
    return create_transport(name, "127.0.0.1")
