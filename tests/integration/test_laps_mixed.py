"""Short and long prefills in one batch, one of them cut: tokens are right, whatever shares an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import LONG_TOKENS, SHAPE, Pair
from support.laps_checks import Counters, clean_pair
from support.reference import random_prompt

pytestmark = pytest.mark.integration

BATCH_TOKENS = 192
OPTIONS = ("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16")


@pytest.fixture(
    params=[pytest.param((1, 1), marks=pytest.mark.full), (1, 16), pytest.param((2, 1), marks=pytest.mark.full)],
    ids=["page 1", "page 16", "two ranks"],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ranks, page = request.param
    pages = () if page == 1 else ("--page-size", str(page))
    tensor_parallel = () if ranks == 1 else ("--tp", str(ranks))
    prefill = EngineSpec(
        Role.BOTH,
        shape=SHAPE,
        arguments=("--chunked-prefill-size", str(BATCH_TOKENS), *pages, *tensor_parallel),
        worker_options=OPTIONS,
    )
    engines = FLEET.get(prefill, EngineSpec(Role.DECODE, shape=SHAPE, arguments=pages))
    with ThreadPoolExecutor(60) as threads:
        yield from clean_pair(Pair(*engines, threads))


def test_greedy_tokens_of_mixed_batches(pair: Pair) -> None:
    """Many long prefills wait, so that a short one's own iteration would cost them more than sharing one costs it."""
    before = Counters.of(pair.prefill)
    requests = []
    mixed = 0
    for number in range(40):  # on a busy machine the long ones may be done before a short one gets there
        if number % 4 == 0:
            requests += [pair.send(LONG_TOKENS // 2 - 37 * more, seed=2200 + 20 * number + more) for more in range(12)]
        short = pair.send(1 + 7 * (number % 8), seed=2020 + number, slo_ms=60_000)
        requests.append(short)
        short.replies.result(timeout=60)
        mixed = Counters.of(pair.prefill).since(before)("dispatches_total", length_class="long", reason="mixed")
        if number >= 7 and mixed:
            break
    assert all(request.is_exact() for request in requests)
    assert mixed >= 1
    assert pair.status()["parked"] == 0


def test_a_cached_prefix_beside_a_chunk(pair: Pair) -> None:
    """Prompts that share a beginning are looked up while another prompt is cut."""
    prefix = random_prompt(160, seed=2100)
    assert pair.send(170, seed=2101, prefix=prefix).is_exact()
    requests = [pair.send(LONG_TOKENS, seed=2110)]
    requests += [pair.send(165 + 3 * number, seed=2120 + number, prefix=prefix) for number in range(12)]
    requests += [pair.send(20 + number, seed=2140 + number) for number in range(12)]
    assert all(request.is_exact() for request in requests)
