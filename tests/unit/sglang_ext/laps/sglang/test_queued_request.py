"""A request as LAPS sees it: its lengths, its class, what it may ask for, and its prefix on each SGLang version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import PriorityClass, QueuedPrefill, RoundSnapshot
from sglang_ext.laps.sglang import queued_request
from sglang_ext.laps.sglang.queued_request import (
    LapsEntry,
    as_queued_prefill,
    count_wait,
    entry_of,
    match_again,
    match_prefix,
    prefill_tokens,
    reclassify,
    remember,
    requested_priority,
    requested_slo_s,
)
from sglang_ext.laps.sglang.request_hints import InvalidHintError, check_hints
from sglang_ext.types import LengthClass
from support.prefill_loop import policy

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


def test_what_a_started_prefill_found_on_the_host_is_in_its_prefix() -> None:
    request = stub(10, prefix=5, host=3)  # SGLang keeps the 3, which are 3 of the 5 by now
    remember(request, entry(is_started=True))
    assert prefill_tokens(request) == (5, 5)
    remember(request, entry(is_started=False))
    assert prefill_tokens(request) == (2, 8)


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


BOUNDARY_TOKENS = 256
ARRIVAL_S, NOW_S = 100.0, 100.3


def laps() -> Laps:
    return policy(boundary_tokens=BOUNDARY_TOKENS)


def classified(request: Any, arrival_s: float = ARRIVAL_S) -> LapsEntry:
    """As the scheduler does it for a request that is new."""
    new_tokens, cached_tokens = prefill_tokens(request)
    length_class = laps().classify(new_tokens, cached_tokens)
    slo_s, priority = requested_slo_s(request), requested_priority(request)
    deadline_s = laps().deadline_s(length_class, new_tokens, cached_tokens, arrival_s, slo_s, priority)
    return entry(
        new_tokens, length_class=length_class, arrival_s=arrival_s, deadline_s=deadline_s, priority=PriorityClass.NORMAL
    )


def test_a_prompt_that_turns_long_has_the_deadline_of_a_long_one() -> None:
    request = stub(4000, prefix=3900)
    mine = classified(request)
    assert mine.length_class is LengthClass.SHORT
    request.prefix_len = 0
    reclassify(request, mine, laps(), NOW_S)
    expected = classified(stub(4000))
    assert expected.length_class is LengthClass.LONG
    assert (mine.length_class, mine.deadline_s, mine.total_tokens) == (
        *(expected.length_class, expected.deadline_s),
        4000,
    )


def test_a_prompt_that_turns_long_preempts_no_other() -> None:
    """It came later and has as much to do as each of them: with its old deadline it would go first."""
    now_s = ARRIVAL_S + 0.5
    evicted = stub(4000, prefix=3900)
    mine = classified(evicted, ARRIVAL_S + 0.2)
    evicted.prefix_len = 0
    reclassify(evicted, mine, laps(), now_s)
    current = classified(stub(4000))
    current.key, current.is_started = 7, True
    queue = (
        as_queued_prefill(stub(4000, prefix=1000), current, is_current=True),
        as_queued_prefill(evicted, mine, is_current=False),
    )
    plan = policy(boundary_tokens=BOUNDARY_TOKENS).choose_of(RoundSnapshot(now_s, queue, 1 << 20))
    assert plan.batches[0].keys[0] == 7


def test_a_prompt_that_turns_short_has_a_short_ones_objective_from_then_on() -> None:
    request = stub(4000)
    mine = classified(request)
    request.prefix_len = 3900
    reclassify(request, mine, laps(), NOW_S)
    assert mine.length_class is LengthClass.SHORT
    assert mine.deadline_s == pytest.approx(NOW_S + 0.4)
    assert mine.total_tokens == 100


def test_turning_short_late_gives_no_more_time() -> None:
    request = stub(4000)
    mine = classified(request)
    before_s = mine.deadline_s
    request.prefix_len = 3900
    reclassify(request, mine, laps(), before_s + 1.0)
    assert (mine.length_class, mine.deadline_s) == (LengthClass.SHORT, before_s)


@pytest.mark.parametrize("slo_ms", [None, 5000.0])
def test_what_a_prompt_has_waited_elsewhere_counts(slo_ms: float | None) -> None:
    request = stub(4000, custom={"sglang_ext_ttft_slo_ms": slo_ms})
    mine, before = classified(request), classified(request)
    count_wait(request, mine, 2.0, NOW_S)
    assert mine.arrival_s == pytest.approx(NOW_S - 2.0)
    # The router has taken its wait from an objective of the client's own.
    earlier_s = 0.0 if slo_ms is not None else ARRIVAL_S - mine.arrival_s
    assert mine.deadline_s == pytest.approx(before.deadline_s - earlier_s)
    count_wait(request, mine, 1.0, NOW_S)
    assert mine.arrival_s == pytest.approx(NOW_S - 2.0), "it grows no younger"


@given(
    prompt=st.integers(1, 10_000),
    prefixes=st.lists(st.integers(0, 10_000), min_size=2, max_size=5),
    slo_ms=st.one_of(st.none(), st.floats(1.0, 1e6)),
)
def test_class_and_deadline_change_together_or_the_deadline_is_the_requests_own(
    prompt: int, prefixes: list[int], slo_ms: float | None
) -> None:
    request = stub(prompt, prefix=min(prefixes[0], prompt), custom={"sglang_ext_ttft_slo_ms": slo_ms})
    mine = classified(request)
    for number, prefix in enumerate(prefixes[1:], start=1):
        before = (mine.length_class, mine.deadline_s)
        request.prefix_len = min(prefix, prompt)
        now_s = ARRIVAL_S + number
        reclassify(request, mine, laps(), now_s)
        new_tokens, cached_tokens = prefill_tokens(request)
        assert mine.length_class is laps().classify(new_tokens, cached_tokens)
        assert mine.total_tokens == new_tokens
        if slo_ms is not None:
            assert mine.deadline_s == pytest.approx(ARRIVAL_S + slo_ms / 1e3)
        elif mine.length_class is before[0]:
            assert mine.deadline_s == before[1]
        elif mine.length_class is LengthClass.LONG:
            assert mine.deadline_s == classified(request).deadline_s
        else:
            assert mine.deadline_s == pytest.approx(min(before[1], now_s + 0.4))


@pytest.mark.parametrize(("after", "has_lost"), [(60, False), (80, False), (59, True), (0, True)])
def test_whether_a_prefix_has_been_evicted(monkeypatch: pytest.MonkeyPatch, after: int, has_lost: bool) -> None:
    request = stub(100, prefix=60)
    monkeypatch.setattr(queued_request, "match_prefix", lambda found, cache: setattr(found, "prefix_len", cache))
    assert match_again(request, after) is has_lost
    assert prefill_tokens(request) == (100 - after, after)


@pytest.mark.parametrize(("slo_ms", "expected_s"), [(250, 0.25), (0.5, 0.0005), (1e300, 1e297)])
def test_requested_objective(slo_ms: float, expected_s: float) -> None:
    assert requested_slo_s(stub(custom={"sglang_ext_ttft_slo_ms": slo_ms})) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    "slo_ms",
    # 5e-324 ms is above 0, in seconds it is not; 10**400 is no float.
    [0, -1, -0.0, "250", True, None, [250], {}, float("nan"), float("-inf"), float("inf"), 5e-324, 10**400, -(10**400)],
)
def test_an_objective_that_makes_no_sense_is_refused(slo_ms: object) -> None:
    custom = {"sglang_ext_ttft_slo_ms": slo_ms}
    assert requested_slo_s(stub(custom=custom)) is None  # the scheduler goes on, whatever there is
    if slo_ms is None:
        check_hints(custom)
        return
    with pytest.raises(
        InvalidHintError, match=r"^custom_params\.sglang_ext_ttft_slo_ms must be a positive number"
    ) as it:
        check_hints(custom)
    assert it.value.param == "custom_params.sglang_ext_ttft_slo_ms"
    assert "\n" not in str(it.value)
    assert len(str(it.value)) < 200


@pytest.mark.parametrize(
    "custom", [None, [], "low", {}, {"x": -1}, {"sglang_ext_ttft_slo_ms": 250, "sglang_ext_priority": "real-time"}]
)
def test_what_is_asked_for_in_the_right_way_is_not_refused(custom: object) -> None:
    check_hints(custom)


@pytest.mark.parametrize("priority", ["LOW", "", "urgent", 0, ["low"], {"low": 1}, "x" * 1000])
def test_an_unknown_priority_is_refused(priority: object) -> None:
    with pytest.raises(InvalidHintError, match="must be one of real-time, high, normal, low") as it:
        check_hints({"sglang_ext_priority": priority})
    assert it.value.param == "custom_params.sglang_ext_priority"
    assert len(str(it.value)) < 200


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


def test_the_prefix_is_looked_up_by_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import common

    asked = []
    monkeypatch.setattr(common, "match_kv_cache", lambda *arguments: asked.append(arguments))
    match_prefix("request", "cache")
    match_prefix("request", "cache")
    assert asked == [("request", "cache"), ("request", "cache")]
