"""The demonstration's client: the `openai` package as it is, several streamed chats at once.

The package is imported when it is needed, since the demonstration imports it while its cluster starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True, slots=True)
class Question:
    """One chat of one turn."""

    label: str
    text: str
    max_tokens: int
    at_s: float = 0.0  # when it is sent, in seconds since the first one


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


async def ask_all(base_url: str, model: str, questions: Sequence[Question], view: View) -> list[Reply]:
    """Send each question at its time; return the replies in the same order, failures in `error`."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=300, max_retries=0) as client:
        began_s = time.monotonic()
        return await asyncio.gather(*(_ask(client, model, question, view, began_s) for question in questions))


async def _ask(client: openai.AsyncOpenAI, model: str, question: Question, view: View, began_s: float) -> Reply:
    import openai

    reply = Reply(question)
    await asyncio.sleep(began_s + question.at_s - time.monotonic())
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
    """Read where the router has sent the request; a stock instance says nothing of it."""
    reply.length_class = headers.get("x-sglang-ext-class", "")
    reply.prefill_url = headers.get("x-sglang-ext-prefill", "")
    reply.decode_url = headers.get("x-sglang-ext-decode", "")
    reply.request_id = headers.get("x-request-id", "")
    reply.queue_s = float(headers.get("x-sglang-ext-queue-ms", "0")) / 1e3
