"""LangChain's chat model for OpenAI's API."""

from __future__ import annotations

import steps
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI
from openai import BadRequestError
from openai import OpenAI as Client

SERVER = {"base_url": f"{steps.url()}/v1", "api_key": "any", "model": steps.model(), "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**SERVER, max_tokens=steps.MAX_TOKENS)


def answer() -> None:
    whole = chat.invoke(steps.QUESTION)
    assert whole.content
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.response_metadata["model_name"] == steps.model()


def completion() -> None:
    model = OpenAI(**SERVER, max_tokens=steps.MAX_TOKENS)
    assert "".join(model.stream("def parse(")) == model.invoke("def parse(")


def stream() -> None:
    pieces = list(chat.stream(steps.QUESTION))
    assert len([piece for piece in pieces if piece.content]) > 1
    assert "".join(piece.content for piece in pieces) == chat.invoke(steps.QUESTION).content


async def asynchronous() -> None:
    whole = chat.invoke(steps.QUESTION)
    assert (await chat.ainvoke(steps.QUESTION)).content == whole.content
    assert "".join([piece.content async for piece in chat.astream(steps.QUESTION)]) == whole.content


def usage() -> None:
    whole = chat.invoke(steps.QUESTION).usage_metadata
    assert whole["output_tokens"] == steps.MAX_TOKENS
    assert whole["total_tokens"] == whole["input_tokens"] + steps.MAX_TOKENS
    streamed = ChatOpenAI(**SERVER, max_tokens=steps.MAX_TOKENS, stream_usage=True)
    (last,) = [piece.usage_metadata for piece in streamed.stream(steps.QUESTION) if piece.usage_metadata]
    assert (last["input_tokens"], last["output_tokens"]) == (whole["input_tokens"], whole["output_tokens"])


def responses() -> None:
    model = ChatOpenAI(**SERVER, max_tokens=steps.MAX_TOKENS, use_responses_api=True)
    whole = model.invoke(steps.QUESTION)
    assert whole.text
    assert "".join(piece.text for piece in model.stream(steps.QUESTION)) == whole.text


def context_overflow() -> None:
    for call in (
        lambda: chat.invoke(steps.TOO_LONG),
        lambda: list(chat.stream(steps.TOO_LONG)),
        lambda: ChatOpenAI(**SERVER, use_responses_api=True).invoke(steps.TOO_LONG),
        lambda: ChatOpenAI(**SERVER, max_tokens=1800).invoke(steps.QUESTION * 100),
    ):
        assert "context length" in str(steps.error_of(ContextOverflowError, call))


def bad_field() -> None:
    error = steps.error_of(BadRequestError, lambda: chat.invoke(steps.QUESTION, presence_penalty="high"))
    assert not isinstance(error, ContextOverflowError)
    assert error.param == "presence_penalty"


def models() -> None:
    client: Client = chat.root_client
    assert [model.id for model in client.models.list()] == [steps.model()]


def structured_output() -> None:
    model = ChatOpenAI(**SERVER, max_tokens=400).with_structured_output(steps.CITY_SCHEMA | {"title": "city"})
    assert model.invoke(steps.QUESTION)["city"] in ("Oslo", "Rome")


def abort() -> None:
    before = steps.aborted_count()
    pieces = ChatOpenAI(**SERVER, max_tokens=steps.ABORTED_TOKENS, extra_body={"ignore_eos": True}).stream(
        steps.QUESTION
    )
    steps.read_some(pieces)
    pieces.close()
    steps.wait_aborted(before)


steps.run(
    answer,
    completion,
    stream,
    asynchronous,
    usage,
    responses,
    context_overflow,
    bad_field,
    models,
    structured_output,
    abort,
)
