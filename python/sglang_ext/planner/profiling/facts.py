"""Describes what an instance says about itself, and why it cannot be profiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath

from sglang_ext.planner.profiling.http_client import InstanceError
from sglang_ext.planner.profiling.points import PointLimits

Scalar = str | int | float | bool | None

# What changes the time of a prefill, as far as an instance reports it.
_ARGUMENTS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "attention_backend",
    "prefill_attention_backend",
    "sampling_backend",
    "tp_size",
    "pp_size",
    "dp_size",
    "ep_size",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_running_requests",
    "page_size",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "enable_torch_compile",
    "schedule_policy",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "speculative_algorithm",
    "load_format",
)
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_UNKNOWN_VOCABULARY = 1000  # no model of today has a smaller one


class InstanceMode(StrEnum):
    """Describes how an instance takes part in disaggregation."""

    PLAIN = "plain"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """One instance that can be profiled."""

    model: str
    architecture: str
    mode: InstanceMode
    sglang_version: str
    device: str
    bootstrap_port: int | None  # of a prefill instance
    limits: PointLimits
    vocabulary: int  # token ids below this one exist
    shape: Mapping[str, Scalar] | None  # of the model, where its folder can be read
    arguments: Mapping[str, Scalar]  # of the server, as far as they matter
    stages: int = 1  # of its pipeline

    def identity(self) -> dict[str, Scalar]:
        """Return what must be equal for two measurements to be of the same thing."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "sglang": self.sglang_version,
            **(self.shape or {}),
            **self.arguments,
        }


def read_facts(server_info: object, model_info: object, asked_model: str | None) -> InstanceFacts:
    """The facts in the answers of /server_info and /model_info.

    InstanceError for an instance that cannot be profiled, or that serves another model than `asked_model` (a folder,
    or a name of which the last part is compared).
    """
    if not isinstance(server_info, Mapping) or not isinstance(model_info, Mapping):
        raise InstanceError("this is no SGLang instance: /server_info and /model_info are not JSON objects")
    model = _text(model_info, "model_path")
    if asked_model is not None and not is_same_model(asked_model, model):
        raise InstanceError(f"--model {asked_model}: the instance serves {model}")
    if model_info.get("is_generation") is False:
        raise InstanceError(f"{model} does not generate text")
    if server_info.get("disable_radix_cache") is True:
        raise InstanceError("the instance has no prefix cache (--disable-radix-cache): cached tokens need one")
    if server_info.get("enable_metrics") is not True:
        raise InstanceError("the instance does not time its iterations: start it with --enable-metrics")
    if _whole(server_info, "dp_size", 1) > 1:
        raise InstanceError("the instance has several data-parallel ranks: profile one of them (--dp-size 1)")
    shape = read_shape(asked_model, model)
    vocabulary = (shape or {}).get("vocab_size")
    return InstanceFacts(
        model=model,
        architecture=str((model_info.get("architectures") or ["unknown"])[0]),
        mode=_mode(server_info),
        sglang_version=str(server_info.get("version", "unknown")),
        device=str(server_info.get("device", "unknown")),
        bootstrap_port=_bootstrap_port(server_info),
        limits=_limits(server_info),
        vocabulary=vocabulary if isinstance(vocabulary, int) else _UNKNOWN_VOCABULARY,
        shape=shape,
        arguments={name: _scalar(server_info[name]) for name in _ARGUMENTS if name in server_info},
        stages=max(1, _whole(server_info, "pp_size", 1)),
    )


def is_same_model(asked: str, served: str) -> bool:
    """Return whether two names or folders of models mean the same: the last part decides."""
    return PurePath(asked).name == PurePath(served).name


def read_shape(*folders: str | None) -> Mapping[str, Scalar] | None:
    """The model's shape from the first folder with a config.json; None where there is none."""
    for folder in folders:
        if folder is None:
            continue
        try:
            content = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            inner = content.get("text_config")
            config = inner if isinstance(inner, dict) else content
            return {name: _scalar(config[name]) for name in _SHAPE if name in config}
    return None


def _mode(server_info: Mapping[object, object]) -> InstanceMode:
    mode = server_info.get("disaggregation_mode", "null")
    if mode == "decode":
        raise InstanceError("this is a decode instance: give a prefill instance or one without disaggregation")
    return InstanceMode.PREFILL if mode == "prefill" else InstanceMode.PLAIN


def _bootstrap_port(server_info: Mapping[object, object]) -> int | None:
    port = server_info.get("disaggregation_bootstrap_port")
    return port if isinstance(port, int) else None


def _limits(server_info: Mapping[object, object]) -> PointLimits:
    kv_tokens = _whole(server_info, "max_total_num_tokens")
    longest = _whole(server_info, "max_req_input_len", kv_tokens)
    chunk_tokens = _whole(server_info, "chunked_prefill_size", -1)
    requests = _whole(server_info, "max_running_requests", 0)
    if requests < 1:
        states = server_info.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
        requests = max(1, _whole(state, "effective_max_running_requests_per_dp", 1))
    return PointLimits(
        chunk_tokens if chunk_tokens > 0 else None,
        min(longest - 1, kv_tokens - 1),  # one slot for the token that is generated
        kv_tokens,
        max(1, _whole(server_info, "page_size", 1)),
        max(1, requests // max(1, _whole(server_info, "pp_size", 1))),  # SGLang's --pp-max-micro-batch-size
    )


def _text(content: Mapping[object, object], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str) or not value:
        raise InstanceError(f"this is no SGLang instance that can be profiled: it does not report its {name}")
    return value


def _whole(content: Mapping[object, object], name: str, default: int | None = None) -> int:
    value = content.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if default is None:
        raise InstanceError(f"this is no SGLang instance that can be profiled: it does not report its {name}")
    return default


def _scalar(value: object) -> Scalar:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
