"""Discovery, rights and the lease on a real API server: what a scripted one cannot prove."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.decide.leadership import LeaseSettings
from sglang_ext_router.group.lease import LeaseHolder
from sglang_ext_router.instances.kubernetes_api import ApiAnswerError, connect_kubernetes
from support.kubernetes_api_server import NAMESPACE, SLICES, ApiServer
from support.router_process import FAST, RunningRouter, running_router, until
from support.scripted_engine import ScriptedEngine
from support.scripted_kubernetes import endpoint, endpoint_slice

pytestmark = pytest.mark.kubernetes


@asynccontextmanager
async def api_server(folder: Path) -> AsyncIterator[ApiServer]:
    server = ApiServer(folder)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


def config_of(server: ApiServer) -> RouterConfig:
    return replace(
        FAST,
        service_discovery=True,
        service_discovery_namespace=NAMESPACE,
        kubernetes_url=server.url,
        kubernetes_ca_file=str(server.ca_file),
        kubernetes_token_file=str(server.token_file),
    )


def hosts(served: RunningRouter) -> set[str]:
    return {one.host for one in served.router.registry}


def run(main: object) -> None:
    asyncio.run(main)  # type: ignore[arg-type]


def test_instances_come_and_go_with_their_slices(tmp_path: Path) -> None:
    async def main() -> None:
        engines = [ScriptedEngine(Role.SHORT), ScriptedEngine(Role.DECODE)]
        for engine in engines:
            await engine.start()
        async with api_server(tmp_path) as server, running_router(config_of(server)) as served:
            pod = endpoint("127.0.0.1")
            await server.put_slice(endpoint_slice("s", "prefill-short", pod, port=engines[0].port, bootstrap=8998))
            await server.put_slice(endpoint_slice("d", "decode", pod, port=engines[1].port))
            await served.until(lambda: len(served.router.registry) == 2, 10.0)
            await served.until_ready(2)
            assert (await served.ask("POST", "/generate", {"text": "x"})).status == 200
            leaving = endpoint("127.0.0.1", terminating=True)
            await server.put_slice(endpoint_slice("d", "decode", leaving, port=engines[1].port))
            await served.until(lambda: served.worker(engines[1].url).is_draining, 10.0)
            assert (await served.ask("POST", "/generate", {"text": "x"})).status == 503
            await server.delete_slice("d")
            await served.until(lambda: served.router.registry.find(engines[1].url) is None, 10.0)
        for engine in engines:
            await engine.stop()

    run(main())


def test_many_slices_and_an_api_server_that_is_killed(tmp_path: Path) -> None:
    """More than a page of them; what happened while it was away is made up for."""

    async def main() -> None:
        async with api_server(tmp_path) as server:
            for number in range(510):
                host = f"10.1.{number // 250}.{number % 250}"
                await server.put_slice(endpoint_slice(f"s{number}", "decode", endpoint(host)))
            async with running_router(config_of(server)) as served:
                await served.until(lambda: len(hosts(served)) == 510, 20.0)
                await server.kill_and_restart(after_s=1.0)
                assert len(hosts(served)) == 510
                await server.delete_slice("s7")
                await server.put_slice(endpoint_slice("new", "decode", endpoint("10.2.0.1")))
                await served.until(lambda: "10.2.0.1" in hosts(served) and "10.1.0.7" not in hosts(served), 60.0)
                await server.send("DELETE", SLICES)
                await served.until(lambda: not hosts(served), 20.0)

    run(main())


def test_the_documented_rights_are_enough_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with api_server(tmp_path) as server:
            api = connect_kubernetes(config_of(server))()
            items, version = await api.list(SLICES, "a=b")
            assert items == []
            assert version
            for method, path in (
                ("GET", f"/api/v1/namespaces/{NAMESPACE}/pods"),
                ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
                ("GET", SLICES.replace(NAMESPACE, "kube-system")),
                ("DELETE", f"{SLICES}/x"),
                ("GET", "/apis/discovery.k8s.io/v1/endpointslices"),
            ):
                with pytest.raises(ApiAnswerError, match="403"):
                    await api.send(method, path)
            await api.close()

    run(main())


def test_one_of_several_routers_holds_the_lease(tmp_path: Path) -> None:
    quick = LeaseSettings(duration_s=3.0, renew_deadline_s=2.0, retry_s=0.3)

    async def main() -> None:
        async with api_server(tmp_path) as server:
            open_api = connect_kubernetes(config_of(server))
            loop = asyncio.get_running_loop()
            holders = [LeaseHolder("controller", NAMESPACE, open_api, loop, quick) for _ in range(3)]
            for one in holders:
                one.start()

            def leaders() -> list[LeaseHolder]:
                found = [one for one in holders if one.is_leader]
                assert len(found) <= 1
                return found

            try:
                await until(lambda: len(leaders()) == 1, 10.0)
                (first,) = leaders()
                await first.stop()
                await until(lambda: bool(leaders()), 2.5)  # released: nothing has to run out
                (second,) = leaders()
                assert second._task is not None
                second._task.cancel()  # as if killed
                await until(lambda: bool(leaders()) and leaders() != [second], 10.0)
                await server.kill_and_restart()
                await until(lambda: bool(leaders()), 30.0)
            finally:
                for one in holders:
                    await one.stop()

    run(main())
