"""Jobs on one runner: shares, cancellations, an endpoint that is down, a store that is full for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from sglang_ext.batch.database import StoreFullError
from sglang_ext.batch.decide.in_flight_cap import CapSettings
from sglang_ext.batch.endpoint import EndpointClient
from sglang_ext.batch.lines import CHAT, make_line
from sglang_ext.batch.runner import JobRunner, RunnerSettings
from sglang_ext.batch.service.dispatcher import Dispatcher
from sglang_ext.batch.store import BatchStore
from support.batch_endpoint import batch_endpoint
from support.engines import free_port
from support.event_loops import on_loop


class Bench:
    """A store, an endpoint and a dispatcher between them."""

    def __init__(self, store: BatchStore, dispatcher: Dispatcher) -> None:
        self.store = store
        self.dispatcher = dispatcher
        self.runners = 0

    def job(self, name: str, requests: int, content: str = "x") -> int:
        job = self.store.create_job(name, {})
        bodies: list[dict[str, object]] = [
            {"model": "m", "messages": [{"role": "user", "content": f"{content} {name} {i}"}]} for i in range(requests)
        ]
        self.store.add_lines(job, [make_line(f"r{i}", CHAT, body) for i, body in enumerate(bodies)])
        self.store.make_ready(job)
        return job


@asynccontextmanager
async def bench(folder: Path, url: str, cap: int = 4) -> AsyncIterator[Bench]:
    async with EndpointClient(url) as client:
        with BatchStore.open(folder / "batches.sqlite") as store:
            settings = RunnerSettings(cap=CapSettings(max_in_flight=cap, start=cap))

            def make_runner() -> JobRunner:
                made.runners += 1
                return JobRunner(store, client, settings)

            made = Bench(store, Dispatcher(make_runner))
            yield made
            await made.dispatcher.close()


@pytest.mark.slow
@on_loop
async def test_jobs_get_fair_shares(tmp_path: Path) -> None:
    with batch_endpoint() as endpoint:
        endpoint.delay_s = 0.01
        async with bench(tmp_path, endpoint.url) as one:
            large, small = one.job("large", 200), one.job("small", 10)
            first = asyncio.create_task(one.dispatcher.run_job(large))
            await until(lambda: len(endpoint.order) > 20)
            await one.dispatcher.run_job(small)
            # While both were running, the small job had half of what was sent.
            sent = endpoint.order.copy()
            begun = next(i for i, content in enumerate(sent) if "small" in content)
            between = sent[begun : len(sent) - sent[::-1].index(next(c for c in sent[::-1] if "small" in c))]
            assert len(between) <= 40
            assert not first.done()
            await first
            assert one.store.job(large).succeeded == 200
            assert one.store.job(small).succeeded == 10
            assert one.runners == 1


@on_loop
async def test_a_cancelled_job_leaves_nothing_in_flight_and_others_go_on(tmp_path: Path) -> None:
    with batch_endpoint() as endpoint:
        endpoint.hold_prefix = "held"
        async with bench(tmp_path, endpoint.url) as one:
            held, other = one.job("a", 9, "held"), one.job("b", 5)
            task = asyncio.create_task(one.dispatcher.run_job(held))
            await until(lambda: endpoint.in_flight == 4)
            assert one.dispatcher.in_flight == 4
            waiting = asyncio.create_task(one.dispatcher.run_job(other))
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert one.store.job(held).remaining == 9
            await until(lambda: endpoint.in_flight == 0 or waiting.done())
            await waiting
            assert one.store.job(other).succeeded == 5
            assert endpoint.aborted == 4
            # It can be run again, from where it was.
            endpoint.hold_prefix = None
            await one.dispatcher.run_job(held)
            assert one.store.job(held).succeeded == 9


@on_loop
async def test_a_job_cancelled_alone_is_over_at_once_and_can_run_again(tmp_path: Path) -> None:
    with batch_endpoint() as endpoint:
        endpoint.hold_prefix = "held"
        async with bench(tmp_path, endpoint.url) as one:
            job = one.job("a", 3, "held")
            for expected in (3, 6):
                task = asyncio.create_task(one.dispatcher.run_job(job))
                await until(lambda expected=expected: sum(endpoint.seen.values()) == expected)
                task.cancel()
                await asyncio.wait([task], timeout=10)
                assert task.cancelled()
                assert one.dispatcher.in_flight == 0
            endpoint.hold_prefix = None
            await one.dispatcher.run_job(job)
            assert one.store.job(job).succeeded == 3


@pytest.mark.slow
@on_loop
async def test_an_endpoint_that_is_down_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    async with bench(tmp_path, f"http://127.0.0.1:{port}") as one:
        cancelled, kept = one.job("cancelled", 3), one.job("kept", 3)
        task = asyncio.create_task(one.dispatcher.run_job(cancelled))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()
        going = asyncio.create_task(one.dispatcher.run_job(kept))
        await asyncio.sleep(0.1)
        with batch_endpoint(port):
            await going
        assert one.store.job(kept).succeeded == 3
        assert one.store.job(cancelled).remaining == 3


@on_loop
async def test_closing_ends_everything(tmp_path: Path) -> None:
    with batch_endpoint() as endpoint:
        endpoint.hold_prefix = "held"
        async with bench(tmp_path, endpoint.url) as one:
            task = asyncio.create_task(one.dispatcher.run_job(one.job("a", 9, "held")))
            await until(lambda: endpoint.in_flight == 4)
            await one.dispatcher.close()
            await asyncio.wait([task])
            assert task.cancelled()
            assert one.dispatcher.in_flight == 0


@on_loop
async def test_a_store_that_is_full_fails_the_jobs_and_a_new_runner_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = BatchStore.finish
    is_full = True

    def full(self: BatchStore, results: Any) -> None:
        if is_full:
            raise StoreFullError("full")
        finish(self, results)

    monkeypatch.setattr(BatchStore, "finish", full)
    with batch_endpoint() as endpoint:
        async with bench(tmp_path, endpoint.url) as one:
            jobs = [one.job("a", 6), one.job("b", 6)]
            failed = await asyncio.gather(*(one.dispatcher.run_job(job) for job in jobs), return_exceptions=True)
            assert [type(error) for error in failed] == [StoreFullError, StoreFullError]
            is_full = False
            await asyncio.gather(*(one.dispatcher.run_job(job) for job in jobs))
            assert [one.store.job(job).succeeded for job in jobs] == [6, 6]
            assert one.runners == 2
            for result in one.store.results(jobs[0]):
                assert orjson.loads(result.body)["choices"]


async def until(is_so: Any) -> None:
    while not is_so():  # noqa: ASYNC110 - another thread's
        await asyncio.sleep(0.005)
