"""The fields of requests that the router knows: what each may be, for its document and for its check.

An instance makes a number of `true` and of `"1"`, and then its idea of a request is another than the router's; it ends
at a `top_k` that is none of its integers. What is of another type than its field says, or out of its range, is refused
before two instances are asked. What is not listed here is passed on as it came.
"""

from __future__ import annotations

import math
from typing import Any

from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.scores import MAX_TOP_LOGPROBS

Schema = dict[str, Any]

MAX_INT32 = 2**31 - 1
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP: Schema = {"type": ["string", "array", "null"], "items": _TEXT}
_SEED: Schema = {"type": ["integer", "null"], "minimum": MIN_INT64, "maximum": MAX_INT64}
_PENALTY: Schema = {"type": "number", "minimum": -2, "maximum": 2}
_COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_INT32}


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


_TEMPERATURE: Schema = {"type": "number", "minimum": 0, "description": "0 is greedy"}
_TOP_P: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_MIN_P: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_TOP_K: Schema = {"type": "integer", "minimum": -1, "maximum": MAX_INT32, "not": {"const": 0}, "description": "-1: all"}
# Logits that a smaller one divides are infinite, at which an instance ends; so are they with a larger bias.
_REPETITION: Schema = {"type": "number", "minimum": 0.001, "maximum": 2}
MAX_LOGIT_BIAS = 1e30
_STREAM_OPTIONS: Schema = {"type": ["object", "null"], "properties": {"include_usage": _FLAG}}
_MODEL: Schema = {"type": "string", "description": "one of those of /v1/models; default: what the instances serve"}

_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_CONTENT: list[Schema] = [_TEXT, {"type": "array", "items": _PART}]
_MESSAGE: Schema = {
    "type": "object",
    "anyOf": [
        {
            "required": ["role", "content"],
            "properties": {"role": {"const": "user"}, "content": {"anyOf": _CONTENT}},
        },
        {
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "assistant"]},
                "content": {"anyOf": [*_CONTENT, {"type": "null"}]},
            },
        },
    ],
}
_INPUT_MESSAGE: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["message", None]}},
    "anyOf": [
        {"required": ["role", "content"], "properties": {"role": {"const": "user"}, "content": _TEXT}},
        {
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "assistant"]},
                "content": {"type": ["string", "null"]},
            },
        },
    ],
}

CHAT_FIELDS: dict[str, Schema] = {
    "model": _MODEL,
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "max_tokens": _or_null(_COUNT),
    "max_completion_tokens": _or_null(_COUNT),
    "temperature": _or_null(_TEMPERATURE),
    "top_p": _or_null(_TOP_P),
    "top_k": _or_null(_TOP_K),
    "min_p": _or_null(_MIN_P),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": _or_null(_REPETITION),
    "n": _COUNT,
    "seed": _SEED,
    "stop": _STOP,
    "stream": _FLAG,
    "stream_options": _STREAM_OPTIONS,
    "logprobs": _FLAG,
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "user": _or_null(_TEXT),
}
COMPLETION_FIELDS: dict[str, Schema] = {
    "model": _MODEL,
    "prompt": {
        "anyOf": [
            {**_TEXT, "minLength": 1},
            {"type": "array", "items": {**_TEXT, "minLength": 1}, "minItems": 1},
            _TOKEN_IDS,
            {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
        ]
    },
    "max_tokens": _COUNT,
    "temperature": _TEMPERATURE,
    "top_p": _TOP_P,
    "top_k": _TOP_K,
    "min_p": _MIN_P,
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": _REPETITION,
    "n": _COUNT,
    "seed": _SEED,
    "stop": _STOP,
    "stream": _FLAG,
    "stream_options": _STREAM_OPTIONS,
    "echo": _FLAG,
    "logprobs": {
        "type": ["integer", "null"],
        "minimum": 0,
        "maximum": MAX_TOP_LOGPROBS,
        "description": "alternatives for each token",
    },
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "user": _or_null(_TEXT),
}
SAMPLING_FIELDS: dict[str, Schema] = {
    "max_new_tokens": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_INT32},
    "temperature": _or_null(_TEMPERATURE),
    "top_p": _or_null(_TOP_P),
    "top_k": _or_null(_TOP_K),
    "min_p": _or_null(_MIN_P),
    "frequency_penalty": _or_null(_PENALTY),
    "presence_penalty": _or_null(_PENALTY),
    "repetition_penalty": _or_null(_REPETITION),
    "n": _COUNT,
    "sampling_seed": _SEED,
    "stop": _STOP,
    "ignore_eos": _or_null(_FLAG),
}
GENERATE_FIELDS: dict[str, Schema] = {
    "text": {
        "anyOf": [
            {**_TEXT, "minLength": 1},
            {"type": "array", "items": {**_TEXT, "minLength": 1}, "minItems": 1},
            {"type": "null"},
        ]
    },
    "input_ids": {"anyOf": [_TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS, "minItems": 1}, {"type": "null"}]},
    "sampling_params": {
        "type": ["object", "null"],
        "properties": SAMPLING_FIELDS,
        "description": "and SGLang's further ones; the instances refuse names that they do not know",
    },
    "stream": _FLAG,
}
RESPONSES_FIELDS: dict[str, Schema] = {
    "model": _MODEL,
    "input": {"anyOf": [_TEXT, {"type": "array", "items": _INPUT_MESSAGE, "minItems": 1}]},
    "instructions": _or_null(_TEXT),
    "max_output_tokens": {
        "type": ["integer", "null"],
        "minimum": 3,
        "maximum": MAX_INT32,
        "description": "SGLang generates two fewer",
    },
    "temperature": _or_null(_TEMPERATURE),
    "top_p": _or_null(_TOP_P),
    "top_k": _or_null(_TOP_K),
    "min_p": _or_null(_MIN_P),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": _or_null(_REPETITION),
    "stop": _STOP,
    "stream": _FLAG,
    "store": {**_or_null(_FLAG), "description": "replies are never kept, whatever it says"},
    "user": _or_null(_TEXT),
}

TOKENISE_FIELDS: dict[str, Schema] = {
    "prompt": {"type": ["string", "array"], "items": _TEXT},
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "add_special_tokens": _FLAG,
}
DETOKENISE_FIELDS: dict[str, Schema] = {
    "tokens": {
        "description": "ids, or lists of them",
        "anyOf": [
            {"type": "array", "items": _TOKEN_ID},
            {"type": "array", "items": {"type": "array", "items": _TOKEN_ID}},
        ],
    },
    "skip_special_tokens": _FLAG,
}

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_WORDS: dict[str, str] = {
    "string": "a string",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class FieldTypes:
    """Which types and ranges the fields of one kind of object may have."""

    __slots__ = ("_allowed", "_named", "_nested", "_not_zero", "_ranges")

    def __init__(self, fields: dict[str, Schema]) -> None:
        self._named: dict[str, list[str]] = {}
        self._allowed: dict[str, frozenset[type]] = {}
        self._ranges: dict[str, tuple[Any, Any]] = {}  # of numbers, exact: as floats the largest integers are rounded
        self._not_zero = frozenset(name for name, schema in fields.items() if schema.get("not") == {"const": 0})
        self._nested: dict[str, FieldTypes] = {}
        for name, schema in fields.items():
            if "properties" in schema:
                self._nested[name] = FieldTypes(schema["properties"])
            given = schema.get("type")
            if given is None or name == "model":  # the prompt and the model are checked where they are read
                continue
            names = [given] if isinstance(given, str) else list(given)
            self._named[name] = names
            self._allowed[name] = frozenset(one for kind in names for one in _TYPES[kind])
            if int in self._allowed[name]:
                low = schema.get("minimum", schema.get("exclusiveMinimum"))
                high = schema.get("maximum")
                self._ranges[name] = (-math.inf if low is None else low, math.inf if high is None else high)

    def check(self, body: dict[str, Any], where: str = "") -> None:
        """BadRequestError for a value of another type or out of range; `where` comes before the field's name."""
        for name, value in body.items():
            allowed = self._allowed.get(name)
            if allowed is None:
                continue
            kind = type(value)
            if kind not in allowed and not (kind is float and int in allowed and value.is_integer()):  # 16.0 is one
                wanted = " or ".join(_WORDS[one] for one in self._named[name])
                raise BadRequestError(f"{where}{name} must be {wanted}", f"{where}{name}")
            if kind is dict:
                nested = self._nested.get(name)
                if nested is not None:
                    nested.check(value, f"{where}{name}.")
            elif kind is int or kind is float:
                low, high = self._ranges[name]
                if not low <= value <= high:
                    raise BadRequestError(f"{where}{name} is {value}, not between {low} and {high}", f"{where}{name}")
                if value == 0 and name in self._not_zero:
                    raise BadRequestError(f"{where}{name} must not be 0", f"{where}{name}")


_TOKENISE = FieldTypes(TOKENISE_FIELDS)
_DETOKENISE = FieldTypes(DETOKENISE_FIELDS)
_SAMPLING = FieldTypes(SAMPLING_FIELDS)
_GENERATE = FieldTypes({"stream": _FLAG})
_BY_PATH = {
    b"/v1/chat/completions": FieldTypes(CHAT_FIELDS),
    # With `prompt_logprobs` none: the prompt alone is scored. Otherwise the instance refuses 0.
    b"/v1/completions": FieldTypes({**COMPLETION_FIELDS, "max_tokens": {**_COUNT, "minimum": 0}}),
    b"/v1/responses": FieldTypes(RESPONSES_FIELDS),
}


def check_field_types(path: bytes, body: dict[str, Any]) -> None:
    """BadRequestError for a field whose value is of another type than its schema says."""
    types = _BY_PATH.get(path)
    if types is not None:
        types.check(body)
        if "logit_bias" in body:
            _check_bias(body["logit_bias"], "logit_bias")
        return
    _GENERATE.check(body)
    parameters = body.get("sampling_params")
    for item in parameters if type(parameters) is list else [parameters]:
        if type(item) is dict:
            _SAMPLING.check(item, "sampling_params.")
            if "logit_bias" in item:
                _check_bias(item["logit_bias"], "sampling_params.logit_bias")
        elif item is not None:
            raise BadRequestError("sampling_params must be an object", "sampling_params")


def _check_bias(bias: Any, name: str) -> None:
    if bias is None:
        return
    if type(bias) is not dict or any(type(value) is not float and type(value) is not int for value in bias.values()):
        raise BadRequestError(f"{name} must be an object of numbers", name)
    if any(abs(value) > MAX_LOGIT_BIAS for value in bias.values()):
        raise BadRequestError(f"{name} holds a number beyond {MAX_LOGIT_BIAS:g}", name)


def check_tokenise(body: dict[str, Any]) -> None:
    """BadRequestError for a body of /v1/tokenize that an instance would take for another, or fail at."""
    _TOKENISE.check(body)
    if ("prompt" in body) == ("messages" in body):
        raise BadRequestError("give either prompt or messages", "prompt")


def check_detokenise(body: dict[str, Any]) -> None:
    """BadRequestError for a body of /v1/detokenize that an instance would take for another, or fail at."""
    _DETOKENISE.check(body)
    tokens = body.get("tokens")
    if type(tokens) is not list:
        raise BadRequestError("tokens must be a list of token ids, or a list of such lists", "tokens")
    for ids in tokens if tokens and type(tokens[0]) is list else [tokens]:
        if type(ids) is not list or any(type(one) is not int or not 0 <= one < 2**32 for one in ids):
            raise BadRequestError("tokens must be a list of token ids, or a list of such lists", "tokens")
