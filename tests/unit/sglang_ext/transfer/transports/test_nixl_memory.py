"""Which kind of memory the NIXL transport names, with a stand-in for its agent: a GPU's, and the host's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy
from sglang_ext.transfer.transports.nixl import NixlTransport
from sglang_ext.transfer.transports.registry import create_transport
from sglang_ext.transfer.transports.transport import GpuBuffers

SLOTS = np.array([3, 7], np.uint32)
KV, AUX = ItemBuffer(0x10000, 64, 100), ItemBuffer(0x90000, 16, 8)


class Agent:
    """Records what it is told; every write is done at once."""

    def __init__(self, name: str, config: Any) -> None:
        self.registered: list[tuple[str, list[tuple[int, int, int, str]]]] = []
        self.written: list[tuple[str, list[list[int]], list[list[int]]]] = []

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> object:
        self.registered.append((kind, regions))
        return object()

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        assert metadata == b"metadata"
        return b"peer"

    def remove_remote_agent(self, name: str) -> None:
        assert name == "peer"

    def get_xfer_descs(self, described: Any, kind: str) -> tuple[str, list[list[int]]]:
        return kind, described.tolist()

    def initialize_xfer(self, what: str, sources: Any, targets: Any, peer: str) -> str:
        assert (what, peer, sources[0]) == ("WRITE", "peer", targets[0])
        self.written.append((sources[0], sources[1], targets[1]))
        return "handle"

    def transfer(self, handle: str) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: str) -> None:
        pass


@pytest.fixture(autouse=True)
def _nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    api.nixl_agent, api.nixl_agent_config = Agent, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)


def copy(source: ItemBuffer, target: int) -> RowCopy:
    return RowCopy(source.address, source.item_bytes, SLOTS, target, source.item_bytes, SLOTS, source.item_bytes)


def test_kv_of_a_gpu_and_metadata_of_the_host() -> None:
    sender = NixlTransport(device_memory=GpuBuffers(2, (KV,)))
    receiver = NixlTransport(device_memory=GpuBuffers(5, (ItemBuffer(0x50000, 64, 100),)))
    sender.register([KV, AUX])
    agent = sender._agent
    assert agent.registered == [("VRAM", [(0x10000, 6400, 2, "")]), ("DRAM", [(0x90000, 128, 0, "")])]
    assert sender.write(receiver.address, 1, [copy(AUX, 0x70000), copy(KV, 0x50000)]) == 2 * 64 + 2 * 16
    assert agent.written == [
        ("VRAM", [[0x10000 + slot * 64, 64, 2] for slot in (3, 7)], [[0x50000 + slot * 64, 64, 5] for slot in (3, 7)]),
        ("DRAM", [[0x90000 + slot * 16, 16, 0] for slot in (3, 7)], [[0x70000 + slot * 16, 16, 0] for slot in (3, 7)]),
    ]


def test_without_a_gpu_all_of_it_is_the_host_s() -> None:
    transport = NixlTransport()
    transport.register([KV, AUX])
    assert [kind for kind, _ in transport._agent.registered] == ["DRAM"]
    transport.write(transport.address, 1, [copy(KV, 0x50000)])
    assert [kind for kind, _, _ in transport._agent.written] == ["DRAM"]


@pytest.mark.parametrize("name", ["tcp", "shared_memory"])
def test_no_other_transport_is_given_memory_of_a_gpu(name: str) -> None:
    with pytest.raises(ValueError, match=f"transport {name} moves host memory only"):
        create_transport(name, "127.0.0.1", GpuBuffers(0, (KV,)))
