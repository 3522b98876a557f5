"""Of several routers one leads; another does once that one is gone, and none that cannot reach the API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sglang_ext_router.config import RouterConfig, RouterConfigError
from sglang_ext_router.decide.leadership import LeaseSettings
from sglang_ext_router.group.lease import LeaseHolder
from sglang_ext_router.instances.kubernetes_api import connect_kubernetes
from support.router_process import until
from support.scripted_kubernetes import ScriptedKubernetes

QUICK = LeaseSettings(duration_s=1.2, renew_deadline_s=0.8, retry_s=0.1)


@asynccontextmanager
async def candidates(count: int) -> AsyncIterator[tuple[ScriptedKubernetes, list[LeaseHolder]]]:
    api = ScriptedKubernetes()
    await api.start()
    loop = asyncio.get_running_loop()
    open_api = connect_kubernetes(RouterConfig(kubernetes_url=api.url))
    holders = [LeaseHolder("controller", "default", open_api, loop, QUICK) for _ in range(count)]
    try:
        for one in holders:
            one.start()
        yield api, holders
    finally:
        for one in holders:
            await one.stop()
        await api.stop()


def leaders(holders: list[LeaseHolder]) -> list[LeaseHolder]:
    return [one for one in holders if one.is_leader]


@pytest.mark.slow
async def test_one_leads_and_the_next_one_when_it_stops() -> None:
    async with candidates(3) as (api, holders):
        await until(lambda: len(leaders(holders)) == 1)
        for _ in range(15):
            await asyncio.sleep(0.1)
            assert len(leaders(holders)) <= 1
        (first,) = leaders(holders)
        await first.stop()
        assert api.leases["controller"]["spec"]["holderIdentity"] == ""
        await until(lambda: len(leaders(holders)) == 1, 0.9)  # sooner than the lease would have ended
        assert leaders(holders) != [first]
        assert api.leases["controller"]["spec"]["leaseTransitions"] == 2


@pytest.mark.slow
async def test_another_one_leads_when_the_holder_is_killed() -> None:
    async with candidates(2) as (_, holders):
        await until(lambda: len(leaders(holders)) == 1)
        (first,) = leaders(holders)
        assert first._task is not None
        first._task.cancel()  # as if killed: nothing is released
        (other,) = [one for one in holders if one is not first]
        await until(lambda: other.is_leader)
        assert not first.is_leader


@pytest.mark.slow
async def test_without_the_api_server_none_leads_after_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    async with candidates(2) as (api, holders):
        await until(lambda: len(leaders(holders)) == 1)
        api.refusal = (500, "etcd has no leader")
        await until(lambda: not leaders(holders))
        assert "etcd has no leader" in caplog.text
        api.refusal = None
        await until(lambda: len(leaders(holders)) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["gone", "no metadata", "no spec"])
async def test_an_answer_that_is_no_lease_ends_no_candidacy(answer: str) -> None:
    async with candidates(2) as (api, holders):
        await until(lambda: len(leaders(holders)) == 1)
        lease = api.leases["controller"]
        if answer == "gone":
            api.refusal = (410, "a proxy says so")
        else:
            api.leases["controller"] = {} if answer == "no metadata" else {**lease, "spec": "x"}
        await until(lambda: all(one.last_error for one in holders))
        await until(lambda: not leaders(holders))
        api.refusal, api.leases["controller"] = None, lease
        await until(lambda: len(leaders(holders)) == 1)


def test_a_lease_without_a_controller_is_refused() -> None:
    with pytest.raises(RouterConfigError, match="--controller-lease needs --controller on"):
        RouterConfig(controller_lease="x")
