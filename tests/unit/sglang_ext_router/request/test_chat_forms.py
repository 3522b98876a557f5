"""The chats that Anthropic's messages and OpenAI's responses become; that they are SGLang's is shown by
tests/integration/test_prompt_tokens.py."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext_router.request.chat_forms import chat_of_messages, chat_of_response, reads_thought
from sglang_ext_router.request.chat_template import ChatTemplate, UnknownPromptError

USER: dict[str, Any] = {"role": "user", "content": "a"}


def text(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": said} for said in texts]


def of_messages(*messages: dict[str, Any], inline: bool = False, **fields: Any) -> dict[str, Any]:
    return chat_of_messages({"messages": [USER, *messages], **fields}, inline)


def of_response(*items: dict[str, Any], inline: bool = False, **fields: Any) -> dict[str, Any]:
    return chat_of_response({"input": [USER, *items], **fields}, inline)


# -- Anthropic's messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "first"),
    [
        (None, []),
        ("  ", []),
        (" be brief", [{"role": "system", "content": " be brief"}]),
        (text("be brief", "", "and kind"), [{"role": "system", "content": "be brief\nand kind"}]),
    ],
)
def test_the_system_comes_first(system: Any, first: list[dict[str, Any]]) -> None:
    assert of_messages(system=system) == {"messages": [*first, USER]}


def test_a_system_message_stands_where_the_template_shows_it() -> None:
    later = {"role": "system", "content": " later "}
    assert of_messages(later, USER, inline=True)["messages"] == [USER, later, USER]
    merged = {"role": "system", "content": "first\nlater"}
    assert of_messages(later, USER, system="first")["messages"] == [merged, USER, USER]
    parts = {"role": "system", "content": text(" x ", " ", "y")}
    assert of_messages(parts)["messages"] == [{"role": "system", "content": "x\ny"}, USER]


def test_answers_of_tools_are_messages_of_their_own_in_place() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"z": 1}}
    answer = {"type": "tool_result", "tool_use_id": "t1", "content": text("x", "", "y")}
    chat = of_messages(
        {"role": "assistant", "content": [*text("so"), call]},
        {"role": "user", "content": [*text("before"), answer, {"type": "tool_result"}, *text("behind", "it")]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{**answer, "content": "z"}]},
        {"role": "assistant", "content": []},
    )
    made = [{"id": "t1", "function": {"name": "look", "arguments": {"z": 1}}}]
    assert chat["messages"][1:] == [
        {"role": "assistant", "tool_calls": made, "content": "so"},
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "t1", "content": text("x", "y")},
        {"role": "tool", "tool_call_id": "", "content": ""},
        {"role": "user", "content": text("behind", "it")},
        {"role": "assistant", "tool_calls": made},
        {"role": "tool", "tool_call_id": "t1", "content": "z"},
        {"role": "assistant", "content": ""},
    ]


def test_thought_is_wrapped() -> None:
    thought = [{"type": "thinking", "thinking": said, "signature": ""} for said in ("x", "", "y")]
    message = {"role": "assistant", "content": [*thought, *text("so")]}
    said = of_messages(message)["messages"][1]
    assert said == {"role": "assistant", "content": text("<think>x\ny\n</think>", "so")}
    assert reads_thought({"messages": [USER, message]})
    assert reads_thought({"messages": [USER], "thinking": {"type": "disabled"}})
    assert reads_thought({"messages": [USER], "output_config": {"effort": "low"}})
    assert not reads_thought({"messages": [USER, {"role": "user", "content": text("thinking")}]})


def test_thinking_and_effort() -> None:
    for kind, is_on in (("enabled", True), ("adaptive", True), ("disabled", False)):
        chat = of_messages(thinking={"type": kind})
        assert chat["chat_template_kwargs"] == {"thinking": is_on, "enable_thinking": is_on}
    assert of_messages(output_config={"effort": "xhigh"})["reasoning_effort"] == "max"
    # It does not turn thinking on, as an effort in a chat does.
    template = ChatTemplate("{{ thinking }}{{ reasoning_effort }}", {}, {})
    chat = of_messages(output_config={"effort": "low"})
    assert template.render(chat, implies_thinking=False).text == "low"
    assert template.render(chat).text == "Truelow"


def test_tools_of_messages() -> None:
    tools = [
        {"name": "f", "input_schema": {"properties": {}}, "cache_control": {"type": "ephemeral"}},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "custom", "name": "g", "input_schema": {"type": "object"}, "description": "d", "strict": True},
    ]
    schema = {"properties": {}, "type": "object"}
    first = {"name": "f", "description": "", "parameters": schema, "strict": False}
    second = {"name": "g", "description": "d", "parameters": {"type": "object"}, "strict": True}
    made = [{"type": "function", "function": function} for function in (first, second)]
    chat = of_messages(tools=tools)
    assert chat["tools"] == made
    assert list(chat["tools"][0]["function"]) == list(first)
    assert of_messages(tools=tools, tool_choice={"type": "any"})["tool_choice"] == "required"
    assert "tools" not in of_messages(tools=tools[1:2])


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "a"},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": ["a"]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        {"messages": [USER], "system": [{"type": "image"}]},
        {"messages": [USER], "thinking": {"type": "more"}},
        {"messages": [USER], "tools": [{"name": "f"}]},
        {"messages": [USER], "tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]},
        {"messages": [USER], "tool_choice": {"type": "any"}},
        {
            "messages": [USER],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
    ],
)
def test_messages_that_are_not_known(body: dict[str, Any]) -> None:
    with pytest.raises(UnknownPromptError):
        chat_of_messages(body, False)


# -- OpenAI's responses -----------------------------------------------------------------------------------------------


def test_a_text_behind_instructions() -> None:
    chat = chat_of_response({"input": "a", "instructions": "be brief"}, False)
    assert chat == {"messages": [{"role": "system", "content": "be brief"}, USER]}


def test_developers_are_the_system() -> None:
    developer = {"type": "message", "role": "developer", "content": text("x", "y", kind="input_text")}
    label = "Developer instructions:\n"
    merged = {"role": "system", "content": f"first\n\n{label}x\n\ny"}
    assert of_response(developer, USER, instructions="first")["messages"] == [merged, USER, USER]
    inline = {"role": "system", "content": text(f"{label}x", "y")}
    assert of_response(developer, USER, inline=True)["messages"] == [USER, inline, USER]
    assert of_response({**developer, "content": "x"})["messages"][0]["content"] == f"{label}x"


def test_what_the_assistant_says_in_a_row_is_one_turn() -> None:
    said = {"type": "message", "id": "m", "status": "completed", "role": "assistant"}
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "look", "arguments": ""}
    thought = {"type": "reasoning", "id": "r", "summary": [{"text": "x"}, {"text": ""}, {"text": "y"}]}
    chat = of_response(
        thought,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "z"}]},
        {"type": "reasoning", "summary": []},
        {**said, "content": text("so", kind="output_text")},
        call,
        {**call, "call_id": None},
        {"type": "function_call_output", "call_id": "c", "output": text("1", "2", kind="input_text")},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {**said, "content": text("three", kind="output_text")},
    )
    calls = [{"id": made, "function": {"name": "look", "arguments": "{}"}} for made in ("c", "f")]
    assert chat["messages"][1:] == [
        {"role": "assistant", "reasoning_content": "x\ny\nz", "content": text("so"), "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "12"},
        {"role": "assistant", "content": text("one\n\ntwo", "three")},
    ]


def test_tools_and_reasoning_of_responses() -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}}]
    chat = of_response(tools=tools, reasoning={"summary": "auto"}, tool_choice="required")
    function = {"name": "f", "description": None, "parameters": {"type": "object"}, "strict": False}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["reasoning_effort"]) == ("required", "medium")
    assert of_response(reasoning={"effort": None})["reasoning_effort"] is None
    assert "tools" not in of_response(tools=tools[:1])


@pytest.mark.parametrize(
    "body",
    [
        {"input": 1},
        {"input": ["a"]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "developer", "content": None}]},
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": {}}]},
        {"input": "a", "reasoning": {"enabled": True}},
        {"input": "a", "tools": [{"type": "custom", "name": "f"}]},
        {"input": "a", "tools": [{"type": "function", "name": "f", "strict": 1}]},
    ],
)
def test_responses_that_are_not_known(body: dict[str, Any]) -> None:
    with pytest.raises(UnknownPromptError):
        chat_of_response(body, False)


@pytest.mark.parametrize(
    ("source", "keeps"),
    [
        ("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('no') }}", False),
        ("{% generation %}{{ messages[2].content }}{% endgeneration %}", False),
    ],
)
def test_templates_that_show_a_later_system_message(source: str, keeps: bool) -> None:
    assert ChatTemplate(source, {}, {}).keeps_inline_system is keeps
