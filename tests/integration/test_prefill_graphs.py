"""Prefills on the grid of lengths and batch sizes are the ordinary prefills: logits, KV, and what falls back.

Real SGLang on a CPU, where the recording is replaced by running what would be recorded over the same static tensors.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang_ext.policy.laps.graph_grid import GraphShape
from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.graph_engine import Outcome, Request, run_batches
from support.tiny_model import tiny_model

pytestmark = pytest.mark.integration

LENGTHS, BATCHES = (8, 16, 32), (1, 2, 4)
# Additions in another order, in float32.
BOUND = 1e-4


def draw(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(5, 200) for _ in range(tokens))


def request(rng: random.Random, new_tokens: int, prefix_tokens: int = 0) -> Request:
    return Request(draw(rng, prefix_tokens), draw(rng, new_tokens))


def check(outcome: Outcome) -> None:
    np.testing.assert_allclose(outcome.on_grid.logits, outcome.ordinary.logits, atol=BOUND, rtol=0)
    assert (outcome.on_grid.logits.argmax(-1) == outcome.ordinary.logits.argmax(-1)).all()
    for got, wanted in zip(outcome.on_grid.kv, outcome.ordinary.kv, strict=True):
        np.testing.assert_allclose(got, wanted, atol=BOUND, rtol=0)


@pytest.mark.parametrize("page_tokens", [pytest.param(1, marks=pytest.mark.full), 16])
def test_batches_of_all_kinds(page_tokens: int) -> None:
    rng = random.Random(11)
    batches = [
        [request(rng, 8)],
        [request(rng, 1)],
        [request(rng, 3), request(rng, 8)],
        [request(rng, 5, 20), request(rng, 7), request(rng, 1, 1)],
        [request(rng, 20, 33), request(rng, 30, 7)],
        [request(rng, 32) for _ in range(4)],
        [request(rng, 32, 5), *(request(rng, 12) for _ in range(7))],
        *(
            [request(rng, rng.randint(1, 32), rng.choice([0, rng.randint(1, 90)])) for _ in range(rng.randint(1, 4))]
            for _ in range(8)
        ),
    ]
    outcomes = run_batches(tiny_model(), batches, LENGTHS, BATCHES, page_tokens)
    for batch, outcome in zip(batches, outcomes, strict=True):
        check(outcome)
        assert outcome.shape is not None
        shape = GraphShape(*outcome.shape)
        assert shape.length_tokens >= max(len(one.new) for one in batch)
        assert shape.tokens >= sum(len(one.new) for one in batch)
        assert shape.slots >= len(batch)
    assert [outcome.shape for outcome in outcomes[:7]] == [(8, 1), (8, 1), (8, 2), (8, 4), (32, 2), (32, 4), (32, 4)]


def test_what_does_not_fit_runs_as_before_and_is_counted() -> None:
    rng = random.Random(12)
    batches = [
        [request(rng, 33)],
        [request(rng, 2) for _ in range(9)],
        [request(rng, 32), request(rng, 1), request(rng, 1)],
        [request(rng, 4)],
    ]
    outcomes = run_batches(tiny_model(), batches, LENGTHS, BATCHES, capture="lazy")
    for outcome in outcomes:
        check(outcome)
    assert [(outcome.shape, outcome.fallback) for outcome in outcomes] == [
        (None, "too_large"),
        (None, "too_large"),
        ((32, 2), None),
        ((8, 1), None),
    ]


def test_an_engine_without_a_gpu_says_so_in_one_line_and_serves() -> None:
    engine = FLEET.get(EngineSpec(Role.SHORT, arguments=("--laps-graphs", "start")))[0]
    log = engine.log_path.read_text()
    assert log.count("no prefill graphs by length and batch size: they need a CUDA device; this engine runs") == 1
    assert "prefill-graphs" in engine.get("/server_info").body["sglang_ext"]["hooks"]
