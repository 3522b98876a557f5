"""Chunks on groups of instances with two tensor-parallel ranks each against stock SGLang with the same ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_ext.long_pool.decide.sharding import Interleaving
from support.chunk_plans import LOGIT_TOLERANCE, Plan, check, random_plan, steps_of
from support.ring_instances import RingInstances, ring_instances
from support.tiny_model import TinyModelShape, tiny_model

pytestmark = pytest.mark.integration
INSTANCES = 2
RANKS = 2
# Three KV heads on two ranks are four, one of them nothing but padding.
PADDED = TinyModelShape(hidden=48, heads=6, kv_heads=3)
EVEN = TinyModelShape()


@pytest.fixture(scope="module", params=[(EVEN, 16), (PADDED, 1)], ids=["even-page16", "padded-page1"])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[RingInstances, int]]:
    shape, page_tokens = request.param
    with ring_instances(tiny_model(shape), INSTANCES, page_tokens, ranks=RANKS) as instances:
        # A rank that fails sends word to the peers that it is connected to; the coordinator's word reaches the others,
        # and there is none here.
        check(instances, page_tokens, Plan(9, ((64, (1, 0)),), Interleaving.ZIGZAG, 3))
        yield instances, page_tokens


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_random_plans(pool: tuple[RingInstances, int], seed: int) -> None:
    check(*pool, random_plan(1000 + seed, INSTANCES))


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("calls", [0, 3, 5])
def test_a_ring_that_breaks_for_one_rank_fails_the_step_for_all(
    pool: tuple[RingInstances, int], rank: int, calls: int
) -> None:
    """No rank is left waiting in the model's own collectives, all are as before, and the chunk can be done again."""
    instances, page_tokens = pool
    before = instances.free_tokens()
    plan = Plan(0, ((90, (1,)), (120, (1, 0)), (150, (1, 0))), Interleaving.ZIGZAG, 77)
    first, second, third = steps_of(plan, 0, 1000, page_tokens)
    instances.step(first)
    held = instances.free_tokens()
    instances.break_ring(0, rank, calls)
    reasons = instances.failures(second)
    assert len(reasons) == 2 * RANKS
    other, broken = (reasons[place * RANKS : (place + 1) * RANKS] for place in range(2))
    assert all(broken), reasons
    # The other instance may have had all that it needs before the ring broke; then the coordinator has it roll back.
    if not any(other):
        instances.roll_back(1, 0)
    else:
        assert all(other), reasons
    assert instances.free_tokens() == held
    instances.join()
    instances.step(second._replace(first_tag=5000))
    logits = instances.step(third._replace(first_tag=9000))
    torch.testing.assert_close(logits, instances.stock(1, plan.token_ids), atol=LOGIT_TOLERANCE, rtol=0)
    instances.end(0)
    assert instances.free_tokens() == before
