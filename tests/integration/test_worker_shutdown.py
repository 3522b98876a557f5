"""Instances that are asked to end under load: nothing is lost, nothing hangs, and they end by themselves."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.reference import greedy_reference, random_prompt
from support.router_cli import running_router

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

NEW_TOKENS = 700
ENDS_WITHIN_S = 30.0  # of its last request; 2 to 3 s on a quiet machine
PREFILL, DECODE = "x-sglang-ext-prefill", "x-sglang-ext-decode"
NO_ANSWER_S = 20.0


def score_until_refused(engine: Engine, first_seed: int, statuses: list[object]) -> None:
    """Ask the instance itself, again and again over one connection, until it answers no more."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=NO_ANSWER_S)
    for seed in range(first_seed, first_seed + 100_000):
        body = {
            "input_ids": random_prompt(64, seed=seed),
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 0},
            "bootstrap_host": "2.2.2.2",
            "bootstrap_room": seed,
        }
        try:
            connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            statuses.append(reply.status)
        except (OSError, http.client.HTTPException) as error:
            statuses.append(type(error).__name__)
        if statuses[-1] != 200:
            return


@pytest.mark.full
def test_instances_end_by_themselves_once_all_is_served() -> None:
    stays = FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))
    leave = [Engine.start(EngineSpec(role, name="leaving")) for role in (Role.SHORT, Role.DECODE)]
    try:
        for engine in leave:
            engine.wait_ready()
        with running_router([*stays, *leave], "--decode-policy", "round_robin") as router:

            def ask(seed: int) -> tuple[Any, dict[str, str]]:
                body = {
                    "input_ids": random_prompt(60, seed=seed),
                    "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
                }
                reply, headers = router.call("POST", "/generate", body)
                return reply, headers

            with ThreadPoolExecutor(8) as threads:
                before = [threads.submit(ask, seed) for seed in range(6)]
                time.sleep(0.3)
                for engine in leave:
                    router.admin("POST", f"/workers/127.0.0.1:{engine.port}/drain", {"drain": True})
                after = [threads.submit(ask, seed) for seed in range(6, 8)]
                for engine in leave:
                    engine.process.terminate()
                served = [one.result() for one in before]
                ended_s = time.monotonic()
                later = [one.result()[1] for one in after]
            assert [len(reply.body["output_ids"]) for reply, _ in served] == [NEW_TOKENS] * len(served)
            from_leaving = [seed for seed, (_, headers) in enumerate(served) if headers[DECODE] == leave[1].url]
            assert from_leaving
            expected = greedy_reference(random_prompt(60, seed=from_leaving[0]), NEW_TOKENS)
            assert served[from_leaving[0]][0].body["output_ids"] == expected
            assert not {leave[0].url, leave[1].url} & {one[kind] for one in later for kind in (PREFILL, DECODE)}
            for engine in leave:
                assert engine.process.wait(ENDS_WITHIN_S) == 0, engine.log_tail()
            assert time.monotonic() - ended_s < ENDS_WITHIN_S
    finally:
        for engine in leave:
            engine.stop()


@pytest.mark.full
def test_requests_that_still_come_neither_hang_nor_hold_up_the_end() -> None:
    """Over kept connections, until it answers 503 or closes them: stock SGLang leaves some without an answer."""
    engine = Engine.start(EngineSpec(Role.SHORT, name="leaving"))
    try:
        engine.wait_ready()
        results: list[list[object]] = [[] for _ in range(6)]
        clients = [
            threading.Thread(target=score_until_refused, args=(engine, 1 + 100_000 * number, statuses))
            for number, statuses in enumerate(results)
        ]
        for client in clients:
            client.start()
        time.sleep(1.0)
        engine.process.terminate()
        for client in clients:
            client.join()
        for statuses in results:
            assert statuses[-1] in {503, "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}, statuses[-1]
            assert len(statuses) > 2
        assert engine.process.wait(ENDS_WITHIN_S) == 0, engine.log_tail()
    finally:
        engine.stop()


def test_an_instance_that_is_loading_ends_at_once() -> None:
    """Also as the first process of a container, which the kernel spares signals that it has no handler for."""
    engine = Engine.start(EngineSpec(Role.DECODE, name="loading"))
    try:
        until_s = time.monotonic() + ENDS_WITHIN_S
        while not handles_sigterm(engine.process.pid):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        engine.process.terminate()
        assert engine.process.wait(ENDS_WITHIN_S) == 128 + signal.SIGTERM
        assert engine.process_ids() == []
    finally:
        engine.stop()


def handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(caught >> (signal.SIGTERM - 1) & 1)
