"""Chunks on growing groups of real model runners against stock SGLang: same logits, same KV, nothing leaked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sglang_ext.long_pool.decide.sharding import Interleaving
from sglang_ext.long_pool.sglang.cdsp_options import SUPPORTED_ARCHITECTURES
from support.chunk_plans import LOGIT_TOLERANCE, Plan, check, random_plan, steps_of
from support.model_families import REFUSED_WINDOW, family
from support.ring_instances import RingInstances, ring_instances
from support.tiny_families import tiny_family
from support.tiny_model import TinyModelShape, tiny_model

pytestmark = pytest.mark.integration
INSTANCES = 4
SHAPE = TinyModelShape(context_tokens=8192)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.full), 16], ids=["page1", "page16"])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[RingInstances, int]]:
    model: Path = tiny_model()
    with ring_instances(model, INSTANCES, request.param) as instances:
        yield instances, request.param


@pytest.mark.parametrize("seed", range(50))
def test_random_plans(pool: tuple[RingInstances, int], seed: int) -> None:
    check(*pool, random_plan(seed, INSTANCES))


@pytest.fixture(scope="module")
def large_pool() -> Iterator[RingInstances]:
    with ring_instances(tiny_model(SHAPE), INSTANCES, 16, pool_tokens=2 * SHAPE.context_tokens) as instances:
        yield instances


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_random_plans_of_up_to_8k_tokens(large_pool: RingInstances, seed: int) -> None:
    draw = random.Random(seed)
    members = draw.sample(range(INSTANCES), draw.choice((3, 4)))
    tokens = draw.randrange(1000, SHAPE.context_tokens)
    cuts = sorted(draw.sample(range(1, tokens), draw.randrange(4)))
    sizes = sorted(draw.randrange(1, len(members) + 1) for _ in range(len(cuts) + 1))
    lengths = [end - start for start, end in pairwise([0, *cuts, tokens])]
    chunks = tuple((length, tuple(members[:size])) for length, size in zip(lengths, sizes, strict=True))
    check(large_pool, 16, Plan(0, chunks, draw.choice(list(Interleaving)), seed))


@pytest.mark.parametrize("interleaving", list(Interleaving))
def test_a_long_prompt_over_one_two_and_four(pool: tuple[RingInstances, int], interleaving: Interleaving) -> None:
    chunks = ((400, (2,)), (600, (2, 0)), (900, (2, 0, 3, 1)))
    check(*pool, Plan(100, chunks, interleaving, 1234))


def test_the_kv_is_that_of_stock(pool: tuple[RingInstances, int]) -> None:
    instances, page_tokens = pool
    plan = Plan(0, ((70, (1,)), (130, (1, 3)), (101, (1, 3, 0))), Interleaving.ZIGZAG, 5)
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
    first = Plan(0, ((90, (0,)), (120, (0, 1)), (200, (0, 1, 2, 3))), Interleaving.ZIGZAG, 11)
    second = Plan(0, ((80, (3,)), (140, (3, 2)), (180, (3, 2, 1, 0))), Interleaving.STRIPED, 12)
    a, b = steps_of(first, 1, 10_000, page_tokens), steps_of(second, 2, 20_000, page_tokens)
    answers = instances.steps([step for pair in zip(a, b, strict=True) for step in pair])
    logits = [answer for answer in answers if answer is not None]
    assert len(logits) == 6
    for plan, got in ((first, logits[-2]), (second, logits[-1])):
        torch.testing.assert_close(got, instances.stock(0, plan.token_ids), atol=LOGIT_TOLERANCE, rtol=0)
    instances.end(1)
    instances.end(2)


@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"]
)
def test_other_families_over_two_instances(architecture: str, tmp_path: Path) -> None:
    with ring_instances(tiny_family(architecture, tmp_path), 2, 16) as instances:
        for interleaving in Interleaving:
            chunks = ((60, (1,)), (130, (1, 0)), (97, (1, 0)))
            plan = Plan(32, chunks, interleaving, 21, vocabulary=500)
            check(instances, 16, plan)


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in {"DeepseekV3ForCausalLM", "GptOssForCausalLM"} else pytest.param(name, marks=pytest.mark.full)
        for name in sorted(SUPPORTED_ARCHITECTURES - {REFUSED_WINDOW})
    ],
)
def test_each_family_over_three_instances(architecture: str) -> None:
    """Latent rows go round, which are key and value of all heads; of layers with a window, what the window needs."""
    with ring_instances(family(architecture), 3, 16) as instances:
        for interleaving in Interleaving:
            chunks = ((60, (1,)), (130, (1, 0)), (97, (1, 0, 2)), (64, (1, 0, 2)))
            check(instances, 16, Plan(32, chunks, interleaving, 21, vocabulary=2048))
        for seed in range(10):
            check(instances, 16, random_plan(seed, 3))
