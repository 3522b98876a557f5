"""Anthropic's SDK for Python."""

from __future__ import annotations

import anthropic
import steps

client = anthropic.Anthropic(base_url=steps.url(), api_key="any", max_retries=0)
MODEL = steps.model()
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": steps.QUESTION}],
    "extra_body": {"temperature": 0},  # no argument of its own in this SDK any more
}


def answer() -> None:
    whole = client.messages.create(**ASKED, max_tokens=steps.MAX_TOKENS)
    assert whole.content[0].text
    assert (whole.stop_reason, whole.role, whole.model) == ("max_tokens", "assistant", MODEL)


def stream() -> None:
    whole = client.messages.create(**ASKED, max_tokens=steps.MAX_TOKENS)
    with client.messages.stream(**ASKED, max_tokens=steps.MAX_TOKENS) as events:
        pieces = list(events.text_stream)
        last = events.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == whole.content[0].text == last.content[0].text
    assert last.stop_reason == "max_tokens"
    assert last.usage.output_tokens == steps.MAX_TOKENS


def usage() -> None:
    whole = client.messages.create(**ASKED, max_tokens=steps.MAX_TOKENS)
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    assert whole.usage.output_tokens == steps.MAX_TOKENS
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def system_prompt() -> None:
    plain = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    longer = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"], system="Answer in one sentence.")
    assert longer.input_tokens != plain.input_tokens
    assert client.messages.create(**ASKED, max_tokens=1, system="Answer in one sentence.").content


WEATHER = {
    "name": "weather",
    "description": "Look up the weather of a city.",
    "input_schema": steps.CITY_SCHEMA,
}
# As agents send it: blocks with marks for a cache, a tool's call and its answer, thought of an earlier turn.
AGENT = {
    "model": MODEL,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Answer in one sentence."},
    ],
    "tools": [WEATHER, {**WEATHER, "name": "news", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Is it cold in Oslo?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I need the weather.", "signature": "x"},
                {"type": "text", "text": "I look it up."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "-4 degrees"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ],
    "metadata": {"user_id": "agent-1"},
    "extra_body": {"temperature": 0},
}


def agent_turn() -> None:
    counted = client.messages.count_tokens(**{name: AGENT[name] for name in ("model", "system", "tools", "messages")})
    whole = client.messages.create(**AGENT, max_tokens=steps.MAX_TOKENS)
    assert whole.content[0].type == "text"
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    again = client.messages.create(**AGENT, max_tokens=steps.MAX_TOKENS)
    assert again.usage.cache_read_input_tokens, again.usage
    assert again.content[0].text == whole.content[0].text


def tool_call() -> None:
    asked = {**AGENT, "messages": AGENT["messages"][:1], "max_tokens": 200}
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
        choice = {**choice, "disable_parallel_tool_use": True}
        whole = client.messages.create(**asked, tool_choice=choice)
        call = whole.content[-1]
        assert (whole.stop_reason, call.type) == ("tool_use", "tool_use"), whole
        assert call.input["city"] in ("Oslo", "Rome")
        with client.messages.stream(**asked, tool_choice=choice) as events:
            kinds = [event.type for event in events]
            last = events.get_final_message()
        assert "input_json" in kinds
        assert (last.content[-1].name, last.content[-1].input) == (call.name, call.input)


def thinking() -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(**ASKED, max_tokens=steps.MAX_TOKENS, thinking={"type": "disabled"})
    assert [block.type for block in whole.content] == ["text"]
    thought = client.messages.create(**ASKED, max_tokens=steps.MAX_TOKENS, thinking=budget)
    (block,) = thought.content
    assert block.type == "thinking", thought
    with client.messages.stream(**ASKED, max_tokens=steps.MAX_TOKENS, thinking=budget) as events:
        pieces = [event.thinking for event in events if event.type == "thinking"]
        last = events.get_final_message()
    assert "".join(pieces) == last.content[0].thinking == block.thinking


def context_overflow() -> None:
    too_long = {"model": MODEL, "messages": [{"role": "user", "content": steps.TOO_LONG}], "max_tokens": 1}
    # SGLang begins a stream before it has looked at the prompt: the error is an event.
    for kind, call in (
        (anthropic.BadRequestError, lambda: client.messages.create(**too_long)),
        (anthropic.APIStatusError, lambda: list(client.messages.create(**too_long, stream=True))),
    ):
        error = steps.error_of(kind, call)
        assert error.body["error"]["type"] == "invalid_request_error", error
        assert "longer than the model's context length" in error.body["error"]["message"], error


def bad_field() -> None:
    asked = {**ASKED, "extra_body": {"temperature": "hot"}}
    error = steps.error_of(anthropic.BadRequestError, lambda: client.messages.create(**asked, max_tokens=1))
    assert error.body["type"] == "error", error
    assert error.body["error"]["type"] == "invalid_request_error", error
    assert "temperature" in error.body["error"]["message"], error


def unknown_model() -> None:
    asked = {**ASKED, "model": "another"}
    error = steps.error_of(anthropic.NotFoundError, lambda: client.messages.create(**asked, max_tokens=1))
    assert error.body["error"]["type"] == "not_found_error", error


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def abort() -> None:
    before = steps.aborted_count()
    with client.messages.create(**ASKED, max_tokens=steps.ABORTED_TOKENS, stream=True) as events:
        steps.read_some(events, 6)
    steps.wait_aborted(before)


steps.run(
    answer,
    stream,
    usage,
    system_prompt,
    agent_turn,
    tool_call,
    thinking,
    context_overflow,
    bad_field,
    unknown_model,
    models,
    abort,
)
