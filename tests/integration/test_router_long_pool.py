"""Long prompts that the router offers to the pool: no instance has one before its turn, and tokens are those of one."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from sglang_ext.live.timeline import timeline_of
from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.long_pool import Coordinator
from support.pd import greedy, new_room
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router
from support.served_pool import HANDSHAKE, long_member

pytestmark = pytest.mark.integration
NEW_TOKENS = 6
LONG = 900
BIND_TIMEOUT_S = 5.0  # of the coordinator
HELD_TOKENS = 60_000  # by the coordinator's profile 20 s on three members


def member(coordinator: Coordinator, number: int, *worker_options: str) -> EngineSpec:
    options = (
        *worker_options,
        *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", "200"),
        *("--laps-boundary-tokens", "256", "--set", "cdsp.step_timeout_s=10"),
    )
    return EngineSpec(Role.LONG, worker_options=options, name=f"offered{number}")


def offered(router: RunningRouter, outcome: str) -> float:
    return router.metric("sglang_ext_router_pool_offers_total", f'outcome="{outcome}"')


def is_complete(status: dict[str, Any]) -> bool:
    return len(status["members"]) == 3


@pytest.mark.full
def test_two_prompts_wait_for_their_turn_in_the_coordinator() -> None:
    """All of three instances compute each prompt, so that the second one's turn comes after the first's."""
    with Coordinator.running("--sp-sizes", "3", "--min-chunk-tokens", "64") as coordinator:
        engines = FLEET.get(*(member(coordinator, number) for number in range(3)), EngineSpec(Role.DECODE))
        coordinator.wait_for(is_complete)
        arguments = ("--coordinator-url", coordinator.http_url, "--length-boundary-tokens", "256")
        with running_router(engines, *arguments) as router, ThreadPoolExecutor(2) as threads:
            prompts = [random_prompt(LONG + seed, seed=700 + seed) for seed in range(2)]
            replies = [threads.submit(router.greedy, prompt, NEW_TOKENS) for prompt in prompts]
            assert [one.result() for one in replies] == [greedy_reference(prompt, NEW_TOKENS) for prompt in prompts]
            assert offered(router, "named") == 2

            status = coordinator.status()
            assert status["tickets_waiting"] == 0
            first, second = sorted(status["recent"], key=lambda prefill: prefill["steps"][0]["ordered_s"])
            assert (first["outcome"], second["outcome"]) == ("collected", "collected")
            members = {one["instance"] for one in status["members"]}
            for one in (first, second):
                ticket = one["ticket"]
                assert ticket["announced_s"] <= ticket["bound_s"] <= one["offered_s"]
                chunks = [step for step in one["steps"] if step["kind"] == "chunk"]
                assert sum(chunk["new_tokens"] for chunk in chunks) == one["tokens"]
                assert all(set(chunk["members"]) == members for chunk in chunks)
            # Each chunk takes all instances, so the second's turn comes when the first's last chunk has ended.
            assert first["steps"][-1]["ended_s"] <= second["steps"][0]["ordered_s"]
            timeline = timeline_of(status, 2)
            assert {bar.request for bar in timeline.bars} == {0, 1}
            assert len({bar.instance for bar in timeline.bars}) == 3

            coordinator.kill()  # what is offered no more is routed as ever
            prompt = random_prompt(LONG, seed=710)
            assert router.greedy(prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS)
            assert offered(router, "away") == 1
        for engine in engines[:3]:
            engine.stop()


@contextmanager
def held_turns(coordinator: Coordinator, count: int, threads: ThreadPoolExecutor) -> Iterator[None]:
    """`count` prompts are announced, and never sent: all but one wait, whose members are free after 5 s."""
    is_over = threading.Event()

    def announce() -> None:
        while not is_over.is_set():
            body = json.dumps({"ticket": new_room(), "tokens": HELD_TOKENS}).encode()
            request = urllib.request.Request(
                f"{coordinator.http_url}/tickets", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as reply:
                assert reply.status == 200
            is_over.wait(BIND_TIMEOUT_S + 1.0)  # its members are kept for it, and then the next has its turn

    held = [threads.submit(announce) for _ in range(count)]
    try:
        coordinator.wait_for(lambda status: status["tickets_waiting"] == count - 1)
        yield
    finally:
        is_over.set()
        for one in held:
            one.result()


@pytest.mark.full
def test_decode_has_no_room_taken_for_a_prompt_that_waits_in_the_coordinator() -> None:
    """As it has for one that waits in its prefill instance."""
    with Coordinator.running("--sp-sizes", "3", "--min-chunk-tokens", "64") as coordinator:
        specs = [member(coordinator, number, *HANDSHAKE) for number in range(3)]
        engines = FLEET.get(*specs, EngineSpec(Role.DECODE, worker_options=HANDSHAKE))
        prefill, *_, decode = engines
        coordinator.wait_for(is_complete)
        arguments = ("--coordinator-url", coordinator.http_url, "--length-boundary-tokens", "256")
        with running_router(engines, *arguments) as router, ThreadPoolExecutor(4) as threads:
            prompt = random_prompt(LONG, seed=740)
            with held_turns(coordinator, 3, threads):
                # Without a deadline it comes behind the others.
                reply = threads.submit(router.greedy, prompt, NEW_TOKENS, {"x-sgl-priority": "low"})
                coordinator.wait_for(lambda status: status["tickets_waiting"] == 3)
                used = decode.load()["num_used_tokens"]
                assert offered(router, "named") == 0
            assert used == 0
            assert reply.result() == greedy_reference(prompt, NEW_TOKENS)
            assert offered(router, "named") == 1
            with prefill.frozen_scheduler():
                reply = threads.submit(greedy, prefill, decode, prompt, NEW_TOKENS)
                decode.wait_for_load(lambda load: load["num_used_tokens"] >= LONG, timeout_s=60)
            assert reply.result() == greedy_reference(prompt, NEW_TOKENS)
        for engine in engines:
            engine.stop()


@pytest.mark.full
def test_a_prompt_larger_than_its_instance_is_sent_again_when_a_member_is_lost() -> None:
    """Its KV cannot come to its own instance; the router lets the pool compute it again."""
    small = ("--page-size", "16", "--max-total-tokens", "640")
    with Coordinator.running("--sp-sizes", "1,2,3", "--min-chunk-tokens", "64") as coordinator:
        specs = [long_member(coordinator, f"broken{number}", small, HANDSHAKE) for number in range(3)]
        decode = EngineSpec(Role.DECODE, arguments=("--page-size", "16"), worker_options=HANDSHAKE)
        engines = FLEET.get(*specs, decode)
        coordinator.wait_for(is_complete)
        # The router does not know the member that will be lost.
        mortal = engines.pop(0)
        arguments = ("--length-boundary-tokens", "256")
        with running_router(engines, *arguments) as router, ThreadPoolExecutor(1) as threads:
            prompt = random_prompt(1100, seed=720)
            with mortal.frozen_scheduler():
                reply = threads.submit(router.greedy, prompt, NEW_TOKENS)
                coordinator.wait_for(
                    lambda status: any(len(step["members"]) == 3 for one in status["requests"] for step in one["steps"])
                )
                mortal.kill()
            assert reply.result() == greedy_reference(prompt, NEW_TOKENS)
        ended = coordinator.settled()["recent"]
        assert [one["outcome"] for one in ended] == ["no_room", "streamed"]
        for engine in (mortal, *engines):
            engine.stop()


def test_the_next_turn_begins_behind_what_the_pool_has_kept() -> None:
    with Coordinator.running("--sp-sizes", "1,2,3", "--min-chunk-tokens", "64") as coordinator:
        specs = [long_member(coordinator, f"turns{number}", (), HANDSHAKE) for number in range(3)]
        engines = FLEET.get(*specs, EngineSpec(Role.DECODE, worker_options=HANDSHAKE))
        coordinator.wait_for(is_complete)
        arguments = ("--coordinator-url", coordinator.http_url, "--length-boundary-tokens", "256")
        with running_router(engines, *arguments) as router:
            prompt = random_prompt(LONG, seed=730)
            assert router.greedy(prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS)
            assert offered(router, "named") == 1
            coordinator.wait_for(lambda status: status["prompts_kept"] == 1)
            turn = prompt + random_prompt(300, seed=731)
            assert router.greedy(turn, NEW_TOKENS) == greedy_reference(turn, NEW_TOKENS)
            assert offered(router, "named") == 2
            assert coordinator.settled()["recent"][-1]["kept_tokens"] == LONG // 32 * 32
        for engine in engines:
            engine.stop()
