"""This project's own options of an engine, carried to every process of that engine.

SGLang spawns its scheduler and detokenizer and pickles its own ServerArgs for them. Our options travel along with
that, in one environment variable, so that they reach each process before SGLang is imported there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang_ext.engine.device import Device
from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions
from sglang_ext.laps.decide.options import Batching, LapsOptions
from sglang_ext.laps.decide.round_plan import LapsMode
from sglang_ext.long_pool.sglang.cdsp_options import CdspOptions, MeshKind
from sglang_ext.transfer.sglang.transfer_options import TransferOptions
from sglang_ext.types import Role

ENVIRONMENT_VARIABLE = "SGLANG_EXT_OPTIONS"


class InvalidOptionsError(ValueError):
    """The environment variable holds something else than the options of this version."""


@dataclass(frozen=True)
class KvEventsOptions:
    """Address at which an instance publishes the KV events of its prefix cache, and its load.

    Port 0 is a free one where it is asked for, and for the load of an engine that runs none at all.
    """

    host: str
    port: int = 0
    replay_port: int = 0
    load_port: int = 0
    has_blocks: bool = True  # else only the load


@dataclass(frozen=True)
class ExtensionOptions:
    """Set by `sglang-ext worker`; absent in a stock SGLang process, where the plugin then does nothing."""

    role: Role
    device: Device
    laps: LapsOptions | None = None  # None: SGLang's own scheduler
    cdsp: CdspOptions | None = None  # None: no other instance shares its prefills
    transfer: TransferOptions | None = None  # None: another KV transfer backend than the handshake
    graphs: GraphOptions | None = None  # None: prefills are not captured by length and batch size
    revision: str = ""  # KV cache passes only between instances of one revision
    stages: int = 1  # of a pipeline; each has a part of the layers
    kv_events: KvEventsOptions | None = None  # None: only what SGLang's own argument says
    data_parallel_ranks: int = 1  # with a scheduler each

    @property
    def streams_layers(self) -> bool:
        """Return whether this is a prefill instance whose KV leaves for decode by layer, or with its batch."""
        if not self.role.is_prefill or self.transfer is None:
            return False
        return self.transfer.stream_layer_bytes is not None or self.stages > 1

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT_VARIABLE: json.dumps(asdict(self), sort_keys=True)}


def options_from_environment(environment: Mapping[str, str]) -> ExtensionOptions | None:
    """The options of this process, or None in a stock SGLang process.

    Raises InvalidOptionsError when the variable is set but cannot be read.
    """
    text = environment.get(ENVIRONMENT_VARIABLE)
    if not text:
        return None
    try:
        fields = json.loads(text)
        cdsp, transfer = fields["cdsp"], fields["transfer"]
        return ExtensionOptions(
            Role(fields["role"]),
            Device(fields["device"]),
            _laps_options(fields["laps"]),
            None if cdsp is None else CdspOptions(**{**cdsp, "mesh": MeshKind(cdsp["mesh"])}),
            None if transfer is None else TransferOptions(**transfer),
            _graph_options(fields["graphs"]),
            str(fields["revision"]),
            int(fields["stages"]),
            None if fields["kv_events"] is None else KvEventsOptions(**fields["kv_events"]),
            int(fields["data_parallel_ranks"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidOptionsError(f"{ENVIRONMENT_VARIABLE} cannot be read: {error}") from error


def _graph_options(fields: dict[str, Any] | None) -> GraphOptions | None:
    if fields is None:
        return None
    return GraphOptions(
        Capture(fields["capture"]),
        tuple(fields["lengths_tokens"]),
        tuple(fields["batch_sizes"]),
        fields["memory_gb"],
    )


def _laps_options(fields: dict[str, Any] | None) -> LapsOptions | None:
    if fields is None:
        return None
    kinds = {"mode": LapsMode, "batching": Batching}
    return LapsOptions(**{**fields, **{name: kind(fields[name]) for name, kind in kinds.items()}})
