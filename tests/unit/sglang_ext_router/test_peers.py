"""Several routers over the same instances know what each of them knows; without the key nothing is taken."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest

from sglang_ext.types import Role
from sglang_ext_router import peers as peers_module
from sglang_ext_router.config import RouterConfig, RouterConfigError, WorkerAddress
from sglang_ext_router.peers import HELLO, MAX_FRAME_BYTES, PeerRouters, greet
from support.router_process import FAST, RunningRouter, running_router, until
from support.running_time import pause
from support.scripted_engine import ScriptedEngine, hang

PROMPT = {"text": "x"}
ADMIN = {"Authorization": "Bearer admin"}


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
        addresses = tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)
        workers = tuple(WorkerAddress(engine.url, engine.role) for engine in engines)
        routers = []
        for number, sock in enumerate(sockets):
            sock.setblocking(False)
            config = replace(
                FAST,
                workers=workers,
                admin_api_key="admin",
                peer=addresses,  # its own among them
                peer_port=1,
                peer_key=keys[number] if keys else "secret",
                **options,
            )
            link = PeerRouters(config, sock)
            routers.append(await stack.enter_async_context(running_router(config, siblings=link)))
        for one in routers:
            await one.until_ready()
        yield routers
        for one in routers:
            await one.until_idle()


def link_of(one: RunningRouter) -> PeerRouters:
    link = one.router.siblings
    assert isinstance(link, PeerRouters)
    return link


async def until_connected(routers: Sequence[RunningRouter]) -> None:
    for one in routers:
        await until(lambda one=one: link_of(one).peers == len(routers) - 1)  # type: ignore[misc]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "INTERVAL_S", 0.05)


def pair() -> list[ScriptedEngine]:
    return [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]


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
        await routers[0].router.siblings.stop()
        for one in routers[1:]:
            worker = one.worker(engines[0].url)
            await until(lambda worker=worker: worker.sibling_in_flight == 0)  # type: ignore[misc]
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


async def test_a_conversation_stays_with_its_prefix_whichever_router_it_meets() -> None:
    def engines() -> list[ScriptedEngine]:
        return [*(ScriptedEngine(Role.BOTH) for _ in range(6)), ScriptedEngine(Role.DECODE)]

    async with group(engines(), 3) as routers:
        await until_connected(routers)
        assert await conversations(routers, 4, 5) >= 0.95


async def test_a_router_without_the_key_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    engines = pair()
    async with group(engines, 3, keys=("secret", "secret", "other")) as routers:
        await until(lambda: link_of(routers[0]).peers == 1)
        await until(lambda: link_of(routers[1]).peers == 1)
        await until(lambda: "does not have our --peer-key" in caplog.text)
        name = engines[1].url.removeprefix("http://")
        await routers[2].ask("POST", f"/workers/{name}/drain", {"drain": True}, ADMIN)
        await routers[0].ask("DELETE", f"/workers/{engines[0].url.removeprefix('http://')}", headers=ADMIN)
        await until(lambda: routers[1].router.registry.find(engines[0].url) is None)
        assert not routers[0].worker(engines[1].url).is_draining
        assert routers[2].router.registry.find(engines[0].url) is not None
        assert link_of(routers[2]).peers == 0


def removal(url: str, teller: int) -> bytes:
    """A message by which an instance is removed."""
    members = [[url, 9, teller, None, None, False]]
    return orjson.dumps({"index": teller, "members": members, "loads": {}, "prefixes": [], "online": [{}, {}]})


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
            removed = [[engines[1].url, 9, 7, None, None, False]]
            body = peers_module.orjson.dumps(
                {
                    "index": 8 if kind == "for another" else 7,
                    "members": removed,
                    "loads": {},
                    "prefixes": [],
                    "online": [{}, {}],
                }
            )
            if kind == "no message":
                body = b'{"index": 7}'
            frame = peers_module._LENGTH.pack(len(body)) + session.code(body) + body
            if kind == "forged":
                frame = frame[:40] + b"!" + frame[41:]
            elif kind == "too large":
                frame = peers_module._LENGTH.pack(MAX_FRAME_BYTES + 1) + bytes(1000)
            elif kind == "repeated":
                frame = peers_module._LENGTH.pack(len(body)) + peers_module._code(session._key, bytes(8), body) + body
            writer.write(frame)
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
        removed = [[engines[1].url, 9, 7, None, None, False]]
        body = peers_module.orjson.dumps(
            {"index": 7, "members": removed, "loads": {}, "prefixes": [], "online": [{}, {}]}
        )
        writer.write(peers_module._LENGTH.pack(len(body)) + session.code(body) + body)
        await until(lambda: one.router.registry.find(engines[1].url) is None)
        writer.close()


GOOD_MESSAGE: dict[str, Any] = {"index": 7, "members": [], "loads": {}, "prefixes": [], "online": [{}, {}]}


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
    ],
)
async def test_nothing_of_a_message_that_cannot_be_read_is_taken(strange: dict[str, Any]) -> None:
    """As another version of this program might send it."""
    engines = pair()
    async with group(engines, 1) as (one,):
        link = link_of(one)
        registry = one.router.registry
        link.tell_added(WorkerAddress("http://127.0.0.1:7", Role.DECODE))  # what it has is told after each message
        text = orjson.dumps({**GOOD_MESSAGE, **strange}).replace(b"URL", engines[0].url.encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", link._sock.getsockname()[1])
        session = await greet(reader, writer, link._key, 7)
        writer.write(peers_module._LENGTH.pack(len(text)) + session.code(text) + text)
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

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await peers_module.welcome(reader, writer, hashlib.sha256(b"secret").digest())
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    async with group(pair(), 1) as (one,), server:
        link = link_of(one)
        task = asyncio.create_task(link._tell_one(server.sockets[0].getsockname()[:2]))
        await until(lambda: link.peers == 1)
        (writer,) = link._writers
        writer.write(bytes(20_000_000))
        task.cancel()  # as when its name is gone
        await until(lambda: writer.transport.get_write_buffer_size() == 0)
        held[0].transport.abort()


async def test_a_name_that_cannot_be_one_ends_no_task() -> None:
    async with group(pair(), 1) as (one,):
        link = link_of(one)
        link._service = "a..b"
        tasks = [asyncio.create_task(link._tell_one(("a..b", 1))), asyncio.create_task(link._find_peers())]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()


async def test_a_peer_that_refuses_what_it_is_told_is_not_asked_again_and_again() -> None:
    connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await peers_module.welcome(reader, writer, hashlib.sha256(b"secret").digest())
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with group(pair(), 1) as (one,), server:
        task = asyncio.create_task(link_of(one)._tell_one(server.sockets[0].getsockname()[:2]))
        await asyncio.sleep(2.0)
        task.cancel()
        assert 1 <= connections <= 5


async def test_a_peer_that_does_not_read_holds_up_no_other() -> None:
    engines = pair()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes connections; nothing reads them
        async with group(engines, 2) as routers:
            await until_connected(routers)
            link = link_of(routers[0])
            _, writer = await asyncio.open_connection(*silent.getsockname())
            link._writers[writer] = peers_module._FrameCodes(b"k")
            hashes = list(range(1 << 62, (1 << 62) + 4000))
            for _ in range(400):
                link.tell_prefix(engines[0].url, hashes)
                link._send_state()
                await asyncio.sleep(0)
            assert link.skipped > 0
            assert writer.transport.get_write_buffer_size() < 2 << 20
            await until(lambda: routers[1].router.planner.index.block_count > 0)
            link._writers.pop(writer)
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
