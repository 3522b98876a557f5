"""The chats that an instance makes of bodies in other forms: Anthropic's `/v1/messages` and OpenAI's `/v1/responses`.

SGLang turns both into a request of its `/v1/chat/completions`, and serves that. These functions make the same chat, for
`ChatTemplate` to render; a body with anything else in it raises `UnknownPromptError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_ext_router.request.chat_template import UnknownPromptError

_SERVER_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")  # which Anthropic itself would run
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONING_FIELDS = frozenset({"effort", "summary"})
_DEFAULT_EFFORT = "medium"  # of a `reasoning` that does not name one
_DEVELOPER_LABEL = "Developer instructions:"
_MESSAGE_TYPES = (None, "message")
_MESSAGE_TEXTS = frozenset({"text", "input_text", "output_text"})
# Tools of OpenAI's own, which SGLang leaves out of a chat.
_BUILT_IN_TOOLS = frozenset({
    *("web_search", "web_search_preview", "code_interpreter", "file_search", "image_generation"),
    *("computer_use_preview", "local_shell", "mcp", "tool_search"),
})  # fmt: skip

Message = dict[str, Any]


def reads_thought(body: Mapping[str, Any]) -> bool:
    """Return whether the prompt of a body of `/v1/messages` depends on how its instance treats thought."""
    if body.get("thinking") is not None or body.get("output_config") is not None:
        return True
    return any(
        type(block) is dict and block.get("type") == "thinking"
        for message in body.get("messages") or ()
        if type(message) is dict and type(message.get("content")) is list
        for block in message["content"]
    )


# -- Anthropic's messages ---------------------------------------------------------------------------------------------


def chat_of_messages(body: Mapping[str, Any], keeps_inline_system: bool) -> Message:
    """Return the chat of a body of `/v1/messages`. Raises UnknownPromptError.

    `keeps_inline_system`: the template shows system messages where they stand; otherwise all of them come first.
    """
    given = body.get("messages")
    if type(given) is not list:
        raise UnknownPromptError("there are no messages")
    system = _system_texts(body.get("system"))
    messages: list[Message] = []
    for message in given:
        if type(message) is not dict or message.get("role") not in ("user", "assistant", "system"):
            raise UnknownPromptError("a role that is not known here")
        if message["role"] == "system" and not keeps_inline_system:
            system += _inline_system(message.get("content"))
        else:
            messages += _chat_messages(message["role"], message.get("content"))
    if system:
        messages.insert(0, {"role": "system", "content": "\n".join(system)})
    chat: Message = {"messages": messages, **_thinking(body)}
    tools = [_custom_tool(tool) for tool in _list(body.get("tools")) if not _is_server_tool(tool)]
    if tools:
        chat["tools"] = tools
    choice = body.get("tool_choice")
    if choice is not None:
        kind = choice.get("type") if type(choice) is dict else None
        if kind not in _TOOL_CHOICES or (kind == "any" and not tools):
            raise UnknownPromptError("a choice of one tool")
        chat["tool_choice"] = _TOOL_CHOICES[kind]
    return chat


def _system_texts(system: Any) -> list[str]:
    if type(system) is str:
        return [system] if system.strip() else []
    return [text for text in _texts(_list(system)) if text]


def _inline_system(content: Any) -> list[str]:
    """Return a system message as it comes to the others: trimmed, in one piece, unless it is empty."""
    texts = [content] if type(content) is str else _texts(_list(content))
    text = "\n".join(filter(None, map(str.strip, texts)))
    return [text] if text else []


def _chat_messages(role: str, content: Any) -> Iterator[Message]:
    """Yield what becomes of one message: what tools have answered are messages of their own."""
    if type(content) is str:
        yield {"role": role, "content": content}
        return
    parts: list[Message] = []
    calls: list[Message] = []
    thought = [block["thinking"] for block in _blocks(content) if block["type"] == "thinking" and block["thinking"]]
    if thought and role == "assistant":
        parts.append(_text_part("<think>" + "\n".join(thought) + "\n</think>"))
    for block in _blocks(content):
        if block["type"] == "text":
            parts.append(_text_part(block["text"]))
        elif block["type"] == "tool_use" and role == "assistant":
            calls.append(_tool_use(block))
        elif block["type"] == "tool_result" and role == "user":
            if parts:
                yield {"role": role, "content": _unwrapped(parts)}
                parts = []
            answered = [_text_part(text) for text in _result_texts(block.get("content")) if text]
            call_id = block.get("tool_use_id") or block.get("id") or ""
            yield {"role": "tool", "tool_call_id": call_id, "content": _unwrapped(answered)}
        elif block["type"] != "thinking" or role != "assistant":
            raise UnknownPromptError("a block that is not known here")
    message: Message = {"role": role}
    if calls:
        message["tool_calls"] = calls
    if parts or (not calls and role != "user"):
        message["content"] = _unwrapped(parts)
    if len(message) > 1:
        yield message


def _blocks(content: Any) -> list[Message]:
    """Return the blocks of a content, of which those of text and of thought have theirs."""
    blocks = _list(content)
    for block in blocks:
        kind = block.get("type") if type(block) is dict else None
        if type(kind) is not str or (kind in ("text", "thinking") and type(block.get(kind)) is not str):
            raise UnknownPromptError("a block that is not known here")
    return blocks


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def _unwrapped(parts: list[Message]) -> str | list[Message]:
    """Return a content: text where there is a single part, or none."""
    if not parts:
        return ""
    text: str = parts[0]["text"]
    return text if len(parts) == 1 else list(parts)


def _tool_use(block: Message) -> Message:
    arguments = block.get("input") or {}
    if type(block.get("id")) is not str or not block["id"] or type(arguments) is not dict:
        raise UnknownPromptError("a tool call without an id, or with arguments that are no object")
    return {"id": block["id"], "function": {"name": block.get("name"), "arguments": arguments}}


def _result_texts(content: Any) -> list[str]:
    return [content] if type(content) is str else _texts(_list(content))


def _thinking(body: Mapping[str, Any]) -> Message:
    """Return the chat's fields of `thinking` and of `output_config`.

    SGLang sets the one variable that turns the model's thinking on and off; here both are set that there are.
    """
    fields: Message = {}
    thinking = body.get("thinking")
    if thinking is not None:
        kind = thinking.get("type") if type(thinking) is dict else None
        if kind not in ("enabled", "adaptive", "disabled"):
            raise UnknownPromptError("a kind of thinking that is not known here")
        fields["chat_template_kwargs"] = {"thinking": kind != "disabled", "enable_thinking": kind != "disabled"}
    output = body.get("output_config")
    effort = output.get("effort") if type(output) is dict else None
    if effort is not None:
        fields["reasoning_effort"] = "max" if effort == "xhigh" else effort
    return fields


def _is_server_tool(tool: Any) -> bool:
    kind = tool.get("type") if type(tool) is dict else None
    return type(kind) is str and kind.startswith(_SERVER_TOOLS)


def _custom_tool(tool: Any) -> Message:
    schema = tool.get("input_schema") if type(tool) is dict else None
    if type(schema) is not dict or tool.get("type") not in (None, "custom"):
        raise UnknownPromptError("a tool that is not known here")
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return _function(tool, tool.get("description") or "", parameters)


# -- OpenAI's responses -----------------------------------------------------------------------------------------------


def chat_of_response(body: Mapping[str, Any], keeps_inline_system: bool) -> Message:
    """Return the chat of a body of `/v1/responses`. Raises UnknownPromptError.

    `keeps_inline_system`: the template shows system messages where they stand; otherwise all of them come first.
    """
    instructions, given = body.get("instructions"), body.get("input")
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if type(given) is str:
        messages.append({"role": "user", "content": given})
    else:
        messages += [message for item in _list(given) if (message := _item_message(item)) is not None]
    messages = _merged_assistants(messages)
    if not keeps_inline_system:
        messages = _system_first(messages)
    chat: Message = {"messages": messages}
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    reasoning = body.get("reasoning")
    if reasoning is not None:
        if type(reasoning) is not dict or not reasoning.keys() <= _REASONING_FIELDS:
            raise UnknownPromptError("a reasoning that is not known here")
        chat["reasoning_effort"] = reasoning.get("effort", _DEFAULT_EFFORT)
    tools = [_response_tool(tool) for tool in _list(body.get("tools")) if not _is_built_in(tool)]
    if tools:
        chat["tools"], chat["tool_choice"] = tools, body.get("tool_choice", "auto")
    return chat


def _item_message(item: Any) -> Message | None:
    """Return the message of one item of the input; None where it leaves nothing."""
    kind = item.get("type") if type(item) is dict else ""
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [_function_call(item)]}
    if kind == "function_call_output":
        output = item.get("output", "")
        text = output if type(output) is str else "".join(_texts(_list(output)))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    if kind == "reasoning":
        texts = filter(None, _texts(_list(item.get("summary"))))
        text = "\n".join(texts) or "\n".join(filter(None, _texts(_list(item.get("content")))))
        if not text and item.get("encrypted_content"):
            raise UnknownPromptError("thought that is not readable here")
        return {"role": "assistant", "reasoning_content": text} if text else None
    if kind not in _MESSAGE_TYPES:
        raise UnknownPromptError("an item that is not known here")
    content = item.get("content")
    if type(content) is list:
        if not all(type(part) is dict and part.get("type") in _MESSAGE_TEXTS for part in content):
            raise UnknownPromptError("a part that is no text")
        content = [_text_part(text) for text in _texts(content)]
    role = item.get("role")
    if role == "developer":
        role, content = "system", _labelled(content)
    message = {
        name: value for name, value in item.items() if value is not None and name not in ("id", "status", "type")
    }
    return {**message, "role": role, "content": content}


def _labelled(content: Any) -> Any:
    """Return a developer's content as that of the system: its first text says whose it is."""
    if type(content) is str:
        return f"{_DEVELOPER_LABEL}\n{content}"
    if type(content) is not list or not content:
        raise UnknownPromptError("a developer's message without a text")
    return [_text_part(f"{_DEVELOPER_LABEL}\n{content[0]['text']}"), *content[1:]]


def _function_call(item: Message) -> Message:
    arguments = item.get("arguments")
    if type(arguments) is not str:
        raise UnknownPromptError("arguments that are no text")
    call = {"name": item.get("name"), "arguments": arguments or "{}"}
    return {"id": item.get("call_id") or item.get("id"), "function": call}


def _merged_assistants(messages: list[Message]) -> list[Message]:
    """Join what the assistant says in a row, its calls and its thought: it is one turn of a chat."""
    merged: list[Message] = []
    for message in messages:
        if message["role"] != "assistant" or not merged or merged[-1]["role"] != "assistant":
            merged.append(message)
            continue
        turn = merged[-1] = dict(merged[-1])
        content, former = message.get("content"), turn.get("content")
        if content:
            if type(content) is str and type(former) is str and former:
                turn["content"] = f"{former}\n\n{content}"
            elif former:
                turn["content"] = _as_parts(former) + _as_parts(content)
            else:
                turn["content"] = content
        if message.get("tool_calls"):
            turn["tool_calls"] = [*turn.get("tool_calls", ()), *message["tool_calls"]]
        thought = message.get("reasoning_content")
        if thought:
            former = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{former}\n{thought}" if former else thought
    return merged


def _as_parts(content: Any) -> list[Message]:
    return [_text_part(content)] if type(content) is str else content


def _system_first(messages: list[Message]) -> list[Message]:
    """Join all messages of the system into one, in front of the others."""
    others = [message for message in messages if message["role"] != "system"]
    chunks: list[str] = []
    for message in messages:
        if message["role"] == "system":
            content = message["content"]
            chunks += [content] if type(content) is str else [part["text"] for part in content]
    return [{"role": "system", "content": "\n\n".join(chunks)}, *others] if chunks else others


def _is_built_in(tool: Any) -> bool:
    return type(tool) is dict and type(tool.get("type")) is str and tool["type"] in _BUILT_IN_TOOLS


def _response_tool(tool: Any) -> Message:
    if type(tool) is not dict or tool.get("type") != "function":
        raise UnknownPromptError("a tool that is no function")
    return _function(tool, tool.get("description"), tool.get("parameters"))


# -- both -------------------------------------------------------------------------------------------------------------


def _function(tool: Message, description: Any, parameters: Any) -> Message:
    """Return a tool of a chat, its fields in the order in which the template sees them."""
    if tool.get("defer_loading") is not None:
        raise UnknownPromptError("a tool that is loaded later")
    strict = tool.get("strict", False)
    if type(strict) is not bool:
        raise UnknownPromptError("strict is neither true nor false")
    function = {"name": tool.get("name"), "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def _list(value: Any) -> list[Any]:
    """Return a list that may be left out. Raises UnknownPromptError for anything else."""
    if value is not None and type(value) is not list:
        raise UnknownPromptError("a field that is no list")
    return value or []


def _texts(parts: list[Any]) -> list[str]:
    """Return the texts of a list of parts. Raises UnknownPromptError for a part that is none."""
    for part in parts:
        if type(part) is not dict or type(part.get("text")) is not str:
            raise UnknownPromptError("a part that is no text")
    return [part["text"] for part in parts]
