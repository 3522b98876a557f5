"""An agent that treats device memory as host memory."""

from __future__ import annotations

from sglang_ext.sglang_plugin.hooks.nixl_host_memory import host_memory_agent


class Agent:
    def register_memory(self, addresses: list[int], mem_type: str = "", backends: tuple[str, ...] = ()) -> object:
        return addresses, mem_type, backends

    def get_xfer_descs(self, addresses: list[int], mem_type: str) -> object:
        # The real one calls a method that is translated, too.
        return self.register_memory(addresses, mem_type)

    def get_notifs(self, kind: str) -> str:
        return kind


def test_device_memory_becomes_host_memory_in_every_position() -> None:
    agent = host_memory_agent(Agent)()
    assert agent.register_memory([1], "VRAM", backends=("UCX",)) == ([1], "DRAM", ("UCX",))
    assert agent.register_memory([1], mem_type="VRAM") == ([1], "DRAM", ())
    assert agent.get_xfer_descs([2], "VRAM") == ([2], "DRAM", ())


def test_everything_else_is_unchanged() -> None:
    agent = host_memory_agent(Agent)()
    assert agent.register_memory([1], "DRAM") == ([1], "DRAM", ())
    assert agent.get_notifs("VRAM") == "VRAM"
    assert isinstance(agent, Agent)


def test_translating_twice_is_translating_once() -> None:
    assert host_memory_agent(host_memory_agent(Agent)) is host_memory_agent(Agent)
