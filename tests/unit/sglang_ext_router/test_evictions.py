"""Running requests of low priority give their places to urgent ones, and are served again when there is a place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import chunk, event, hang, reply, stream_head
from support.tenants import bearer, tenants_file

LOW = {"x-sgl-priority": "low"}
URGENT = {"x-sgl-ttft-slo-ms": "600"}  # half of which is over at the second sweep
LONG = [7] * 2000


@asynccontextmanager
async def one_place(**options: Any) -> AsyncIterator[Cluster]:
    async with cluster(max_concurrent_requests=1, **{"max_evictions": 1, **options}) as served:
        yield served


async def send(served: Cluster, name: str, headers: dict[str, str], **fields: Any) -> RawClient:
    """A client whose request of this id has been sent."""
    client = await served.connect()
    body = {"input_ids": LONG, "rid": name, **fields}
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode(), headers))
    return client


async def running(served: Cluster, name: str, headers: dict[str, str], script: Any, **fields: Any) -> RawClient:
    """A client whose request is at the instances."""
    served.decode[0].plan(script)
    count = len(served.decode[0].requests)
    client = await send(served, name, headers, **fields)
    await served.decode[0].received(count + 1)
    return client


def order(served: Cluster) -> list[str]:
    return [request.rid.split("-")[0] for request in served.decode[0].requests]


@pytest.mark.slow
async def test_an_urgent_request_gets_the_place_and_the_other_is_served_behind_it() -> None:
    async with one_place() as served:
        low = await running(served, "low", LOW, hang())
        urgent = await send(served, "urgent", URGENT)
        assert (await urgent.reply()).status == 200
        assert (await low.reply()).status == 200
        assert order(served) == ["low", "urgent", "low"]
        metrics = served.router.metrics
        assert (metrics.evicted, metrics.retries, metrics.aborts) == (1, {}, {})
        assert metrics.long.slo_met + metrics.short.slo_met == 1
        assert metrics.long.slo_missed + metrics.short.slo_missed == 0
        for client in (low, urgent):
            client.close()


@pytest.mark.slow
async def test_the_instances_drop_it() -> None:
    async with one_place() as served:
        for engine in (*served.short, *served.long, *served.both):
            engine.plan(hang())
        await running(served, "low", LOW, hang())
        asked = [engine for engine in served.engines if engine.requests]
        urgent = await send(served, "urgent", URGENT)
        assert (await urgent.reply()).status == 200
        assert len(asked) == 2
        for engine in asked:
            await engine.abort_of(engine.requests[0].rid)
        urgent.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "urgent_headers", "evictions"),
    [({}, URGENT, 1), (LOW, LOW | URGENT, 1), (LOW, URGENT, 0), (LOW, {}, 1)],
    ids=["online", "both-low", "switched-off", "in-no-danger"],
)
async def test_no_room_is_made(headers: dict[str, str], urgent_headers: dict[str, str], evictions: int) -> None:
    async with one_place(max_evictions=evictions, queue_timeout_secs=30.0) as served:
        first = await running(served, "first", headers, reply({"text": "x"}, delay_s=1.2))
        second = await send(served, "second", urgent_headers)
        assert (await first.reply()).status == 200
        assert (await second.reply()).status == (200 if urgent_headers == {} else 408)
        assert served.router.metrics.evicted == 0


@pytest.mark.slow
async def test_what_was_evicted_often_enough_stays() -> None:
    async with one_place() as served:
        low = await running(served, "low", LOW, hang())
        served.decode[0].plan(reply({"text": "x"}), reply({"text": "x"}, delay_s=1.2))
        assert (await (await send(served, "urgent", URGENT)).reply()).status == 200
        await served.decode[0].received(3)
        assert (await (await send(served, "another", URGENT)).reply()).status == 408
        assert (await low.reply()).status == 200
        assert order(served) == ["low", "urgent", "low"]


@pytest.mark.slow
async def test_a_stream_that_has_begun_stays() -> None:
    async with one_place() as served:
        begun = stream_head() + chunk(event({"text": "x"}))
        low = await running(served, "low", LOW, hang(begun), stream=True)
        await low.head()
        assert (await (await send(served, "urgent", URGENT)).reply()).status == 408
        assert served.router.metrics.evicted == 0
        low.close()


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
async def test_its_client_leaves_or_its_time_is_over_while_it_waits_again(leaves: bool) -> None:
    async with one_place(queue_timeout_secs=5.0 if leaves else 0.8) as served:
        low = await running(served, "low", LOW, hang())
        served.decode[0].plan(hang())
        urgent = await send(served, "urgent", URGENT)
        await served.until(lambda: served.router.metrics.evicted == 1)
        await served.decode[0].received(2)
        assert (served.router.requests_in_flight, served.router.requests_queued) == (1, 1)
        if leaves:
            low.close()
        else:
            assert (await low.reply()).status == 408
        await served.until(lambda: not served.router.requests_queued)
        assert served.router.requests_in_flight == 1
        urgent.close()
        await served.until_idle()


@pytest.mark.slow
async def test_a_tenant_pays_for_one_service(tmp_path: Path) -> None:
    """Its place in the queue and its budget are as if it had been served once."""
    path = tenants_file(tmp_path, a={"tokens_per_minute": 100_000}, b={})
    async with one_place(tenants_file=path) as served:
        low = await running(served, "low", LOW | bearer("a"), hang(), sampling_params={"max_new_tokens": 10})
        used = reply({"text": "x", "meta_info": {"prompt_tokens": 2000, "completion_tokens": 10}})
        served.decode[0].plan(used, used)
        assert (await (await send(served, "urgent", URGENT | bearer("b"))).reply()).status == 200
        assert (await low.reply()).status == 200
        await served.until_idle()
        tenants, queue = served.router.tenants, served.router.admission
        assert tenants is not None
        bucket = tenants.account("a").tokens
        assert bucket is not None
        assert bucket.level == pytest.approx(100_000 - 2010, abs=2)
        assert queue._levels[3].finish["a"] <= 2010  # type: ignore[attr-defined]
        low.close()
