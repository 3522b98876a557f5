"""Chat templates in the manners of several model families, and chats of all kinds, for tests against real engines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from support.tiny_model import CHAT_TEMPLATE, tiny_model

# Tools as JSON, thought of the last turn only, a switch for thinking.
_CHATML = """
{%- if tools %}
<|system|>{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</s>
{%- elif messages[0].role == 'system' %}<|system|>{{ messages[0].content }}</s>
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role in ('user', 'developer') or (message.role == 'system' and not loop.first) %}
<|user|>{{ message.content | trim }}</s>
{%- elif message.role == 'assistant' %}
<|assistant|>
{%- if message.reasoning_content is defined and loop.index0 > ns.last %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>
{%- endfor %}{% endgeneration %}</s>
{%- elif message.role == 'tool' %}
<|tool|>{{ message.content }}</s>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}
"""  # noqa: E501
# Goes through the parts of a content, begins with its own first token, dumps whole messages, breaks out of loops.
_PARTS = """{{ bos_token }}{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% for message in messages %}
    {% if message['content'] is string %}
<|{{ message['role'] }}|>{{ message['content'] }}
    {% else %}
<|{{ message['role'] }}|>{% for part in message['content'] %}[{{ part['text'] }}]{% endfor %}
    {% endif %}
    {% for call in message.get('tool_calls', []) %}{{ call | tojson }}{% break %}{% endfor %}
{{ eos_token }}{{ message | tojson(sort_keys=true) }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# Refuses what does not alternate, and wants tools without their wrapper.
_STRICT = """<s>{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% set messages = messages[1:] %}{% endif %}
{%- for tool in tools or [] %}{% if tool.function is defined %}{{ raise_exception('no wrappers') }}{% endif %}{{ tool.name }}{{ tool.parameters | tojson }}{% endfor %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]{% else %}{{ message['content'] }}</s>{% endif %}
{%- endfor %}"""  # noqa: E501
TEMPLATES = {"plain": CHAT_TEMPLATE, "chatml": _CHATML, "parts": _PARTS, "strict": _STRICT}

_WORDS = (
    "café",
    "世界",
    "def f(x):\n\treturn x",
    "12345",
    "  ",
    "\n\n",
    "<|user|>",
    "👩‍👩‍👧",
    "e\u0301",
    "the",
    "a" * 30,
    "\\n",
    "{{ x }}",
)
_SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "string"}, "a": {"enum": ["ü", 1.5, None]}},
    "required": ["z"],
}


def model_folder(folder: Path, name: str) -> Path:
    """Make a folder with the tiny model's weights and the template of this name; `parts` begins texts with a token."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tiny_model().iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer.json"):
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    tokenizer = json.loads((tiny_model() / "tokenizer.json").read_text())
    if name == "parts":
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class Chats:
    """Draws bodies of `/v1/chat/completions` that build on each other."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)
        self._sent: list[dict[str, Any]] = []

    def text(self) -> str:
        return " ".join(self._draws.choices(_WORDS, k=self._draws.randint(1, 12)))

    def _content(self) -> Any:
        if self._draws.random() < 0.6:
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(self._draws.randint(1, 3))]

    def _turn(self, has_tools: bool) -> list[dict[str, Any]]:
        draws = self._draws
        turn: list[dict[str, Any]] = [{"role": "assistant", "content": self.text()}]
        if draws.random() < 0.3:
            turn[0]["reasoning_content"] = self.text()
        if has_tools and draws.random() < 0.6:
            arguments = {"z": self.text(), "n": draws.choice([1, 2.5, None, True, {"ö": []}])}
            function = {"name": "look", "arguments": json.dumps(arguments, ensure_ascii=draws.random() < 0.5)}
            turn[0] |= {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
            turn.append({"role": "tool", "tool_call_id": "call_1", "content": self._content()})
            turn.append({"role": "assistant", "content": self.text()})
        turn.append({"role": "user", "content": self._content()})
        return turn

    def body(self) -> dict[str, Any]:
        draws = self._draws
        if self._sent and draws.random() < 0.6:
            known = draws.choice(self._sent[-6:])
            body = {**known, "messages": [*known["messages"], *self._turn("tools" in known)]}
        else:
            messages: list[dict[str, Any]] = []
            if draws.random() < 0.6:
                messages.append({"role": draws.choice(["system", "system", "developer"]), "content": self._content()})
            messages.append(
                {"role": "user", "content": self._content(), **({"name": "Ann"} if draws.random() < 0.2 else {})}
            )
            body = {"messages": messages}
            if draws.random() < 0.4:
                wrapped: dict[str, Any] = {"description": self.text(), "name": "look", "parameters": _SCHEMA}
                names = draws.sample(sorted(wrapped), 3)
                function = {name: wrapped[name] for name in names if name != "description" or draws.random() < 0.7}
                body["tools"] = [
                    {
                        "type": "function",
                        "function": {**function, **({"strict": False} if draws.random() < 0.3 else {})},
                    }
                ]
                body["tool_choice"] = draws.choice(["auto", "none", None])
            if draws.random() < 0.2:
                body["chat_template_kwargs"] = {"enable_thinking": draws.random() < 0.5}
            if draws.random() < 0.2:
                body["reasoning_effort"] = draws.choice(["none", "low", "high"])
        self._sent.append(body)
        if draws.random() < 0.15:
            return {**body, "messages": [*body["messages"], {"role": "assistant", "content": self.text()}]}
        if draws.random() < 0.15:
            ended = [*body["messages"], {"role": "assistant", "content": self.text()}]
            return {**body, "messages": ended, "continue_final_message": True}
        return body


class OtherForms:
    """Draws bodies of `/v1/messages` and `/v1/responses`."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)

    def text(self) -> str:
        return " ".join(self._draws.choices(_WORDS, k=self._draws.randint(1, 8)))

    def _parts(self, kind: str = "text") -> Any:
        if self._draws.random() < 0.4:
            return self.text()
        return [{"type": kind, "text": self.text()} for _ in range(self._draws.randint(1, 3))]

    def _tool(self, schema_field: str) -> dict[str, Any]:
        tool = {"name": "look", "description": self.text(), schema_field: {**_SCHEMA}, "strict": False}
        for name in self._draws.sample(["description", "strict"], self._draws.randint(0, 2)):
            del tool[name]
        if schema_field == "input_schema" and self._draws.random() < 0.3:
            del tool[schema_field]["type"]
        return tool

    def messages(self) -> dict[str, Any]:
        """Return a body of `/v1/messages` without its limit: system blocks, tools, calls, answers."""
        draws = self._draws
        body: dict[str, Any] = {"messages": [{"role": "user", "content": self._parts()}]}
        if draws.random() < 0.6:
            body["system"] = self._parts()
        has_tools = draws.random() < 0.5
        if has_tools:
            body["tools"] = [self._tool("input_schema")]
            if draws.random() < 0.5:
                body["tools"].append({"type": "web_search_20250305", "name": "web_search"})
            body["tool_choice"] = {"type": draws.choice(["auto", "any", "none"])}
        for _ in range(draws.randint(0, 3)):
            said: Any = self._parts()
            if has_tools and draws.random() < 0.7:
                call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"z": self.text(), "n": 2.5}}
                said = [*([{"type": "text", "text": self.text()}] if draws.random() < 0.5 else []), call]
                answer = {"type": "tool_result", "tool_use_id": "toolu_1", "content": self._parts()}
                if draws.random() < 0.2:
                    del answer["content"]
                around: list[dict[str, Any]] = [{"type": "text", "text": self.text()} for _ in range(3)]
                asked: Any = [*around[: draws.randint(0, 2)], answer, *around[: draws.randint(0, 3)]]
            else:
                asked = self._parts()
            if draws.random() < 0.1:
                body["messages"].append({"role": "system", "content": self.text()})
            body["messages"] += [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]
        if draws.random() < 0.1:
            body["messages"].append({"role": "assistant", "content": "{"})
        return body

    def response(self) -> dict[str, Any]:
        """Return a body of `/v1/responses`: instructions, developers' messages, calls, thought."""
        draws = self._draws
        body: dict[str, Any] = {}
        if draws.random() < 0.5:
            body["instructions"] = self.text()
        if draws.random() < 0.2:
            return {**body, "input": self.text()}
        items: list[dict[str, Any]] = []
        if draws.random() < 0.5:
            role = draws.choice(["developer", "system"])
            items.append({"type": "message", "role": role, "content": self._parts("input_text")})
        items.append({"role": "user", "content": self._parts("input_text")})
        has_tools = draws.random() < 0.5
        if has_tools:
            body["tools"] = [{"type": "function", **self._tool("parameters")}, {"type": "web_search"}]
            body["tool_choice"] = draws.choice(["auto", "none"])
        for _ in range(draws.randint(0, 3)):
            if draws.random() < 0.3:
                summary = [{"type": "summary_text", "text": self.text()} for _ in range(draws.randint(0, 2))]
                items.append({"type": "reasoning", "id": "rs_1", "summary": summary})
            if draws.random() < 0.7:
                parts = [{"type": "output_text", "text": self.text(), "annotations": []}]
                items.append(
                    {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": parts}
                )
            if has_tools and draws.random() < 0.6:
                arguments = json.dumps({"z": self.text()})
                items.append(
                    {"type": "function_call", "call_id": "c", "id": "f", "name": "look", "arguments": arguments}
                )
                items.append({"type": "function_call_output", "call_id": "c", "output": self._parts("input_text")})
                items.append({"role": "assistant", "content": self.text()})
            if draws.random() < 0.1:
                items.append({"role": "developer", "content": self.text()})
            items.append({"role": "user", "content": self._parts("input_text")})
        if draws.random() < 0.3:
            body["reasoning"] = draws.choice([{"effort": "low"}, {"effort": "none"}, {"summary": "auto"}])
        return {**body, "input": items}
