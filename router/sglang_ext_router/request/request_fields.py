"""The fields of request bodies that the router knows: one declaration per endpoint, for the document and the checks.

SGLang reads `"1"`, `1.0` and `true` as the number 1 on every path but /generate, and `1` and `"yes"` as true. The
router reads them likewise, by the same library, as both must understand a request alike; a test compares every field
with SGLang's own models. A value that SGLang does not take, or out of the range declared here, is refused before it
reaches two instances: an instance exits on a `top_k` beyond its integers. Fields that are not declared here are passed
on unchanged, and of those that are the instances get what the client wrote.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any, Union

from pydantic import TypeAdapter, ValidationError

from sglang_ext_router.http.instance_paths import UNDIVIDED_PATHS
from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.scores import MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS_WITH_DECODE

Schema = dict[str, Any]

MAX_INT32 = 2**31 - 1
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
MAX_PATTERN_CHARACTERS = 4096  # of a longer `stop_regex` the instances say that it is too long
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
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _or_null(_FLAG)}},
    "min_tokens": _integer(0, MAX_INT32),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "no_stop_trim": _FLAG,
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
    "model": {"type": "string", "minLength": 1},
    "messages": _list_of(
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": {"anyOf": [_TEXT, _list_of(_PART)]},
            },
        }
    ),
    "system": {"anyOf": [*_CONTENT, _NULL]},
}
_SAID: Schema = {**_TEXT, "pattern": r"\S"}
_SAID_PARTS: list[Schema] = [_SAID, _list_of({**_PART, "properties": {"type": {"const": "text"}, "text": _SAID}})]
_OF_MODEL: dict[str, Schema] = {
    "model": {"type": "string", "description": "a name from /v1/models; default: what the instances serve"},
    "user": _or_null(_TEXT),
    "priority": _or_null(_integer(-MAX_INT32, MAX_INT32, description="of SGLang's scheduler")),
}
# An instance ends at embeddings of another size than its model's, or answers 500.
OVERRIDES = ("embed_overrides", "embed_override_token_id", "query_embed_overrides", "item_embed_overrides")
# The schema of every body that goes to the instances, by its path.
BODIES: dict[str, Schema] = {
    "/v1/chat/completions": _body(
        {
            "messages": _MESSAGES,
            "max_tokens": _or_null(_integer(0, MAX_INT32)),
            "max_completion_tokens": _or_null(_integer(0, MAX_INT32)),
            "logprobs": _FLAG,
            "top_logprobs": _or_null(_integer(MIN_INT64, MAX_TOP_LOGPROBS_WITH_DECODE)),
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
            "prompt_logprobs": _or_null(
                _integer(0, MAX_TOP_LOGPROBS, description="alternatives for each token of the prompt, as in vLLM")
            ),
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
            "stream": _or_null(_FLAG),
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
    "/v1/embeddings": _body(
        {
            "input": {"anyOf": [_SAID, _list_of(_SAID), *_IDS]},
            "encoding_format": {"type": "string", "enum": ["float", "base64"]},
            "dimensions": _or_null(_integer(1, MAX_INT32, description="of models that can shorten what they answer")),
            **_OF_MODEL,
        },
        required=["input"],
    ),
    "/v1/classify": _body({"input": {"anyOf": [_SAID, _list_of(_SAID), _TOKEN_IDS]}, **_OF_MODEL}, required=["input"]),
    "/v1/rerank": _body(
        {
            "query": {"anyOf": _SAID_PARTS},
            "documents": {
                **_list_of(_SAID),
                "description": "models of SGLang that see images take lists of parts, too",
            },
            "instruct": _or_null(_TEXT),
            "top_n": _or_null(_integer(1, MAX_INT64)),
            "return_documents": _FLAG,
            "model": _OF_MODEL["model"],
        },
        required=["query", "documents"],
    ),
    "/v1/score": _body(
        {
            "query": {"anyOf": [_SAID, _TOKEN_IDS], "description": "text or token ids, as the items are"},
            "items": {"anyOf": [_SAID, _list_of(_SAID), _list_of(_TOKEN_IDS)]},
            "label_token_ids": {
                "type": "array",
                "items": {"anyOf": [_integer(0, MAX_INT32), _TOKEN_IDS]},
                "description": "needed where the model generates: each token once, in one list or in one per item",
            },
            "apply_softmax": _FLAG,
            "temperature": {"type": "number", "exclusiveMinimum": 0, "description": "with apply_softmax"},
            "return_token_logprobs": _FLAG,
            "item_first": _FLAG,
            "return_pooled_hidden_states": {**_FLAG, "description": "of models that do not generate"},
            "score_extraction_token": {**_or_null(_TEXT), "description": "a text that is one token of the model"},
            "model": _OF_MODEL["model"],
        },
        required=["query", "items"],
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


# JSON's name of a type and the type of SGLang's models; objects have checks of their own.
_ANNOTATIONS: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": float,
    "array": list[str],
    "null": None,
}


@cache
def _reader(names: tuple[str, ...]) -> Any:
    """Return what reads a value of these types as SGLang's models do; None where it is an object."""
    if "object" in names:
        return None
    union: Any = Union[tuple(_ANNOTATIONS[name] for name in names)]  # noqa: UP007 - of any number
    return TypeAdapter(union)


class _FieldCheck:
    """The types and the range that one field may have, from its schema."""

    __slots__ = ("allowed", "high", "low", "nested", "reader", "refuses_low", "wanted")

    def __init__(self, schema: Schema, is_lax: bool) -> None:
        given = schema["type"]
        names: list[str] = [given] if isinstance(given, str) else given
        self.allowed = frozenset(kind for name in names for kind in _TYPES[name][0])
        self.wanted = " or ".join(_TYPES[name][1] for name in names)
        self.reader: Any = _reader(tuple(names)) if is_lax else None
        # Integers stay exact: as floats the largest would be rounded.
        self.low: Any = schema.get("minimum", schema.get("exclusiveMinimum", -sys.float_info.max))
        self.high: Any = schema.get("maximum", sys.float_info.max)
        self.refuses_low = "exclusiveMinimum" in schema
        self.nested = FieldChecks(schema["properties"], is_lax) if "properties" in schema else None

    def includes(self, value: Any) -> bool:
        """Return whether a number is in the field's range."""
        return bool(self.low <= value <= self.high and not (self.refuses_low and value == self.low))

    def read(self, value: Any, name: str) -> Any:
        """Return the value of another type than declared as SGLang reads it. Raise BadRequestError if it does not."""
        if self.reader is not None:
            try:
                return self.reader.validate_python(value)
            except ValidationError:
                pass
        elif type(value) is float and int in self.allowed and value.is_integer():  # an integer may come as 16.0
            return int(value)
        raise BadRequestError(f"{name} must be {self.wanted}", name)


class FieldChecks:
    """Checks the fields of one object against their schemas."""

    __slots__ = ("_checks",)

    def __init__(self, fields: dict[str, Schema], is_lax: bool = True) -> None:
        """Fields without one `type`, and `model`, are checked where they are read. `is_lax`: 1 may come as "1"."""
        checked = dict(fields)
        if "top_k" in fields:  # with a temperature of 0 an instance takes any
            checked["top_k"] = {**fields["top_k"], "minimum": -MAX_INT32}
        self._checks = {
            name: _FieldCheck(schema, is_lax)
            for name, schema in checked.items()
            if "type" in schema and name != "model"
        }

    def read(self, body: dict[str, Any], where: str = "") -> None:
        """Replace each value by what SGLang reads; `where` precedes the field's name.

        Raise BadRequestError for a value of another type or out of range.
        """
        for name, value in body.items():
            field = self._checks.get(name)
            if field is None:
                continue
            if type(value) not in field.allowed:
                body[name] = value = field.read(value, f"{where}{name}")
            kind = type(value)
            if kind is dict:
                if field.nested is not None:
                    field.nested.read(value, f"{where}{name}.")
            elif (kind is int or kind is float) and not field.includes(value):
                message = f"{where}{name} is {value}, not between {field.low} and {field.high}"
                raise BadRequestError(message, f"{where}{name}")


def _checks_of(path: str, **changed: Schema) -> FieldChecks:
    return FieldChecks({**BODIES[path]["properties"], **changed})


_CHECKS = {
    b"/v1/chat/completions": _checks_of("/v1/chat/completions"),
    # With `prompt_logprobs` 0 scores only the prompt; otherwise the instance refuses it.
    b"/v1/completions": _checks_of("/v1/completions", max_tokens={**_COUNT, "minimum": 0}),
    b"/v1/responses": _checks_of("/v1/responses"),
    b"/v1/messages": _checks_of("/v1/messages"),
    **{path: _checks_of(path.decode()) for path in UNDIVIDED_PATHS},
}
_PATHS_WITH_BIAS = (b"/v1/chat/completions", b"/v1/completions")
_GENERATE_CHECKS = FieldChecks({"stream": _FLAG}, is_lax=False)
_SAMPLING_CHECKS = FieldChecks(_SGLANG_SAMPLING, is_lax=False)


def read_fields(path: bytes, body: dict[str, Any]) -> None:
    """Replace the values of a generation request by what SGLang reads of them; only the parsed body changes.

    Raise BadRequestError for a field whose value is not as its schema says.
    """
    checks = _CHECKS.get(path)
    if checks is not None:
        checks.read(body)
        if path in _PATHS_WITH_BIAS:
            _check_bias(body, "")
        elif path in UNDIVIDED_PATHS:
            for name in OVERRIDES:
                if body.get(name) is not None:
                    raise BadRequestError(f"{name} is not taken from clients: an instance may end at it", name)
    else:
        _GENERATE_CHECKS.read(body)
        _check_internal(body)
        parameters = body.get("sampling_params")
        for item in parameters if type(parameters) is list else [parameters]:
            if type(item) is dict:
                _SAMPLING_CHECKS.read(item, "sampling_params.")
                _check_bias(item, "sampling_params.")
                _check_patterns(item)
            elif item is not None:
                raise BadRequestError("sampling_params must be an object", "sampling_params")
        _check_lists(body)
        _check_session(body)
    for name in _LISTS_OF_NUMBERS:
        value = body.get(name)
        if value is not None:
            body[name] = _whole(value)


def _whole(value: Any) -> Any:
    """Return the value with whole numbers as integers; a list is looked at if its first number is a float."""
    if type(value) is float:
        return int(value) if value.is_integer() and MIN_INT64 <= value <= MAX_INT64 else value
    if type(value) is list and value and type(value[0]) in (float, list):
        return [_whole(item) for item in value]
    return value


# Fields of /generate by which parts of SGLang speak to each other, or whose values are not checked: an instance exits
# at most of what they may hold. (Labels come in a header, of which SGLang reads the allowed ones.)
INTERNAL_FIELDS = frozenset(
    {
        *("custom_labels", "lora_id", "positional_embed_overrides", "http_worker_ipc", "encoder_urls"),
        *("num_items_assigned", "need_wait_for_mm_inputs", "external_trace_header", "received_time"),
        *("multi_item_delimiter_indices", "token_indices_to_pool"),
    }
)


def _check_internal(body: dict[str, Any]) -> None:
    if INTERNAL_FIELDS.isdisjoint(body):
        return
    for name in INTERNAL_FIELDS.intersection(body):
        if body[name] is not None and body[name] != {}:
            raise BadRequestError(f"{name} is not taken from clients: an instance may end at it", name)


# The members of `session_params`, as in SGLang's SessionParams. SGLang checks neither names nor types: its reply to
# another name is cut, and its scheduler exits at a value of another type.
SESSION_FIELDS: dict[str, type] = {
    "id": str,
    "rid": str,
    "offset": int,
    "replace": bool,
    "drop_previous_output": bool,
}


def _check_session(body: dict[str, Any]) -> None:
    given = body.get("session_params")
    if type(given) is not dict:
        return  # the instances refuse it
    for name, value in given.items():
        wanted = SESSION_FIELDS.get(name)
        if wanted is None:
            raise BadRequestError(f"session_params has no {name}", "session_params")
        if value is not None and type(value) is not wanted:
            named = {str: "a string", int: "an integer", bool: "true or false"}[wanted]
            raise BadRequestError(f"session_params.{name} must be {named}", "session_params")
        if type(value) is int and not MIN_INT64 <= value <= MAX_INT64:
            raise BadRequestError(f"session_params.{name} is beyond 64 bits", "session_params")


# Fields of /generate that are one value for all prompts, or a list with one for each: at another list an instance
# exits, or cuts its reply.
_LISTS_BY_PROMPT = (
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_hidden_states", "return_sampling_mask"),
    *("sampling_logprobs_mode", "sampling_params", "rid"),
)


def _check_lists(body: dict[str, Any]) -> None:
    for name in _LISTS_BY_PROMPT:
        value = body.get(name)
        if type(value) is list and len(value) != _batch_size(body):
            raise BadRequestError(f"{name} must be one value, or a list with one for each prompt of a batch", name)
    candidates = body.get("token_ids_logprob")
    nested = [type(ids) is list for ids in candidates] if type(candidates) is list else []
    if any(nested) and (not all(nested) or len(nested) != _batch_size(body)):
        message = "token_ids_logprob must be a list of token ids, or one such list for each prompt of a batch"
        raise BadRequestError(message, "token_ids_logprob")


def _batch_size(body: dict[str, Any]) -> int | None:
    """Return the number of prompts in a batch of /generate; None for a single prompt that is not in a list."""
    for name in ("text", "input_ids", "input_embeds"):
        given = body.get(name)
        if type(given) is list and given:
            is_batch = name == "text" or (type(given[0]) is list and (name == "input_ids" or _is_matrix(given[0])))
            return len(given) if is_batch else None
    return None


def _is_matrix(value: list[Any]) -> bool:
    return bool(value) and type(value[0]) is list


_BIAS: Any = TypeAdapter(dict[str, float])


def _check_bias(body: dict[str, Any], where: str) -> None:
    bias = body.get("logit_bias")
    if bias is None:
        return
    name = f"{where}logit_bias"
    try:
        numbers = _BIAS.validate_python(bias, strict=bool(where))
    except ValidationError:
        raise BadRequestError(f"{name} must be an object of numbers", name) from None
    if any(not abs(value) <= MAX_LOGIT_BIAS for value in numbers.values()):
        raise BadRequestError(f"{name} holds a number beyond {MAX_LOGIT_BIAS:g}", name)
    body["logit_bias"] = numbers


def _check_patterns(parameters: dict[str, Any]) -> None:
    """Raise BadRequestError for a `stop_regex` that cannot be compiled: SGLang answers 500 to it, or cuts its reply."""
    given = parameters.get("stop_regex")
    for pattern in given if type(given) is list else [given]:
        if type(pattern) is str and len(pattern) <= MAX_PATTERN_CHARACTERS:
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                name = "sampling_params.stop_regex"
                raise BadRequestError(f"{name} cannot be compiled: {error}", name) from None


_IDS_OR_LISTS: Any = TypeAdapter(list[int] | list[list[int]])


def check_detokenise(body: dict[str, Any]) -> None:
    """Raise BadRequestError for token ids on which an instance would fail; it refuses everything else itself."""
    try:
        ids = _IDS_OR_LISTS.validate_python(body.get("tokens"))
    except ValidationError:
        return
    if any(not 0 <= token < 2**32 for item in ids for token in (item if type(item) is list else [item])):
        raise BadRequestError(f"tokens must be from 0 to {2**32 - 1}", "tokens")
