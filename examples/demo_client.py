"""The demonstration's client: the `openai` package as it is, several streamed chats at once.

The package is imported when it is needed, since the demonstration imports it while its cluster starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import openai

MOST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Question:
    """One chat of one turn."""

    label: str
    text: str
    max_tokens: int
    waits: bool = False  # until `is_time`, while the other questions are sent at once


@dataclass(slots=True)
class Reply:
    """Describes what came back, and when; times in seconds since the first questions were sent."""

    question: Question
    length_class: str = ""
    prefill_url: str = ""
    decode_url: str = ""
    request_id: str = ""  # the router's own: the room of its last attempt, in hexadecimal
    sent_s: float = 0.0
    queue_s: float = 0.0  # waited in the router
    token_times_s: list[float] = field(default_factory=list)  # one per streamed piece of text
    end_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token, from sending the question on."""
        return self.token_times_s[0] - self.sent_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / (self.token_times_s[-1] - self.token_times_s[0])


class View(Protocol):
    """Shows replies while they grow."""

    def routed(self, reply: Reply) -> None:
        """The router has answered; the reply's class and instances are known."""

    def grew(self, reply: Reply, piece: str) -> None:
        """`piece` was added to the reply's text."""

    def ended(self, reply: Reply) -> None:
        """The reply is whole, or has failed."""


async def ask_all(
    base_url: str, model: str, questions: Sequence[Question], view: View, is_time: Callable[[], bool]
) -> list[Reply]:
    """Send the questions, the waiting ones once `is_time`; return the replies in the same order, failures in `error`.

    `is_time` is asked in a thread, and may block; after MOST_WAIT_S it is time anyway.
    """
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=300, max_retries=0) as client:
        began_s = time.monotonic()
        go = asyncio.create_task(_until(is_time))
        return await asyncio.gather(*(_ask(client, model, question, view, began_s, go) for question in questions))


async def _until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + MOST_WAIT_S
    while time.monotonic() < end_s and not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - it is asked over HTTP
        await asyncio.sleep(0.05)


async def _ask(
    client: openai.AsyncOpenAI, model: str, question: Question, view: View, began_s: float, go: asyncio.Task[None]
) -> Reply:
    import openai

    reply = Reply(question)
    if question.waits:
        await go
    reply.sent_s = time.monotonic() - began_s
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": question.text}],
            max_tokens=question.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        _read_headers(reply, raw.headers)
        view.routed(reply)
        async for chunk in raw.parse():
            if chunk.usage is not None:
                reply.prompt_tokens = chunk.usage.prompt_tokens
                reply.completion_tokens = chunk.usage.completion_tokens
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                reply.token_times_s.append(time.monotonic() - began_s)
                reply.text += piece
                view.grew(reply, piece)
        if not reply.token_times_s:
            reply.error = "the answer is empty"
    except openai.OpenAIError as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.end_s = time.monotonic() - began_s
    view.ended(reply)
    return reply


def _read_headers(reply: Reply, headers: Mapping[str, str]) -> None:
    reply.length_class = headers.get("x-sglang-ext-class", "?")
    reply.prefill_url = headers.get("x-sglang-ext-prefill", "?")
    reply.decode_url = headers.get("x-sglang-ext-decode", "?")
    reply.request_id = headers.get("x-request-id", "")
    reply.queue_s = float(headers.get("x-sglang-ext-queue-ms", "0")) / 1e3
