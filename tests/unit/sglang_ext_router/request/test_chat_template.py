"""The text of chats, by small templates; that it is SGLang's is shown by tests/integration/test_prompt_tokens.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from sglang_ext_router.decide.block_index import PromptKind
from sglang_ext_router.request.chat_template import ChatTemplate, UnknownPromptError, load_chat_template

DUMP = "{% for message in messages %}{{ message | tojson }}{% endfor %}"
PARTS = "{% for message in messages %}{% for part in message.content %}{{ part.text }}|{% endfor %}{% endfor %}"
USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def render(source: str, body: dict[str, Any], **defaults: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, defaults).render({"messages": [USER], **body}).text


def test_a_message_has_sglangs_fields_and_no_others() -> None:
    messages = [{**USER, "name": "Ann", "more": 1}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert render(DUMP, {"messages": messages}) == (
        '{"role": "user", "content": "a"}'
        '{"role": "user", "content": ""}'  # the last message is a user's, as SGLang wants it
    )
    messages.append({"role": "tool", "content": [{"type": "text", "text": "ä"}, {"type": "text", "text": "b"}]})
    assert render(DUMP, {"messages": messages}).endswith(
        '{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "index": null, "type": "function", '
        '"function": {"name": "f", "arguments": {"x": 1}}}]}{"role": "tool", "content": "ä b"}'
    )


@pytest.mark.parametrize(("source", "text"), [(DUMP, '"content": "b c"}'), (PARTS, "b|c|")])
def test_parts_are_joined_unless_the_template_goes_through_them(source: str, text: str) -> None:
    content = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert render(source, {"messages": [{"role": "system", "content": content}, USER]}).find(text) >= 0


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for part in m['content'][1:] | list %}{{ part.text }}|{% endfor %}{% endfor %}",
        "{# image #}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_templates_that_read_parts(source: str) -> None:
    content = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert "b c" not in render(source, {"messages": [{"role": "system", "content": content}]})


def test_a_tool_has_sglangs_fields_in_the_clients_order() -> None:
    source = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    function = {"parameters": {"type": "object"}, "strict": False, "name": "f", "more": 1}
    rendered = render(source, {"tools": [{"type": "function", "function": function}]})
    assert json.loads(rendered) == {
        "type": "function",
        "function": {"parameters": {"type": "object"}, "strict": False, "name": "f", "description": None},
        "defer_loading": None,
    }
    assert rendered.index("parameters") < rendered.index("strict") < rendered.index("name") < rendered.index("descr")
    del function["strict"]
    assert "strict" not in render(source, {"tools": [{"function": {**function, "strict": None}}]})
    assert not render(source, {"tools": [{"function": function}], "tool_choice": "none"})


def test_tools_are_unwrapped_for_a_template_that_refuses_them_wrapped() -> None:
    source = (
        "{% for tool in tools %}{% if tool.function %}{{ raise_exception('no') }}{% endif %}{{ tool.name }}{% endfor %}"
    )
    assert render(source, {"tools": [{"function": {"name": "f"}}]}) == "f"


def test_variables() -> None:
    source = "{{ bos_token }}{{ a }}{{ b }}{{ thinking }}{{ enable_thinking }}{{ reasoning_effort }}"
    assert render(source, {}, a=1, b=2) == "<s>12"
    assert render(source, {"chat_template_kwargs": {"a": 3}}, a=1) == "<s>3"
    assert render(source, {"reasoning_effort": "none"}) == "<s>FalseFalsenone"
    assert render(source, {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": 0}}) == "<s>0Truelow"


def test_blocks_are_trimmed_and_training_marks_are_read_as_their_content() -> None:
    marked = "{% generation %}{{ message.content }}{% endgeneration %}"
    source = f"  {{% for message in messages %}}\n{marked}\n  {{% break %}}{{% endfor %}}"
    assert render(source, {"messages": [USER, USER]}) == "a"


def test_the_beginning_of_a_reply() -> None:
    template = ChatTemplate("{% for message in messages %}{{ message.role }}{% endfor %}", {}, {})
    body: dict[str, Any] = {"messages": [USER, {"role": "assistant", "content": "so"}]}
    assert template.render(body)[:2] == ("useruser", "")
    assert template.render({**body, "continue_final_message": True})[:2] == ("user", "so")


def test_what_has_to_be_read_alike() -> None:
    template = ChatTemplate(DUMP, {}, {})
    chats, tools, reasoning = PromptKind.CHATS, PromptKind.TOOLS, PromptKind.REASONING
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for body, needs in (
        ({"messages": [USER]}, {chats}),
        ({"messages": [USER], "tools": [{"function": {"name": "f"}}]}, {chats, tools}),
        ({"messages": [USER, called, USER]}, {chats, tools}),
        ({"messages": [USER, {"role": "tool", "content": "1"}]}, {chats, tools}),
        ({"messages": [USER], "reasoning_effort": "low"}, {chats, reasoning}),
        ({"messages": [{"role": "assistant", "content": "", "reasoning_content": "x"}, USER]}, {chats, reasoning}),
    ):
        assert template.render(body).needs == needs


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "a"},
        {"messages": ["a"]},
        {"messages": [{"role": "User", "content": "a"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "system", "content": "a", "tools": [{}]}]},
        {"messages": [{"role": "assistant", "content": "a", "prefix": True}]},
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]}]},
        {"input_ids": [1]},
        {"reasoning": {"effort": "low"}},
        {"reasoning_effort": 0.5},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "varchar"}}}}}]},
        {"tools": [{"function": {"name": "f"}, "defer_loading": True}]},
    ],
)
def test_what_is_not_known(body: dict[str, Any]) -> None:
    with pytest.raises(UnknownPromptError):
        render(DUMP, body)


def test_what_a_template_refuses_is_not_known() -> None:
    with pytest.raises(UnknownPromptError, match="alternate"):
        render("{{ raise_exception('alternate') }}", {})
    with pytest.raises(UnknownPromptError, match="refuses"):
        render("{{ messages[7].content + 1 }}", {})
    with pytest.raises(TemplateError):
        render("{% for %}", {})


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, None, {}) is None
    config: dict[str, Any] = {
        "bos_token": {"content": "<b>"},
        "eos_token": None,
        "chat_template": "config{{ bos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def found(given: str | None = None) -> str | None:
        template = load_chat_template(tmp_path, given, {})
        return None if template is None else template.render({"messages": [USER]}).text

    assert found() == "config<b>"
    config["chat_template"] = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert found() == "first"
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<c>"}')
    (tmp_path / "chat_template.jinja").write_text("file{{ bos_token }}")
    assert found() == "file<c>"
    (tmp_path / "own.jinja").write_text("own\\n.\n")
    assert found(str(tmp_path / "own.jinja")) == "own\n."
    assert found("chatml") is None
    (tmp_path / "tokenizer_config.json").write_text("nonsense")
    with pytest.raises(ValueError):
        found()
