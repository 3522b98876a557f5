"""The live page in a real Chromium, over a router: it shows what the API says, asks for a key, and finds back."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sglang_ext.live.decide.instance_work import BatchMember, WorkLog
from sglang_ext.types import LengthClass, Role
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.observe import live_page
from support.browser import browser, needs_browser
from support.engines import free_port
from support.laps_engine import controlled, laps
from support.linked_routers import processes
from support.router_process import cluster
from support.running_time import running_s
from support.scripted_engine import DONE, ScriptedEngine, event, one_token_until, reply, stream

pytestmark = needs_browser
LONG_TEXT = "word " * 4000
LOST = "Failed to load resource: net::ERR_"  # what Chromium itself writes when a connection is cut
ADMIN_KEY = "the-administrator"
SLOW = RouterConfig(health_check_interval_secs=1.0, load_poll_interval_secs=1.0)


async def test_pools_requests_and_a_click_show_what_the_api_says_and_a_lost_connection_recovers() -> None:
    async with cluster(short=2, decode=2, base=SLOW) as served, browser() as opened:
        page = await opened.open(f"http://127.0.0.1:{served.port}/ui")
        await page.until("document.getElementById('state').textContent === 'live'")
        tokens = [event({"text": "a", "usage": {"completion_tokens": number}}) for number in range(1, 9)]
        for engine in (*served.short, *served.long):
            engine.script = reply(delay_s=0.2)
        for engine in served.decode:
            engine.script = stream(*tokens, DONE, delay_s=0.4)
        texts = ["hi"] * 6 + [f"{number} {LONG_TEXT}" for number in range(2)]  # no prefix that is cached
        asked = [asyncio.create_task(served.ask("POST", "/generate", {"text": text, "stream": True})) for text in texts]
        # Pools
        workers = (await served.ask("GET", "/workers")).json["workers"]
        await page.until(f"document.querySelectorAll('.card').length === {len(workers)}")
        cards = await page.evaluate(
            "[...document.querySelectorAll('.card')].map(c => [c.querySelector('.card-name').firstChild.textContent,"
            " c.closest('[data-pool]').dataset.pool, c.querySelector('.state').textContent])"
        )
        assert sorted(cards) == sorted([one["id"], one["role"], one["state"]] for one in workers)
        # Flow
        await page.evaluate("document.getElementById('tab-flow').click()")
        await page.until("liveView.state.classes.short.decoding === 6 && liveView.state.classes.long.decoding === 2")
        replies = await asyncio.gather(*asked)
        told = replies[0].headers
        await page.until("liveView.state.classes.short.ended === 6 && liveView.state.classes.long.ended === 2")
        await page.until(f"liveView.state.byId.has({json.dumps(told['x-request-id'])})")
        await page.until(
            f"(button => button && (button.click(), true))([...document.querySelectorAll('#requests button')]"
            f".find(b => b.textContent === {json.dumps(told['x-request-id'])}))"
        )
        detail = await page.until(
            "(text => text.includes('ended') && text)(document.getElementById('detail').innerText)"
        )
        for name in ("prefill", "decode"):
            assert told[f"x-sglang-ext-{name}"].partition("://")[2] in detail
        assert "short" in detail
        # Lanes
        await page.evaluate("document.getElementById('tab-time').click()")
        number = await page.evaluate(
            f"[...liveView.state.req.values()].find(o => o.row.id === {json.dumps(told['x-request-id'])}).row.prefill"
        )
        await page.until(
            f"(liveView.laneOf({number}) || {{hits: []}}).hits.some(h => h.id === {json.dumps(told['x-request-id'])})"
        )
        assert page.errors == []
        # A connection that is lost
        live_page = served.router.live_page
        assert live_page is not None
        (viewer,) = live_page._viewers
        viewer._connection.transport.abort()
        await page.until("document.getElementById('state').dataset.state === 'lost'")
        await page.until("document.getElementById('state').textContent === 'live'")
        await page.until("liveView.state.inst.size === 5")
        await page.evaluate("document.getElementById('tab-pools').click()")
        await page.until("document.querySelectorAll('.card').length === 5")
        assert [error for error in page.errors if not error.startswith(LOST)] == []
        addresses = {url.partition("://")[2].partition("/")[0] for url in page.requested if url.startswith("http")}
        assert addresses == {f"127.0.0.1:{served.port}"}


async def test_lanes_show_batches_parked_prefills_and_transfers_that_instances_tell_with_their_numbers() -> None:
    async with controlled(short=1, long=2, controller="off") as served, browser() as opened:
        engine = laps(served.long[0])
        work = engine.work = WorkLog()
        page = await opened.open(f"http://127.0.0.1:{served.port}/ui#key=admin")
        await page.until("document.getElementById('state').textContent === 'live'")
        await page.evaluate("document.getElementById('tab-time').click()")
        now_s = asyncio.get_running_loop().time()
        runs = [
            [BatchMember(1, "long-one", LengthClass.LONG, 256, 744)],
            [BatchMember(2, "short-one", LengthClass.SHORT, 20, 0), BatchMember(3, "r3", LengthClass.SHORT, 30, 0)],
            [BatchMember(1, "long-one", LengthClass.LONG, 744, 0), BatchMember(4, "r4", LengthClass.SHORT, 6, 0)],
        ]
        for number, members in enumerate(runs):
            work.record_launch(now_s + number, members)
            work.record_result(now_s + number, now_s + number + 0.9)
        work.record_transfers(now_s + 2.5, now_s + 3.5, 1000, ["long-one"])
        row = f"[...liveView.state.inst.values()].find(o => o.row.name === {json.dumps(engine.url[7:])}).row"
        lane = f"liveView.laneOf({row}.instance)"
        kinds = f"(lane => lane && [...new Set(lane.hits.filter(h => h.span).map(h => h.span.kind))].sort())({lane})"
        await page.until(f"({kinds} || []).length === 3")
        assert await page.evaluate(kinds) == ["parked", "prefill", "transfer"]
        told = f"new Set({lane}.hits.map(h => liveView.textOf({row}.instance, h.span)))"
        texts = await page.evaluate(f"[...{told}].map(text => text.split('\\n').slice(1))")
        assert sorted(texts) == [
            ["KV on its way to decode for 1.00 s", "long-one", "1,000 tokens, 1 request"],
            ["batch of both classes for 900 ms", "744 long and 6 short tokens", "750 new tokens, 2 requests"],
            ["long chunk for 900 ms", "long-one", "256 new tokens, 1 request"],
            ["parked between two chunks for 1.10 s", "long-one", "744 tokens left, 1 request"],
            ["short batch for 900 ms", "short-one and 1 more", "50 new tokens, 2 requests"],
        ]
        # What is computed stands above what waits and what is on its way.
        heights = await page.evaluate(f"{lane}.hits.map(h => [h.span.kind, h.y])")
        computed = max(y for kind, y in heights if kind == "prefill")
        assert all(y > computed for kind, y in heights if kind != "prefill")
        await page.until("document.getElementById('notes').innerText.includes('2 prefill instances do not tell')")
        assert page.errors == []


async def test_a_router_with_a_key_is_asked_with_it_and_the_key_is_never_in_an_address() -> None:
    async with cluster(admin_api_key=ADMIN_KEY, base=SLOW) as served, browser() as opened:
        page = await opened.open(f"http://127.0.0.1:{served.port}/ui")
        await page.until("!document.getElementById('key').hidden")
        await page.evaluate(
            "document.getElementById('secret').value = 'wrong'; document.querySelector('#key button').click()"
        )
        await page.until("!document.getElementById('key').hidden")
        await page.evaluate(
            f"document.getElementById('secret').value = {json.dumps(ADMIN_KEY)};"
            "document.querySelector('#key button').click()"
        )
        await page.until("document.getElementById('state').textContent === 'live'")
        await page.until("document.querySelectorAll('.card').length === 3")
        assert not any(ADMIN_KEY in url for url in page.requested)
        assert [error for error in page.errors if "401" not in error] == []


async def test_a_key_in_the_fragment_opens_the_page_stays_in_its_tab_and_leaves_its_address() -> None:
    key = "a+b&c=d"
    async with cluster(admin_api_key=key, base=SLOW) as served, browser() as opened:
        address = f"http://127.0.0.1:{served.port}/ui"
        page = await opened.open(f"{address}#key={quote(key, safe='')}")
        await page.until("document.getElementById('state').textContent === 'live'")
        assert await page.evaluate("location.href") == address
        assert await page.evaluate("document.getElementById('key').hidden")
        await page.evaluate("document.getElementById('tab-time').click(); location.reload()")
        await page.until("window.liveView && document.getElementById('state').textContent === 'live'")
        assert await page.evaluate("location.href") == f"{address}#time"
        assert not any("key=" in url or "a+b" in url for url in page.requested), "a fragment is sent to no server"
        # Another one in the address of a page that is open already
        await page.evaluate("location.hash = '#key=wrong'")
        await page.until("!document.getElementById('key').hidden")
        await page.evaluate(f"location.hash = '#key={quote(key, safe='')}'")
        await page.until("document.getElementById('state').textContent === 'live'")
        assert await page.evaluate("location.href") == address
        assert [error for error in page.errors if "401" not in error] == []


async def test_what_comes_while_the_page_is_held_is_shown_when_it_goes_on() -> None:
    async with cluster(base=SLOW) as served, browser() as opened:
        page = await opened.open(f"http://127.0.0.1:{served.port}/ui")
        await page.until("document.getElementById('state').textContent === 'live'")
        counts = "(c => [c.decoding, c.ended])(liveView.state.classes.short)"
        phases = "[...liveView.state.req.values()].map(o => o.row.outcome)"

        async def begin(release: asyncio.Event) -> list[asyncio.Task[Any]]:
            for engine in served.decode:
                engine.script = one_token_until(release)
            asked = [served.ask("POST", "/generate", {"text": "hi", "stream": True}) for _ in range(3)]
            return [asyncio.create_task(one) for one in asked]

        for round_number, most_characters in enumerate((1e9, 200)):
            release = asyncio.Event()
            asked = await begin(release)
            await page.until("liveView.state.classes.short.decoding === 3")
            await page.evaluate(f"liveView.maxHeldCharacters = {most_characters}")
            await page.evaluate("document.getElementById('pause').click()")
            await page.until("document.getElementById('state').textContent === 'held'")
            held_at = await page.evaluate("liveView.state.at")
            release.set()
            await asyncio.gather(*asked)
            if round_number == 0:
                await page.until("liveView.waiting > 3")
            else:  # beyond what it keeps it stops to listen
                await served.until(lambda: served.router.services.view is None)
            assert await page.evaluate("liveView.state.at") == held_at
            assert await page.evaluate(f"{counts}[0]") == 3
            await page.evaluate("document.getElementById('pause').click()")
            await page.until("document.getElementById('state').textContent === 'live'")
            await page.until(f"({counts} + '') === '{'0,3' if round_number == 0 else '0,0'}'")
            await page.until(f"{phases}.every(outcome => outcome === 'ok')")
            missed = "document.getElementById('notes').innerText.includes('has missed')"
            assert not await page.evaluate(missed)
        assert [error for error in page.errors if not error.startswith(LOST)] == []


async def test_a_page_that_has_missed_messages_begins_anew_and_keeps_no_request_that_has_ended() -> None:
    async with cluster(decode=2, base=SLOW) as served, browser() as opened:
        page = await opened.open(f"http://127.0.0.1:{served.port}/ui")
        await page.until("document.getElementById('state').textContent === 'live'")
        release = asyncio.Event()
        for engine in served.decode:
            engine.script = one_token_until(release)
        asked = [asyncio.create_task(served.ask("POST", "/generate", {"text": "hi", "stream": True})) for _ in range(3)]
        await page.until("liveView.state.classes.short.decoding === 3 && liveView.state.req.size === 3")
        live_page = served.router.live_page
        assert live_page is not None
        (viewer,) = live_page._viewers
        view = served.router.services.view
        assert view is not None
        viewer.pause()  # as when the socket is full
        release.set()
        await asyncio.gather(*asked)
        served.router.remove_worker(served.worker(served.decode[1].url))
        told = view._frames
        await served.until(lambda: view._frames > told + 8)
        assert await page.evaluate("liveView.state.inst.size") == 4
        viewer.resume()
        await page.until("liveView.state.inst.size === 3")
        await page.until("document.getElementById('notes').innerText.includes('This browser has missed')")
        assert await page.evaluate("[...liveView.state.req.values()].every(o => o.row.ended_s !== null)")
        assert page.errors == []


async def test_requests_of_other_processes_are_added_to_the_figures(tmp_path: Path) -> None:
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    async with processes(tmp_path, engines) as (viewed, other), browser() as opened:
        page = await opened.open(f"http://127.0.0.1:{viewed.port}/ui#key=admin")
        await page.until("document.getElementById('state').textContent === 'live'")
        await page.until("liveView.state.head.elsewhere !== null && liveView.state.head.elsewhere.ended !== null")
        release = asyncio.Event()
        engines[1].script = one_token_until(release)
        asked = [
            asyncio.create_task(one.ask("POST", "/generate", {"text": "hi", "stream": True}))
            for one in (viewed, other, other)
        ]

        async def shows(title: str, value: str, note: str) -> None:
            figure = (
                "[...document.querySelectorAll('.figure')].filter(f => f.querySelector('dt').innerText === "
                f"{json.dumps(title)}).map(f => [f.querySelector('dd span').innerText,"
                " f.querySelector('small').innerText])[0]"
            )
            await page.until(f"(({figure}) || []).join('|') === {json.dumps(f'{value}|{note}')}", 30.0)

        await shows("In flight", "3", "1 in this process, 2 elsewhere")
        await shows("Answered", "0", "none ended otherwise")
        release.set()
        await asyncio.gather(*asked)
        await shows("In flight", "0", "0 in this process, 0 elsewhere")
        await shows("Answered", "3", "none ended otherwise")
        assert page.errors == []


async def test_a_page_beyond_the_most_that_may_look_says_why_and_opens_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_page, "MAX_VIEWERS", 1)
    async with cluster(base=SLOW) as served, browser() as opened:
        first = await opened.open(f"http://127.0.0.1:{served.port}/ui")
        await first.until("document.getElementById('state').textContent === 'live'")
        second = await opened.open(f"http://127.0.0.1:{served.port}/ui")
        await second.until("document.getElementById('state').textContent.includes('pages are open already')")
        assert await second.evaluate("document.getElementById('state').textContent.includes('answers 503')")
        await first.evaluate("location.href = 'about:blank'")
        await second.until("document.getElementById('state').textContent === 'live'", 30.0)
        assert [error for error in second.errors if "503" not in error] == []


@pytest.mark.full
@pytest.mark.chaos
async def test_a_page_finds_a_router_again_that_was_killed(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "sglang_ext.cli", "router", "--port", str(port)]
    log = (tmp_path / "router.log").open("wb")

    async def start() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        end_s = running_s() + 60
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                assert running_s() < end_s, (tmp_path / "router.log").read_text()
                await asyncio.sleep(0.1)
                continue
            writer.close()
            return process

    router = await start()
    try:
        async with browser() as opened:
            page = await opened.open(f"http://127.0.0.1:{port}/ui")
            await page.until("document.getElementById('state').textContent === 'live'")
            await page.until("document.getElementById('pool-list').innerText.includes('No instance is known yet')")
            router.kill()
            await router.wait()
            await page.until("document.getElementById('state').dataset.state === 'lost'")
            router = await start()
            await page.until("document.getElementById('state').textContent === 'live'", 30.0)
            assert [error for error in page.errors if not error.startswith(LOST)] == []
    finally:
        router.kill()
        await router.wait()
        log.close()
