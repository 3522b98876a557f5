"""A compiled request path that is not of these sources is noticed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sglang_ext_router import compiled

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
    assert tool.MANIFEST == compiled.MANIFEST


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
    source = "sglang_ext_router/request/request_ids.py"
    digest = compiled._digest(source) if is_current else "0" * 64
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({source: digest}))
    real = compiled.find_spec

    def find_spec(name: str) -> object:
        return SimpleNamespace(origin="flow.so") if name == compiled.WITNESS else real(name)

    monkeypatch.setattr(compiled, "MANIFEST", manifest)
    monkeypatch.setattr(compiled, "find_spec", find_spec)
    is_wrong, message = compiled.describe_compiled()
    assert is_wrong is not is_current
    assert ("request/request_ids.py" in message) is not is_current


def test_a_module_that_was_compiled_and_has_moved_since_is_noticed_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = compiler()
    monkeypatch.setattr(tool, "PACKAGES", {"sglang_ext_router": tmp_path})
    monkeypatch.setattr(tool, "HOT_MODULES", ("sglang_ext_router/there.py",))
    monkeypatch.setattr(tool, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"sglang_ext_router/moved.py": "0" * 64}))
    orphan = tmp_path / f"sglang_ext_router/moved{tool.SUFFIX}"
    orphan.parent.mkdir()
    orphan.touch()
    assert orphan in tool.compiled_files()
    monkeypatch.setattr(compiled, "MANIFEST", tmp_path / "manifest.json")
    assert compiled.describe_compiled() == (
        True,
        "the compiled request path is older than sglang_ext_router/moved.py: run `make compiled` or `make plain`",
    )


def test_plain_python_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: SimpleNamespace(origin="request/flow.py"))
    monkeypatch.setattr(compiled, "MANIFEST", Path("none"))
    assert compiled.describe_compiled()[0] is False
