"""The live page over real SGLang: what it shows is what the API and the instances say, live and from a recording."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.live.recording import check_lines, read_recording
from sglang_ext.types import Role
from support.browser import browser, needs_browser
from support.engines import FLEET, Engine, EngineSpec
from support.long_pool import Coordinator
from support.reference import random_prompt
from support.router_cli import ADMIN_KEY, RunningRouter, running_router
from support.running_time import running_s

pytestmark = pytest.mark.integration
SHOTS = Path(__file__).parents[2] / "run" / "live-page"
LENGTHS = (30, 40, 50, 60, 900)


def serve(router: RunningRouter, lengths: Sequence[int] = LENGTHS) -> list[str]:
    """Send short prompts and a long one, all at once, and return their request ids.

    No other module sends prompts of these seeds: the engines are shared, and a cached prefix is not computed again.
    """

    def ask(length: int) -> str:
        parameters = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        body = {"input_ids": random_prompt(length, seed=880_000 + length), "sampling_params": parameters}
        reply, headers = router.call("POST", "/generate", body)
        assert reply.status == 200
        return headers["x-request-id"]

    with ThreadPoolExecutor(len(lengths)) as threads:
        return list(threads.map(ask, lengths))


def rows_of(recorded: Path, kind: str) -> list[dict[str, Any]]:
    """All rows of a kind, in order."""
    hello, *frames = check_lines(recorded.read_bytes().splitlines())
    return [dict(zip(hello["fields"][kind], row, strict=True)) for frame in frames for row in frame.get(kind, ())]


def latest_spans(recorded: Path) -> list[dict[str, Any]]:
    """Every span, as it was told last."""
    spans = {
        (one["instance"], one["kind"], round(one["start_s"], 3), one["label"]): one
        for one in rows_of(recorded, "spans")
    }
    return list(spans.values())


def reported(recorded: Path) -> set[int]:
    """Instances whose queues the recording has, which only they can tell."""
    return {load["instance"] for load in rows_of(recorded, "loads") if load["short_queued"] is not None}


@contextmanager
def recording(router: RunningRouter, out: Path) -> Iterator[None]:
    """`sglang-ext live record` in a process of its own, which has begun; ended by SIGTERM."""
    command = [
        sys.executable,
        "-m",
        "sglang_ext.cli",
        "live",
        "record",
        router.url,
        "--out",
        str(out),
        "--api-key",
        ADMIN_KEY,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        end_s = running_s() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert running_s() < end_s
            assert process.poll() is None
        yield
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors


@pytest.mark.full
def test_a_recording_of_real_instances_has_their_requests_queues_and_loads(
    router: RunningRouter, engines: list[Engine], tmp_path: Path
) -> None:
    out = tmp_path / "run.jsonl"
    with recording(router, out):
        end_s = running_s() + 60
        ids = serve(router)
        while not set(ids) <= {one.id for one in read_recording(out).requests.values() if one.outcome == "ok"}:
            assert running_s() < end_s
        while len(reported(out)) < sum(engine.spec.role.is_prefill for engine in engines):
            assert running_s() < end_s, "prefill instances have not told their queues"
    recorded = read_recording(out)
    by_id = {one.id: one for one in recorded.requests.values()}
    names = {number: row.name for number, row in recorded.instances.items()}
    assert set(names.values()) == {engine.url.partition("://")[2] for engine in engines}
    for length, name in zip(LENGTHS, ids, strict=True):
        told = by_id[name]
        assert told.prompt_tokens == length
        assert told.output_tokens == 24
        assert told.sent_s is not None
        assert told.prefilled_s is not None
        assert told.ended_s is not None
        # Decode has its first token from prefill's rank, so prefill's own answer may come after decode's last.
        assert told.received_s <= told.sent_s < min(told.prefilled_s, told.ended_s)
        assert told.prefill in names
        assert told.decode in names
    prefills = {number for number, row in recorded.instances.items() if row.pool != "decode"}
    assert reported(out) == prefills
    assert {row.mode for number, row in recorded.instances.items() if number in prefills} <= {"short", "long", "both"}


# What the lanes have drawn, and of how many tokens it shows the KV on its way.
LANES = (
    "[...liveView.state.inst.keys()].flatMap(number => ((liveView.laneOf(number) || {hits: []}).hits)"
    ".filter(h => h.span).map(h => ({number, span: h.span})))"
)
LANES_TELL = f"{LANES}.filter(s => s.span.kind === 'transfer').reduce((sum, s) => sum + s.span.tokens, 0)"
LANE_LENGTHS = (31, 41, 51, 61, 901)


def test_lanes_have_the_batches_chunks_and_transfers_of_what_was_sent(router: RunningRouter, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    with recording(router, out):
        serve(router, LANE_LENGTHS)
        end_s = running_s() + 60

        def done() -> bool:
            """All has been sent, and how many instances tell of it, which comes less often, has come after it."""
            sent = [span for span in latest_spans(out) if span["kind"] == "transfer"]
            frame = list(check_lines(out.read_bytes().splitlines()))[-1]
            is_sent = sum(span["requests"] for span in sent) >= len(LANE_LENGTHS)
            return is_sent and bool((frame.get("lanes") or {}).get("telling"))

        while not done():
            assert running_s() < end_s, latest_spans(out)
    recorded = read_recording(out)
    pools = {number: row.pool for number, row in recorded.instances.items()}
    spans = latest_spans(out)
    batches = [span for span in spans if span["kind"] == "prefill" and not span["label"].startswith("HEALTH_CHECK")]
    short = [span for span in batches if span["length_class"] == "short"]
    long = [span for span in batches if span["length_class"] == "long"]
    assert len(short) + len(long) == len(batches), batches
    shorts, longs = LANE_LENGTHS[:-1], LANE_LENGTHS[-1:]
    assert sum(span["tokens"] for span in short) == sum(shorts), short
    assert sum(span["requests"] for span in short) == len(shorts)
    assert sum(span["tokens"] for span in long) == sum(longs)
    assert {pools[span["instance"]] for span in short} == {"short"}
    assert {pools[span["instance"]] for span in long} == {"long"}
    for one in spans:
        # A health check that the instance was at when the page came began before it, and has a time below 0.
        assert 0 <= one["end_s"] <= recorded.end_s + 0.5
        assert one["start_s"] <= one["end_s"]
    sent = [span for span in spans if span["kind"] == "transfer"]
    assert sum(span["tokens"] for span in sent) == sum(LANE_LENGTHS)
    # The request that the router saw took at least as long as what its instance did for it.
    (told,) = (one for one in recorded.requests.values() if one.prompt_tokens == LANE_LENGTHS[-1])
    assert told.sent_s is not None
    assert told.prefilled_s is not None
    assert all(span["start_s"] >= 0 for span in (*short, *long, *sent))
    for one in long:
        assert one["instance"] == told.prefill
        assert told.sent_s - 0.5 <= one["start_s"] <= one["end_s"] <= told.prefilled_s + 0.5
    frame = list(check_lines(out.read_bytes().splitlines()))[-1]
    assert frame["lanes"] == {"telling": 2, "silent": 0, "missed": 0}


@needs_browser
def test_the_page_shows_real_instances_and_their_requests(router: RunningRouter, engines: list[Engine]) -> None:
    async def look() -> None:
        async with browser() as opened:
            page = await opened.open(f"{router.url}/ui")
            await page.until("!document.getElementById('key').hidden")
            await page.evaluate(
                f"document.getElementById('secret').value = {json.dumps(ADMIN_KEY)};"
                "document.querySelector('#key button').click()"
            )
            await page.until(f"document.querySelectorAll('.card').length === {len(engines)}", 60.0)
            states = {url.partition("://")[2]: one for url, one in router.workers().items()}
            cards = await page.evaluate(
                "[...document.querySelectorAll('.card')]"
                ".map(c => [c.querySelector('.card-name').firstChild.textContent,"
                " c.closest('[data-pool]').dataset.pool, c.querySelector('.state').textContent.split(',')[0]])"
            )
            assert sorted(cards) == sorted([name, one["role"], one["state"]] for name, one in states.items())
            await page.evaluate("document.getElementById('tab-flow').click()")
            ids = await asyncio.to_thread(serve, router)
            await page.until(f"{json.dumps(ids)}.every(id => liveView.state.byId.has(id))", 60.0)
            await page.until("['short', 'long'].every(c => liveView.state.classes[c].prefilling === 0)", 60.0)
            await page.evaluate(f"liveView.choose(liveView.state.byId.get({json.dumps(ids[-1])}))")
            detail = await page.until(
                "(text => text.includes('ended') && text)(document.getElementById('detail').innerText)"
            )
            assert f"{LENGTHS[-1]} tokens" in detail
            await page.evaluate("document.getElementById('tab-time').click()")
            await page.until(f"{LANES_TELL} === {sum(LENGTHS)}", 60.0)
            # What is under the mouse is told with its numbers.
            for kind, text in (("prefill", "new tokens"), ("transfer", "tokens")):
                shown = await page.until(
                    f"(s => s && liveView.textOf(s.number, s.span))({LANES}.find(s => s.span.kind === '{kind}'))"
                )
                assert text in shown, shown
                assert "request" in shown
            await page.screenshot(SHOTS / "real-time.png")
            assert [error for error in page.errors if "401" not in error] == []

    asyncio.run(look())


@pytest.mark.full
def test_prompts_that_a_long_pool_shares_are_recorded_as_the_coordinator_tells_them(tmp_path: Path) -> None:
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as coordinator:
        options = (
            "--cdsp-coordinator",
            coordinator.address,
            "--cdsp-min-tokens",
            "200",
            "--laps-boundary-tokens",
            "256",
        )
        specs = [EngineSpec(Role.LONG, worker_options=options, name=f"live-page-{number}") for number in range(2)]
        members = FLEET.get(*specs, EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))
        try:
            coordinator.wait_for(lambda status: len(status["members"]) == 2)
            with running_router(members, "--coordinator-url", coordinator.http_url) as router:
                out = tmp_path / "run.jsonl"
                with recording(router, out):
                    body = {"input_ids": random_prompt(900, seed=5), "sampling_params": {"max_new_tokens": 2}}
                    assert router.post("/generate", body).status == 200
                    end_s = running_s() + 60
                    while not any(one["outcome"] for one in rows_of(out, "prompts")):
                        assert running_s() < end_s, "the prompt is not told, or not its end"
                status = coordinator.status()
        finally:
            for engine in members[:2]:
                engine.stop()
    told = rows_of(out, "prompts")[-1]
    (record,) = status["recent"]
    names = {one["instance"]: one["name"] for one in (*status["members"], *status["former_members"])}
    chunks = [step for step in record["steps"] if step["kind"] == "chunk"]
    assert (told["tokens"], told["outcome"], told["owner"]) == (
        record["tokens"],
        record["outcome"],
        names[record["owner"]],
    )
    assert [chunk[:2] for chunk in told["chunks"]] == [
        [step["new_tokens"], [names[member] for member in step["members"]]] for step in chunks
    ]
    assert told["ended_s"] - told["offered_s"] == pytest.approx(record["ended_s"] - record["offered_s"], abs=1e-3)
    instances = {row.instance: row.name for row in read_recording(out).instances.values()}
    computing = {instances[one["instance"]] for one in rows_of(out, "spans") if one["kind"] == "compute"}
    assert computing == {names[member] for step in chunks for member in step["members"]}
