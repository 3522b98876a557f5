"""The C++ core is the one of these sources, and its absence is one clear line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from sglang_ext.long_pool.decide import _core, native_core

BUILD_SCRIPT = Path(__file__).parents[5] / "tools/build_native.py"


def load(name: str, file: Path) -> object:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def test_the_core_is_of_these_sources() -> None:
    script = load("build_native_under_test", BUILD_SCRIPT)
    module = script.NATIVE_MODULES[0]  # type: ignore[attr-defined]
    assert script.source_digest(module) == _core.SOURCE_DIGEST, "run `make compiled`"  # type: ignore[attr-defined]
    assert script.is_built(module)  # type: ignore[attr-defined]


def test_without_the_core_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_ext.long_pool.decide._core", None)
    assert native_core.__file__ is not None
    with pytest.raises(ImportError, match=r"^the CDSP planner's C\+\+ core is not usable .*`make compiled`") as caught:
        load("planner_without_core", Path(native_core.__file__))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
