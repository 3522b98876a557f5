"""A stage's keys and values go to its own layers of decode; the last stage has a head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.laps.sglang import pipeline_stages
from sglang_ext.laps.sglang.pipeline_stages import (
    head_from_embeddings,
    init_model,
    layer_pointers,
    load_weights,
    stage_pointers,
    tied_head_problem,
)


def pointers(layers: int, draft_layers: int = 0) -> list[int]:
    """As a decode instance has them: 100 + layer for keys, 200 + layer for values, those of a draft model behind."""
    model = [*range(100, 100 + layers), *range(200, 200 + layers)]
    return [*model, *range(300, 300 + draft_layers), *range(400, 400 + draft_layers)]


@pytest.mark.parametrize("draft_layers", [0, 1, 3])
@pytest.mark.parametrize(
    ("model_layers", "first"), [(3, (0, 1)), (3, (0, 2)), (4, (0, 2)), (7, (0, 3, 5)), (30, (0, 16))]
)
def test_every_layer_goes_to_itself(model_layers: int, first: tuple[int, ...], draft_layers: int) -> None:
    target = pointers(model_layers, draft_layers)
    pairs = []
    for start, end in zip(first, (*first[1:], model_layers), strict=True):
        source = [*range(1100 + start, 1100 + end), *range(1200 + start, 1200 + end)]
        source_keys, source_values, keys, values, layers = stage_pointers(source, target, start, model_layers)
        assert layers == end - start == len(keys) == len(values)
        pairs += [*zip(source_keys, keys, strict=True), *zip(source_values, values, strict=True)]
    assert sorted(pairs) == sorted((1000 + one, one) for one in pointers(model_layers))


@pytest.mark.parametrize(("stages", "source"), [(1, [1, 2]), (2, [1, 2, 3, 4])])
def test_whole_models_are_left_to_sglang(stages: int, source: list[int]) -> None:
    manager = SimpleNamespace(pp_size=stages)
    assert layer_pointers(lambda *given: given, manager, source, [5, 6, 7, 8]) == (manager, source, [5, 6, 7, 8])


class Model:
    config: Any = None


def build(model: Model, config: Any, *, scale: int) -> None:
    model.config = config
    assert scale == 3


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_only_a_tied_last_stage_gets_a_head(monkeypatch: pytest.MonkeyPatch, is_last: bool, is_tied: bool) -> None:
    monkeypatch.setattr(pipeline_stages, "_is_last_of_several", lambda: is_last)
    config, model = SimpleNamespace(tie_word_embeddings=is_tied), Model()
    init_model(build, model, config, scale=3)
    assert config.tie_word_embeddings is is_tied  # other readers of the configuration see what it was
    assert model.config.tie_word_embeddings is (is_tied and not is_last)
    weights = [("model.embed_tokens.weight", 1), ("model.norm.weight", 2)]
    expected = "lm_head.weight" if is_tied and is_last else "model.embed_tokens.weight"
    loaded = load_weights(lambda model, weights: list(weights), model, weights)
    assert loaded == [(expected, 1), ("model.norm.weight", 2)]


def test_a_head_that_the_checkpoint_has_besides_is_left_out() -> None:
    weights = [("lm_head.weight", 1), ("model.embed_tokens.weight", 2)]
    assert list(head_from_embeddings(weights)) == [("lm_head.weight", 2)]


@pytest.mark.parametrize(
    ("architecture", "is_tied", "is_refused"),
    [
        ("LlamaForCausalLM", True, False),
        ("Qwen3ForCausalLM", True, False),
        ("Gemma3ForCausalLM", True, True),
        ("Gemma3ForCausalLM", False, False),
        (None, True, False),
    ],
)
def test_which_models_are_refused(architecture: str | None, is_tied: bool, is_refused: bool) -> None:
    problem = tied_head_problem(architecture, is_tied=is_tied)
    assert (problem is not None) is is_refused
    assert problem is None or (problem.startswith("--pp-size: ") and "\n" not in problem)
