"""Describes what of NCCL connects GPUs in pairs, by its C interface: communicators that never block the host.

PyTorch's process groups meet through a store, end the process at a timeout, and cannot be given up while they connect.
Here everything that takes time is asked for, and then looked at (`is_ready`): so a step can be given up at any moment.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Protocol

UNIQUE_ID_BYTES = 128

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_UNDEFINED_INT = -(2**31)
_CONFIG_MAGIC = 0xCAFEBEEF
# Of the fields below: newer libraries take the older, shorter record.
_CONFIG_VERSION = 21800
_FIRST_VERSION = 21800
# Overrides where the library is, as in SGLang.
_PATH_VARIABLE = "SGLANG_NCCL_SO_PATH"


class NcclError(RuntimeError):
    """NCCL has failed, or is not there; the text is one line."""


class Nccl(Protocol):
    """A communicator is a number. Of a communicator all calls but `abort` come from one thread."""

    def unique_id(self) -> bytes:
        """Return the id by which ranks find each other, `UNIQUE_ID_BYTES` long. Raises NcclError."""

    def begin_connect(self, unique_id: bytes, rank: int, size: int) -> int:
        """A communicator that is not ready yet; all ranks do this. Raises NcclError."""

    def is_ready(self, communicator: int) -> bool:
        """Return whether all its calls are on its streams. Raises NcclError where it has failed."""

    def begin_group(self) -> None:
        """Calls of communicators from now on are one call. Raises NcclError."""

    def end_group(self) -> None:
        """The call begins; see `is_ready`. Raises NcclError."""

    def send(self, communicator: int, address: int, size_bytes: int, peer: int, stream: int) -> None:
        """Raises NcclError."""

    def receive(self, communicator: int, address: int, size_bytes: int, peer: int, stream: int) -> None:
        """Raises NcclError."""

    def abort(self, communicator: int) -> None:
        """End it and all its calls, independent of other ranks; also while it connects. Its number is used up."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """`ncclConfig_t` as of 2.18."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config))
    ],
    "ncclCommGetAsyncError": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)],
    "ncclCommAbort": [ctypes.c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    ],
    "ncclRecv": [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    ],
}


class NcclLibrary:
    """The library that PyTorch has loaded. Raises NcclError where there is none, or it is too old."""

    def __init__(self, path: str | None = None) -> None:
        try:
            self._library = ctypes.CDLL(path or os.environ.get(_PATH_VARIABLE) or "libnccl.so.2")
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
            self._library.ncclGetErrorString.argtypes = [ctypes.c_int]
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise NcclError(f"NCCL cannot be used: {str(error).partition(chr(10))[0]}") from None
        version = ctypes.c_int(0)
        self._call("ncclGetVersion", ctypes.byref(version))
        if version.value < _FIRST_VERSION:
            raise NcclError(f"NCCL {version.value} is too old: {_FIRST_VERSION} is wanted")

    def unique_id(self) -> bytes:
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def begin_connect(self, unique_id: bytes, rank: int, size: int) -> int:
        config = _Config(
            ctypes.sizeof(_Config),
            *(_CONFIG_MAGIC, _CONFIG_VERSION, 0),
            *(_UNDEFINED_INT, _UNDEFINED_INT, _UNDEFINED_INT, None, _UNDEFINED_INT),
        )
        communicator = ctypes.c_void_p()
        whole = _UniqueId.from_buffer_copy(unique_id)
        self._begin("ncclCommInitRankConfig", ctypes.byref(communicator), size, whole, rank, ctypes.byref(config))
        if communicator.value is None:
            raise NcclError("ncclCommInitRankConfig has made no communicator")
        return communicator.value

    def is_ready(self, communicator: int) -> bool:
        state = ctypes.c_int(_SUCCESS)
        self._call("ncclCommGetAsyncError", communicator, ctypes.byref(state))
        if state.value not in (_SUCCESS, _IN_PROGRESS):
            raise NcclError(self._reason(state.value))
        return state.value == _SUCCESS

    def begin_group(self) -> None:
        self._call("ncclGroupStart")

    def end_group(self) -> None:
        self._begin("ncclGroupEnd")

    def send(self, communicator: int, address: int, size_bytes: int, peer: int, stream: int) -> None:
        self._begin("ncclSend", address, size_bytes, _UINT8, peer, communicator, stream)

    def receive(self, communicator: int, address: int, size_bytes: int, peer: int, stream: int) -> None:
        self._begin("ncclRecv", address, size_bytes, _UINT8, peer, communicator, stream)

    def abort(self, communicator: int) -> None:
        self._library.ncclCommAbort(communicator)

    def _begin(self, name: str, *arguments: Any) -> None:
        """It is done, or under way."""
        status = getattr(self._library, name)(*arguments)
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise NcclError(f"{name}: {self._reason(status)}")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            raise NcclError(f"{name}: {self._reason(status)}")

    def _reason(self, status: int) -> str:
        text: bytes | None = self._library.ncclGetErrorString(status)
        return "NCCL's error " + str(status) if text is None else text.decode(errors="replace")
