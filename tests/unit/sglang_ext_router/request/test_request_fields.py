"""Types and ranges of the fields that the router knows; what it does not know is not its business."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.request_fields import check_detokenise, read_fields

CHAT, COMPLETIONS, RESPONSES, GENERATE = b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/generate"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"stream": None}, "stream"),
        (CHAT, {"stream": 2}, "stream"),
        (CHAT, {"stream": "x"}, "stream"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": "nan"}, "temperature"),
        (CHAT, {"temperature": -0.1}, "temperature"),
        (CHAT, {"temperature": "-0.1"}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (CHAT, {"top_k": 1 << 31}, "top_k"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"repetition_penalty": 1e-300}, "repetition_penalty"),
        (CHAT, {"logit_bias": {"5": 1e308}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": "x"}}, "logit_bias"),
        (CHAT, {"logit_bias": [1]}, "logit_bias"),
        (GENERATE, {"sampling_params": {"logit_bias": {"5": -1e99}}}, "sampling_params.logit_bias"),
        (COMPLETIONS, {"temperature": None}, "temperature"),
        (COMPLETIONS, {"seed": 1 << 63}, "seed"),
        (RESPONSES, {"max_output_tokens": 2}, "max_output_tokens"),
        (GENERATE, {"stream": "true"}, "stream"),
        (GENERATE, {"stream": 1}, "stream"),
        (GENERATE, {"custom_labels": {"team": "a"}}, "custom_labels"),
        (GENERATE, {"lora_id": ["a"]}, "lora_id"),
        (GENERATE, {"positional_embed_overrides": 0}, "positional_embed_overrides"),
        (GENERATE, {"http_worker_ipc": "ipc:///x"}, "http_worker_ipc"),
        (GENERATE, {"text": "a", "return_hidden_states": []}, "return_hidden_states"),
        (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": []}, "top_logprobs_num"),
        (GENERATE, {"input_ids": [5], "return_logprob": True, "top_logprobs_num": [1]}, "top_logprobs_num"),
        (GENERATE, {"text": ["a", "b"], "logprob_start_len": [0]}, "logprob_start_len"),
        (GENERATE, {"input_ids": [[5], [6]], "return_logprob": [True]}, "return_logprob"),
        (GENERATE, {"input_embeds": [[0.5]], "return_logprob": [True]}, "return_logprob"),
        (GENERATE, {"text": "a", "token_ids_logprob": [[5]]}, "token_ids_logprob"),
        (GENERATE, {"text": "a", "rid": ["a"], "stream": True}, "rid"),
        (GENERATE, {"text": "a", "sampling_params": [{}], "stream": True}, "sampling_params"),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        (GENERATE, {"text": ["a", "b"], "token_ids_logprob": [[5]]}, "token_ids_logprob"),
        (GENERATE, {"text": ["a", "b"], "token_ids_logprob": [[5], 6]}, "token_ids_logprob"),
        (GENERATE, {"sampling_params": {"n": True}}, "sampling_params.n"),
        (GENERATE, {"sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
        (GENERATE, {"sampling_params": 5}, "sampling_params"),
        (GENERATE, {"sampling_params": {"n": None}}, "sampling_params.n"),
        (GENERATE, {"sampling_params": [{}, {"top_p": 1.1}]}, "sampling_params.top_p"),
    ],
)
def test_what_is_not_as_the_document_says_is_refused_by_name(path: bytes, body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_fields(path, body)
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
        (GENERATE, {"custom_labels": {}, "lora_id": None}),
        (GENERATE, {"text": ["a", "b"], "top_logprobs_num": [1, 2], "return_logprob": [True, False]}),
        (GENERATE, {"input_ids": [[5], [6]], "logprob_start_len": [0, 1], "token_ids_logprob": [[5], [6]]}),
        (GENERATE, {"input_embeds": [[[0.5]], [[0.5]]], "return_hidden_states": [True, False]}),
        (GENERATE, {"text": ["a"], "return_logprob": [True], "token_ids_logprob": [5, 6]}),
        (GENERATE, {"text": "a", "token_ids_logprob": []}),
        (GENERATE, {"custom_labels": None}),
        (GENERATE, {"sampling_params": {"top_k": 0, "temperature": 0}}),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [None, {"max_new_tokens": 0, "regex": 5}]}),
        (GENERATE, {"temperature": "not a field here"}),
    ],
)
def test_everything_else_is_passed_on(path: bytes, body: dict[str, Any]) -> None:
    read_fields(path, body)


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        (CHAT, {"stream": 1, "n": "2", "temperature": "0.7"}, {"stream": True, "n": 2, "temperature": 0.7}),
        (CHAT, {"stream_options": {"include_usage": 1}}, {"stream_options": {"include_usage": True}}),
        (CHAT, {"logit_bias": {"5": "1"}, "logprobs": "yes"}, {"logit_bias": {"5": 1.0}, "logprobs": True}),
        (COMPLETIONS, {"echo": "yes", "logprobs": True}, {"echo": True, "logprobs": 1}),
        (COMPLETIONS, {"max_tokens": " 7 ", "seed": 5.0}, {"max_tokens": 7, "seed": 5}),
        (RESPONSES, {"store": "no", "max_output_tokens": "16"}, {"store": False, "max_output_tokens": 16}),
    ],
)
def test_what_sglang_reads_of_another_type_is_read_likewise(
    path: bytes, body: dict[str, Any], read: dict[str, Any]
) -> None:
    read_fields(path, body)
    assert body == read
    assert [type(value) for value in body.values()] == [type(value) for value in read.values()]


def test_token_ids_to_detokenise() -> None:
    for tokens in ([], [[1, 2], []], [1, "2"], [1.0], [True], None, "1", [[1], 2], [1.5]):
        check_detokenise({"tokens": tokens})  # the instance refuses some
    for tokens in ([1 << 32], [-1], [[1], [-1]], ["-1"]):
        with pytest.raises(BadRequestError):
            check_detokenise({"tokens": tokens})
