"""Token ids of prompts that come as text, by the model's own tokenizer and chat template, off the event loop.

They decide the length class of prompts in doubt, and where instances report their KV blocks they say which blocks a
prompt has. A thread reads the body again, renders it and has it tokenised, for which the library releases the GIL.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson
from jinja2 import TemplateError
from tokenizers import Tokenizer

from sglang_ext_router.decide.block_index import PromptKind, TokenBlocks
from sglang_ext_router.instances.workers import TokenSource
from sglang_ext_router.request.chat_forms import chat_of_messages, chat_of_response, reads_thought
from sglang_ext_router.request.chat_template import ChatTemplate, ChatText, UnknownPromptError, load_chat_template
from sglang_ext_router.request.prompt import BadRequestError, parse_body, token_blocks

logger = logging.getLogger(__name__)

THREADS = 2
MIN_TEXT_BYTES = 256  # of a text that is tokenised for its blocks: what a shorter one saves is no more than its cost
MAX_BODY_BYTES = 1 << 20  # of a body that is: it takes half a second
MAX_WAITING_BYTES = 1 << 20  # of bodies before it
_TEXTS = frozenset({PromptKind.TEXTS})
_CHAT_PATHS = frozenset({b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"})
_PATHS = _CHAT_PATHS | {b"/generate", b"/v1/completions"}
_Result = TypeVar("_Result")


class TokenisedPrompt(NamedTuple):
    """The blocks of a prompt, and what an instance has to read as the router does for it to have the same."""

    blocks: TokenBlocks
    needs: frozenset[PromptKind]


class PromptTokeniser:
    """Makes and counts tokens with the model's own tokenizer; the library releases the GIL while it works."""

    def __init__(
        self, tokenizer_file: Path, loop: asyncio.AbstractEventLoop, chats: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._chats = chats
        self._loop = loop
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")
        self._waiting_bytes = 0

    def count(self, texts: Sequence[str], done: Callable[[list[int] | None], None]) -> None:
        """Call `done` on the event loop with the tokens of each text, None if they cannot be counted."""
        future = self._threads.submit(self._count, tuple(texts))
        future.add_done_callback(partial(self._deliver, done))

    def can_read(self, path: bytes, body_bytes: int) -> bool:
        """Return whether `read` is worth its time for a body of this size, with what waits before it."""
        return path in _PATHS and body_bytes <= MAX_BODY_BYTES and self._waiting_bytes <= MAX_WAITING_BYTES

    def read(
        self,
        path: bytes,
        raw: bytes | bytearray,
        readings: Set[PromptKind],
        done: Callable[[TokenisedPrompt | None], None],
    ) -> None:
        """Call `done` on the event loop with the blocks of a body's only prompt; None where they are not known.

        They are not where the instances read as the router does no more than `readings`, and it takes more.
        """
        size_bytes = len(raw)
        self._waiting_bytes += size_bytes

        def on_read(result: TokenisedPrompt | None) -> None:
            self._waiting_bytes -= size_bytes
            done(result)

        self._threads.submit(self._read, path, raw, readings).add_done_callback(partial(self._deliver, on_read))

    def ids(
        self, path: bytes, body: Mapping[str, Any], readings: Set[PromptKind]
    ) -> tuple[list[int], frozenset[PromptKind]]:
        """Return the token ids of the body's only prompt, and what they need. Raises UnknownPromptError."""
        if path in _CHAT_PATHS:
            if self._chats is None or PromptKind.CHATS not in readings:
                raise UnknownPromptError("chats are not known here")
            text, continued, needs = _render(self._chats, path, body)
            if not needs <= readings:
                raise UnknownPromptError("instances read this chat in another way")
            ids = self._encode(text, False)
            if continued:  # its first token must not be the token that begins a text
                start = self._encode("", True)
                behind = self._encode(continued, True)
                ids += behind[1:] if start and behind[:1] == start[:1] else behind
            return ids, needs
        if PromptKind.TEXTS not in readings or body.get("suffix") is not None:
            raise UnknownPromptError("texts are not known here")
        given = body.get("prompt" if path == b"/v1/completions" else "text")
        prompt: object = given[0] if type(given) is list and len(given) == 1 else given
        if not isinstance(prompt, str):
            raise UnknownPromptError("the prompt is no text")
        return self._encode(prompt, True), _TEXTS

    def _encode(self, text: str, adds_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special_tokens)[0].ids

    def _read(self, path: bytes, raw: bytes | bytearray, readings: Set[PromptKind]) -> TokenisedPrompt | None:
        try:
            body = parse_body(raw)
            # Of the fields that part prefixes, SGLang's form of Anthropic's messages has only the model.
            parting = {"model": body.get("model")} if path == b"/v1/messages" else body
            if token_blocks(parting, b"") is None:
                return None
            ids, needs = self.ids(path, body, readings)
        except (UnknownPromptError, BadRequestError):
            return None
        blocks = token_blocks(parting, array("q", ids).tobytes())
        return None if blocks is None else TokenisedPrompt(blocks, needs)

    def _count(self, texts: tuple[str, ...]) -> list[int]:
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def _deliver(self, done: Callable[[_Result | None], None], future: Future[_Result | None]) -> None:
        result = None if future.cancelled() or future.exception() is not None else future.result()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(done, result)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Tokenisers:
    """Keeps one tokenizer for each source; models may share it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._by_source: dict[TokenSource, PromptTokeniser | None] = {}

    def of(self, source: TokenSource) -> PromptTokeniser | None:
        """Return the tokenizer of a local model folder; None where there is none that can be used."""
        file = Path(source.folder) / "tokenizer.json"
        if not source.folder or not file.is_file():
            return None
        if source not in self._by_source:
            self._by_source[source] = None  # tried once
            try:
                self._by_source[source] = PromptTokeniser(file, self._loop, _chats(source))
            except Exception as error:  # the library raises bare Exception
                logger.warning("%s cannot be used, token counts stay estimates: %s", file, error)
        return self._by_source[source]

    def close(self) -> None:
        for tokeniser in self._by_source.values():
            if tokeniser is not None:
                tokeniser.close()


def _render(chats: ChatTemplate, path: bytes, body: Mapping[str, Any]) -> ChatText:
    """Return the text of a chat in the form of its path, with all that has to be read alike. UnknownPromptError."""
    if path == b"/v1/chat/completions":
        return chats.render(body)
    if path == b"/v1/messages":
        own = {PromptKind.MESSAGES, PromptKind.THOUGHT} if reads_thought(body) else {PromptKind.MESSAGES}
        rendered = chats.render(chat_of_messages(body, chats.keeps_inline_system), implies_thinking=False)
    else:
        own = {PromptKind.RESPONSES}
        rendered = chats.render(chat_of_response(body, chats.keeps_inline_system))
    return rendered._replace(needs=rendered.needs | own)


def _chats(source: TokenSource) -> ChatTemplate | None:
    try:
        variables = orjson.loads(source.variables) if source.variables else {}
        return load_chat_template(Path(source.folder), source.chat_template, variables)
    except (OSError, ValueError, TemplateError) as error:
        logger.warning("the chat template of %s cannot be used, chats are estimated: %s", source.folder, error)
        return None
