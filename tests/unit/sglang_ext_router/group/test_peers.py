"""Several routers over the same instances know what each of them knows; without the key nothing is taken."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import orjson
import pytest

from sglang_ext.shared_key import prove
from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, RouterConfigError, WorkerAddress
from sglang_ext_router.decide.circuit_breaker import CircuitState
from sglang_ext_router.group import peers as peers_module
from sglang_ext_router.group.peers import HELLO, MAX_FRAME_BYTES, FrameCodes, Peers, greet
from support.event_loops import Complaints
from support.router_process import FAST, RunningRouter, running_router, until
from support.running_time import pause
from support.scripted_engine import ScriptedEngine, hang, status

PROMPT = {"text": "x"}
ADMIN = {"Authorization": "Bearer admin"}


def peer(
    engines: Sequence[ScriptedEngine], sockets: Sequence[socket.socket], number: int, key: str, **options: Any
) -> tuple[Peers, RouterConfig]:
    """One of the routers that listen at these sockets."""
    sockets[number].setblocking(False)
    config = replace(
        FAST,
        workers=tuple(WorkerAddress(engine.url, engine.role) for engine in engines),
        admin_api_key="admin",
        peer=tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets),  # its own among them
        peer_port=1,
        peer_key=key,
        **options,
    )
    return Peers(config, sockets[number]), config


@asynccontextmanager
async def group(
    engines: Sequence[ScriptedEngine], count: int = 3, keys: Sequence[str] = (), **options: Any
) -> AsyncIterator[list[RunningRouter]]:
    """Routers that are each other's peers, over the same engines."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        routers = []
        for number in range(count):
            link, config = peer(engines, sockets, number, keys[number] if keys else "secret", **options)
            routers.append(await stack.enter_async_context(running_router(config, siblings=link)))
        for one in routers:
            await one.until_ready()
        yield routers
        for one in routers:
            await one.until_idle()


def link_of(one: RunningRouter) -> Peers:
    link = one.router.siblings
    assert isinstance(link, Peers)
    return link


async def until_connected(routers: Sequence[RunningRouter]) -> None:
    """Each is connected to the others, and has got their states."""
    for one in routers:
        link = link_of(one)
        await until(lambda link=link: len(link._receivers) == len(link._states) == len(routers) - 1)  # type: ignore[misc]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "INTERVAL_S", 0.05)


def pair() -> list[ScriptedEngine]:
    return [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]


@pytest.mark.slow
async def test_a_change_made_at_one_is_made_at_all() -> None:
    engines = pair()
    async with group(engines) as routers:
        await until_connected(routers)
        extra = ScriptedEngine(Role.DECODE)
        await extra.start()
        try:
            answer = await routers[0].ask("POST", "/workers", {"url": extra.url, "role": "decode"}, ADMIN)
            assert answer.status == 202
            name = engines[1].url.removeprefix("http://")
            await routers[1].ask("POST", f"/workers/{name}/drain", {"drain": True}, ADMIN)
            for one in routers:
                await until(lambda one=one: one.router.registry.find(extra.url) is not None)  # type: ignore[misc]
                await one.until_ready(3)
                await until(lambda one=one: one.worker(engines[1].url).is_draining)  # type: ignore[misc]
                assert (await one.ask("POST", "/generate", PROMPT)).status == 200
            assert len(extra.requests) == 3
            await routers[2].ask("DELETE", f"/workers/{extra.url.removeprefix('http://')}", headers=ADMIN)
            for one in routers:
                await until(lambda one=one: one.router.registry.find(extra.url) is None)  # type: ignore[misc]
        finally:
            await extra.stop()


@pytest.mark.slow
async def test_an_instance_of_the_cluster_drained_by_hand_at_one_drains_and_resumes_at_all() -> None:
    """Each router has found it by itself, so no option or message names it."""
    engines = pair()
    found = ScriptedEngine(Role.DECODE)
    await found.start()
    try:
        async with group(engines) as routers:
            await until_connected(routers)
            for one in routers:
                one.router.adopt_worker(WorkerAddress(found.url, Role.DECODE))
            workers = [one.worker(found.url) for one in routers]
            name = found.url.removeprefix("http://")
            for is_draining in (True, False):
                await routers[0].ask("POST", f"/workers/{name}/drain", {"drain": is_draining}, ADMIN)
                for one, worker in zip(routers, workers, strict=True):
                    await until(lambda worker=worker, wanted=is_draining: worker.is_draining is wanted)  # type: ignore[misc]
                    assert one.router.registry.find(found.url) is worker
            routers[1].router.lose_worker(workers[1])
            for one in routers:
                await until(lambda one=one: one.router.registry.find(found.url) is None)  # type: ignore[misc]
    finally:
        await found.stop()


@pytest.mark.slow
async def test_a_moved_instance_that_is_drained_at_one_stays_in_its_pool_at_all() -> None:
    engines = [ScriptedEngine(Role.SHORT), ScriptedEngine(Role.LONG), ScriptedEngine(Role.DECODE)]
    async with group(engines, 2) as routers:
        await until_connected(routers)
        workers = [one.worker(engines[0].url) for one in routers]
        for one, worker in zip(routers, workers, strict=True):
            one.router.registry.relabel(worker, Role.LONG)  # as it reports to each
        name = engines[0].url.removeprefix("http://")
        for is_draining in (True, False):
            await routers[0].ask("POST", f"/workers/{name}/drain", {"drain": is_draining}, ADMIN)
            await until(lambda wanted=is_draining: routers[1].worker(engines[0].url).is_draining is wanted)  # type: ignore[misc]
            assert routers[1].router.registry.find(engines[0].url) is workers[1]
            assert workers[1].role is Role.LONG


@pytest.mark.slow
async def test_an_error_ends_no_router_s_part_in_its_group(
    monkeypatch: pytest.MonkeyPatch, complaints: Complaints
) -> None:
    async with group(pair(), 2, max_concurrent_requests=4) as routers:
        await until_connected(routers)
        limit_requests = routers[0].router.limit_requests

        def fail(most: int) -> None:
            raise RuntimeError("a fault")

        monkeypatch.setattr(routers[0].router, "limit_requests", fail)
        await until(lambda: bool(complaints.messages))
        monkeypatch.setattr(routers[0].router, "limit_requests", limit_requests)
        failed_s = asyncio.get_running_loop().time()
        await until(lambda: link_of(routers[1])._states[link_of(routers[0])._origin].received_s > failed_s + 0.2)
        complaints.messages.clear()


@pytest.mark.slow
async def test_a_router_that_stood_still_forgets_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FORGET_AFTER_S", 2.0)
    async with group(pair(), 2) as routers:
        await until_connected(routers)
        sessions = [dict(link_of(one)._latest) for one in routers]
        time.sleep(2.5)  # noqa: ASYNC251 - all of this process stands still
        await asyncio.sleep(0.3)
        assert [dict(link_of(one)._latest) for one in routers] == sessions, "a peer was forgotten"


@pytest.mark.slow
async def test_what_one_has_under_way_all_know_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FORGET_AFTER_S", 0.5)
    engines = pair()
    async with group(engines) as routers:
        await until_connected(routers)
        for engine in engines:
            engine.script = hang()
        client = await routers[0].connect()
        await client.send(b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{"text": "x"}')
        for one in routers[1:]:
            worker = one.worker(engines[0].url)
            await until(lambda worker=worker: worker.sibling_in_flight == 1)  # type: ignore[misc]
            assert one.router.planner.router_count == len(routers)
        await routers[0].router.siblings.stop()
        for one in routers[1:]:
            worker = one.worker(engines[0].url)
            await until(lambda worker=worker: worker.sibling_in_flight == 0)  # type: ignore[misc]
            assert one.router.planner.router_count == len(routers) - 1
        client.close()


async def conversations(routers: Sequence[RunningRouter], count: int, turns: int) -> float:
    """The share of later turns that went where the one before did; each turn goes to the next router."""
    draw = random.Random(5)
    same = 0
    for _ in range(count):
        text, last, at = "".join(draw.choices("abcdefgh ", k=3000)), "", draw.randrange(len(routers))
        for _ in range(turns):
            answer = await routers[at % len(routers)].ask("POST", "/generate", {"text": text})
            assert answer.status == 200
            same += answer.headers["x-sglang-ext-prefill"] == last
            last, at = answer.headers["x-sglang-ext-prefill"], at + 1
            text += "".join(draw.choices("abcdefgh ", k=600))
            await pause(0.12)
    return same / (count * (turns - 1))


@pytest.mark.slow
async def test_a_conversation_stays_with_its_prefix_whichever_router_it_meets() -> None:
    def engines() -> list[ScriptedEngine]:
        return [*(ScriptedEngine(Role.BOTH) for _ in range(6)), ScriptedEngine(Role.DECODE)]

    async with group(engines(), 3) as routers:
        await until_connected(routers)
        assert await conversations(routers, 4, 5) >= 0.95


@pytest.mark.slow
async def test_a_router_that_starts_learns_what_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "ASK_AFTER_S", 0.1)
    monkeypatch.setattr(peers_module, "SNAPSHOT_FRAME_BLOCKS", 40)  # several frames
    engines = [*(ScriptedEngine(Role.BOTH) for _ in range(3)), ScriptedEngine(Role.DECODE)]
    prompts = [("".join(random.Random(seed).choices("abcdefgh ", k=2000))) for seed in range(20)]
    async with group(engines, 1) as (one,), AsyncExitStack() as stack:
        where = []
        for text in prompts:
            answer = await one.ask("POST", "/generate", {"text": text})
            assert answer.status == 200
            where.append(answer.headers["x-sglang-ext-prefill"])
        first, second = link_of(one), socket.create_server(("127.0.0.1", 0))
        link, config = peer(engines, [first._sock, second], 1, "secret")
        first._fixed = [peers_module._address(text) for text in config.peer]
        task = asyncio.create_task(first._keep_connected(("127.0.0.1", second.getsockname()[1])))
        late = await stack.enter_async_context(running_router(config, siblings=link))
        await late.until_ready()
        index = late.router.planner.prefixes.index
        await until(lambda: index.used == one.router.planner.prefixes.index.used)
        for text, url in zip(prompts, where, strict=True):
            answer = await late.ask("POST", "/generate", {"text": text})
            assert answer.headers["x-sglang-ext-prefill"] == url
        await until(lambda: link._prefix_asker._is_over)
        task.cancel()


async def test_the_next_peer_is_asked_when_the_first_does_not_answer() -> None:
    asker = peers_module._PrefixAsker()
    known = {1: 500, 2: 900, 3: 0}
    assert asker.next_asked(0.0, {}) is None
    assert asker.next_asked(10.0, known) is None  # the others are about to appear
    assert asker.next_asked(11.0, known) == 2
    asker.on_frame(2, is_last=False, now_s=15.0)
    asker.on_frame(1, is_last=True, now_s=15.0)  # not asked
    assert asker.next_asked(19.9, known) == 2
    assert asker.next_asked(20.1, known) == 1
    assert asker.next_asked(20.2, {2: 900}) is None, "it is gone, and the other one has failed"
    assert asker.next_asked(30.0, known) is None


@pytest.mark.slow
async def test_a_group_serves_no_more_at_once_than_its_limit() -> None:
    engines = pair()
    async with group(engines, 3, max_concurrent_requests=6) as routers:
        await until_connected(routers)
        for engine in engines:
            engine.script = hang()
        body = b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{"text": "x"}'

        async def send(one: RunningRouter, count: int) -> list[Any]:
            clients = [await one.connect() for _ in range(count)]
            for client in clients:
                await client.send(body)
            return clients

        def running() -> list[int]:
            return [one.router.admission.running for one in routers]

        await until(lambda: [one.router.admission.limit for one in routers] == [2, 2, 2])
        clients = await send(routers[0], 9)
        await until(lambda: running() == [6, 0, 0])  # places that the others do not need
        await until(lambda: [one.router.admission.limit for one in routers] == [6, 0, 0])
        others = await send(routers[1], 9)
        await asyncio.sleep(0.3)
        assert running() == [6, 0, 0], "what runs is not ended for the others"
        for client in clients[:4]:  # those that run: the first ones
            client.close()
        await until(lambda: sum(running()) == 6 and running()[1] > 0)
        for client in clients[4:6]:
            client.close()
        await until(lambda: running() == [3, 3, 0], 10.0)
        await routers[0].router.siblings.stop()
        for client in clients:
            client.close()
        await until(lambda: running()[1:] == [6, 0], 10.0)
        for client in others:
            client.close()


@pytest.mark.slow
async def test_one_failure_is_enough_where_another_router_has_opened_its_circuit() -> None:
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE), ScriptedEngine(Role.DECODE)]
    options = {"cb_failure_threshold": 4, "cb_timeout_duration_secs": 60.0}
    async with group(engines, 2, **options) as routers:
        await until_connected(routers)
        engines[1].script = status(500)
        url = engines[1].url
        first, second = (one.worker(url) for one in routers)

        async def fail(one: RunningRouter, failures: int) -> None:
            start = one.worker(url).failed_legs
            for _ in range(200):
                assert (await one.ask("POST", "/generate", PROMPT)).status == 200, "another one serves it"
                if one.worker(url).failed_legs >= start + failures:
                    return

        await fail(routers[0], 3)
        assert first.breaker.state(asyncio.get_running_loop().time()) is CircuitState.CLOSED
        await asyncio.sleep(0.3)
        assert not second.breaker.is_suspected
        await fail(routers[0], 1)
        assert first.breaker.state(asyncio.get_running_loop().time()) is CircuitState.OPEN
        await until(lambda: second.breaker.is_suspected)
        assert not first.breaker.is_suspected
        await fail(routers[1], 1)
        assert second.breaker.state(asyncio.get_running_loop().time()) is CircuitState.OPEN


@pytest.mark.slow
async def test_what_is_under_way_is_known_again_after_a_gap() -> None:
    engines = pair()
    async with group(engines, 2) as routers:
        await until_connected(routers)
        for engine in engines:
            engine.script = hang()
        client = await routers[0].connect()
        await client.send(b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{"text": "x"}')
        worker, link = routers[1].worker(engines[0].url), link_of(routers[1])
        await until(lambda: worker.sibling_in_flight == 1)
        link._forget(link_of(routers[0])._origin)  # as when no message has come for long
        link._apply_states(10.0)
        assert worker.sibling_in_flight == 0
        await until(lambda: worker.sibling_in_flight == 1)
        client.close()
        await until(lambda: worker.sibling_in_flight == 0)


@pytest.mark.slow
async def test_a_peer_gets_what_has_changed_and_everything_where_it_has_missed_a_message() -> None:
    may_read = asyncio.Event()
    may_read.set()
    messages: list[dict[str, Any]] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peers_module.welcome(reader, writer, hashlib.sha256(b"secret").digest(), 7)
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await may_read.wait()
                (size,) = peers_module._LENGTH.unpack(await reader.readexactly(4))
                messages.append(orjson.loads((await reader.readexactly(32 + size))[32:]))
        writer.close()

    engines = pair()
    server = await asyncio.start_server(receive, "127.0.0.1", 0, limit=1 << 16)
    async with group(engines, 1) as (one,), server:
        link = link_of(one)
        task = asyncio.create_task(link._keep_connected(server.sockets[0].getsockname()[:2]))
        worker = one.worker(engines[0].url)
        worker.in_flight = 3
        await until(lambda: len(messages) >= 3)
        assert "only_changes" not in messages[0]
        assert messages[0]["loads"] == {worker.url: [3, 0]}
        assert [one["only_changes"] for one in messages[1:]] == [True] * (len(messages) - 1)
        assert not any(one["loads"] for one in messages[1:])
        worker.in_flight = 5
        await until(lambda: messages[-1]["loads"] == {worker.url: [5, 0]} or not messages[-1]["only_changes"])
        may_read.clear()
        while not link.skipped:
            link.send_prefix(worker.url, list(range(1 << 62, (1 << 62) + 4000)))
            link._send_state()
            await asyncio.sleep(0)
        worker.in_flight = 0
        seen = len(messages)
        may_read.set()
        await until(lambda: any("only_changes" not in one for one in messages[seen:]))
        again = next(one for one in messages[seen:] if "only_changes" not in one)
        assert again["loads"] == {}
        task.cancel()
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_peer_with_two_addresses_has_one_connection() -> None:
    engines = pair()
    async with group(engines, 2) as routers:
        await until_connected(routers)
        first, second = (link_of(one) for one in routers)
        (before,) = first._receivers
        port = second._sock.getsockname()[1]
        other = asyncio.create_task(first._keep_connected(("localhost", port)))
        await asyncio.sleep(1.0)
        assert list(first._receivers) == [before]
        assert len(first._receivers) == 1
        assert first._origin in second._states
        other.cancel()


@pytest.mark.slow
async def test_requests_that_are_refused_count_for_the_share_of_the_limit() -> None:
    """Without a queue none waits: a router whose places the others have would never get one."""
    engines = pair()
    async with group(engines, 2, max_concurrent_requests=4, queue_size=0) as routers:
        await until_connected(routers)
        for engine in engines:
            engine.script = hang()
        await until(lambda: [one.router.admission.limit for one in routers] == [2, 2])
        body = b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{"text": "x"}'
        clients = []
        while routers[0].router.admission.running < 4:
            clients.append(await routers[0].connect())
            await clients[-1].send(body)
            await asyncio.sleep(0.05)
        await until(lambda: routers[1].router.admission.limit == 0)

        async def ask_until_served() -> None:
            while not routers[1].router.admission.running:
                async with await routers[1].connect() as client:
                    await client.send(body)
                    await asyncio.sleep(0.05)

        asking = asyncio.create_task(ask_until_served())
        await until(lambda: routers[0].router.admission.limit < 4, 10.0)
        for client in clients:
            client.close()
        await asking


@pytest.mark.slow
async def test_a_router_without_the_key_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    engines = pair()
    async with group(engines, 3, keys=("secret", "secret", "other")) as routers:
        await until(lambda: len(link_of(routers[0])._receivers) == 1)
        await until(lambda: len(link_of(routers[1])._receivers) == 1)
        await until(lambda: "does not have our --peer-key" in caplog.text)
        name = engines[1].url.removeprefix("http://")
        await routers[2].ask("POST", f"/workers/{name}/drain", {"drain": True}, ADMIN)
        await routers[0].ask("DELETE", f"/workers/{engines[0].url.removeprefix('http://')}", headers=ADMIN)
        await until(lambda: routers[1].router.registry.find(engines[0].url) is None)
        assert not routers[0].worker(engines[1].url).is_draining
        assert routers[2].router.registry.find(engines[0].url) is not None
        assert len(link_of(routers[2])._receivers) == 0


GOOD_MESSAGE: dict[str, Any] = {
    "index": 7,
    "members": [],
    "loads": {},
    "prefixes": [],
    "online": [{}, {}],
    "demand": [0, 0],
    "circuits": [],
    "known_bytes": 0,
    "asks": None,
}


def frame(session: FrameCodes, body: bytes) -> bytes:
    """What a peer sends on this connection next."""
    return peers_module._LENGTH.pack(len(body)) + session.code(hashlib.sha256(body).digest()) + body


def removal(url: str, sender: int) -> bytes:
    """A message by which an instance is removed."""
    members = [[url, 9, sender, None, None, False]]
    return orjson.dumps({**GOOD_MESSAGE, "index": sender, "members": members})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nothing", "http", "forged", "repeated", "too large", "for another", "no message"])
async def test_what_no_peer_would_send_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "HANDSHAKE_TIMEOUT_S", 0.3)
    engines = pair()
    async with group(engines, 1) as (one,):
        link = link_of(one)
        port = link._sock.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if kind == "http":
            writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(len(HELLO) + 16))
        elif kind != "nothing":
            session = await greet(reader, writer, link._key, 7)
            body = removal(engines[1].url, 8 if kind == "for another" else 7)
            if kind == "no message":
                body = b'{"index": 7}'
            sent = frame(session, body)
            if kind == "forged":
                sent = sent[:40] + b"!" + sent[41:]
            elif kind == "too large":
                sent = peers_module._LENGTH.pack(MAX_FRAME_BYTES + 1) + bytes(1000)
            elif kind == "repeated":
                code = prove(session._key, "frame", bytes(8), hashlib.sha256(body).digest())
                sent = peers_module._LENGTH.pack(len(body)) + code + body
            writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 5.0) is not None, "it is closed"
        writer.close()
        assert one.router.registry.find(engines[1].url) is not None
        assert (await one.ask("POST", "/generate", PROMPT)).status == 200


async def test_a_good_message_of_a_peer_is_taken() -> None:
    """The frames of the test above would be taken if they were right."""
    engines = pair()
    async with group(engines, 1) as (one,):
        link = link_of(one)
        reader, writer = await asyncio.open_connection("127.0.0.1", link._sock.getsockname()[1])
        session = await greet(reader, writer, link._key, 7)
        writer.write(frame(session, removal(engines[1].url, 7)))
        await until(lambda: one.router.registry.find(engines[1].url) is None)
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strange",
    [
        {
            "members": [
                ["http://127.0.0.1:9", 1, 7, "decode", None, False],
                ["http://x:1", 1, 7, "another", None, False],
            ]
        },
        {"members": [["http://127.0.0.1:9", (1 << 64) - 1, 7, "decode", None, False]]},
        {"members": [["http://127.0.0.1:9", "1", 7, "decode", None, False]]},
        {"loads": {"URL": ["1", "2"]}},
        {"loads": []},
        {"online": [{"": 1}, {}]},
        {"prefixes": [["URL", [[1]]]]},
        {"prefixes": [["URL", ["1"]]]},
        {"demand": ["1", 2]},
        {"demand": 3},
        {"circuits": [5]},
        {"known_bytes": None},
    ],
)
async def test_nothing_of_a_message_that_cannot_be_read_is_taken(strange: dict[str, Any]) -> None:
    """As another version of this program might send it."""
    engines = pair()
    async with group(engines, 1) as (one,):
        link = link_of(one)
        registry = one.router.registry
        link.send_added(WorkerAddress("http://127.0.0.1:7", Role.DECODE))  # what it has is told after each message
        text = orjson.dumps({**GOOD_MESSAGE, **strange}).replace(b"URL", engines[0].url.encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", link._sock.getsockname()[1])
        session = await greet(reader, writer, link._key, 7)
        writer.write(frame(session, text))
        assert await asyncio.wait_for(reader.read(), 5.0) == b"", "it is closed"
        writer.close()
        assert len(registry) == 2
        assert not link._states
        # The same change is taken when it comes in a message that can be read.
        link._take({**GOOD_MESSAGE, "members": [["http://127.0.0.1:9", 1, 7, "decode", None, False]]})
        added = registry.find("http://127.0.0.1:9")
        assert added is not None
        one.router.remove_worker(added)
        await asyncio.sleep(0.15)
        assert not any(task.done() for task in link._tasks)


@pytest.mark.slow
async def test_routers_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FORGET_AFTER_S", 0.2)
    async with group(pair(), 1) as (one,):
        link = link_of(one)
        for number in range(1, 100):
            link._take({**GOOD_MESSAGE, "index": number})
        assert len(link._states) == 99
        await until(lambda: not link._states)


async def test_the_connection_to_a_peer_that_does_not_read_ends_with_it() -> None:
    held: list[asyncio.StreamWriter] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await peers_module.welcome(reader, writer, hashlib.sha256(b"secret").digest(), 7)
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    async with group(pair(), 1) as (one,), server:
        link = link_of(one)
        task = asyncio.create_task(link._keep_connected(server.sockets[0].getsockname()[:2]))
        await until(lambda: len(link._receivers) == 1)
        (receiver,) = link._receivers
        writer = receiver.writer
        writer.write(bytes(20_000_000))
        task.cancel()  # as when its name is gone
        await until(lambda: writer.transport.get_write_buffer_size() == 0)
        held[0].transport.abort()


async def test_a_peer_that_has_started_again_takes_the_place_of_its_former_start() -> None:
    """Its former start would else count as one router more until it has been silent for long."""
    started = 7

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peers_module.welcome(reader, writer, hashlib.sha256(b"secret").digest(), started)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    async with group(pair(), 1) as (one,), server:
        link = link_of(one)
        task = asyncio.create_task(link._keep_connected(server.sockets[0].getsockname()[:2]))
        await until(lambda: len(link._receivers) == 1)
        for number in (7, 9):
            link._take({**GOOD_MESSAGE, "index": number})
        (receiver,) = link._receivers
        started = 8
        receiver.writer.transport.abort()
        await until(lambda: any(known.peer == 8 for known in link._receivers))
        assert set(link._states) == {9}
        task.cancel()
        (receiver,) = link._receivers
        receiver.writer.transport.abort()


@pytest.mark.slow
async def test_a_name_that_cannot_be_one_ends_no_task() -> None:
    async with group(pair(), 1) as (one,):
        link = link_of(one)
        link._service = "a..b"
        tasks = [asyncio.create_task(link._keep_connected(("a..b", 1))), asyncio.create_task(link._find_peers())]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()


@pytest.mark.slow
async def test_a_peer_that_refuses_what_it_is_told_is_not_asked_again_and_again() -> None:
    connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await peers_module.welcome(reader, writer, hashlib.sha256(b"secret").digest(), 7)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with group(pair(), 1) as (one,), server:
        task = asyncio.create_task(link_of(one)._keep_connected(server.sockets[0].getsockname()[:2]))
        await asyncio.sleep(2.0)
        task.cancel()
        assert 1 <= connections <= 5


@pytest.mark.slow
async def test_a_peer_that_does_not_read_holds_up_no_other() -> None:
    engines = pair()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes connections; nothing reads them
        async with group(engines, 2) as routers:
            await until_connected(routers)
            link = link_of(routers[0])
            _, writer = await asyncio.open_connection(*silent.getsockname())
            receiver = peers_module._Receiver(writer, FrameCodes(b"k", 7))
            link._receivers[receiver] = None
            hashes = list(range(1 << 62, (1 << 62) + 4000))
            for _ in range(400):
                link.send_prefix(engines[0].url, hashes)
                link._send_state()
                await asyncio.sleep(0)
            assert link.skipped > 0
            assert writer.transport.get_write_buffer_size() < 2 << 20
            await until(lambda: routers[1].router.planner.prefixes.index.block_count > 0)
            link._receivers.pop(receiver)
            writer.transport.abort()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peer_port": 1}, "--peer-port needs --peer-key"),
        ({"peer_service": "x"}, "--peer-service needs --peer-port"),
        ({"peer": ("a:1",)}, "--peer needs --peer-port"),
        ({"peer_port": 1, "peer_key": "k", "peer": ("a",)}, "--peer: 'a' is not of the form HOST:PORT"),
        ({"peer_port": 1, "peer_key": "k", "processes": 2}, "--peer-port needs --processes 1, not 2"),
        ({"peer_port": 30000, "peer_key": "k"}, "--peer-port must be a port of its own"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RouterConfigError) as caught:
        RouterConfig(**options)
    assert str(caught.value).startswith(message)
