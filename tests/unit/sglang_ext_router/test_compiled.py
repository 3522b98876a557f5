"""A compiled request path that is not of these sources is noticed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sglang_ext_router import main

ROOT = Path(__file__).resolve().parents[3]


def compiler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_hot_path", ROOT / "tools/compile_hot_path.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_listed_module_exists() -> None:
    tool = compiler()
    assert [module for module in tool.HOT_MODULES if not tool.source_path(module).is_file()] == []
    assert tool.MANIFEST == main.MANIFEST


def test_extension_modules_go_beside_their_sources() -> None:
    tool = compiler()
    assert (
        tool.destination(Path("sglang_ext/policy/routing/pd_protocol.so"))
        == ROOT / "python/sglang_ext/policy/routing/pd_protocol.so"
    )
    assert tool.destination(Path("sglang_ext_router/http1.so")) == ROOT / "router/sglang_ext_router/http1.so"
    assert tool.destination(Path("abc__mypyc.so")) == ROOT / "router/abc__mypyc.so"


@pytest.mark.parametrize("is_current", [True, False])
def test_other_sources_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_current: bool) -> None:
    source = "sglang_ext_router/request_ids.py"
    digest = main._digest(source) if is_current else "0" * 64
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({source: digest}))
    real = main.find_spec

    def find_spec(name: str) -> object:
        return SimpleNamespace(origin="admitted_request.so") if name == main.WITNESS else real(name)

    monkeypatch.setattr(main, "MANIFEST", manifest)
    monkeypatch.setattr(main, "find_spec", find_spec)
    is_wrong, message = main.describe_compiled()
    assert is_wrong is not is_current
    assert ("request_ids.py" in message) is not is_current


def test_plain_python_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "find_spec", lambda name: SimpleNamespace(origin="admitted_request.py"))
    assert main.describe_compiled()[0] is False
