"""The `--cdsp-…` options and `cdsp.…` settings of `sglang-ext worker`, and what a long pool works with."""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sglang_ext.settings import Setting
from sglang_ext.shared_key import KeyFileError, read_key_file
from sglang_ext.types import Role

_DEFAULT_MIN_TOKENS = 2048
_DEFAULT_STEP_TIMEOUT_S = 30.0


class MeshKind(StrEnum):
    """The transports of keys and values between members."""

    AUTO = "auto"  # on a CPU links; on GPUs NCCL where it connects a group, on one GPU its memory, else links
    LINKS = "links"  # TCP; of GPUs through host memory
    NCCL = "nccl"  # and nothing else


@dataclass(frozen=True)
class CdspOptions:
    """A member of a long pool."""

    coordinator_host: str
    coordinator_port: int
    name: str  # of this instance, unique in the pool
    node: str
    min_tokens: int
    step_timeout_s: float
    host: str | None = (
        None  # at which other members reach this one; None: the address from which it reaches the coordinator
    )
    key_file: str | None = None
    max_chunk_tokens: int | None = None  # that this instance computes at once; None: SGLang's --max-prefill-tokens
    mesh: MeshKind = MeshKind.AUTO


SETTINGS = (
    Setting(
        "cdsp",
        "max_chunk_tokens",
        int,
        None,
        "maximum tokens of a chunk that this instance computes, by the memory that they need besides KV; it gets half "
        "as many where it has none for them (default: SGLang's --max-prefill-tokens)",
        dest="cdsp_max_chunk_tokens",
    ),
    Setting(
        "cdsp",
        "node",
        str,
        None,
        "machine or rack of this instance; groups keep within one as far as they can (default: the host's name)",
        dest="cdsp_node",
    ),
    Setting(
        "cdsp",
        "step_timeout_s",
        float,
        _DEFAULT_STEP_TIMEOUT_S,
        "longest time without data from another instance in a chunk; above the longest iteration",
        dest="cdsp_step_timeout_s",
    ),
    Setting(
        "cdsp",
        "mesh",
        str,
        MeshKind.AUTO.value,
        "what moves keys and values between members, the same in all of them: links (TCP) or, between GPUs, NCCL; "
        "auto: links on a CPU; NCCL where it connects the GPUs of a group, a GPU's own memory between members on it, "
        "else links",
        tuple(MeshKind),
        dest="cdsp_mesh",
    ),
)


def add_cdsp_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("CDSP: one long prefill on several instances")
    group.add_argument(
        "--cdsp-coordinator",
        metavar="HOST:PORT",
        default=None,
        help="coordinator of the long pool that this prefill instance belongs to (default: no pool)",
    )
    group.add_argument(
        "--cdsp-min-tokens",
        metavar="TOKENS",
        type=int,
        default=_DEFAULT_MIN_TOKENS,
        help="uncached tokens from which on a prefill may be shared",
    )
    group.add_argument(
        "--cdsp-key-file",
        metavar="FILE",
        type=Path,
        default=None,
        help="the pool's key, at least 16 bytes: the coordinator's --key-file (default: none)",
    )


def cdsp_options(arguments: argparse.Namespace, role: Role, name: str, host: str | None = None) -> CdspOptions | None:
    """Return the options, or None outside a long pool. Raises ValueError with one line that names the option."""
    address = arguments.cdsp_coordinator
    if address is None:
        return None
    if not role.is_prefill:
        raise ValueError("--cdsp-coordinator: decode instances compute no prefills")
    coordinator_host, _, port = address.rpartition(":")
    if not coordinator_host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--cdsp-coordinator: {address!r} is not of the form HOST:PORT")
    if arguments.cdsp_min_tokens < 1:
        raise ValueError(f"--cdsp-min-tokens must be at least 1, got {arguments.cdsp_min_tokens}")
    if arguments.cdsp_max_chunk_tokens is not None and arguments.cdsp_max_chunk_tokens < 1:
        raise ValueError(f"cdsp.max_chunk_tokens must be at least 1, got {arguments.cdsp_max_chunk_tokens}")
    if not 0.1 <= arguments.cdsp_step_timeout_s < float("inf"):
        raise ValueError(f"cdsp.step_timeout_s must be at least 0.1, got {arguments.cdsp_step_timeout_s}")
    key_file: Path | None = arguments.cdsp_key_file
    try:
        read_key_file(key_file)
    except KeyFileError as error:
        raise ValueError(f"--cdsp-key-file {error}") from None
    return CdspOptions(
        coordinator_host.strip("[]"),
        int(port),
        name,
        arguments.cdsp_node or socket.gethostname(),
        arguments.cdsp_min_tokens,
        arguments.cdsp_step_timeout_s,
        host,
        None if key_file is None else str(key_file.absolute()),
        arguments.cdsp_max_chunk_tokens,
        MeshKind(arguments.cdsp_mesh),
    )


# Decoders whose layers attend to everything before a token or to a window of it, with keys and values per head or with
# latent rows.
_ON_GPUS = frozenset(
    {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MistralForCausalLM"}
)
SUPPORTED_ARCHITECTURES = frozenset(
    {
        *_ON_GPUS,
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        *("ApertusForCausalLM", "ArceeForCausalLM", "CohereForCausalLM", "GemmaForCausalLM", "Glm4MoeForCausalLM"),
        *("Ministral3ForCausalLM", "MixtralForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM"),
        *("Phi3ForCausalLM", "PhiForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM"),
        *("Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        *("GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM", "Olmo3ForCausalLM"),
        *("GptOssForCausalLM", "LagunaForCausalLM", "MellumForCausalLM"),
    }
)
_NOT_COMPARED = "not compared with one instance; docs/reference/compatibility.md has the models that are"
_SPARSE = "its attention chooses the tokens that it sees (DSA)"
_STATE = "a state goes from member to member in order: four would be at most 1.8 to 2.1 times as fast, on CPUs"
_WHY_REFUSED = {
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    **dict.fromkeys(
        (
            *("MambaForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM", "FalconH1ForCausalLM"),
            *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "KimiLinearForCausalLM"),
            *("GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        ),
        _STATE,
    ),
}


_KV_DTYPES = {"auto", "bf16", "bfloat16"}
_CPU_KV_DTYPES = {"fp8_e4m3"}


def conflict(server_args: Any) -> str | None:
    """Return why these SGLang arguments and `--cdsp-coordinator` exclude each other; None when they do not."""
    for is_conflicting, argument, reason in (
        (server_args.pp_size > 1, "--pp-size", "a member has all layers"),
        (server_args.dp_size > 1, "--dp-size", "a member has one scheduler"),
        (server_args.disable_radix_cache, "--disable-radix-cache", "what others have computed is found in it"),
        (
            server_args.enable_hierarchical_cache,
            "--enable-hierarchical-cache",
            "members keep rows in the cache's memory",
        ),
        (server_args.speculative_algorithm is not None, "--speculative-algorithm", "the draft model has KV of its own"),
        (
            server_args.kv_cache_dtype not in _KV_DTYPES | (_CPU_KV_DTYPES if server_args.device == "cpu" else set()),
            "--kv-cache-dtype",
            "a ring's kernels read KV of the model's type; FP8 is compared with one instance on CPUs only",
        ),
        (
            server_args.device != "cpu" and not server_args.disable_overlap_schedule,
            "the overlap schedule",
            "a chunk would not come behind the batch before it; give --disable-overlap-schedule",
        ),
    ):
        if is_conflicting:
            return f"{argument} does not go with --cdsp-coordinator ({reason})"
    return None


def architecture_conflict(name: str | None, *, on_gpu: bool) -> str | None:
    """Return why a model of this architecture cannot be computed by several instances; None when it can."""
    if name in (_ON_GPUS if on_gpu else SUPPORTED_ARCHITECTURES):
        return None
    if name in SUPPORTED_ARCHITECTURES:
        return f"{name} does not go with --cdsp-coordinator on a GPU (compared with one instance on CPUs only)"
    why = _WHY_REFUSED.get(name or "", _NOT_COMPARED)
    return f"{name or 'a model without a name'} does not go with --cdsp-coordinator ({why})"


def model_conflict(model_config: Any, *, on_gpu: bool) -> str | None:
    """Return why a model cannot be computed by several instances, from SGLang's ModelConfig; None when it can."""
    architectures = getattr(model_config.hf_config, "architectures", None)
    name = architectures[0] if architectures else None
    if on_gpu and getattr(model_config, "sliding_window_size", None):
        return f"{name} with a sliding window does not go with --cdsp-coordinator (it attends to a part of its KV)"
    return architecture_conflict(name, on_gpu=on_gpu)
