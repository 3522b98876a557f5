"""An instance that is asked to end: what it has is served, what comes too late is refused, and then it ends."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("sglang_imported")


class Served:
    """An application whose requests last until `release`."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def ask(gate: Any, application: Any, method: str = "POST", path: str = "/generate") -> int:
    """The status of an answer."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await gate.serve(application, {"type": "http", "method": method, "path": path}, None, send)
    return int(sent[0]["status"])


@pytest.fixture
def shutdown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with times that suit a test."""
    from sglang_ext.engine.hooks import shutdown as module

    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "IDLE_S", 0.03)
    monkeypatch.setattr(module, "GATE", module.ShutdownGate())
    return module


def manager(rids: dict[str, Any], is_ill: bool = False) -> Any:
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    status = ServerStatus.UnHealthy if is_ill else ServerStatus.Up
    return SimpleNamespace(gracefully_exit=False, rid_to_state=rids, server_status=status)


@pytest.mark.slow
def test_it_ends_when_nothing_is_left_and_refuses_what_still_comes(shutdown: Any) -> None:
    async def main() -> None:
        one, ended = manager({"a": None}), asyncio.Event()

        async def stock(_: Any) -> None:
            ended.set()

        served = Served()
        asking = asyncio.create_task(ask(shutdown.GATE, served))
        ending = asyncio.create_task(shutdown.end_when_idle(stock, one))
        await asyncio.sleep(0.06)
        assert not ended.is_set()  # it was not asked to
        one.gracefully_exit = True
        await asyncio.sleep(0.06)
        assert not ended.is_set()  # a request is known
        one.rid_to_state.clear()
        await asyncio.sleep(0.06)
        assert not ended.is_set()  # an answer is not yet with its client
        served.release.set()
        assert await asking == 200
        await asyncio.wait_for(ending, 5.0)
        assert ended.is_set()
        assert await ask(shutdown.GATE, served) == 503
        assert await ask(shutdown.GATE, served, "GET", "/v1/loads") == 503

    asyncio.run(main())


@pytest.mark.slow
def test_new_requests_do_not_hold_up_the_end_for_ever(shutdown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "NEW_REQUESTS_FOR_S", 0.0)

    async def main() -> None:
        one, served = manager({"a": None}), Served()
        served.release.set()
        one.gracefully_exit = True

        async def stock(_: Any) -> None: ...

        ending = asyncio.create_task(shutdown.end_when_idle(stock, one))
        await asyncio.sleep(0.01)
        assert await ask(shutdown.GATE, served) == 503
        assert await ask(shutdown.GATE, served, "POST", "/abort_request") == 200  # what it has may be aborted
        assert await ask(shutdown.GATE, served, "GET", "/ping") == 200
        one.rid_to_state.clear()
        await asyncio.wait_for(ending, 5.0)

    asyncio.run(main())


@pytest.mark.parametrize("reason", ["ill", "forced"])
def test_what_sglang_would_not_wait_for_is_not_waited_for(
    shutdown: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "forced":
        monkeypatch.setenv(shutdown.FORCE_VARIABLE, "1")

    async def main() -> None:
        one, ended = manager({"a": None}, is_ill=reason == "ill"), asyncio.Event()
        one.gracefully_exit = True

        async def stock(_: Any) -> None:
            ended.set()

        await asyncio.wait_for(shutdown.end_when_idle(stock, one), 5.0)
        assert ended.is_set()

    asyncio.run(main())
