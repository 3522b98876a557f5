"""Asks each instance, once, whether it makes the same tokens as the router of texts, chats, tools and thought.

Chat templates differ by model, option and version of SGLang, and so an instance's own answer counts (`/v1/tokenize`; of
Anthropic's messages it says only how many tokens they have): what both read alike is counted by the instance's events.
Of `/v1/responses` nothing can be asked. It is taken to be read alike until a reply counts other tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import orjson

from sglang_ext_router.decide.block_index import PromptKind
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.request.chat_template import UnknownPromptError
from sglang_ext_router.request.tokenising import PromptTokeniser

logger = logging.getLogger(__name__)

PATH = "/v1/tokenize"
COUNT_PATH = "/v1/messages/count_tokens"
TRIES = 5
PAUSE_S = 2.0
_ALL = frozenset(PromptKind)
_TEXT = "  Grüße, 世界!\n\tif x == 12345.60:  # 👩‍👩‍👧 e\u0301 <s></s><|im_start|>\r\n\n" + "a" * 70
_SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "Ort <é>"}, "days": {"enum": [1, 2]}},
    "required": ["place"],
}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "of today", "parameters": _SCHEMA}},
    {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "name": "now"}},
]
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "one " + _TEXT},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": " four "}]},
]
_SYSTEM: dict[str, Any] = {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": 1}'}}
_CALLED: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": '{"t": 7}'}]},
]
_THOUGHT = {"role": "assistant", "content": "two", "reasoning_content": "if one, two"}
_SAYING: dict[str, Any] = {"role": "user", "content": "one " + _TEXT}
_LOOKING: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "looking"},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"place": "Zürich", "days": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "before"},
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": '{"t": 7}'}]},
            {"type": "text", "text": "behind"},
            {"type": "text", "text": " it"},
        ],
    },
]
_LOOK: dict[str, Any] = {"name": "weather", "description": "of today", "input_schema": _SCHEMA}
_THINKING: list[dict[str, Any]] = [
    _SAYING,
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "if one, two"}, {"type": "text", "text": "two"}],
    },
    _SAYING,
]
# What is asked, by what it shows. Where both refuse one, they read it alike.
_CASES: Mapping[PromptKind, list[dict[str, Any]]] = {
    PromptKind.TEXTS: [{"prompt": _TEXT}, {"prompt": "a"}],
    PromptKind.CHATS: [
        {"messages": _TURNS},
        {"messages": [_SYSTEM, *_TURNS]},
        {"messages": _TURNS[:2]},
        {"messages": _TURNS[:2], "continue_final_message": True},
    ],
    PromptKind.TOOLS: [
        {"messages": _TURNS[:1], "tools": _TOOLS},
        {"messages": [_SYSTEM, _TURNS[0], *_CALLED], "tools": _TOOLS},
        {"messages": [_TURNS[0], *_CALLED, _TURNS[0]]},
    ],
    PromptKind.REASONING: [
        {"messages": [_TURNS[0], _THOUGHT, _TURNS[0]]},
        {"messages": _TURNS, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": _TURNS, "reasoning_effort": "low"},
        {"messages": _TURNS, "reasoning_effort": "high"},
    ],
    PromptKind.MESSAGES: [
        {"system": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "and kind"}], "messages": [_SAYING]},
        {"system": "be brief", "messages": [_SAYING, *_LOOKING], "tools": [_LOOK]},
        {"messages": [_SAYING, *_LOOKING], "tools": [_LOOK], "tool_choice": {"type": "none"}},
        {"messages": [_SAYING, {"role": "system", "content": " be kind "}, _SAYING]},
    ],
    PromptKind.THOUGHT: [
        {"messages": _THINKING},
        {"messages": [_SAYING], "thinking": {"type": "adaptive"}},
        {"messages": [_SAYING], "thinking": {"type": "disabled"}},
        {"messages": [_SAYING], "output_config": {"effort": "low"}},
        {"messages": [_SAYING], "output_config": {"effort": "xhigh"}},
    ],
    PromptKind.RESPONSES: [],
}
_MESSAGES = frozenset({PromptKind.MESSAGES, PromptKind.THOUGHT})
_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError)

Ask = Callable[[Worker, str, bytes], Awaitable[tuple[int, bytes]]]


class TokenChecks:
    """Runs one check for each instance, as often as it is started."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Ask, on_changed: Callable[[Worker], None]) -> None:
        self._loop = loop
        self._ask = ask
        self._on_changed = on_changed  # what an instance reads alike
        self._checks: dict[int, tuple[PromptTokeniser, asyncio.Task[None]]] = {}  # by worker

    def check(self, worker: Worker, tokeniser: PromptTokeniser) -> None:
        """Find out in the background what the instance and this tokeniser read alike."""
        known = self._checks.get(worker.id)
        if known is None or known[0] is not tokeniser:
            self.forget(worker)
            self._checks[worker.id] = tokeniser, self._loop.create_task(self._run(worker, tokeniser))

    def forget(self, worker: Worker) -> None:
        """The instance is gone, or was started again, perhaps with other options."""
        self._set(worker, frozenset())
        known = self._checks.pop(worker.id, None)
        if known is not None:
            known[1].cancel()

    async def stop(self) -> None:
        tasks = [task for _, task in self._checks.values()]
        self._checks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set(self, worker: Worker, alike: frozenset[PromptKind]) -> None:
        if worker.alike != alike:
            worker.alike = alike
            self._on_changed(worker)

    async def _run(self, worker: Worker, tokeniser: PromptTokeniser) -> None:
        for _ in range(TRIES):
            try:
                alike = {kind for kind in PromptKind if await self._is_alike(worker, tokeniser, kind)}
            except _ERRORS as error:
                logger.debug("no tokens from %s: %s", worker.url, error)
                await asyncio.sleep(PAUSE_S)
                continue
            if PromptKind.CHATS not in alike:
                alike &= {PromptKind.TEXTS}
            self._set(worker, frozenset(alike))
            if alike != _ALL:
                differing = ", ".join(sorted(_ALL - alike))
                logger.info("worker %s makes other tokens of %s: estimated for them", worker.url, differing)
            return
        logger.info("worker %s does not say what tokens it makes: cached prefixes are estimated for it", worker.url)

    async def _is_alike(self, worker: Worker, tokeniser: PromptTokeniser, kind: PromptKind) -> bool:
        """Return whether the instance and the router make the same of all cases of a kind. Raises one of _ERRORS."""
        counts_only = kind in _MESSAGES
        path = b"/v1/messages" if counts_only else b"/v1/chat/completions"
        for case in _CASES[kind]:
            if counts_only:
                asked, answered, body = COUNT_PATH, "input_tokens", {"model": "default", **case}
            else:
                asked, answered, body = PATH, "tokens", case
            status, answer = await self._ask(worker, asked, orjson.dumps(body))
            if status >= 500 or status == 404:
                return False
            theirs = orjson.loads(answer)[answered] if status == 200 else None
            try:
                ids, _ = tokeniser.ids(b"/v1/completions" if "prompt" in case else path, case, _ALL)
            except UnknownPromptError:
                if theirs is not None:
                    return False
            else:
                if theirs != (len(ids) if counts_only else ids):
                    return False
        return True
