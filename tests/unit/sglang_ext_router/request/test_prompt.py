"""What the router reads of a body, and what it writes into it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.prefix_index import BLOCK_BYTES
from sglang_ext_router.request.prompt import (
    MAX_SEQUENCES,
    BadRequestError,
    beginnings,
    measure,
    parse_body,
)
from sglang_ext_router.request.relay import find_int
from sglang_ext_router.request.request_body import CleanBody, body_end, clean_body
from sglang_ext_router.request.request_ids import abort_ids

PD_KEYS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid")
BOOTSTRAP = b'"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":'
ROOM = 0x1234_5678_9ABC
ROOM_ID = b"%016x" % ROOM

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.one_of(st.sampled_from([*PD_KEYS, "bootstrap_other", "text"]), st.text(max_size=8))
CLIENT_IDS = st.one_of(st.none(), st.text(max_size=9), st.lists(st.text(max_size=4), max_size=3))
BODIES = st.dictionaries(KEYS, VALUES, max_size=6)


def encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def with_bootstrap(clean: CleanBody, bootstrap_json: bytes, room: int, made_id: bytes) -> bytes:
    return clean.raw[: clean.raw.rindex(b"}")] + body_end(clean, b"", bootstrap_json, room, made_id)


def injected(raw: bytes) -> dict[str, Any]:
    """The body that the instances get, parsed as they would, with no key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(pairs)

    sent = with_bootstrap(clean_body(raw, parse_body(raw)), BOOTSTRAP, ROOM, ROOM_ID)
    parsed = json.loads(sent, object_pairs_hook=once)
    assert isinstance(parsed, dict)
    return parsed


def check_fields(sent: dict[str, Any], expected_rest: dict[str, Any]) -> None:
    assert sent["bootstrap_host"] == "10.0.0.1"
    assert sent["bootstrap_port"] == 8998
    assert sent["bootstrap_room"] == ROOM
    assert {key: value for key, value in sent.items() if key not in PD_KEYS} == expected_rest


@pytest.mark.slow
@given(
    body=BODIES.filter(encodable),
    rid=CLIENT_IDS.filter(encodable),
    indent=st.sampled_from([None, 0, 2, "\t"]),
    ascii_only=st.booleans(),
    around=st.sampled_from([b"", b" ", b"\r\n\t "]),
)
def test_any_body_keeps_its_fields_and_gets_ours(
    body: dict[str, Any], rid: Any, indent: Any, ascii_only: bool, around: bytes
) -> None:
    body = {**body, "rid": rid}
    raw = around + json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode() + around
    sent = injected(raw)
    check_fields(sent, {key: value for key, value in body.items() if key not in PD_KEYS})
    room_id = ROOM_ID.decode()
    if rid is None:
        assert sent["rid"] == room_id
    elif isinstance(rid, str):
        assert sent["rid"].startswith(rid)
        assert sent["rid"].endswith(room_id)
    else:
        assert [one.removesuffix("-" + room_id) for one in sent["rid"]] == rid


@pytest.mark.parametrize(
    "raw",
    [
        b'{"text":"x","bootstrap_room":7,"bootstrap_host":"evil","bootstrap_port":1}',
        b'{"bootstrap_room":7,"text":"x","bootstrap_room":8}',
        b'{"boot\\u0073trap_room":7,"text":"x"}',
        b'{"\\u0062\\u006f\\u006ftstrap_room":7,"text":"x","bootstrap_host":null}',
        b'{"text":"x","bootstrap_room":[1,2]}',
        b'{"text":"x","rid":null}',
        b'{"text":"x","rid":"a","rid":null}',
        b'{"r\\u0069d":null,"text":"x"}',
        b' {"text":"x"} ',
        b'{"text":"x"\n}',
    ],
)
def test_spellings_that_could_slip_through(raw: bytes) -> None:
    sent = injected(raw)
    check_fields(sent, {"text": "x"})
    assert sent["rid"] == ROOM_ID.decode()


def test_fields_of_that_name_deeper_in_the_body_are_the_clients() -> None:
    body = {"text": "x", "custom": {"bootstrap_room": 1, "rid": "r"}}
    check_fields(injected(json.dumps(body).encode()), body)


def test_an_empty_object() -> None:
    sent = with_bootstrap(clean_body(b"{ }", {}), BOOTSTRAP, ROOM, ROOM_ID)
    assert json.loads(sent)["bootstrap_room"] == ROOM
    sent = with_bootstrap(clean_body(b'{"rid":"a"}', {"rid": "a"}), BOOTSTRAP, ROOM, ROOM_ID)
    check_fields(json.loads(sent), {})


@pytest.mark.parametrize("rid", [5, 1.5, True, {"a": 1}, [1], ["a", None]])
def test_ids_that_are_no_strings_are_refused(rid: object) -> None:
    with pytest.raises(BadRequestError) as caught:
        clean_body(json.dumps({"rid": rid}).encode(), {"rid": rid})
    assert caught.value.param == "rid"


@pytest.mark.slow
@given(rids=st.tuples(CLIENT_IDS.filter(encodable), CLIENT_IDS.filter(encodable)), samples=st.integers(1, 3))
def test_aborting_one_request_never_names_another(rids: tuple[Any, Any], samples: int) -> None:
    """SGLang aborts every request whose id begins with the one to abort."""
    sent = []
    for number, rid in enumerate(rids):
        body = {"rid": rid}
        clean = clean_body(json.dumps(body).encode(), body)
        room_id = b"%016x" % (ROOM + number)
        ids = json.loads(with_bootstrap(clean, BOOTSTRAP, ROOM + number, room_id))["rid"]
        sent.append((ids, abort_ids(clean.request_ids, room_id, samples, samples, False)))
    (ids, aborted), (other_ids, _) = sent
    others = other_ids if isinstance(other_ids, list) else [other_ids]
    assert not [other for other in others for one in aborted if other.startswith(one)]
    # and every sequence of the request itself is named; SGLang calls those of a batch ID_0, ID_1, ...
    bases = ids if isinstance(ids, list) else [ids]
    assert aborted == (bases if samples == 1 else [f"{base}_{i}" for base in bases for i in range(samples)])


# -- measuring ------------------------------------------------------------------------------------------------


def test_a_text() -> None:
    prompt = measure(b"/generate", {"text": "é" * 300, "stream": True})
    assert (prompt.text_bytes, prompt.longest_bytes, prompt.known_tokens) == (600, 600, None)
    assert (prompt.sequence_count, prompt.samples_per_prompt, prompt.is_stream) == (1, 1, True)
    assert len(prompt.hashes) == 600 // BLOCK_BYTES
    assert prompt.texts == ("é" * 300,)


def test_a_batch_counts_all_items_and_its_longest() -> None:
    prompt = measure(b"/v1/completions", {"prompt": ["ab", "abcd", ""], "n": 2})
    assert (prompt.text_bytes, prompt.longest_bytes) == (6, 4)
    assert (prompt.sequence_count, prompt.samples_per_prompt) == (6, 2)
    assert not prompt.is_stream


def test_token_ids_are_known_exactly() -> None:
    prompt = measure(b"/generate", {"input_ids": [[1, 2, 3], [4]]})
    assert (prompt.known_tokens, prompt.longest_known_tokens, prompt.longest_bytes) == (4, 3, 0)
    assert prompt.texts == ()
    one = measure(b"/v1/completions", {"prompt": [1, 2, 3]})
    assert (one.known_tokens, one.sequence_count) == (3, 1)


def test_a_chat_is_all_that_the_template_will_see() -> None:
    messages = [
        {"role": "system", "content": "S" * 10},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "U" * 20},
                {"type": "image_url", "image_url": {"url": "data:" + "A" * 9999}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "T" * 30}}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "D" * 40}}]
    (text,) = measure(b"/v1/chat/completions", {"messages": messages, "tools": tools}).texts
    for letter, count in (("S", 10), ("U", 20), ("T", 30), ("D", 40)):
        assert letter * count in text
    assert "A" * 9999 not in text


@pytest.mark.slow
@given(first=st.text(min_size=300, max_size=600), second=st.text(max_size=300))
def test_prompts_with_a_common_beginning_share_their_first_hashes(first: str, second: str) -> None:
    short = measure(b"/generate", {"text": first}).hashes
    long = measure(b"/generate", {"text": first + second}).hashes
    assert long[: len(short)] == short


def test_conversations_share_hashes_from_turn_to_turn() -> None:
    turns = [{"role": "user", "content": "word " * 200}]
    before = measure(b"/v1/chat/completions", {"messages": turns}).hashes
    turns += [{"role": "assistant", "content": "answer " * 50}, {"role": "user", "content": "more"}]
    after = measure(b"/v1/chat/completions", {"messages": turns}).hashes
    assert len(before) >= 3
    assert after[: len(before)] == before


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        (b"/generate", {"text": "x", "sampling_params": None}, 1),
        (b"/generate", {"text": "x", "sampling_params": {"n": 3}}, 3),
        (b"/generate", {"text": ["x", "y"], "sampling_params": [{"n": 3}, {"n": 3}]}, 6),
        (b"/generate", {"text": ["x", "y"], "sampling_params": []}, 2),
        (b"/generate", {"text": "x", "n": 3}, 1),  # no field of this path
        (b"/generate", {"input_embeds": [[0.1, 0.2]]}, 1),
        (b"/generate", {"input_embeds": [[[0.1]], [[0.2]]]}, 2),
        (b"/v1/completions", {"prompt": [[1], [2], [3]]}, 3),
        (b"/v1/chat/completions", {"messages": [{"role": "user", "content": ""}], "n": 2}, 2),
        (b"/generate", {"text": ["x"] * MAX_SEQUENCES}, MAX_SEQUENCES),
    ],
)
def test_the_number_of_sequences(path: bytes, body: dict[str, Any], sequences: int) -> None:
    assert measure(path, body).sequence_count == sequences


def test_too_many_sequences() -> None:
    with pytest.raises(BadRequestError, match="sequences"):
        measure(b"/v1/completions", {"prompt": ["x", "y"], "n": MAX_SEQUENCES})


@pytest.mark.slow
@given(path=st.sampled_from([b"/generate", b"/v1/completions", b"/v1/chat/completions"]), body=BODIES)
def test_any_object_is_measured_or_refused(path: bytes, body: dict[str, Any]) -> None:
    try:
        prompt = measure(path, body)
    except BadRequestError:
        return
    assert prompt.sequence_count >= 1


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "text": VALUES,
        "input_ids": VALUES,
        "input_embeds": VALUES,
        "prompt": VALUES,
        "n": VALUES,
        "sampling_params": VALUES | st.dictionaries(st.just("n"), VALUES),
        "messages": VALUES | st.lists(st.fixed_dictionaries({}, optional={"role": VALUES, "content": VALUES})),
        "tools": VALUES,
    },
)


@pytest.mark.slow
@given(path=st.sampled_from([b"/generate", b"/v1/completions", b"/v1/chat/completions"]), body=FIELDS)
def test_known_fields_of_any_type_are_measured_or_refused(path: bytes, body: dict[str, Any]) -> None:
    test_any_object_is_measured_or_refused.hypothesis.inner_test(path, body)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a":{"prompt_tokens":12}}', 12),
        (b'{"prompt_tokens" : 12}', None),
        (b'{"prompt_tokens": 12 }', 12),
        (b'{"prompt_tokens":1,"b":{"prompt_tokens":34}}', 34),
        (b'{"prompt_tokens":null}', None),
        (b'{"prompt_tokens":', None),
        (b'{"text":"\\"prompt_tokens\\":99"}', None),
        (b"", None),
    ],
)
def test_finding_an_integer(data: bytes, value: int | None) -> None:
    assert find_int(data, b'"prompt_tokens":') == value


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
TEXT = {"type": "text", "text": "look"}
VIDEO = {"type": "video_url", "video_url": {"url": "http://x/y"}}


@pytest.mark.parametrize(
    ("path", "body", "images", "audios"),
    [
        (b"/v1/chat/completions", {"messages": [{"role": "user", "content": "image_url"}]}, 0, 0),
        (b"/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT, IMAGE, IMAGE, AUDIO]}]}, 2, 1),
        (b"/v1/chat/completions", {"messages": [{"role": "user", "content": [VIDEO, "odd", None]}]}, 16, 0),
        (b"/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 1, 0),
        (b"/v1/responses", {"input": "input_image"}, 0, 0),
        (b"/generate", {"text": "x", "image_data": "x", "audio_data": ["a", "b"]}, 1, 2),
        (b"/generate", {"text": "x", "image_data": [["a", "b"], None]}, 2, 0),
        (b"/generate", {"text": "x", "video_data": ["v"]}, 16, 0),
        (b"/v1/completions", {"prompt": "x"}, 0, 0),
    ],
)
def test_images_and_audio_are_counted(path: bytes, body: dict[str, Any], images: int, audios: int) -> None:
    prompt = measure(path, body)
    assert (prompt.images, prompt.audios) == (images, audios)


def test_beginnings_of_texts_and_of_token_ids() -> None:
    text = measure(b"/generate", {"text": "a" * 1100})
    assert [tokens for _, tokens in beginnings(text, 220)] == [51, 102, 153, 204]
    ids = measure(b"/generate", {"input_ids": [7] * 100})
    assert [tokens for _, tokens in beginnings(ids, 100)] == [32, 64, 96]
    longer = measure(b"/generate", {"text": "a" * 1024 + "b" * 500})
    assert beginnings(longer, 300)[:4] == [
        (text_hash, 256 * n * 300 // 1524) for n, text_hash in enumerate(text.hashes, 1)
    ]
