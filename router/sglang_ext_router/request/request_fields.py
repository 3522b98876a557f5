"""The fields of request bodies that the router knows: one declaration per endpoint, for the document and the checks.

An instance reads `true` and `"1"` as numbers, and would then understand a request differently from the router; it exits
on a `top_k` beyond its integers. A field of another type than declared here, or out of its range, is refused before it
reaches two instances. Fields that are not declared here are passed on unchanged.
"""

from __future__ import annotations

import math
from typing import Any

from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.scores import MAX_TOP_LOGPROBS

Schema = dict[str, Any]

MAX_INT32 = 2**31 - 1
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
MAX_LOGIT_BIAS = 1e30  # an instance exits on infinite logits


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _integer(low: int, high: int, **further: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **further}


def _all_or_null(fields: dict[str, Schema]) -> dict[str, Schema]:
    return {name: _or_null(schema) for name, schema in fields.items()}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NULL: Schema = {"type": "null"}
_COUNT = _integer(1, MAX_INT32)
_SEED = _or_null(_integer(MIN_INT64, MAX_INT64))
_TOKEN_IDS = _list_of({"type": "integer", "minimum": 0})
_TEXTS: list[Schema] = [{**_TEXT, "minLength": 1}, _list_of({**_TEXT, "minLength": 1})]
_IDS: list[Schema] = [_TOKEN_IDS, _list_of(_TOKEN_IDS)]

_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_CONTENT: list[Schema] = [_TEXT, {"type": "array", "items": _PART}]


def _message(content: list[Schema]) -> Schema:
    """Return the schema of a message: only a user's must have content."""
    user = {"role": {"const": "user"}, "content": {"anyOf": content}}
    other = {"role": {"enum": ["system", "developer", "assistant"]}, "content": {"anyOf": [*content, _NULL]}}
    return {
        "type": "object",
        "anyOf": [
            {"required": ["role", "content"], "properties": user},
            {"required": ["role"], "properties": other},
        ],
    }


_MESSAGES = _list_of(_message(_CONTENT))
_INPUT_MESSAGE: Schema = {**_message([_TEXT]), "properties": {"type": {"enum": ["message", None]}}}

_SAMPLING: dict[str, Schema] = {
    "temperature": {"type": "number", "minimum": 0, "description": "0 is greedy"},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _integer(-1, MAX_INT32, description="-1: all", **{"not": {"const": 0}}),
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "repetition_penalty": {"type": "number", "minimum": 0.001, "maximum": 2},  # smaller ones make logits infinite
}
_PENALTY: Schema = {"type": "number", "minimum": -2, "maximum": 2}
_PENALTIES: dict[str, Schema] = {"frequency_penalty": _PENALTY, "presence_penalty": _PENALTY}
_STOP: Schema = {"type": ["string", "array", "null"], "items": _TEXT}
_OPENAI: dict[str, Schema] = {
    "model": {"type": "string", "description": "a name from /v1/models; default: what the instances serve"},
    "stop": _STOP,
    "stream": _FLAG,
    "user": _or_null(_TEXT),
    **_PENALTIES,
}
_CHOICES: dict[str, Schema] = {
    "n": _COUNT,
    "seed": _SEED,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
}
_SGLANG_SAMPLING: dict[str, Schema] = {
    "max_new_tokens": _or_null(_integer(0, MAX_INT32)),
    "n": _COUNT,
    "sampling_seed": _SEED,
    "stop": _STOP,
    **_all_or_null({**_SAMPLING, **_PENALTIES, "ignore_eos": _FLAG}),
}


def _only(given: str, other: str) -> Schema:
    """Require the field `given` and forbid `other`; null counts as absent."""
    return {"required": [given], "properties": {given: {"not": _NULL}, other: _NULL}}


def _body(fields: dict[str, Schema], **further: Any) -> Schema:
    description = "Further fields are passed on to the instances."
    return {"type": "object", "properties": fields, "description": description, **further}


_TOKENISE = _body(
    {
        "prompt": {"type": ["string", "array", "null"], "items": _TEXT},
        "messages": _or_null(_MESSAGES),
        "add_special_tokens": _FLAG,
    },
    oneOf=[_only("prompt", "messages"), _only("messages", "prompt")],
)
_TOKEN_ID_LIST: Schema = {"type": "array", "items": _integer(0, 2**32 - 1)}
_DETOKENISE = _body(
    {
        "tokens": {
            "description": "ids, or lists of them",
            "anyOf": [_TOKEN_ID_LIST, {"type": "array", "items": _TOKEN_ID_LIST}],
        },
        "skip_special_tokens": _FLAG,
    },
    required=["tokens"],
)
_ANTHROPIC: dict[str, Schema] = {
    "messages": _list_of({"type": "object", "required": ["role", "content"]}),
    "system": {"anyOf": [_TEXT, _NULL, {"type": "array", "items": {"type": "object"}}]},
}
# The schema of every body that goes to the instances, by its path.
BODIES: dict[str, Schema] = {
    "/v1/chat/completions": _body(
        {
            "messages": _MESSAGES,
            "max_tokens": _or_null(_COUNT),
            "max_completion_tokens": _or_null(_COUNT),
            "logprobs": _FLAG,
            **_OPENAI,
            **_CHOICES,
            **_all_or_null(_SAMPLING),
        },
        required=["messages"],
    ),
    "/v1/completions": _body(
        {
            "prompt": {"anyOf": [*_TEXTS, *_IDS]},
            "max_tokens": _COUNT,
            "echo": _FLAG,
            "logprobs": _or_null(_integer(0, MAX_TOP_LOGPROBS, description="alternatives for each token")),
            **_OPENAI,
            **_CHOICES,
            **_SAMPLING,
        },
        required=["prompt"],
    ),
    "/generate": _body(
        {
            "text": {"anyOf": [*_TEXTS, _NULL]},
            "input_ids": {"anyOf": [*_IDS, _NULL]},
            "sampling_params": {
                "type": ["object", "null"],
                "properties": _SGLANG_SAMPLING,
                "description": "SGLang has further ones; the instances refuse names that they do not know",
            },
            "stream": _FLAG,
        },
        anyOf=[_only("text", "input_ids"), _only("input_ids", "text")],
    ),
    "/v1/responses": _body(
        {
            "input": {"anyOf": [_TEXT, _list_of(_INPUT_MESSAGE)]},
            "instructions": _or_null(_TEXT),
            "max_output_tokens": _or_null(_integer(3, MAX_INT32, description="SGLang generates two fewer")),
            "store": {**_or_null(_FLAG), "description": "has no effect: replies are never kept"},
            **_OPENAI,
            **_all_or_null(_SAMPLING),
        },
        required=["model", "input"],
    ),
    "/v1/messages/count_tokens": _body(_ANTHROPIC, required=["model", "messages"]),
    "/v1/messages": _body(
        {
            **_ANTHROPIC,
            "max_tokens": _COUNT,
            "stop_sequences": {"type": ["array", "null"], "items": _TEXT},
            "stream": _or_null(_FLAG),
            **_all_or_null({name: _SAMPLING[name] for name in ("temperature", "top_p", "top_k")}),
        },
        required=["model", "messages", "max_tokens"],
    ),
    "/parse_function_call": _body(
        {"text": _TEXT, "tools": {"type": "array"}, "tool_call_parser": _or_null(_TEXT)}, required=["text"]
    ),
    "/separate_reasoning": _body(
        {"text": _TEXT, "reasoning_parser": _TEXT, "return_blocks": _FLAG}, required=["text", "reasoning_parser"]
    ),
    "/api/show": _body({"model": _OPENAI["model"]}, required=["model"]),
    **dict.fromkeys(("/v1/tokenize", "/tokenize"), _TOKENISE),
    **dict.fromkeys(("/v1/detokenize", "/detokenize"), _DETOKENISE),
}

# JSON's name of a type, the types of its values, and its name in a message
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a string"),
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "array": ((list,), "a list"),
    "object": ((dict,), "an object"),
    "null": ((type(None),), "null"),
}


_LISTS_OF_NUMBERS = frozenset(
    {"prompt", "input_ids", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "prompt_logprob_token_ids"}
)


class _FieldCheck:
    """The types and the range that one field may have, from its schema."""

    __slots__ = ("allowed", "high", "low", "nested", "refuses_zero", "wanted")

    def __init__(self, schema: Schema) -> None:
        given = schema["type"]
        names: list[str] = [given] if isinstance(given, str) else given
        self.allowed = frozenset(kind for name in names for kind in _TYPES[name][0])
        self.wanted = " or ".join(_TYPES[name][1] for name in names)
        # Integers stay exact: as floats the largest would be rounded.
        self.low: Any = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
        self.high: Any = schema.get("maximum", math.inf)
        self.refuses_zero = "not" in schema
        self.nested = FieldChecks(schema["properties"]) if "properties" in schema else None


class FieldChecks:
    """Checks the fields of one object against their schemas."""

    __slots__ = ("_checks",)

    def __init__(self, fields: dict[str, Schema]) -> None:
        """Fields without one `type`, and `model`, are checked where they are read."""
        self._checks = {
            name: _FieldCheck(schema) for name, schema in fields.items() if "type" in schema and name != "model"
        }

    def check(self, body: dict[str, Any], where: str = "") -> None:
        """Raise BadRequestError for a value of another type or out of range; `where` precedes the field's name."""
        for name, value in body.items():
            field = self._checks.get(name)
            if field is None:
                continue
            kind = type(value)
            # An integer may come as 16.0.
            if kind not in field.allowed and not (kind is float and int in field.allowed and value.is_integer()):
                raise BadRequestError(f"{where}{name} must be {field.wanted}", f"{where}{name}")
            if kind is dict:
                if field.nested is not None:
                    field.nested.check(value, f"{where}{name}.")
            elif kind is int or kind is float:
                if not field.low <= value <= field.high:
                    message = f"{where}{name} is {value}, not between {field.low} and {field.high}"
                    raise BadRequestError(message, f"{where}{name}")
                if value == 0 and field.refuses_zero:
                    raise BadRequestError(f"{where}{name} must not be 0", f"{where}{name}")


def _checks_of(path: str, **changed: Schema) -> FieldChecks:
    return FieldChecks({**BODIES[path]["properties"], **changed})


_CHECKS = {
    b"/v1/chat/completions": _checks_of("/v1/chat/completions"),
    # With `prompt_logprobs` 0 scores only the prompt; otherwise the instance refuses it.
    b"/v1/completions": _checks_of("/v1/completions", max_tokens={**_COUNT, "minimum": 0}),
    b"/v1/responses": _checks_of("/v1/responses"),
    b"/v1/messages": _checks_of("/v1/messages"),
}
_GENERATE_CHECKS = FieldChecks({"stream": _FLAG})
_SAMPLING_CHECKS = FieldChecks(_SGLANG_SAMPLING)
_TOKENISE_CHECKS = _checks_of("/tokenize")
_DETOKENISE_CHECKS = _checks_of("/detokenize")


def check_field_types(path: bytes, body: dict[str, Any]) -> None:
    """Raise BadRequestError for a field of a generation request whose value is not as its schema says."""
    checks = _CHECKS.get(path)
    if checks is not None:
        checks.check(body)
        _check_bias(body, "")
        return
    _GENERATE_CHECKS.check(body)
    parameters = body.get("sampling_params")
    for item in parameters if type(parameters) is list else [parameters]:
        if type(item) is dict:
            _SAMPLING_CHECKS.check(item, "sampling_params.")
            _check_bias(item, "sampling_params.")
        elif item is not None:
            raise BadRequestError("sampling_params must be an object", "sampling_params")


def use_whole_numbers(body: dict[str, Any]) -> None:
    """Read 16.0 as 16, as SGLang does: numbers of Lua, of R, of JSON libraries with one kind of number.

    Only the parsed body changes, and in it sampling parameters, options and prompts of token ids; what the client wrote
    goes on to the instances.
    """
    for name, value in body.items():
        kind = type(value)
        if kind is float or (kind is list and value and name in _LISTS_OF_NUMBERS):
            body[name] = _whole(value)
    parameters = body.get("sampling_params")
    for item in parameters if type(parameters) is list else [parameters]:
        if type(item) is dict:
            for name, value in item.items():
                if type(value) is float:
                    item[name] = _whole(value)


def _whole(value: Any) -> Any:
    """Return the value with whole numbers as integers; a list is looked at if its first number is a float."""
    if type(value) is float:
        return int(value) if value.is_integer() and MIN_INT64 <= value <= MAX_INT64 else value
    if type(value) is list and value and type(value[0]) in (float, list):
        return [_whole(item) for item in value]
    return value


def _check_bias(body: dict[str, Any], where: str) -> None:
    bias = body.get("logit_bias")
    if bias is None:
        return
    name = f"{where}logit_bias"
    if type(bias) is not dict or any(type(value) is not float and type(value) is not int for value in bias.values()):
        raise BadRequestError(f"{name} must be an object of numbers", name)
    if any(abs(value) > MAX_LOGIT_BIAS for value in bias.values()):
        raise BadRequestError(f"{name} holds a number beyond {MAX_LOGIT_BIAS:g}", name)


def check_tokenise(body: dict[str, Any]) -> None:
    """Raise BadRequestError for a body of /v1/tokenize that an instance would misread or fail on."""
    _TOKENISE_CHECKS.check(body)
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise BadRequestError("give either prompt or messages", "prompt")


def check_detokenise(body: dict[str, Any]) -> None:
    """Raise BadRequestError for a body of /v1/detokenize that an instance would misread or fail on."""
    _DETOKENISE_CHECKS.check(body)
    tokens = body.get("tokens")
    lists = tokens if type(tokens) is list and tokens and type(tokens[0]) is list else [tokens]
    for ids in lists:
        if type(ids) is not list or any(type(token) is not int or not 0 <= token < 2**32 for token in ids):
            raise BadRequestError("tokens must be a list of token ids, or a list of such lists", "tokens")
