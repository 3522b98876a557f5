"""The self-check sees a hook that is not in force, however that came about."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.engine import verification
from sglang_ext.engine.device import Device
from sglang_ext.engine.hook_table import Hook, HookKind
from sglang_ext.engine.options import ExtensionOptions
from sglang_ext.engine.verification import HookNotInForceError, HookState
from sglang_ext.types import Role

TARGET = "sglang.fake_for_tests.function"
CLASS_TARGET = "sglang.fake_for_tests.Thing"


def hook_function(original: Any, *args: Any) -> Any:
    return ("hooked", original(*args))


class ReplacingThing:
    pass


@pytest.fixture
def fake(sglang_imported: None) -> Iterator[types.ModuleType]:
    """A module in SGLang's name space with a function and a class to hook."""
    module = types.ModuleType("sglang.fake_for_tests")
    exec("def function(x): return x\nclass Thing: pass", vars(module))  # noqa: S102
    sys.modules[module.__name__] = module
    import sglang

    sglang.fake_for_tests = module
    yield module
    del sglang.fake_for_tests, sys.modules[module.__name__]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    implementations = {"around": hook_function, "class": ReplacingThing}
    monkeypatch.setattr(verification, "load_implementation", implementations.__getitem__)
    hooks = (
        Hook("a-function", "test", HookKind.AROUND, "around", TARGET),
        Hook("a-class", "test", HookKind.REPLACE, "class", CLASS_TARGET),
    )
    monkeypatch.setattr(verification, "HOOK_TABLE", hooks)


def apply_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.reset()
    HookRegistry.register(TARGET, hook_function, HookType.AROUND)
    HookRegistry.register(CLASS_TARGET, ReplacingThing, HookType.REPLACE)
    HookRegistry.apply_hooks()
    HookRegistry.reset()


def problems() -> dict[str, str]:
    return {status.name: status.detail for status in verification.inspect_hooks() if status.state is HookState.BROKEN}


@pytest.mark.slow
def test_applied_hooks_are_in_force(fake: types.ModuleType, table: None) -> None:
    apply_hooks()
    assert fake.function(1) == ("hooked", 1)
    assert verification.verify_hooks() == ["a-function", "a-class"]


def test_hook_below_another_plugins_is_in_force(fake: types.ModuleType, table: None) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    apply_hooks()
    HookRegistry.register(TARGET, lambda original, x: original(x), HookType.AROUND)
    HookRegistry.apply_hooks()
    HookRegistry.reset()
    assert problems() == {}


def test_nothing_applied_is_refused_by_name(fake: types.ModuleType, table: None) -> None:
    with pytest.raises(HookNotInForceError, match=r"a-function: .*does not go through.*a-class: .*not replaced"):
        verification.verify_hooks()


def test_function_overwritten_later_is_seen(fake: types.ModuleType, table: None) -> None:
    apply_hooks()
    fake.function = lambda x: x  # type: ignore[attr-defined]
    assert set(problems()) == {"a-function"}


def test_stale_import_of_the_function_is_seen(fake: types.ModuleType, table: None) -> None:
    original = fake.function
    apply_hooks()
    stale = types.ModuleType("sglang.stale_for_tests")
    stale.function = original  # type: ignore[attr-defined]
    sys.modules[stale.__name__] = stale
    try:
        assert problems() == {"a-function": f"{TARGET}: sglang.stale_for_tests still uses the old function"}
    finally:
        del sys.modules[stale.__name__]


def test_stale_import_of_the_class_is_seen(fake: types.ModuleType, table: None) -> None:
    original = fake.Thing
    original.__module__ = fake.__name__
    apply_hooks()
    stale = types.ModuleType("sglang.stale_for_tests")
    stale.Thing = original  # type: ignore[attr-defined]
    sys.modules[stale.__name__] = stale
    try:
        assert problems() == {"a-class": f"{CLASS_TARGET}: sglang.stale_for_tests still uses the old class"}
    finally:
        del sys.modules[stale.__name__]


def test_missing_target_is_seen(fake: types.ModuleType, table: None) -> None:
    apply_hooks()
    del fake.function
    assert set(problems()) == {"a-function"}


def launch(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The launch module with a model that does not exist: it must stop before it looks for one."""
    return subprocess.run(
        [sys.executable, "-m", "sglang_ext.engine.launch", "--model-path", str(tmp_path / "none")],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.full
def test_engine_refuses_to_start_when_sglang_skips_the_plugin(tmp_path: Path) -> None:
    options = ExtensionOptions(Role.SHORT, Device.CPU).to_environment()
    result = launch(tmp_path, SGLANG_PLUGINS="another_plugin", **options)
    assert result.returncode == 3
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("sglang-ext: refusing to start")
    assert "parallel-samples" in last_line


@pytest.mark.slow
def test_engine_refuses_to_start_without_options(tmp_path: Path) -> None:
    result = launch(tmp_path, SGLANG_EXT_OPTIONS="")
    assert result.returncode == 3
    assert "sglang-ext worker" in result.stderr


def test_data_parallel_ranks_state_together() -> None:
    """Nothing is stated where one of them states nothing, and the main process refuses to serve."""
    key = verification.STATEMENT_KEY
    stating = [{key: {"version": "1"}}, {key: {"version": "1"}}]
    passed = verification.pass_statements({"status": "ready"}, types.SimpleNamespace(_scheduler_init_infos=stating))
    assert passed == {"status": "ready", key: {"version": "1"}}
    assert verification.check_statements([passed]) == [passed]
    silent = types.SimpleNamespace(_scheduler_init_infos=[*stating, {}])
    with pytest.raises(HookNotInForceError, match="scheduler 0"):
        verification.check_statements([verification.pass_statements({}, silent)])
