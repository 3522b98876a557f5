"""The one place where the two queues tell SGLang versions apart, on stand-ins for what each of them has."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang_ext.sglang_plugin.laps import engine_interface
from sglang_ext.sglang_plugin.laps.engine_interface import match_prefix, prefix_tokens

pytestmark = pytest.mark.usefixtures("sglang_imported")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """What SGLang has is looked for once in a process."""
    engine_interface._match.cache_clear()
    yield
    engine_interface._match.cache_clear()


def test_tokens_of_a_prefix_in_either_version() -> None:
    assert prefix_tokens(SimpleNamespace(prefix_len=7)) == 7
    assert prefix_tokens(SimpleNamespace(prefix_indices=[3, 4, 5])) == 3


def test_a_newer_sglang_is_asked_by_its_name_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import common

    asked = []
    monkeypatch.setattr(common, "match_kv_cache", lambda *arguments: asked.append(arguments), raising=False)
    match_prefix("request", "cache")
    match_prefix("request", "cache")
    assert asked == [("request", "cache"), ("request", "cache")]


def test_an_older_sglang_is_asked_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import schedule_policy
    from sglang.srt.mem_cache import common

    asked = []

    def match_prefix_for_req(tree_cache: object, req: object, *, include_req: bool) -> None:
        asked.append((tree_cache, req, include_req))

    monkeypatch.delattr(common, "match_kv_cache", raising=False)
    monkeypatch.setattr(schedule_policy, "match_prefix_for_req", match_prefix_for_req, raising=False)
    match_prefix("request", "cache")
    assert asked == [("cache", "request", True)]
