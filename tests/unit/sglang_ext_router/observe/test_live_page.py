"""`/ui` and `/ui/stream`: who gets them, what they tell, and that nothing is gathered while no page is open."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_ext.live.decide.instance_work import BatchMember, WorkLog
from sglang_ext.live.decide.messages import MAX_MESSAGE_BYTES, MIN_INTERVAL_S
from sglang_ext.types import LengthClass, Role
from sglang_ext_router.config import WorkerAddress
from sglang_ext_router.control.controller import MoveRecord
from sglang_ext_router.decide.pool_move import MoveOutcome
from sglang_ext_router.instances import work_reader
from sglang_ext_router.instances.long_pool import pool_prompts, pool_spans
from sglang_ext_router.observe import live_page
from support.laps_engine import SLOW, controlled, laps
from support.linked_routers import processes
from support.raw_client import RawClient
from support.router_process import RunningRouter, cluster
from support.running_time import running_s
from support.scripted_engine import (
    DONE,
    ScriptedEngine,
    chunk,
    event,
    hang,
    one_token_until,
    raw,
    reply,
    status,
    stream,
    stream_head,
)

LONG_TEXT = "word " * 4000
ADMIN = {"admin_api_key": "the-administrator"}


class Follower:
    """Reads a stream, as the page does."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self.reply = reply
        self.hello: dict[str, Any] = {}
        self.frame: dict[str, Any] = {}
        self.rows: dict[str, dict[Any, dict[str, Any]]] = {}
        self.events: list[str] = []
        self.at_s: list[float] = []  # when frames came
        self.largest_bytes = 0
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        async for line in self.reply.content:
            if not line.startswith(b"data: "):
                assert line == b"\n"
                continue
            self.largest_bytes = max(self.largest_bytes, len(line))
            message = json.loads(line[6:])
            if message["kind"] == "hello":
                self.hello = message
                continue
            self.frame = message
            self.at_s.append(running_s())
            for kind, names in self.hello["fields"].items():
                for values in message.get(kind, ()):
                    row = dict(zip(names, values, strict=True))
                    if kind == "events":
                        self.events.append(row["text"])
                    else:
                        self.rows.setdefault(kind, {})[values[0]] = row

    async def until_ended(self) -> None:
        await asyncio.wait_for(self._task, 5.0)

    def named(self, name: str) -> dict[str, Any]:
        return next(one for one in self.rows["instances"].values() if one["name"] == name)

    def request(self, name: str) -> dict[str, Any]:
        return next((one for one in self.rows.get("requests", {}).values() if one["id"] == name), {})

    def of_class(self, name: str) -> dict[str, Any]:
        return self.rows.get("classes", {}).get(name, {})


@asynccontextmanager
async def following(served: RunningRouter, key: str = "") -> AsyncIterator[Follower]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    page = served.router.live_page
    assert page is not None
    others = len(page._viewers)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{served.port}/ui/stream", headers=headers) as opened,
    ):
        assert opened.status == 200, await opened.text()
        assert opened.content_type == "text/event-stream"
        follower = Follower(opened)
        await served.until(lambda: bool(follower.frame))
        yield follower
    await served.until(lambda: len(page._viewers) <= others)


@pytest.mark.slow
async def test_a_request_is_followed_from_the_router_over_prefill_to_decode() -> None:
    async with cluster() as served, following(served) as page:
        served.short[0].plan(reply(delay_s=0.4))
        events = [event({"text": "a", "usage": {"completion_tokens": n}}) for n in range(1, 6)]
        served.decode[0].plan(stream(*events, DONE, delay_s=0.3))
        sent = {"text": "hi", "stream": True, "rid": "mine"}
        asked = asyncio.create_task(served.ask("POST", "/generate", sent))
        await served.until(lambda: page.of_class("short").get("decoding") == 1)
        assert (await asked).status == 200
        request_id = (await asked).headers["x-request-id"]
        await served.until(lambda: page.request(request_id).get("outcome") == "ok")
        told = page.request(request_id)
        assert told["length_class"] == "short"
        assert told["received_s"] <= told["sent_s"] <= told["first_token_s"] < told["ended_s"]
        assert told["sent_s"] < told["prefilled_s"]
        assert told["prefill"] == page.named(served.short[0].url[7:])["instance"]
        assert told["decode"] == page.named(served.decode[0].url[7:])["instance"]
        await served.until(lambda: page.of_class("short").get("ended") == 1)
        assert page.of_class("short")["ttft_samples"] == 1
        assert page.of_class("short")["ttft_p50_s"] == pytest.approx(
            told["first_token_s"] - told["received_s"], abs=1e-3
        )


@pytest.mark.slow
async def test_counts_are_those_of_the_metrics_and_a_failure_is_told_as_one() -> None:
    async with cluster(disable_retries=True) as served:
        await served.ask("POST", "/generate", {"text": "before the page"})
        async with following(served) as page:
            for _ in range(20):
                assert (await served.ask("POST", "/generate", {"text": "hi"})).status == 200
            assert (await served.ask("POST", "/generate", {"text": LONG_TEXT})).status == 200
            served.short[0].plan(status(500))
            served.decode[0].plan(hang())
            assert (await served.ask("POST", "/generate", {"text": "hi"})).status >= 500
            await served.until(lambda: page.of_class("short").get("failed") == 1)
            await served.until(lambda: len(page.rows["requests"]) == 22)
            assert page.of_class("short")["ended"] == 20, "the one before the page does not count"
            assert page.of_class("long")["ended"] == 1
            outcomes = [one["outcome"] for one in page.rows["requests"].values()]
            assert sorted(outcomes) == ["error_before"] + ["ok"] * 21
            assert page.frame["in_flight"] == 0


@pytest.mark.slow
async def test_queued_requests_wait_in_the_router() -> None:
    async with cluster(max_concurrent_requests=1, queue_size=5) as served, following(served) as page:
        served.short[0].plan(hang())
        served.decode[0].plan(hang())
        clients = [await served.connect() for _ in range(3)]
        asked = [asyncio.create_task(one.ask("POST", "/generate", {"text": "hi"})) for one in clients]
        await served.until(lambda: page.of_class("unknown").get("waiting") == 2)
        assert page.of_class("short")["prefilling"] == 1
        assert page.frame["in_flight"] == 3
        for one in clients:
            one.close()
        await asyncio.gather(*asked, return_exceptions=True)
        await served.until(lambda: page.frame["in_flight"] == 0)


@pytest.mark.slow
async def test_instances_that_come_go_and_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "INSTANCES_EVERY", 1)
    async with cluster() as served, following(served) as page:
        more = await served.extra_engine(Role.LONG)
        worker = served.router.add_worker(WorkerAddress(more.url, Role.LONG))
        name = more.url[7:]
        await served.until(lambda: any(name in text and "joined" in text for text in page.events))
        await served.until(lambda: page.named(name)["state"] == "ready")
        await more.stop()
        await served.until(lambda: page.named(name)["state"] == "unhealthy")
        assert page.named(name)["reason"]
        served.router.remove_worker(worker)
        await served.until(lambda: page.named(name)["state"] == "gone")
        record = MoveRecord(1.0, served.short[0].url, LengthClass.SHORT, LengthClass.LONG, "pressure", "m")
        served.router.controller.moves.append(record)
        await served.until(lambda: any("is being moved from short to long (pressure)" in text for text in page.events))
        number = page.frame["number"]
        await served.until(lambda: page.frame["number"] > number + 2 * live_page.INSTANCES_EVERY)
        record.outcome, record.detail = MoveOutcome.MOVED, "in time"
        await served.until(lambda: any("moved: from short to long (pressure, in time)" in text for text in page.events))
        assert sum("from short to long" in text for text in page.events) == 2, "each is told once"


async def test_the_queues_of_instances_are_asked_for_while_a_page_is_open() -> None:
    async with cluster() as served:
        asked = [one.path for one in served.short[0].control]
        assert "/laps" not in asked
        async with following(served):
            await served.until(lambda: "/laps" in [one.path for one in served.short[0].control])


@pytest.mark.slow
async def test_what_instances_did_is_told_while_a_page_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MIN_ASK_S", 0.05)
    monkeypatch.setattr(work_reader, "MAX_RECORDS_PER_S", 100_000)
    async with controlled(short=1, long=1, stock=1, controller="off", **SLOW) as served:
        short = laps(served.short[0])
        short.work = WorkLog()
        async with following(served, "admin") as page, following(served, "admin") as another:
            await served.until(lambda: "since=0&most=64" in short.queries)
            now_s = asyncio.get_running_loop().time()
            short.work.record_launch(now_s, [BatchMember(key, f"r{key}", LengthClass.SHORT, 20, 0) for key in range(3)])
            short.work.record_result(now_s, now_s + 0.25)
            number = page.named(short.url[7:])["instance"]
            await served.until(lambda: number in page.rows.get("spans", {}))
            told = page.rows["spans"][number]
            assert (told["kind"], told["length_class"], told["label"]) == ("prefill", "short", "r0 and 2 more")
            assert (told["tokens"], told["requests"]) == (60, 3)
            assert told["end_s"] - told["start_s"] == pytest.approx(0.25, abs=1e-3)
            await served.until(lambda: another.rows.get("spans") == page.rows["spans"])
            await served.until(lambda: "since=1&most=64" in short.queries)
            # One tells, one is of an earlier version; stock SGLang has no lanes at all.
            await served.until(lambda: page.frame["lanes"] == {"telling": 1, "silent": 1, "missed": 0})
            for second in range(200):
                short.work.record_transfers(now_s + second, now_s + second + 0.5, 10, ["r"])
            await served.until(lambda: page.frame["lanes"]["missed"] == 200 - 64)
            # Another page is told what is kept, and what it has not seen does not count.
            async with following(served, "admin") as late:
                await served.until(lambda: bool(late.rows.get("spans")))
                assert late.frame["lanes"]["missed"] == 200 - 64
        assert served.router.controller.monitor.work_reader is None
        await served.router.controller.monitor.refresh()
        assert short.queries[-1] == "", "no page is open"


@pytest.mark.slow
async def test_nothing_is_gathered_without_a_viewer() -> None:
    async with cluster() as served:
        page = served.router.live_page
        assert page is not None
        assert served.router.services.view is None
        async with following(served), following(served):
            assert served.router.services.view is not None
        assert served.router.services.view is None
        assert page._timer is None
        assert page._asking is None
        async with following(served) as again:
            assert again.frame["number"] <= 2, "another stream"


@pytest.mark.slow
async def test_frames_come_at_a_bounded_rate_and_size() -> None:
    async with cluster() as served, following(served) as page:
        for _ in range(3):
            await asyncio.gather(*(served.ask("POST", "/generate", {"text": "hi"}) for _ in range(40)))
        await served.until(lambda: len(page.at_s) >= 6)
        numbers = page.frame["number"]
        assert page.largest_bytes <= MAX_MESSAGE_BYTES + len("data: \n")
        spent_s = page.at_s[-1] - page.at_s[0]
        assert numbers - 1 <= spent_s / MIN_INTERVAL_S + 2


@pytest.mark.slow
async def test_a_viewer_that_does_not_read_misses_frames_and_is_told_all_again() -> None:
    async with cluster() as served:
        client = await served.connect(receive_buffer_bytes=4096)
        await client.send(b"GET /ui/stream HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.head())[0] == 200
        page = served.router.live_page
        assert page is not None
        (viewer,) = page._viewers
        seen = await client.chunk() + await client.chunk()
        (last,) = re.findall(rb'"frame","number":(\d+)', seen)
        view = served.router.services.view
        assert view is not None

        async def frames(count: int) -> None:
            before = view._frames
            await served.until(lambda: view._frames > before + count)

        viewer.pause()  # as when the socket is full, for less than a frame: nothing is missed, nothing told again
        viewer.resume()
        assert (await client.chunk()).startswith(b'data: {"kind":"frame"')
        # A request under way is in a frame
        release = asyncio.Event()
        served.decode[0].script = one_token_until(release)
        asked = asyncio.create_task(served.ask("POST", "/generate", {"text": "hi", "stream": True}))
        while b'"requests":[' not in (told := await client.chunk()):
            pass
        # and ends, as an instance leaves, in what is missed
        viewer.pause()
        release.set()
        request_id = (await asked).headers["x-request-id"]
        leaving = served.decode[0].url[7:]
        served.router.remove_worker(served.worker(served.decode[0].url))
        await frames(2 * live_page.INSTANCES_EVERY)
        viewer.resume()
        told = await client.chunk()
        assert told.startswith(b'data: {"kind":"hello"'), "what it knew is to be forgotten"
        while served.short[0].url[7:].encode() not in told:
            told += await client.chunk()
        assert leaving.encode() not in told.partition(b'"events":')[0]
        assert request_id.encode() not in told
        assert int(re.findall(rb'"frame","number":(\d+)', told)[0]) > int(last) + 1
        client.close()
        await served.until(lambda: served.router.services.view is None)


@pytest.mark.slow
async def test_streams_end_when_the_router_stops() -> None:
    async with cluster() as served, following(served) as page:
        started_s = running_s()
        await served.router.drain(30.0)
        await page.until_ended()
        assert running_s() - started_s < 10.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "key", "status_code"),
    [
        ({}, "", 200),
        ({"api_key": "client"}, "", 401),
        ({"api_key": "client"}, "client", 200),
        (ADMIN, "", 401),
        ({"api_key": "client", **ADMIN}, "client", 401),
        ({"api_key": "client", **ADMIN}, "the-administrator", 200),
    ],
)
async def test_who_may_see_the_stream(options: dict[str, Any], key: str, status_code: int) -> None:
    async with cluster(worker_api_key="w", **options) as served:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{served.port}/ui/stream", headers=headers) as opened,
        ):
            assert opened.status == status_code
        page = await served.ask("GET", "/ui")
        assert page.status == 200, "the page itself holds nothing"
        await served.until(lambda: served.router.services.view is None)


async def test_the_page_is_off_by_option() -> None:
    async with cluster(disable_ui=True) as served:
        assert (await served.ask("GET", "/ui")).status == 404
        assert (await served.ask("GET", "/ui/stream")).status == 404


async def test_the_page_has_a_port_of_its_own_by_option_with_the_same_keys() -> None:
    async with cluster(api_key="client", admin_api_key="admin", ui_port=1) as served:
        ports = served.router.ports
        server = await served.router.loop.create_server(served.router.page_connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for path, status_code in (
            *(("/ui", 200), ("/readyz", 200), ("/ui/stream", 401)),
            *(("/generate", 404), ("/metrics", 404), ("/workers", 404), ("/docs", 404)),
        ):
            async with await RawClient.connect(port) as client:
                assert (await client.ask("GET", path)).status == status_code, path
        for key, status_code in (("client", 401), ("admin", 200)):
            async with (
                aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session,
                session.get(f"http://127.0.0.1:{port}/ui/stream") as opened,
            ):
                assert opened.status == status_code
                if status_code == 200:
                    assert (await opened.content.readline()).startswith(b"data: {")
                    assert len(ports.pages.open) == 1
        for path in ("/ui", "/ui/stream"):
            answered = await served.ask("GET", path, headers={"authorization": "Bearer admin"})
            assert answered.status == 404
            assert "a port of its own" in answered.json["error"]["message"]
        server.close()
        await served.until(lambda: not ports.pages.open)


async def test_over_http_1_0_the_stream_ends_with_its_connection() -> None:
    """As nginx's default `proxy_pass` asks for it."""
    async with cluster() as served, await served.connect() as client:
        await client.send(b"GET /ui/stream HTTP/1.0\r\n\r\n")
        status, headers = await client.head()
        assert (status, headers["connection"], "transfer-encoding" in headers) == (200, "close", False)
        assert await client.exactly(len(b'data: {"kind":"hello"')) == b'data: {"kind":"hello"'
        page = served.router.live_page
        assert page is not None
        page.stop()
        got = await client.rest()
        assert got.endswith(b"\n\n")
        assert b"\r\n" not in got


async def test_only_get_and_a_bounded_number_of_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MAX_VIEWERS", 1)
    async with cluster() as served:
        refused = await served.ask("DELETE", "/ui/stream")
        assert (refused.status, refused.headers["allow"]) == (405, "GET")
        async with following(served):
            assert (await served.ask("GET", "/ui/stream")).status == 503


async def test_the_page_is_one_small_file_that_loads_nothing_else() -> None:
    body, headers = live_page.read_page()
    assert len(body) <= 150_000
    assert not re.search(rb"""(?:src|href)\s*=\s*["'](?!data:|#)""", body), "nothing from elsewhere"
    assert not re.search(rb"https?://|url\(|@import|innerHTML|\beval\(", body)
    (script,) = re.findall(rb"<script>(.*?)</script>", body, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in headers["content-security-policy"]
    async with cluster() as served:
        answered = await served.ask("GET", "/ui")
        assert answered.body == body
        assert answered.headers["content-security-policy"] == headers["content-security-policy"]


@pytest.mark.slow
async def test_several_processes_are_named_on_the_page() -> None:
    async with cluster(processes=3) as served, following(served) as page:
        assert any("process 1 of 3" in note for note in page.hello["notes"])
        assert page.frame["elsewhere"] is None, "none of them has told anything"


@pytest.mark.full
async def test_counts_of_other_processes_are_added_as_they_tell_them(tmp_path: Path) -> None:
    """Two processes of one router: the page of one tells what is in flight and has ended in the other."""
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    async with processes(tmp_path, engines) as (viewed, other):
        await other.ask("POST", "/generate", {"text": "before the page"})
        told = viewed.router.siblings.metric_snapshots

        def counted() -> float:
            return sum(count for _, one in told() for _, count in one.counters.get("requests", ()))

        await viewed.until(lambda: counted() == 1)
        async with following(viewed, "admin") as page:
            await viewed.until(lambda: (page.frame["elsewhere"] or {}).get("ended") == 0)
            engines[1].plan(stream(event({"text": "a"}), DONE, delay_s=3.0))
            asked = asyncio.create_task(other.ask("POST", "/generate", {"text": "hi", "stream": True}))
            await viewed.until(lambda: page.frame["elsewhere"]["in_flight"] == 1)
            assert page.frame["in_flight"] == 0
            assert (await asked).status == 200
            ended = {"routers": 1, "in_flight": 0, "ended": 1, "failed": 0}
            await viewed.until(lambda: page.frame["elsewhere"] == ended, 20.0)
            assert sum(row["ended"] for row in page.rows["classes"].values()) == 0


STATUS = {
    "now_s": 20.0,
    "model": "m",
    "members": [{"instance": 1, "name": "host:1", "node": "n"}, {"instance": 2, "name": "host:2", "node": "n"}],
    "former_members": [],
    "requests": [
        {
            "request": 7,
            "owner": 1,
            "tokens": 3000,
            "cached_tokens": 100,
            "offered_s": 10.0,
            "ended_s": None,
            "outcome": None,
            "times": {},
            "steps": [
                {
                    "kind": "chunk",
                    "members": [1, 2],
                    "new_tokens": 1900,
                    "moved_tokens": 0,
                    "ordered_s": 11.0,
                    "ended_s": 13.0,
                    "has_failed": False,
                    "member_times": [
                        {
                            "instance": 1,
                            "began_s": 11.25,
                            "ended_s": 13.0,
                            "compute_s": 1.0,
                            "ring_s": 0.5,
                            "rebalance_s": 0.25,
                        }
                    ],
                }
            ],
        }
    ],
    "recent": [],
}


def test_prompts_and_spans_of_a_coordinator_are_on_the_routers_clock() -> None:
    (prompt,) = pool_prompts(STATUS, 100.0)
    assert (prompt.prompt, prompt.owner, prompt.offered_s) == (7, "host:1", 110.0)
    assert prompt.chunks == [(1900, ["host:1", "host:2"], 111.0, 113.0)]
    spans = pool_spans(STATUS, 100.0)
    assert {(one.instance, one.kind, one.start_s, one.end_s) for one in spans if one.instance == "host:1"} == {
        ("host:1", "idle", 111.0, 111.25),
        ("host:1", "rebalance", 111.25, 111.5),
        ("host:1", "compute", 111.5, 112.5),
        ("host:1", "ring", 112.5, 113.0),
    }
    assert [one.kind for one in spans if one.instance == "host:2"] == ["idle"], "it has not answered"
    assert pool_prompts({"members": 3}, 0.0) == []
    assert pool_spans(None, 0.0) == []


@pytest.mark.slow
async def test_a_long_pools_prompts_are_told() -> None:
    served_status: dict[str, Any] = json.loads(json.dumps(STATUS))

    async def get_status(_: web.Request) -> web.Response:
        return web.json_response(served_status | {"arrivals_per_s": 0.1})

    app = web.Application()
    app.router.add_get("/status", get_status)
    async with TestServer(app) as coordinator:
        url = str(coordinator.make_url("")).rstrip("/")
        async with cluster(long=2, coordinator_url=url) as served:
            for member, engine in zip(served_status["members"], served.long, strict=True):
                member["name"] = engine.url[7:]
            async with following(served) as page:
                await served.until(lambda: "prompts" in page.rows and len(page.rows.get("spans", {})) == 2)
                (prompt,) = page.rows["prompts"].values()
                assert (prompt["tokens"], prompt["chunks"][0][0], prompt["ended_s"]) == (3000, 1900, None)
                assert not any("No coordinator" in note for note in page.hello["notes"])


@pytest.mark.slow
async def test_a_large_number_under_way_is_counted_from_an_even_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are all in decode by then: a part that begins with them would tell nothing of prefill."""
    monkeypatch.setattr(live_page, "MAX_SCANNED", 4)
    async with cluster() as served, following(served) as page:
        asked: list[asyncio.Task[Any]] = []
        clients = [await served.connect() for _ in range(16)]

        async def send(count: int) -> None:
            for _ in range(count):
                client = clients[len(asked)]
                asked.append(asyncio.create_task(client.ask("POST", "/generate", {"text": "hi", "stream": True})))

        served.short[0].script = reply()
        served.decode[0].script = raw(stream_head() + chunk(event({"text": "a"})), then="hang")
        await send(8)
        await served.until(lambda: page.of_class("short").get("decoding") == 8)
        served.short[0].script = hang()
        served.decode[0].script = hang()
        await send(8)
        await served.until(lambda: page.frame["in_flight"] == 16)
        await served.until(lambda: page.of_class("short").get("prefilling") == 8)
        assert page.of_class("short")["decoding"] == 8
        assert page.frame["is_estimate"] is True
        for client in clients:
            client.close()
        await asyncio.gather(*asked, return_exceptions=True)
        await served.until(lambda: page.frame["in_flight"] == 0)
