"""The coordinator over real connections: who is admitted, who is refused, and whom a bad line concerns."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import pytest

from sglang_ext.long_pool.coordinator.coordinator_server import CoordinatorServer, ListenError
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts, prior_candidates
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.orders import MemberReport
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    KeyRequest,
    Message,
    OfferMessage,
    Refusal,
    ReportMessage,
    Welcome,
    encode,
    receive_message,
)
from support.pool_key import show_key

MEMBER_TIMEOUT_S = 1.0
KEY = b"a key that all members know"


def hello(name: str, **changes: object) -> Hello:
    one = Hello(PROTOCOL_VERSION, name, "node", "model", 2, 1, MemberReport(0.0, 1000))
    return one._replace(**changes)  # type: ignore[arg-type]


class Client(NamedTuple):
    """A member's end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self) -> Message | None:
        """The next message that is no heartbeat; None at the end."""
        while (message := await asyncio.wait_for(receive_message(self.reader), 10)) is not None:
            if not isinstance(message, Heartbeat):
                return message
        return None

    async def is_ended(self) -> bool:
        try:
            while await self.read() is not None:
                pass
        except ConnectionError:
            pass
        return True

    async def beat(self) -> None:
        while True:
            self.writer.write(encode(ReportMessage(MemberReport(0.0, 1000))))
            await asyncio.sleep(MEMBER_TIMEOUT_S / 4)


class Served(NamedTuple):
    server: CoordinatorServer
    port: int
    clients: list[Client]

    async def connect(self, line: bytes) -> Client:
        """A connection that says this first."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        client.writer.write(line)
        return client

    async def prove(self, key: bytes = KEY) -> Client:
        """One that has answered the challenge."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        await show_key(client.reader, client.writer, key, KEY)
        return client

    async def join(self, name: str) -> Client:
        client = await self.prove()
        client.writer.write(encode(hello(name)))
        assert isinstance(await client.read(), Welcome)
        return client

    def names(self) -> list[str]:
        return [member.name for member in self.server.status().members]


def serve(test: Callable[[Served], Awaitable[None]]) -> None:
    async def run() -> None:
        protocol = PoolProtocol(PoolSettings(member_timeout_s=MEMBER_TIMEOUT_S), PoolCosts(prior_candidates((1, 2))))
        server = CoordinatorServer(protocol, MEMBER_TIMEOUT_S, KEY)
        port = await server.listen("127.0.0.1", 0)
        ticking = asyncio.create_task(server.run())
        served = Served(server, port, [])
        try:
            await test(served)
        finally:
            ticking.cancel()
            await server.close()
            for client in served.clients:
                client.writer.close()
                with suppress(ConnectionError):
                    await client.writer.wait_closed()

    asyncio.run(run())


def test_welcome_says_who_one_is_in_which_pool() -> None:
    pools = []

    async def test(served: Served) -> None:
        for instance, name in enumerate("ab"):
            client = await served.prove()
            client.writer.write(encode(hello(name)))
            welcome = await client.read()
            assert isinstance(welcome, Welcome)
            assert (welcome.instance, welcome.member_timeout_s) == (instance, MEMBER_TIMEOUT_S)
            pools.append(welcome.pool_id)

    serve(test)
    serve(test)
    assert [pools.count(one) for one in pools] == [2, 2, 2, 2], "each run of a coordinator is another pool"


def test_another_key_is_refused() -> None:
    async def test(served: Served) -> None:
        client = await served.prove(b"another key")
        client.writer.write(encode(hello("a")))
        assert await client.read() == Refusal("the coordinator has another key (--key-file)")
        assert await client.is_ended()
        assert served.names() == []

    serve(test)


def test_without_a_proof_nothing_large_is_read() -> None:
    async def test(served: Served) -> None:
        client = await served.connect(encode(OfferMessage(1, array("i", range(10)), 0, 0.0, None))[:-40])
        assert await client.is_ended()

    serve(test)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (encode(hello("b", model="other")), "the pool serves model .* b serves other"),
        (encode(hello("b", version=PROTOCOL_VERSION + 1)), f"protocol version {PROTOCOL_VERSION + 1} instead of"),
        (b"", "protocol version 5 instead of"),
    ],
)
def test_refused_with_a_reason_and_one_line_in_the_log(
    line: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(served: Served) -> None:
        await served.join("a")
        if line:
            client = await served.prove()
            client.writer.write(line)
        else:
            client = await served.connect(encode(KeyRequest(5, "00")))
        refusal = await client.read()
        assert isinstance(refusal, Refusal)
        assert re.search(reason, refusal.reason)
        assert await client.is_ended()
        assert served.names() == ["a"]

    serve(test)
    assert len([record for record in caplog.records if "is refused" in record.message]) == 1


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", encode(ReportMessage(MemberReport(0.0, 1))), b"\xff\n"])
def test_a_connection_without_a_hello_is_no_member(line: bytes) -> None:
    async def test(served: Served) -> None:
        client = await served.connect(line)
        assert await client.is_ended()
        assert served.names() == []

    serve(test)


def test_who_has_not_proved_anything_may_not_send_much() -> None:
    async def test(served: Served) -> None:
        sent = 0
        client = await served.connect(b"[")
        try:
            while sent < 2**23:
                client.writer.write(b" " * 2**14)
                await asyncio.wait_for(client.writer.drain(), 10)
                await asyncio.sleep(0)  # the server's turn
                sent += 2**14
        except (ConnectionError, TimeoutError):
            pass
        assert await client.is_ended()
        assert sent < 2**22, "what lies between, and no more"

    serve(test)


def test_a_member_may_send_lines_that_are_longer_than_the_first() -> None:
    async def test(served: Served) -> None:
        client = await served.prove()
        where = tuple(PeerAddress("a" * 200, port) for port in range(2000))
        client.writer.write(encode(hello("a")._replace(addresses=where)))
        assert isinstance(await client.read(), Welcome)
        assert served.names() == ["a"]

    serve(test)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [b"nonsense\n", encode(OfferMessage(2**40, array("i", (1, 2)), 0, 0.0, None)), encode(hello("a"))]
)
def test_a_bad_line_ends_the_connection_of_its_sender_alone(line: bytes) -> None:
    async def test(served: Served) -> None:
        good, bad = await served.join("good"), await served.join("bad")
        beating = asyncio.create_task(good.beat())
        bad.writer.write(line)
        assert await bad.is_ended()
        await asyncio.sleep(1.5 * MEMBER_TIMEOUT_S)
        assert served.names() == ["good"]
        beating.cancel()

    serve(test)


@pytest.mark.slow
def test_a_coordinator_that_stood_still_loses_none() -> None:
    async def test(served: Served) -> None:
        good = await served.join("good")
        beating = asyncio.create_task(good.beat())
        for _ in range(2):
            await asyncio.sleep(MEMBER_TIMEOUT_S / 3)
            time.sleep(1.5 * MEMBER_TIMEOUT_S)  # noqa: ASYNC251 - this is it
        assert served.names() == ["good"]
        beating.cancel()

    serve(test)


@pytest.mark.slow
def test_a_connection_without_messages_ends() -> None:
    async def test(served: Served) -> None:
        client = await served.join("a")
        assert await client.is_ended()
        assert served.names() == []

    serve(test)


def test_who_comes_again_takes_its_own_place() -> None:
    async def test(served: Served) -> None:
        first = await served.join("a")
        second = await served.prove()
        second.writer.write(encode(hello("a")))
        welcome = await second.read()
        assert isinstance(welcome, Welcome)
        assert welcome.instance == 1
        assert await first.is_ended()
        assert [member.instance for member in served.server.status().members] == [1]

    serve(test)


def test_an_address_in_use_is_named_in_one_line() -> None:
    async def test(served: Served) -> None:
        with pytest.raises(ListenError, match=f"--port {served.port}: "):
            await served.server.listen("127.0.0.1", served.port)

    serve(test)
