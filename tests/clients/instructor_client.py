"""Instructor: answers as objects of a class, over openai's SDK."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
import steps
from instructor.core import InstructorRetryException
from pydantic import BaseModel

SERVER = openai.OpenAI(base_url=f"{steps.url()}/v1", api_key="any", max_retries=0)
by_schema = instructor.from_openai(SERVER, mode=instructor.Mode.JSON_SCHEMA)
ASKED = {
    "model": steps.model(),
    "messages": [{"role": "user", "content": steps.QUESTION}],
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 0,
}


class City(BaseModel):
    """A city."""

    city: Literal["Oslo", "Rome"]
    is_capital: bool


def answer() -> None:
    assert by_schema.chat.completions.create(**ASKED, response_model=City).city in ("Oslo", "Rome")


def usage() -> None:
    city, whole = by_schema.chat.completions.create_with_completion(**ASKED, response_model=City)
    assert isinstance(city, City)
    assert 0 < whole.usage.completion_tokens < 100
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def stream() -> None:
    whole = by_schema.chat.completions.create(**ASKED, response_model=City)
    parts = list(by_schema.chat.completions.create_partial(**ASKED, response_model=City))
    assert len(parts) > 1
    assert parts[-1].model_dump() == whole.model_dump()


def context_overflow() -> None:
    _assert_refused(
        {"messages": [{"role": "user", "content": steps.TOO_LONG}]}, "context_length_exceeded", "context length"
    )


def bad_field() -> None:
    _assert_refused({"temperature": "hot"}, "temperature")


def _assert_refused(beside: dict[str, object], *words: str) -> None:
    asked = {**ASKED, **beside, "response_model": City}
    error = steps.error_of(InstructorRetryException, lambda: by_schema.chat.completions.create(**asked))
    assert all(word in str(error) for word in words), error


def models() -> None:
    assert [model.id for model in by_schema.client.models.list()] == [steps.model()]


def abort() -> None:
    before = steps.aborted_count()
    text = {**ASKED, "max_tokens": steps.ABORTED_TOKENS, "extra_body": {"ignore_eos": True}}
    chunks = by_schema.chat.completions.create(**text, response_model=None, stream=True)
    steps.read_some(chunks)
    chunks.close()
    steps.wait_aborted(before)


steps.run(answer, usage, stream, context_overflow, bad_field, models, abort)
