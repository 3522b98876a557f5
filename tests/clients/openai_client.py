"""openai's SDK for Python."""

from __future__ import annotations

import openai
import steps
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{steps.url()}/v1", api_key="any", max_retries=0)
MODEL = steps.model()
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": steps.QUESTION}], "temperature": 0}


def answer() -> None:
    whole = client.chat.completions.create(**ASKED, max_tokens=steps.MAX_TOKENS)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert whole.model == MODEL


def stream() -> None:
    whole = client.chat.completions.create(**ASKED, max_tokens=steps.MAX_TOKENS)
    with client.chat.completions.stream(**ASKED, max_tokens=steps.MAX_TOKENS) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        assert "".join(deltas) == whole.choices[0].message.content
        assert len(deltas) > 1
        assert events.current_completion_snapshot.choices[0].finish_reason == "length"


def usage() -> None:
    whole = client.chat.completions.create(**ASKED, max_tokens=steps.MAX_TOKENS)
    assert whole.usage.completion_tokens == steps.MAX_TOKENS
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + steps.MAX_TOKENS
    chunks = client.chat.completions.create(
        **ASKED, max_tokens=steps.MAX_TOKENS, stream=True, stream_options={"include_usage": True}
    )
    last = list(chunks)[-1]
    assert last.choices == []
    assert last.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == whole.usage.model_dump(
        include={"prompt_tokens", "completion_tokens"}
    )


def responses() -> None:
    whole = client.responses.create(model=MODEL, input=steps.QUESTION, max_output_tokens=12, temperature=0)
    assert whole.output_text
    events = client.responses.create(
        model=MODEL, input=steps.QUESTION, max_output_tokens=12, temperature=0, stream=True
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def context_overflow() -> None:
    for call in (
        lambda: client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": steps.TOO_LONG}]),
        lambda: client.completions.create(model=MODEL, prompt=steps.TOO_LONG, max_tokens=1),
        lambda: client.responses.create(model=MODEL, input=steps.TOO_LONG),
        lambda: client.completions.create(model=MODEL, prompt=steps.QUESTION * 100, max_tokens=1800),
    ):
        error = steps.error_of(openai.BadRequestError, call)
        assert error.code == "context_length_exceeded", error
        assert "context length" in error.message, error


def bad_field() -> None:
    asked = {**ASKED, "temperature": "hot"}
    error = steps.error_of(openai.BadRequestError, lambda: client.chat.completions.create(**asked, max_tokens=1))
    assert error.param == "temperature"
    assert error.type
    assert "temperature" in error.message


def refusal_of_an_instance() -> None:
    asked = {**ASKED, "response_format": {"type": "yaml"}}
    error = steps.error_of(openai.BadRequestError, lambda: client.chat.completions.create(**asked, max_tokens=1))
    assert error.type
    assert "response_format" in error.message


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def unknown_model() -> None:
    asked = {**ASKED, "model": "another"}
    error = steps.error_of(openai.NotFoundError, lambda: client.chat.completions.create(**asked, max_tokens=1))
    assert error.code == "model_not_found"


class City(BaseModel):
    city: str
    is_capital: bool


def structured_output() -> None:
    schema = {"name": "city", "schema": steps.CITY_SCHEMA, "strict": True}
    whole = client.chat.completions.create(
        **ASKED, max_tokens=100, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert City.model_validate_json(whole.choices[0].message.content).city in ("Oslo", "Rome")


def abort() -> None:
    before = steps.aborted_count()
    with client.chat.completions.create(
        **ASKED, max_tokens=steps.ABORTED_TOKENS, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        steps.read_some(chunks)
    steps.wait_aborted(before)


steps.run(
    answer,
    stream,
    usage,
    responses,
    context_overflow,
    bad_field,
    refusal_of_an_instance,
    models,
    unknown_model,
    structured_output,
    abort,
)
