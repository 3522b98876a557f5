"""Two queues inside an undivided instance: short prompts before long ones, and decode steps between their chunks."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec, Reply
from support.laps import LONG_TOKENS, SHAPE
from support.reference import greedy_reference, random_prompt

pytestmark = pytest.mark.integration

CHUNK_TOKENS = 32
SHORT_TOKENS = 24
NEW_TOKENS = 6
SMALL_KV_TOKENS = 2200
LAPS = ("--laps-mode", "both", "--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16")


def spec(*arguments: str) -> EngineSpec:
    chunks = ("--chunked-prefill-size", str(CHUNK_TOKENS), *arguments)
    return EngineSpec(Role.PLAIN, shape=SHAPE, arguments=chunks, worker_options=LAPS)


class Undivided:
    """One instance, and requests to it."""

    def __init__(self, engine: Engine, threads: ThreadPoolExecutor) -> None:
        self.engine = engine
        self._threads = threads

    def send(self, length: int, seed: int, new_tokens: int = NEW_TOKENS, **fields: Any) -> Future[Reply]:
        priority = fields.pop("priority", "normal")
        parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        parameters["custom_params"] = {"sglang_ext_priority": priority}
        body = {"input_ids": random_prompt(length, seed), "sampling_params": parameters, **fields}
        return self._threads.submit(self.engine.post, "/generate", body)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.engine.get("/laps").body
        return status

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.01)


def is_exact(answer: Future[Reply], length: int, seed: int, new_tokens: int = NEW_TOKENS) -> bool:
    """Return whether the tokens are those of Hugging Face."""
    reply = answer.result(timeout=120)
    assert reply.status == 200, reply.body
    return bool(reply.body["output_ids"] == greedy_reference(random_prompt(length, seed), new_tokens, SHAPE))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as executor:
        yield executor


def checked(engine: Engine, threads: ThreadPoolExecutor) -> Iterator[Undivided]:
    """An instance that must be left as it was found."""
    engine.wait_idle()
    assert engine.post("/flush_cache", {}).status == 200
    before = Undivided(engine, threads).status()["kv"]
    yield Undivided(engine, threads)
    engine.wait_idle()
    assert engine.post("/flush_cache", {}).status == 200
    assert Undivided(engine, threads).status()["kv"] == before


@pytest.fixture
def undivided(threads: ThreadPoolExecutor) -> Iterator[Undivided]:
    yield from checked(*FLEET.get(spec()), threads)


@pytest.fixture
def small(threads: ThreadPoolExecutor) -> Iterator[Undivided]:
    yield from checked(*FLEET.get(spec("--max-total-tokens", str(SMALL_KV_TOKENS))), threads)


def test_short_prompts_go_before_a_long_one_and_all_tokens_are_right(undivided: Undivided) -> None:
    ended: list[Future[Reply]] = []
    long = undivided.send(LONG_TOKENS, seed=1)
    undivided.wait_for(lambda status: status["long"]["requests"] == 1)
    shorts = [undivided.send(SHORT_TOKENS + number, seed=10 + number) for number in range(4)]
    for request in (long, *shorts):
        request.add_done_callback(ended.append)
    assert is_exact(long, LONG_TOKENS, 1)
    assert all(is_exact(short, SHORT_TOKENS + number, 10 + number) for number, short in enumerate(shorts))
    assert ended[-1] is long


def test_replies_go_on_between_the_chunks_of_a_long_prompt(undivided: Undivided) -> None:
    """SGLang itself decodes nothing while a prompt has chunks left."""
    chunks = LONG_TOKENS // CHUNK_TOKENS
    has_begun = threading.Event()
    seen: list[list[int]] = []

    def read() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", undivided.engine.port, timeout=120)
        parameters = {"temperature": 0, "max_new_tokens": 4 * chunks, "ignore_eos": True}
        body = {"input_ids": random_prompt(20, 2), "sampling_params": parameters, "stream": True}
        connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                seen.append(json.loads(line[6:])["output_ids"])
                if len(seen) >= 3:
                    has_begun.set()
        connection.close()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_begun.wait(60)
    before = len(seen[-1])
    long = undivided.send(LONG_TOKENS, seed=3)
    assert is_exact(long, LONG_TOKENS, 3)
    meanwhile = len(seen[-1]) - before
    reader.join(120)
    assert meanwhile >= chunks // 2
    assert seen[-1] == greedy_reference(random_prompt(20, 2), 4 * chunks, SHAPE)


@pytest.mark.parametrize("stage", ["chunking", "parked"])
def test_an_abort_ends_a_prefill_that_has_begun(undivided: Undivided, stage: str) -> None:
    victim = undivided.send(LONG_TOKENS, seed=4, rid=f"victim-{stage}", priority="low")
    undivided.wait_for(lambda status: status["long"]["requests"] == 1)
    others = []
    if stage == "parked":
        others.append(undivided.send(LONG_TOKENS, seed=5, priority="real-time"))
        undivided.wait_for(lambda status: status["parked"] == 1)
    assert undivided.engine.post("/abort_request", {"rid": f"victim-{stage}"}).status == 200
    reply = victim.result(timeout=60)
    finish = reply.body["meta_info"]["finish_reason"] if reply.status == 200 else {"type": "abort"}
    assert finish["type"] == "abort", reply.body
    assert all(is_exact(other, LONG_TOKENS, 5) for other in others)
    assert is_exact(undivided.send(SHORT_TOKENS, seed=6), SHORT_TOKENS, 6)


@pytest.mark.full
def test_where_memory_is_short_all_are_answered(small: Undivided) -> None:
    """The requests would take twice the memory that there is."""
    lengths = range(20, 36)
    replies = [small.send(length, seed=length, new_tokens=200) for length in lengths]
    long = small.send(1200, seed=40, priority="low")
    assert all(is_exact(reply, length, length, 200) for reply, length in zip(replies, lengths, strict=True))
    assert is_exact(long, 1200, 40)
