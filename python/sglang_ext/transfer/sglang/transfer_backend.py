"""KV transfer backends that a worker can choose, what each needs to be installed, and what it does not divide."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sglang_ext.engine.device import Device

TCP = "sglang_ext_tcp"
HANDSHAKE = "handshake"
STAND_IN = "sglang_ext_stand_in"  # only of benchmarks, which start engines themselves
OWN_BACKENDS = (TCP, HANDSHAKE, STAND_IN)  # that SGLang does not know
# Kinds of state in addition to the KV of full attention, by SGLang's names (`StateType` of 0.5.23): the KV of layers
# with a sliding window, in a pool of its own, and recurrent states, one slot for each request.
WINDOWS, RECURRENT = "swa", "mamba"
# The kinds that are not named here are cut by heads, or whole on every rank.
_NEVER_CUT = frozenset({"minimax_index_k", "minimax_dense_kv"})
_CUT_FOR_LATENT_ATTENTION = frozenset({"block_scale", "block_scale_swa", "swa_ring", "c128_state", "request_row"})
_CUTS_WINDOWS = frozenset({"mooncake", TCP, HANDSHAKE})  # backends that divide the heads of sliding windows


@dataclass(frozen=True)
class TransferBackendFacts:
    """The conditions for a backend to work."""

    name: str
    module: str | None  # imported by SGLang, None where nothing beyond SGLang is needed
    packages: Mapping[Device, str]  # what to install for it
    devices: frozenset[Device]


BACKENDS = {
    facts.name: facts
    for facts in (
        TransferBackendFacts(TCP, None, {}, frozenset({Device.CPU})),
        TransferBackendFacts(HANDSHAKE, None, {}, frozenset(Device)),
        TransferBackendFacts(
            "mooncake",
            "mooncake.engine",
            {
                Device.CPU: "mooncake-transfer-engine-non-cuda, and the system library libibverbs1",
                Device.CUDA: "mooncake-transfer-engine, and the system library libibverbs1",
            },
            frozenset(Device),
        ),
        TransferBackendFacts(
            "nixl", "nixl._api", {Device.CPU: "nixl nixl-cu12", Device.CUDA: "nixl"}, frozenset(Device)
        ),
    )
}


def default_backend(device: Device) -> str:
    """TCP where there is no GPU; where there is one mooncake (as in SGLang), or NIXL if only that is installed."""
    if device is Device.CPU:
        return TCP
    has_nixl_alone = find_spec("mooncake") is None and find_spec("nixl") is not None
    return "nixl" if has_nixl_alone else "mooncake"


def unavailability(name: str, device: Device) -> str | None:
    """One line that says why `name` cannot be used here and how to get it, or None when it can."""
    facts = BACKENDS[name]
    if device not in facts.devices:
        return f"transfer backend {name} moves host memory only; choose another one on a {device} machine"
    if facts.module is None:
        return None
    package = facts.packages[device]
    problem = import_problem(facts.module)
    if problem is not None:
        return f"transfer backend {name} cannot be imported ({problem}); it needs: pip install {package}"
    return None


def import_problem(module: str) -> str | None:
    """Return why `module` cannot be imported, in one line; None when it can."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error).splitlines()[0]
    return None


def states_of_equal_ranks(scheduler: Any) -> list[str]:
    """Return the kinds of state that a scheduler's transfer backend sends only between ranks of equal number.

    SGLang raises an error at the first request of another pair; the router refuses it by what both instances report.
    """
    prefill = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    queue = prefill or getattr(scheduler, "disagg_decode_prealloc_queue", None)
    manager = getattr(queue, "kv_manager", None)
    if manager is None:
        return []
    backend = scheduler.server_args.disaggregation_transfer_backend
    # SGLang's own backends divide every recurrent state.
    refused = _NEVER_CUT | ({RECURRENT} if backend == HANDSHAKE and not manager.divides_states else set())
    if not (manager.is_mla_backend or manager.is_hybrid_mla_backend):
        refused |= _CUT_FOR_LATENT_ATTENTION | (set() if backend in _CUTS_WINDOWS else {WINDOWS})
    return sorted(refused.intersection(kind.value for kind in manager.kv_args.state_types or ()))
