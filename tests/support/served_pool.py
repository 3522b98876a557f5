"""Real SGLang instances as members of a long pool, and whether nothing of a prompt is left on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import Pair
from support.long_pool import Coordinator

MIN_TOKENS = 200
HANDSHAKE = ("--transfer-backend", "handshake")


def long_member(
    coordinator: Coordinator, name: str, arguments: tuple[str, ...] = (), worker_options: tuple[str, ...] = ()
) -> EngineSpec:
    """An instance that shares its prompts from `MIN_TOKENS` tokens on."""
    options = (
        *worker_options,
        *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", str(MIN_TOKENS)),
        *("--laps-boundary-tokens", "256", "--set", "cdsp.step_timeout_s=5"),
    )
    return EngineSpec(Role.LONG, worker_options=options, arguments=arguments, name=name)


def free_tokens(pair: Pair) -> int:
    """KV of the prefill instance, with an empty prefix cache."""
    assert pair.prefill.post("/flush_cache", {}).status == 200
    tokens: int = pair.status()["kv"]["free_tokens"]
    return tokens


def check_clean(pool: list[Pair], free: list[int]) -> None:
    """All of it is free again."""
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


class SharedPrompts(NamedTuple):
    """Describes the prompts of a test, and what must be served for them."""

    seed: Callable[[int, int, tuple[int, ...]], int]  # of a prompt, by its number, length and prefix
    expected: Callable[[Sequence[int]], list[int]]
    outcome: str  # that the coordinator counts for each


def share_prompts(
    threads: ThreadPoolExecutor,
    arguments: tuple[str, ...],
    options: tuple[str, ...],
    decode: EngineSpec,
    prompts: SharedPrompts,
) -> None:
    """Serve four prompts on two members with these SGLang arguments and worker options; the last one goes on behind the
    third. Check tokens and outcome of each, that both members computed, and that all memory is free."""
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as coordinator:
        specs = [long_member(coordinator, f"sharing{number}", arguments, options) for number in range(2)]
        *members, last = FLEET.get(*specs, decode)
        try:
            coordinator.wait_for(lambda status: len(status["members"]) == 2)
            pool = [Pair(engine, last, threads) for engine in members]
            free = [free_tokens(pair) for pair in pool]
            before = coordinator.settled()[prompts.outcome]
            prefix: tuple[int, ...] = ()
            for number, length in enumerate((300, 913, 1500, 1900)):
                request = pool[number % 2].send(length, prompts.seed(number, length, prefix), prefix=prefix)
                assert request.tokens() == prompts.expected(request.prompt), length
                prefix = request.prompt if number == 2 else ()
            after = coordinator.settled()
            assert after[prompts.outcome] == before + 4
            assert any(len(step["members"]) == 2 for one in after["recent"] for step in one["steps"])
            check_clean(pool, free)
        finally:
            for engine in (*members, last):
                engine.stop()
