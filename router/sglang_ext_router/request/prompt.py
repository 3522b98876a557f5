"""Read from a request's body what routing needs: the prompt's size, its blocks, and the number of sequences."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import orjson
from pydantic import TypeAdapter, ValidationError

from sglang_ext_router.decide.block_index import PromptKind, TokenBlocks, salt_seed
from sglang_ext_router.decide.prefix_index import BLOCK_ENDS, block_hashes
from sglang_ext_router.http.instance_paths import UNDIVIDED_PATHS

ID_BYTES = 8  # of a token id where hashes are made
MAX_SEQUENCES = 4096  # of one request: each takes a bootstrap room on both instances
IMAGES_OF_VIDEO = 16
# Fields with which a request has a part of the prefix cache of its own, or a prompt that is not its ids.
_OWN_PREFIXES = ("extra_key", "lora_path", "image_data", "video_data", "audio_data", "input_embeds", "session_params")
_IMAGE_PARTS = ("image_url", "input_image", "image")
_AUDIO_PARTS = ("audio_url", "input_audio")


class BadRequestError(ValueError):
    """The request cannot be served; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Prompt(NamedTuple):
    """The prompt of one request. Of a batch, bytes and tokens are sums over all items."""

    text_bytes: int  # length of the text that has to be tokenised
    known_tokens: int | None  # exact number if the client sent token ids
    longest_bytes: int  # of a single item
    longest_known_tokens: int | None
    hashes: list[int]  # of the first item's blocks, which a prefix cache can share
    sequence_count: int  # batch size times n
    samples_per_prompt: int
    is_stream: bool
    texts: tuple[str, ...]  # for exact tokenisation, if the length class is in doubt
    images: int = 0  # the tokens that a processor makes of them are not known here
    audios: int = 0
    max_new_tokens: int = 0  # of the longest reply; 0 where the client leaves it to the instance
    blocks: TokenBlocks | None = None  # of a single prompt whose token ids are known
    needs: frozenset[PromptKind] = frozenset()  # what an instance has to read as the router does, for these to be right


def beginnings(prompt: Prompt, tokens: int) -> list[tuple[int, int]]:
    """Return the hash of each block's text and all before it, and about how many tokens that is, of a single prompt of
    `tokens`."""
    whole_bytes = prompt.longest_bytes or ID_BYTES * tokens
    ends = (end * tokens // whole_bytes for end in BLOCK_ENDS)
    return list(zip(prompt.hashes, ends, strict=False))


def parse_body(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the body, which must be a JSON object. Raise BadRequestError if it is not."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    if type(body) is not dict:
        raise BadRequestError("the body must be a JSON object")
    return body


def measure(path: bytes, body: dict[str, Any]) -> Prompt:
    """Read the prompt; the body's other fields are left to the instances."""
    if path == b"/v1/chat/completions":
        items: list[str | list[int]] = [_chat_text(body, "messages")]
    elif path == b"/v1/responses":
        items = [_response_text(body)]
    elif path == b"/v1/messages":
        items = [_messages_text(body)]
    elif path == b"/v1/completions":
        items = _items(body.get("prompt"), "prompt")
    elif path in UNDIVIDED_PATHS:
        items = _undivided_items(path, body)
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
    texts: list[str] = []
    sizes: list[int] = []
    counts: list[int] = []
    hashes: list[int] = []
    blocks: TokenBlocks | None = None
    for index, item in enumerate(items):
        if type(item) is str:
            encoded = item.encode("utf-8", "replace")
            texts.append(item)
            sizes.append(len(encoded))
        else:
            counts.append(len(item))
            if index == 0:
                encoded = _id_bytes(item)
                if len(items) == 1:
                    blocks = token_blocks(body, encoded)
        if index == 0:
            hashes = block_hashes(encoded)
    is_undivided = path in UNDIVIDED_PATHS
    images, audios = count_media(path, body) if texts and (len(items) == 1 or is_undivided) else (0, 0)
    return Prompt(
        sum(sizes),
        sum(counts) if counts else None,
        max(sizes) if sizes else 0,
        max(counts) if counts else None,
        hashes,
        sequences,
        samples,
        body.get("stream") is True and not is_undivided,
        tuple(texts),
        images,
        audios,
        max_new_tokens(path, body),
        blocks,
    )


def token_blocks(body: dict[str, Any], ids: bytes) -> TokenBlocks | None:
    """Return the blocks of a prompt; None where an instance does not share them with all requests of the same ids."""
    model = body.get("model")
    if any(body.get(name) is not None for name in _OWN_PREFIXES) or (type(model) is str and ":" in model):
        return None
    salt = body.get("cache_salt")
    if salt is None:
        return TokenBlocks(ids)
    return TokenBlocks(ids, salt_seed(salt)) if type(salt) is str else None


_PROMPT: Any = TypeAdapter(list[int] | list[list[int]] | str | list[str])
_TOKEN_IDS: Any = TypeAdapter(list[int])


def _items(value: Any, name: str) -> list[str | list[int]]:
    """Return the prompts of a batch: `value` is a string, a list of token ids, or a list of either."""
    items = _plain_items(value)
    if items is None and name in ("prompt", "input"):  # SGLang takes `"1"`, `1.0` and `true` as token ids there
        try:
            items = _plain_items(_PROMPT.validate_python(value))
        except ValidationError:
            pass
    if items is None:
        message = f"{name} must be a string, a non-empty list of token ids, or a non-empty list of either"
        raise BadRequestError(message, name)
    return items


def _plain_items(value: Any) -> list[str | list[int]] | None:
    """Do as `_items` does, without reading anything; None for what is neither. A list's first token id is looked at."""
    if type(value) is str:
        return [value]
    if type(value) is not list or not value:
        return None
    if type(value[0]) is int:
        return [value]
    for item in value:
        if type(item) is not str and (type(item) is not list or not item or type(item[0]) is not int):
            return None  # an instance exits on an empty prompt
    return list(value)


def _id_bytes(ids: Any) -> bytes:
    """Return token ids as bytes. Raise BadRequestError for ids that are not integers."""
    try:
        try:
            return array("q", ids).tobytes()
        except TypeError:
            return array("q", _TOKEN_IDS.validate_python(ids)).tobytes()
    except (ValidationError, OverflowError):
        raise BadRequestError("token ids must be integers", "input_ids") from None


def _embedded(value: Any) -> list[str | list[int]]:
    """Return prompts as long as the given embeddings: one matrix, or a list of matrices."""
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


def _undivided_items(path: bytes, body: dict[str, Any]) -> list[str | list[int]]:
    """Return the prompts of a request that generates nothing: inputs, or the query with each document or item."""
    if path == b"/v1/rerank":
        documents = body.get("documents")
        if type(documents) is not list or not documents:
            raise BadRequestError("documents must be a non-empty list", "documents")
        query = _block_text(body.get("query"))
        return [f"{query}\n{_block_text(document)}" for document in documents]
    if path == b"/v1/score":
        asked = body.get("query")
        if body.get("items") == []:  # which SGLang answers with no scores
            return [_joined(asked, "")]
        return [_joined(asked, item) for item in _items(body.get("items"), "items")]
    given = body.get("input")
    if type(given) is list and given and type(given[0]) is dict:  # text, image and video
        return [str(item.get("text") or "") if type(item) is dict else "" for item in given]
    return _items(given, "input")


def _joined(query: Any, item: str | list[int]) -> str | list[int]:
    """Return a query with an item behind it, where both are texts or both token ids; otherwise the item."""
    if isinstance(item, str):
        return query + item if type(query) is str else item
    return [*query, *item] if type(query) is list else item


def list_size(body: dict[str, Any]) -> int:
    """Return how many request ids SGLang wants for the `input` of a body, or 0 where the input is no list."""
    given = body.get("input")
    if type(given) is not list or not given or isinstance(given[0], (int, float)):
        return 0
    return 0 if len(given) == 1 and type(given[0]) is dict else len(given)


def _response_text(body: dict[str, Any]) -> str:
    """Return the text of the chat that /v1/responses makes: instructions, then a text or a list of messages."""
    given, instructions = body.get("input"), body.get("instructions")
    text = given if type(given) is str else _chat_text(body, "input")
    return f"{instructions}\n{text}" if type(instructions) is str else text


def _messages_text(body: dict[str, Any]) -> str:
    """Return the text of Anthropic's messages in the order in which the prompt has it, so that turns share a prefix."""
    parts = [_block_text(body.get("system"))]
    tools = body.get("tools")
    if tools:
        parts.append(dump(tools).decode())
    for message in _message_list(body, "messages"):
        role, content = message.get("role"), message.get("content")
        parts.append(role if type(role) is str else "")
        if type(content) is not list:
            parts.append(_block_text(content))
            continue
        parts += [_any_block_text(part) for part in content if type(part) is dict]
    return "\n".join(parts)


def _any_block_text(block: dict[str, Any]) -> str:
    """Return the text of one of Anthropic's blocks: of thought, of a call's arguments, of what a tool has answered."""
    kind = block.get("type")
    if kind == "tool_use":
        return f"{block.get('name')}\n{dump(block.get('input')).decode()}"
    if kind in ("tool_result", "search_result"):
        return _block_text(block.get("content"))
    text = block.get("thinking" if kind == "thinking" else "text")
    return text if type(text) is str else ""


def _block_text(content: Any) -> str:
    if type(content) is str:
        return content
    if type(content) is not list:
        return ""
    return "\n".join([part["text"] for part in content if type(part) is dict and type(part.get("text")) is str])


def _message_list(body: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """Return the messages in `field`. Raise BadRequestError where it is no list of objects."""
    messages = body.get(field)
    if type(messages) is not list or not messages:
        wanted = "a non-empty list" if field == "messages" else "a string or a non-empty list"
        raise BadRequestError(f"{field} must be {wanted}", field)
    for message in messages:
        if type(message) is not dict:
            raise BadRequestError("each message must be an object", field)
    return messages


def _chat_text(body: dict[str, Any], field: str) -> str:
    """Return roles and texts of the messages in `field`, and of the tools, which are part of the prompt too."""
    messages = _message_list(body, field)
    parts: list[str] = []
    tools = body.get("tools")
    if tools:
        parts.append(dump(tools).decode())
    for message in messages:
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
    """Return the numbers of images and audio clips of a request with one prompt; a video counts as 16 images."""
    if path == b"/generate":
        return (
            _media_count(body.get("image_data")) + IMAGES_OF_VIDEO * _media_count(body.get("video_data")),
            _media_count(body.get("audio_data")),
        )
    if path in UNDIVIDED_PATHS:
        return _undivided_images(body), 0
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
            if kind == "tool_result" and type(part.get("content")) is list:
                images += sum(type(item) is dict and item.get("type") == "image" for item in part["content"])
            elif kind in _IMAGE_PARTS:
                images += 1
            elif kind in _AUDIO_PARTS:
                audios += 1
            elif kind == "video_url":
                images += IMAGES_OF_VIDEO
    return images, audios


def _undivided_images(body: dict[str, Any]) -> int:
    """Return the most images of one input, or of the query with one document."""
    inputs = body.get("input")
    if type(inputs) is list:
        shown = [item for item in inputs if type(item) is dict]
        return max(
            [(item.get("image") is not None) + IMAGES_OF_VIDEO * (item.get("video") is not None) for item in shown],
            default=0,
        )
    documents = body.get("documents")
    of_documents = [_part_images(document) for document in documents] if type(documents) is list else []
    return _part_images(body.get("query")) + max(of_documents, default=0)


def _part_images(content: Any) -> int:
    kinds = [part.get("type") for part in content if type(part) is dict] if type(content) is list else []
    return kinds.count("image_url") + IMAGES_OF_VIDEO * kinds.count("video_url")


def _media_count(data: Any) -> int:
    """Return the number of items in one of SGLang's media fields: a single item, a list, or a list of lists."""
    if type(data) is not list:
        return 0 if data is None else 1
    return sum(_media_count(item) for item in data)


def max_new_tokens(path: bytes, body: dict[str, Any]) -> int:
    """Return how many tokens the client asks for at most in one sequence; 0 where it leaves that to the instance."""
    limit: Any
    if path in UNDIVIDED_PATHS:
        return 0
    if path == b"/generate":
        parameters = body.get("sampling_params")
        if type(parameters) is list:
            return max([_limit(item) for item in parameters], default=0)
        return _limit(parameters)
    if path == b"/v1/chat/completions":
        limit = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if limit is None else limit
    else:
        limit = body.get("max_output_tokens" if path == b"/v1/responses" else "max_tokens")
    return limit if type(limit) is int else 0


def _limit(parameters: Any) -> int:
    limit = parameters.get("max_new_tokens") if type(parameters) is dict else None
    return limit if type(limit) is int else 0


def _samples(path: bytes, body: dict[str, Any]) -> int:
    """Return how many sequences the request asks for per prompt."""
    if path in (b"/v1/responses", b"/v1/messages") or path in UNDIVIDED_PATHS:  # which have no `n`
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
    """Return JSON text. Raise BadRequestError for a value that is nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise BadRequestError("the body is nested too deeply") from None
