"""The C++ modules are those of these sources."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from baselines import _tetris
from sglang_ext.long_pool.decide import _core

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
    core, _, tetris = script.NATIVE_MODULES  # type: ignore[attr-defined]
    for module, digest in ((core, _core.SOURCE_DIGEST), (tetris, _tetris.SOURCE_DIGEST)):
        assert script.source_digest(module) == digest, "run `make compiled`"  # type: ignore[attr-defined]
        assert script.is_built(module)  # type: ignore[attr-defined]
