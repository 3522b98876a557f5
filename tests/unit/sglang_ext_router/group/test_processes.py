"""Processes of one router tell each other of instances, loads, prefixes and counters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from sglang_ext_router.group import peers as peers_module
from sglang_ext_router.group.shared_state import MembershipTable
from support.engines import free_port
from support.linked_routers import processes
from support.raw_client import BrokenReplyError, RawClient
from support.router_process import RunningRouter, until
from support.scripted_engine import ScriptedEngine, hang, reply

PROMPT = {"text": "x"}
ADMIN = {"Authorization": "Bearer admin"}


def pair() -> list[ScriptedEngine]:
    return [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]


async def test_a_change_made_at_one_is_made_at_all(tmp_path: Path) -> None:
    engines = pair()
    async with processes(tmp_path, engines, 3) as running:
        extra = ScriptedEngine(Role.DECODE)
        await extra.start()
        try:
            new = {"url": extra.url, "role": "decode", "context_length_range": "1-500"}
            answer = await running[0].ask("POST", "/workers", new, ADMIN)
            assert answer.status == 202
            for one in running:
                await until(lambda one=one: one.router.registry.find(extra.url) is not None, 2.0)  # type: ignore[misc]
                await one.until_ready(3)
                assert one.worker(extra.url).token_range == (1, 500)
            name = engines[1].url.removeprefix("http://")
            await running[1].ask("POST", f"/workers/{name}/drain", {"drain": True}, ADMIN)
            for one in running:
                await until(lambda one=one: one.worker(engines[1].url).is_draining, 2.0)  # type: ignore[misc]
                assert (await one.ask("POST", "/generate", PROMPT)).status == 200
            assert len(extra.requests) == 3
            await running[2].ask("DELETE", f"/workers/{extra.url.removeprefix('http://')}", headers=ADMIN)
            for one in running:
                await until(lambda one=one: one.router.registry.find(extra.url) is None, 2.0)  # type: ignore[misc]
        finally:
            await extra.stop()


def told_by(one: RunningRouter) -> dict[str, Any]:
    """What `GET /load` of this process tells a batch run of short prompts."""
    told: dict[str, Any] = one.router.describe_load([one.model])["classes"]["short"]
    return told


@pytest.mark.slow
async def test_the_load_of_all_counts(tmp_path: Path) -> None:
    engines = [*pair(), ScriptedEngine(Role.DECODE)]
    async with processes(tmp_path, engines) as running:
        for engine in engines:
            engine.script = hang()
        clients = []
        for _ in range(4):
            client = await running[0].connect()
            await client.send(b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{"text": "x"}')
            clients.append(client)
        other = running[1].worker(engines[0].url)
        await until(lambda: other.sibling_in_flight == 4, 2.0)
        assert other.sibling_tokens == 4
        assert other.in_flight == 0
        await until(lambda: told_by(running[1])["online_in_flight"] == 4, 2.0)
        assert told_by(running[1])["online_wait_s"] >= 0.0
        for client in clients:
            client.close()
        await until(lambda: other.sibling_in_flight == 0, 2.0)
        await until(lambda: told_by(running[1])["online_in_flight"] == 0, 2.0)


@pytest.mark.slow
async def test_a_process_that_is_gone_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "PROCESS_FORGET_AFTER_S", 0.3)
    engines = pair()
    async with processes(tmp_path, engines) as running:
        for engine in engines:
            engine.script = hang()
        client = await running[0].connect()
        await client.send(b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{"text": "x"}')
        other = running[1].worker(engines[0].url)
        await until(lambda: other.sibling_in_flight == 1, 2.0)
        assert running[1].router.planner.router_count == 2
        await running[0].router.siblings.stop()
        await until(lambda: other.sibling_in_flight == 0, 2.0)
        assert running[1].router.planner.router_count == 1
        client.close()


@pytest.mark.slow
async def test_prefixes_are_shared(tmp_path: Path) -> None:
    text = "word " * 400
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    async with processes(tmp_path, engines) as running:
        first = (await running[0].ask("POST", "/generate", {"text": text})).headers["x-sglang-ext-prefill"]
        index = running[1].router.planner.prefixes.index
        await until(lambda: index.block_count > 0, 2.0)
        for _ in range(3):
            answer = await running[1].ask("POST", "/generate", {"text": text})
            assert answer.headers["x-sglang-ext-prefill"] == first


@pytest.mark.slow
async def test_counters_of_all_are_shown_by_each(tmp_path: Path) -> None:
    async with processes(tmp_path, pair()) as running:
        for one, count in zip(running, (2, 3), strict=True):
            for _ in range(count):
                assert (await one.ask("POST", "/generate", PROMPT)).status == 200
        line = b'sglang_ext_router_requests_total{length_class="short",outcome="ok",path="/generate",status="200"} 5.0'
        for one in running:
            async with asyncio.timeout(5.0):
                while line not in (await one.ask("GET", "/metrics")).body:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_rooms_of_processes_differ(tmp_path: Path) -> None:
    engines = pair()
    async with processes(tmp_path, engines, 3) as running:
        await asyncio.gather(*(one.ask("POST", "/generate", PROMPT) for one in running for _ in range(50)))
        rooms = [request.room for request in engines[1].requests]
        assert len(set(rooms)) == len(rooms) == 150


@pytest.mark.full
async def test_two_processes_behind_one_port() -> None:
    """The real thing: spread by the kernel, replaced when killed, gone with their supervisor."""
    engines = pair()
    async with supervised(engines, 2) as (process, port):
        children = await serving_children(process.pid, port, 2)
        await asyncio.gather(*(ask_until_served(port) for _ in range(40)))
        rooms = [request.room for request in engines[1].requests]
        assert len(set(rooms)) == len(rooms)
        assert len({room >> 40 for room in rooms}) == 2  # both processes had some

        os.kill(children[0], signal.SIGKILL)
        await asyncio.gather(*(ask_until_served(port) for _ in range(10)))
        async with asyncio.timeout(15):
            while len(set(children_of(process.pid)) - {children[0]}) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    assert not [child for child in children if is_alive(child)]


@pytest.mark.slow
async def test_what_a_killed_process_has_counted_stays_in_the_sums_of_the_others_and_of_the_next() -> None:
    async with supervised(pair(), 3) as (process, port):
        children = await serving_children(process.pid, port, 3)
        await asyncio.gather(*(ask_until_served(port) for _ in range(40)))
        await until_counted(port, 40)  # by every process: its part has reached the others and its file
        os.kill(children[1], signal.SIGKILL)
        await until_counted(port, 40)
        replaced = await serving_children(process.pid, port, 3, {children[1]})
        assert set(children) - set(replaced) == {children[1]}
        await until_counted(port, 40)
        await asyncio.gather(*(ask_until_served(port) for _ in range(40)))
        await until_counted(port, 80)


async def until_counted(port: int, requests: int) -> None:
    """Wait until every process shows this number of requests: a process that just started does not know all yet."""
    line = b'sglang_ext_router_requests_total{length_class="short",outcome="ok",path="/generate",status="200"} %d.0\n'
    in_a_row = 0
    async with asyncio.timeout(20):
        while in_a_row < 24:
            with suppress(
                OSError, EOFError, BrokenReplyError
            ):  # a process that has just been killed cuts its connections
                async with await RawClient.connect(port) as client:
                    shown = (await client.ask("GET", "/metrics")).body
                in_a_row = in_a_row + 1 if line % requests in shown else 0
            await asyncio.sleep(0.0 if in_a_row else 0.05)


@asynccontextmanager
async def supervised(
    engines: list[ScriptedEngine], processes: int
) -> AsyncIterator[tuple[subprocess.Popen[bytes], int]]:
    """A router of several processes over these engines: its supervisor, and the port that it serves."""
    for engine in engines:
        await engine.start()
        engine.script = reply()
    port = free_port()
    command = [sys.executable, "-m", "sglang_ext.cli", "router", "--port", str(port), "--processes", str(processes)]
    command += ["--prefill", engines[0].url, "--decode", engines[1].url]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process, port
        process.terminate()
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.wait()
        for engine in engines:
            await engine.stop()


async def ask_until_served(port: int) -> None:
    """A process that is being replaced may cut a connection; then another one serves."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with await RawClient.connect(port) as client:
                    if (await client.ask("POST", "/generate", PROMPT)).status == 200:
                        return
            except Exception:
                pass
            await asyncio.sleep(0.05)


async def serving_children(parent: int, port: int, count: int, ended: Set[int] = frozenset()) -> list[int]:
    """The processes, in order of their start, once there are `count` that serve and none of those that have ended."""
    async with asyncio.timeout(90):
        while True:
            children = children_of(parent)
            is_complete = len(children) == count and ended.isdisjoint(children)
            if is_complete and listeners(port) == count and await answers(port, 16):
                return children
            await asyncio.sleep(0.1)


def listeners(port: int) -> int:
    """How many sockets listen on a port of 127.0.0.1 or of all addresses."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)


async def answers(port: int, times: int) -> bool:
    """Whether that many new connections in a row find a ready process."""
    for _ in range(times):
        try:
            async with await RawClient.connect(port) as client:
                if (await client.ask("GET", "/readyz")).status != 200:
                    return False
        except OSError:
            return False
    return True


def children_of(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


INITIAL = (WorkerAddress("http://p:1", Role.BOTH, 1), WorkerAddress("http://d:1", Role.DECODE))
URLS = ("http://p:1", "http://d:1", "http://new:1")

# (process, url, what): a change made by one process, or messages carried between two
CHANGES = st.tuples(st.integers(0, 2), st.sampled_from(URLS), st.sampled_from(["add", "remove", "drain"]))
MESSAGES = st.tuples(st.integers(0, 2), st.integers(0, 2))


def wire_of(table: MembershipTable) -> Any:
    return [tuple(entry) for entry in json.loads(json.dumps(table.wire()))]


def change(table: MembershipTable, url: str, what: str) -> None:
    if what == "remove":
        table.change(url, None)
    else:
        added = (
            WorkerAddress(url, Role.DECODE, None, "v2", "zone-a/node-1")
            if "new" in url
            else WorkerAddress(url, Role.BOTH)
        )
        table.change(url, table.address(url) or added, what == "drain")


def view(table: MembershipTable) -> dict[str, tuple[WorkerAddress | None, Any]]:
    entries = {url: (entry.address, entry.is_draining) for url, entry in table._entries.items()}
    return {url: entry for url, entry in entries.items() if entry[0] is not None}


@pytest.mark.slow
@given(steps=st.lists(st.one_of(CHANGES, MESSAGES), max_size=25))
def test_once_all_have_received_all_they_agree(steps: list[tuple[Any, ...]]) -> None:
    """Lost, doubled and reordered messages included: each only ever carries the sender's state of that moment."""
    tables = [MembershipTable(index, INITIAL) for index in range(3)]
    for step in steps:
        if len(step) == 3:
            change(tables[step[0]], step[1], step[2])
        else:
            tables[step[1]].merge(wire_of(tables[step[0]]))
    for _ in range(2):
        for sender in tables:
            for receiver in tables:
                receiver.merge(wire_of(sender))
    assert view(tables[0]) == view(tables[1]) == view(tables[2])


@pytest.mark.slow
@given(steps=st.lists(CHANGES, max_size=10))
def test_a_message_received_twice_changes_nothing(steps: list[tuple[int, str, str]]) -> None:
    sender, receiver = MembershipTable(0, INITIAL), MembershipTable(1, INITIAL)
    for _, url, what in steps:
        change(sender, url, what)
    receiver.merge(wire_of(sender))
    before = view(receiver)
    assert receiver.merge(wire_of(sender)) == []
    assert view(receiver) == before == view(sender)


def test_the_later_change_wins() -> None:
    first, second = MembershipTable(0, INITIAL), MembershipTable(1, INITIAL)
    change(first, "http://d:1", "drain")
    second.merge(wire_of(first))
    change(second, "http://d:1", "remove")
    stale = wire_of(first)
    assert [url for url, _ in first.merge(wire_of(second))] == ["http://d:1"]
    assert first.merge(stale) == []
    assert first.address("http://d:1") is None


def test_changes_at_the_same_time_are_decided_alike() -> None:
    first, second = MembershipTable(0, INITIAL), MembershipTable(1, INITIAL)
    change(first, "http://d:1", "drain")
    change(second, "http://d:1", "remove")
    of_first, of_second = wire_of(first), wire_of(second)
    first.merge(of_second)
    second.merge(of_first)
    assert view(first) == view(second)


def test_what_the_command_line_gave_is_not_told() -> None:
    assert MembershipTable(0, INITIAL).wire() == []


def of_model(engine: ScriptedEngine, model: str, **facts: Any) -> ScriptedEngine:
    assert isinstance(engine.info, dict)
    engine.info = {**engine.info, "served_model_name": model, **facts}
    return engine


@pytest.mark.slow
async def test_every_process_routes_by_model_and_lets_in_what_fits(tmp_path: Path) -> None:
    engines = [of_model(engine, model, page_size=1) for model in ("llama", "qwen") for engine in pair()]
    async with processes(tmp_path, engines, model_alias=("gpt-4=qwen",)) as running:
        misfit = of_model(ScriptedEngine(Role.DECODE), "qwen", page_size=64)
        await misfit.start()
        try:
            running[0].router.add_worker(WorkerAddress(misfit.url, Role.DECODE))
            for number, one in enumerate(running, 1):
                await until(lambda one=one: one.router.registry.find(misfit.url) is not None)  # type: ignore[misc]
                await until(lambda one=one: one.worker(misfit.url).is_refused)  # type: ignore[misc]
                for model in ("llama", "qwen", "gpt-4"):
                    assert (await one.ask("POST", "/generate", {**PROMPT, "model": model})).status == 200
                assert (await one.ask("POST", "/generate", {**PROMPT, "model": "mistral"})).status == 404
                assert [len(engine.requests) for engine in engines] == [number, number, 2 * number, 2 * number]
            assert misfit.requests == []
            # The load of one process is told by the other, for the model that it is of.
            engines[2].script = engines[3].script = hang()
            client = await running[0].connect()
            body = b'{"text": "x", "model": "gpt-4"}'
            await client.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            models = running[1].router.registry.models

            def told(name: str) -> int:
                classes = running[1].router.describe_load([models[name]])["classes"]
                return int(classes["short"]["online_in_flight"])

            await until(lambda: told("qwen") == 1)
            assert told("llama") == 0
            client.close()
        finally:
            await misfit.stop()


def test_peers_forget_a_removal_that_they_forget_at_different_times() -> None:
    first, second = MembershipTable(1, []), MembershipTable(2, [])
    first.change("http://a:1", WorkerAddress("http://a:1", Role.DECODE))
    first.change("http://a:1", None)
    for now_s in range(0, 4 * 3600, 5):
        for table, other in ((first, second), (second, first)):
            table.expire(now_s + (3.0 if table is second else 0.0))
            other.merge(wire_of(table))
            table.merge(wire_of(other))
    assert first._entries == second._entries == {}


def test_removals_are_no_longer_told_after_an_hour() -> None:
    table = MembershipTable(1, [WorkerAddress("http://a:1", Role.DECODE)])
    table.change("http://a:1", None)
    table.change("http://b:1", WorkerAddress("http://b:1", Role.DECODE))
    for now_s in (0.0, 3600.0):
        table.expire(now_s)
        assert [entry[0] for entry in table.wire()] == ["http://a:1", "http://b:1"]
    table.expire(3601.0)
    assert [entry[0] for entry in table.wire()] == ["http://b:1"]
    table.change("http://b:1", None)
    table.expire(4000.0)
    table.change("http://b:1", WorkerAddress("http://b:1", Role.DECODE))
    table.expire(9000.0)
    table.change("http://b:1", None)
    table.expire(9001.0)
    assert [entry[0] for entry in table.wire()] == ["http://b:1"], "removed again just now"
