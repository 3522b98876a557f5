"""Real SGLang instances as members of a long pool, and whether nothing of a prompt is left on them."""

from __future__ import annotations

from sglang_ext.types import Role
from support.engines import EngineSpec
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
