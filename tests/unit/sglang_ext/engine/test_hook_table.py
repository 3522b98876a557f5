"""The table of hooks is complete and unambiguous."""

from __future__ import annotations

import pytest

from sglang_ext.engine.device import Device
from sglang_ext.engine.hook_table import HOOK_TABLE, Hook
from sglang_ext.engine.options import ExtensionOptions
from sglang_ext.engine.versions import NEWEST_SGLANG, OLDEST_SGLANG, SglangVersion, parse_version
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.types import Role


def test_names_are_unique() -> None:
    names = [hook.name for hook in HOOK_TABLE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("hook", HOOK_TABLE, ids=lambda hook: hook.name)
def test_every_hook_says_why_and_where(hook: Hook) -> None:
    assert hook.why
    assert hook.target.startswith("sglang.srt.")


def test_attention_for_cpus_is_hooked_on_cpus_alone_and_with_any_scheduler() -> None:
    (hook,) = [hook for hook in HOOK_TABLE if hook.name == "prefix-attention"]
    for role in Role:
        assert hook.is_wanted(ExtensionOptions(role, Device.CPU))
        assert hook.is_wanted(ExtensionOptions(role, Device.CPU, LapsOptions()))
        assert not hook.is_wanted(ExtensionOptions(role, Device.CUDA))


@pytest.mark.parametrize(
    ("text", "version"), [("0.5.23", NEWEST_SGLANG), ("0.5.22.post1", OLDEST_SGLANG), ("0.5.23rc1", NEWEST_SGLANG)]
)
def test_parse_version(text: str, version: SglangVersion) -> None:
    assert parse_version(text) == version


def test_parse_version_refuses_anything_else() -> None:
    with pytest.raises(ValueError, match="not a version"):
        parse_version("main")
