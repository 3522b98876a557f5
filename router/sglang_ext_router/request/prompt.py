"""What a request's body says about its prompt: its size, its blocks, and how many sequences it makes."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import orjson

from sglang_ext_router.decide.prefix_index import block_hashes

# How many items a batch may hold: each takes one room on both instances.
MAX_SEQUENCES = 4096
IMAGES_OF_VIDEO = 16
_IMAGE_PARTS = ("image_url", "input_image")
_AUDIO_PARTS = ("audio_url", "input_audio")


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
    images: int = 0  # what a processor makes of them is not known here
    audios: int = 0


def parse_body(raw: bytes | bytearray) -> dict[str, Any]:
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
        items: list[str | list[int]] = [_chat_text(body, "messages")]
    elif path == b"/v1/responses":
        items = [_response_text(body)]
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
        images, audios = count_media(path, body)
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
            images,
            audios,
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
        if type(item) is list and (not item or type(item[0]) is not int):  # an instance ends at one without tokens
            raise BadRequestError(f"{name} holds a list that does not begin with a token id", name)
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


def _response_text(body: dict[str, Any]) -> str:
    """What /v1/responses makes a chat of: instructions, then a text or a list of messages and other items."""
    given, instructions = body.get("input"), body.get("instructions")
    text = given if type(given) is str else _chat_text(body, "input")
    return f"{instructions}\n{text}" if type(instructions) is str else text


def _chat_text(body: dict[str, Any], field: str) -> str:
    """Roles and texts of all messages, which are in `field`; tools are part of the prompt too."""
    messages = body.get(field)
    if type(messages) is not list or not messages:
        wanted = "a non-empty list" if field == "messages" else "a string or a non-empty list"
        raise BadRequestError(f"{field} must be {wanted}", field)
    parts: list[str] = []
    tools = body.get("tools")
    if tools:
        parts.append(dump(tools).decode())
    for message in messages:
        if type(message) is not dict:
            raise BadRequestError("each message must be an object", field)
        role = message.get("role")
        parts.append(role if type(role) is str else "")
        content = message.get("content")
        if type(content) is str:
            parts.append(content)
        elif type(content) is list:
            parts += [part["text"] for part in content if type(part) is dict and type(part.get("text")) is str]
        calls = message.get("tool_calls")
        if calls:
            parts.append(dump(calls).decode())
    return "\n".join(parts)


def count_media(path: bytes, body: dict[str, Any]) -> tuple[int, int]:
    """Images and pieces of audio of a request with one prompt; a video counts as 16 images."""
    if path == b"/generate":
        return (
            _given(body.get("image_data")) + IMAGES_OF_VIDEO * _given(body.get("video_data")),
            _given(body.get("audio_data")),
        )
    images = audios = 0
    messages = body.get("input" if path == b"/v1/responses" else "messages")
    if type(messages) is not list:
        return 0, 0
    for message in messages:
        content = message.get("content")
        if type(content) is not list:
            continue
        for part in content:
            kind = part.get("type") if type(part) is dict else None
            if kind in _IMAGE_PARTS:
                images += 1
            elif kind in _AUDIO_PARTS:
                audios += 1
            elif kind == "video_url":
                images += IMAGES_OF_VIDEO
    return images, audios


def _given(data: Any) -> int:
    """How many there are in one of SGLang's fields for media: one, a list, or a list of lists."""
    if type(data) is not list:
        return 0 if data is None else 1
    return sum(_given(item) for item in data)


def _samples(path: bytes, body: dict[str, Any]) -> int:
    if path == b"/v1/responses":
        return 1
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


def dump(value: object) -> bytes:
    """JSON text; BadRequestError for what is nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise BadRequestError("the body is nested too deeply") from None
