"""Pydantic AI's agents over a server of OpenAI's API."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Literal

import steps
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{steps.url()}/v1", api_key="any")
model = OpenAIChatModel(steps.model(), provider=provider)
SETTINGS = {"temperature": 0, "max_tokens": steps.MAX_TOKENS}
agent = Agent(model, model_settings=SETTINGS)


class City(BaseModel):
    """A city."""

    city: Literal["Oslo", "Rome"]
    is_capital: bool


async def answer() -> None:
    assert (await agent.run(steps.QUESTION)).output


async def stream() -> None:
    whole = (await agent.run(steps.QUESTION)).output
    async with agent.run_stream(steps.QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1
    assert "".join(pieces) == whole


async def usage() -> None:
    whole = (await agent.run(steps.QUESTION)).usage
    assert whole.output_tokens == steps.MAX_TOKENS
    async with agent.run_stream(steps.QUESTION) as result:
        await result.get_output()
        streamed = result.usage
    assert (streamed.input_tokens, streamed.output_tokens) == (whole.input_tokens, whole.output_tokens)


async def context_overflow() -> None:
    error = await _error_of(agent.run(steps.TOO_LONG))
    assert error.status_code == 400
    assert error.body["code"] == "context_length_exceeded"


async def bad_field() -> None:
    error = await _error_of(agent.run(steps.QUESTION, model_settings={"presence_penalty": "high"}))
    assert error.status_code == 400
    assert error.body["param"] == "presence_penalty"


async def _error_of(run: Awaitable[object]) -> ModelHTTPError:
    try:
        await run
    except ModelHTTPError as error:
        return error
    raise AssertionError("not refused")


async def models() -> None:
    assert [found.id async for found in provider.client.models.list()] == [steps.model()]


async def structured_output() -> None:
    settings = {**SETTINGS, "max_tokens": 100}
    native = Agent(model, output_type=NativeOutput(City), model_settings=settings)
    assert (await native.run(steps.QUESTION)).output.city in ("Oslo", "Rome")


async def abort() -> None:
    before = steps.aborted_count()
    settings = {"max_tokens": steps.ABORTED_TOKENS, "extra_body": {"ignore_eos": True}}
    async with agent.run_stream(steps.QUESTION, model_settings=settings) as result:
        pieces = result.stream_text(delta=True, debounce_by=None)
        for _ in range(3):
            await anext(pieces)
        await pieces.aclose()
        await result.cancel()
    steps.wait_aborted(before)


steps.run(answer, stream, usage, context_overflow, bad_field, models, structured_output, abort)
