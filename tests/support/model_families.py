"""Tiny random models whose attention is not plain: windows, sinks, caps; and what Hugging Face answers with them."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support.tiny_model import tiny_model

WINDOW = 32
_VOCABULARY = 2048
_SIZES: dict[str, Any] = {
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
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA: dict[str, Any] = {**_ALTERNATING, "query_pre_attn_scalar": 16, "initializer_range": 0.1}
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}, "rope_theta": 500_000.0}
# By architecture: its configuration, what that has in addition to the sizes, and what SGLang reads and transformers
# does not write.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GptOssForCausalLM": ("GptOssConfig", {**_ALTERNATING, **_EXPERTS}, {}),
    "Olmo3ForCausalLM": ("Olmo3Config", _ALTERNATING, _ROPE),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
        {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**_GEMMA, "tie_word_embeddings": True}, {}),
    "Cohere2ForCausalLM": ("Cohere2Config", {**_ALTERNATING, "logit_scale": 1.0, "tie_word_embeddings": True}, {}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": WINDOW}, {}),
}


def family(architecture: str) -> Path:
    """Folder with weights and a tokenizer; built on first use."""
    source = inspect.getsource(inspect.getmodule(family))  # type: ignore[arg-type]
    key = hashlib.sha256((architecture + source).encode()).hexdigest()[:16]
    folder = tiny_model().parent / f"{architecture}-{key}"
    if not folder.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _build(architecture, scratch)
            os.rename(scratch, folder)
        except OSError:
            if not folder.is_dir():  # another process has built it meanwhile
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _build(architecture: str, folder: Path) -> None:
    import json

    import torch
    import transformers

    name, more, written = FAMILIES[architecture]
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, name)(**{**_SIZES, **more})).to(torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_(0, 1)
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | written, indent=1))
    for file in tiny_model().iterdir():
        if "token" in file.name or "chat" in file.name:
            shutil.copy(file, folder / file.name)


def family_greedy(architecture: str, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Greedy continuation by transformers in float32, without a cache."""
    import torch

    ids = list(prompt)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model(architecture)
        for _ in range(new_tokens):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@cache
def _model(architecture: str) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    model = getattr(transformers, architecture)
    return model.from_pretrained(family(architecture), dtype=torch.float32, attn_implementation="eager").eval()
