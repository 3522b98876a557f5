"""The processes of an engine load its tokenizer once."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_ext.engine.hooks import shared_tokenizer

ARGUMENTS = {"tokenizer_mode": "auto", "trust_remote_code": False, "revision": None, "tokenizer_backend": "huggingface"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Return what SGLang's own function is called with; the hook is around it, as in an engine."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def original(path: str, **arguments: Any) -> object:
        seen.append((path, arguments))
        if path == "broken":
            raise OSError(path)
        return object()

    def hooked(path: str, **arguments: Any) -> object:
        return shared_tokenizer.get_tokenizer(original, path, **arguments)

    monkeypatch.setattr(shared_tokenizer, "_loaded", {})
    module = ModuleType("sglang.srt.utils.hf_transformers_utils")
    module.get_tokenizer = hooked  # type: ignore[attr-defined]
    packages = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.utils")}
    packages["sglang.srt.utils"].hf_transformers_utils = module  # type: ignore[attr-defined]
    for name, package in {**packages, module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, package)
    return seen


def get(path: str, **arguments: Any) -> object:
    module: Any = sys.modules["sglang.srt.utils.hf_transformers_utils"]
    return module.get_tokenizer(path, **{**ARGUMENTS, **arguments})


def test_what_was_loaded_before_is_taken(calls: list[tuple[str, dict[str, Any]]]) -> None:
    given = SimpleNamespace(tokenizer_path=None, model_path="m", skip_tokenizer_init=False, **ARGUMENTS)
    shared_tokenizer.load(given)  # SGLang puts the model's path in place of none later
    shared_tokenizer.load(SimpleNamespace(**{**vars(given), "tokenizer_path": "m"}))
    assert calls == [("m", ARGUMENTS)]
    assert get("m") is get("m")
    assert len(calls) == 1
    assert get("m", revision="other") is not get("m")
    assert len(calls) == 2


def test_what_cannot_be_loaded_is_left_to_sglang(calls: list[tuple[str, dict[str, Any]]]) -> None:
    shared_tokenizer.load(SimpleNamespace(tokenizer_path="broken", skip_tokenizer_init=False, **ARGUMENTS))
    with pytest.raises(OSError, match="broken"):
        get("broken")
    shared_tokenizer.load(SimpleNamespace(tokenizer_path="m", skip_tokenizer_init=True))
    assert [path for path, _ in calls] == ["broken", "broken"]
