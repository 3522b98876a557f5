"""`--laps-graphs` and the `graphs.…` settings of `sglang-ext worker`, and which engines can capture their prefills.

The option may also stand among the engine's own arguments (after `--`), where a cluster file puts it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sglang_ext.engine.device import Device
from sglang_ext.engine.engine_arguments import split_options
from sglang_ext.settings import UNSET, Setting
from sglang_ext.types import LengthClass, Role
from sglang_ext_cuda_graphs.capture_plan import DEFAULT_BATCH_SIZES, DEFAULT_LENGTHS_TOKENS


class Capture(StrEnum):
    """Describes when graphs are captured."""

    OFF = "off"
    LAZY = "lazy"
    START = "start"


AUTO = "auto"


@dataclass(frozen=True)
class GraphOptions:
    """The grid of an instance. Absent where there is none."""

    capture: Capture
    lengths_tokens: tuple[int, ...] = DEFAULT_LENGTHS_TOKENS
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    memory_gb: float | None = None  # None: half of what is free


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; defaults are absent from the namespace, so that a later one wins."""
    group = parser.add_argument_group("LAPS: prefill graphs by length and batch size (CUDA)")
    group.add_argument(
        "--laps-graphs",
        dest="graphs_capture",
        choices=[AUTO, *Capture],
        default=argparse.SUPPRESS,
        help="capture short prefills as CUDA graphs: all at start, each when first wanted (lazy), or none "
        "(default, auto: start on a GPU for an instance of short prompts with LAPS, else off)",
    )


SETTINGS = (
    Setting(
        "graphs",
        "lengths_tokens",
        int,
        UNSET,
        f"new tokens of a request (default: {_text(DEFAULT_LENGTHS_TOKENS)})",
        is_list=True,
        dest="graphs_lengths_tokens",
    ),
    Setting(
        "graphs",
        "batch_sizes",
        int,
        UNSET,
        f"requests of a batch (default: {_text(DEFAULT_BATCH_SIZES)})",
        is_list=True,
        dest="graphs_batch_sizes",
    ),
    Setting(
        "graphs",
        "memory_gb",
        float,
        UNSET,
        "device memory for all graphs (default: half of what is free when they are captured)",
        dest="graphs_memory_gb",
    ),
)


def default_capture(role: Role, device: Device, has_laps: bool, engine_arguments: Sequence[str]) -> Capture:
    """Return what `auto` means: graphs where short batches run on a GPU, unless SGLang's own graphs are refused."""
    serves_short = role.is_prefill and role.serves(LengthClass.SHORT)
    is_refused = "--disable-cuda-graph" in engine_arguments
    return Capture.START if device is Device.CUDA and serves_short and has_laps and not is_refused else Capture.OFF


def graph_options(
    role: Role, given: argparse.Namespace, engine_arguments: Sequence[str], default: Capture = Capture.OFF
) -> tuple[GraphOptions | None, tuple[str, ...]]:
    """The options, or None without graphs, and the engine arguments that are none of them.

    `engine_arguments` win over `given`; `default` is what `auto` means. Raises ValueError with one line that names the
    option.
    """
    values, engine_arguments = split_options(
        given, engine_arguments, flag="--laps-graph", destination="graphs_", declare=add_graph_arguments
    )
    asked = values.pop("capture", AUTO)
    capture = default if asked == AUTO else Capture(asked)
    if capture is Capture.OFF:
        if values:
            raise ValueError(f"graphs.{next(iter(values))} needs --laps-graphs start or lazy")
        return None, engine_arguments
    if not role.is_prefill:
        raise ValueError("--laps-graphs: these graphs are of prefills, not of decodes")
    for name in ("lengths_tokens", "batch_sizes"):
        if name in values:
            values[name] = _sizes(values[name], f"graphs.{name}")
    memory_gb = values.get("memory_gb")
    if memory_gb is not None and not 0 < memory_gb < float("inf"):
        raise ValueError(f"graphs.memory_gb must be above 0, got {memory_gb:g}")
    return GraphOptions(capture, **values), engine_arguments


def _sizes(numbers: Sequence[int], name: str) -> tuple[int, ...]:
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{name} must be numbers of at least 1, got {_text(numbers) or 'none'}")
    return tuple(sorted(set(numbers)))


# A body that maps ids and positions to hidden states, with causal attention in each layer.
CAPTURED_ARCHITECTURES = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"),
        *("Glm4ForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"),
        # Windows, capped scores, sinks.
        *("GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo3ForCausalLM", "Cohere2ForCausalLM"),
        *("Cohere2MoeForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"),
        *("LagunaForCausalLM", "MellumForCausalLM"),
        # Latent attention.
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "MiniCPM3ForCausalLM"),
    }
)
_TOKENS_HEADS_SIZE = 3


def conflict(model_runner: Any) -> str | None:
    """Return why the prefills of this model runner are not captured; None when they can be."""
    config, arguments = model_runner.model_config, model_runner.server_args
    names = getattr(config.hf_config, "architectures", None) or ["a model without a name"]
    pool = model_runner.token_to_kv_pool

    def is_given(name: str) -> bool:
        return bool(getattr(arguments, name, None))

    exclusion = architecture_exclusion(names[0], config)
    for is_conflicting, reason in (
        (exclusion is not None, exclusion or ""),
        (arguments.pp_size > 1, "--pp-size: a pipeline stage is not captured"),
        (arguments.enable_dp_attention, "--enable-dp-attention: its ranks build batches of their own"),
        (_is_above_one(arguments, "ep_size"), "--ep-size: how many tokens go to which rank is known when it runs"),
        (
            getattr(arguments, "moe_a2a_backend", None) not in {None, "none"},
            "--moe-a2a-backend: how many tokens go to which rank is known when it runs",
        ),
        (
            _is_above_one(arguments, "attn_cp_size") or _is_above_one(arguments, "dcp_size"),
            "context parallelism: its ranks divide each batch again",
        ),
        (is_given("enable_two_batch_overlap"), "--enable-two-batch-overlap: it divides each batch again"),
        (
            is_given("enable_eplb") or is_given("expert_distribution_recorder_mode"),
            "--enable-eplb, --expert-distribution-recorder-mode: experts are counted by code that a replay leaves out",
        ),
        (
            is_given("enable_return_routed_experts"),
            "--enable-return-routed-experts: they are noted by code that a replay leaves out",
        ),
        (is_given("forward_hooks"), "--forward-hooks: a replay calls none"),
        (is_given("enable_lora"), "--enable-lora: adapters differ by request"),
        (arguments.speculative_algorithm is not None, "--speculative-algorithm: the draft reads other states"),
        (
            is_given("enable_hierarchical_cache"),
            "--enable-hierarchical-cache: a captured pass cannot wait for the KV of its layers",
        ),
        (
            is_given("enable_deterministic_inference"),
            "--enable-deterministic-inference: sums are in another order than on the ordinary path",
        ),
        (_token_dimensions(pool) != _TOKENS_HEADS_SIZE, "SGLANG_USE_HND_KVCACHE: KV is not stored token by token"),
        (model_runner.kv_cache_dtype != model_runner.dtype, "--kv-cache-dtype: KV is stored in another type"),
        (
            getattr(pool, "requires_physical_write_loc", False),
            "the unified memory pool: slots are renamed between passes",
        ),
    ):
        if is_conflicting:
            return reason
    return None


def architecture_exclusion(architecture: str, config: Any) -> str | None:
    """Return why a model is not captured, as far as SGLang's ModelConfig says; None where its kind of model is."""
    text = getattr(config, "hf_text_config", config.hf_config)
    chooses_tokens = getattr(text, "index_topk", None) is not None  # of some models with the name of another, too
    if architecture in CAPTURED_ARCHITECTURES and not chooses_tokens:
        return None
    for field, reason in (
        ("index_topk", "its attention chooses the tokens that it sees (DSA)"),
        ("layer_types", "its layers are of several kinds"),
        ("attention_chunk_size", "it attends within chunks"),
        ("vision_config", "it takes images"),
    ):
        if getattr(text, field, None) or getattr(config.hf_config, field, None):
            return f"{architecture}: {reason}"
    return f"{architecture} is not one of {', '.join(sorted(CAPTURED_ARCHITECTURES))}"


def _is_above_one(arguments: Any, name: str) -> bool:
    return (getattr(arguments, name, None) or 1) > 1


def _token_dimensions(pool: Any) -> int:
    """Dimensions of a layer's keys."""
    get_key_buffer = getattr(pool, "get_key_buffer", None)
    return _TOKENS_HEADS_SIZE if get_key_buffer is None else int(get_key_buffer(pool.start_layer).dim())
