"""Tiny models with draft models for speculative decoding, and what Hugging Face answers with them.

Their replies are of a few tokens only, so that a draft which attends to the right rows is often right.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from support.model_families import family
from support.tiny_model import built_once

_REPLY_TOKENS = range(6, 14)
_PREFERENCE = 6.0  # of these over others: a factor of their logits
LAYER, EAGLE = "a layer of the model", "a model of its own"
# By architecture, the kind of its draft.
DRAFTS = {"DeepseekV3ForCausalLM": LAYER, "Glm4MoeLiteForCausalLM": LAYER, "LlamaForCausalLM": EAGLE}


class DraftedModel(NamedTuple):
    """The folders of a model and of its draft model."""

    model: Path
    draft: Path

    def options(self, steps: int = 3) -> tuple[str, ...]:
        """Return the arguments of an engine that drafts this many tokens at a time."""
        return (
            *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(self.draft)),
            *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(steps + 1)),
        )


def drafted(architecture: str) -> DraftedModel:
    """Return a model and its draft; built on first use."""
    source = inspect.getsource(inspect.getmodule(drafted))  # type: ignore[arg-type]
    original = family(architecture)
    key = hashlib.sha256((original.name + source).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        shutil.copytree(original, folder / "model")
        _prefer_few_tokens(folder / "model")
        (_add_layer if DRAFTS[architecture] == LAYER else _add_model)(folder)

    folder = built_once(original.parent / f"drafted-{architecture}-{key}", build)
    model = folder / "model"
    return DraftedModel(model, model if DRAFTS[architecture] == LAYER else folder / "draft")


def drafted_greedy(architecture: str, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Greedy continuation by transformers in float32, without any draft."""
    import torch

    ids, known, past = list(prompt), 0, None
    with torch.no_grad():
        for _ in range(new_tokens):
            output = _reference(architecture)(torch.tensor([ids[known:]]), past_key_values=past, use_cache=True)
            known, past = len(ids), output.past_key_values
            ids.append(int(output.logits[0, -1].argmax()))
    return ids[len(prompt) :]


@cache
def _reference(architecture: str) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = getattr(transformers, architecture)
        model = kind.from_pretrained(drafted(architecture).model, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    return weights


def _write(folder: Path, weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _prefer_few_tokens(folder: Path) -> None:
    weights = _weights(folder)
    weights["lm_head.weight"][_REPLY_TOKENS.start : _REPLY_TOKENS.stop] *= _PREFERENCE
    _write(folder, weights)


def _add_layer(folder: Path) -> None:
    """One more layer like the model's last, behind a projection of its input and of what the model makes of it."""
    import torch

    folder = folder / "model"
    config = json.loads((folder / "config.json").read_text())
    layer, size, weights = config["num_hidden_layers"], config["hidden_size"], _weights(folder)
    last, prefix = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    for name in [name for name in weights if name.startswith(last)]:
        weights[prefix + name.removeprefix(last)] = weights[name].clone()
    half = torch.eye(size) / 2
    weights[f"{prefix}eh_proj.weight"] = torch.cat([half, half], 1)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{prefix}{norm}.weight"] = torch.ones(size)
    _write(folder, weights)
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=1))


def _add_model(folder: Path) -> None:
    """A model of one layer, which is the last of the other model's, as EAGLE has them."""
    import torch

    original, draft = folder / "model", folder / "draft"
    shutil.copytree(original, draft)
    config, weights = json.loads((draft / "config.json").read_text()), _weights(draft)
    size, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    kept = {
        "layers.0." + name.removeprefix(last): part.clone()
        for name, part in weights.items()
        if name.startswith(last) and "input_layernorm" not in name
    }
    half = torch.eye(size) / 2
    kept |= {"fc.weight": torch.cat([half, half], 1), "fc.bias": torch.zeros(size)}
    kept["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    _write(draft, kept)
    changes = {"architectures": [config["architectures"][0] + "Eagle"], "num_hidden_layers": 1}
    (draft / "config.json").write_text(json.dumps({**config, **changes}, indent=1))
