"""A cluster's model: where SGLang finds it and what the API calls it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_ext.cluster.config import ConfigError
from sglang_ext.cpu.models.smollm2 import MODEL_NAME, ensure_smollm2

DEMONSTRATION_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to be loaded."""

    path: str  # local folder, or a name that SGLang resolves
    name: str  # in the API, unless the configuration says otherwise


def prepare_model(model: str) -> PreparedModel:
    """Resolve a configuration's `model`, fetching the demonstration model where it is asked for.

    Raises ModelError, or ConfigError for a folder that is not there.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return PreparedModel(str(path.resolve()), path.resolve().name)
    if model == DEMONSTRATION_MODEL:
        return PreparedModel(str(ensure_smollm2()), MODEL_NAME)
    if path.exists() or model.startswith((".", "/", "~")):
        raise ConfigError("model", f"{model} is not a folder with a config.json")
    return PreparedModel(model, model.rsplit("/", 1)[-1])
