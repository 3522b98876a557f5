"""Streams that outlive their decode instance: what a client has of its stream, and the rest of it from other instances.

    SentStream keeps what is relayed -> `delivered` reads text and token ids from it -> ContinuedStream relays the rest

The body goes to other instances again, with the ids of the tokens so far, which they take as output that they have
generated (`sglang_ext/engine/hooks/continuations.py`). Their stream begins at its first token once more; what the
client has is left out of it by its text, so that events of another size, or an incomplete character at the seam, do no
harm. Instances without that hook generate the tokens again, which gives the same text where the request is greedy.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import orjson

from sglang_ext.token_marks import read_marks
from sglang_ext_router.http.replies import CHUNKED_END, Unchunked, chunk
from sglang_ext_router.request.prompt import Prompt

MAX_KEPT_BYTES: Final = 4 << 20  # of one stream; a longer one cannot go on elsewhere
_TRIMMED_BYTES: Final = 64 << 10  # of a stream of /generate, each time its last events are found
_RUN: Final = 256  # events that are joined at a time
_MAX_HEADS: Final = 4  # the text of a chat may be reasoning, then an answer
_NO_HEAD: Final = b"\x00"  # begins no event
_BEFORE_TEXT: Final = re.compile(rb'[0-9a-f]+\r\n(data: \{[^\n]*?"(?:content|reasoning_content|text)":")')
_EVENT: Final = b"data: {"
_CHAT: Final = b"/v1/chat/completions"
_PATHS: Final = frozenset({_CHAT, b"/v1/completions", b"/generate"})
# Fields with which a stream has a state that tokens do not restore, or events that cannot be cut.
_HINDRANCES: Final = frozenset(
    {
        *("tool_choice", "response_format", "json_schema", "regex", "ebnf", "structural_tag", "custom_logit_processor"),
        *("logprobs", "top_logprobs", "return_logprob", "return_token_ids", "return_hidden_states", "watermark"),
        *("return_routed_experts", "return_indexer_topk", "return_sampling_mask", "input_embeds", "beam_width"),
        *("session_id", "session_params", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("image_data", "video_data", "audio_data"),
    }
)
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),  # a grammar forces any other choice
}


def may_migrate(path: bytes, body: dict[str, Any], prompt: Prompt) -> bool:
    """Return whether the stream that a body asks for can go on on other instances."""
    if not prompt.is_stream or prompt.sequence_count != 1 or path not in _PATHS or prompt.images or prompt.audios:
        return False
    if not _HINDRANCES.isdisjoint(body) and not _are_neutral(body):
        return False
    parameters = body.get("sampling_params")
    return type(parameters) is not dict or _HINDRANCES.isdisjoint(parameters) or _are_neutral(parameters)


def _are_neutral(fields: dict[str, Any]) -> bool:
    """Return whether the fields that could hinder a migration have values that do not."""
    for name in _HINDRANCES.intersection(fields):
        value = fields[name]
        is_count = name == "logprobs" and type(value) is int  # 0 asks for the tokens' own
        if (value or is_count) and value not in _NEUTRAL.get(name, ()):
            return False
    return True


class Delivered(NamedTuple):
    """The part of a stream that its client has."""

    ids: list[int]  # tokens, at least those of the text
    texts: dict[str, str]  # by the name of an event's field
    id: str
    created: int
    has_role: bool  # the event that begins a chat
    is_cumulative: bool  # each event has all text so far

    @property
    def has_text(self) -> bool:
        return any(self.texts.values())


class SentStream:
    """Keeps the events of one stream as they are relayed.

    Most of an event is the same in all: what precedes its text is kept once. Of /generate, where each event has all
    text so far, the last ones are enough.
    """

    __slots__ = (
        "_blocks",
        "_cut",
        "_head",
        "_heads",
        "_is_kept",
        "_keeps_last",
        "_path",
        "_run",
        "_size_bytes",
        "_size_line_bytes",
    )

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._keeps_last = path == b"/generate"
        self._blocks: list[bytes] = []  # in which a byte below 8 stands for a head
        self._run: list[bytes] = []  # the last events, without their head
        self._heads: list[bytes] = []
        self._head = _NO_HEAD  # of the last events
        self._size_line_bytes = 0  # of their chunks
        self._cut = 0
        self._size_bytes = 0
        self._is_kept = True

    def keep(self, data: bytes) -> None:
        """Take a piece of the stream, in chunks as it came."""
        if data.startswith(self._head, self._size_line_bytes):
            self._run.append(data[self._cut :])
            if len(self._run) >= _RUN:
                self._end_run()
        else:
            self._keep_whole(data)

    def _end_run(self) -> None:
        """Put the last events into a block."""
        if self._run:
            marker = bytes([self._heads.index(self._head)])
            self._add(marker + marker.join(self._run))
            self._run.clear()

    def _keep_whole(self, data: bytes) -> None:
        """Keep a piece that does not begin as the last events do: perhaps those to come will begin as this one does."""
        self._end_run()
        self._add(data)
        found = None if self._keeps_last else _BEFORE_TEXT.match(data)
        if found is None:
            return
        head = found[1]
        if head not in self._heads:
            if len(self._heads) == _MAX_HEADS:
                return
            self._heads.append(head)
        self._head, self._size_line_bytes, self._cut = head, found.start(1), found.end(1)

    def _add(self, block: bytes) -> None:
        if not self._is_kept:
            return
        self._blocks.append(block)
        self._size_bytes += len(block)
        if self._size_bytes > MAX_KEPT_BYTES:
            self._is_kept = False
            self._blocks.clear()
        elif self._keeps_last and self._size_bytes > _TRIMMED_BYTES:
            kept = self._last_events(b"".join(self._blocks))
            self._blocks = [kept]
            self._size_bytes = 0

    def _last_events(self, kept: bytes) -> bytes:
        """Return the last two whole events and what follows, if each event has all text so far."""
        end = kept.rfind(b"\n\n")
        last = kept.rfind(_EVENT, 0, max(0, end))
        before = kept.rfind(_EVENT, 0, max(0, last))
        if before < 0:
            return kept
        try:
            event = orjson.loads(kept[last + 6 : end])
            is_cumulative = len(event["output_ids"]) == event["meta_info"]["completion_tokens"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return kept
        return kept[before:] if is_cumulative else kept

    def delivered(self) -> Delivered | None:
        """Return what the client has; None where the stream cannot go on: its end was sent, or it was too long."""
        if not self._is_kept:
            return None
        self._end_run()
        body = b"".join(self._blocks)
        for number, head in enumerate(self._heads):
            body = body.replace(bytes([number]), b"\n" + head)  # behind a part of the chunk's size, perhaps
        try:
            return self._read(body)
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError, ValueError):
            return None

    def _read(self, body: bytes) -> Delivered | None:
        ids: list[int] = []
        texts: dict[str, str] = {}
        first: dict[str, Any] = {}
        has_role = is_cumulative = False
        for line in body.split(b"\n"):
            if not line.startswith(_EVENT):
                continue
            event = orjson.loads(line[6:])
            first = first or event
            if self._path == b"/generate":
                meta, new_ids = event["meta_info"], event["output_ids"]
                if meta["finish_reason"] is not None:
                    return None
                is_cumulative = len(new_ids) == meta["completion_tokens"]
                ids = new_ids if is_cumulative else ids + new_ids
                texts["text"] = event["text"] if is_cumulative else texts.get("text", "") + event["text"]
                continue
            ids += read_marks(line)
            choice = event["choices"][0]
            if choice["finish_reason"] is not None or choice.get("delta", {}).get("tool_calls"):
                return None
            fields = choice["delta"] if self._path == _CHAT else choice
            has_role = has_role or bool(fields.get("role"))
            for name in _text_fields(self._path):
                texts[name] = texts.get(name, "") + (fields.get(name) or "")
        if not first:
            return None
        own_id = first["meta_info"]["id"] if self._path == b"/generate" else first["id"]
        return Delivered(ids, texts, own_id, first.get("created", 0), has_role, is_cumulative)


def _text_fields(path: bytes) -> tuple[str, ...]:
    return ("reasoning_content", "content") if path == _CHAT else ("text",)


class ContinuedStream:
    """Relays the stream of the instances that a request has gone on to, without what its client has.

    Events have the id and the time of the stream's beginning.
    """

    __slots__ = ("_body", "_delivered", "_is_chunked", "_kept", "_left", "_left_ids", "_path", "has_differed")

    def __init__(self, path: bytes, delivered: Delivered, id_end: bytes, is_chunked: bool) -> None:
        """`id_end`: what the client does not see of its own id; `is_chunked`: it gets the stream in chunks."""
        self._path = path
        self._delivered = delivered._replace(id=delivered.id.removesuffix(id_end.decode()))
        self._is_chunked = is_chunked
        self._body = Unchunked()
        self._kept = b""  # of an event that is not here whole
        self._left = dict(delivered.texts)  # what the client has and this stream has not brought yet
        self._left_ids = len(delivered.ids)
        self.has_differed = False  # the stream brings another text than the client has; nothing of it may be sent

    @property
    def is_level(self) -> bool:
        """Return whether the stream has brought all that the client has."""
        return not any(self._left.values())

    def feed(self, data: bytes) -> bytes:
        """Return what the client gets for these bytes of the instance's reply."""
        body = self._kept + self._body.feed(data)
        is_over = self._body.is_over
        end = len(body) if is_over else body.rfind(b"\n\n") + 2 if b"\n\n" in body else 0
        self._kept = body[end:]
        try:
            events = [self._event(event + b"\n\n") for event in body[:end].split(b"\n\n") if event]
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
            self.has_differed = True  # an event of an unexpected shape
        if self.has_differed:
            return b""
        sent = b"".join(events)
        if not self._is_chunked:
            return sent
        return (chunk(sent) if sent else b"") + (CHUNKED_END if is_over else b"")

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(_EVENT):
            return event
        message = orjson.loads(event[6:])
        if "error" in message:
            return event
        is_new = self._cut_generated(message) if self._path == b"/generate" else self._cut(message)
        return b"data: %b\n\n" % orjson.dumps(message) if is_new else b""

    def _cut_generated(self, message: dict[str, Any]) -> bool:
        """Cut an event of /generate; return whether anything new is left."""
        meta = message["meta_info"]
        meta["id"] = self._delivered.id
        is_end = meta["finish_reason"] is not None
        if not self._delivered.is_cumulative:
            was_level = self.is_level
            message["text"] = self._rest("text", message["text"])
            ids = message["output_ids"]
            message["output_ids"] = ids[self._left_ids :]
            self._left_ids = max(0, self._left_ids - len(ids))
            return was_level or is_end or bool(message["text"])
        given = self._delivered.texts["text"]
        if not message["text"].startswith(given[: len(message["text"])]):
            self.has_differed = True
        is_new = is_end or len(message["output_ids"]) > self._left_ids
        if is_new:
            self._left.clear()
        return is_new

    def _cut(self, message: dict[str, Any]) -> bool:
        """Cut an event of the OpenAI endpoints; return whether anything new is left."""
        delivered = self._delivered
        message["id"], message["created"] = delivered.id, delivered.created
        usage = message.get("usage")
        details = usage.get("prompt_tokens_details") if usage else None
        if usage and details:  # the tokens so far may have been cached, too
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        if not message["choices"]:
            return True
        choice = message["choices"][0]
        fields = choice["delta"] if self._path == _CHAT else choice
        if fields.get("role") and delivered.has_role:
            return False
        was_level, is_new = self.is_level, choice["finish_reason"] is not None
        for name in _text_fields(self._path):
            if fields.get(name):
                fields[name] = self._rest(name, fields[name])
                is_new = is_new or bool(fields[name])
        return was_level or is_new

    def _rest(self, name: str, text: str) -> str:
        """Return the part of the text that the client does not have."""
        left = self._left.get(name, "")
        size = min(len(left), len(text))
        if left[:size] != text[:size]:
            self.has_differed = True
        self._left[name] = left[size:]
        return text[size:]
