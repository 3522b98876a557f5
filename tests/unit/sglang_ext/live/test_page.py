"""The page in a real Chromium, over a recording of a simulated run: it shows what the recording says.

Screenshots are kept in run/live-page.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sglang_ext.live.recording import read_recording, write_page
from support.browser import Browser, Page, browser, needs_browser
from support.live_recordings import fleet_recording, long_pool_recording, simulated_recording

ROOT = Path(__file__).parents[4]
SHOTS = ROOT / "run" / "live-page"
CHECKS = (Path(__file__).parents[3] / "support" / "page_checks.js").read_text().rstrip()
VIEWS = ("pools", "flow", "time", "shared")
pytestmark = needs_browser


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short and four long instances over 20 s, and a move between the pools."""
    return simulated_recording(tmp_path_factory.mktemp("recording"))


@pytest.fixture(scope="module")
def page_file(recording: Path) -> Path:
    """The page with the recording inside."""
    out = recording.with_suffix(".html")
    write_page(recording, out)
    return out


@asynccontextmanager
async def playing(opened: Browser, page_file: Path, at_s: float, **shown: Any) -> AsyncIterator[Page]:
    """The recording, halted at a time; afterwards nothing may have gone wrong."""
    page = await opened.open(page_file.as_uri(), **shown)
    await page.until("window.liveView && liveView.mode === 'replay' && liveView.state.inst.size > 0")
    await page.evaluate(f"liveView.player.playing = false; liveView.player.seek({at_s}); liveView.player.show()")
    yield page
    assert page.errors == []
    assert [url for url in page.requested if not url.startswith(("file:", "data:"))] == []


async def show(page: Page, view: str) -> None:
    await page.evaluate(f"document.getElementById('tab-{view}').click()")
    await asyncio.sleep(0.35)  # it draws a few times a second


def in_browser(test: Callable[[Browser], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with browser() as opened:
            await test(opened)

    asyncio.run(run())


def test_pools_flow_lanes_and_a_click_show_what_the_recording_says(recording: Path, page_file: Path) -> None:
    recorded = read_recording(recording)
    frames = [json.loads(line) for line in recording.read_bytes().splitlines()]

    async def look(opened: Browser) -> None:
        async with playing(opened, page_file, 12.0) as page:
            last = next(frame for frame in reversed(frames) if frame.get("at_s", 99) <= 12.0)
            for name, *counts in last["classes"][:2]:
                shown = await page.evaluate(f"liveView.state.classes.{name}")
                keys = ("waiting", "prefilling", "starting", "decoding", "ended", "failed")
                assert [shown[key] for key in keys] == counts[:6]
            # Pools
            await page.until("document.querySelectorAll('[data-pool=long] .card').length > 0")
            cards = await page.evaluate(
                "[...document.querySelectorAll('.card')].map(c => [c.closest('[data-pool]').dataset.pool,"
                " c.querySelector('.card-name').firstChild.textContent])"
            )
            pools = {}
            for frame in frames:
                if frame.get("at_s", 0) <= 12.0:
                    pools |= {row[1]: row[2] for row in frame.get("instances", ())}
            assert {name: pool for pool, name in cards} == pools
            figures = await page.evaluate("document.getElementById('figures').innerText")
            assert f"{last['in_flight']}" in figures
            # Flow: a mark for every request under way, and a click tells of it
            await show(page, "flow")
            under_way = await page.evaluate(
                "[...liveView.state.req.values()].map(o => o.row)"
                ".filter(r => r.ended_s === null || r.ended_s > 12).map(r => r.request)"
            )
            assert len(under_way) == last["in_flight"]
            await page.until(f"{json.dumps(under_way)}.every(n => liveView.marks.has(n))")
            await page.until("liveView.marks.size > 0 && [...liveView.marks.values()].every(m => m.a > 0.9)")
            chosen = under_way[0]
            x, y = await page.evaluate(
                f"(() => {{ const m = liveView.marks.get({chosen}), b = document.getElementById('flow-canvas')"
                ".getBoundingClientRect(); return [b.x + m.x, b.y + m.y]; })()"
            )
            await page.click(x, y)
            detail = await page.until(
                "(text => text.includes('Prompt') && text)(document.getElementById('detail').innerText)"
            )
            told = recorded.requests[chosen]
            assert told.id in detail
            assert f"{told.prompt_tokens:,} tokens" in detail
            assert recorded.instances[told.prefill or 0].name in detail
            # Time: spans of an instance lie where the recording has them
            await show(page, "time")
            spans = [row for frame in frames if frame.get("at_s", 99) <= 12.0 for row in frame.get("spans", ())]
            number = spans[0][0]
            shown_spans = await page.evaluate(
                f"[...liveView.state.inst.get({number}).spans.values()].map(s => [s.start_s, s.end_s])"
            )
            assert sorted(shown_spans) == sorted([row[2], row[3]] for row in spans if row[0] == number)
            hits = await page.until(
                f"(liveView.laneOf({number}) || {{hits: []}}).hits.length && liveView.laneOf({number}).hits"
            )
            box = await page.evaluate(
                "(b => [b.x, b.y])(document.getElementById('lane-canvas').getBoundingClientRect())"
            )
            hit = max((one for one in hits if one["span"]["kind"] == "prefill"), key=lambda one: one["x"])
            await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + hit["x"], y=box[1] + hit["y"])
            tip = await page.until("(tip => !tip.hidden && tip.innerText)(document.getElementById('lane-tip'))")
            assert hit["id"] in tip
            assert "new tokens" in tip

    in_browser(look)


def test_it_is_readable_and_reached_by_keyboard_in_light_dark_and_narrow(page_file: Path) -> None:
    async def look(opened: Browser) -> None:
        async with playing(opened, page_file, 15.0, calm=True) as page:
            for scheme, width, height in (("light", 1280, 900), ("dark", 1280, 900), ("light", 390, 844)):
                await page.show(width=width, height=height, scheme=scheme, calm=True)
                for view in VIEWS:
                    await show(page, view)
                    where = f"{view}, {scheme}, {width} wide"
                    for check in ("names", "contrast", "drawn", "wide"):
                        assert await page.evaluate(f"{CHECKS}.{check}()") == [], f"{check}: {where}"
                    await page.screenshot(SHOTS / f"{view}-{scheme}-{width}.png")
            await page.show(width=1280, height=900, calm=True)
            await page.evaluate(
                "document.getElementById('tab-pools').focus(); document.getElementById('tab-pools').click()"
            )
            await page.key("ArrowRight")
            assert (
                await page.evaluate("document.activeElement.id + !document.getElementById('flow').hidden")
                == "tab-flowtrue"
            )
            await page.until("document.querySelectorAll('#requests button').length > 5")
            await page.evaluate("document.querySelector('#requests button').focus()")
            await page.evaluate("document.activeElement.click()")
            await page.until("document.getElementById('detail').innerText.includes('Prompt')")

    in_browser(look)


def test_a_recording_is_played_forward_and_back_and_a_wrong_file_is_named(
    recording: Path, page_file: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("not a recording")

    async def look(opened: Browser) -> None:
        async with playing(opened, page_file, 15.0) as page:
            ended = await page.evaluate("liveView.state.classes.short.ended")
            await page.evaluate("liveView.player.seek(5)")
            earlier = await page.evaluate("liveView.state.classes.short.ended")
            assert 0 < earlier < ended
            assert await page.evaluate("[...liveView.state.req.values()].every(o => o.row.received_s <= 5.01)")
            await page.evaluate("liveView.player.seek(15)")
            assert await page.evaluate("liveView.state.classes.short.ended") == ended
            await page.evaluate("document.getElementById('speed').value = '4'; document.getElementById('play').click()")
            await page.until("liveView.player.at > 15.5")
            document = await page.send("DOM.getDocument")
            node = await page.send("DOM.querySelector", nodeId=document["root"]["nodeId"], selector="#file")
            await page.send("DOM.setFileInputFiles", files=[str(wrong)], nodeId=node["nodeId"])
            await page.until("document.getElementById('state').textContent.includes('line 1 is not JSON')")
            await page.send("DOM.setFileInputFiles", files=[str(recording)], nodeId=node["nodeId"])
            await page.until(f"document.getElementById('source').textContent.startsWith({json.dumps(recording.name)})")

    in_browser(look)


def test_shared_prompts_show_their_chunks_and_lanes_what_members_did(tmp_path: Path) -> None:
    page_file = tmp_path / "page.html"
    write_page(long_pool_recording(tmp_path), page_file)

    async def look(opened: Browser) -> None:
        async with playing(opened, page_file, 18.0, height=700) as page:
            await show(page, "shared")
            await page.until("document.querySelectorAll('[data-prompt]').length === 2")
            rows = await page.evaluate(
                "[...document.querySelectorAll('[data-prompt]')].map(r => [...r.children].map(c => c.innerText))"
            )
            assert [[cell for at, cell in enumerate(row) if at != 2] for row in rows] == [
                ["host:3", "20,000 tok", "4,000 @ 1 → 5,000 @ 2", "11,000 @ 4", "host:3, host:1", "under way"],
                ["host:0", "9,000 tok", "2,000 @ 1 → 6,500 @ 3", "–", "–", "collected"],
            ]
            widths = await page.evaluate(
                "[...document.querySelectorAll('[data-prompt=\"2\"] .plan i')]"
                ".map(i => [i.className, i.style.flexGrow])"
            )
            assert [(name, float(width)) for name, width in widths][:3] == [
                ("done", 0.2),
                ("now", 0.25),
                ("planned", 0.55),
            ]
            assert await page.evaluate(f"{CHECKS}.names()") == []
            await page.screenshot(SHOTS / "long-pool.png")
            await show(page, "time")
            hits = await page.until("(liveView.laneOf(1) || {hits: []}).hits.length === 3 && liveView.laneOf(1).hits")
            assert {hit["id"] for hit in hits} == {"9,000 tokens of host:0"}
            await page.screenshot(SHOTS / "long-pool-time.png")

    in_browser(look)


def test_many_instances_are_cells_and_lanes_that_are_scrolled_to(tmp_path: Path) -> None:
    page_file = tmp_path / "page.html"
    write_page(fleet_recording(tmp_path, 300), page_file)

    async def look(opened: Browser) -> None:
        async with playing(opened, page_file, 9.0) as page:
            await page.until("document.querySelectorAll('.cell').length === 300")
            labels = await page.evaluate(
                "[...document.querySelectorAll('.cell')].map(c => c.getAttribute('aria-label'))"
            )
            assert labels[0] == "host:0: ready, 3 in flight, busy 75 %"
            assert labels[299].startswith("host:299: unhealthy")
            assert await page.evaluate("document.querySelectorAll('.cell.out').length") == 1
            await show(page, "time")
            await page.until("Boolean(liveView.laneOf(1))")
            assert not await page.evaluate("Boolean(liveView.laneOf(250))"), "only what is in sight is drawn"
            await page.evaluate("document.getElementById('lanes').scrollTop = 249 * 30")
            await page.until("Boolean(liveView.laneOf(250))")
            await page.screenshot(SHOTS / "fleet.png")

    in_browser(look)


def test_the_picture_in_the_documents_is_what_the_page_shows() -> None:
    """`tools/render_live_page.py --picture` draws it again. Fonts may differ elsewhere, what is where may not."""
    spec = importlib.util.spec_from_file_location("render_live_page", ROOT / "tools/render_live_page.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    drawn = SHOTS / "picture.png"
    drawn.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(tool.draw(drawn))
    now, kept = (np.asarray(Image.open(path).convert("RGB"), dtype=np.int16) for path in (drawn, tool.PICTURE))
    assert now.shape == kept.shape
    difference = np.abs(now - kept).max(axis=2)
    changed = float((difference > 48).mean())
    assert changed < 0.03, f"{changed:.1%} of it look different: {drawn}"
