"""Real instances compute prompts by plans drawn at random, and decode instances with one and with two ranks go on.

Whatever the plan, the tokens are those of Hugging Face on one machine: groups of one to four instances that grow, up to
four chunks and more, both ways to deal tokens out, cached prefixes as history, prompts of several instances at once
whose groups grow towards each other, and requests beside them that are not shared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.long_pool.coordinator.pool_history import PrefillEnd, PrefillRecord
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.sharding import Interleaving
from sglang_ext.types import Role
from support.engines import FLEET, EngineFleet, EngineSpec
from support.laps import Pair, Prefill
from support.random_plans import RandomCoordinator

pytestmark = [pytest.mark.integration, pytest.mark.full]

HANDSHAKE = ("--transfer-backend", "handshake")
MEMBERS = 4
DECODE_RANKS = (1, 2)
PLANS_EACH = 26
LONGEST_TOKENS = 2000
AT_ONCE = 4


class Instances:
    """Four members, two decode instances, and the coordinator that they look for."""

    def __init__(self, threads: ThreadPoolExecutor, fleet: EngineFleet) -> None:
        self.coordinator = RandomCoordinator()
        options = (
            *HANDSHAKE,
            *("--cdsp-coordinator", self.coordinator.address, "--cdsp-min-tokens", "1"),
            *("--set", "cdsp.step_timeout_s=20", "--laps-boundary-tokens", "1"),
        )
        members = [EngineSpec(Role.LONG, worker_options=options, name=f"random{number}") for number in range(MEMBERS)]
        decodes = [
            EngineSpec(Role.DECODE, arguments=("--tp", str(ranks)), worker_options=HANDSHAKE, name="random")
            for ranks in DECODE_RANKS
        ]
        engines = fleet.get(*members, *decodes)
        self.pairs = [[Pair(member, decode, threads) for decode in engines[MEMBERS:]] for member in engines[:MEMBERS]]


@pytest.fixture(scope="module")
def instances() -> Iterator[Instances]:
    FLEET.close()  # six instances are as many as fit
    fleet = EngineFleet(MEMBERS + len(DECODE_RANKS))
    with ThreadPoolExecutor(32) as threads:
        try:
            yield Instances(threads, fleet)
        finally:
            fleet.close()


@pytest.mark.parametrize("interleaving", list(Interleaving), ids=str)
def test_tokens_do_not_depend_on_the_plan(instances: Instances, interleaving: Interleaving) -> None:
    draw = random.Random(str(interleaving))
    # One half is streamed and kept, the other one collected.
    is_streamed = interleaving is Interleaving.ZIGZAG
    settings = PoolSettings(
        interleaving,
        min_chunk_tokens=1,
        step_timeout_s=20.0,
        collects=not is_streamed,
        keeps_rows=is_streamed,
    )
    with instances.coordinator.running(settings, seed=len(interleaving)) as coordinator:
        coordinator.wait_for(lambda status: len(status.members) == MEMBERS)
        free = [_free_tokens(pairs[0]) for pairs in instances.pairs]
        served: list[list[Prefill]] = [[] for _ in instances.pairs]  # by owner
        for first in range(0, PLANS_EACH, AT_ONCE):
            running = []
            for number in range(first, min(first + AT_ONCE, PLANS_EACH)):
                owner = draw.randrange(MEMBERS)
                running.append(_send(instances.pairs[owner][number % 2], served[owner], number, draw))
                served[owner].append(running[-1])
            # A prompt of one token is not shared.
            beside = [instances.pairs[number][number % 2].send(1, seed=9000 + first + number) for number in range(2)]
            assert all(one.is_exact() for one in (*running, *beside))
        coordinator.wait_for(lambda status: not status.requests)
        ended = coordinator.status().recent
        assert (coordinator.status().prompts_kept > 0) == is_streamed
        for pairs, tokens in zip(instances.pairs, free, strict=True):
            pairs[0].check_clean(tokens)
    _check_variety(ended, PrefillEnd.STREAMED if is_streamed else PrefillEnd.COLLECTED)


def _send(pair: Pair, earlier: list[Prefill], number: int, draw: random.Random) -> Prefill:
    """A prompt of 2 to 2,000 tokens, some of it computed before by the same instance."""
    tokens = int(math.exp(draw.uniform(math.log(2), math.log(LONGEST_TOKENS + 1))))
    prefix = draw.choice(earlier).prompt if earlier and draw.random() < 0.4 else ()
    prefix = prefix[: draw.randint(0, tokens - 1)]
    return pair.send(tokens, seed=7000 + number, prefix=prefix)


def _check_variety(ended: tuple[PrefillRecord, ...], outcome: PrefillEnd) -> None:
    shared = [one for one in ended if one.outcome is outcome]
    assert len(shared) > PLANS_EACH // 2
    assert not any(step.has_failed for one in ended for step in one.steps)
    assert {len(step.members) for one in shared for step in one.chunks} == {1, 2, 3, 4}
    # A plan is made again after each chunk: how many there are of three, of four and of more depends on the moment.
    assert {1, 2, 3} == {min(len(one.chunks), 3) for one in shared}
    assert any(one.cached_tokens for one in shared)


def _free_tokens(pair: Pair) -> int:
    assert pair.prefill.post("/flush_cache", {}).status == 200
    tokens: int = pair.status()["kv"]["free_tokens"]
    return tokens
