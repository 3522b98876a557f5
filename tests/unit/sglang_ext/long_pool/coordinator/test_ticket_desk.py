"""`POST /tickets` over HTTP: the answer comes with the turn, a closed connection withdraws, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from sglang_ext.long_pool.coordinator.coordinator_server import CoordinatorServer, make_app
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts, prior_candidates
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.coordinator.ticket_desk import read_announcement
from sglang_ext.long_pool.coordinator.tickets import TicketEnd
from sglang_ext.long_pool.decide.kept_prompts import PromptText
from sglang_ext.long_pool.decide.orders import MemberReport
from sglang_ext.long_pool.messages import PROTOCOL_VERSION, Hello
from support.pool_key import join_pool

BUSY = MemberReport(60.0, 1_000_000)
IDLE = MemberReport(0.0, 1_000_000)


class Served:
    """A coordinator with members that never say more than their hello."""

    def __init__(self, server: CoordinatorServer, port: int, client: TestClient) -> None:
        self.server, self._port, self.client = server, port, client
        self._writers: list[asyncio.StreamWriter] = []

    async def join(self, name: str, report: MemberReport) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        await join_pool(reader, writer, Hello(PROTOCOL_VERSION, name, "node", "m", 2, 1, report, 64))
        await self.until(lambda: any(one.name == name for one in self.server.status().members))
        return writer

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def waiting(self, count: int) -> None:
        await self.until(lambda: self.server.status().tickets_waiting == count)

    async def post(self, ticket: int, tokens: int = 4000) -> tuple[int, dict[str, object]]:
        async with self.client.post("/tickets", json={"ticket": ticket, "tokens": tokens}) as reply:
            return reply.status, await reply.json()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def serve(test: Callable[[Served], Awaitable[None]]) -> None:
    async def run() -> None:
        # No member is lost by a test process that stands still.
        protocol = PoolProtocol(PoolSettings(member_timeout_s=600.0), PoolCosts(prior_candidates((1, 2))))
        server = CoordinatorServer(protocol, 600.0)
        port = await server.listen("127.0.0.1", 0)
        ticking = asyncio.create_task(server.run())
        site = TestServer(make_app(protocol, server.status, server.desk))
        async with TestClient(site) as client:
            served = Served(server, port, client)
            try:
                await test(served)
            finally:
                ticking.cancel()
                await server.close()
                served.close()

    asyncio.run(run())


def test_the_answer_names_a_member() -> None:
    async def test(served: Served) -> None:
        await served.join("host:1", IDLE)
        named = {"instance": "host:1", "members": ["host:1"], "chunk_s": 0.0}
        assert await served.post(2**62) == (200, {"ticket": 2**62, **named})

    serve(test)


@pytest.mark.slow
def test_it_comes_when_a_member_has_time() -> None:
    async def test(served: Served) -> None:
        await served.join("host:1", BUSY)
        asking = asyncio.create_task(served.post(5))
        await served.waiting(1)
        await asyncio.sleep(0.3)
        assert not asking.done()
        await served.join("host:2", IDLE)
        assert await asking == (200, {"ticket": 5, "instance": "host:2", "members": ["host:2"], "chunk_s": 0.0})

    serve(test)


def test_a_closed_connection_withdraws() -> None:
    async def test(served: Served) -> None:
        await served.join("host:1", BUSY)
        url = served.client.make_url("/tickets")
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.post(url, json={"ticket": 5, "tokens": 4000}))
            await served.waiting(1)
            status, body = await served.post(5)
            assert (status, body["error"]) == (
                409,
                {
                    "message": "ticket 5 has been announced already",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "known_ticket",
                },
            )
            asking.cancel()
        await served.waiting(0)
        assert served.server.protocol.tickets.ends == {TicketEnd.WITHDRAWN: 1}
        asking = asyncio.create_task(served.post(5))  # it may come again
        await served.waiting(1)
        asking.cancel()

    serve(test)


def test_no_turn_will_come() -> None:
    async def test(served: Served) -> None:
        status, body = await served.post(5)
        assert (status, body["error"]["code"]) == (503, "no_pool")  # type: ignore[index]
        member = await served.join("host:1", BUSY)
        asking = asyncio.create_task(served.post(5))
        await served.waiting(1)
        member.close()
        status, body = await asking
        assert (status, body["error"]["message"]) == (503, "the pool has lost its members")  # type: ignore[index]
        await served.join("host:1", BUSY)
        asking = asyncio.create_task(served.post(6))
        await served.waiting(1)
        await served.server.close()
        assert (await asking)[0] == 503

    serve(test)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"nonsense", 400, "bad_ticket"),
        (b'{"ticket": 1}', 400, "bad_ticket"),
        (b'{"ticket": 1, "tokens": 9, "prefixes": [[1]]}', 400, "bad_ticket"),
        (b'{"ticket": 1, "tokens": 9, "prefixes": [[1, -1]]}', 400, "bad_ticket"),
        (b'{"ticket": 1, "tokens": 9, "prefixes": {"1": 2}}', 400, "bad_ticket"),
        (json.dumps({"ticket": 1, "tokens": 9, "prefixes": [[1, 2]] * 1025}).encode(), 400, "bad_ticket"),
        (b'{"ticket": 1, "tokens": 63}', 422, "too_short"),
    ],
)
def test_refused(body: bytes, status: int, code: str) -> None:
    async def test(served: Served) -> None:
        await served.join("host:1", IDLE)
        async with served.client.post("/tickets", data=body) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (status, code)

    serve(test)


def test_beginnings_of_a_text() -> None:
    body = json.dumps({"ticket": 1, "tokens": 9000, "prefixes": [[2**64 - 1, 60], [0, 120]]}).encode()
    assert read_announcement(body).text == PromptText((2**64 - 1, 0), (60, 120))
    assert read_announcement(b'{"ticket": 1, "tokens": 9000}').text is None
