"""What a request's body says about its prompt, and the body with the prefill-decode fields put in."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import orjson

from sglang_ext.policy.prefix_index import block_hashes

# How many items a batch may hold: each takes one room on both instances.
MAX_SEQUENCES = 4096


class BadRequestError(ValueError):
    """The body cannot be served; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Prompt(NamedTuple):
    """The prompt of one request. For a batch, bytes and tokens are those of all items together."""

    text_bytes: int  # length of the text that has to be tokenised
    known_tokens: int | None  # exact number where the client sent token ids
    longest_bytes: int  # of a single item
    longest_known_tokens: int | None
    hashes: list[int]  # of the first item's blocks: what a prefix cache can share
    sequence_count: int  # batch size times n: rooms that the request takes
    samples_per_prompt: int
    is_stream: bool
    texts: tuple[str, ...]  # for exact tokenisation, should the class be in doubt


def parse_body(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object; BadRequestError says what is wrong."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    if type(body) is not dict:
        raise BadRequestError("the body must be a JSON object")
    return body


def measure(path: bytes, body: dict[str, Any]) -> Prompt:
    """Read what routing needs; the body's other fields are the instances' business."""
    if path == b"/v1/chat/completions":
        items: list[str | list[int]] = [_chat_text(body)]
    elif path == b"/v1/completions":
        items = _items(body.get("prompt"), "prompt")
    else:
        given = [name for name in ("text", "input_ids") if body.get(name) is not None]
        if len(given) > 1:
            raise BadRequestError("give either text or input_ids, not both", "input_ids")
        if not given:
            if body.get("input_embeds") is None:
                raise BadRequestError("text or input_ids is required", "text")
            given = ["input_embeds"]
        items = _items(body[given[0]], given[0]) if given != ["input_embeds"] else [""]
    samples = _samples(path, body)
    sequences = len(items) * samples
    if sequences > MAX_SEQUENCES:
        raise BadRequestError(f"the request makes {sequences} sequences, more than {MAX_SEQUENCES}", "n")
    first = items[0]
    if len(items) == 1 and type(first) is str:
        encoded = first.encode("utf-8", "replace")
        size = len(encoded)
        return Prompt(
            size,
            None,
            size,
            None,
            block_hashes(encoded),
            sequences,
            samples,
            body.get("stream") is True,
            (first,),
        )
    return _measure_items(items, sequences, samples, body.get("stream") is True)


def _measure_items(items: list[str | list[int]], sequences: int, samples: int, is_stream: bool) -> Prompt:
    texts = tuple(item for item in items if type(item) is str)
    sizes = [len(text.encode("utf-8", "replace")) for text in texts]
    counts = [len(item) for item in items if type(item) is not str]
    first = items[0]
    if type(first) is str:
        encoded = first.encode("utf-8", "replace")
    else:
        try:
            encoded = array("q", first).tobytes()
        except (TypeError, OverflowError):
            raise BadRequestError("token ids must be integers", "input_ids") from None
    return Prompt(
        sum(sizes),
        sum(counts) if counts else None,
        max(sizes, default=0),
        max(counts) if counts else None,
        block_hashes(encoded),
        sequences,
        samples,
        is_stream,
        texts,
    )


def _items(value: Any, name: str) -> list[str | list[int]]:
    """One string, one list of token ids, or a list of either."""
    if type(value) is str:
        return [value]
    if type(value) is not list or not value:
        raise BadRequestError(f"{name} must be a string, a list of token ids, or a non-empty list of these", name)
    if type(value[0]) is int:
        return [value]
    for item in value:
        if type(item) is not str and type(item) is not list:
            raise BadRequestError(f"{name} holds an item that is neither a string nor a list of token ids", name)
    return list(value)


def _chat_text(body: dict[str, Any]) -> str:
    """Roles and texts of all messages; tools are part of the prompt too."""
    messages = body.get("messages")
    if type(messages) is not list or not messages:
        raise BadRequestError("messages must be a non-empty list", "messages")
    parts: list[str] = []
    tools = body.get("tools")
    if tools:
        parts.append(orjson.dumps(tools).decode())
    for message in messages:
        if type(message) is not dict:
            raise BadRequestError("each message must be an object", "messages")
        role = message.get("role")
        parts.append(role if type(role) is str else "")
        content = message.get("content")
        if type(content) is str:
            parts.append(content)
        elif type(content) is list:
            parts += [part["text"] for part in content if type(part) is dict and type(part.get("text")) is str]
        calls = message.get("tool_calls")
        if calls:
            parts.append(orjson.dumps(calls).decode())
    return "\n".join(parts)


def _samples(path: bytes, body: dict[str, Any]) -> int:
    if path == b"/generate":
        parameters = body.get("sampling_params")
        if type(parameters) is not dict:
            return 1
        value, name = parameters.get("n"), "sampling_params.n"
    else:
        value, name = body.get("n"), "n"
    if value is None:
        return 1
    if type(value) is not int or value < 1:
        raise BadRequestError(f"{name} must be a positive integer", name)
    return value


def with_bootstrap(raw: bytes, body: dict[str, Any], bootstrap_json: bytes, room: int, request_id: bytes) -> bytes:
    """The body with where to meet, and a request id unless the client gave one.

    `bootstrap_json` ends in `"bootstrap_room":`. A client's own bootstrap fields are always overwritten. Where
    there are none the text is extended rather than written anew: parsing is paid already, writing is not.
    """
    own_id = body.get("rid") is not None
    if (
        "bootstrap_room" in body
        or "bootstrap_host" in body
        or "bootstrap_port" in body
        or ("rid" in body and not own_id)
    ):
        kept = {key: value for key, value in body.items() if not key.startswith("bootstrap_")}
        if not own_id:
            kept.pop("rid", None)
        raw = orjson.dumps(kept)
        body = kept
    end = raw.rindex(b"}")
    comma = b"," if body else b""
    if own_id:
        return b"%b%b%b%d}" % (raw[:end], comma, bootstrap_json, room)
    return b'%b%b%b%d,"rid":"%b"}' % (raw[:end], comma, bootstrap_json, room, request_id)


def abort_ids(body: dict[str, Any], request_id: str, sequence_count: int, samples: int) -> list[str]:
    """Request ids by which the instances know the sequences of this request."""
    given = body.get("rid")
    if type(given) is list:
        return [item for item in given if type(item) is str]
    base = given if type(given) is str else request_id
    if sequence_count == 1:
        return [base]
    return [f"{base}_{i}" for i in range(sequence_count)]


def find_int(data: bytes, key: bytes) -> int | None:
    """Value of the last `"key":<int>` in JSON text, without parsing all of it."""
    start = data.rfind(key)
    if start < 0:
        return None
    start += len(key)
    while start < len(data) and data[start] in b": ":
        start += 1
    end = start
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    return int(data[start:end]) if end > start else None
