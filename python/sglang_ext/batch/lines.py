"""A line of a run: one request as the endpoint gets it, made of a line of input and checked on the way.

Three kinds of lines are understood: OpenAI's batch lines (`custom_id`, `method`, `url`, `body`), plain prompts
(`prompt`, `messages`, `text` or `token_ids`, and with them what else belongs into the request), and sequences to be
scored (`token_ids` or `text`, with `prompt_len` and `candidate_ids` where wanted).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import orjson

from sglang_ext.batch.decide.line_order import estimate_tokens, prefix_key

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
PATHS = (CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES, EMBEDDINGS)
MAX_TOP_LOGPROBS = 256
MAX_CUSTOM_ID_BYTES = 512
_PLAIN = {"prompt": COMPLETIONS, "messages": CHAT, "text": GENERATE, "token_ids": GENERATE, "input_ids": GENERATE}
_REQUIRED = {  # one of these fields
    CHAT: ("messages",),
    COMPLETIONS: ("prompt",),
    GENERATE: ("text", "input_ids", "input_embeds"),
    RESPONSES: ("input",),
    MESSAGES: ("messages",),
    EMBEDDINGS: ("input",),
}
# Of /generate they stand in `sampling_params`; SGLang says nothing of those elsewhere, and samples by its defaults.
_SAMPLING_FIELDS = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "max_new_tokens"),
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "n", "ignore_eos")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "regex", "json_schema")},
    "seed": "sampling_seed",
}
_PROMPT_FIELDS = {COMPLETIONS: "prompt", EMBEDDINGS: "input"}
_SCORE_FIELDS = frozenset({"custom_id", "text", "token_ids", "input_ids", "prompt_len", "candidate_ids"})


class Mode(StrEnum):
    """The question to the endpoint: new tokens, or log-probabilities of given tokens."""

    GENERATE = "generate"
    SCORE = "score"


class BatchLine(NamedTuple):
    """One request as the endpoint gets it, and where it came from."""

    custom_id: str
    path: str  # one of PATHS
    body: bytes  # a JSON object, sent as it is
    prompt_tokens: int  # L as the router will estimate it: of the longest prompt in the body
    sort_key: bytes  # of `policy.batch.line_order.prefix_key`
    file: str = ""
    number: int = 0  # of the line or row, from 1
    prompt_len: int | None = None  # tokens of a scored sequence that are its prompt

    @property
    def place(self) -> str:
        """Return where a reader finds it."""
        return f"{self.file}:{self.number}" if self.file else f"line {self.number}"


class LineError(ValueError):
    """A line that cannot be sent; `field` names what is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LineOptions:
    """The fields that a run adds to every line. Raises ValueError, which names a bad option."""

    mode: Mode = Mode.GENERATE
    model: str | None = None  # for lines that name none
    top_logprobs: int = 0  # score: how many per position
    defaults: Mapping[str, object] = field(default_factory=dict)  # fields for lines that lack them

    def __post_init__(self) -> None:
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"--top-logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {self.top_logprobs}")
        if self.mode is Mode.GENERATE and self.top_logprobs:
            raise ValueError("--top-logprobs is for --mode score; lines to generate from carry their own fields")
        if self.defaults.get("stream"):
            raise ValueError("--defaults: stream: batches are not streamed")


def parse_line(content: object, options: LineOptions, file: str = "", number: int = 0) -> BatchLine:
    """Make a request of a line's parsed JSON (or a Parquet row as a mapping). LineError names field and reason.

    A plain line without `custom_id` gets `FILE:NUMBER`.
    """
    if not isinstance(content, dict):
        raise LineError("", f"must be a JSON object, is {_kind(content)}")
    if options.mode is Mode.SCORE:
        return _parse_score_line(content, options, file, number)
    if "body" in content or "url" in content or "method" in content:
        return _parse_request_line(content, options, file, number)
    return _parse_plain_line(content, options, file, number)


def make_line(
    custom_id: str,
    path: str,
    body: dict[str, object],
    *,
    file: str = "",
    number: int = 0,
    prompt_len: int | None = None,
) -> BatchLine:
    """A line of a body that is known to be good. LineError where its prompt is nothing that has a length."""
    prompt, known_tokens, longest_bytes = _measure_prompt(path, body)
    try:
        raw = orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise LineError("body", f"cannot be written as JSON: {error}") from None
    tokens = estimate_tokens(longest_bytes, known_tokens)
    return BatchLine(custom_id, path, raw, tokens, prefix_key(prompt), file, number, prompt_len)


# -- kinds of lines ---------------------------------------------------------------------------------------------------


def _parse_request_line(content: dict[str, object], options: LineOptions, file: str, number: int) -> BatchLine:
    custom_id = content.get("custom_id")
    if custom_id is None:
        raise LineError("custom_id", "is missing")
    method = content.get("method", "POST")
    if method != "POST":
        raise LineError("method", f"must be POST, is {_shown(method)}")
    path = content.get("url")
    if path is None:
        raise LineError("url", "is missing")
    if not isinstance(path, str) or path not in PATHS:
        raise LineError("url", f"must be one of {', '.join(PATHS)}, is {_shown(path)}")
    body = content.get("body")
    if body is None:
        raise LineError("body", "is missing")
    if isinstance(body, str):  # in a column of a Parquet file
        try:
            body = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise LineError("body", f"is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise LineError("body", f"must be an object, is {_kind(body)}")
    return _checked(_custom_id(custom_id), path, dict(body), options, file, number, "body.")


def _parse_plain_line(content: dict[str, object], options: LineOptions, file: str, number: int) -> BatchLine:
    given = [name for name in _PLAIN if content.get(name) is not None]
    if not given:
        raise LineError("", "must have custom_id, url and body, or one of prompt, messages, text, token_ids")
    if len(given) > 1:
        raise LineError(given[1], f"{given[0]} is there, too; give one of them")
    path = _PLAIN[given[0]]
    body = {
        "input_ids" if name == "token_ids" else name: value
        for name, value in content.items()
        if value is not None and name != "custom_id"
    }
    custom_id = content.get("custom_id")
    identifier = f"{file}:{number}" if custom_id is None else _custom_id(custom_id)
    return _checked(identifier, path, body, options, file, number, "")


def _parse_score_line(content: dict[str, object], options: LineOptions, file: str, number: int) -> BatchLine:
    unknown = [name for name, value in content.items() if name not in _SCORE_FIELDS and value is not None]
    if unknown:
        hint = "; did you mean custom_id?" if unknown[0] == "id" else ""
        fields = ", ".join(sorted(_SCORE_FIELDS))
        raise LineError(unknown[0], f"is no field of a line to score; those are {fields}{hint}")
    given = [name for name in ("token_ids", "input_ids", "text") if content.get(name) is not None]
    if len(given) != 1:
        raise LineError("token_ids", "give token_ids or text" if not given else f"{given[1]} is there, too")
    value = content[given[0]]
    name = "text" if given[0] == "text" else "input_ids"
    if name == "text":
        if not isinstance(value, str) or not value:
            raise LineError("text", f"must be a text that is not empty, is {_shown(value)}")
    else:
        value = _token_ids(given[0], value)
        if not value:
            raise LineError(given[0], "is empty")
    prompt_len = content.get("prompt_len")
    if prompt_len is not None:
        if type(prompt_len) is not int or not 0 <= prompt_len < 1 << 31:
            raise LineError("prompt_len", f"must be a number of tokens, is {_shown(prompt_len)}")
        if isinstance(value, list) and prompt_len > len(value):
            raise LineError("prompt_len", f"is {prompt_len}, and the sequence has {len(value)} tokens")
    candidates = content.get("candidate_ids")
    body: dict[str, object] = {
        name: value,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if candidates is not None:
        ids = _token_ids("candidate_ids", candidates)
        if not 1 <= len(ids) <= MAX_TOP_LOGPROBS:
            raise LineError("candidate_ids", f"must be 1 to {MAX_TOP_LOGPROBS} token ids, are {len(ids)}")
        body["token_ids_logprob"] = ids
    else:
        body["top_logprobs_num"] = options.top_logprobs
        if options.top_logprobs:  # as arrays, where the server knows how
            body["return_flat_raw_top_logprobs"] = body["return_flat_raw_top_logprobs_b64"] = True
    custom_id = content.get("custom_id")
    identifier = f"{file}:{number}" if custom_id is None else _custom_id(custom_id)
    return make_line(identifier, GENERATE, body, file=file, number=number, prompt_len=prompt_len)


def _checked(
    custom_id: str, path: str, body: dict[str, object], options: LineOptions, file: str, number: int, within: str
) -> BatchLine:
    for name, value in options.defaults.items():
        body.setdefault(name, value)
    if body.get("stream"):
        raise LineError(f"{within}stream", "batches are not streamed; leave it out")
    if path == GENERATE:
        for name, wanted in _SAMPLING_FIELDS.items():
            if name in body:
                raise LineError(within + name, f"{GENERATE} takes it as sampling_params.{wanted} only")
    else:
        if body.get("model") is None:
            if options.model is None:
                raise LineError(f"{within}model", "is missing; name it in the line or with --model")
            body["model"] = options.model
        elif not isinstance(body["model"], str):
            raise LineError(f"{within}model", f"must be a text, is {_shown(body['model'])}")
    required = _REQUIRED[path]
    if not any(body.get(name) is not None for name in required):
        raise LineError(within + required[0], f"is missing, and {path} needs it")
    if path == MESSAGES and body.get("max_tokens") is None:
        raise LineError(f"{within}max_tokens", f"is missing, and {path} needs it")
    if path == RESPONSES and body.get("background"):
        raise LineError(f"{within}background", "the reply would not have the text; leave it out")
    try:
        return make_line(custom_id, path, body, file=file, number=number)
    except LineError as error:
        raise LineError(within + error.field, error.reason) from None


# -- fields -----------------------------------------------------------------------------------------------------------


def _custom_id(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise LineError("custom_id", f"must be a text that is not empty, is {_shown(value)}")
    if len(value) > MAX_CUSTOM_ID_BYTES:
        raise LineError("custom_id", f"has {len(value)} characters, more than {MAX_CUSTOM_ID_BYTES}")
    return value


def _token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, list):
        raise LineError(name, f"must be a list of token ids, is {_kind(value)}")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 31:
            raise LineError(name, f"holds {_shown(item)}, which is no token id")
    return value


def _measure_prompt(path: str, body: Mapping[str, object]) -> tuple[bytes, int, int]:
    """Bytes whose leading blocks stand for the prompt's prefix; tokens known; bytes of the longest text."""
    if path in (CHAT, MESSAGES):
        text = _chat_text(body.get("messages"), body.get("system") if path == MESSAGES else None)
        return text, 0, len(text)
    if path == RESPONSES:
        text = _response_text(body.get("input"), body.get("instructions"))
        return text, 0, len(text)
    name = _PROMPT_FIELDS.get(path) or ("text" if body.get("text") is not None else "input_ids")
    value = body.get(name)
    if value is None and path == GENERATE:
        return b"", 1, 0  # embeddings
    items = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if path == EMBEDDINGS:  # of texts with images the text
        items = [item.get("text") or " " if isinstance(item, dict) else item for item in items]
    first, known_tokens, longest_bytes = b"", 0, 0
    for index, item in enumerate(items):
        if isinstance(item, str):
            encoded = item.encode("utf-8", "replace")
            longest_bytes = max(longest_bytes, len(encoded))
        else:
            ids = _token_ids(name, item)
            known_tokens = max(known_tokens, len(ids))
            encoded = np.array(ids, np.int32).tobytes() if not index else b""
        if not index:
            first = encoded
    if not longest_bytes and not known_tokens:
        raise LineError(name, "is empty")
    return first, known_tokens, longest_bytes


def _chat_text(messages: object, system: object = None) -> bytes:
    if not isinstance(messages, list) or not messages:
        raise LineError("messages", f"must be a list that is not empty, is {_shown(messages)}")
    parts = _texts(system)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise LineError(f"messages[{index}]", f"must be an object, is {_kind(message)}")
        role = message.get("role")
        if not isinstance(role, str):
            raise LineError(f"messages[{index}].role", "is missing" if role is None else f"is {_shown(role)}")
        parts.append(role)
        parts += _texts(message.get("content"))
    return "\n".join(parts).encode("utf-8", "replace")


def _response_text(given: object, instructions: object) -> bytes:
    if not isinstance(given, (str, list)) or not given:
        raise LineError("input", f"must be a text or a list that is not empty, is {_shown(given)}")
    parts = _texts(instructions)
    if isinstance(given, str):
        parts.append(given)
    else:
        for index, item in enumerate(given):
            if not isinstance(item, dict):
                raise LineError(f"input[{index}]", f"must be an object, is {_kind(item)}")
            # A message, a call's arguments, a call's result.
            for name in ("content", "arguments", "output"):
                parts += _texts(item.get(name))
    return "\n".join(parts).encode("utf-8", "replace")


def _texts(content: object) -> list[str]:
    """Return the texts of a message's content: one, or of its parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return []
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), "an object")


def _shown(value: object) -> str:
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
