"""The router's reading of every field that it knows is SGLang's: compared with SGLang's own models, value by value."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext_router.request.prepared_request import read_body
from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.request_fields import BODIES, SESSION_FIELDS, read_fields
from support.examples import examples

VOCABULARY = 2048
MESSAGES = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 4, "messages": MESSAGES},
    "/generate": {"text": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/classify": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/v1/score": {"query": "hi", "items": ["a"]},
}
CONTENT = {"query", "documents", "items", "label_token_ids"} | {
    "messages",
    "prompt",
    "text",
    "input_ids",
    "input",
    "model",
    "system",
    "instructions",
    "sampling_params",
}
# Fields that the router adds to SGLang's.
OWN = {("/v1/completions", "prompt_logprobs")}
# What the router refuses and SGLang takes, for a reason; docs/reference/differences.md lists them.
STRICTER = {
    "n",  # below 1 SGLang fails, or gives one; above, each sequence takes a room
    "top_k",  # beyond 32 bits
    "max_tokens",
    "max_completion_tokens",
    "max_new_tokens",
    "max_output_tokens",
    "min_tokens",
    "repetition_penalty",  # near 0 logits become infinite
    "logprobs",  # of /v1/completions: below 0, above 128
    "top_logprobs",
    *("priority", "dimensions", "top_n"),  # beyond 32 or 64 bits; below 1
}
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([127, 128, 129, 257, 4096, 4097, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 2**70]),
    st.integers(-3, 40).map(float),
    st.sampled_from([0.5, 1.5, -0.5, 1e-5, 2.0000001, 1e300, 2.0**53]),
)
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    NUMBERS.map(str),
    st.sampled_from(
        ["", " 1", "1 ", "+1", "1_0", "0x1", "1e1", "01", "nan", "inf", "true", "False", "YES", "off", "x"]
    ),
    st.lists(st.one_of(st.integers(0, 3), st.text(max_size=2)), max_size=2),
    st.just({}),
)


class Reading(NamedTuple):
    """The value of a field as it is read; `is_taken` is false for a request that is refused."""

    is_taken: bool
    value: Any = None


class SGLang:
    """SGLang's models, by path, with everything that it checks before a scheduler sees the request."""

    def __init__(self) -> None:
        from pydantic import TypeAdapter
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from sglang.srt.entrypoints.api_contract import generate_contract_error
        from sglang.srt.entrypoints.openai import protocol
        from sglang.srt.managers.io_struct import GenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.models: dict[str, Callable[[Any], Any]] = {
            "/v1/chat/completions": protocol.ChatCompletionRequest.model_validate,
            "/v1/completions": protocol.CompletionRequest.model_validate,
            "/v1/responses": protocol.ResponsesRequest.model_validate,
            "/v1/messages": AnthropicMessagesRequest.model_validate,
            "/generate": TypeAdapter(GenerateReqInput).validate_python,
            "/v1/embeddings": protocol.EmbeddingRequest.model_validate,
            "/v1/classify": protocol.ClassifyRequest.model_validate,
            "/v1/rerank": protocol.V1RerankReqInput.model_validate,
            "/v1/score": protocol.ScoringRequest.model_validate,
        }
        self._contract_error = generate_contract_error
        self._sampling = SamplingParams
        self.sampling_fields = SamplingParams.__struct_fields__

    def read(self, path: str, body: dict[str, Any], field: str) -> Reading:
        """Read a body that was sent as JSON."""
        try:
            model = self.models[path](copy.deepcopy(body))
            if path == "/generate":
                return self._read_generate(body, model, field)
            self._verify(self._parameters(model))
        except (ValueError, TypeError, OverflowError):
            return Reading(False)
        value = vars(model)[field]
        return Reading(True, value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value)

    def _read_generate(self, body: dict[str, Any], model: Any, field: str) -> Reading:
        if self._contract_error(body) is not None:
            return Reading(False)
        parameters = model.sampling_params or {}
        self._verify(parameters)
        return Reading(True, parameters[field] if field in parameters else vars(model)[field])

    def _parameters(self, model: Any) -> dict[str, Any]:
        """The sampling parameters of OpenAI's and Anthropic's requests; null stands for the default."""
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed", "min_tokens": "min_new_tokens"}
        same = ("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty")
        names |= {field: field for field in (*same, "presence_penalty", "logit_bias")}
        given = vars(model)
        return {name: given[field] for field, name in names.items() if given.get(field) is not None}

    def _verify(self, parameters: Any) -> None:
        for item in parameters if isinstance(parameters, list) else [parameters]:
            self._sampling(**item).verify(VOCABULARY)


@pytest.fixture(scope="module")
def sglang(sglang_imported: None) -> SGLang:
    return SGLang()


def read_by_router(path: str, raw: bytes, field: str) -> Reading:
    try:
        read_body(path.encode(), raw, False)
        body = orjson.loads(raw)
        read_fields(path.encode(), body)
    except BadRequestError:
        return Reading(False)
    if path == "/generate" and field in (body.get("sampling_params") or {}):
        return Reading(True, body["sampling_params"][field])
    return Reading(True, body.get(field))


def fields() -> list[tuple[str, str]]:
    """Every path and field that is declared, those of SGLang's sampling parameters too."""
    named = [(path, field) for path in PATHS for field in BODIES[path]["properties"] if field not in CONTENT]
    sampling = BODIES["/generate"]["properties"]["sampling_params"]["properties"]
    return [pair for pair in named if pair not in OWN] + [("/generate", field) for field in sampling]


def with_field(path: str, field: str, value: Any) -> dict[str, Any]:
    if path == "/generate" and field not in BODIES[path]["properties"]:
        return {**PATHS[path], "sampling_params": {field: value}}
    return {**PATHS[path], field: value}


def test_every_declared_field_is_one_of_sglangs(sglang: SGLang) -> None:
    for path, field in fields():
        model = sglang.models[path](PATHS[path])
        is_parameter = path == "/generate" and field not in BODIES[path]["properties"]
        assert field in (sglang.sampling_fields if is_parameter else vars(model)), (path, field)


def check_reading(sglang: SGLang, path: str, field: str, value: Any) -> None:
    body = with_field(path, field, value)
    if field == "min_tokens":
        body["max_tokens"] = 2**31 - 1
    raw = json.dumps(body).encode()
    theirs = sglang.read(path, json.loads(raw), field)
    ours = read_by_router(path, raw, field)
    if not theirs.is_taken:
        # The instances refuse what the router leaves to them: what is in a list, 16.0 at /generate, no new tokens, and
        # a top_k that they judge by the temperature.
        is_left = isinstance(value, list) or field == "top_k" or (path == "/generate" and type(value) is float)
        is_left = is_left or ((path, field) == ("/v1/completions", "max_tokens") and ours.value == 0)
        assert not ours.is_taken or is_left, f"SGLang refuses {field}={value!r}"
    elif not ours.is_taken:
        assert field in STRICTER, f"SGLang reads {field}={value!r} as {theirs.value!r}"
    elif float in (type(theirs.value), type(ours.value)):
        assert float(ours.value) == theirs.value
    else:
        assert (type(ours.value), ours.value) == (type(theirs.value), theirs.value)


USUAL = (1, 0, -1, 1.0, 1.5, "1", "1.0", " 1", "true", "x", "", True, None, 2**70, [], ["a"], [1], {}, "nan", "inf")


@pytest.mark.parametrize(("path", "field"), fields())
def test_a_value_is_read_as_sglang_reads_it(sglang: SGLang, path: str, field: str) -> None:
    for value in USUAL:
        check_reading(sglang, path, field, value)


@pytest.mark.full
@pytest.mark.parametrize(("path", "field"), fields())
@settings(max_examples=examples(300))
@given(value=VALUES)
def test_any_value_is_read_as_sglang_reads_it(sglang: SGLang, path: str, field: str, value: Any) -> None:
    check_reading(sglang, path, field, value)


@pytest.mark.parametrize("value", [*USUAL, 0, "yes", "off", "2"], ids=repr)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_option_of_a_stream_is_read_as_sglang_reads_it(sglang: SGLang, path: str, value: Any) -> None:
    options = {"include_usage": value}
    theirs = sglang.read(path, {**PATHS[path], "stream": True, "stream_options": options}, "stream_options")
    body = {**PATHS[path], "stream": True, "stream_options": options}
    try:
        read_fields(path.encode(), body)
    except BadRequestError:
        assert not theirs.is_taken
        return
    assert theirs == Reading(True, body["stream_options"])


def fields_of_other_paths(sglang: SGLang, path: str) -> list[str]:
    """Fields that the router reads, but that SGLang's model of this path has not, and so ignores."""
    own = set(vars(sglang.models[path](PATHS[path])))
    known = {field for body in BODIES.values() for field in body["properties"]} | {"rid", "request_id", "logit_bias"}
    return sorted(known - own - CONTENT - {"model", "prompt_logprobs"})


@pytest.mark.parametrize("value", ["x", -5, 2**70, 1.5, {"a": []}, [None], [[1], "x"], True], ids=repr)
@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_the_path_has_not_is_ignored(sglang: SGLang, path: str, value: Any) -> None:
    for field in fields_of_other_paths(sglang, path):
        raw = json.dumps({**PATHS[path], field: value}).encode()
        try:
            read = read_body(path.encode(), raw, False)
        except BadRequestError as error:
            pytest.fail(f"{field}: {error}")
        assert read.prompt.sequence_count == 1, field


def test_the_members_of_a_session_are_those_of_sglang(sglang_imported: None) -> None:
    from typing import get_args, get_type_hints

    from sglang.srt.managers.io_struct import SessionParams

    assert {name: get_args(hint)[0] for name, hint in get_type_hints(SessionParams).items()} == SESSION_FIELDS


@pytest.mark.parametrize(
    "given",
    [
        *({"nope": 1}, {"id": 5}, {"id": ["x"]}, {"id": "x", "rid": {}}, {"offset": "1"}, {"offset": 1.0}),
        *({"offset": 2**63}, {"offset": True}, {"replace": 1}, {"drop_previous_output": "yes"}, {"Id": "x"}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_session_that_would_end_a_scheduler_is_refused(given: dict[str, Any], is_stream: bool) -> None:
    body = {"text": "hi", "stream": is_stream, "session_params": given}
    with pytest.raises(BadRequestError) as caught:
        read_fields(b"/generate", body)
    assert caught.value.param == "session_params"


@pytest.mark.parametrize("given", [None, {}, {"id": "x", "rid": None, "offset": -1, "replace": False}, "x", [{}]])
def test_any_other_session_is_the_instances_affair(given: Any) -> None:
    read_fields(b"/generate", {"text": "hi", "session_params": given})


@pytest.mark.parametrize(
    "pattern", ["[", "(", "*a", "a{99999999999}", ["a", "(?P<x"], "(?<=a+)b", "\\", "x{2,1}"], ids=repr
)
def test_a_pattern_that_cannot_be_compiled_is_refused(pattern: Any) -> None:
    """A plain server answers 500 to it, and cuts a stream."""
    with pytest.raises(BadRequestError, match="cannot be compiled"):
        read_fields(b"/generate", {"text": "hi", "sampling_params": {"stop_regex": pattern}})


@pytest.mark.parametrize("pattern", [None, "[a-z]", ["a", "b+"], 5, [5], "a" * 5000, []], ids=str)
def test_any_other_pattern_is_the_instances_affair(pattern: Any) -> None:
    read_fields(b"/generate", {"text": "hi", "sampling_params": {"stop_regex": pattern}})


PROMPTS: tuple[Any, ...] = (
    *("a", ["a"], ["a", "b"], [1, 2], [[1, 2], [3]], [1.0, 2], [1, 2.0], ["1", 2], ["1", "2"], [True, 2], [[1.0], [2]]),
    *([], [[]], None, 5, "", [None], [1.5], [1, 1.5], ["a", 1], [[1], 2], [["1"], [2]], [2**70], {}, [{}], True),
)


@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_a_prompt_is_read_as_sglang_reads_it(sglang: SGLang, prompt: Any) -> None:
    body = {"prompt": prompt}
    theirs = sglang.read("/v1/completions", body, "prompt")
    try:
        read = read_body(b"/v1/completions", json.dumps(body).encode(), False).prompt
    except BadRequestError:
        assert not theirs.is_taken or theirs.value in ([], [[]], [2**70])  # an instance refuses these later
        return
    assert theirs.is_taken
    texts = [theirs.value] if isinstance(theirs.value, str) else theirs.value
    if isinstance(texts[0], str):
        assert list(read.texts) == texts
    else:
        lists = texts if isinstance(texts[0], list) else [texts]
        assert (read.sequence_count, read.known_tokens) == (len(lists), sum(map(len, lists)))
