"""Instances come and go as the cluster says, and stay whatever happens to its API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, RouterConfigError
from sglang_ext_router.instances import discovery as discovery_module
from sglang_ext_router.instances.discovery import Discovery, role_rules
from sglang_ext_router.instances.kubernetes_api import connect_kubernetes
from support.router_process import FAST, RunningRouter, cluster, running_router
from support.scripted_engine import ScriptedEngine, hang
from support.scripted_kubernetes import ScriptedKubernetes, endpoint, endpoint_slice

BODY = {"text": "x"}


def config_for(api: ScriptedKubernetes, **options: Any) -> RouterConfig:
    found = replace(FAST, service_discovery=True, kubernetes_url=api.url, service_discovery_namespace="default")
    return replace(found, **options)


@contextlib.asynccontextmanager
async def discovering(**options: Any) -> AsyncIterator[tuple[RunningRouter, ScriptedKubernetes]]:
    """A router that knows no instance but those of the scripted API server."""
    api = ScriptedKubernetes()
    await api.start()
    try:
        async with running_router(config_for(api, **options)) as served:
            yield served, api
    finally:
        await api.stop()


def known(served: RunningRouter) -> dict[str, tuple[Role, int | None, bool]]:
    return {one.url: (one.role, one.bootstrap_port, one.is_draining) for one in served.router.registry}


def hosts(served: RunningRouter) -> set[str]:
    return {one.host for one in served.router.registry}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(discovery_module, "MAX_BACKOFF_S", 0.05)


async def test_requests_are_served_by_instances_that_were_found() -> None:
    engines = [ScriptedEngine(Role.SHORT), ScriptedEngine(Role.DECODE)]
    for engine in engines:
        await engine.start()
    try:
        async with discovering() as (served, api):
            await api.put(
                endpoint_slice("s", "prefill-short", endpoint("127.0.0.1"), port=engines[0].port, bootstrap=8998)
            )
            await api.put(endpoint_slice("d", "decode", endpoint("127.0.0.1"), port=engines[1].port))
            await served.until(lambda: len(served.router.registry) == 2)
            await served.until_ready(2)
            assert (await served.ask("POST", "/generate", BODY)).status == 200
            assert engines[1].requests[0].json["bootstrap_port"] == 8998
    finally:
        for engine in engines:
            await engine.stop()


async def test_an_instance_whose_place_becomes_known_serves_on() -> None:
    async with discovering() as (served, api):
        pod = endpoint("10.0.0.1")
        await api.put(endpoint_slice("d", "decode", pod))
        await served.until(lambda: len(served.router.registry) == 1)
        (worker,) = served.router.registry
        await api.put(endpoint_slice("d", "decode", {**pod, "zone": "zone-a", "nodeName": "n1"}))
        await served.until(lambda: worker.topology == "zone-a/n1")
        await api.put(endpoint_slice("d", "decode", {**endpoint("10.0.0.1", terminating=True), "nodeName": "n2"}))
        await served.until(lambda: worker.is_draining)
        assert worker.topology == "n2"
        assert tuple(served.router.registry) == (worker,)


async def test_what_is_no_slice_ends_no_discovery() -> None:
    async with discovering() as (served, api):
        strange = endpoint_slice("s", "decode")
        strange["endpoints"] = ["10.0.0.1"]
        await api.put(strange)
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.2")))
        await served.until(lambda: hosts(served) == {"10.0.0.2"})


async def test_roles_ports_and_pages() -> None:
    async with discovering() as (served, api):
        api.page_items = 2
        for number, role in enumerate(("prefill-short", "prefill-long", "prefill", "decode", "router")):
            await api.put(endpoint_slice(f"s{number}", role, endpoint(f"10.0.0.{number}"), bootstrap=9000 + number))
        await api.forget()
        await api.end_watches({"code": 410})
        await served.until(lambda: len(served.router.registry) == 4)
        assert known(served) == {
            "http://10.0.0.0:30000": (Role.SHORT, 9000, False),
            "http://10.0.0.1:30000": (Role.LONG, 9001, False),
            "http://10.0.0.2:30000": (Role.BOTH, 9002, False),
            "http://10.0.0.3:30000": (Role.DECODE, 9003, False),
        }


async def test_a_pod_comes_drains_and_goes() -> None:
    async with discovering() as (served, api):
        url = "http://10.0.0.1:30000"
        for is_ready, is_terminating, expected in (
            (False, False, {}),  # the model is being loaded
            (True, False, {url: (Role.DECODE, None, False)}),
            (False, False, {url: (Role.DECODE, None, True)}),
            (True, False, {url: (Role.DECODE, None, False)}),
            (True, True, {url: (Role.DECODE, None, True)}),
        ):
            one = endpoint("10.0.0.1", ready=is_ready, terminating=is_terminating)
            await api.put(endpoint_slice("d", "decode", one))
            await api.put(endpoint_slice("mark", "decode", endpoint(f"10.9.{api.version}.9")))
            await served.until(lambda: f"10.9.{api.version - 1}.9" in hosts(served))
            assert {key: value for key, value in known(served).items() if "10.9." not in key} == expected
        await api.put(endpoint_slice("d", "decode"))
        await served.until(lambda: "10.0.0.1" not in hosts(served))


async def test_another_pod_at_the_same_address_is_another_instance() -> None:
    async with discovering() as (served, api):
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.1", uid="a")))
        await served.until(lambda: "10.0.0.1" in hosts(served))
        first = served.worker("http://10.0.0.1:30000")
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.1", uid="b")))
        await served.until(lambda: served.router.registry.find(first.url) not in {None, first})


async def test_what_terminates_finishes_what_it_has() -> None:
    engines = [ScriptedEngine(Role.SHORT), ScriptedEngine(Role.DECODE)]
    for engine in engines:
        await engine.start()
    try:
        async with discovering() as (served, api):
            pods = [endpoint("127.0.0.1", uid=str(number)) for number in range(2)]
            await api.put(endpoint_slice("s", "prefill-short", pods[0], port=engines[0].port))
            await api.put(endpoint_slice("d", "decode", pods[1], port=engines[1].port))
            await served.until(lambda: len(served.router.registry) == 2)
            await served.until_ready(2)
            engines[1].plan(hang())
            async with await served.connect() as client:
                await client.send(
                    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n" + b'{"text": "x"}'
                )
                await engines[1].received(1)
                leaving = endpoint("127.0.0.1", uid="1", terminating=True)
                await api.put(endpoint_slice("d", "decode", leaving, port=engines[1].port))
                await served.until(lambda: served.worker(engines[1].url).is_draining)
                assert len(served.router.running) == 1
                assert (await served.ask("POST", "/generate", BODY)).status == 503
                await api.delete("d")
                await served.until(lambda: served.router.registry.find(engines[1].url) is None)
                assert len(served.router.running) == 1, "what it is serving runs to its end"
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.parametrize("by_event", [False, True])
async def test_an_expired_version_is_listed_again(by_event: bool) -> None:
    async with discovering() as (served, api):
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.1")))
        await served.until(lambda: "10.0.0.1" in hosts(served))
        api.expires_by_event = by_event
        await api.put(endpoint_slice("e", "decode", endpoint("10.0.0.2")), is_told=False)
        await api.delete("d", is_told=False)
        await api.forget()
        lists = api.lists
        await api.end_watches()
        await served.until(lambda: hosts(served) == {"10.0.0.2"})
        assert api.lists == lists + 1


@pytest.mark.full
@pytest.mark.parametrize("what", ["a list that has expired", "watches that end at once", "no events"])
async def test_the_api_server_is_not_asked_without_pause(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a server nor a proxy before it that answers at once, and always the same, is flooded."""
    monkeypatch.setattr(discovery_module, "FIRST_BACKOFF_S", 0.5)
    monkeypatch.setattr(discovery_module, "MAX_BACKOFF_S", 0.5)
    requests = 0

    async def serve(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        if what == "a list that has expired":
            return web.json_response({"code": 410}, status=410)
        if "watch" in request.query:
            return web.Response(text="[]\n" if what == "no events" else "")
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    api = ScriptedKubernetes()
    api._serve = serve  # type: ignore[method-assign, assignment]
    await api.start()
    try:
        async with running_router(config_for(api)) as served:
            await asyncio.sleep(2.0)
            assert 1 <= requests <= 20  # without a pause thousands
            assert served.router.discovery is not None
            assert not any(task.done() for task in served.router.discovery._tasks)
    finally:
        await api.stop()


@pytest.mark.slow
async def test_a_lost_event_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "LIST_AGAIN_S", 0.2)
    async with discovering() as (served, api):
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
        await served.until(lambda: len(hosts(served)) == 2)
        await api.delete("d", is_told=False)
        await asyncio.sleep(0.25)
        assert len(hosts(served)) == 2
        await api.bookmark()
        await served.until(lambda: not hosts(served))


async def test_a_watch_that_ends_goes_on_where_it_was() -> None:
    async with discovering() as (served, api):
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.1")))
        await served.until(lambda: "10.0.0.1" in hosts(served))
        lists = api.lists
        for number in range(2, 6):
            await api.end_watches()
            await api.put(endpoint_slice(f"d{number}", "decode", endpoint(f"10.0.0.{number}")))
            await served.until(lambda: f"10.0.0.{number}" in hosts(served))  # noqa: B023
        assert api.lists == lists, "nothing had to be listed again"


async def test_an_outage_leaves_what_was_known(caplog: pytest.LogCaptureFixture) -> None:
    async with discovering() as (served, api):
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
        await served.until(lambda: len(hosts(served)) == 2)
        await api.stop()
        assert served.router.discovery is not None
        await served.until(lambda: bool(served.router.discovery.last_error))
        assert hosts(served) == {"10.0.0.1", "10.0.0.2"}
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.2"), endpoint("10.0.0.3")), is_told=False)
        await api.forget()
        await api.start()
        await served.until(lambda: hosts(served) == {"10.0.0.2", "10.0.0.3"})
        assert not served.router.discovery.last_error
        complaints = [record for record in caplog.records if "last known instances" in record.message]
        assert 1 <= len(complaints) <= 3, "not one for every try"


@pytest.mark.slow
async def test_a_refusal_says_what_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    async with discovering() as (served, api):
        await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.1")))
        await served.until(lambda: "10.0.0.1" in hosts(served))
        api.refusal = (403, "endpointslices is forbidden")
        await api.end_watches()
        await served.until(lambda: "see docs/how-to/kubernetes.md for what the service account needs" in caplog.text)
        assert hosts(served) == {"10.0.0.1"}
        api.refusal = (500, "etcd has no leader")
        await served.until(lambda: "etcd has no leader" in caplog.text)
        api.refusal = None
        await api.delete("d")
        await served.until(lambda: not hosts(served))


async def test_a_rotated_token_is_read_anew(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    api = ScriptedKubernetes()
    api.token = "one"
    await api.start()
    try:
        async with running_router(config_for(api, kubernetes_token_file=str(token))) as served:
            await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.1")))
            await served.until(lambda: "10.0.0.1" in hosts(served))
            api.token = "two"
            token.write_text("two")
            await api.end_watches()
            await api.put(endpoint_slice("d", "decode", endpoint("10.0.0.2")))
            await served.until(lambda: hosts(served) == {"10.0.0.2"})
    finally:
        await api.stop()


async def test_selectors_find_slices_without_our_label() -> None:
    async with discovering(decode_selector="app=llm,part=decode", prefill_short_selector="app=llm,part=short") as (
        served,
        api,
    ):
        await api.put(endpoint_slice("a", "", endpoint("10.0.0.1"), labels={"app": "llm", "part": "decode"}))
        await api.put(endpoint_slice("b", "", endpoint("10.0.0.2"), labels={"app": "llm", "part": "short", "x": "y"}))
        await api.put(endpoint_slice("c", "", endpoint("10.0.0.3"), labels={"app": "llm"}))
        await api.put(endpoint_slice("d", "prefill-long", endpoint("10.0.0.4")))
        await served.until(lambda: len(hosts(served)) == 3)
        roles = {one.host: one.role for one in served.router.registry}
        assert roles == {"10.0.0.1": Role.DECODE, "10.0.0.2": Role.SHORT, "10.0.0.4": Role.LONG}


async def test_what_others_added_is_left_alone() -> None:
    async with cluster() as given:
        url = given.decode[0].url
        api = ScriptedKubernetes()
        await api.start()
        given.router.discovery = Discovery(
            RouterConfig(service_discovery=True, service_discovery_namespace="default"),
            given.router,
            connect_kubernetes(RouterConfig(kubernetes_url=api.url)),
        )
        given.router.discovery.start()
        try:
            before = given.worker(url)
            for one in (endpoint("127.0.0.1"), endpoint("127.0.0.1", terminating=True)):
                await api.put(endpoint_slice("d", "decode", one, endpoint("10.0.0.1"), port=given.decode[0].port))
                await given.until(lambda: "10.0.0.1" in hosts(given))
            await api.delete("d")
            await given.until(lambda: "10.0.0.1" not in hosts(given))
            assert given.worker(url) is before
            assert not before.is_draining
        finally:
            await api.stop()


async def test_a_slice_that_cannot_be_used_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with discovering() as (served, api):
        bad = endpoint_slice("bad", "decode", endpoint("10.0.0.1"))
        bad["ports"] = [{"name": "a", "port": 1}, {"name": "b", "port": 2}]
        await api.put(bad)
        await api.put(endpoint_slice("good", "decode", endpoint("10.0.0.2")))
        await served.until(lambda: hosts(served) == {"10.0.0.2"})
        assert "EndpointSlice bad: none of its ports is named http" in caplog.text


def test_options_that_cannot_work_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(RouterConfigError, match="--service-discovery outside a cluster needs discovery"):
        connect_kubernetes(RouterConfig())
    with pytest.raises(RouterConfigError, match=r"discovery.kubernetes_token_file: .*: there is no such file"):
        connect_kubernetes(RouterConfig(kubernetes_url="http://a:1", kubernetes_token_file=str(tmp_path / "none")))
    with pytest.raises(RouterConfigError, match=r"discovery\.kubernetes_ca_file"):
        connect_kubernetes(RouterConfig(kubernetes_url="https://a:1", kubernetes_ca_file=str(tmp_path / "none")))
    with pytest.raises(RouterConfigError, match=r"--decode-selector: 'x' is not of the form KEY=VALUE"):
        role_rules(RouterConfig(decode_selector="x"))
