"""A whole number may come as 16.0 in every field: the router reads it as SGLang does, and passes it on as it came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext_router.request.prepared_request import ReadBody, read_body
from sglang_ext_router.request.prompt import BadRequestError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "def parse("}
GENERATE = {"text": "a"}
# path, body, and fields with whole numbers
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/completions", {**COMPLETION, "echo": True}, {"logprobs": 1, "max_tokens": 1}),
    ("/v1/completions", {**COMPLETION, "echo": True}, {"logprobs": 3, "max_tokens": 4}),
    ("/v1/completions", {**COMPLETION, "echo": True}, {"logprobs": 1, "max_tokens": 0}),
    ("/v1/completions", COMPLETION, {"n": 3, "seed": 7, "top_k": 5}),
    ("/v1/completions", COMPLETION, {"prompt_logprobs": 2, "max_tokens": 1}),
    ("/v1/completions", COMPLETION, {"prompt_logprobs": 0, "max_tokens": 8, "logprobs": 2}),
    ("/v1/chat/completions", CHAT, {"n": 1, "max_tokens": 2}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True}, {"top_logprobs": 3, "max_completion_tokens": 5}),
    ("/v1/responses", {"model": "m", "input": "a"}, {"max_output_tokens": 5}),
    ("/generate", {**GENERATE, "return_logprob": True}, {"top_logprobs_num": 4, "logprob_start_len": 0}),
    (
        "/generate",
        {"text": ["a", "b"], "return_logprob": True},
        {"top_logprobs_num": [4, 2], "logprob_start_len": [0, 1]},
    ),
]


def read(path: str, body: dict[str, Any]) -> ReadBody:
    return read_body(path.encode(), json.dumps(body).encode(), True)


def as_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [as_floats(item) for item in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize(("path", "body", "fields"), CASES)
def test_it_is_understood_as_the_integer(path: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    whole, given = read(path, {**body, **fields}), read(path, {**body, **as_floats(fields)})
    assert (given.prompt, given.scores, given.target) == (whole.prompt, whole.scores, whole.target)
    if given.target is not None:  # asked in SGLang's own words
        assert json.loads(given.clean.raw) == json.loads(whole.clean.raw)
        assert b".0" not in given.clean.raw


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("form", [lambda one: one, lambda one: [one]])
def test_of_sampling_parameters_too(samples: int, form: Any) -> None:
    def parameters(n: float, tokens: float) -> dict[str, Any]:
        return {"text": ["a"], "return_logprob": True, "sampling_params": form({"n": n, "max_new_tokens": tokens})}

    whole = read("/generate", parameters(samples, 1))
    given = read("/generate", parameters(float(samples), 1.0))
    assert (given.prompt, given.scores) == (whole.prompt, whole.scores)
    assert given.prompt.samples_per_prompt == samples


@pytest.mark.parametrize(
    ("path", "field", "ids"),
    [
        ("/v1/completions", "prompt", [1, 2, 3]),
        ("/v1/completions", "prompt", [[1, 2], [3]]),
        ("/generate", "input_ids", [1, 2, 3]),
        ("/generate", "input_ids", [[1, 2], [3]]),
    ],
)
def test_of_token_ids_too(path: str, field: str, ids: Any) -> None:
    assert read(path, {field: as_floats(ids)}).prompt == read(path, {field: ids}).prompt


def test_what_the_client_wrote_goes_on() -> None:
    raw = b'{"prompt": "a", "max_tokens": 2.0, "temperature": 1.0}'
    assert read_body(b"/v1/completions", raw, False).clean.raw == raw


@pytest.mark.parametrize("field", ["n", "max_tokens", "logprobs", "seed", "top_k"])
@pytest.mark.parametrize("value", [1.5, -0.5])
def test_a_fraction_is_none(field: str, value: float) -> None:
    with pytest.raises(BadRequestError) as caught:
        read("/v1/completions", {**COMPLETION, field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("value", [1e300, -1e300, 2.0**63])
def test_a_number_beyond_all_integers_stays_what_it_is(value: float) -> None:
    """As an integer it could not be written again for the instances."""
    body = read("/generate", {**GENERATE, "sampling_params": {"unknown": value}, "other": value})
    assert body.hint_field is not None
    assert body.hint_field.given == {"unknown": value}
    assert json.loads(body.hint_field.clean.raw)["other"] == value
