"""An instance's answers show which prompts it and the router read alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import PromptKind
from sglang_ext_router.instances import token_check
from sglang_ext_router.instances.token_check import TokenChecks
from sglang_ext_router.instances.workers import TokenSource, Worker
from sglang_ext_router.request.chat_template import UnknownPromptError
from sglang_ext_router.request.tokenising import PromptTokeniser, Tokenisers
from support.tiny_model import tiny_model

ALL = frozenset(PromptKind)
Answer = tuple[int, dict[str, Any]]


class Instance:
    """Answers as `answer` says, which gets the body and what the router itself would make of it."""

    def __init__(self, answer: Callable[[dict[str, Any], list[int]], Answer]) -> None:
        self._answer = answer
        self.asked = 0
        loop = asyncio.get_running_loop()
        made = Tokenisers(loop).of(TokenSource(str(tiny_model())))
        assert made is not None
        self.tokeniser: PromptTokeniser = made
        self.worker = Worker(1, WorkerAddress("http://127.0.0.1:1", Role.BOTH, None), RouterConfig())
        self.changed = asyncio.Event()
        self.checks = TokenChecks(loop, self._ask, lambda worker: self.changed.set())

    async def _ask(self, worker: Worker, path: str, raw: bytes) -> tuple[int, bytes]:
        self.asked += 1
        body = orjson.loads(raw)
        kind = b"/v1/completions" if "prompt" in body else b"/v1/chat/completions"
        if path == token_check.COUNT_PATH:
            kind = b"/v1/messages"
        try:
            own = self.tokeniser.ids(kind, body, ALL)[0]
        except UnknownPromptError:
            return 400, b"{}"
        status, answer = self._answer(body, own)
        if path == token_check.COUNT_PATH and "tokens" in answer:
            answer = {"input_tokens": len(answer["tokens"])}
        return status, orjson.dumps(answer)

    async def alike(self) -> frozenset[PromptKind]:
        self.checks.check(self.worker, self.tokeniser)
        await asyncio.wait_for(self.changed.wait(), 5)
        await self.checks.stop()
        return self.worker.alike


async def test_all_is_read_alike() -> None:
    assert await Instance(lambda body, own: (200, {"tokens": own})).alike() == ALL


@pytest.mark.parametrize(
    ("differs", "alike"),
    [
        (lambda body: "tools" in body and "model" not in body, ALL - {PromptKind.TOOLS}),
        (lambda body: "reasoning_effort" in body, ALL - {PromptKind.REASONING}),
        (lambda body: "model" in body and "system" in body, ALL - {PromptKind.MESSAGES}),
        (lambda body: "thinking" in body, ALL - {PromptKind.THOUGHT}),
        (lambda body: body.get("messages", [{}])[0].get("role") == "system", {PromptKind.TEXTS}),
        (lambda body: "continue_final_message" in body, {PromptKind.TEXTS}),
        (lambda body: "prompt" in body, ALL - {PromptKind.TEXTS}),
    ],
)
async def test_what_is_read_otherwise_is_left_out(
    differs: Callable[[dict[str, Any]], bool], alike: set[PromptKind]
) -> None:
    one_more = Instance(lambda body, own: (200, {"tokens": [*own, 1] if differs(body) else own}))
    refusing = Instance(lambda body, own: (400, {}) if differs(body) else (200, {"tokens": own}))
    assert await one_more.alike() == await refusing.alike() == alike


async def test_an_instance_that_cannot_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_check, "PAUSE_S", 0.01)
    answers: list[Answer] = [(200, {"wrong": 1})]
    instance = Instance(lambda body, own: answers.pop() if answers else (200, {"tokens": own}))
    assert await instance.alike() == ALL


@pytest.mark.parametrize("status", [404, 500])
async def test_an_instance_that_does_not_know_the_question(status: int) -> None:
    instance = Instance(lambda body, own: (status, {}))
    instance.checks.check(instance.worker, instance.tokeniser)
    asked_kinds = len(PromptKind) - 1  # responses are not asked about
    while instance.asked < asked_kinds:  # noqa: ASYNC110 - the check has no event where nothing changes
        await asyncio.sleep(0.001)
    await instance.checks.stop()
    assert not instance.worker.alike
    assert instance.asked == asked_kinds


async def test_an_instance_is_checked_once_until_it_is_lost() -> None:
    instance = Instance(lambda body, own: (200, {"tokens": own}))
    checks, worker = instance.checks, instance.worker
    checks.check(worker, instance.tokeniser)
    await asyncio.wait_for(instance.changed.wait(), 5)
    asked = instance.asked
    checks.check(worker, instance.tokeniser)
    await asyncio.sleep(0)
    assert instance.asked == asked
    instance.changed.clear()
    checks.forget(worker)
    assert instance.changed.is_set()
    assert not worker.alike
    assert await instance.alike() == ALL
    assert instance.asked == 2 * asked


def test_a_model_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_model() / "tokenizer.json").read_text())

    async def ids() -> None:
        tokeniser = Tokenisers(asyncio.get_running_loop()).of(TokenSource(str(tmp_path)))
        assert tokeniser is not None
        assert tokeniser.ids(b"/v1/completions", {"prompt": "a"}, ALL)[0]
        with pytest.raises(UnknownPromptError):
            tokeniser.ids(b"/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, ALL)

    asyncio.run(ids())
