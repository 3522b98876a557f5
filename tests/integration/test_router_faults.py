"""Clients that leave and instances that are killed: nothing hangs, nothing is left behind, the service goes on."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import Engine, EngineSpec
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

GONE_LIMIT_S = 3.0
# From the death of an instance until a request has an answer: retries included.
ANSWER_LIMIT_S = 15.0
# The router's own bounds are 4.5 s and what a retry takes; the machine is shared.
DETECTION_LIMIT_S = 7.0
FROZEN_LIMIT_S = 10.0


def generate_body(length: int, new_tokens: int, *, stream: bool = False, seed: int = 0) -> dict[str, Any]:
    return {
        "input_ids": random_prompt(length, seed=seed),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "stream": stream,
    }


def leave_after(router: RunningRouter, body: dict[str, Any], delay_s: float | None) -> None:
    """Send a request and close the connection after a while, or (None) behind the first byte of the reply."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=30)
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    if delay_s is None:
        connection.getresponse().read(1)
    else:
        time.sleep(delay_s)
    connection.close()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.2, None])
def test_a_client_that_leaves_leaves_nothing_behind(
    router: RunningRouter, engines: list[Engine], delay_s: float | None, is_stream: bool
) -> None:
    if delay_s is None and not is_stream:
        delay_s = 0.5
    lengths = (40, 900)
    with ThreadPoolExecutor(4) as threads:
        for length in lengths:
            for seed in range(2):
                body = generate_body(length, 1000, stream=is_stream, seed=random.randrange(1 << 30) + seed)
                threads.submit(leave_after, router, body, delay_s)
    started = time.monotonic()
    while not router.is_idle():
        assert time.monotonic() - started < GONE_LIMIT_S
        time.sleep(0.05)
    for engine in engines:
        engine.wait_idle(GONE_LIMIT_S)
    reply = router.post("/generate", generate_body(30, 8, seed=1))
    assert reply.body["output_ids"] == greedy_reference(random_prompt(30, seed=1), 8)


class Load:
    """Requests at a steady rate from a few threads; every answer is kept."""

    def __init__(self, router: RunningRouter, new_tokens: int) -> None:
        self._router = router
        self._new_tokens = new_tokens
        self._stop = threading.Event()
        self.answers: list[tuple[float, str]] = []  # seconds it took, what came of it
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, answers: int) -> None:
        """Return when there are this many answers, or more."""
        while len(self.answers) < answers:
            time.sleep(0.05)

    def _run(self, number: int) -> None:
        generator = random.Random(number)
        while not self._stop.is_set():
            is_stream = generator.random() < 0.5
            body = generate_body(
                generator.choice((20, 100, 500, 900)),
                self._new_tokens,
                stream=is_stream,
                seed=generator.randrange(1 << 30),
            )
            started = time.monotonic()
            outcome = self._one(body, is_stream)
            self.answers.append((time.monotonic() - started, outcome))

    def _one(self, body: dict[str, Any], is_stream: bool) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._router.port, timeout=ANSWER_LIMIT_S * 2)
        try:
            connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        except http.client.IncompleteRead:
            return "cut"
        finally:
            connection.close()
        if response.status != 200:
            return str(response.status)
        if not is_stream:
            return "ok"
        return "error event" if b'"error"' in data else "ok"


@pytest.mark.parametrize("role", [Role.SHORT, pytest.param(Role.DECODE, marks=pytest.mark.full)])
def test_a_killed_instance_costs_only_what_it_was_serving(engines: list[Engine], role: Role) -> None:
    """kill -9 under load, at whatever stage each request is; then a restart at the same address."""
    victim = Engine.start(EngineSpec(role, name="victim"))
    try:
        victim.wait_ready()
        everybody = [*engines, victim]
        with running_router(everybody, "--length-boundary-tokens", "256") as router:
            with Load(router, new_tokens=24) as load:
                load.wait_for(8)
                served = len(load.answers)
                victim.kill()
                while router.workers()[victim.url]["state"] != "unhealthy":
                    time.sleep(0.1)
                load.wait_for(len(load.answers) + 8)
            assert all(outcome == "ok" for _, outcome in load.answers[: max(0, served - 4)])
            slowest_s = max(seconds for seconds, _ in load.answers)
            assert slowest_s < ANSWER_LIMIT_S
            # A client that was half served is told; all others are served by the other instances.
            failed = [outcome for _, outcome in load.answers if outcome != "ok"]
            assert len(failed) <= 4, failed
            assert set(failed) <= {"error event", "cut", "502", "503"}
            assert load.answers[-1][1] == "ok"
            for engine in engines:
                engine.wait_idle(10.0)
            assert router.workers()[victim.url]["state"] == "unhealthy"

            revived = Engine.start(victim.spec, (victim.port, victim.bootstrap_port))
            victim.stop()
            victim = revived
            victim.wait_ready()
            router.wait_workers([victim])
            seen = set()
            # All at once: one after the other may well all go to the instance that is known to be the faster one.
            with ThreadPoolExecutor(12) as threads:
                bodies = [generate_body(50, 6, seed=seed) for seed in range(12)]
                answers = list(threads.map(lambda body: router.call("POST", "/generate", body), bodies))
            for seed, (reply, headers) in enumerate(answers):
                assert reply.body["output_ids"] == greedy_reference(random_prompt(50, seed=seed), 6)
                seen.add(headers["x-sglang-ext-decode" if role is Role.DECODE else "x-sglang-ext-prefill"])
            assert victim.url in seen
            assert router.is_idle()
    finally:
        victim.stop()


def test_instances_come_and_go_at_run_time(router: RunningRouter, engines: list[Engine]) -> None:
    short = engines[0]
    name = f"127.0.0.1:{short.port}"
    assert router.admin("POST", f"/workers/{name}/drain", {"drain": True}).body["state"] == "draining"
    reply, headers = router.call("POST", "/generate", generate_body(30, 4))
    assert (reply.status, headers["x-sglang-ext-prefill"]) == (200, engines[1].url)
    assert router.admin("DELETE", f"/workers/{name}").status == 200
    assert short.url not in router.workers()
    assert router.admin("POST", "/workers", {"url": short.url, "role": "short"}).status == 202
    router.wait_workers([short])
    assert router.workers()[short.url]["bootstrap_port"] == short.bootstrap_port
    reply, headers = router.call("POST", "/generate", generate_body(31, 4))
    assert (reply.status, headers["x-sglang-ext-prefill"]) == (200, short.url)
    assert router.call("POST", "/workers", {"url": "http://127.0.0.1:9", "role": "decode"})[0].status == 401


@pytest.mark.full
@pytest.mark.parametrize("role", [pytest.param(Role.SHORT, marks=pytest.mark.full), Role.DECODE])
def test_a_frozen_instance_holds_nothing(engines: list[Engine], role: Role) -> None:
    """SIGSTOP of all its processes under load, with the router's defaults; it goes on, and is used again."""
    victim = Engine.start(EngineSpec(role, name="victim"))
    defaults = ("--health-check-interval-secs", "5", "--set", "health.load_poll_interval_secs=1")
    try:
        victim.wait_ready()
        with running_router([*engines, victim], "--length-boundary-tokens", "256", *defaults) as router:
            with Load(router, new_tokens=24) as load:
                time.sleep(2.0)
                victim.freeze()
                frozen_s = time.monotonic()
                while router.workers()[victim.url]["state"] == "ready":
                    assert time.monotonic() - frozen_s < DETECTION_LIMIT_S
                    time.sleep(0.05)
                time.sleep(2.0)
            failed = [outcome for _, outcome in load.answers if outcome != "ok"]
            assert len(failed) <= 4, failed  # those that were half served
            assert set(failed) <= {"error event", "cut", "502"}
            assert max(seconds for seconds, _ in load.answers) < FROZEN_LIMIT_S
            assert load.answers[-1][1] == "ok"
            assert router.is_idle()
            for engine in engines:
                engine.wait_idle(10.0)
            victim.thaw()
            router.wait_workers([victim])
            victim.wait_idle(10.0)
            reply = router.post("/generate", generate_body(50, 6, seed=3))
            assert reply.body["output_ids"] == greedy_reference(random_prompt(50, seed=3), 6)
    finally:
        victim.thaw()
        victim.stop()


def test_busy_instances_are_not_taken_for_frozen_ones(router: RunningRouter, engines: list[Engine]) -> None:
    """Both cores are computing long prompts for longer than a frozen instance would be borne."""
    unhealthy = []
    with ThreadPoolExecutor(6) as threads:
        began_s = time.monotonic()
        seeds = iter(range(1 << 20))
        running: set[Any] = set()
        while time.monotonic() - began_s < 6.0:
            running = {one for one in running if not one.done()}
            while len(running) < 6:
                running.add(threads.submit(router.post, "/generate", generate_body(900, 24, seed=next(seeds))))
            unhealthy += [url for url, worker in router.workers().items() if worker["state"] != "ready"]
            time.sleep(0.2)
    assert unhealthy == []
    for engine in engines:
        engine.wait_idle(10.0)
