"""A cluster's model: where SGLang finds it and what the API calls it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.cluster.config import ClusterConfig, ConfigError
from sglang_ext.cpu.models.smollm2 import MODEL_NAME, SHORT_NAME, ensure_smollm2

# Variables that let an engine look for models where this process does not.
ELSEWHERE = ("HF_", "HUGGINGFACE_", "SGLANG_USE_MODELSCOPE")
HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to be loaded."""

    path: str  # local folder, or a name that SGLang resolves
    name: str  # in the API, unless the configuration says otherwise


def prepare_model(config: ClusterConfig) -> PreparedModel:
    """Resolve a configuration's `model`, fetching the demonstration model where it is asked for.

    Raises ModelError, or ConfigError for a folder that is not there and a name that Hugging Face does not know.
    """
    model = config.model
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return PreparedModel(str(path.resolve()), path.resolve().name)
    if model == SHORT_NAME:
        return PreparedModel(str(ensure_smollm2()), MODEL_NAME)
    if path.exists() or model.startswith((".", "/", "~")):
        raise ConfigError("model", f"{model} is not a folder with a config.json")
    environments = (config.env, *(pool.env for _, pool in config.pools.by_role()))
    is_elsewhere = any(name.startswith(ELSEWHERE) for environment in environments for name in environment)
    if not is_elsewhere and "SGLANG_USE_MODELSCOPE" not in os.environ:
        _find_on_hub(model)
    return PreparedModel(model, model.rsplit("/", 1)[-1])


def _find_on_hub(name: str) -> None:
    """Refuse a name whose configuration neither the cache here nor Hugging Face has. Raises ConfigError.

    Engines would find out after minutes, each by itself.
    """
    try:
        from httpx import HTTPError
        from huggingface_hub import HfApi, try_to_load_from_cache
    except ModuleNotFoundError:
        return
    if "://" in name or name.endswith(".gguf"):
        return  # SGLang itself resolves these
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except (OSError, ValueError, HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"{name} is neither a folder here nor a model that huggingface.co gives: {reason}"
        raise ConfigError("model", problem) from None
