"""Chunks on growing groups of real model runners against stock SGLang: same logits, same KV, nothing leaked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from sglang_ext.policy.cdsp.sharding import Interleaving, Lot, lay_out
from sglang_ext.sequence_parallel.chunk_step import tags_needed
from support.ring_instances import RingInstances, Step, ring_instances
from support.tiny_model import tiny_model

pytestmark = pytest.mark.integration
LOGIT_TOLERANCE = 1e-4
INSTANCES = 4
LAYERS = 2


class Plan(NamedTuple):
    """A request over growing groups."""

    cached_tokens: int  # held by the first instance's prefix cache
    chunks: tuple[tuple[int, tuple[int, ...]], ...]  # tokens, group
    interleaving: Interleaving
    is_overlapped: bool
    seed: int

    @property
    def token_ids(self) -> list[int]:
        draw = random.Random(self.seed)
        tokens = self.cached_tokens + sum(tokens for tokens, _ in self.chunks)
        return [draw.randrange(8, 2000) for _ in range(tokens)]


def random_plan(seed: int) -> Plan:
    draw = random.Random(seed)
    order = draw.sample(range(INSTANCES), INSTANCES)
    count = draw.randrange(1, 5)
    sizes = sorted(draw.choice((1, 2, 3, 4)) for _ in range(count))
    lengths = [draw.choice((1, 2, 3, draw.randrange(2, 60), draw.randrange(60, 500))) for _ in range(count)]
    cached = draw.choice((0, 0, 0, draw.randrange(1, 100)))
    if cached + sum(lengths) < 2:
        lengths[0] = 2
    chunks = tuple((length, tuple(order[:size])) for length, size in zip(lengths, sizes, strict=True))
    return Plan(cached, chunks, draw.choice(list(Interleaving)), draw.random() < 0.7, seed)


def steps_of(plan: Plan, request: int, first_tag: int, page_tokens: int) -> list[Step]:
    held: dict[int, tuple[Lot, ...]] = {}
    if plan.cached_tokens:
        held[plan.chunks[0][1][0]] = (Lot((range(plan.cached_tokens),), is_borrowed=True),)
    steps, start, tag = [], plan.cached_tokens, first_tag
    for tokens, group in plan.chunks:
        layout, held = lay_out(held, (range(start, start + tokens),), group, plan.interleaving, page_tokens)
        ids = tuple(tuple(plan.token_ids[p] for part in positions for p in part) for positions in layout.new)
        steps.append(Step(request, layout, ids, tag, plan.is_overlapped))
        tag += tags_needed(layout, LAYERS)
        start += tokens
    return steps


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[RingInstances, int]]:
    model: Path = tiny_model()
    with ring_instances(model, INSTANCES, request.param) as instances:
        yield instances, request.param


def check(instances: RingInstances, page_tokens: int, plan: Plan) -> None:
    before = instances.free_tokens()
    owner = plan.chunks[0][1][0]
    if plan.cached_tokens:
        instances.keep_prefix(owner, 0, plan.token_ids[: plan.cached_tokens])
    for step in steps_of(plan, 0, 1000, page_tokens):
        logits = instances.step(step)
    wanted = instances.stock(owner, plan.token_ids)
    torch.testing.assert_close(logits, wanted, atol=LOGIT_TOLERANCE, rtol=0)
    assert int(logits.argmax()) == int(wanted.argmax())
    instances.end(0)
    assert instances.free_tokens() == before


@pytest.mark.parametrize("seed", range(50))
def test_random_plans(pool: tuple[RingInstances, int], seed: int) -> None:
    check(*pool, random_plan(seed))


@pytest.mark.parametrize("interleaving", list(Interleaving))
def test_a_long_prompt_over_one_two_and_four(pool: tuple[RingInstances, int], interleaving: Interleaving) -> None:
    chunks = ((400, (2,)), (600, (2, 0)), (900, (2, 0, 3, 1)))
    check(*pool, Plan(100, chunks, interleaving, True, 1234))


def test_the_kv_is_that_of_stock(pool: tuple[RingInstances, int]) -> None:
    instances, page_tokens = pool
    plan = Plan(0, ((70, (1,)), (130, (1, 3)), (101, (1, 3, 0))), Interleaving.ZIGZAG, True, 5)
    for step in steps_of(plan, 0, 1000, page_tokens):
        instances.step(step)
    instances.keep_prefix(2, 1, plan.token_ids)
    positions, wanted = instances.kv_of(2, 1)
    assert positions.tolist() == list(range(301))
    seen: list[int] = []
    for instance in (0, 1, 3):
        positions, kv = instances.kv_of(instance, 0)
        torch.testing.assert_close(kv, wanted[:, :, positions], atol=2e-5, rtol=1e-4)
        seen += positions.tolist()
    assert sorted(seen) == list(range(301))
    instances.end(0)
    instances.end(1)


def test_two_requests_that_grow_in_opposite_directions(pool: tuple[RingInstances, int]) -> None:
    instances, page_tokens = pool
    first = Plan(0, ((90, (0,)), (120, (0, 1)), (200, (0, 1, 2, 3))), Interleaving.ZIGZAG, True, 11)
    second = Plan(0, ((80, (3,)), (140, (3, 2)), (180, (3, 2, 1, 0))), Interleaving.STRIPED, True, 12)
    a, b = steps_of(first, 1, 10_000, page_tokens), steps_of(second, 2, 20_000, page_tokens)
    answers = instances.steps([step for pair in zip(a, b, strict=True) for step in pair])
    logits = [answer for answer in answers if answer is not None]
    assert len(logits) == 6
    for plan, got in ((first, logits[-2]), (second, logits[-1])):
        torch.testing.assert_close(got, instances.stock(0, plan.token_ids), atol=LOGIT_TOLERANCE, rtol=0)
    instances.end(1)
    instances.end(2)
