"""`LiveView`: no frame is too large or too early, counts add up, and a reader ends with all that is so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.live.decide.encoding import MAX_WHOLE
from sglang_ext.live.decide.messages import (
    BUDGETS_BYTES,
    FRAME_FIELDS,
    MAX_MESSAGE_BYTES,
    MIN_INTERVAL_S,
    ROWS,
    InstanceRow,
    LoadRow,
    PromptRow,
    hello,
    schema,
)
from sglang_ext.live.decide.view import (
    MAX_ENDED,
    MAX_NEW_TRACKED,
    MAX_PENDING,
    MAX_TRACKED,
    MAX_TTFTS,
    Counts,
    Elsewhere,
    LiveView,
    SeenInstance,
    SeenRequest,
    SeenSpan,
)

VALIDATOR = jsonschema.Draft202012Validator(schema())
NONE_ENDED: dict[str, tuple[int, int]] = {}


def instance(name: str, pool: str = "short", state: str = "ready", **load: Any) -> SeenInstance:
    values = {"in_flight": 0, "pending_tokens": 0, **load}
    row = LoadRow(0, *(values.get(field) for field in LoadRow._fields[1:]))  # type: ignore[arg-type]
    return SeenInstance(InstanceRow(0, name, pool, "m", state, None, ""), row)


def request(**changes: Any) -> SeenRequest:
    values: dict[str, Any] = {
        **dict.fromkeys(SeenRequest._fields),
        "id": "r",
        "length_class": "short",
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "received_s": 0.0,
        "attempts": 1,
        **changes,
    }
    return SeenRequest(**values)


class Reader:
    """What a page makes of the messages."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[Any, dict[str, Any]]] = {name: {} for name in ROWS}
        self.head: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    def take(self, frame: bytes | None) -> dict[str, Any]:
        assert frame is not None
        assert len(frame) <= MAX_MESSAGE_BYTES
        assert b"\n" not in frame
        content: dict[str, Any] = json.loads(frame)
        VALIDATOR.validate(content)
        self.head = {name: content[name] for name in FRAME_FIELDS}
        for name, row in ROWS.items():
            for values in content.get(name, ()):
                found = dict(zip(row.__annotations__, values, strict=True))
                if name == "events":
                    self.events.append(found)
                elif name == "instances" and found["state"] == "gone":
                    self.rows[name].pop(values[0], None)
                    self.rows["loads"].pop(values[0], None)
                else:
                    self.rows[name][values[0]] = found
        return content

    def names(self) -> set[str]:
        return {one["name"] for one in self.rows["instances"].values()}

    def of_class(self, name: str) -> dict[str, Any]:
        return self.rows["classes"][name]

    def counted(self) -> int:
        return sum(
            one[key]
            for one in self.rows["classes"].values()
            for key in ("waiting", "prefilling", "starting", "decoding", "ended", "failed")
        )


def drain(view: LiveView, reader: Reader, at_s: float) -> float:
    """Take frames until nothing waits; the time of the last."""
    for _ in range(1000):
        reader.take(view.frame(at_s))
        if not reader.head["deferred"]:
            assert reader.rows["loads"].keys() == reader.rows["instances"].keys()
            return at_s
        at_s += MIN_INTERVAL_S
    raise AssertionError(f"{reader.head['deferred']} rows still wait")


texts = st.text(max_size=300)
times = st.one_of(st.none(), st.floats(-1e12, 1e12))
counts = st.integers(0, 10**25)


@pytest.mark.slow
@given(
    st.lists(st.tuples(texts, texts, texts, counts, st.floats()), max_size=25),
    st.lists(st.tuples(texts, counts, times), max_size=60),
    st.lists(st.tuples(st.floats(), texts), max_size=120),
)
@settings(max_examples=25, deadline=None)
def test_no_frame_is_larger_than_the_limit_whatever_it_is_told(
    instances: Sequence[tuple[str, str, str, int, float]],
    requests: Sequence[tuple[str, int, Any]],
    spans: Sequence[tuple[float, str]],
) -> None:
    view, reader = LiveView(0.0), Reader()
    seen = [
        instance(f"{number}{name}" * 3, pool, state, in_flight=count, pressure=level)
        for number, (name, pool, state, count, level) in enumerate(instances)
    ]
    for repeat in range(2):
        view.take_instances(seen, float(repeat))
        view.take_in_flight(
            [
                (number, request(id=text, prompt_tokens=count, first_token_s=at_s, prefill=text, output_tokens=count))
                for number, (text, count, at_s) in enumerate(requests)
            ],
            Counts(len(requests), len(requests), {"short": (repeat, 0)}),
            float(repeat),
        )
        view.add_spans(
            SeenSpan(f"0{seen[0].row.name[1:]}" if seen else "x", "prefill", at_s, at_s, None, label)
            for at_s, label in spans
        )
        view.take_prompts(
            PromptRow(number, text, count, 0, 0.0, None, None, [(count, [text] * 200, 0.0, None)] * 40, [])
            for number, (text, count, _) in enumerate(requests)
        )
        view.resend()
        reader.take(view.frame(float(repeat)))


@pytest.mark.slow
def test_a_thousand_instances_and_500_requests_a_second_stay_within_the_limits_and_all_instances_arrive() -> None:
    view, reader = LiveView(0.0), Reader()
    fleet = [f"10.0.{number // 250}.{number % 250}:30000" for number in range(1000)]
    ended = 0
    largest = 0
    for tick in range(40):
        at_s = tick * MIN_INTERVAL_S
        view.take_instances(
            (instance(name, "short", in_flight=(tick + place) % 7, short_busy=0.5) for place, name in enumerate(fleet)),
            at_s,
        )
        for number in range(125):
            key = tick, number
            ended += 1
            if view.wants_end(key):
                times = {"received_s": at_s - 0.2, "sent_s": at_s - 0.2, "first_token_s": at_s - 0.1}
                view.note_end(key, request(id=str(key), **times, ended_s=at_s, outcome="ok", prefill=fleet[number]))
        view.take_in_flight([], Counts(0, 0, {"short": (ended, 0)}), at_s)
        frame = view.frame(at_s)
        assert frame is not None
        largest = max(largest, len(frame))
        reader.take(frame)
    assert reader.names() == set(fleet)
    assert largest <= MAX_MESSAGE_BYTES
    assert reader.head["sampled_of"] == -(-125 // MAX_ENDED)
    assert len(reader.rows["requests"]) <= 40 * MAX_ENDED
    assert reader.of_class("short")["ttft_p50_s"] == pytest.approx(0.1, abs=1e-3)


def test_frames_come_no_faster_than_the_interval() -> None:
    view = LiveView(10.0)
    frames = [at_s for at_s in (10.0 + 0.03 * step for step in range(200)) if view.frame(at_s) is not None]
    assert all(later - earlier >= MIN_INTERVAL_S - 1e-6 for earlier, later in pairwise(frames))
    assert len(frames) >= 200 * 0.03 / (MIN_INTERVAL_S + 0.03) - 1
    with pytest.raises(ValueError, match="interval_s"):
        LiveView(0.0, interval_s=0.1)


states = st.sampled_from(["waiting", "prefilling", "starting", "decoding"])


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from(["short", "long", None]), states), max_size=60),
    st.integers(0, 500),
    st.integers(0, 50),
    st.dictionaries(st.sampled_from(["short", "long", "unknown"]), st.tuples(st.integers(0, 99), st.integers(0, 9))),
)
def test_what_is_shown_adds_up(
    under_way: Sequence[tuple[str | None, str]],
    unseen: int,
    queued: int,
    ended: dict[str, tuple[int, int]],
) -> None:
    """Also where only a part of the requests is looked at."""
    view, reader = LiveView(0.0), Reader()
    unseen = unseen if under_way else 0
    view.take_in_flight([], Counts(0, 0, {"short": (1000, 10)}), 0.0)
    seen = []
    for number, (length_class, state) in enumerate(under_way):
        reached = ["waiting", "prefilling", "starting", "decoding"].index(state)
        times = dict.fromkeys(("sent_s", "prefilled_s", "first_token_s")[:reached], 1.0)
        seen.append((number, request(length_class=length_class, **times)))
    since = {
        name: (a + (1000 if name == "short" else 0), b + (10 if name == "short" else 0))
        for name, (a, b) in {"short": (0, 0), **ended}.items()
    }
    view.take_in_flight(seen, Counts(queued, len(seen) + unseen, since), 2.0)
    reader.take(view.frame(2.0))
    assert reader.head["in_flight"] == len(seen) + unseen + queued
    assert reader.head["is_estimate"] is (unseen > 0)
    assert reader.counted() == reader.head["in_flight"] + sum(a + b for a, b in ended.values())
    for name, (answered, failed) in ended.items():
        assert (reader.of_class(name)["ended"], reader.of_class(name)["failed"]) == (answered, failed)
    if not unseen:
        for name in ("short", "long"):
            for state in ("prefilling", "starting", "decoding"):
                assert reader.of_class(name)[state] == sum(one == (name, state) for one in under_way)


@pytest.mark.slow
def test_a_reader_that_comes_later_learns_all_and_one_that_was_there_learns_changes_only() -> None:
    view, early, late = LiveView(0.0), Reader(), Reader()
    fleet = [instance(f"host:{number}", in_flight=number) for number in range(600)]
    view.take_instances(fleet, 0.0)
    view.take_in_flight([(1, request(prefill="host:1", sent_s=0.0))], Counts(0, 1, NONE_ENDED), 0.0)
    at_s = drain(view, early, 0.0)
    assert early.names() == {one.row.name for one in fleet}
    at_s += 1.0
    view.take_instances(fleet, at_s)
    quiet = early.take(view.frame(at_s))
    assert "instances" not in quiet
    assert "loads" not in quiet
    view.resend()
    drain(view, late, at_s + 1.0)
    assert late.rows["instances"] == early.rows["instances"]
    assert late.rows["loads"] == early.rows["loads"]
    assert late.rows["requests"] == early.rows["requests"]


def test_what_happens_to_instances_is_told_with_its_reason_and_numbers_are_never_used_again() -> None:
    view, reader = LiveView(0.0), Reader()
    view.take_instances([instance("a:1"), instance("b:1")], 0.0)
    drain(view, reader, 0.0)
    assert reader.events == [], "what is there from the beginning is no event"
    first = view.number_of("b:1")
    view.take_instances([instance("a:1"), instance("b:1", in_flight=5)], 0.5)  # what it leaves behind is not told
    broken = instance("a:1", state="unhealthy")
    view.take_instances([broken._replace(row=broken.row._replace(reason="it does not answer"))], 1.0)
    view.take_instances([instance("a:1", "long"), instance("b:1")], 2.0)
    drain(view, reader, 2.0)
    assert [(one["kind"], one["text"]) for one in reader.events] == [
        ("state", "a:1 is unhealthy: it does not answer"),
        ("left", "b:1 has left the short pool"),
        ("moved", "a:1 has moved from the short to the long pool"),
        ("state", "a:1 is ready"),
        ("joined", "b:1 has joined the short pool"),
    ]
    assert view.number_of("b:1") not in {None, first}
    assert reader.names() == {"a:1", "b:1"}


def test_a_request_is_followed_to_its_end_and_its_first_token_counts_once() -> None:
    view, reader = LiveView(100.0, {"short": 1.0}), Reader()
    view.take_instances([instance("p:1"), instance("d:1", "decode")], 100.0)
    start = {"id": "x", "received_s": 100.0, "sent_s": 100.5, "prefill": "p:1", "decode": "d:1"}
    view.take_in_flight([("key", request(**start))], Counts(0, 1, NONE_ENDED), 101.0)
    reader.take(view.frame(101.0))
    token = {**start, "prefilled_s": 101.5, "first_token_s": 102.0}
    view.take_in_flight([("key", request(**token))], Counts(0, 1, NONE_ENDED), 102.0)
    reader.take(view.frame(102.0))
    assert view.wants_end("key")
    view.note_end("key", request(**token, ended_s=103.0, outcome="ok"))
    view.take_in_flight([], Counts(0, 0, {"short": (1, 0)}), 103.0)
    reader.take(view.frame(103.0))
    (told,) = reader.rows["requests"].values()
    assert (told["received_s"], told["sent_s"], told["prefilled_s"], told["first_token_s"], told["ended_s"]) == (
        *(0.0, 0.5, 1.5, 2.0, 3.0),
    )
    names = {one["instance"]: one["name"] for one in reader.rows["instances"].values()}
    assert (names[told["prefill"]], names[told["decode"]]) == ("p:1", "d:1")
    short = reader.of_class("short")
    assert (short["ttft_p50_s"], short["ttft_samples"], short["objective_s"]) == (2.0, 1, 1.0)
    view.take_in_flight([], Counts(0, 0, {"short": (1, 0)}), 200.0)
    reader.take(view.frame(200.0))
    assert reader.of_class("short")["ttft_samples"] == 0, "of the last minute"


def test_followed_requests_go_on_where_only_a_part_is_looked_at() -> None:
    view, reader = LiveView(0.0), Reader()
    view.take_in_flight([("a", request(id="a", sent_s=0.1))], Counts(0, 1, NONE_ENDED), 1.0)
    reader.take(view.frame(1.0))
    assert view.followed == ("a",)
    view.follow([("a", request(id="a", sent_s=0.1, prefilled_s=1.5)), ("b", request(id="b"))])
    view.take_in_flight([("c", request(id="c"))], Counts(0, 2, NONE_ENDED), 2.0)
    reader.take(view.frame(2.0))
    told = {one["id"]: one["prefilled_s"] for one in reader.rows["requests"].values()}
    assert told == {"a": 1.5, "c": None}


def test_quantiles_weigh_what_a_sample_stands_for() -> None:
    """Of so many more that are fast a sample is seen; the slow ones are all followed on their way."""
    view, reader = LiveView(0.0), Reader()
    for tick in range(4):
        at_s = float(tick)
        for number in range(900):
            if view.wants_end((tick, number)):
                view.note_end((tick, number), request(received_s=at_s, first_token_s=at_s + 0.1, ended_s=at_s + 0.2))
        slow = [
            ((tick, "slow", number), request(received_s=at_s, first_token_s=at_s + 2.0))
            for number in range(MAX_NEW_TRACKED)
        ]
        view.take_in_flight(slow, Counts(0, MAX_NEW_TRACKED, NONE_ENDED), at_s)
        for key, seen in slow:
            assert view.wants_end(key)
            view.note_end(key, seen)
        reader.take(view.frame(at_s))
    assert reader.of_class("short")["ttft_p50_s"] == pytest.approx(0.1)
    assert reader.of_class("short")["ttft_p90_s"] == pytest.approx(0.1)
    assert reader.head["sampled_of"] == -(-900 // MAX_ENDED)


@pytest.mark.slow
def test_memory_is_bounded_while_frames_are_not_taken() -> None:
    view = LiveView(0.0)
    view.take_instances([instance("a:1")], 0.0)
    for number in range(3 * MAX_PENDING):
        view.record_event(0.0, "move", 1, str(number))
        view.add_spans([SeenSpan("a:1", "prefill", float(number), number + 0.5)])
    seen = [(number, request()) for number in range(3 * MAX_TRACKED)]
    for _ in range(MAX_TRACKED // MAX_NEW_TRACKED + 2):
        view.take_in_flight(seen, Counts(0, len(seen), NONE_ENDED), 0.0)
    reader = Reader()
    drain(view, reader, 0.0)
    assert reader.head["dropped"] == 4 * MAX_PENDING
    assert [one["text"] for one in reader.events][-1] == str(3 * MAX_PENDING - 1), "the latest are kept"
    assert len(reader.rows["requests"]) == MAX_TRACKED


def test_spans_are_told_once_again_when_they_go_on_and_never_of_unknown_instances() -> None:
    view = LiveView(0.0)
    view.take_instances([instance("a:1")], 0.0)

    def told(at_s: float, *spans: SeenSpan) -> list[Any]:
        view.add_spans(spans)
        return Reader().take(view.frame(at_s)).get("spans", [])

    span = SeenSpan("a:1", "compute", 1.0, 2.0, "long", "a prompt", 10, 1)
    assert told(1.0, span, span._replace(instance="b:1")) == [[1, "compute", 1.0, 2.0, "long", "a prompt", 10, 1]]
    assert told(2.0, span) == []
    assert len(told(2.5, span._replace(label="another"), span._replace(label="a third"))) == 2
    assert told(3.0, span._replace(end_s=4.0)) == [[1, "compute", 1.0, 4.0, "long", "a prompt", 10, 1]]
    view.resend()
    assert len(told(4.0, span._replace(end_s=4.0))) == 1


def test_a_prompt_with_more_members_than_fit_is_told_without_their_names() -> None:
    view, reader = LiveView(50.0), Reader()
    members = ["x" * 120] * 64
    view.take_prompts([PromptRow(9, "o", 100, 10, 51.0, None, None, [(5, members, 52.0, 53.0)] * 30, [(5, ["a"])])])
    reader.take(view.frame(55.0))
    (prompt,) = reader.rows["prompts"].values()
    assert prompt["chunks"] == [[5, [], 2.0, 3.0]] * 24
    assert prompt["offered_s"] == 1.0


def test_hello_names_the_fields_and_is_in_the_schema() -> None:
    message = hello(
        source="router", name="n" * 500, began_unix_s=1.5, interval_s=0.25, boundary_tokens=256, notes=["a note"]
    )
    content = json.loads(message)
    VALIDATOR.validate(content)
    assert content["fields"]["loads"] == list(LoadRow._fields)
    assert len(content["name"]) == 120
    assert len(message) < 4_000


def test_the_budgets_leave_place_for_what_stands_around_the_rows() -> None:
    around = json.dumps(dict.fromkeys(FRAME_FIELDS, MAX_WHOLE) | {name: [] for name in ROWS})
    assert sum(BUDGETS_BYTES.values()) + len(around) <= MAX_MESSAGE_BYTES


@pytest.mark.slow
def test_of_more_samples_than_are_kept_the_last_minute_still_counts_whole() -> None:
    """The first half of a minute is slow: quantiles of the latest samples alone would not know of it."""
    view, reader = LiveView(0.0), Reader()
    for tick in range(220):
        at_s = tick * MIN_INTERVAL_S
        ttft_s = 2.0 if tick < 110 else 0.1
        for number in range(MAX_ENDED):
            if view.wants_end((tick, number)):
                view.note_end(
                    (tick, number), request(received_s=at_s, first_token_s=at_s + ttft_s, ended_s=at_s + ttft_s)
                )
        reader.take(view.frame(at_s))
    assert reader.of_class("short")["ttft_p50_s"] in {2.0, 0.1}
    assert reader.of_class("short")["ttft_p90_s"] == 2.0
    assert reader.of_class("short")["ttft_samples"] < MAX_TTFTS


def test_a_process_that_begins_again_from_nothing_is_counted_on() -> None:
    view, reader = LiveView(0.0), Reader()
    told = []
    for tick, counts in enumerate([(7, 1), (9, 1), (2, 0), (3, 2), None, (4, 2)]):
        ended = {} if counts is None else {1: counts}
        view.take_elsewhere(Elsewhere({1: 0, 2: 3}, ended))
        reader.take(view.frame(float(tick)))
        told.append((reader.head["elsewhere"]["ended"], reader.head["elsewhere"]["failed"]))
    assert told == [(0, 0), (2, 0), (4, 0), (5, 2), (5, 2), (6, 2)]


def test_half_of_a_pair_of_surrogates_is_written_as_json_can() -> None:
    view, reader = LiveView(0.0), Reader()
    view.take_instances([instance("a\ud800b")], 0.0)
    reader.take(view.frame(0.0))
    assert reader.names() == {"a\ud800b"}
