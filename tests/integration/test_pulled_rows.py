"""Kept rows come from the members that computed them to one of them, which computes the next turn alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.laps import Pair
from support.long_pool import Coordinator
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router
from support.served_pool import HANDSHAKE, check_clean, free_tokens, long_member
from support.tiny_model import STANDARD_SHAPE

pytestmark = pytest.mark.integration
NEW_TOKENS = 6
LONG = 1024
FOLLOW_UP = 256
# A step of two instances costs as much as 600 tokens before it computes: a few are better computed by one.
SP_COSTS = {
    "format": "sglang-ext engine profile",
    "version": 1,
    "model": "any",
    "sp": [
        {"size": 1, "a_s": 0.0, "b_s_per_token": 1e-2, "c_s_per_token2": 0.0, "d_s_per_token2": 0.0},
        {"size": 2, "a_s": 6.0, "b_s_per_token": 1e-4, "c_s_per_token2": 0.0, "d_s_per_token2": 0.0},
    ],
}


@dataclass
class Pool:
    """Two members, a decode instance, a router that announces prompts, and the coordinator."""

    members: list[Engine]
    pairs: list[Pair]
    router: RunningRouter
    coordinator: Coordinator
    threads: ThreadPoolExecutor

    def ask(self, prompt: list[int]) -> Future[tuple[list[int], int]]:
        """Its greedy tokens, and how many of the prompt's were cached."""
        return self.threads.submit(self._ask, prompt)

    def is_exact(self, prompt: list[int]) -> bool:
        return self.ask(prompt).result()[0] == greedy_reference(prompt, NEW_TOKENS, STANDARD_SHAPE)

    def _ask(self, prompt: list[int]) -> tuple[list[int], int]:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        reply = self.router.post("/generate", {"input_ids": prompt, "sampling_params": sampling}, timeout_s=120)
        assert reply.status == 200, reply.body
        return reply.body["output_ids"], reply.body["meta_info"]["cached_tokens"]

    def settle(self, condition: Any = lambda status: True) -> dict[str, Any]:
        self.coordinator.wait_for(lambda status: not status["requests"] and condition(status))
        return self.coordinator.status()

    def kept_tokens(self) -> list[int]:
        return [member["kept_tokens"] for member in self.coordinator.status()["members"]]


def await_coordinator(router: RunningRouter) -> None:
    """Return once the router knows the pool."""
    deadline_s = time.monotonic() + 30.0
    while True:
        pool = router.call("GET", "/pools")[0].body["long_pool"]
        if pool["problem"] is None and len(pool["members"]) == 2:
            return
        assert time.monotonic() < deadline_s, pool
        time.sleep(0.05)


@contextmanager
def served(folder: Path, name: str, *member_arguments: str, kept_rows: str = "spread") -> Iterator[Pool]:
    """A pool whose kept rows come to one member when a prompt needs them, or, if `gathered`, before."""
    profile = folder / f"{name}.json"
    profile.write_text(json.dumps(SP_COSTS))
    options = ("--sp-sizes", "1,2", "--min-chunk-tokens", "64", "--set", f"pool.kept_rows={kept_rows}")
    with (
        Coordinator.running(*options, "--profile", str(profile)) as coordinator,
        ThreadPoolExecutor(16) as threads,
    ):
        specs = [long_member(coordinator, f"{name}{number}", member_arguments, HANDSHAKE) for number in range(2)]
        pages = tuple(member_arguments[:2]) if "--page-size" in member_arguments else ()
        *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, arguments=pages, worker_options=HANDSHAKE))
        coordinator.wait_for(lambda status: len(status["members"]) == 2)
        arguments = ("--coordinator-url", coordinator.http_url, "--length-boundary-tokens", "256")
        with running_router([*members, decode], *arguments) as router:
            await_coordinator(router)  # before it answers, prompts are not announced, and stay where they are
            yield Pool(members, [Pair(one, decode, threads) for one in members], router, coordinator, threads)
        for engine in (*members, decode):
            engine.stop()


@pytest.mark.parametrize(
    "arguments", [("--page-size", "16"), pytest.param(("--tp", "2"), marks=pytest.mark.full)], ids=["pages", "ranks"]
)
def test_the_next_turn_is_computed_where_all_rows_have_come_to(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with served(tmp_path, "pulls", *arguments) as pool:
        free = [free_tokens(pair) for pair in pool.pairs]
        first = random_prompt(LONG, seed=400)
        assert pool.is_exact(first)
        pool.settle(lambda status: status["prompts_kept"] == 1)
        assert min(pool.kept_tokens()) > 0
        second = [*first, *random_prompt(FOLLOW_UP, seed=401)]
        tokens, cached_tokens = pool.ask(second).result()
        assert (tokens, cached_tokens) == (greedy_reference(second, NEW_TOKENS), LONG)
        status = pool.settle(lambda status: status["prompts_kept"] == 2)
        assert status["prompts_pulled"] == 1
        assert [len(step["members"]) for step in status["recent"][-1]["steps"]] == [1]
        assert sorted(pool.kept_tokens()) == [0, (LONG + FOLLOW_UP) // 32 * 32]
        # The third turn finds everything at one instance, and so does another one that goes on from the first.
        third = [*second, *random_prompt(FOLLOW_UP, seed=402)]
        tokens, cached_tokens = pool.ask(third).result()
        assert (tokens, cached_tokens) == (greedy_reference(third, NEW_TOKENS), (LONG + FOLLOW_UP) // 32 * 32)
        assert pool.is_exact([*first, *random_prompt(FOLLOW_UP, seed=403)])
        assert pool.settle()["prompts_pulled"] == 1
        check_clean(pool.pairs, free)
        pool.settle(lambda status: status["prompts_kept"] == 0)


def test_rows_are_at_one_instance_before_the_next_turn_comes(tmp_path: Path) -> None:
    with served(tmp_path, "gathers", "--page-size", "16", kept_rows="gathered") as pool:
        free = [free_tokens(pair) for pair in pool.pairs]
        first = random_prompt(LONG, seed=405)
        assert pool.is_exact(first)
        status = pool.settle(lambda status: status["prompts_pulled"] == 1)
        assert (status["prompts_kept"], sorted(pool.kept_tokens())) == (1, [0, LONG])
        second = [*first, *random_prompt(FOLLOW_UP, seed=406)]
        tokens, cached_tokens = pool.ask(second).result()
        assert (tokens, cached_tokens) == (greedy_reference(second, NEW_TOKENS), LONG)
        status = pool.settle(lambda status: status["prompts_kept"] == 2)
        assert [len(step["members"]) for step in status["recent"][-1]["steps"]] == [1]
        assert (status["prompts_pulled"], sorted(pool.kept_tokens())) == (1, [0, (LONG + FOLLOW_UP) // 32 * 32])
        check_clean(pool.pairs, free)
        pool.settle(lambda status: status["prompts_kept"] == 0)


@pytest.mark.full
@pytest.mark.parametrize("how", ["source killed", "source hangs", "target killed", "coordinator killed"])
def test_a_prompt_whose_rows_do_not_come_is_answered(tmp_path: Path, how: str) -> None:
    """A source does nothing while the target waits for its rows, until something happens."""
    with served(tmp_path, "pulls-mortal", "--page-size", "16") as pool:
        free = [free_tokens(pair) for pair in pool.pairs]
        first = random_prompt(LONG, seed=410)
        assert pool.is_exact(first)
        pool.settle(lambda status: status["prompts_kept"] == 1)
        second = [*first, *random_prompt(FOLLOW_UP, seed=411)]
        with pool.members[1].frozen_scheduler():
            answer = pool.ask(second)
            time.sleep(1.0)
            assert not answer.done()
            match how:
                case "source killed":
                    pool.members[1].kill()
                case "target killed":
                    pool.members[0].kill()
                case "coordinator killed":
                    pool.coordinator.kill()
                case _:
                    time.sleep(7.0)
        assert answer.result()[0] == greedy_reference(second, NEW_TOKENS)
        left = {"source killed": [0], "target killed": [1]}.get(how, [0, 1])
        if how == "coordinator killed":
            pool.coordinator.start_again()
        pool.coordinator.wait_for(lambda status: len(status["members"]) == len(left))
        for number in range(3):
            assert pool.is_exact(random_prompt(LONG, seed=420 + number))
        pool.settle()
        check_clean([pool.pairs[one] for one in left], [free[one] for one in left])


@pytest.mark.full
def test_the_target_is_short_of_memory_while_rows_come(tmp_path: Path) -> None:
    with served(tmp_path, "pulls-little", "--page-size", "16", "--max-total-tokens", "2048") as pool:
        free = [free_tokens(pair) for pair in pool.pairs]
        first = random_prompt(LONG, seed=430)
        assert pool.is_exact(first)
        pool.settle(lambda status: status["prompts_kept"] == 1)
        second = [*first, *random_prompt(FOLLOW_UP, seed=431)]
        with pool.members[1].frozen_scheduler():
            answer = pool.ask(second)
            time.sleep(1.0)
            assert not answer.done()
            # More than what the rows that are to come leave: these evict what is kept, and the others wait.
            several = [pool.pairs[0].send(240, seed=432 + number) for number in range(10)]
            time.sleep(1.0)
        assert all(one.is_exact() for one in several)
        assert answer.result()[0] == greedy_reference(second, NEW_TOKENS, STANDARD_SHAPE)
        assert pool.is_exact(random_prompt(LONG, seed=445))
        pool.settle()
        check_clean(pool.pairs, free)
