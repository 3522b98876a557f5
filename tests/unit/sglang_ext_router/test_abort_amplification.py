"""One request must not become thousands: aborts of its sequences are few or paced, and sequences are limited."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.request import aborting
from sglang_ext_router.request.request_ids import abort_ids, room_id, unique_ids
from support.raw_client import request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import ScriptedEngine, hang, reply

FAMILY_HOOKS = {"hooks": ["parallel-samples", "abort-family"]}


async def leave(served: Cluster, count: int, path: str = "/v1/completions", **fields: Any) -> None:
    """Send a request of so many prompts, and leave once both instances have it."""
    client = await served.connect()
    body = {"prompt" if path == "/v1/completions" else "text": ["a"] * count, **fields}
    await client.send(request_bytes("POST", path, json.dumps(body).encode()))
    for engine in (served.short[0], served.decode[0]):
        await engine.received(1)
    client.close()


def hanging(served: Cluster) -> tuple[ScriptedEngine, ScriptedEngine]:
    for engine in (served.short[0], served.decode[0]):
        engine.script = hang()
    return served.short[0], served.decode[0]


@pytest.mark.slow
async def test_an_engine_with_the_hook_is_called_once_and_once_more() -> None:
    async with cluster(max_sequences_per_request=4096, long=0) as served:
        engines = hanging(served)
        for engine in engines:
            assert isinstance(engine.info, dict)
            engine.info = {**engine.info, "sglang_ext": FAMILY_HOOKS}
            worker = served.worker(engine.url)
            worker.has_info = False
            await served.until(lambda: worker.aborts_families)  # noqa: B023
        await leave(served, 4096)
        for engine in engines:
            await served.until(lambda: len(engine.aborts) == 2, 3.0)  # noqa: B023
            assert {abort.rid for abort in engine.aborts} == {engine.requests[0].rid}
        await asyncio.sleep(aborting.REPEAT_AFTER_S * 1.2)
        assert [len(engine.aborts) for engine in engines] == [2, 2]


@pytest.mark.slow
async def test_a_stock_engine_is_told_of_every_sequence_over_few_connections() -> None:
    async with cluster(max_sequences_per_request=512, long=0) as served:
        engines = hanging(served)
        await served.until_ready()
        before = [engine.connections_made for engine in engines]
        await leave(served, 512)
        for engine, made in zip(engines, before, strict=True):
            await served.until(lambda: len(engine.aborts) >= 2 * 512, 10.0)  # noqa: B023
            rid = engine.requests[0].rid
            assert {abort.rid for abort in engine.aborts} == {f"{rid}_{i}" for i in range(512)}
            # the leg's own, those of aborts, and a few of health checks
            assert engine.connections_made - made <= aborting.CALLS_AT_ONCE + 4


async def test_an_abort_of_another_request_does_not_wait_for_long_behind_those_of_a_large_one() -> None:
    async with cluster(max_sequences_per_request=256, long=0) as served:
        _, decode = hanging(served)
        await leave(served, 256)
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", b'{"text": "x"}'))
        await decode.received(2)
        client.close()
        await decode.abort_of(decode.requests[1].rid, 2.0)


@pytest.mark.slow
async def test_calls_that_are_not_answered_do_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborting, "CALL_TIMEOUT_S", 0.2)
    async with cluster(long=0) as served:
        _, decode = hanging(served)
        stuck = ScriptedEngine._abort

        def hold(engine: ScriptedEngine, request: Any) -> Any:
            stuck(engine, request)
            return hang()

        monkeypatch.setattr(ScriptedEngine, "_abort", hold)
        await leave(served, aborting.CALLS_AT_ONCE)
        await served.until(lambda: len(decode.aborts) == aborting.CALLS_AT_ONCE)
        monkeypatch.setattr(ScriptedEngine, "_abort", stuck)
        await served.until(lambda: len(decode.aborts) == 2 * aborting.CALLS_AT_ONCE, 3.0)
        await served.until(lambda: not served.router.services.aborter.is_busy, 3.0)


async def test_nothing_is_sent_to_an_instance_that_is_out() -> None:
    async with cluster(long=0) as served:
        _, decode = hanging(served)
        served.worker(decode.url).is_healthy = False
        served.router.services.aborter.abort(served.worker(decode.url), ["a", "b"])
        await asyncio.sleep(0.05)
        assert decode.aborts == []
        assert not served.router.services.aborter.is_busy


# -- the limit ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a"] * 257}, None),
        ("/v1/completions", {"prompt": ["a"] * 129, "n": 2}, None),
        ("/v1/completions", {"prompt": [[1]] * 257}, None),
        ("/generate", {"text": ["a"] * 300}, None),
        ("/generate", {"input_ids": [[1]] * 300}, None),
        ("/generate", {"text": "a", "sampling_params": {"n": 257}}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 257}, "n"),
    ],
)
async def test_more_sequences_than_allowed_are_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", path, body)
        assert answer.status == 400
        assert answer.error["param"] == param
        assert "sequences" in answer.error["message"]
        assert "256" in answer.error["message"]
        assert served.upstream_requests() == 0
        assert served.router.metrics.refused == {"too_many_sequences": 1}


async def test_as_many_as_allowed_are_served() -> None:
    async with cluster() as served:
        for engine in served.engines:
            engine.script = reply({"choices": []})
        assert (await served.ask("POST", "/v1/completions", {"prompt": ["a"] * 128, "n": 2})).status == 200


@pytest.mark.slow
@given(
    given_ids=st.one_of(st.none(), st.text("ab_", max_size=4), st.lists(st.text("ab_", max_size=4), min_size=1)),
    samples=st.integers(1, 3),
)
def test_the_ids_of_families_begin_those_of_all_sequences(given_ids: Any, samples: int) -> None:
    made = room_id(7)
    prompts = len(given_ids) if isinstance(given_ids, list) else 3
    whole = abort_ids(given_ids, made, prompts * samples, samples, False)
    families = abort_ids(given_ids, made, prompts * samples, samples, True)
    assert len(families) == (prompts if isinstance(given_ids, list) else 1)
    assert all(any(one == base or one.startswith(f"{base}_") for base in families) for one in whole)
    sent = made.decode() if given_ids is None else unique_ids(given_ids, made)
    assert families == (sent if isinstance(sent, list) else [sent])
