"""What a router shows of its peers, of the Lease and of discovery: as it is, and as it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_ext_router.group import peers as peers_module
from sglang_ext_router.instances import discovery as discovery_module
from sglang_ext_router.observe.exposition import PREFIX
from support.linked_routers import peer_group
from support.router_process import FAST, RunningRouter, running_router
from support.running_time import running_s
from support.scripted_kubernetes import ScriptedKubernetes, endpoint, endpoint_slice


async def shown(served: RunningRouter) -> dict[str, float]:
    """By name without the prefix, and a label's value where there is one."""
    page = (await served.ask("GET", "/metrics")).body.decode()
    return {
        " ".join([sample.name.removeprefix(PREFIX), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def until_shown(served: RunningRouter, **expected: float) -> None:
    end_s = running_s() + 10.0
    while True:
        found = await shown(served)
        if all(found.get(name.replace("__", " ")) == value for name, value in expected.items()):
            return
        assert running_s() < end_s, {name: found.get(name.replace("__", " ")) for name in expected}
        await asyncio.sleep(0.02)


@asynccontextmanager
async def kubernetes() -> AsyncIterator[ScriptedKubernetes]:
    api = ScriptedKubernetes()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(discovery_module, "MAX_BACKOFF_S", 0.05)
    monkeypatch.setattr(peers_module, "INTERVAL_S", 0.05)
    monkeypatch.setattr(peers_module, "FORGET_AFTER_S", 1.0)


@pytest.mark.slow
async def test_peers_that_are_found_connected_and_received() -> None:
    async with peer_group(3) as (first, second, third):
        for one in (first, second, third):
            await until_shown(one, peers_found=2, peers_connected=2, peers_received=2)
        await third.router.siblings.stop()  # as if its process had been killed; its address is still among the options
        for one in (first, second):
            await until_shown(one, peers_found=2, peers_connected=1, peers_received=1)
        assert (await shown(first))["peer_messages_skipped_total"] == 0


async def test_a_router_without_a_group_or_a_cluster_shows_nothing_of_them() -> None:
    async with running_router(FAST) as served:
        names = set(await shown(served))
    assert not {name for name in names if name.startswith(("peer", "controller_lea", "discovery_"))}


@pytest.mark.slow
async def test_discovery_is_connected_while_the_api_server_answers() -> None:
    async with kubernetes() as api:
        config = replace(FAST, service_discovery=True, kubernetes_url=api.url, service_discovery_namespace="default")
        async with running_router(config) as served:
            await until_shown(served, discovery_connected=1, discovery_endpoints__serving=0)
            pods = endpoint("10.0.0.1"), endpoint("10.0.0.2")
            await api.put(endpoint_slice("d", "decode", *pods, endpoint("10.0.0.3")))
            await until_shown(served, discovery_endpoints__serving=3)
            await api.put(endpoint_slice("d", "decode", *pods, endpoint("10.0.0.3", terminating=True)))
            await until_shown(served, discovery_endpoints__serving=2, discovery_endpoints__draining=1)
            lists = api.lists
            await api.stop()
            await until_shown(served, discovery_connected=0, discovery_endpoints__serving=2)
            await asyncio.sleep(0.3)
            assert (await shown(served))["discovery_sync_age_seconds"] >= 0.3
            await api.start()
            # By the watch alone, which goes on where it was, and is quiet.
            await until_shown(served, discovery_connected=1)
            assert api.lists == lists
            assert (await shown(served))["discovery_sync_age_seconds"] < 5.0


@pytest.mark.slow
async def test_discovery_that_is_refused_from_the_start() -> None:
    async with kubernetes() as api:
        api.refusal = (403, "no")
        config = replace(FAST, service_discovery=True, kubernetes_url=api.url, service_discovery_namespace="default")
        async with running_router(config) as served:
            await until_shown(served, discovery_connected=0)
            assert "discovery_sync_age_seconds" not in await shown(served)


@pytest.mark.slow
async def test_one_router_leads() -> None:
    async with kubernetes() as api:
        options = {"controller": "on", "controller_lease": "c", "kubernetes_url": api.url}
        config = replace(FAST, service_discovery_namespace="default", **options)
        async with running_router(config) as first:
            await until_shown(first, controller_leader=1, controller_lease_connected=1)
            async with running_router(config) as second:
                await until_shown(second, controller_leader=0, controller_lease_connected=1)
                api.refusal = (500, "broken")
                await until_shown(second, controller_leader=0, controller_lease_connected=0)


async def test_moves_are_counted_from_zero() -> None:
    """So that the first one is an increase."""
    async with running_router(FAST) as served:
        moves = {name: value for name, value in (await shown(served)).items() if name.startswith("pool_moves_total")}
    assert len(moves) == 16  # short and long, prefill and decode; both ways, four outcomes
    assert set(moves.values()) == {0.0}
