"""Four members of two ranks each: one of them hangs, is stopped, is killed or has no memory; the others go on.

What it costs is written as a table, `run/long-pool-faults.md`: from the fault on, the time until a prompt of another
instance is answered, until the prompt is answered that was being computed with the victim, and until, once the fault is
over, four members take chunks again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec, Reply
from support.held_thread import held_thread
from support.laps import Pair, Prefill
from support.long_pool import Coordinator
from support.pd import send_both
from support.reference import random_prompt
from support.served_pool import HANDSHAKE, check_clean, free_tokens, long_member

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full]
TABLE = Path(__file__).parents[2] / "run" / "long-pool-faults.md"
MEMBERS = 4
KV_TOKENS = 2560
RANKS = ("--tp-size", "2", "--max-total-tokens", str(KV_TOKENS))
FILLING_TOKENS = 2300
PROMPT_TOKENS = 1900
# Beyond what the fault itself may take: a loaded machine computes for others, too.
LIMIT_S = 90.0
HEADS = (
    "fault of one member of four",
    "another prompt answered, s",
    "the prompt under way answered, s",
    "whole again, s",
)


class Pool(NamedTuple):
    """Four prefill instances and one decode instance."""

    coordinator: Coordinator
    threads: ThreadPoolExecutor

    def pairs(self) -> list[Pair]:
        """All of them, members that take chunks; who was killed is started anew."""
        specs = [
            long_member(self.coordinator, f"four{number}", RANKS, worker_options=HANDSHAKE) for number in range(MEMBERS)
        ]
        *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, worker_options=HANDSHAKE, name="four"))
        self.coordinator.wait_for(is_whole, LIMIT_S)
        return [Pair(member, decode, self.threads) for member in members]


def is_whole(status: dict[str, Any]) -> bool:
    """Whether four members take chunks."""
    return sum(member["is_ready"] for member in status["members"]) == MEMBERS


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    options = ("--sp-sizes", "1,2,4", "--min-chunk-tokens", "64", "--step-timeout-ms", "5000")
    with Coordinator.running(*options) as coordinator, ThreadPoolExecutor(40) as threads:
        one = Pool(coordinator, threads)
        yield one
        pairs = one.pairs()
        for engine in (*(pair.prefill for pair in pairs), pairs[0].decode):
            engine.stop()


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    yield rows
    lines = [" | ".join(row) for row in (HEADS, ("---",) * len(HEADS), *rows)]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("".join(f"| {line} |\n" for line in lines))


def _ranks(engine: Engine) -> list[int]:
    return sorted(engine.process_ids("sglang::scheduler"))


@contextmanager
def _stopped(processes: list[int]) -> Iterator[None]:
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


@contextmanager
def _killed(engine: Engine) -> Iterator[None]:
    for process in engine.process_ids():
        os.kill(process, signal.SIGKILL)
    engine.process.wait()
    yield


@contextmanager
def _hung(engine: Engine) -> Iterator[None]:
    """Its engine does nothing, while its connections are kept alive by threads of their own."""
    with ExitStack() as held:
        for process in _ranks(engine):
            held.enter_context(held_thread(process))
        yield


FAULTS: dict[str, Callable[[Engine], AbstractContextManager[None]]] = {
    "stopped (SIGSTOP of all its processes)": lambda engine: _stopped(engine.process_ids()),
    "hung (its engine's threads held, its connections alive)": _hung,
    "one of its two ranks stopped": lambda engine: _stopped(_ranks(engine)[1:]),
    "killed": _killed,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_member(pool: Pool, table: list[tuple[str, ...]], fault: str) -> None:
    pairs = pool.pairs()
    free = [free_tokens(pair) for pair in pairs]
    owner, prompt, victim = _at_a_chunk_with_another(pool, pairs, seed=1000 * list(FAULTS).index(fault))
    other = next(pair for pair in pairs if pair not in (owner, victim))
    with FAULTS[fault](victim.prefill):
        hit_s = time.monotonic()
        another = other.send(PROMPT_TOKENS, seed=77)
        another_s, prompt_s = (_answered_s(one, hit_s) for one in (another, prompt))
        assert another.is_exact()
        assert prompt.is_exact()
        # Also what comes later goes to the others at once.
        assert all(other.send(600 + 100 * number, seed=80 + number).is_exact() for number in range(3))
    over_s = time.monotonic()
    pairs = pool.pairs()
    whole_s = time.monotonic() - over_s
    assert all(pair.send(PROMPT_TOKENS, seed=90 + number).is_exact() for number, pair in enumerate(pairs))
    check_clean(pairs, free)
    table.append((fault, f"{another_s:.1f}", f"{prompt_s:.1f}", f"{whole_s:.1f}"))


def test_a_member_without_memory(pool: Pool, table: list[tuple[str, ...]]) -> None:
    """Its KV is held by prompts whose decode instance is frozen; a prompt of its own is computed by the others."""
    pairs = pool.pairs()
    free = [free_tokens(pair) for pair in pairs]
    (frozen,) = FLEET.get(EngineSpec(Role.DECODE, worker_options=HANDSHAKE, name="four-frozen"))
    victim, other = pairs[:2]
    with ExitStack() as stack:
        waiting = _fill(Pair(victim.prefill, frozen, pool.threads), pool.threads, stack)
        hit_s = time.monotonic()
        prompt, another = victim.send(PROMPT_TOKENS, seed=20), other.send(PROMPT_TOKENS, seed=21)
        another_s, prompt_s = (_answered_s(one, hit_s) for one in (another, prompt))
    over_s = time.monotonic()
    waiting.result(timeout=LIMIT_S)  # answered, or given up as its decode instance had gone
    whole_s = time.monotonic() - over_s
    assert prompt.is_exact()
    assert another.is_exact()
    check_clean(pairs, free)
    frozen.stop()
    table.append(("its KV memory taken", f"{another_s:.1f}", f"{prompt_s:.1f}", f"{whole_s:.1f}"))


def _answered_s(one: Prefill, since_s: float) -> float:
    """When it was answered; what the answer is wanted to be takes time of its own."""
    one.replies.result(timeout=LIMIT_S)
    return time.monotonic() - since_s


def _fill(held: Pair, threads: ThreadPoolExecutor, stack: ExitStack) -> Future[tuple[Reply, Reply]]:
    """A prompt that holds most of the prefill instance's KV, computed there alone; decode is frozen until the stack
    ends."""
    for attempt in range(10):
        # What wants its tokens' probabilities is not shared.
        body = {
            "input_ids": random_prompt(FILLING_TOKENS, seed=attempt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
        }
        waiting = threads.submit(send_both, held.prefill, held.decode, body)
        held.wait_for(lambda status: status["kv"]["locked_tokens"] > 0)
        with ExitStack() as freezing:
            freezing.enter_context(held.decode.frozen_scheduler())
            try:
                held.wait_for(lambda status: status["kv"]["locked_tokens"] >= FILLING_TOKENS, timeout_s=5)
            except AssertionError:
                continue  # decode had it all before
            stack.push(freezing.pop_all())
            return waiting
    raise AssertionError("the KV pool could not be filled")


def _at_a_chunk_with_another(pool: Pool, pairs: list[Pair], seed: int) -> tuple[Pair, Prefill, Pair]:
    """A prompt of the first instance, in the middle of a chunk that another one takes part in."""
    deadline_s = time.monotonic() + LIMIT_S
    names = [pair.prefill.url.partition("://")[2] for pair in pairs]
    while time.monotonic() < deadline_s:
        seed += 1
        prompt = pairs[0].send(PROMPT_TOKENS, seed)
        while not prompt.replies.done():
            for name in _others_at_a_chunk(pool.coordinator.status(), names[0]):
                return pairs[0], prompt, pairs[names.index(name)]
    raise AssertionError("no prompt was seen in the middle of a chunk")


def _others_at_a_chunk(status: dict[str, Any], owner: str) -> list[str]:
    names = {member["instance"]: member["name"] for member in status["members"]}
    return [
        names[member]
        for request in status["requests"]
        for step in request["steps"]
        if step["kind"] == "chunk" and step["ended_s"] is None
        for member in step["members"]
        if names.get(member, owner) != owner
    ]
