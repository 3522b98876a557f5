"""LlamaIndex's client for servers of OpenAI's API."""

from __future__ import annotations

import gc

import steps
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError

SERVER = {
    "api_base": f"{steps.url()}/v1",
    "api_key": "any",
    "model": steps.model(),
    "temperature": 0,
    "max_retries": 0,
    "context_window": 2048,
    "is_chat_model": True,
}
llm = OpenAILike(**SERVER, max_tokens=steps.MAX_TOKENS)
ASKED = [ChatMessage(role="user", content=steps.QUESTION)]


def answer() -> None:
    whole = llm.chat(ASKED)
    assert whole.message.content
    assert whole.raw.choices[0].finish_reason == "length"


def completion() -> None:
    model = OpenAILike(**{**SERVER, "is_chat_model": False}, max_tokens=steps.MAX_TOKENS)
    whole = model.complete("def parse(").text
    assert whole
    assert [*model.stream_complete("def parse(")][-1].text == whole


def stream() -> None:
    pieces = list(llm.stream_chat(ASKED))
    assert len([piece for piece in pieces if piece.delta]) > 1
    assert "".join(piece.delta or "" for piece in pieces) == llm.chat(ASKED).message.content


async def asynchronous() -> None:
    whole = llm.chat(ASKED).message.content
    assert (await llm.achat(ASKED)).message.content == whole
    assert "".join([piece.delta or "" async for piece in await llm.astream_chat(ASKED)]) == whole


def usage() -> None:
    counts = llm.chat(ASKED).additional_kwargs
    assert counts["completion_tokens"] == steps.MAX_TOKENS
    assert counts["total_tokens"] == counts["prompt_tokens"] + steps.MAX_TOKENS


def context_overflow() -> None:
    for call in (
        lambda: llm.complete(steps.TOO_LONG),
        lambda: list(llm.stream_complete(steps.TOO_LONG)),
        lambda: OpenAILike(**SERVER, max_tokens=1800).complete(steps.QUESTION * 100),
    ):
        error = steps.error_of(BadRequestError, call)  # it has no error of its own for this
        assert error.code == "context_length_exceeded"


def bad_field() -> None:
    error = steps.error_of(BadRequestError, lambda: llm.chat(ASKED, presence_penalty="high"))
    assert error.param == "presence_penalty"


def models() -> None:
    assert [model.id for model in llm._get_client().models.list()] == [steps.model()]


def structured_output() -> None:
    schema = {"name": "city", "schema": steps.CITY_SCHEMA, "strict": True}
    whole = OpenAILike(**SERVER, max_tokens=100).chat(
        ASKED, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert whole.message.content.startswith('{"city":')


def abort() -> None:
    before = steps.aborted_count()
    more = {"extra_body": {"ignore_eos": True}}
    pieces = OpenAILike(**SERVER, max_tokens=steps.ABORTED_TOKENS, additional_kwargs=more).stream_chat(ASKED)
    steps.read_some(pieces)
    pieces.close()
    gc.collect()  # its wrappers hold the reply in a cycle of references
    steps.wait_aborted(before)


steps.run(
    answer,
    completion,
    stream,
    asynchronous,
    usage,
    context_overflow,
    bad_field,
    models,
    structured_output,
    abort,
)
