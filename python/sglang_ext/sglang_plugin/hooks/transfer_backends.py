"""KV transfer backends: adds TCP and the handshake, and lets mooncake and nixl run without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

from sglang.srt.disaggregation.utils import KVClassType
from sglang.srt.disaggregation.utils import TransferBackend as _StockTransferBackend

from sglang_ext.sglang_plugin.device import Device
from sglang_ext.sglang_plugin.hooks import nixl_host_memory
from sglang_ext.sglang_plugin.options import options_from_environment
from sglang_ext.sglang_plugin.transfer_backend import HANDSHAKE, STAND_IN, TCP

# SGLang compares members with `==` against its module global, which is replaced everywhere, so a second
# enumeration with the same names serves as the first.
ExtendedTransferBackend = Enum(  # type: ignore[misc]  # members are those of the installed SGLang
    "TransferBackend",
    {
        **{member.name: member.value for member in _StockTransferBackend},
        "SGLANG_EXT_TCP": TCP,
        "SGLANG_EXT_HANDSHAKE": HANDSHAKE,
        "SGLANG_EXT_STAND_IN": STAND_IN,
    },
    module="sglang_ext.sglang_plugin.hooks.transfer_backends",
)


def get_kv_class(stock: Callable[..., type | None], transfer_backend: Any, class_type: KVClassType) -> type | None:
    """AROUND `get_kv_class(transfer_backend, class_type)`."""
    if transfer_backend.value == TCP:
        from sglang_ext.sglang_plugin import tcp_transfer

        return tcp_transfer.CLASSES[class_type]
    if transfer_backend.value == HANDSHAKE:
        from sglang_ext.sglang_plugin.handshake import classes

        return classes.CLASSES[class_type]
    if _on_cpu() and transfer_backend.value == "nixl" and class_type is KVClassType.MANAGER:
        nixl_host_memory.use_host_memory()
    found: type | None
    if transfer_backend.value == STAND_IN:
        from sglang_ext.sglang_plugin import stand_in_transfer

        found = stand_in_transfer.CLASSES[class_type]
    else:
        found = stock(transfer_backend, class_type)
    if not _on_cpu() or found is None or class_type is not KVClassType.SENDER:
        return found
    return _without_pinned_memory(found)


@cache
def _on_cpu() -> bool:
    options = options_from_environment(os.environ)
    return options is not None and options.device is Device.CPU


@cache
def _without_pinned_memory(sender: type) -> type:
    """The sender, with KV indices as plain arrays: SGLang would put them into pinned memory behind a CUDA event."""
    return type(sender.__name__, (sender,), {"supports_host_tensor_indices": False, "__module__": sender.__module__})
