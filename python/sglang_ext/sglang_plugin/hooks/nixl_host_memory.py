"""NIXL on a machine without a GPU: SGLang registers its KV cache as device memory, but it is host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

DEVICE_MEMORY, HOST_MEMORY = "VRAM", "DRAM"
# Methods of nixl_agent that name a kind of memory in their arguments.
METHODS = ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist")


def use_host_memory() -> None:
    """Make every NIXL agent of this process treat device memory as host memory. Safe to call again."""
    import nixl._api

    nixl._api.nixl_agent = host_memory_agent(nixl._api.nixl_agent)


@cache
def host_memory_agent(agent: type) -> type:
    """A subclass of `agent` that translates the kind of memory; an already translated class as it is."""
    if getattr(agent, "translates_memory_kind", False):
        return agent
    overrides = {name: _translated(getattr(agent, name)) for name in METHODS if hasattr(agent, name)}
    return type(agent.__name__, (agent,), {**overrides, "translates_memory_kind": True})


def _translated(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return stock(*map(host_kind, args), **{key: host_kind(value) for key, value in kwargs.items()})

    return method


def host_kind(argument: Any) -> Any:
    """`DRAM` for `VRAM`, anything else unchanged."""
    return HOST_MEMORY if isinstance(argument, str) and argument == DEVICE_MEMORY else argument
