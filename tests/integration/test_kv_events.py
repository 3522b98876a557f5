"""The index of blocks against real engines: before every request it says how much of the prompt the engine then finds.

Random traffic with shared beginnings over a KV cache that is too small, flushes, events that are lost, and a restart
on the same ports; after each of them the index is right within a second.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import BlockIndex, TokenBlocks
from sglang_ext_router.decide.event_sequence import SequenceAction
from sglang_ext_router.instances.kv_events import KvEvents
from sglang_ext_router.instances.probe import read_kv_events
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.request.prompt import measure
from support.engines import FLEET, Engine, EngineSpec, free_port
from support.handshake_process import wait_until
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration

PAGE_TOKENS = 16
KV_TOKENS = 2048
SETTLED_S = 1.0
# Undivided, as requests without a peer leave nothing in the cache of a prefill instance.
SMALL = ("--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(KV_TOKENS))


# Of both, the device holds less: beginnings of the last dozen prompts are on the host, too.
HOST_TIER = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", str(KV_TOKENS // 2))


def publishing(options: tuple[str, ...] = (), further: tuple[str, ...] = ()) -> EngineSpec:
    """Return an engine that publishes its events, on ports of its own."""
    config = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
        "buffer_steps": 200,
    }
    arguments = (*SMALL, *further, "--kv-events-config", json.dumps(config))
    return EngineSpec(Role.PLAIN, arguments=arguments, worker_options=options)


class Traffic:
    """Prompts that share beginnings of any length, and what an engine finds of them in its cache."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.draws = random.Random(seed)
        self._sent: list[list[int]] = []
        self.is_losing = False
        self.lost = 0

    def prompt(self) -> list[int]:
        beginning: list[int] = []
        if self._sent and self.draws.random() < 0.7:
            known = self.draws.choice(self._sent[-12:])
            beginning = known[: self.draws.randint(1, len(known))]
        made = beginning + [self.draws.randint(10, 400) for _ in range(self.draws.randint(1, 150))]
        self._sent.append(made)
        return made

    def cached_tokens(self, prompt: list[int]) -> tuple[int, int]:
        """Have the engine compute a prompt; return how many of its tokens it found, and of these on its host."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        reply = self.engine.post("/generate", body)
        assert reply.status == 200, reply
        details = reply.body["meta_info"].get("cached_tokens_details") or {}
        return int(reply.body["meta_info"]["cached_tokens"]), int(details.get("host", 0))


class FollowedEngine:
    def __init__(self, engine: Engine) -> None:
        self.index = BlockIndex(100_000)
        self.events = KvEvents(asyncio.get_running_loop(), self.index)
        self.worker = Worker(1, WorkerAddress(engine.url, Role.BOTH, None), RouterConfig())
        self.worker.kv_events = read_kv_events(self.worker.host, engine.get("/server_info").body)
        assert self.worker.kv_events is not None
        assert self.worker.kv_events.block_tokens == PAGE_TOKENS
        self.events.follow(self.worker)
        (self.rank,) = self.events.ranks(self.worker)

    def found_tokens(self, prompt: list[int]) -> tuple[int, int]:
        """Return how many tokens of a prompt the engine will find, and how many of them on its host."""
        blocks = measure(b"/generate", {"input_ids": prompt}).blocks
        assert isinstance(blocks, TokenBlocks)
        most = (len(prompt) - 1) // PAGE_TOKENS
        found, on_device = (
            min(most, self.index.matched(blocks.of(PAGE_TOKENS), is_on_device=is_on_device).get(self.rank.source, 0))
            for is_on_device in (False, True)
        )
        return found * PAGE_TOKENS, (found - on_device) * PAGE_TOKENS

    async def settle(self) -> None:
        """Wait as long as the index may take to be right."""
        await asyncio.sleep(SETTLED_S)
        held = self.worker.held_blocks
        assert held is not None
        assert held.is_whole, self.events.describe(self.worker)


@pytest.fixture(
    params=[
        pytest.param(("off", ()), id="off"),
        pytest.param(("both", ()), id="both", marks=pytest.mark.full),
        pytest.param(("off", HOST_TIER), id="host", marks=pytest.mark.full),
    ]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    laps_mode, further = request.param
    started = Engine.start(publishing(("--laps-mode", laps_mode), further))
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


async def follow(engine: Engine) -> None:
    traffic = Traffic(engine, seed=1)
    for _ in range(3):  # before anything follows it
        await asyncio.to_thread(traffic.cached_tokens, traffic.prompt())
    followed = FollowedEngine(engine)
    take = followed.rank.sequence.on_batch

    def lose_some(number: int, payload: bytes) -> list[SequenceAction]:
        if traffic.is_losing and traffic.draws.random() < 0.5:
            traffic.lost += 1
            return []
        return take(number, payload)

    followed.rank.sequence.on_batch = lose_some  # type: ignore[method-assign]
    try:
        await followed.settle()
        found_any = found_on_host = 0
        for step in range(40):
            traffic.is_losing = 15 <= step < 30
            if step in (10, 20):
                await asyncio.to_thread(engine.wait_idle)
                assert (await asyncio.to_thread(engine.post, "/flush_cache", {})).status == 200
            for _ in range(traffic.draws.randint(0, 2)):  # which the index has to follow meanwhile
                await asyncio.to_thread(traffic.cached_tokens, traffic.prompt())
            prompt = traffic.prompt()
            await followed.settle()
            found = followed.found_tokens(prompt)
            assert await asyncio.to_thread(traffic.cached_tokens, prompt) == found, f"step {step}"
            found_any += found[0] > 0
            found_on_host += found[1] > 0
        assert found_any > 10
        has_host = HOST_TIER[0] in engine.spec.arguments
        assert (found_on_host > 0) is has_host
        assert traffic.lost
        described = followed.events.describe(followed.worker)
        assert described["gaps"] > 0
        assert (described["losses"], described["restarts"]) == (0, 0)
        assert described["blocks"] <= KV_TOKENS // PAGE_TOKENS
        assert sum(len(prompt) for prompt in traffic._sent) > 3 * KV_TOKENS  # there were evictions
    finally:
        await followed.events.stop()


def test_the_index_is_what_the_engine_holds(engine: Engine) -> None:
    asyncio.run(follow(engine))


def test_an_engine_that_is_started_again_holds_nothing() -> None:
    spec = publishing(("--laps-mode", "off"))
    first = Engine.start(spec)
    second: Engine | None = None

    async def check() -> None:
        nonlocal second
        first.wait_ready()
        traffic = Traffic(first, seed=2)
        prompt = [20 + number for number in range(100)]
        await asyncio.to_thread(traffic.cached_tokens, prompt)
        followed = FollowedEngine(first)
        try:
            await followed.settle()
            assert followed.found_tokens(prompt) == (96, 0)
            first.stop()
            second = Engine.start(spec, (first.port, first.bootstrap_port))
            await asyncio.to_thread(second.wait_ready)
            ready_s = time.monotonic()
            while followed.found_tokens(prompt)[0] or not followed.rank.is_connected:
                assert time.monotonic() < ready_s + SETTLED_S
                await asyncio.sleep(0.05)
            traffic.engine = second
            assert await asyncio.to_thread(traffic.cached_tokens, prompt) == (0, 0)
            await followed.settle()
            assert followed.found_tokens(prompt) == (96, 0)
            assert followed.events.describe(followed.worker)["restarts"] == 1
        finally:
            await followed.events.stop()

    try:
        asyncio.run(check())
    finally:
        first.stop()
        if second is not None:
            second.stop()


def test_a_pair_behind_a_router_publishes_by_itself() -> None:
    """Where pages are large enough, and a prompt's second turn is counted as cached, though another client sent it."""
    pages = ("--page-size", str(PAGE_TOKENS))
    engines = FLEET.get(EngineSpec(Role.BOTH, arguments=pages), EngineSpec(Role.DECODE, arguments=pages))
    prefill, decode = engines
    assert not decode.get("/server_info").body.get("kv_events")

    def known(running: RunningRouter) -> dict[str, Any]:
        described: dict[str, Any] = running.workers()[prefill.url]["cached_prefixes"]
        return described

    with running_router(engines) as router, running_router(engines) as other:
        wait_until(lambda: known(router)["from"] == known(other)["from"] == "events", 20)
        prompt = [30 + number % 300 for number in range(200)]
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
        before = known(router)["blocks"]
        assert other.post("/generate", body).status == 200
        wait_until(lambda: known(router)["blocks"] >= before + 12, 2)
        reply = router.post("/generate", body)
        assert reply.status == 200
        page = router.call("GET", "/metrics")[0].body
        counted = re.search(r'prompt_tokens_total\{cached="true"\} (\S+)', str(page))
        assert counted is not None
        assert float(counted[1]) == 192


@pytest.mark.parametrize("by_sglang", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_router_follows_the_load_that_an_instance_publishes(by_sglang: bool) -> None:
    """It is asked for its load once, when it comes, and what another client has it compute is known all the same."""
    endpoint = ("--load-publish-endpoint", f"tcp://*:{free_port()}") if by_sglang else ()
    (engine,) = FLEET.get(EngineSpec(Role.PLAIN, arguments=(*SMALL, *endpoint)))
    never = ("--set", "health.load_poll_interval_secs=3600")
    with running_router([engine], *never) as router:

        def described() -> dict[str, Any]:
            return router.workers()[engine.url]

        wait_until(lambda: described()["load"] == "published", 20)
        for number in range(3):
            rate = described()["prefill_tokens_per_s"]
            prompt = [30 + (number + place * 7) % 300 for place in range(600)]
            body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
            assert engine.post("/generate", body).status == 200
            wait_until(lambda known=rate: described()["prefill_tokens_per_s"] != known, SETTLED_S)  # type: ignore[misc]
        assert described()["load"] == "published"
        assert described()["running"] == 0


def test_both_instances_of_a_pair_publish_their_load_without_events() -> None:
    """Pages have one token; what decode has free is known at once, and the queues of prefill are not asked for."""
    engines = FLEET.get(EngineSpec(Role.BOTH), EngineSpec(Role.DECODE))
    _, decode = engines
    never = ("--set", "health.load_poll_interval_secs=3600", "--controller", "advise")
    with running_router(engines, *never) as router:

        def described(engine: Engine) -> dict[str, Any]:
            return router.workers()[engine.url]

        wait_until(lambda: all(described(engine)["load"] == "published" for engine in engines), 20)
        capacity_tokens = described(decode)["free_kv_tokens"]
        assert capacity_tokens == decode.get("/server_info").body["max_total_num_tokens"]
        sampling = {"temperature": 0, "max_new_tokens": 1700, "ignore_eos": True}
        is_seen = Event()

        def keep_decode_busy() -> None:
            while not is_seen.is_set():
                reply = router.post("/generate", {"input_ids": [7] * 300, "sampling_params": sampling})
                assert reply.status == 200 or is_seen.is_set(), reply

        with ThreadPoolExecutor(1) as client:
            work = client.submit(keep_decode_busy)
            wait_until(lambda: work.done() or described(decode)["running"] == 1, 20)
            wait_until(lambda: work.done() or described(decode)["free_kv_tokens"] < capacity_tokens - 300, 20)
            is_seen.set()
            for engine in engines:
                engine.post("/abort_request", {"rid": "", "abort_all": True})
            work.result(timeout=60)
        wait_until(lambda: described(decode)["running"] == 0, 5)
        wait_until(lambda: described(decode)["free_kv_tokens"] == capacity_tokens, 5)
        assert all(described(engine)["load"] == "published" for engine in engines)


@pytest.mark.full
@pytest.mark.parametrize(("arguments", "options"), [((), ()), (SMALL, ("--kv-events", "off"))])
def test_without_events(arguments: tuple[str, ...], options: tuple[str, ...]) -> None:
    (engine,) = FLEET.get(EngineSpec(Role.BOTH, arguments=arguments, worker_options=options))
    assert not engine.get("/server_info").body.get("kv_events")
