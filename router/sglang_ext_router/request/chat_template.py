"""The text that an instance makes of a chat: by the Jinja template of its model, from what SGLang hands to it.

The template is read from the model's folder, as transformers reads it, and gets messages and tools in the shape that
SGLang's own fields have. A chat with anything else in it raises `UnknownPromptError`: its prompt is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang_ext_router.decide.block_index import PromptKind

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_PARTS = frozenset({"type", "text"})
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"})
# Fields of a message that SGLang hands to some templates, or encoders of some models, and that are not read here.
_UNREAD_MESSAGE_FIELDS = ("phase", "prefix", "tools")
_UNREAD_FIELDS = ("input_ids", "reasoning", "thinking", "documents", "session_params")
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
# Names that transformers, or SGLang, takes as parameters of its own.
_RESERVED = frozenset({
    *("messages", "tools", "documents", "chat_template", "conversation", "tokenize", "return_dict", "return_tensors"),
    *("continue_final_message", "add_generation_prompt", "return_assistant_tokens_mask", "reasoning_effort"),
    *("padding", "truncation", "max_length", "tokenizer_kwargs"),
})  # fmt: skip
_SCHEMA_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_FUNCTION_FIELDS = ("description", "name", "parameters")
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Words by which SGLang recognises a template that reads the parts of a message.
_MEDIA_WORDS = ("image", "audio", "video", "vision")
_MESSAGE_NAMES = ("message", "msg", "m")


class UnknownPromptError(ValueError):
    """The prompt that an instance makes of this request is not known here."""


class ChatText(NamedTuple):
    """The rendered chat, the beginning of a reply that goes on behind it, and what has to be read alike for both."""

    text: str
    continued: str
    needs: frozenset[PromptKind]


class ChatTemplate:
    """One model's template, with its special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        """`defaults`: the instance's own variables of the template. Raises jinja2.TemplateError where it is broken."""
        environment = _environment()
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._defaults = dict(defaults)
        self._reads_parts = _reads_parts(source, environment)
        self.keeps_inline_system = _keeps_inline_system(source)

    def render(self, body: Mapping[str, Any], implies_thinking: bool = True) -> ChatText:
        """Return the text of a body of `/v1/chat/completions`. Raises UnknownPromptError, also where it is refused.

        `implies_thinking`: a reasoning effort turns thinking on or off, too.
        """
        if any(body.get(name) is not None for name in _UNREAD_FIELDS):
            raise UnknownPromptError("the chat has fields that change its prompt")
        needs = {PromptKind.CHATS}
        given = body.get("messages")
        if type(given) is not list or not given:
            raise UnknownPromptError("there are no messages")
        messages = [self._message(message, needs) for message in given]
        continued = ""
        last = messages[-1]
        if last["role"] == "assistant" and type(last["content"]) is str:
            if body.get("continue_final_message") is True:
                continued = last["content"]
                messages.pop()
            else:
                messages[-1] = {"role": "user", "content": last["content"]}
        variables = self._variables(body, needs, implies_thinking)
        tools = _tools(body)
        if tools:
            needs.add(PromptKind.TOOLS)
        return ChatText(self._rendered(messages, tools, variables), continued, frozenset(needs))

    def _rendered(self, messages: list[dict[str, Any]], tools: list[Any] | None, variables: dict[str, Any]) -> str:
        try:
            try:
                return self._text(messages, tools, variables)
            except Exception:
                if not tools:
                    raise
                return self._text(messages, [tool["function"] for tool in tools], variables)  # as Mistral's wants them
        except Exception as error:  # a template may fail in any way on a message that it did not expect
            raise UnknownPromptError(f"the template refuses the chat: {error}") from None

    def _text(self, messages: list[dict[str, Any]], tools: list[Any] | None, variables: dict[str, Any]) -> str:
        return self._template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=True, **variables
        )

    def _variables(self, body: Mapping[str, Any], needs: set[PromptKind], implies_thinking: bool) -> dict[str, Any]:
        """Return the template's variables in addition to messages and tools."""
        given = body.get("chat_template_kwargs")
        if given is not None and type(given) is not dict:
            raise UnknownPromptError("chat_template_kwargs is no object")
        effort = body.get("reasoning_effort")
        own: dict[str, Any] = dict(given or {})
        if effort is not None:
            if type(effort) is not str or effort not in _EFFORTS:
                raise UnknownPromptError("a reasoning_effort that is not known here")
            if implies_thinking:
                own = {"thinking": effort != "none", "enable_thinking": effort != "none", **own}
        if not _RESERVED.isdisjoint(own):
            raise UnknownPromptError("chat_template_kwargs has names of SGLang's own")
        if own or effort is not None:
            needs.add(PromptKind.REASONING)
        own = {**self._defaults, **own}
        if effort is not None:
            own["reasoning_effort"] = effort
        return {**self._special_tokens, **own}

    def _message(self, message: Any, needs: set[PromptKind]) -> dict[str, Any]:
        """Return a message as SGLang hands it to the template."""
        role = message.get("role") if type(message) is dict else None
        if type(role) is not str or role not in _ROLES:
            raise UnknownPromptError("a role that is not known here")
        if any(message.get(name) is not None for name in _UNREAD_MESSAGE_FIELDS):
            raise UnknownPromptError("a message has fields that change its prompt")
        content, is_list = self._content(role, message.get("content"))
        made: dict[str, Any] = {"role": role, "content": content}
        if role == "user":  # of which SGLang reads nothing else
            return made
        for name in ("tool_call_id", "name", "reasoning_content"):
            value = message.get(name)
            if value is not None:
                made[name] = _string(value)
        if "reasoning_content" in made:
            needs.add(PromptKind.REASONING)
        calls = message.get("tool_calls")
        if calls is not None:
            if type(calls) is not list:
                raise UnknownPromptError("tool_calls is no list")
            made["tool_calls"] = [_tool_call(call, role) for call in calls]
        if calls or role == "tool":
            needs.add(PromptKind.TOOLS)
        if is_list:  # the order of fields is the template's to see
            made["content"] = made.pop("content")
        return made

    def _content(self, role: str, content: Any) -> tuple[Any, bool]:
        """Return the content for the template, and whether it stays a list of parts."""
        if content is None and role != "user":
            return "", False
        if type(content) is str:
            return content, False
        if type(content) is not list:
            raise UnknownPromptError("a content that is neither text nor a list")
        texts = []
        for part in content:
            if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
                raise UnknownPromptError("a part that is no text")
            texts.append(part["text"])
        if not self._reads_parts or role == "tool":
            return " ".join(texts), self._reads_parts
        return [{"type": "text", "text": text} for text in texts], True


def load_chat_template(folder: Path, given: str | None, defaults: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the chat template of a model's folder, or that in the file `given`; None where there is none to read.

    Raises OSError, ValueError or jinja2.TemplateError for files that make no sense.
    """
    config = _read_json(folder / "tokenizer_config.json")
    source = _source(folder, config) if given is None else _given_source(Path(given))
    if source is None:
        return None
    tokens: dict[str, str] = {}
    for described in (config, _read_json(folder / "special_tokens_map.json")):
        named = {name: described.get(name) for name in _SPECIAL_TOKENS}
        for name, value in {**named, **(described.get("model_specific_special_tokens") or {})}.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return ChatTemplate(source, tokens, defaults)


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list) and found and isinstance(found[0], dict):
        found = found[0].get("template")  # the first is SGLang's choice
    return found if isinstance(found, str) else None


def _given_source(file: Path) -> str | None:
    """Return the template of SGLang's `--chat-template`; None for the name of a template that SGLang has built in."""
    if file.suffix != ".jinja" or not file.is_file():
        return None
    return file.read_text(encoding="utf-8").strip("\n").replace("\\n", "\n")


def _read_json(file: Path) -> dict[str, Any]:
    read = orjson.loads(file.read_bytes()) if file.is_file() else {}
    return read if isinstance(read, dict) else {}


# -- what SGLang's fields make of a request ---------------------------------------------------------------------


def _string(value: Any) -> str:
    if type(value) is not str:
        raise UnknownPromptError("a field of a message is no string")
    return value


def _tool_call(call: Any, role: str) -> dict[str, Any]:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or call.get("type", "function") != "function":
        raise UnknownPromptError("a tool call that does not call a function")
    number, arguments, name = call.get("index"), function.get("arguments"), function.get("name")
    if number is not None and type(number) is not int:
        raise UnknownPromptError("the index of a tool call is no integer")
    if type(arguments) is str and role == "assistant":
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            raise UnknownPromptError("the arguments of a tool call are no JSON") from None
        if type(arguments) is not dict:
            raise UnknownPromptError("the arguments of a tool call are no object")
    elif arguments is not None and type(arguments) is not dict:
        raise UnknownPromptError("the arguments of a tool call are no object")
    made_id = call.get("id")
    return {
        "id": None if made_id is None else _string(made_id),
        "index": number,
        "type": "function",
        "function": {"name": None if name is None else _string(name), "arguments": arguments},
    }


def _tools(body: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that the template gets, None without any."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools or choice == "none":
        return None
    if type(tools) is not list or choice not in (None, "auto", "required"):
        raise UnknownPromptError("a choice of one tool")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if type(tool) is dict else None
    kind = tool.get("type", "function") if type(tool) is dict else None
    if type(function) is not dict or type(kind) is not str:
        raise UnknownPromptError("a tool that is no function")
    if tool.get("defer_loading") is not None or function.get("defer_loading") is not None:
        raise UnknownPromptError("a tool that is loaded later")
    if type(function.get("name")) is not str or type(function.get("description", "")) not in (str, type(None)):
        raise UnknownPromptError("a function without a name")
    _check_schema(function.get("parameters"))
    strict = function.get("strict")
    if strict is not None and type(strict) is not bool:
        raise UnknownPromptError("strict is neither true nor false")
    read = _FUNCTION_FIELDS if strict is None else (*_FUNCTION_FIELDS, "strict")
    kept = {name: value for name, value in function.items() if name in read}  # in the client's order
    made = {**kept, **{name: None for name in _FUNCTION_FIELDS if name not in kept}}
    return {"type": kind, "function": made, "defer_loading": None}


def _check_schema(schema: Any) -> None:
    """Raise UnknownPromptError for types that SGLang renames, those of databases say."""
    if type(schema) is list:
        for item in schema:
            _check_schema(item)
    elif type(schema) is dict:
        kind = schema.get("type")
        for name in kind if type(kind) is list else [kind]:
            if type(name) is str and name not in _SCHEMA_TYPES:
                raise UnknownPromptError("a type that JSON Schema does not have")
        for value in schema.values():
            _check_schema(value)


# -- Jinja as transformers sets it up ---------------------------------------------------------------------------


class _Generation(Extension):
    """Reads `{% generation %}` … `{% endgeneration %}`, by which training finds replies, as its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _strftime_now
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _reads_parts(source: str, environment: ImmutableSandboxedEnvironment) -> bool:
    """Return whether SGLang gives this template the parts of a content: it goes through them, or knows media."""
    if any(word in source for word in _MEDIA_WORDS):
        return True
    return any(_is_content(loop.iter) for loop in environment.parse(source).find_all(nodes.For))


def _keeps_inline_system(source: str) -> bool:
    """Return whether SGLang finds that this template shows a system message where it stands, behind others."""
    mark = "a mark that no template has"
    turn = {"role": "user", "content": "t"}
    messages = [{"role": "system", "content": "t"}, turn, {"role": "system", "content": mark}, turn]
    # With less than templates are rendered with: what needs more counts as refusing.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        return mark in environment.from_string(source).render(messages=messages, add_generation_prompt=False)
    except Exception:  # a template may fail in any way
        return False


def _is_content(node: nodes.Node) -> bool:
    """Return whether an expression is the content of a message, or is made of it by filters, tests and slices."""
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node is not None and _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        name = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node)
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        name = node.arg.value
    else:
        return False
    return name == "content" and isinstance(node.node, nodes.Name) and node.node.name in _MESSAGE_NAMES
