"""Instances that are late, not dead: the last one of a role keeps its requests; requests without an instance wait."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.running_time import pause
from support.scripted_engine import DONE, ScriptedEngine, Turn, chunk, event, hang, reply, stream, stream_head

pytestmark = pytest.mark.slow

PROMPT = {"text": "x"}
STREAMED = {"text": "x", "stream": True}
FIRST = stream_head() + chunk(event({"text": "a"}))
IN_TURN: dict[str, Any] = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
QUICK: dict[str, Any] = {"liveness_interval_secs": 0.1, "liveness_timeout_secs": 0.5, **IN_TURN}
SLOW_CHECKS: dict[str, Any] = {"health_check_timeout_secs": 0.1, "health_failure_threshold": 2, **QUICK}
EVENTS = [event({"text": str(number)}) for number in range(4)]


async def sent(served: Cluster, body: dict[str, Any], headers: dict[str, str] | None = None) -> RawClient:
    client = await served.connect()
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode(), headers or {}))
    return client


def state(served: Cluster, engine: ScriptedEngine) -> tuple[bool, bool]:
    """Whether an instance is healthy, and silent."""
    worker = served.worker(engine.url)
    return worker.is_healthy, worker.is_silent


async def until_waiting(served: Cluster, count: int) -> None:
    await served.until(lambda: len(served.router.services.instance_waits) == count)


async def streamed_once_thawed(turn: Turn) -> None:
    """A stream whose first event is there at once, and the others when the instance goes on."""
    await turn.write(stream_head() + chunk(EVENTS[0]))
    await pause(0.05)
    await turn.engine.thawed.wait()
    for one in (*EVENTS[1:], DONE):
        await turn.write(chunk(one))
    await turn.write(b"0\r\n\r\n")


# -- silent instances -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.DECODE, Role.SHORT])
async def test_the_last_instance_of_a_role_keeps_its_requests_while_it_is_silent(role: Role) -> None:
    async with cluster(long=0, **QUICK) as served:
        prefill, decode = served.short[0], served.decode[0]
        victim = decode if role is Role.DECODE else prefill
        decode.plan(streamed_once_thawed)
        client = await sent(served, STREAMED)
        await client.head()
        assert await client.chunk() == EVENTS[0]
        victim.freeze()
        await served.until(lambda: state(served, victim) == (True, True))
        assert "silent" in served.worker(victim.url).last_error
        workers = (await served.ask("GET", "/workers")).json["workers"]
        assert [worker["state"] for worker in workers if worker["url"] == victim.url] == ["silent"]
        assert (await served.ask("GET", "/readyz")).status == 200
        waiting = await sent(served, PROMPT)
        await until_waiting(served, 1)
        await pause(1.2)
        assert state(served, victim) == (True, True)
        victim.thaw()
        assert (await waiting.reply()).status == 200
        assert [await client.chunk() for _ in range(4)] == [*EVENTS[1:], DONE]
        assert state(served, victim) == (True, False)
        assert served.router.metrics.retries == {}
        assert served.router.metrics.waited_for_instance == 1


async def test_a_silent_instance_is_given_up_once_another_one_comes() -> None:
    async with cluster(**QUICK) as served:
        (frozen,) = served.decode
        frozen.script = hang()
        client = await sent(served, PROMPT)
        await frozen.received(1)
        frozen.freeze()
        await served.until(lambda: state(served, frozen) == (True, True))
        other = await served.extra_engine(Role.DECODE)
        other.script = reply({"text": "elsewhere"})
        served.router.add_worker(WorkerAddress(other.url, Role.DECODE))
        assert (await client.reply()).json == {"text": "elsewhere"}
        assert state(served, frozen) == (False, False)
        frozen.thaw()
        await served.until(lambda: state(served, frozen) == (True, False))


async def test_instances_that_are_silent_together_keep_their_requests() -> None:
    """Their machine has no time for them: neither could serve in place of the other."""
    async with cluster(decode=2, **QUICK) as served:
        clients = []
        for engine in served.decode:
            engine.script = streamed_once_thawed
            clients.append(await sent(served, STREAMED))
            await clients[-1].head()
            assert await clients[-1].chunk() == EVENTS[0]
        for engine in served.decode:
            engine.freeze()
        await served.until(lambda: all(state(served, engine) == (True, True) for engine in served.decode))
        await pause(0.6)
        for engine in served.decode:
            engine.thaw()
        for client in clients:
            assert [await client.chunk() for _ in range(4)] == [*EVENTS[1:], DONE]
        assert served.router.metrics.retries == {}


async def test_the_second_of_two_to_freeze_is_the_last_one_until_the_first_is_back() -> None:
    async with cluster(decode=2, **QUICK) as served:
        first, second = served.decode
        first.freeze()
        await served.until(lambda: not state(served, first)[0])
        second.script = hang()
        client = await sent(served, PROMPT)
        await second.received(1)
        second.freeze()
        await served.until(lambda: state(served, second) == (True, True))
        first.script = reply({"text": "back"})
        first.thaw()
        assert (await client.reply()).json == {"text": "back"}
        assert not state(served, second)[0]


async def test_a_pool_that_gets_no_help_has_no_other_instance() -> None:
    async with cluster(short=1, long=1, pool_spill=False, **QUICK) as served:
        served.short[0].freeze()
        await served.until(lambda: state(served, served.short[0]) == (True, True))
    async with cluster(short=1, long=1, **QUICK) as served:
        served.short[0].freeze()
        await served.until(lambda: state(served, served.short[0]) == (False, False))


@pytest.mark.parametrize("is_large", [True, False])
async def test_an_instance_that_has_a_large_body_to_read_is_given_the_time(is_large: bool) -> None:
    """It cannot answer before it has tokenised it, and looks as if it were stopped."""
    async with cluster(decode=2, **QUICK) as served:
        for engine in (*served.short, *served.long, *served.decode):
            engine.script = reply({"text": "whole"}, delay_s=0.0)
        body = {"text": "word " * (100_000 if is_large else 4_000)}  # 0.5 MB: 2 s
        reader = served.decode[0]
        reader.script = hang()
        client = await sent(served, body)
        await reader.received(1)
        reader.freeze()
        if is_large:
            await pause(1.2)
            assert state(served, reader) == (True, False)
        await served.until(lambda: not state(served, reader)[0])
        assert (await client.reply()).json == {"text": "whole"}


# -- schedulers that are late -----------------------------------------------------------------------------------


def busy_report(tokens: int) -> dict[str, Any]:
    rank = {"num_running_reqs": 1, "num_used_tokens": 0, "max_total_num_tokens": 1 << 20}
    return {"loads": [{**rank, "total_prefill_uncached_tokens": tokens, "total_prefill_busy_us": tokens}]}


@pytest.mark.parametrize("evidence", ["tokens of a stream", "load reports"])
async def test_a_scheduler_that_is_late_and_works_stays(evidence: str) -> None:
    async with cluster(decode=2, **SLOW_CHECKS) as served:
        engine = served.decode[0]
        engine.script = stream(*[event({"text": str(number)}) for number in range(40)], DONE, delay_s=0.05)
        if evidence == "load reports":
            engine.script = hang(FIRST)
        client = await sent(served, STREAMED)
        await client.head()
        engine.health_status = None
        checks = engine.health_checks
        for number in range(30):
            if evidence == "load reports":
                engine.loads = busy_report(number)
            await pause(0.05)
            assert state(served, engine) == (True, False)
        assert engine.health_checks >= checks + 2
        assert served.router.metrics.retries == {}
        engine.script = hang()
        await served.until(lambda: not state(served, engine)[0])  # it works no more
        client.close()


async def test_the_last_instance_stays_when_its_scheduler_does_not_answer() -> None:
    """As with a batch of 14 s: new requests go on to it, and all of them are served."""
    async with cluster(**SLOW_CHECKS) as served:
        engine = served.decode[0]
        release = asyncio.Event()

        async def late(turn: Turn) -> None:
            await release.wait()
            await reply({"text": "late"})(turn)

        engine.script = late
        engine.health_status = None
        clients = [await sent(served, PROMPT) for _ in range(3)]
        checks = engine.health_checks
        await served.until(lambda: engine.health_checks >= checks + 5, 10.0)
        clients.append(await sent(served, PROMPT))
        await engine.received(4)
        assert state(served, engine) == (True, False)
        release.set()
        assert [(await client.reply()).json["text"] for client in clients] == ["late"] * 4
        engine.health_status = 200


async def test_two_schedulers_that_are_late_together_stay() -> None:
    async with cluster(decode=2, **SLOW_CHECKS) as served:
        for engine in served.decode:
            engine.health_status = None
        checks = served.decode[0].health_checks
        await served.until(lambda: served.decode[0].health_checks >= checks + 6, 10.0)
        assert sum(state(served, engine)[0] for engine in served.decode) >= 1
        for engine in served.decode:
            engine.health_status = 200
        await served.until_ready()


# -- requests without an instance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.DECODE, Role.SHORT])
async def test_a_request_waits_for_an_instance_that_was_killed(role: Role) -> None:
    async with cluster(long=0) as served:
        (victim,) = served.decode if role is Role.DECODE else served.short
        served.decode[0].plan(hang())
        served.short[0].plan(hang())
        before = await sent(served, PROMPT)  # it has been sent already
        await served.decode[0].received(1)
        await victim.stop()
        behind = [await sent(served, PROMPT) for _ in range(3)]
        await until_waiting(served, 4)
        assert served.router.describe_load(list(served.router.registry.models.values()))["in_flight"] == 4
        await victim.start()
        for client in (before, *behind):
            assert (await client.reply()).json["text"] == "ok"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_wait_ends_with_the_queues_timeout(is_stream: bool) -> None:
    async with cluster(queue_timeout_secs=0.3, sse_keep_alive_secs=0.1) as served:
        await served.decode[0].stop()
        await served.until(lambda: not state(served, served.decode[0])[0])
        answer = await served.ask("POST", "/generate", STREAMED if is_stream else PROMPT)
        if is_stream:
            assert answer.status == 200
            assert answer.chunks is not None
            assert answer.chunks[0] == b"\n"
            assert b"no instance" in answer.chunks[-2]
        else:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert "no instance" in answer.error["message"]
        assert served.router.metrics.refused == {"no_instance": 1}


async def test_a_wait_ends_with_the_deadline_of_the_request() -> None:
    async with cluster(queue_timeout_secs=30.0) as served:
        await served.decode[0].stop()
        await served.until(lambda: not state(served, served.decode[0])[0])
        answer = await served.ask("POST", "/generate", PROMPT, {"x-sgl-ttft-slo-ms": "200"})
        assert answer.status == 503


async def test_no_more_requests_wait_than_the_queue_holds() -> None:
    async with cluster(queue_size=2) as served:
        await served.decode[0].stop()
        await served.until(lambda: not state(served, served.decode[0])[0])
        waiting = [await sent(served, PROMPT) for _ in range(2)]
        await until_waiting(served, 2)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 503
        waiting[0].close()
        await until_waiting(served, 1)
        third = await sent(served, PROMPT)
        await until_waiting(served, 2)
        await served.decode[0].start()
        assert [(await client.reply()).status for client in (waiting[1], third)] == [200, 200]


async def test_a_request_that_waits_can_be_aborted_and_ends_with_the_router() -> None:
    async with cluster() as served:
        await served.decode[0].stop()
        await served.until(lambda: not state(served, served.decode[0])[0])
        client = await sent(served, {**PROMPT, "rid": "mine"})
        other = await sent(served, PROMPT)
        await until_waiting(served, 2)
        await served.ask("POST", "/abort_request", {"rid": "mine"})
        assert (await client.reply()).status == 503
        await served.router.drain(0.1)
        assert (await other.reply()).status == 504
        assert len(served.router.services.instance_waits) == 0


@pytest.mark.parametrize("why", ["drained", "removed", "refused"])
async def test_nothing_waits_for_what_does_not_return(why: str) -> None:
    async with cluster() as served:
        worker = served.worker(served.decode[0].url)
        if why == "drained":
            served.router.drain_worker(worker, True)
        elif why == "removed":
            served.router.remove_worker(worker)
        else:
            engine = served.decode[0]
            assert isinstance(engine.info, dict)
            await engine.stop()
            await served.until(lambda: not worker.is_healthy)
            engine.info = {**engine.info, "disaggregation_mode": "prefill"}
            await engine.start()
            await served.until(lambda: worker.is_refused)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 503


async def test_what_waits_for_decode_may_then_wait_for_prefill() -> None:
    async with cluster(long=0) as served:
        for engine in (*served.decode, *served.short):
            await engine.stop()
        await served.until(lambda: not any(worker.is_healthy for worker in served.router.registry))
        client = await sent(served, PROMPT)
        await until_waiting(served, 1)
        await served.short[0].start()
        await served.until_ready(1)
        await until_waiting(served, 1)
        await served.decode[0].start()
        assert (await client.reply()).status == 200
