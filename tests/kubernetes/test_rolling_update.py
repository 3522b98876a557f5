"""Three routers and SGLang instances on a real API server: one group, and replaced under load without a lost request.

What stands in for pods, kubelet and controllers is that of `bench/rolling_update.py`, which does this at length.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from rolling_update import BOUNDARY_TOKENS, Deployment
from support.kubernetes_api_server import ApiServer
from support.rolling_pods import Pod
from support.steady_load import SteadyLoad
from support.tiny_model import tiny_model

pytestmark = pytest.mark.kubernetes

ADMIN = {"authorization": "Bearer admin"}
OPTIONS = ("--controller", "on", "--controller-lease", "sglang-ext", "--admin-api-key", "admin")
NOTICED_WITHIN_S = 5.0  # by every router; a change is sent at once
LEASE_EXPIRES_WITHIN_S = 30.0  # 15 to 17 s and what a loaded machine adds


class Client:
    """Asks single routers."""

    def __init__(self, session: aiohttp.ClientSession, deployment: Deployment) -> None:
        self._session = session
        self._deployment = deployment

    @property
    def routers(self) -> list[Pod]:
        return self._deployment.cluster.of("router")

    async def ask(
        self, router: Pod, method: str, path: str, body: object = None, accepted: tuple[int, ...] = (200, 202)
    ) -> tuple[Any, Mapping[str, str]]:
        """JSON (or text) and headers of a reply."""
        async with self._session.request(method, router.url + path, json=body, headers=ADMIN) as reply:
            text = await reply.text()
            assert reply.status in accepted, f"{method} {path}: {reply.status} {text}"
            is_json = reply.content_type == "application/json"
            return json.loads(text) if is_json else text, reply.headers

    async def workers(self, router: Pod) -> dict[str, str]:
        """State by URL."""
        listed, _ = await self.ask(router, "GET", "/workers")
        return {one["url"]: one["state"] for one in listed["workers"]}

    async def leaders(self) -> list[Pod]:
        """The routers that hold the Lease."""
        name = "sglang_ext_router_controller_leader"
        pages = [(router, (await self.ask(router, "GET", "/metrics"))[0]) for router in self.routers]
        return [router for router, page in pages if f"\n{name} 1.0\n" in page or f"\n{name} 1\n" in page]

    async def until_all(self, is_so: Callable[[dict[str, str]], bool], within_s: float = NOTICED_WITHIN_S) -> None:
        """Wait until it is true of the instances that each router knows."""
        deadline_s = time.monotonic() + within_s
        while not all([is_so(await self.workers(router)) for router in self.routers]):
            assert time.monotonic() < deadline_s, [await self.workers(router) for router in self.routers]
            await asyncio.sleep(0.1)

    async def one_leader(self, other_than: Pod | None, within_s: float) -> Pod:
        """The router that leads; never are there two."""
        deadline_s = time.monotonic() + within_s
        while True:
            found = await self.leaders()
            assert len(found) <= 1
            if found and found[0] is not other_than:
                return found[0]
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.2)


def generate(text: str, tokens: int = 4) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


async def act_as_one(client: Client) -> None:
    """What one router of the group knows or is asked to do, all know."""
    first, *others = client.routers
    leader = await client.one_leader(None, LEASE_EXPIRES_WITHIN_S)
    assert leader in client.routers
    draw = random.Random(1)
    for _ in range(3):
        text = "".join(draw.choices(string.ascii_lowercase + " ", k=400))
        _, headers = await client.ask(first, "POST", "/generate", generate(text))
        await asyncio.sleep(1.0)  # it is sent every 0.2 s
        for router in others:
            reply, later = await client.ask(router, "POST", "/generate", generate(text + "and so on"))
            assert later["x-sglang-ext-prefill"] == headers["x-sglang-ext-prefill"]
            assert reply["meta_info"]["cached_tokens"] > 0
    url = "http://127.0.0.1:9"
    await client.ask(first, "POST", "/workers", {"url": url, "role": "decode", "revision": "v9"})
    await client.until_all(lambda known: url in known)
    listed, _ = await client.ask(others[0], "GET", "/workers")
    (added,) = [one for one in listed["workers"] if one["url"] == url]
    assert added["revision"] == "v9"
    await client.ask(others[1], "DELETE", "/workers/127.0.0.1:9")
    await client.until_all(lambda known: url not in known)


async def replace_under_load(deployment: Deployment, client: Client) -> None:
    """A prefill and a decode instance, and the router that leads."""
    cluster = deployment.cluster
    load = SteadyLoad(deployment.router_urls, users=4, period_s=1.0, boundary_tokens=BOUNDARY_TOKENS)
    async with load:
        await asyncio.sleep(2.0)
        for role in ("prefill-short", "decode"):
            old = cluster.of(role)[0]
            new = await deployment.add_worker(role, "v1")
            await client.until_all(lambda known, url=new.url: known.get(url) == "ready", 20.0)  # type: ignore[misc]
            ending = asyncio.create_task(cluster.delete(old))
            await client.until_all(lambda known, url=old.url: known.get(url) in {"draining", None})  # type: ignore[misc]
            noticed_s = time.monotonic()
            end = await ending
            assert (end.status, end.was_killed) == (0, False)
            await client.until_all(lambda known, url=old.url: url not in known)  # type: ignore[misc]
            since = [one for one in load.ended if one.started_s > noticed_s]
            assert not [one for one in since if old.url in {one.prefill, one.decode}]
        leader = await client.one_leader(None, 5.0)
        await deployment.add_router()
        end = await cluster.delete(leader)
        assert (end.status, end.was_killed) == (0, False)
        await client.one_leader(leader, LEASE_EXPIRES_WITHIN_S)
        await asyncio.sleep(2.0)
    assert [one for one in load.ended if one.outcome != "ok"] == []
    assert len(load.ended) > 30
    assert {one.router for one in load.ended} > {router.url for router in client.routers}


def test_three_routers_act_as_one_and_are_replaced_with_their_instances_under_load(tmp_path: Path) -> None:
    async def main() -> None:
        server = ApiServer(tmp_path)
        deployment: Deployment | None = None
        try:
            await server.start()
            deployment = Deployment(server, tmp_path, tiny_model(), OPTIONS)
            pods = ("prefill-short", "prefill-short", "decode")
            await asyncio.gather(*(deployment.add_worker(role, "v1") for role in pods))
            await asyncio.gather(*(deployment.add_router() for _ in range(3)))
            async with aiohttp.ClientSession() as session:
                client = Client(session, deployment)
                urls = {pod.url for pod in deployment.cluster.pods if pod.service.role}
                await client.until_all(lambda known: all(known.get(url) == "ready" for url in urls), 20.0)
                await act_as_one(client)
                await replace_under_load(deployment, client)
                killed = await client.one_leader(None, LEASE_EXPIRES_WITHIN_S)
                deployment.cluster.kill(killed)  # as by SIGKILL: nothing is released
                deployment.cluster.pods.remove(killed)
                await client.one_leader(killed, LEASE_EXPIRES_WITHIN_S)
        finally:
            if deployment is not None:
                deployment.close()
            await server.stop()

    asyncio.run(main())
