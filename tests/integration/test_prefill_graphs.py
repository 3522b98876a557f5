"""Prefills on the grid of lengths and batch sizes are the ordinary prefills: logits, KV, and what falls back.

Real SGLang on a CPU, where the recording is replaced by running what would be recorded over the same static tensors.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext.graphs.sglang.graph_options import CAPTURED_ARCHITECTURES
from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.graph_engine import Outcome, Request, Setting, run_batches, run_ranks
from support.model_families import WINDOW, family
from support.tiny_families import FAMILIES, tiny_family
from support.tiny_model import tiny_model

pytestmark = pytest.mark.integration

LENGTHS, BATCHES = (8, 16, 32), (1, 2, 4)
# Additions in another order, in float32.
BOUND = 1e-4
WINDOWED = (
    *("GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo3ForCausalLM", "Cohere2ForCausalLM"),
    *("Cohere2MoeForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"),
    *("LagunaForCausalLM", "MellumForCausalLM"),
)
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "MiniCPM3ForCausalLM")


def draw(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(5, 200) for _ in range(tokens))


def request(rng: random.Random, new_tokens: int, prefix_tokens: int = 0) -> Request:
    return Request(draw(rng, prefix_tokens), draw(rng, new_tokens))


def check(outcome: Outcome) -> None:
    np.testing.assert_allclose(outcome.on_grid.logits, outcome.ordinary.logits, atol=BOUND, rtol=0)
    assert (outcome.on_grid.logits.argmax(-1) == outcome.ordinary.logits.argmax(-1)).all()
    for got, wanted in zip(outcome.on_grid.kv, outcome.ordinary.kv, strict=True):
        np.testing.assert_allclose(got, wanted, atol=BOUND, rtol=0)


@pytest.mark.parametrize(
    ("page_tokens", "is_paged"),
    [
        pytest.param(1, False, marks=pytest.mark.full),
        (16, False),
        pytest.param(1, True, marks=pytest.mark.full),
        (16, True),
    ],
)
def test_batches_of_all_kinds(page_tokens: int, is_paged: bool) -> None:
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
    outcomes = run_batches(tiny_model(), batches, LENGTHS, BATCHES, page_tokens=page_tokens, is_paged=is_paged)
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


def test_hidden_states_of_all_tokens_stay_what_they_are_after_further_replays() -> None:
    rng = random.Random(13)
    batches = [[request(rng, 8, 5)], [request(rng, 3), request(rng, 8)], [request(rng, 33)], [request(rng, 7)]]
    outcomes = run_batches(tiny_model(), batches, LENGTHS, BATCHES, wants_hidden=True)
    assert [outcome.shape for outcome in outcomes] == [(8, 1), (8, 2), None, (8, 1)]
    for batch, outcome in zip(batches, outcomes, strict=True):
        check(outcome)
        assert outcome.on_grid.hidden.shape == (sum(len(one.new) for one in batch), 64)
        np.testing.assert_allclose(outcome.on_grid.hidden, outcome.ordinary.hidden, atol=BOUND, rtol=0)


@pytest.mark.parametrize("capture", ["start", "lazy"])
def test_shapes_that_cannot_be_recorded_run_as_before(capture: str) -> None:
    rng = random.Random(14)
    batches = [[request(rng, 8)], [request(rng, 8), request(rng, 7)], [request(rng, 8)], [request(rng, 31, 9)]]
    failing = (frozenset({8, 32}),)
    outcomes = run_batches(tiny_model(), batches, (8, 32), (1, 2), capture=capture, failing=failing)
    for outcome in outcomes:
        check(outcome)
    # at start the next larger shape has it; lazily that is so from the second time on
    first, second = (((8, 2), None), ((32, 2), None)) if capture == "start" else ((None, "capture"), (None, "capture"))
    assert [(outcome.shape, outcome.fallback) for outcome in outcomes] == [
        first,
        ((8, 2), None),
        ((8, 2), None),
        second,
    ]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("capture", ["start", "lazy"])
def test_as_the_plugin_captures(capture: str, ranks: int) -> None:
    """In SGLang's own context of captures, which all ranks enter together, with its memory pool."""
    rng = random.Random(17)
    batches = [[request(rng, 8)], [request(rng, 5, 20), request(rng, 7)], [request(rng, 30, 3)], [request(rng, 33)]]
    setting = Setting((8, 32), (1, 2), capture=capture, ranks=ranks, is_hooked=True)
    for outcomes in run_ranks(tiny_model(), batches, setting):
        assert [outcome.shape for outcome in outcomes] == [(8, 1), (8, 2), (32, 1), None]
        for outcome in outcomes:
            check(outcome)


def test_tensor_parallel_ranks_run_every_batch_on_the_same_shape() -> None:
    """Each captures for itself; a shape that one of them has not is used by none: their collectives would not meet."""
    rng = random.Random(15)
    batches = [[request(rng, 8)], [request(rng, 5, 20), request(rng, 7)], [request(rng, 30, 3)], [request(rng, 33)]]
    failing = (frozenset[int](), frozenset({8}))
    for capture in ("start", "lazy"):
        setting = Setting((8, 32), (1, 2), capture=capture, ranks=2, failing=failing)
        mine, theirs = run_ranks(tiny_model(), batches, setting)
        for outcome in (*mine, *theirs):
            check(outcome)
        for one, other in zip(mine, theirs, strict=True):
            assert (one.shape, one.fallback) == (other.shape, other.fallback)
            np.testing.assert_array_equal(one.on_grid.logits, other.on_grid.logits)
        assert [outcome.shape for outcome in mine] == [(8, 2) if capture == "start" else None, (8, 2), (32, 1), None]


@pytest.mark.parametrize(
    "architecture",
    [one if one == "Qwen3MoeForCausalLM" else pytest.param(one, marks=pytest.mark.full) for one in FAMILIES],
)
def test_families(architecture: str, tmp_path: Path) -> None:
    rng = random.Random(16)
    batches = [[request(rng, 8)], [request(rng, 5, 20), request(rng, 7)], [request(rng, 30), request(rng, 2, 40)]]
    model = tiny_family(architecture, tmp_path)
    for ranks in (2, 1) if architecture == "Qwen3MoeForCausalLM" else (1,):
        for outcomes in run_ranks(model, batches, Setting((8, 32), (1, 2), ranks=ranks)):
            assert [outcome.shape for outcome in outcomes] == [(8, 1), (8, 2), (32, 1)]
            for outcome in outcomes:
                check(outcome)


def windowed_family(architecture: str) -> ParameterSet:
    is_quick = architecture == "GptOssForCausalLM"  # two pools of KV, sinks
    return pytest.param(architecture, 16, marks=() if is_quick else pytest.mark.full)


@pytest.mark.parametrize(
    ("architecture", "page_tokens"),
    [*map(windowed_family, WINDOWED), pytest.param("GptOssForCausalLM", 1, marks=pytest.mark.full)],
)
def test_windows_caps_and_sinks(architecture: str, page_tokens: int) -> None:
    """Prefixes and new tokens that end within the window, at it and behind it."""
    rng = random.Random(18)
    batches = [
        [request(rng, 8)],
        [request(rng, 5, WINDOW), request(rng, 7, WINDOW - 1)],
        [request(rng, 40), request(rng, 2, 90)],
        [request(rng, 43, 20), request(rng, 1, WINDOW + 1), request(rng, 1, 3)],
        [request(rng, 30, 150)],
    ]
    outcomes = run_batches(family(architecture), batches, (8, 48), (1, 2), page_tokens=page_tokens)
    assert [outcome.shape for outcome in outcomes] == [(8, 1), (8, 2), (48, 1), (48, 1), (48, 1)]
    for outcome in outcomes:
        check(outcome)


@pytest.mark.parametrize(
    ("architecture", "page_tokens"),
    [pytest.param(one, 16, marks=() if one == "DeepseekV3ForCausalLM" else pytest.mark.full) for one in LATENT],
)
def test_latent_attention(architecture: str, page_tokens: int) -> None:
    """With and without cached tokens, for which SGLang computes the same in two ways."""
    rng = random.Random(19)
    batches = [
        [request(rng, 8)],
        [request(rng, 5, 20), request(rng, 7)],
        [request(rng, 40), request(rng, 2, 90)],
        [request(rng, 30), request(rng, 1), request(rng, 4)],
        [request(rng, 250) for _ in range(3)],
    ]
    outcomes = run_batches(family(architecture), batches, (8, 48, 256), (1, 2, 4), page_tokens=page_tokens)
    # Captured are the shapes that hold up to 512 tokens.
    assert [outcome.shape for outcome in outcomes] == [(8, 1), (8, 2), (48, 1), (48, 1), None]
    for outcome in outcomes:
        check(outcome)


def test_every_family_that_is_captured_is_tested() -> None:
    assert {*FAMILIES, *WINDOWED, *LATENT, "LlamaForCausalLM"} == CAPTURED_ARCHITECTURES


def test_an_engine_without_a_gpu_says_so_in_one_line_and_serves() -> None:
    engine = FLEET.get(EngineSpec(Role.SHORT, arguments=("--laps-graphs", "start")))[0]
    log = engine.log_path.read_text()
    assert log.count("no prefill graphs by length and batch size: they need a CUDA device; this engine runs") == 1
    assert "prefill-graphs" in engine.get("/server_info").body["sglang_ext"]["hooks"]
