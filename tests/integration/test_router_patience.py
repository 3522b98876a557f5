"""Real instances that are late: stopped and let go on, without processor time, or with megabytes to tokenise."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec, Reply
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router
from support.starvation import starved

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

# The router's defaults, which the tests of other things make shorter.
DEFAULTS = ("--health-check-interval-secs", "5", "--set", "health.load_poll_interval_secs=1")
HEARD_WITHIN_S = 20.0


def body_of(length: int, new_tokens: int, seed: int = 0, *, stream: bool = False) -> dict[str, Any]:
    return {
        "input_ids": random_prompt(length, seed=seed),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "stream": stream,
    }


def ids_of_stream(router: RunningRouter, body: dict[str, Any], on_first: Callable[[], None]) -> list[int]:
    """Read a stream to its end; return the ids of its last event, which holds them all."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=120)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        ids: list[int] = []
        for line in iter(response.readline, b""):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            ids = event["output_ids"]
            on_first()
        return ids
    finally:
        connection.close()


@contextmanager
def watched(router: RunningRouter) -> Iterator[set[tuple[str, str]]]:
    """Collect the states in which instances were seen meanwhile, with their URLs."""
    seen: set[tuple[str, str]] = set()
    end = threading.Event()

    def watch() -> None:
        while not end.wait(0.1):
            seen.update((url, worker["state"]) for url, worker in router.workers().items())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        end.set()
        thread.join()


def assert_served(replies: Sequence[Future[Reply]], length: int, new_tokens: int) -> None:
    for seed, future in enumerate(replies):
        reply = future.result(120)
        assert reply.status == 200, reply.body
        assert reply.body["output_ids"] == greedy_reference(random_prompt(length, seed=seed), new_tokens)


def until(is_so: Callable[[], bool], within_s: float = HEARD_WITHIN_S) -> None:
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.parametrize("role", [pytest.param(Role.SHORT, marks=pytest.mark.full), Role.DECODE])
def test_the_only_instance_of_its_role_is_stopped_and_goes_on(role: Role) -> None:
    """Its stream is unbroken, and what came meanwhile is served: nothing fails."""
    prefill, decode = FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))
    victim = decode if role is Role.DECODE else prefill
    with running_router([prefill, decode], *DEFAULTS) as router, ThreadPoolExecutor(6) as threads:
        begun = threading.Event()
        stream = threads.submit(ids_of_stream, router, body_of(30, 800, stream=True), begun.set)
        assert begun.wait(20)
        victim.freeze()
        try:
            until(lambda: router.workers()[victim.url]["state"] == "silent")
            replies = [threads.submit(router.post, "/generate", body_of(40, 8, seed)) for seed in range(4)]
            until(lambda: router.metric("sglang_ext_router_requests_waiting_for_instance") == 4)
            assert router.call("GET", "/readyz")[0].status == 200
            time.sleep(2.0)
            assert router.workers()[victim.url]["state"] == "silent"
        finally:
            victim.thaw()
        assert_served(replies, 40, 8)
        assert stream.result(120) == greedy_reference(random_prompt(30, seed=0), 800)
        assert router.metric("sglang_ext_router_retries_total") == 0
        until(router.is_idle)


@pytest.mark.parametrize("role", [pytest.param(Role.SHORT, marks=pytest.mark.full), Role.DECODE])
def test_requests_wait_for_the_only_instance_of_its_role_while_it_is_started_again(role: Role) -> None:
    """kill -9: what had no first byte and what comes is served by the process that takes its place."""
    (kept,) = FLEET.get(EngineSpec(Role.SHORT if role is Role.DECODE else Role.DECODE))
    victim = Engine.start(EngineSpec(role, name="victim"))
    try:
        victim.wait_ready()
        with running_router([kept, victim]) as router, ThreadPoolExecutor(8) as threads:
            assert router.post("/generate", body_of(40, 8)).status == 200
            victim.kill()
            replies = [threads.submit(router.post, "/generate", body_of(40, 8, seed)) for seed in range(6)]
            until(lambda: router.metric("sglang_ext_router_requests_waiting_for_instance") == 6)
            victim.stop()
            victim = Engine.start(victim.spec, (victim.port, victim.bootstrap_port))
            assert_served(replies, 40, 8)
            until(router.is_idle)
    finally:
        victim.stop()


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("role", [Role.SHORT, Role.DECODE])
def test_an_instance_that_is_starved_for_ten_seconds_loses_nothing(role: Role, count: int) -> None:
    """Twenty spinners on its core leave each of its processes a twentieth of it."""
    specs = [EngineSpec(Role.SHORT), EngineSpec(Role.DECODE)]
    engines = FLEET.get(*specs, *([EngineSpec(role, name="second")] if count == 2 else []))
    victim = engines[0] if role is Role.SHORT else engines[1]
    with running_router(engines, *DEFAULTS) as router, ThreadPoolExecutor(8) as threads, watched(router) as seen:
        begun = threading.Event()
        stream = threads.submit(ids_of_stream, router, body_of(30, 600, stream=True), begun.set)
        assert begun.wait(20)
        replies = []
        with starved([victim], spinners=20):
            began_s = time.monotonic()
            while time.monotonic() - began_s < 10.0:
                replies.append(threads.submit(router.post, "/generate", body_of(60, 8, len(replies))))
                time.sleep(1.0)
        assert_served(replies, 60, 8)
        assert stream.result(120) == greedy_reference(random_prompt(30, seed=0), 600)
        until(router.is_idle)
        if count == 1:
            assert not {state for _, state in seen} & {"unhealthy"}, seen


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_of_four_megabytes_takes_no_instance_out(count: int) -> None:
    """Both of its instances tokenise it before they answer anything else; it is too long, which is their word."""
    specs = [EngineSpec(Role.SHORT), EngineSpec(Role.DECODE)]
    second = [EngineSpec(Role.SHORT, name="second"), EngineSpec(Role.DECODE, name="second")] if count == 2 else []
    engines = FLEET.get(*specs, *second)
    with running_router(engines, *DEFAULTS) as router, ThreadPoolExecutor(4) as threads, watched(router) as seen:
        text = "The quick brown fox, %d times. " * 130_000 % tuple(range(130_000))
        assert len(text) >= 4_000_000
        large = threads.submit(
            router.post, "/generate", {"text": text, "sampling_params": {"max_new_tokens": 4}}, 120.0
        )
        time.sleep(0.3)
        replies = [threads.submit(router.post, "/generate", body_of(40, 8, seed)) for seed in range(3)]
        assert_served(replies, 40, 8)
        refused = large.result(120)
        assert (refused.status, "context length" in json.dumps(refused.body)) == (400, True)
        assert not {state for _, state in seen} & {"unhealthy"}, seen
        until(router.is_idle)


@pytest.mark.full
def test_a_scheduler_that_hangs_is_given_up_where_another_serves_and_not_where_none_does() -> None:
    """SIGSTOP of the scheduler only: the server process answers every liveness check."""
    prefill, decode, other = FLEET.get(
        EngineSpec(Role.SHORT), EngineSpec(Role.DECODE), EngineSpec(Role.DECODE, name="second")
    )
    quick = ("--health-check-timeout-secs", "2", "--health-failure-threshold", "2")
    with running_router([prefill, decode], *quick) as router, ThreadPoolExecutor(4) as threads:
        with decode.frozen_scheduler():
            replies = [threads.submit(router.post, "/generate", body_of(40, 8, seed)) for seed in range(3)]
            time.sleep(10.0)
            assert router.workers()[decode.url]["state"] == "ready"
            assert not any(reply.done() for reply in replies)
        assert_served(replies, 40, 8)
    with running_router([prefill, decode, other], *quick) as router, ThreadPoolExecutor(4) as threads:
        with decode.frozen_scheduler():
            replies = [threads.submit(router.post, "/generate", body_of(40, 8, seed)) for seed in range(4)]
            assert_served(replies, 40, 8)
            until(lambda: router.workers()[decode.url]["state"] == "unhealthy")
        router.wait_workers([decode])
        decode.wait_idle(20.0)
