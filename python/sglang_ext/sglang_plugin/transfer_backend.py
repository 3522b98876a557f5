"""KV transfer backends that a worker can choose, and what each needs to be installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from sglang_ext.sglang_plugin.device import Device

TCP = "sglang_ext_tcp"


@dataclass(frozen=True)
class TransferBackendFacts:
    """What must hold for a backend to work."""

    name: str
    module: str | None  # imported by SGLang, None where nothing beyond SGLang is needed
    package: str | None  # what to install for it
    devices: frozenset[Device]


EVERY_DEVICE = frozenset(Device)
BACKENDS = {
    facts.name: facts
    for facts in (
        TransferBackendFacts(TCP, None, None, frozenset({Device.CPU})),
        TransferBackendFacts("mooncake", "mooncake.engine", "mooncake-transfer-engine", EVERY_DEVICE),
        TransferBackendFacts("nixl", "nixl._api", "nixl", EVERY_DEVICE),
    )
}


def default_backend(device: Device) -> str:
    """TCP where there is no GPU, mooncake (as in SGLang) where there is one."""
    return TCP if device is Device.CPU else "mooncake"


def why_unavailable(name: str, device: Device) -> str | None:
    """One line that says why `name` cannot be used here and how to get it, or None when it can."""
    facts = BACKENDS[name]
    if device not in facts.devices:
        return f"transfer backend {name} moves host memory only; choose mooncake or nixl on a {device} machine"
    if facts.module is not None and not _importable(facts.module):
        return (
            f"transfer backend {name} needs the Python package {facts.package}, which is not installed "
            f"(pip install {facts.package})"
        )
    return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
