"""The mock engine answers as an instance of its role, and refuses what an instance could not serve."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from sglang_ext.engine.mock_engine import MockEngine
from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from support.router_process import FAST, running_router

PAIRED = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}


async def post(role: Role, path: str, body: object) -> tuple[int, str]:
    engine = MockEngine(role, model="m", token_s=0.0)
    async with TestClient(TestServer(engine.app())) as client:
        reply = await client.post(path, json=body)
        return reply.status, await reply.text()


def answer(role: Role, path: str, body: dict[str, Any]) -> Any:
    status, text = asyncio.run(post(role, path, {**PAIRED, **body}))
    assert status == 200
    return json.loads(text)


def test_decode_answers_with_the_tokens_that_are_asked_for() -> None:
    chat = answer(Role.DECODE, "/v1/chat/completions", {"messages": [], "max_tokens": 3})
    assert chat["choices"][0]["message"]["content"] == " mock mock mock"
    assert chat["usage"]["completion_tokens"] == 3
    generated = answer(Role.DECODE, "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}})
    assert generated["text"] == " mock mock"
    assert generated["meta_info"]["finish_reason"]["type"] == "length"


def test_an_undivided_one_needs_no_partner() -> None:
    status, text = asyncio.run(post(Role.PLAIN, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}}))
    assert (status, json.loads(text)["text"]) == (200, " mock mock")


def test_prefill_answers_with_one_token() -> None:
    reply = answer(Role.SHORT, "/v1/completions", {"prompt": "a" * 400, "max_tokens": 9})
    assert reply["choices"][0]["text"] == " mock"
    assert reply["usage"]["prompt_tokens"] > 90


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_stream_has_an_event_for_each_token(path: str) -> None:
    body = {**PAIRED, "stream": True, "max_tokens": 3}
    status, text = asyncio.run(post(Role.DECODE, path, body))
    *events, last = text.removesuffix("\n\n").split("\n\n")
    assert (status, len(events), last) == (200, 3, "data: [DONE]")
    assert all(json.loads(event.removeprefix("data: ")) for event in events)


@pytest.mark.parametrize(
    ("role", "changes", "problem"),
    [
        (Role.DECODE, {"bootstrap_room": None}, "bootstrap_room must be"),
        (Role.DECODE, {"bootstrap_room": -1}, "bootstrap_room must be"),
        (Role.DECODE, {"bootstrap_room": []}, "bootstrap_room must be"),
        (Role.DECODE, {"bootstrap_host": ""}, "bootstrap_host must name"),
        (Role.LONG, {"bootstrap_port": 1}, "bootstrap_port must be 8998"),
    ],
)
def test_a_request_that_would_find_no_partner_is_refused(role: Role, changes: dict[str, Any], problem: str) -> None:
    status, text = asyncio.run(post(role, "/generate", {**PAIRED, "text": "x", **changes}))
    assert status == 400
    assert json.loads(text)["error"]["message"].startswith(problem)


def test_neither_torch_nor_sglang_is_imported() -> None:
    code = "import sys, sglang_ext.engine.mock_engine; print({'torch', 'sglang'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("roles", [(Role.PLAIN,), (Role.SHORT, Role.DECODE)])
def test_a_router_takes_it_for_ready(roles: tuple[Role, ...]) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            servers = [TestServer(MockEngine(role, model="m", token_s=0.0).app()) for role in roles]
            for server in servers:
                await stack.enter_async_context(server)
            workers = tuple(
                WorkerAddress(f"http://127.0.0.1:{server.port}", role)
                for server, role in zip(servers, roles, strict=True)
            )
            served = await stack.enter_async_context(running_router(replace(FAST, workers=workers)))
            await served.until_ready()

    asyncio.run(run())
