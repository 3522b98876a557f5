"""The router's tokens of texts and chats against what real engines make of them, template by template."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import PromptKind
from sglang_ext_router.instances.probe import read_token_source
from sglang_ext_router.instances.token_check import TokenChecks
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.request.chat_template import UnknownPromptError
from sglang_ext_router.request.tokenising import PromptTokeniser, Tokenisers
from support.chat_templates import TEMPLATES, Chats, OtherForms, model_folder
from support.engines import FLEET, Engine, EngineSpec
from support.handshake_process import wait_until
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration

CHATS = b"/v1/chat/completions"
MESSAGES, RESPONSES = b"/v1/messages", b"/v1/responses"
ALL = frozenset(PromptKind)
EVENTS_S = 0.5  # in which an engine's events have come
TOO_LONG = "longer than the model's context length"
BODIES = 60


class Checked:
    """An engine, the router's tokenizer of its model, and what the check has found that both read alike."""

    def __init__(self, folder: Path, arguments: tuple[str, ...] = ()) -> None:
        given = ("--model-path", str(folder), "--tokenizer-path", str(folder), *arguments)
        self.engine = Engine.start(EngineSpec(Role.PLAIN, arguments=given))
        self.tokeniser: PromptTokeniser
        self.alike: frozenset[PromptKind] = frozenset()

    def check(self) -> None:
        self.engine.wait_ready()
        asyncio.run(self._check())

    async def _check(self) -> None:
        async def ask(worker: Worker, path: str, body: bytes) -> tuple[int, bytes]:
            reply = await asyncio.to_thread(self.engine.post, path, json.loads(body))
            return reply.status, json.dumps(reply.body).encode()

        loop = asyncio.get_running_loop()
        tokeniser = Tokenisers(loop).of(read_token_source(self.engine.get("/server_info").body))
        assert tokeniser is not None
        self.tokeniser = tokeniser
        changed = asyncio.Event()
        checks = TokenChecks(loop, ask, lambda worker: changed.set())
        worker = Worker(1, WorkerAddress(self.engine.url, Role.PLAIN, None), RouterConfig())
        checks.check(worker, tokeniser)
        await asyncio.wait_for(changed.wait(), 20)
        await checks.stop()
        self.alike = worker.alike

    def own(self, path: bytes, body: dict[str, Any]) -> list[int] | None:
        try:
            return self.tokeniser.ids(path, body, self.alike)[0]
        except UnknownPromptError:
            return None


@pytest.fixture(
    params=["chatml", *(pytest.param(name, marks=pytest.mark.full) for name in TEMPLATES if name != "chatml")]
)
def checked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Checked]:
    made = Checked(model_folder(tmp_path / "model", request.param))
    try:
        made.check()
        yield made
    finally:
        made.engine.stop()


def test_tokens_are_those_that_the_engine_computes(checked: Checked) -> None:
    """Chats with system blocks, tools, calls, thought and all kinds of characters; and texts."""
    assert checked.alike == ALL - {PromptKind.THOUGHT}  # the engine has no reasoning parser
    chats, compared, refused = Chats(seed=1), 0, 0
    for number in range(BODIES):
        body = chats.body()
        asked = {**body, "max_tokens": 1, "return_prompt_token_ids": True}
        reply = checked.engine.post("/v1/chat/completions", asked)
        own = checked.own(CHATS, body)
        if reply.status == 200:
            assert own == reply.body["choices"][0]["prompt_token_ids"], (number, body)
            compared += 1
        elif TOO_LONG not in str(reply.body):
            assert own is None, (number, body, reply.body)
            refused += 1
    assert compared > BODIES // 2
    for _ in range(10):
        text = chats.text()
        asked = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
        reply = checked.engine.post("/v1/completions", asked)
        assert checked.own(b"/v1/completions", {"prompt": text}) == reply.body["choices"][0]["prompt_token_ids"]


def test_other_forms_of_chats_have_the_tokens_that_the_engine_caches(checked: Checked) -> None:
    """`/v1/messages` and `/v1/responses` do not return theirs: a prompt of the same ones finds all of them cached."""
    forms, model = OtherForms(seed=2), checked.engine.get("/server_info").body["served_model_name"]
    for path, draw, limit in (
        (MESSAGES, forms.messages, "max_tokens"),
        (RESPONSES, forms.response, "max_output_tokens"),
    ):
        compared = 0
        for number in range(BODIES):
            body = draw()
            reply = checked.engine.post(path.decode(), {**body, "model": model, limit: 4})
            own = checked.own(path, body)
            if reply.status == 200:
                assert own is not None, (number, body)
                assert prompt_tokens(path.decode(), reply.body["usage"]) == len(own), (number, body)
                held = checked.engine.post(
                    "/generate", {"input_ids": [*own, 7], "sampling_params": {"max_new_tokens": 1}}
                )
                assert held.body["meta_info"]["cached_tokens"] == len(own), (number, body)
                compared += 1
            elif TOO_LONG not in str(reply.body):
                assert own is None, (number, body, reply.body)
        assert compared > BODIES // 2, path


def test_thought_in_messages_is_wrapped_as_the_instance_does(tmp_path: Path) -> None:
    checked = Checked(model_folder(tmp_path / "model", "chatml"), ("--reasoning-parser", "qwen3"))
    try:
        checked.check()
        assert checked.alike == ALL
        said = {"role": "user", "content": "a é"}
        thought = {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}],
        }
        for own_fields in ({}, {"thinking": {"type": "disabled"}}, {"output_config": {"effort": "high"}}):
            body = {"messages": [said, thought, said], **own_fields}
            assert checked.engine.post("/v1/messages", {"model": "default", "max_tokens": 1, **body}).status == 200
            own = checked.own(MESSAGES, body)
            assert own is not None
            held = checked.engine.post("/generate", {"input_ids": [*own, 7], "sampling_params": {"max_new_tokens": 1}})
            assert held.body["meta_info"]["cached_tokens"] == len(own), body
    finally:
        checked.engine.stop()


def test_options_of_an_instance_change_the_template(tmp_path: Path) -> None:
    """A template of its own, and variables for it."""
    file = tmp_path / "own.jinja"
    file.write_text("{{ tone }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\\n{% endfor %}")
    variables = json.dumps({"tone": "softly", "enable_thinking": False})
    arguments = ("--chat-template", str(file), "--default-chat-template-kwargs", variables)
    checked = Checked(model_folder(tmp_path / "model", "plain"), arguments)
    try:
        checked.check()
        assert checked.alike == ALL - {PromptKind.THOUGHT}
        body = {"messages": [{"role": "user", "content": "a é"}], "chat_template_kwargs": {"tone": "loudly"}}
        asked = {**body, "max_tokens": 1, "return_prompt_token_ids": True}
        reply = checked.engine.post("/v1/chat/completions", asked)
        assert checked.own(CHATS, body) == reply.body["choices"][0]["prompt_token_ids"]
    finally:
        checked.engine.stop()


def prompt_tokens(path: str, usage: dict[str, Any]) -> int:
    """Return the prompt's tokens; Anthropic's form counts those that are cached by themselves."""
    if path == "/v1/messages":
        return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens") or 0)
    return int(usage["input_tokens" if path == "/v1/responses" else "prompt_tokens"])


PAGE_TOKENS = 16
PAGES = ("--page-size", str(PAGE_TOKENS), "--enable-cache-report")


def known(running: RunningRouter, engine: Engine) -> dict[str, Any]:
    described: dict[str, Any] = running.workers()[engine.url]["cached_prefixes"]
    return described


def cached_tokens(running: RunningRouter) -> float:
    """Return how many tokens of all prompts the router believed to be cached where it sent them."""
    counted = re.search(r'prompt_tokens_total\{cached="true"\} (\S+)', str(running.call("GET", "/metrics")[0].body))
    return float(counted[1]) if counted else 0.0


def test_a_router_counts_chats_and_texts_by_events() -> None:
    """A router finds prompts that another has sent, to the block; an instance that reads chats otherwise says so."""
    roles = (EngineSpec(Role.BOTH, arguments=PAGES), EngineSpec(Role.DECODE, arguments=PAGES))
    other_template = EngineSpec(Role.BOTH, arguments=(*PAGES, "--chat-template", "chatml"))
    engines = FLEET.get(*roles, other_template)
    prefill, odd = engines[0], engines[2]
    said = "It was a dark and stormy night; the rain fell in torrents. " * 8
    system = {"role": "system", "content": [{"type": "text", "text": said}]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    first: dict[str, Any] = {"messages": [system, {"role": "user", "content": "Why?"}], "tools": tools, "max_tokens": 4}
    second = {
        **first,
        "messages": [*first["messages"], {"role": "assistant", "content": "So."}, system | {"role": "user"}],
    }
    text = {"prompt": said.upper(), "max_tokens": 4}
    messages = {
        "model": "default",
        "system": said.title(),
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 4,
    }
    model = prefill.get("/server_info").body["served_model_name"]
    response = {"model": model, "instructions": said.lower(), "input": "Why?", "max_output_tokens": 4}
    every = ["ids", "chats", "messages", "reasoning", "responses", "texts", "tools"]
    with running_router(engines[:2]) as router, running_router(engines[:2]) as sender:
        wait_until(lambda: known(router, prefill).get("prompts") == known(sender, prefill).get("prompts") == every, 20)
        for path, sent, asked in (
            ("/v1/chat/completions", first, second),
            ("/v1/completions", text, text),
            ("/v1/messages", messages, messages),
            ("/v1/responses", response, response),
        ):
            reply = sender.post(path, sent)
            assert reply.status == 200
            shared_tokens = prompt_tokens(path, reply.body["usage"])
            # The turn before ends in what begins a reply; of a prompt the last token is always computed.
            full_tokens = (shared_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
            assert full_tokens > 100
            time.sleep(EVENTS_S)
            before = cached_tokens(router)
            assert router.post(path, asked).status == 200
            assert cached_tokens(router) - before == full_tokens
    with running_router(engines) as router:
        wait_until(lambda: known(router, odd).get("prompts") == ["ids", "texts"], 20)
        for body in (first, second):
            assert router.post("/v1/chat/completions", body).status == 200
