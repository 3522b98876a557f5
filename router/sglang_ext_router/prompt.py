"""What a request's body says about its prompt, and the body with the prefill-decode fields put in."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import orjson

from sglang_ext.policy.routing.prefix_index import block_hashes

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
        items = _embedded(body["input_embeds"]) if given == ["input_embeds"] else _items(body[given[0]], given[0])
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


def _embedded(value: Any) -> list[str | list[int]]:
    """Prompts given as embeddings: one matrix, or a list of them; only their lengths matter here."""
    matrices = value if type(value) is list and value and _depth(value) == 3 else [value]
    if not all(type(matrix) is list and matrix for matrix in matrices):
        raise BadRequestError("input_embeds must be a non-empty matrix or a list of these", "input_embeds")
    return [[0] * len(matrix) for matrix in matrices]


def _depth(value: Any) -> int:
    depth = 0
    while type(value) is list:
        depth += 1
        value = value[0] if value else None
    return depth


def _chat_text(body: dict[str, Any]) -> str:
    """Roles and texts of all messages; tools are part of the prompt too."""
    messages = body.get("messages")
    if type(messages) is not list or not messages:
        raise BadRequestError("messages must be a non-empty list", "messages")
    parts: list[str] = []
    tools = body.get("tools")
    if tools:
        parts.append(_dump(tools).decode())
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
            parts.append(_dump(calls).decode())
    return "\n".join(parts)


def _samples(path: bytes, body: dict[str, Any]) -> int:
    if path == b"/generate":
        parameters = body.get("sampling_params")
        if type(parameters) is list and parameters:
            parameters = parameters[0]  # SGLang takes the first one's for all
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


class CleanBody(NamedTuple):
    """A body without the fields that the router sets itself."""

    raw: bytes
    is_empty: bool
    request_ids: str | list[str] | None  # the client's own, under which it finds its reply


def clean_body(raw: bytes, body: dict[str, Any]) -> CleanBody:
    """Take out a client's bootstrap fields and request id; where there are none the text stays as it came.

    BadRequestError for an id that is not a string or a list of strings.
    """
    given = body.get("rid")
    if not (given is None or type(given) is str or (type(given) is list and all(type(item) is str for item in given))):
        raise BadRequestError("rid must be a string or a list of strings", "rid")
    if ROUTER_FIELDS.isdisjoint(body):
        return CleanBody(raw, not body, None)
    kept = {key: value for key, value in body.items() if key not in ROUTER_FIELDS}
    return CleanBody(_dump(kept), not kept, given)


def with_bootstrap(clean: CleanBody, bootstrap_json: bytes, room: int, room_id: bytes) -> bytes:
    """The body with where to meet (`bootstrap_json` ends in `"bootstrap_room":`) and a request id.

    The text is extended rather than written anew: parsing is paid already, writing is not. An id is made
    unique by the room, because SGLang aborts every request whose id begins with the one to abort.
    """
    end = clean.raw.rindex(b"}")
    comma = b"" if clean.is_empty else b","
    given = clean.request_ids
    if given is None:
        return b'%b%b%b%d,"rid":"%b"}' % (clean.raw[:end], comma, bootstrap_json, room, room_id)
    suffix = "-" + room_id.decode()
    unique = given + suffix if isinstance(given, str) else [item + suffix for item in given]
    return b'%b%b%b%d,"rid":%b}' % (clean.raw[:end], comma, bootstrap_json, room, _dump(unique))


def abort_ids(clean: CleanBody, room_id: bytes, sequence_count: int, samples: int) -> list[str]:
    """Request ids by which the instances know the sequences of this request."""
    given = clean.request_ids
    suffix = "-" + room_id.decode()
    if isinstance(given, list):
        if samples == 1:
            return [item + suffix for item in given]
        return [f"{item}{suffix}_{i}" for item in given for i in range(samples)]
    # Aborting an id aborts all that begin with it, which a batch's `ID_0`, `ID_1`, ... do; an instance's front
    # end however knows only the whole ones.
    base = room_id.decode() if given is None else given + suffix
    return [base] if sequence_count == 1 else [f"{base}_{i}" for i in range(sequence_count)]


ROUTER_FIELDS = frozenset({"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"})


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise BadRequestError("the body is nested too deeply") from None


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
