"""Types and ranges of the fields that the router knows; what it does not know is not its business."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.request_fields import check_detokenise, check_field_types, check_tokenise

CHAT, COMPLETIONS, RESPONSES, GENERATE = b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/generate"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"stream": 1}, "stream"),
        (CHAT, {"stream": None}, "stream"),
        (CHAT, {"temperature": "0.7"}, "temperature"),
        (CHAT, {"temperature": True}, "temperature"),
        (CHAT, {"temperature": -0.1}, "temperature"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"top_k": 1 << 31}, "top_k"),
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"top_k": 0}, "top_k"),
        (CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"repetition_penalty": 1e-300}, "repetition_penalty"),
        (CHAT, {"logit_bias": {"5": 1e308}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": "x"}}, "logit_bias"),
        (CHAT, {"logit_bias": [1]}, "logit_bias"),
        (GENERATE, {"sampling_params": {"logit_bias": {"5": -1e99}}}, "sampling_params.logit_bias"),
        (COMPLETIONS, {"temperature": None}, "temperature"),
        (COMPLETIONS, {"echo": "yes"}, "echo"),
        (COMPLETIONS, {"seed": 1 << 63}, "seed"),
        (RESPONSES, {"max_output_tokens": 2}, "max_output_tokens"),
        (RESPONSES, {"store": "no"}, "store"),
        (GENERATE, {"stream": "true"}, "stream"),
        (GENERATE, {"sampling_params": 5}, "sampling_params"),
        (GENERATE, {"sampling_params": {"n": None}}, "sampling_params.n"),
        (GENERATE, {"sampling_params": [{}, {"top_p": 1.1}]}, "sampling_params.top_p"),
    ],
)
def test_what_is_not_as_the_document_says_is_refused_by_name(path: bytes, body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        check_field_types(path, body)
    assert refused.value.param == field
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"max_tokens": 16.0, "temperature": 0, "top_p": 1, "top_k": -1, "seed": None, "stop": ["a"]}),
        (CHAT, {"whatever": object, "tools": "x"}),
        (CHAT, {"stream_options": None, "stream": True}),
        (CHAT, {"logit_bias": {"5": -100, "6": 1.5}}),
        (CHAT, {"logit_bias": None}),
        (COMPLETIONS, {"prompt": None, "logprobs": None, "n": 3}),
        (RESPONSES, {"input": 1, "temperature": None, "metadata": {}}),
        (GENERATE, {"sampling_params": None}),
        (GENERATE, {"sampling_params": [None, {"max_new_tokens": 0, "regex": 5}]}),
        (GENERATE, {"temperature": "not a field here"}),
    ],
)
def test_everything_else_is_passed_on(path: bytes, body: dict[str, Any]) -> None:
    check_field_types(path, body)


def test_a_body_to_tokenise() -> None:
    check_tokenise({"prompt": ["a", "b"], "model": "m"})
    check_tokenise({"messages": [{"role": "user", "content": "x"}]})
    check_tokenise({"messages": [{"role": "user", "content": "x"}], "prompt": None, "tools": None})
    check_tokenise({"prompt": "a", "messages": None, "tool_choice": None, "add_generation_prompt": None})
    check_detokenise({"tokens": []})
    check_detokenise({"tokens": [[1, 2], []]})
    for body in (
        *({"messages": None}, {"prompt": None}, {"prompt": None, "messages": None}, {}),
        *({"prompt": "a", "messages": []}, {"prompt": "a", "add_special_tokens": None}),
    ):
        with pytest.raises(BadRequestError):
            check_tokenise(body)
    for tokens in (None, "1", [1.0], [[1], [True]], [1 << 32]):
        with pytest.raises(BadRequestError):
            check_detokenise({"tokens": tokens})
