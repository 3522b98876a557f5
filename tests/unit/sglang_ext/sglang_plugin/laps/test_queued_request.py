"""A request as LAPS sees it: its lengths, its class, what it may ask for, and its prefix on each SGLang version."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.policy.laps.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.sglang_plugin.laps import queued_request
from sglang_ext.sglang_plugin.laps.queued_request import (
    LapsEntry,
    as_queued_prefill,
    entry_of,
    match_prefix,
    prefill_tokens,
    prefix_tokens,
    remember,
    requested_priority,
    requested_slo_s,
)
from sglang_ext.types import LengthClass

pytestmark = pytest.mark.usefixtures("sglang_imported")


def stub(prompt: int = 10, output: int = 0, prefix: int = 0, host: int = 0, custom: object = None) -> Any:
    """An SGLang request of so many tokens; `prefix` of them in the cache, `host` more in its second tier."""
    return SimpleNamespace(
        origin_input_ids=[0] * prompt,
        output_ids=[0] * output,
        prefix_len=prefix,
        host_hit_length=host,
        sampling_params=SimpleNamespace(custom_params=custom),
    )


def entry(total_tokens: int = 10, **changes: Any) -> LapsEntry:
    return LapsEntry(
        **{
            "key": 3,
            "length_class": LengthClass.LONG,
            "total_tokens": total_tokens,
            "arrival_s": 1.5,
            "deadline_s": 2.5,
            "priority": PriorityClass.HIGH,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (stub(10), (10, 0)),
        (stub(10, prefix=4), (6, 4)),
        (stub(10, prefix=4, host=2), (4, 6)),
        (stub(10, output=3, prefix=4), (9, 4)),
        # The last token is computed always.
        (stub(10, prefix=10), (1, 9)),
        (stub(10, prefix=8, host=8), (1, 9)),
        (stub(1), (1, 0)),
    ],
)
def test_new_and_cached_tokens(request_: Any, expected: tuple[int, int]) -> None:
    assert prefill_tokens(request_) == expected


def test_an_entry_stays_with_its_request() -> None:
    request, other = stub(), stub()
    assert entry_of(request) is None
    mine = entry()
    remember(request, mine)
    assert entry_of(request) is mine
    assert entry_of(other) is None


def test_the_record_that_a_policy_sees() -> None:
    record = as_queued_prefill(stub(100, prefix=60), entry(total_tokens=100, is_started=True), is_current=True)
    assert record == QueuedPrefill(
        key=3,
        length_class=LengthClass.LONG,
        new_tokens=40,
        cached_tokens=60,
        total_tokens=100,
        arrival_s=1.5,
        deadline_s=2.5,
        priority=PriorityClass.HIGH,
        is_started=True,
        is_current=True,
    )


def test_an_evicted_prefix_never_leaves_more_to_do_than_there_was() -> None:
    """Classified with 60 tokens cached, which have left the cache since."""
    record = as_queued_prefill(stub(100), entry(total_tokens=40), is_current=False)
    assert (record.new_tokens, record.total_tokens) == (100, 100)


@pytest.mark.parametrize(("slo_ms", "expected_s"), [(250, 0.25), (0.5, 0.0005), (1e300, 1e297)])
def test_requested_objective(slo_ms: float, expected_s: float) -> None:
    assert requested_slo_s(stub(custom={"sglang_ext_ttft_slo_ms": slo_ms})) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    "slo_ms",
    # 5e-324 ms is above 0, in seconds it is not; 10**400 is no float.
    [0, -1, -0.0, "250", True, None, [250], {}, float("nan"), float("-inf"), 5e-324, 10**400, -(10**400)],
)
def test_an_objective_that_makes_no_sense_is_ignored(slo_ms: object) -> None:
    assert requested_slo_s(stub(custom={"sglang_ext_ttft_slo_ms": slo_ms})) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("real-time", PriorityClass.REAL_TIME),
        ("high", PriorityClass.HIGH),
        ("normal", PriorityClass.NORMAL),
        ("low", PriorityClass.LOW),
        *((wrong, PriorityClass.NORMAL) for wrong in ("LOW", "", "urgent", 0, None, ["low"], {"low": 1})),
    ],
)
def test_requested_priority(name: object, expected: PriorityClass) -> None:
    assert requested_priority(stub(custom={"sglang_ext_priority": name})) is expected


@pytest.mark.parametrize("custom", [None, {}, [], "low", 5])
def test_without_parameters_there_is_nothing_asked_for(custom: object) -> None:
    assert requested_slo_s(stub(custom=custom)) is None
    assert requested_priority(stub(custom=custom)) is PriorityClass.NORMAL


def test_a_request_without_the_field_asks_for_nothing() -> None:
    request = SimpleNamespace(sampling_params=SimpleNamespace())
    assert requested_slo_s(request) is None


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """What SGLang has is looked for once in a process."""
    queued_request._match.cache_clear()
    yield
    queued_request._match.cache_clear()


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
