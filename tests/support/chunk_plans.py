"""Random plans of one request over growing groups, and what has to be true of one that was run."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from sglang_ext.long_pool.decide.sharding import Interleaving, KvSegment, lay_out
from support.ring_instances import RingInstances, Step

LOGIT_TOLERANCE = 1e-4
LAYERS = 4  # of a model, at most


class Plan(NamedTuple):
    """A request over growing groups."""

    cached_tokens: int  # held by the first instance's prefix cache
    chunks: tuple[tuple[int, tuple[int, ...]], ...]  # tokens, group
    interleaving: Interleaving
    seed: int
    vocabulary: int = 2000

    @property
    def token_ids(self) -> list[int]:
        draw = random.Random(self.seed)
        tokens = self.cached_tokens + sum(tokens for tokens, _ in self.chunks)
        return [draw.randrange(8, self.vocabulary) for _ in range(tokens)]


def random_plan(seed: int, instances: int) -> Plan:
    draw = random.Random(seed)
    order = draw.sample(range(instances), instances)
    count = draw.randrange(1, 5)
    sizes = sorted(draw.randrange(1, instances + 1) for _ in range(count))
    lengths = [draw.choice((1, 2, 3, draw.randrange(2, 60), draw.randrange(60, 500))) for _ in range(count)]
    cached = draw.choice((0, 0, 0, draw.randrange(1, 100)))
    if cached + sum(lengths) < 2:
        lengths[0] = 2
    chunks = tuple((length, tuple(order[:size])) for length, size in zip(lengths, sizes, strict=True))
    return Plan(cached, chunks, draw.choice(list(Interleaving)), seed)


def steps_of(plan: Plan, request: int, first_tag: int, page_tokens: int) -> list[Step]:
    held: dict[int, tuple[KvSegment, ...]] = {}
    if plan.cached_tokens:
        held[plan.chunks[0][1][0]] = (KvSegment((range(plan.cached_tokens),), is_borrowed=True),)
    steps, start, tag = [], plan.cached_tokens, first_tag
    for tokens, group in plan.chunks:
        layout, held = lay_out(held, (range(start, start + tokens),), group, plan.interleaving, page_tokens)
        ids = tuple(tuple(plan.token_ids[p] for part in positions for p in part) for positions in layout.new)
        steps.append(Step(request, layout, ids, tag))
        tag += LAYERS * (len(layout.group) + len(layout.moves))
        start += tokens
    return steps


def check(instances: RingInstances, page_tokens: int, plan: Plan) -> None:
    """Run a plan. Raises AssertionError unless its logits are those of stock and nothing is left of it anywhere."""
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
