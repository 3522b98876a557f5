"""What a client has of its stream, from what was relayed, and the rest of it from a stream that begins again."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.token_marks import mark, read_marks
from sglang_ext_router.http.replies import Unchunked, chunk
from sglang_ext_router.request import migration
from sglang_ext_router.request.migration import ContinuedStream, Delivered, SentStream, may_migrate
from sglang_ext_router.request.prompt import measure

CHAT, COMPLETIONS, GENERATE = b"/v1/chat/completions", b"/v1/completions", b"/generate"
PATHS = [CHAT, COMPLETIONS, GENERATE]
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
PIECES = ["one", " two", "", 'quote"', " line\n", "\\", "é", " 汉字", "\u2028", "{}", "data: {", "\x01\x00"]


def event(message: object, ids: list[int] | None = None) -> bytes:
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}{mark(ids or [])}\n\n".encode()


def stream_events(path: bytes, texts: list[str], rid: str, finish: str | None, created: int = 7) -> list[bytes]:
    """The events of a stream of one token each, ids 100, 101 ...; with `finish` its end, too."""
    events = []
    if path == CHAT:
        events.append(chat_event(rid, created, {"role": "assistant", "content": ""}, None, []))
    for number, text in enumerate(texts):
        ids = [100 + number]
        if path == GENERATE:
            so_far, ids = "".join(texts[: number + 1]), list(range(100, 101 + number))
            reason = {"type": finish} if finish and number == len(texts) - 1 else None
            meta = {"id": rid, "finish_reason": reason, "completion_tokens": len(ids)}
            events.append(event({"text": so_far, "output_ids": ids, "meta_info": meta}))
        elif path == CHAT:
            events.append(chat_event(rid, created, {"reasoning_content": None, "content": text}, None, ids))
        else:
            choice = {"index": 0, "text": text, "finish_reason": None}
            events.append(event({"id": rid, "created": created, "choices": [choice], "usage": None}, ids))
    if finish:
        if path == CHAT:
            events.append(chat_event(rid, created, {"content": None}, finish, []))
        elif path == COMPLETIONS:
            choice = {"index": 0, "text": "", "finish_reason": finish}
            events.append(event({"id": rid, "created": created, "choices": [choice], "usage": None}))
        if path != GENERATE:
            usage = {"prompt_tokens": 5, "completion_tokens": len(texts), "prompt_tokens_details": {"cached_tokens": 9}}
            events.append(event({"id": rid, "created": created, "choices": [], "usage": usage}))
        events.append(DONE)
    return events


def chat_event(rid: str, created: int, delta: dict[str, Any], finish: str | None, ids: list[int]) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return event({"id": rid, "created": created, "model": "m", "choices": [choice]}, ids)


def kept(path: bytes, events: list[bytes], sizes: random.Random | None = None) -> SentStream:
    sent = SentStream(path)
    data = b"".join(map(chunk, events))
    while data:
        size = len(data) if sizes is None else sizes.randrange(1, 300)
        sent.keep(data[:size])
        data = data[size:]
    return sent


def text_and_ends(path: bytes, events: list[bytes]) -> tuple[str, list[Any]]:
    """The text that these events bring, and what ends them."""
    text, ends = "", []
    for message in [json.loads(one[6:]) for one in events if one.startswith(b"data: {")]:
        if path == GENERATE:
            text = message["text"]
            ends.append(message["meta_info"]["finish_reason"])
            continue
        for choice in message["choices"]:
            text += choice.get("delta", choice).get("content") or choice.get("text") or ""
            ends.append(choice["finish_reason"])
        ends.append(message.get("usage"))
    return text, [end for end in ends if end]


@given(ids=st.lists(st.integers(0, 2**20 - 1)))
def test_marks_are_read_back_and_are_no_part_of_the_json(ids: list[int]) -> None:
    line = b'data: {"a": "b \\t "}' + mark(ids).encode()
    assert read_marks(line) == ids
    assert json.loads(line[6:]) == {"a": "b \t "}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("run", [1, 3, 256])
def test_what_was_relayed_is_read_back_however_it_came(path: bytes, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "_RUN", run)
    monkeypatch.setattr(migration, "_TRIMMED_BYTES", run * 100)
    for seed in range(20):
        draws = random.Random(seed)
        texts = [draws.choice(PIECES) for _ in range(draws.randrange(1, 120))]
        delivered = kept(path, stream_events(path, texts, "r1", None), draws).delivered()
        assert delivered is not None
        assert delivered.ids == list(range(100, 100 + len(texts)))
        assert "".join(delivered.texts.values()) == "".join(texts)
        assert (delivered.id, delivered.has_role) == ("r1", path == CHAT)


def test_a_long_stream_takes_little_memory() -> None:
    events = stream_events(CHAT, [f" word{number}" for number in range(5000)], "r" * 32, None)
    sent = SentStream(CHAT)
    for one in events:
        sent.keep(chunk(one))
    assert sent._size_bytes < 0.6 * sum(map(len, events))
    delivered = sent.delivered()
    assert delivered is not None
    assert len(delivered.ids) == 5000
    sent = SentStream(GENERATE)
    for number in range(1, 3000):
        sent.keep(chunk(stream_events(GENERATE, ["x" * number], "r1", None)[0]))
    assert sum(map(len, sent._blocks)) < 100_000
    assert sent.delivered() is not None


def test_a_stream_that_is_too_long_cannot_go_on() -> None:
    texts = ["x" * 100_000] * (migration.MAX_KEPT_BYTES // 100_000 + 1)
    sent = kept(COMPLETIONS, stream_events(COMPLETIONS, texts, "r1", None), random.Random(1))
    assert sent.delivered() is None
    assert sent._blocks == []


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_whose_end_was_sent_cannot_go_on(path: bytes) -> None:
    assert kept(path, stream_events(path, ["a", "b"], "r1", "stop")).delivered() is None
    assert kept(path, []).delivered() is None
    assert kept(path, [b"data: {broken\n\n"]).delivered() is None
    if path == CHAT:
        call = chat_event("r1", 7, {"tool_calls": [{"index": 0}]}, None, [3])
        assert kept(path, [call]).delivered() is None


@pytest.mark.parametrize("path", PATHS)
def test_the_rest_joins_what_was_sent_wherever_the_seam_is(path: bytes) -> None:
    texts = ["one", " two", "", " thrée", " 汉", "字", " six", "seven"]
    whole = stream_events(path, texts, "r1", "stop")
    for size in range(1, len(texts) + 1):
        first = stream_events(path, texts[:size], "r1", None)
        delivered = kept(path, first).delivered()
        assert delivered is not None
        for merged in range(1, len(texts) + 1):  # the second stream's first event has several tokens
            again = ["".join(texts[:merged]), *texts[merged:]]
            if path == GENERATE:
                again = texts
            continued = ContinuedStream(path, delivered, b"", is_chunked=True)
            data = b"".join(map(chunk, stream_events(path, again, "r2", "stop", created=9))) + END
            cut = len(data) * merged // (len(texts) + 1)
            got = continued.feed(data[:cut]) + continued.feed(data[cut:])
            assert not continued.has_differed
            body = Unchunked().feed(got)
            assert got.endswith(END)
            assert b"r2" not in body
            rest = [one + b"\n\n" for one in body.split(b"\n\n") if one]
            text, ends = text_and_ends(path, first + rest)
            assert text == "".join(texts)
            assert len(ends) == len(text_and_ends(path, whole)[1])
            assert rest[-1] == DONE
            if path == CHAT:
                assert sum(b'"role":"assistant"' in one for one in first + rest) == 1
            if path != GENERATE:
                assert b'"cached_tokens":5' in body  # no more than the prompt has


def test_reasoning_and_answer_are_cut_apart() -> None:
    def deltas(*pairs: tuple[str, str]) -> list[bytes]:
        return [chat_event("r", 1, {name: text}, None, [1]) for name, text in pairs]

    delivered = kept(CHAT, deltas(("reasoning_content", "think"), ("content", "ans"))).delivered()
    assert delivered is not None
    continued = ContinuedStream(CHAT, delivered, b"", is_chunked=False)
    again = deltas(("reasoning_content", "think"), ("content", "answer"))
    got = continued.feed(b"".join(map(chunk, again)))
    assert [json.loads(one[6:])["choices"][0]["delta"] for one in got.split(b"\n\n") if one] == [{"content": "wer"}]


@pytest.mark.parametrize("path", PATHS)
def test_another_text_than_the_client_has_is_noticed(path: bytes) -> None:
    delivered = kept(path, stream_events(path, ["one", " two"], "r1", None)).delivered()
    assert delivered is not None
    continued = ContinuedStream(path, delivered, b"", is_chunked=True)
    assert continued.feed(b"".join(map(chunk, stream_events(path, ["one", " ten", " x"], "r2", None)))) == b""
    assert continued.has_differed


def test_increments_of_generate_are_cut_too() -> None:
    def increments(pairs: list[tuple[str, int]]) -> list[bytes]:
        events = []
        for number, (text, token) in enumerate(pairs, 1):
            meta = {"id": "r", "finish_reason": None, "completion_tokens": number}
            events.append(event({"text": text, "output_ids": [token], "meta_info": meta}))
        return events

    pairs = [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    delivered = kept(GENERATE, increments(pairs[:2])).delivered()
    assert delivered is not None
    assert (delivered.ids, delivered.texts, delivered.is_cumulative) == ([1, 2], {"text": "ab"}, False)
    meta = {"id": "r2", "finish_reason": None, "completion_tokens": 3}
    merged = event({"text": "abc", "output_ids": [1, 2, 3], "meta_info": meta})
    continued = ContinuedStream(GENERATE, delivered, b"", is_chunked=False)
    got = continued.feed(chunk(merged) + chunk(increments(pairs)[3]))
    rest = [json.loads(one[6:]) for one in got.split(b"\n\n") if one]
    assert [(one["text"], one["output_ids"], one["meta_info"]["id"]) for one in rest] == [
        ("c", [3], "r"),
        ("d", [4], "r"),
    ]


def test_the_clients_own_id_stays_its_own() -> None:
    delivered = Delivered([1], {"text": "a"}, "mine-00ff", 7, False, False)
    continued = ContinuedStream(COMPLETIONS, delivered, b"-00ff", is_chunked=False)
    got = continued.feed(b"".join(map(chunk, stream_events(COMPLETIONS, ["a", "b"], "mine-0100", None))))
    assert json.loads(got[6:])["id"] == "mine"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {}, True),
        (COMPLETIONS, {"stop": ["x"], "echo": True, "temperature": 1.0}, True),
        (GENERATE, {"sampling_params": {"temperature": 0.5, "frequency_penalty": 0.0}}, True),
        (CHAT, {"tools": [], "logprobs": False, "repetition_penalty": 1.0, "response_format": None}, True),
        (CHAT, {"response_format": {"type": "text"}}, True),
        (CHAT, {"response_format": {"type": "json_object"}}, False),
        (CHAT, {"tools": [{"type": "function"}]}, True),
        (CHAT, {"tools": [{"type": "function"}], "tool_choice": "auto"}, True),
        (CHAT, {"tools": [{"type": "function"}], "tool_choice": "required"}, False),
        (CHAT, {"tools": [{"type": "function"}], "tool_choice": {"type": "function"}}, False),
        (CHAT, {"logprobs": True}, False),
        (COMPLETIONS, {"logprobs": 0}, False),
        (COMPLETIONS, {"regex": "a*"}, False),
        (COMPLETIONS, {"presence_penalty": 0.1}, False),
        (COMPLETIONS, {"n": 2}, False),
        (COMPLETIONS, {"prompt": ["a", "b"]}, False),
        (COMPLETIONS, {"stream": False}, False),
        (GENERATE, {"return_logprob": True}, False),
        (GENERATE, {"sampling_params": {"json_schema": "{}"}}, False),
        (GENERATE, {"image_data": "x"}, False),
        (b"/v1/responses", {}, False),
        (b"/v1/messages", {}, False),
    ],
)
def test_which_streams_may_go_on(path: bytes, body: dict[str, Any], expected: bool) -> None:
    prompts = {
        COMPLETIONS: {"prompt": "x"},
        GENERATE: {"text": "x"},
        b"/v1/responses": {"input": "x"},
    }
    given = {"stream": True, **prompts.get(path, {"messages": [{"role": "user", "content": "x"}]}), **body}
    assert may_migrate(path, given, measure(path, given)) is expected
