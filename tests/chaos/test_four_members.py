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
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.held_thread import held_thread
from support.laps import Pair, Prefill
from support.long_pool import Coordinator
from support.served_pool import HANDSHAKE, check_clean, free_tokens, long_member

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full]
TABLE = Path(__file__).parents[2] / "run" / "long-pool-faults.md"
MEMBERS = 4
RANKS = ("--tp-size", "2")
SHORT_OF_MEMORY, FEW_TOKENS = 3, 640  # the last member, and its KV pool
PROMPT_TOKENS = 1900
# Others are served within so long, and what a loaded machine takes for such prompts without any fault.
SERVED_WITHIN_S = 10.0
CALM_TIMES = 4
LIMIT_S = 90.0  # of everything else that is waited for
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
        """All of them, members that take chunks; who was killed is started again."""
        specs = [_member(self.coordinator, number) for number in range(MEMBERS)]
        *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, worker_options=HANDSHAKE, name="four"))
        self.coordinator.wait_for(is_whole, LIMIT_S)
        return [Pair(member, decode, self.threads) for member in members]


def _member(coordinator: Coordinator, number: int) -> EngineSpec:
    few = ("--max-total-tokens", str(FEW_TOKENS)) if number == SHORT_OF_MEMORY else ()
    return long_member(coordinator, f"four{number}", (*RANKS, *few), worker_options=HANDSHAKE)


def is_whole(status: dict[str, Any]) -> bool:
    """Whether four members take chunks."""
    return sum(member["is_ready"] for member in status["members"]) == MEMBERS


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    options = ("--sp-sizes", "1,2,4", "--min-chunk-tokens", "64", "--set", "pool.step_timeout_ms=5000")
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
    calm_s = _calm_s(pairs, seed=1000 * list(FAULTS).index(fault) + 500)
    owner, prompt, victim = _at_a_chunk_with_another(pool, pairs, seed=1000 * list(FAULTS).index(fault))
    other = next(pair for pair in pairs if pair not in (owner, victim))
    with FAULTS[fault](victim.prefill):
        hit_s = time.monotonic()
        another = other.send(PROMPT_TOKENS, seed=77)
        another_s, prompt_s = (_answered_s(one, hit_s) for one in (another, prompt))
        assert another_s < SERVED_WITHIN_S + CALM_TIMES * calm_s
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


def test_a_member_short_of_memory(pool: Pool, table: list[tuple[str, ...]]) -> None:
    """Its whole KV pool cannot hold the prompts that come to it: the others hold them, and send them to decode."""
    pairs = pool.pairs()
    free = [free_tokens(pair) for pair in pairs]
    victim, other = pairs[SHORT_OF_MEMORY], pairs[0]
    before = pool.coordinator.settled()["requests_streamed"]
    hit_s = time.monotonic()
    sent = [pair.send(PROMPT_TOKENS, seed=20 + number) for number, pair in enumerate((other, victim, other, victim))]
    another_s, prompt_s = (_answered_s(one, hit_s) for one in sent[:2])
    assert all(one.is_exact() for one in sent)
    assert pool.coordinator.settled()["requests_streamed"] == before + len(sent)
    check_clean(pairs, free)
    table.append(("short of memory", f"{another_s:.1f}", f"{prompt_s:.1f}", "-"))


def _answered_s(one: Prefill, since_s: float) -> float:
    """When it was answered; what the answer is wanted to be takes time of its own."""
    one.replies.result(timeout=LIMIT_S)
    return time.monotonic() - since_s


def _calm_s(pairs: list[Pair], seed: int) -> float:
    """How long two prompts at once take, as long as nothing is wrong."""
    began_s = time.monotonic()
    sent = [pair.send(PROMPT_TOKENS, seed=seed + number) for number, pair in enumerate(pairs[:2])]
    return max(_answered_s(one, began_s) for one in sent)


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
