"""The transports by name: whether this machine can use one, and how to make it.

A transport's module is imported when the transport is made, as NIXL and Mooncake are optional.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache

from sglang_ext.transfer.transports.transport import GpuBuffers, Transport

TRANSPORTS = ("tcp", "shared_memory", "nixl", "mooncake")
DEVICE_TRANSPORTS = ("nixl", "mooncake")  # the transports that move memory of GPUs


def unavailable_reason(name: str) -> str | None:
    """Return one line that says why a transport cannot be used here, or None when it can."""
    if name not in TRANSPORTS:
        return f"there is no handshake transport {name!r}; choose one of {', '.join(TRANSPORTS)}"
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        return "handshake transport nixl needs NIXL (pip install 'sglang-ext[nixl]')"
    if name == "mooncake":
        if importlib.util.find_spec("mooncake") is None:
            return (
                "handshake transport mooncake needs Mooncake (pip install mooncake-transfer-engine; without a GPU "
                "mooncake-transfer-engine-non-cuda)"
            )
        problem = _mooncake_problem()
        return (
            problem
            and f"handshake transport mooncake cannot load Mooncake ({problem}); see docs/explanation/transfer.md"
        )
    return None


@cache
def _mooncake_problem() -> str | None:
    """Try the import in another process: the library starts threads as it is loaded, and this process may fork."""
    command = [sys.executable, "-c", "import sys; sys.path[:] = sys.argv[1:]; import mooncake.engine", *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.strip().rpartition("\n")[2]
    return None if done.returncode == 0 else last.removeprefix("ImportError: ") or f"it ends with {done.returncode}"


def create_transport(name: str, host: str, device_memory: GpuBuffers | None = None) -> Transport:
    """Make the transport `name`, one of TRANSPORTS, which listens on `host`.

    Raises ValueError, in one line, for an unknown or unavailable transport, and for a transport that does not move
    `device_memory`.
    """
    problem = unavailable_reason(name)
    if problem is not None:
        raise ValueError(problem)
    if device_memory is not None and name not in DEVICE_TRANSPORTS:
        choice = " or ".join(DEVICE_TRANSPORTS)
        raise ValueError(f"handshake transport {name} moves host memory only; choose {choice} on a GPU")
    if name == "tcp":
        from sglang_ext.transfer.transports.tcp import TcpTransport

        return TcpTransport(host)
    if name == "nixl":
        from sglang_ext.transfer.transports.nixl import NixlTransport

        return NixlTransport() if device_memory is None else _packed_nixl(host, device_memory)
    if name == "mooncake":
        from sglang_ext.transfer.transports.mooncake import MooncakeDeviceTransport, MooncakeTransport

        return MooncakeTransport(host) if device_memory is None else MooncakeDeviceTransport(host, device_memory)
    from sglang_ext.transfer.transports.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport()


def _packed_nixl(host: str, device_memory: GpuBuffers) -> Transport:
    """NIXL with short rows packed: it writes them one by one."""
    import torch

    from sglang_ext.transfer.transports.nixl import NixlTransport
    from sglang_ext.transfer.transports.packed import PackedTransport

    return PackedTransport(
        NixlTransport(device_memory=device_memory),
        lambda staging: NixlTransport(device_memory=device_memory._replace(buffers=(staging,))),
        host,
        torch.device("cuda", device_memory.device),
        device_memory.buffers,
    )
