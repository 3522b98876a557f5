"""kill -9 of a decode instance after k tokens: every client sees one unbroken stream. Real SGLang."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.reference import random_prompt
from support.router_cli import RunningRouter, running_router

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

NEW_TOKENS = 300
GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TRIES = 4


class Case(NamedTuple):
    name: str
    path: str
    body: dict[str, Any]
    killed_after: int  # events that the client has at least
    is_greedy: bool = True


def openai(name: str, path: str, killed_after: int, **fields: Any) -> Case:
    prompt = {"prompt": name} if path == COMPLETIONS else {"messages": [{"role": "user", "content": name}]}
    usage = {"stream_options": {"include_usage": True}}
    body = {"model": "m", "max_tokens": NEW_TOKENS, "stream": True, **GREEDY, **usage, **prompt, **fields}
    return Case(name, path, body, killed_after, body["temperature"] == 0)


def generate(name: str, killed_after: int, seed: int, **parameters: Any) -> Case:
    given = {"max_new_tokens": NEW_TOKENS, **GREEDY, **parameters}
    body = {"input_ids": random_prompt(80, seed=seed), "sampling_params": given, "stream": True}
    return Case(name, GENERATE, body, killed_after, given["temperature"] == 0)


CASES = [
    openai("a chat", CHAT, 3),
    openai("a longer chat", CHAT, 90),
    openai("a chat with special tokens", CHAT, 30, skip_special_tokens=False),
    openai("a sampled chat", CHAT, 20, temperature=1.0),
    openai("a chat under the client's id", CHAT, 10, rid="mine"),
    openai("a completion", COMPLETIONS, 1),
    openai("a longer completion", COMPLETIONS, 100),
    openai("an echoed completion", COMPLETIONS, 15, echo=True),
    openai("a completion of few tokens at least", COMPLETIONS, 40, ignore_eos=False, min_tokens=250),
    openai("a sampled completion", COMPLETIONS, 33, temperature=0.8, top_p=0.9),
    generate("tokens", 2, seed=1),
    generate("more tokens", 70, seed=2),
    generate("sampled tokens", 25, seed=3, temperature=1.0),
]


class Stream:
    """One stream, read by a thread of its own."""

    def __init__(self, router: RunningRouter, case: Case) -> None:
        self.case = case
        self.lines: list[bytes] = []
        self.has_begun = threading.Event()
        self._router = router

    def read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._router.port, timeout=120)
        connection.request("POST", self.case.path, json.dumps(self.case.body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        while line := response.readline():
            if line.startswith(b"data: "):
                self.lines.append(line.rstrip())
                if len(self.lines) >= self.case.killed_after:
                    self.has_begun.set()
        self.has_begun.set()
        connection.close()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith(b"data: {")]

    def summary(self) -> dict[str, Any]:
        """All that the client learns, however it is divided into events."""
        events = self.events()
        if self.case.path == GENERATE:
            meta = events[-1]["meta_info"]
            assert len({event["meta_info"]["id"] for event in events}) == 1
            lengths = [len(event["output_ids"]) for event in events]
            assert lengths == sorted(set(lengths)), "a token came twice"
            content = events[-1]["text"], events[-1]["output_ids"], meta["finish_reason"]
            return {"content": content, "usage": (meta["prompt_tokens"], meta["completion_tokens"])}
        assert len({(event["id"], event["created"]) for event in events}) == 1
        choices = [choice for event in events for choice in event["choices"]]
        fields = [choice.get("delta", choice) for choice in choices]
        text = "".join(field.get("content") or field.get("text") or "" for field in fields)
        reasoning = "".join(field.get("reasoning_content") or "" for field in fields)
        usage = events[-1]["usage"]
        return {
            "content": (text, reasoning, choices[-1]["finish_reason"], choices[-1]["matched_stop"]),
            "roles": sum(bool(field.get("role")) for field in fields),
            "usage": (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]),
        }


@contextmanager
def killed_instance(
    role: Role, survivors: list[Engine], arguments: tuple[str, ...] = ()
) -> Iterator[tuple[RunningRouter, Engine]]:
    """A router over instances that will survive, and over one of this role that will be killed."""
    victim = Engine.start(EngineSpec(role, arguments=arguments, name="victim"))
    try:
        victim.wait_ready()
        with running_router([*survivors, victim]) as router:
            yield router, victim
    finally:
        victim.stop()


def drain(router: RunningRouter, engine: Engine, *, drains: bool) -> None:
    reply = router.admin("POST", f"/workers/127.0.0.1:{engine.port}/drain", {"drain": drains})
    assert reply.status == 200, reply.body


def references(router: RunningRouter, cases: list[Case]) -> list[dict[str, Any]]:
    """What streams say that are never cut."""
    streams = [Stream(router, case) for case in cases]
    with ThreadPoolExecutor(len(streams)) as threads:
        list(threads.map(Stream.read, streams))
    return [stream.summary() for stream in streams]


def check(streams: list[Stream], expected: list[dict[str, Any]]) -> None:
    for stream, reference in zip(streams, expected, strict=True):
        name = stream.case.name
        assert stream.lines[-1] == b"data: [DONE]", name
        assert not any(line.startswith(b'data: {"error"') for line in stream.lines), (name, stream.lines[-3:])
        got = stream.summary()
        if stream.case.is_greedy:
            assert got == reference, name
        else:
            assert got["usage"] == reference["usage"], name
            assert got["content"][-1] == reference["content"][-1], name


def lose(router: RunningRouter, victim: Engine, survivor: Engine, cases: list[Case]) -> list[Stream]:
    """Streams on the victim, which is killed when each client has what its case says.

    On a busy machine some begin when others have ended: then all are asked for once more.
    """
    with ThreadPoolExecutor(len(cases)) as threads:
        for _ in range(TRIES):
            streams = [Stream(router, case) for case in cases]
            running = [threads.submit(stream.read) for stream in streams]
            for stream in streams:
                assert stream.has_begun.wait(60)
            if sum(not task.done() for task in running) > len(cases) // 2:
                break
            for task in running:
                task.result()
        drain(router, survivor, drains=False)
        lost = sum(not task.done() for task in running)
        victim.kill()
        for task in running:
            task.result()
    assert router.metric("sglang_ext_router_retries_total") == lost
    assert lost > len(cases) // 2, "the streams were over too soon"
    return streams


def test_decode_killed_after_k_tokens_leaves_every_stream_unbroken() -> None:
    prefill, survivor = FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))
    with killed_instance(Role.DECODE, [prefill, survivor]) as (router, victim):
        drain(router, victim, drains=True)
        expected = references(router, CASES)
        drain(router, victim, drains=False)
        drain(router, survivor, drains=True)
        streams = lose(router, victim, survivor, CASES)
        check(streams, expected)
        assert "a stream goes on on other instances behind" in router.log_path.read_text()
        deadline = time.monotonic() + 10
        while not router.is_idle():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    for engine in (prefill, survivor):
        engine.wait_idle(10.0)


def test_an_undivided_instance_killed_leaves_every_stream_unbroken() -> None:
    (survivor,) = FLEET.get(EngineSpec(Role.PLAIN))
    with killed_instance(Role.PLAIN, [survivor]) as (router, victim):
        drain(router, victim, drains=True)
        expected = references(router, CASES)
        drain(router, victim, drains=False)
        drain(router, survivor, drains=True)
        check(lose(router, victim, survivor, CASES), expected)
    survivor.wait_idle(10.0)


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
PARSERS = ("--reasoning-parser", "deepseek-r1", "--tool-call-parser", "qwen25")


@pytest.mark.full
def test_the_parsers_of_reasoning_and_tools_go_on_where_they_were() -> None:
    cases = [
        openai("what is reasoned", CHAT, 40),
        openai("what is not taken apart", CHAT, 60, separate_reasoning=False),
        openai("what might call a tool", CHAT, 25, tools=TOOLS),
        openai("what might call one at once", CHAT, 50, tools=TOOLS, separate_reasoning=False),
    ]
    (survivor,) = FLEET.get(EngineSpec(Role.PLAIN, arguments=PARSERS))
    with killed_instance(Role.PLAIN, [survivor], PARSERS) as (router, victim):
        drain(router, victim, drains=True)
        expected = references(router, cases)
        assert [bool(reference["content"][1]) for reference in expected] == [True, False, True, False]
        drain(router, victim, drains=False)
        drain(router, survivor, drains=True)
        check(lose(router, victim, survivor, cases), expected)


@pytest.mark.full
def test_replies_that_are_no_streams_are_tried_again_whole() -> None:
    prefill, survivor = FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))
    bodies = [(case.path, {**case.body, "stream": False}) for case in CASES if case.is_greedy]
    bodies = [(path, {key: value for key, value in body.items() if key != "stream_options"}) for path, body in bodies]
    with killed_instance(Role.DECODE, [prefill, survivor]) as (router, victim):
        drain(router, victim, drains=True)
        expected = [content_of(router.post(path, body).body) for path, body in bodies]
        drain(router, victim, drains=False)
        drain(router, survivor, drains=True)
        with ThreadPoolExecutor(len(bodies)) as threads:
            running = [threads.submit(router.post, path, body) for path, body in bodies]
            time.sleep(0.5)
            assert sum(task.done() for task in running) < len(bodies)
            drain(router, survivor, drains=False)
            victim.kill()
            replies = [task.result() for task in running]
        assert [reply.status for reply in replies] == [200] * len(bodies)
        assert [content_of(reply.body) for reply in replies] == expected


def content_of(reply: dict[str, Any]) -> Any:
    """What a reply says, without its id and its times."""
    if "output_ids" in reply:
        return reply["output_ids"], reply["text"], reply["meta_info"]["finish_reason"]
    usage = reply["usage"]
    return [{**choice} for choice in reply["choices"]], usage["prompt_tokens"], usage["completion_tokens"]
