"""What moves the bytes of a granted chunk: one small interface, and which implementations this machine has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy


class GpuBuffers(NamedTuple):
    """Which of the buffers are no host memory."""

    device: int  # its number in this process
    buffers: tuple[ItemBuffer, ...]
    network_devices: str = ""  # that move its memory, as SGLang's --disaggregation-ib-device names them; "": all


class Transport(Protocol):
    """One per process; thread-safe. A sender calls `write`, a receiver the methods about permits."""

    name: str
    address: str  # where senders write to; they get it with the receiver's layout, after `register`
    can_fence: bool  # whether `revoke` keeps its promise

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        """Let `write` read these and, under a permit, peers write to them. The caller keeps them alive."""

    def allow(self, permit: int) -> None:
        """Peers may write under this permit from now on."""

    def revoke(self, permit: int) -> None:
        """Return when no write under this permit is under way or will be, where `can_fence`; else do nothing."""

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        """Copy rows to the peer; returns the number of bytes when it has stored them all.

        Raises TransferError otherwise; some rows may then have been written.
        """

    def close(self) -> None:
        """Stop serving and writing. Safe to call again."""


TRANSPORTS = ("tcp", "shared_memory", "nixl", "mooncake")  # what `create_transport` makes
DEVICE_TRANSPORTS = ("nixl", "mooncake")  # that move memory of GPUs
_WITHOUT_ADAPTER = ("nccl",)


def why_unavailable(name: str) -> str | None:
    """One line that says why a transport cannot be used here, or None when it can."""
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        return "handshake transport nixl needs NIXL (pip install 'sglang-ext[nixl]')"
    if name == "mooncake":
        if importlib.util.find_spec("mooncake") is None:
            return (
                "handshake transport mooncake needs Mooncake (pip install mooncake-transfer-engine; without a GPU "
                "mooncake-transfer-engine-non-cuda)"
            )
        problem = _mooncake_problem()
        return problem and f"handshake transport mooncake cannot load Mooncake ({problem}); see docs/kv-transfer.md"
    if name in TRANSPORTS:
        return None
    choice = f"choose one of {', '.join(TRANSPORTS)}"
    if name in _WITHOUT_ADAPTER:
        return f"handshake transport {name} has no adapter in this version; {choice}"
    return f"there is no handshake transport {name!r}; {choice}"


@cache
def _mooncake_problem() -> str | None:
    """Asked of another process: the library starts threads as it is loaded, and this process may fork."""
    command = [sys.executable, "-c", "import sys; sys.path[:] = sys.argv[1:]; import mooncake.engine", *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.strip().rpartition("\n")[2]
    return None if done.returncode == 0 else last.removeprefix("ImportError: ") or f"it ends with {done.returncode}"


def create_transport(name: str, host: str, device_memory: GpuBuffers | None = None) -> Transport:
    """One of TRANSPORTS, listening on `host`. Raises ValueError, in one line, for another name, or one that does not
    move `device_memory`."""
    problem = why_unavailable(name)
    if problem is not None:
        raise ValueError(problem)
    if device_memory is not None and name not in DEVICE_TRANSPORTS:
        choice = " or ".join(DEVICE_TRANSPORTS)
        raise ValueError(f"handshake transport {name} moves host memory only; choose {choice} on a GPU")
    if name == "tcp":
        from sglang_ext.transfer.transports.tcp_transport import TcpTransport

        return TcpTransport(host)
    if name == "nixl":
        from sglang_ext.transfer.transports.nixl_transport import NixlTransport

        return NixlTransport(device_memory=device_memory)
    if name == "mooncake":
        from sglang_ext.transfer.transports.mooncake_transport import MooncakeDeviceTransport, MooncakeTransport

        return MooncakeTransport(host) if device_memory is None else MooncakeDeviceTransport(host, device_memory)
    from sglang_ext.transfer.transports.shared_memory_transport import SharedMemoryTransport

    return SharedMemoryTransport()
