"""A router with more than two length classes, over scripted engines: who gets what, and who helps out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, RouterConfigError, WorkerAddress
from sglang_ext_router.instances.registry import WorkerRegistry
from support.router_process import FAST, RunningRouter, running_router
from support.scripted_engine import ScriptedEngine, event, stream

NAMES = ("chat", "documents", "books")
PREFILL, DECODE = "x-sglang-ext-prefill", "x-sglang-ext-decode"


def classes_of(prefills: list[str], decodes: list[str], ttft_s: float = 30.0) -> str:
    """Three classes of prefill, to 100 and to 1,000 tokens, and two of decode, to 500 tokens."""
    prefill = [
        {"name": name, "max_tokens": bound, "ttft_s": ttft_s, "instances": [url]}
        for name, bound, url in zip(NAMES, (100, 1000, None), prefills, strict=True)
    ]
    decode = [
        {"name": name, "max_tokens": bound, "instances": [url]}
        for name, bound, url in zip(("small", "large"), (500, None), decodes, strict=True)
    ]
    return json.dumps({"prefill": prefill, "decode": decode})


@asynccontextmanager
async def router_of_three(**options: Any) -> AsyncIterator[tuple[RunningRouter, list[ScriptedEngine]]]:
    """A router over three prefill and two decode engines, each of a class of its own."""
    engines = [ScriptedEngine(role) for role in (Role.BOTH,) * 3 + (Role.DECODE,) * 2]
    for engine in engines:
        await engine.start()
    try:
        urls = [engine.url for engine in engines]
        ttft_s = options.pop("ttft_s", 30.0)
        config = replace(
            FAST,
            workers=tuple(WorkerAddress(engine.url, engine.role) for engine in engines),
            length_classes=classes_of(urls[:3], urls[3:], ttft_s),
            **options,
        )
        async with running_router(config) as router:
            await router.until_ready()
            yield router, engines
            await router.until_idle()
    finally:
        for engine in engines:
            await engine.stop()


def request_of(tokens: int, new_tokens: int = 8) -> dict[str, Any]:
    """A prompt that shares nothing with one of another length."""
    return {"input_ids": [tokens] * tokens, "sampling_params": {"max_new_tokens": new_tokens}}


@pytest.mark.slow
async def test_each_length_goes_to_its_class() -> None:
    async with router_of_three() as (router, engines):
        for tokens, new_tokens, prefill, decode in (
            (100, 8, 0, 0),
            (101, 8, 1, 0),
            (1000, 8, 1, 1),
            (1001, 8, 2, 1),
            (90, 410, 0, 0),
            (90, 411, 0, 1),
        ):
            answer = await router.ask("POST", "/generate", request_of(tokens, new_tokens))
            assert answer.status == 200
            assert answer.headers[PREFILL] == engines[prefill].url, tokens
            assert answer.headers[DECODE] == engines[3 + decode].url, (tokens, new_tokens)
            assert answer.headers["x-sglang-ext-class"] == NAMES[prefill]


@pytest.mark.slow
async def test_the_nearest_class_helps_out_unless_it_may_not() -> None:
    async with router_of_three() as (router, engines):
        for gone in (0, 3):
            router.router.set_draining(router.worker(engines[gone].url), True)
        answer = await router.ask("POST", "/generate", request_of(50))
        assert (answer.headers[PREFILL], answer.headers[DECODE]) == (engines[1].url, engines[4].url)
        assert router.router.metrics.spilled == 1
    async with router_of_three(pool_spill=False, queue_timeout_secs=0.2) as (router, engines):
        router.router.set_draining(router.worker(engines[3].url), True)
        answer = await router.ask("POST", "/generate", request_of(50))
        assert answer.status == 503
        assert (await router.ask("POST", "/generate", request_of(600))).status == 200


@pytest.mark.slow
async def test_an_instance_that_is_added_serves_the_classes_of_its_range() -> None:
    async with router_of_three(pool_spill=False, admin_api_key="admin") as (router, engines):
        extra = ScriptedEngine(Role.BOTH)
        await extra.start()
        try:
            admin = {"Authorization": "Bearer admin"}
            new = {"url": extra.url, "role": "both", "context_length_range": "101-1000"}
            assert (await router.ask("POST", "/workers", new, admin)).status == 202
            await router.until_ready(6)
            router.router.set_draining(router.worker(engines[1].url), True)
            for tokens, prefill in ((100, engines[0]), (101, extra), (1000, extra), (1001, engines[2])):
                answer = await router.ask("POST", "/generate", request_of(tokens))
                assert answer.headers[PREFILL] == prefill.url
            for text in ("100", "1-", "-1", "a-b", 7):
                answer = await router.ask("POST", "/workers", {**new, "context_length_range": text}, admin)
                assert answer.status == 400
        finally:
            await extra.stop()


@pytest.mark.slow
async def test_streams_are_counted_by_their_objective() -> None:
    async with router_of_three() as (router, engines):
        for engine in engines[3:]:
            engine.script = stream(event({"text": "x"}))
        for tokens in (50, 51, 500):
            await router.ask("POST", "/generate", {**request_of(tokens), "stream": True})
        assert router.router.metrics.objectives == {("chat", "true"): 2, ("documents", "true"): 1}
        text = (await router.ask("GET", "/metrics")).body.decode()
        assert 'sglang_ext_router_class_ttft_total{class="chat",met="true"} 2.0' in text
    async with router_of_three(ttft_s=1e-6) as (router, engines):

        async def answer_late(turn: Any) -> None:
            await asyncio.sleep(0.05)
            await stream(event({"text": "x"}))(turn)

        engines[3].script = answer_late
        await router.ask("POST", "/generate", {**request_of(50), "stream": True})
        assert router.router.metrics.objectives == {("chat", "false"): 1}


WORKERS = (
    *(WorkerAddress(f"http://p{i}:1", Role.BOTH) for i in range(3)),
    *(WorkerAddress(f"http://d{i}:1", Role.DECODE) for i in range(2)),
)
PREFILLS, DECODES = [f"http://p{i}:1" for i in range(3)], [f"http://d{i}:1" for i in range(2)]


def test_classes_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "classes.yaml"
    file.write_text("prefill: [{name: a, max_tokens: 9, instances: ['p0:1']}, {name: b}]")
    registry = WorkerRegistry(RouterConfig(workers=WORKERS, length_classes=str(file)))
    assert [tuple(worker.served_classes) for worker in list(registry)[:2]] == [(0, 0), (0, 1 << 30)]
    found = registry.add(WorkerAddress("http://q:1", Role.BOTH, token_range=(5, 99)))
    assert found.served_classes == (0, 1)
    assert found.address().token_range == (5, 99)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            classes_of(PREFILLS, ["http://d0:1", "http://e:1"]),
            "decode class large: http://e:1 is not given as a decode",
        ),
        (classes_of([*PREFILLS[:2], DECODES[0]], DECODES), "class small: http://d0:1 is already in class books"),
        (classes_of(["x y", *PREFILLS[:2]], DECODES), "class chat: 'x y' is not of the form http://HOST:PORT"),
        ("/nowhere", "/nowhere: No such file or directory"),
        ("{a: [", "is neither YAML nor JSON"),
        ("{}", "it must hold a mapping"),
    ],
)
def test_bad_classes_are_refused_in_a_line_that_names_the_option(given: str, problem: str) -> None:
    with pytest.raises(RouterConfigError, match=r"^--length-classes[^\n]+$") as refused:
        RouterConfig(workers=WORKERS, length_classes=given)
    assert problem in str(refused.value)
