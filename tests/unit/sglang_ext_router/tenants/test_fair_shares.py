"""A router whose places tenants share: who is next, whose queue is full, and what a client that leaves gives back."""

from __future__ import annotations

import json
from pathlib import Path

from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import hang, reply
from support.tenants import bearer, tenants_file


async def waiting(served: Cluster, key: str, name: str = "", tokens: int = 10, **headers: str) -> RawClient:
    """A client that has sent a request of this id and size, and waits."""
    client = await served.connect()
    body = {"input_ids": [1] * tokens, "rid": name or key, "sampling_params": {"max_new_tokens": 1}}
    before = served.router.requests_queued + served.router.requests_in_flight
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode(), bearer(key) | headers))
    await served.until(lambda: served.router.requests_queued + served.router.requests_in_flight > before)
    return client


async def served_order(served: Cluster, first: RawClient, clients: list[RawClient]) -> list[str]:
    """The order in which what waits is served when the first client has left."""
    first.close()
    for client in clients:
        assert (await client.reply()).status == 200
        client.close()
    return [request.rid.split("-")[0] for request in served.decode[0].requests[1:]]


async def test_a_flood_of_one_tenant_lets_others_pass(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, flood={}, a={}, b={"weight": 2})
    async with cluster(tenants_file=path, max_concurrent_requests=1, queue_size=4) as served:
        served.decode[0].plan(hang())
        first = await waiting(served, "flood", "first")
        await served.decode[0].received(1)
        clients = [await waiting(served, "flood", f"flood{number}") for number in range(4)]
        refused = await served.ask("POST", "/generate", {"input_ids": [1]}, bearer("flood"))
        assert refused.status == 429
        clients += [await waiting(served, "a", f"a{number}") for number in range(2)]
        clients += [await waiting(served, "b", f"b{number}") for number in range(4)]
        order = await served_order(served, first, clients)
        assert order[:3] == ["a0", "b0", "b1"]
        assert sorted(order[:7]) == ["a0", "a1", "b0", "b1", "b2", "b3", "flood0"]


async def test_a_large_request_counts_as_what_it_is(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, large={}, small={})
    async with cluster(tenants_file=path, max_concurrent_requests=1) as served:
        served.decode[0].plan(hang())
        served.decode[0].script = reply({"text": "x"})
        first = await waiting(served, "small", "first")
        await served.decode[0].received(1)
        clients = [await waiting(served, "large", f"large{number}", 2000) for number in range(2)]
        clients += [await waiting(served, "small", f"small{number}") for number in range(5)]
        assert await served_order(served, first, clients) == [
            *("large0", "small0", "small1", "small2", "small3", "small4", "large1")
        ]


async def test_what_was_used_counts_and_not_what_was_estimated(tmp_path: Path) -> None:
    """The first large request turns out to be as small as the others."""
    path = tenants_file(tmp_path, large={}, small={})
    async with cluster(tenants_file=path, max_concurrent_requests=1) as served:
        served.decode[0].plan(hang())
        served.decode[0].script = reply({"meta_info": {"prompt_tokens": 10, "completion_tokens": 1}})
        first = await waiting(served, "small", "first")
        await served.decode[0].received(1)
        clients = [await waiting(served, "large", f"large{number}", 2000) for number in range(2)]
        clients += [await waiting(served, "small", f"small{number}") for number in range(5)]
        assert (await served_order(served, first, clients))[:3] == ["large0", "small0", "large1"]


async def test_the_more_urgent_request_is_first(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a={}, b={"max_priority": "low"})
    async with cluster(tenants_file=path, max_concurrent_requests=1) as served:
        served.decode[0].plan(hang())
        first = await waiting(served, "a", "first")
        await served.decode[0].received(1)
        clients = []
        for key, name, asked in (("b", "low", "real-time"), ("a", "normal", "normal"), ("a", "high", "high")):
            clients.append(await waiting(served, key, name, **{"x-sgl-priority": asked}))
        assert await served_order(served, first, clients) == ["high", "normal", "low"]


async def test_a_tenant_at_its_concurrency_waits_while_places_are_free(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a={"concurrency": 1}, b={})
    async with cluster(tenants_file=path) as served:
        served.decode[0].plan(hang())
        first = await waiting(served, "a", "first")
        await served.decode[0].received(1)
        second = await waiting(served, "a", "second")
        assert (served.router.requests_in_flight, served.router.requests_queued) == (1, 1)
        assert (await served.ask("POST", "/generate", {"input_ids": [1]}, bearer("b"))).status == 200
        assert served.router.requests_queued == 1
        first.close()
        assert (await second.reply()).status == 200
        second.close()


async def test_what_leaves_the_queue_gives_its_budgets_back(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a={"tokens_per_minute": 100, "requests_per_minute": 5, "concurrency": 1})
    async with cluster(tenants_file=path) as served:
        served.decode[0].script = hang()
        first = await waiting(served, "a", "first", 40)
        second = await waiting(served, "a", "second", 40)
        tenants = served.router.tenants
        assert tenants is not None
        bucket = tenants.account("a").tokens
        assert bucket is not None
        assert bucket.level < 20
        second.close()
        await served.until(lambda: bucket.level > 50)
        requests = tenants.account("a").requests
        assert requests is not None
        assert 4 <= requests.level < 4.9
        first.close()
