"""Tiny random models of the families that SGLang serves, and what Hugging Face answers with them."""

from __future__ import annotations

import copy
import hashlib
import inspect
import shutil
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from support.tiny_model import built_once, tiny_model

WINDOW = 32
_VOCABULARY = 2048
_FLOAT32_ERROR = 2e-6  # of a value that has been added up in another order
SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_ALTERNATING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_GEMMA: dict[str, Any] = {**_ALTERNATING, "query_pre_attn_scalar": 16}
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}, "rope_theta": 500_000.0}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_UNGROUPED: dict[str, Any] = {"num_key_value_heads": 4}
_LATENT_SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LATENT: dict[str, Any] = {**_LATENT_SIZES, **_ROUTED_EXPERTS, "head_dim": 8, "num_hidden_layers": 3}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_N_SIZES: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 2048, "n_inner": 128, **_UNGROUPED}


class Family(NamedTuple):
    """A tiny model: what its configuration has in addition to the sizes, what SGLang reads of it and transformers does
    not write, the kinds of state that SGLang keeps besides its KV, and whether recurrent ones go between any numbers of
    ranks."""

    more: Mapping[str, Any] = MappingProxyType({})
    written: Mapping[str, Any] = MappingProxyType({})
    states: tuple[str, ...] = ()
    divides_states: bool = False


REFUSED_WINDOW = "MistralForCausalLM"
_GDN: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
}
_GDN_EXPERTS: dict[str, Any] = {
    **_EXPERTS,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
_MAMBA: dict[str, Any] = {"state_size": 16, "expand": 2, "n_groups": 1, "chunk_size": 32}
_HYBRID: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
# By architecture.
FAMILIES: dict[str, Family] = {
    # Latent attention.
    "DeepseekV2ForCausalLM": Family(
        {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False, "moe_layer_freq": 1},
        {"moe_layer_freq": 1, "first_k_dense_replace": 1, "scoring_func": "softmax"},
    ),
    "DeepseekV3ForCausalLM": Family(
        {**_LATENT, "n_group": 2, "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_parameters": _YARN},
        {"moe_layer_freq": 1, "scoring_func": "sigmoid"},
    ),
    "Glm4MoeLiteForCausalLM": Family(_LATENT),
    # Windows, sinks, caps.
    # With 0.3 its logits in float32 are 2e-4 off those in float64, whoever computes them.
    "GptOssForCausalLM": Family({**_ALTERNATING, **_LOCAL_EXPERTS, "initializer_range": 0.2}, states=("swa",)),
    "Olmo3ForCausalLM": Family(_ALTERNATING, _ROPE),
    "Gemma2ForCausalLM": Family(
        {**_GEMMA, **_TIED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "Gemma3ForCausalLM": Family({**_GEMMA, **_TIED}),
    "Cohere2ForCausalLM": Family({**_ALTERNATING, **_TIED, "logit_scale": 1.0}),
    "Cohere2MoeForCausalLM": Family({**_ALTERNATING, **_EXPERTS, **_TIED, "logit_scale": 1.0}),
    # With 1, which transformers has where a configuration says nothing, scores are so large that rounding is, too.
    "GraniteSWAForCausalLM": Family({**_ALTERNATING, "attention_multiplier": 0.25}, states=("swa",)),
    "GraniteMoeSWAForCausalLM": Family(
        {**_ALTERNATING, **_LOCAL_EXPERTS, "attention_multiplier": 0.25}, states=("swa",)
    ),
    "LagunaForCausalLM": Family({**_ALTERNATING, **_EXPERTS, "shared_expert_intermediate_size": 32}, states=("swa",)),
    "MellumForCausalLM": Family({**_ALTERNATING, **_EXPERTS}, states=("swa",)),
    REFUSED_WINDOW: Family({"sliding_window": WINDOW}),
    # Recurrent states.
    "Qwen3NextForCausalLM": Family({**_GDN, **_GDN_EXPERTS}, states=("mamba",), divides_states=True),
    "Qwen3_5ForCausalLM": Family(_GDN, states=("mamba",), divides_states=True),
    "Qwen3_5MoeForCausalLM": Family({**_GDN, **_GDN_EXPERTS}, states=("mamba",), divides_states=True),
    "Mamba2ForCausalLM": Family({**_MAMBA, "num_heads": 8, "rms_norm": True}, states=("mamba",)),
    "FalconH1ForCausalLM": Family(
        {**_HYBRID, "mamba_d_ssm": 128, "mamba_rms_norm": False, "mamba_norm_before_gate": False},
        states=("mamba",),
        divides_states=True,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        {
            **_HYBRID,
            **_LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "shared_intermediate_size": 32,
        },
        states=("mamba",),
        divides_states=True,
    ),
    "NemotronHForCausalLM": Family(
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 32,
        },
        # The names that both libraries read.
        {"layers_block_type": None, "hybrid_override_pattern": "M-*-", "mamba_n_groups": 2},
        states=("mamba",),
        divides_states=True,
    ),
    "Lfm2ForCausalLM": Family(
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 32},
        states=("mamba",),
        divides_states=True,
    ),
    "Lfm2MoeForCausalLM": Family(
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            **_EXPERTS,
            "num_dense_layers": 1,
            "use_expert_bias": True,
        },
        states=("mamba",),
        divides_states=True,
    ),
    "Qwen2MoeForCausalLM": Family({**_EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}),
    # Every layer attends to everything before a token.
    "ApertusForCausalLM": Family(),
    "ArceeForCausalLM": Family(),
    "CohereForCausalLM": Family({**_TIED, "logit_scale": 1.0}),
    "Ernie4_5_MoeForCausalLM": Family(
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1, **_TIED}
    ),
    "GemmaForCausalLM": Family(_TIED, {"hidden_act": "gelu_pytorch_tanh"}),
    "Glm4ForCausalLM": Family(),
    "Glm4MoeForCausalLM": Family({**_ROUTED_EXPERTS, "use_qk_norm": True}),
    "GPT2LMHeadModel": Family({**_N_SIZES, **_TIED}),
    "GPTBigCodeForCausalLM": Family({**_N_SIZES, **_TIED}),
    "GPTJForCausalLM": Family({**_N_SIZES, "rotary_dim": 8}),
    "GraniteForCausalLM": Family(),
    "GraniteMoeForCausalLM": Family(_LOCAL_EXPERTS),
    "GraniteMoeSharedForCausalLM": Family({**_LOCAL_EXPERTS, "shared_intermediate_size": 32}),
    "LlamaForCausalLM": Family(),
    "MiniCPM3ForCausalLM": Family({**_LATENT_SIZES, "head_dim": None}),
    "Ministral3ForCausalLM": Family(),
    "MixtralForCausalLM": Family(_LOCAL_EXPERTS),
    "OPTForCausalLM": Family({"word_embed_proj_dim": 64, "ffn_dim": 128, **_UNGROUPED}),
    "Olmo2ForCausalLM": Family(),
    "OlmoForCausalLM": Family(_UNGROUPED),
    "OlmoeForCausalLM": Family({**_EXPERTS, **_UNGROUPED}),
    "PersimmonForCausalLM": Family(_UNGROUPED),
    "Phi3ForCausalLM": Family({"original_max_position_embeddings": 2048}),
    "PhiForCausalLM": Family(_UNGROUPED),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    "Qwen3MoeForCausalLM": Family(_EXPERTS),
    "StableLmForCausalLM": Family(),
    "Starcoder2ForCausalLM": Family(),
}


def family(architecture: str) -> Path:
    """Folder with weights and a tokenizer; built on first use."""
    source = inspect.getsource(inspect.getmodule(family))  # type: ignore[arg-type]
    key = hashlib.sha256((architecture + source).encode()).hexdigest()[:16]
    return built_once(tiny_model().parent / f"{architecture}-{key}", lambda scratch: _build(architecture, scratch))


def _build(architecture: str, folder: Path) -> None:
    import json

    import torch
    import transformers

    more, written = FAMILIES[architecture][:2]
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**{**SIZES, **more})).to(torch.float32)
    with torch.no_grad():
        if model.config.tie_word_embeddings:
            model.get_input_embeddings().weight /= 8  # or the last token would be the next one, whatever the layers do
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_(0, 1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **written}, indent=1))
    for file in tiny_model().iterdir():
        if "token" in file.name or "chat" in file.name:
            shutil.copy(file, folder / file.name)


def family_greedy(
    architecture: str,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    has_cache: bool = False,
    is_fp8: bool = False,
    noise: int = 0,
) -> list[int]:
    """Greedy continuation by transformers in float32; with its cache long prompts take less time. `is_fp8`: keys and
    values are rounded to FP8, and widened again, before anything attends to them; with a `noise` above 0 after an error
    as large as float32 makes, another one for each number."""
    import torch

    ids, known, past = list(prompt), 0, None
    if is_fp8:
        has_cache, past = True, _rounding_cache(architecture, noise)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model_with_short_sinks(architecture) if is_fp8 else _model(architecture)
        for _ in range(new_tokens):
            output = model(torch.tensor([ids[known:]]), past_key_values=past, use_cache=has_cache)
            if has_cache:
                known, past = len(ids), output.past_key_values
            ids.append(int(output.logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _rounding_cache(architecture: str, noise: int) -> Any:
    import torch
    from transformers import DynamicCache

    draw = torch.Generator().manual_seed(noise)

    class RoundingCache(DynamicCache):  # type: ignore[misc, unused-ignore]
        def update(self, keys: torch.Tensor, values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            return super().update(self.rounded(keys), self.rounded(values), *arguments, **options)

        def rounded(self, part: torch.Tensor) -> torch.Tensor:
            if noise:
                part = part * (1 + _FLOAT32_ERROR * torch.randn(part.shape, generator=draw))
            return part.to(torch.float8_e4m3fn).to(part.dtype)

    return RoundingCache(config=_model(architecture).config)


@cache
def _model_with_short_sinks(architecture: str) -> Any:
    """Return the model with its sinks in bfloat16, as SGLang keeps them. By that much, keys and values may be rounded
    to other numbers in FP8."""
    import torch

    model = copy.deepcopy(_model(architecture))
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    return model


@cache
def _model(architecture: str) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    model = getattr(transformers, architecture)
    return model.from_pretrained(family(architecture), dtype=torch.float32, attn_implementation="eager").eval()
