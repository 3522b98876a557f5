"""A line of input becomes a request, or a finding that names the field."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from sglang_ext.batch.lines import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    LineError,
    LineOptions,
    Mode,
    make_line,
    parse_line,
)

GENERATING = LineOptions(model="m")
SCORING = LineOptions(Mode.SCORE, top_logprobs=8)


def openai_line(**changes: Any) -> dict[str, Any]:
    body = {"model": "x", "messages": [{"role": "user", "content": "hello"}]}
    return {"custom_id": "a", "method": "POST", "url": CHAT, "body": body, **changes}


def test_an_openai_line_is_sent_as_it_is() -> None:
    content = openai_line()
    line = parse_line(content, GENERATING, "in.jsonl", 3)
    assert (line.custom_id, line.path, line.place) == ("a", CHAT, "in.jsonl:3")
    assert orjson.loads(line.body) == content["body"]


@pytest.mark.parametrize(
    ("content", "path", "body"),
    [
        ({"prompt": "p", "max_tokens": 3}, COMPLETIONS, {"prompt": "p", "max_tokens": 3, "model": "m"}),
        ({"prompt": [1, 2]}, COMPLETIONS, {"prompt": [1, 2], "model": "m"}),
        (
            {"messages": [{"role": "user", "content": "q"}], "model": "own"},
            CHAT,
            {"messages": [{"role": "user", "content": "q"}], "model": "own"},
        ),
        ({"text": "t", "sampling_params": {"n": 1}}, GENERATE, {"text": "t", "sampling_params": {"n": 1}}),
        ({"token_ids": [1, 2, 3]}, GENERATE, {"input_ids": [1, 2, 3]}),
    ],
)
def test_a_plain_line_becomes_a_request_with_an_id_of_its_place(
    content: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    line = parse_line(content, GENERATING, "in.jsonl", 3)
    assert (line.custom_id, line.path) == ("in.jsonl:3", path)
    assert orjson.loads(line.body) == body
    assert parse_line({**content, "custom_id": "own"}, GENERATING).custom_id == "own"


def test_defaults_fill_what_a_line_lacks() -> None:
    options = LineOptions(defaults={"max_tokens": 5, "model": "d"})
    assert orjson.loads(parse_line({"prompt": "p"}, options).body) == {"prompt": "p", "max_tokens": 5, "model": "d"}
    assert orjson.loads(parse_line({"prompt": "p", "max_tokens": 9}, options).body)["max_tokens"] == 9


def test_a_text_says_how_it_is_sampled_as_generate_has_it() -> None:
    options = LineOptions(defaults={"max_tokens": 5})
    with pytest.raises(LineError, match=r"max_tokens: /generate takes it as sampling_params\.max_new_tokens only"):
        parse_line({"text": "t"}, options)
    given = {"sampling_params": {"max_new_tokens": 5}}
    assert orjson.loads(parse_line({"text": "t"}, LineOptions(defaults=given)).body) == {"text": "t", **given}


def test_an_id_to_score_by_is_called_by_its_name() -> None:
    with pytest.raises(LineError, match=r"did you mean custom_id\?"):
        parse_line({"id": "a", "text": "t"}, SCORING)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([1], ""),
        ({}, ""),
        ({"prompt": "p", "text": "t"}, "text"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": "p", "custom_id": 7}, "custom_id"),
        ({"prompt": "p", "custom_id": "x" * 600}, "custom_id"),
        ({"prompt": "p", "stream": True}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "hello"}]}, "messages[0].role"),
        (openai_line(custom_id=None), "custom_id"),
        (openai_line(custom_id=""), "custom_id"),
        (openai_line(method="GET"), "method"),
        (openai_line(url=None), "url"),
        (openai_line(url="/v1/moderations"), "url"),
        (openai_line(body=None), "body"),
        (openai_line(body="{"), "body"),
        (openai_line(body=[]), "body"),
        (openai_line(body={"model": "m"}), "body.messages"),
        (openai_line(body={"model": 3, "messages": [{"role": "user", "content": "x"}]}), "body.model"),
        (openai_line(body={**openai_line()["body"], "stream": True}), "body.stream"),
        (openai_line(url=COMPLETIONS), "body.prompt"),
        ({"text": "t", "max_tokens": 9}, "max_tokens"),
        ({"token_ids": [1], "temperature": 0}, "temperature"),
        (openai_line(url=GENERATE, body={"text": "t", "max_new_tokens": 9}), "body.max_new_tokens"),
    ],
)
def test_what_is_wrong_is_named(content: object, field: str) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(content, GENERATING)
    assert caught.value.field == field


def test_a_model_must_come_from_somewhere() -> None:
    with pytest.raises(LineError, match=r"model: is missing; name it in the line or with --model"):
        parse_line({"prompt": "p"}, LineOptions())


def test_lengths_are_what_the_router_will_estimate() -> None:
    assert parse_line({"prompt": "x" * 4000}, GENERATING).prompt_tokens == 1000
    assert parse_line({"token_ids": list(range(700))}, GENERATING).prompt_tokens == 700
    assert parse_line({"prompt": ["ab", "x" * 400]}, GENERATING).prompt_tokens == 100


def test_lines_that_begin_alike_have_keys_that_begin_alike() -> None:
    first, second, other = (
        parse_line(
            {"messages": [{"role": "system", "content": text * 20}, {"role": "user", "content": user}]}, GENERATING
        )
        for text, user in (("be brief", "one"), ("be brief", "two"), ("be long!", "one"))
    )
    assert first.sort_key[:4] == second.sort_key[:4] != other.sort_key[:4]


def test_a_sequence_to_score_asks_for_all_of_its_positions() -> None:
    line = parse_line({"token_ids": [5, 6, 7], "prompt_len": 2}, SCORING, "s.jsonl", 1)
    assert (line.custom_id, line.path, line.prompt_len) == ("s.jsonl:1", GENERATE, 2)
    assert orjson.loads(line.body) == {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 8,
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }
    candidates = orjson.loads(parse_line({"text": "abc", "candidate_ids": [4, 2]}, SCORING).body)
    assert candidates["text"] == "abc"
    assert candidates["token_ids_logprob"] == [4, 2]
    assert "top_logprobs_num" not in candidates


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1], "text": "a"}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [1 << 31]}, "token_ids"),
        ({"text": ""}, "text"),
        ({"token_ids": [1], "prompt_len": 2}, "prompt_len"),
        ({"token_ids": [1], "prompt_len": "1"}, "prompt_len"),
        ({"token_ids": [1], "candidate_ids": []}, "candidate_ids"),
        ({"token_ids": [1], "candidate_ids": list(range(257))}, "candidate_ids"),
        ({"token_ids": [1], "prompt_length": 1}, "prompt_length"),
        (openai_line(), "method"),
    ],
)
def test_what_is_wrong_with_a_sequence_is_named(content: object, field: str) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(content, SCORING)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": Mode.SCORE, "top_logprobs": 257}, "--top-logprobs"),
        ({"top_logprobs": 3}, "--top-logprobs"),
        ({"defaults": {"stream": True}}, "--defaults: stream"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LineOptions(**options)


def test_a_made_line_needs_a_prompt() -> None:
    assert make_line("a", GENERATE, {"input_ids": [1, 2]}).prompt_tokens == 2
    with pytest.raises(LineError):
        make_line("a", GENERATE, {"input_ids": []})


SAID = [{"role": "user", "content": [{"type": "text", "text": "u" * 40}, {"type": "image"}]}]


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (MESSAGES, {"max_tokens": 5, "messages": SAID, "system": [{"type": "text", "text": "s" * 80}]}, 32),
        (MESSAGES, {"max_tokens": 5, "messages": SAID, "system": "s" * 80}, 32),
        (RESPONSES, {"input": "u" * 40, "instructions": "s" * 79}, 30),
        (RESPONSES, {"input": [*SAID, {"type": "function_call_output", "output": "o" * 39}]}, 20),
        (EMBEDDINGS, {"input": "u" * 40}, 10),
        (EMBEDDINGS, {"input": ["u" * 8, "u" * 40]}, 10),
        (EMBEDDINGS, {"input": [5, 6, 7]}, 3),
        (EMBEDDINGS, {"input": [[5, 6, 7], [5, 6, 7, 8]]}, 4),
        (EMBEDDINGS, {"input": [{"text": "u" * 40, "image": "i"}]}, 10),
    ],
)
def test_lines_of_every_path_are_sent_as_they_are_and_measured(path: str, body: dict[str, Any], tokens: int) -> None:
    line = parse_line(openai_line(url=path, body=body), GENERATING)
    assert (line.path, line.prompt_tokens) == (path, tokens)
    assert orjson.loads(line.body) == {**body, "model": "m"}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (MESSAGES, {"messages": SAID}, "body.max_tokens: is missing, and /v1/messages needs it"),
        (MESSAGES, {"max_tokens": 5}, "body.messages: is missing"),
        (RESPONSES, {"instructions": "s"}, "body.input: is missing"),
        (RESPONSES, {"input": []}, "body.input: must be a text or a list that is not empty"),
        (RESPONSES, {"input": ["a"]}, r"body.input\[0\]: must be an object, is a text"),
        (RESPONSES, {"input": "a", "background": True}, "body.background: "),
        (EMBEDDINGS, {"input": []}, "body.input: is empty"),
        (EMBEDDINGS, {"input": [[1, "a"]]}, "body.input: holds"),
    ],
)
def test_lines_of_every_path_that_cannot_be_sent(path: str, body: dict[str, Any], reason: str) -> None:
    with pytest.raises(LineError, match=reason):
        parse_line(openai_line(url=path, body=body), GENERATING)
