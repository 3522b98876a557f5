"""The table of hooks: complete, unambiguous, and resolved per SGLang version."""

from __future__ import annotations

import pytest

from sglang_ext.engine.device import Device
from sglang_ext.engine.hook_table import HOOK_TABLE, V17, V23, Hook, HookKind, UnsupportedVersionError
from sglang_ext.engine.options import ExtensionOptions
from sglang_ext.engine.versions import SglangVersion, parse_version
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.types import Role

EXAMPLE = Hook("example", "why", HookKind.AFTER, "m:f", {V17: None, V23: "sglang.new.place"})


def test_names_are_unique() -> None:
    names = [hook.name for hook in HOOK_TABLE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("hook", HOOK_TABLE, ids=lambda hook: hook.name)
def test_every_hook_says_why_and_has_a_column_for_each_version(hook: Hook) -> None:
    assert hook.why
    assert V17 in hook.targets
    target = hook.target_in(V23)
    assert target is not None
    assert target.startswith("sglang.srt.")


@pytest.mark.parametrize(
    ("installed", "target"),
    [((0, 5, 17), None), ((0, 5, 22), None), ((0, 5, 23), "sglang.new.place"), ((0, 6, 0), "sglang.new.place")],
)
def test_latest_column_that_is_not_newer_counts(installed: tuple[int, int, int], target: str | None) -> None:
    assert EXAMPLE.target_in(SglangVersion(*installed)) == target


def test_what_the_oldest_version_does_without() -> None:
    missing = {hook.name for hook in HOOK_TABLE if hook.target_in(V17) is None}
    assert missing == {
        *("prefill-abort-notice", "prefill-abort-late-notice", "cdsp-scheduler", "cdsp-release"),
        *("scoring-metadata", "scoring-finish", "hint-guard-generate", "layer-streams"),
        *("tied-head", "tied-head-weights", "stage-layers"),
        *("slots-announced", "slots-called"),
    }


def test_attention_for_cpus_is_hooked_on_cpus_alone_and_with_any_scheduler() -> None:
    (hook,) = [hook for hook in HOOK_TABLE if hook.name == "prefix-attention"]
    for role in Role:
        assert hook.is_wanted(ExtensionOptions(role, Device.CPU))
        assert hook.is_wanted(ExtensionOptions(role, Device.CPU, LapsOptions()))
        assert not hook.is_wanted(ExtensionOptions(role, Device.CUDA))


def test_older_than_every_column_is_refused() -> None:
    with pytest.raises(UnsupportedVersionError, match=r"0\.5\.16 is older than 0\.5\.17"):
        EXAMPLE.target_in(SglangVersion(0, 5, 16))


@pytest.mark.parametrize(("text", "version"), [("0.5.23", V23), ("0.5.17.post1", V17), ("0.5.23rc1", V23)])
def test_parse_version(text: str, version: SglangVersion) -> None:
    assert parse_version(text) == version


def test_parse_version_refuses_anything_else() -> None:
    with pytest.raises(ValueError, match="not a version"):
        parse_version("main")
