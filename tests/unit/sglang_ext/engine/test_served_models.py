"""Windows of attention as a model's configuration has them, against those of its layers in SGLang."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.engine.hooks.served_models import UnservedModelError, check_windows, keeps_single_rows, window_of

pytestmark = pytest.mark.usefixtures("sglang_imported")


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 32}, 32),
        ({"sliding_window": 32, "use_sliding_window": False}, None),
        ({"sliding_window": 32, "layer_types": ["full_attention"] * 2}, None),
        ({"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}, 32),
    ],
)
def test_the_window_of_a_configuration(fields: dict[str, Any], window: int | None) -> None:
    assert window_of(SimpleNamespace(**fields)) == window


def loaded(layer_windows: list[int], window: int | None, context_tokens: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, of what a CPU has not
        from sglang.srt.layers.radix_attention import RadixAttention

    layers = [RadixAttention(2, 8, 1.0, 2, number, sliding_window_size=one) for number, one in enumerate(layer_windows)]
    config = SimpleNamespace(
        hf_text_config=SimpleNamespace(sliding_window=window),
        hf_config=SimpleNamespace(architectures=["SomeForCausalLM"]),
        context_len=context_tokens,
    )
    return SimpleNamespace(model=SimpleNamespace(modules=lambda: layers), model_config=config, layers=layers)


def test_a_window_counts_the_token_itself() -> None:
    runner = loaded([32, -1, 31], 32, 1000)
    assert check_windows("loaded", runner) == "loaded"
    assert [layer.sliding_window_size for layer in runner.layers] == [31, -1, 31]


def test_a_window_that_no_layer_has_is_refused_unless_no_prompt_is_longer() -> None:
    with pytest.raises(UnservedModelError, match=r"^SomeForCausalLM attends to 32 tokens, .*--context-length 32"):
        check_windows(None, loaded([-1, -1], 32, 33))
    check_windows(None, loaded([-1, -1], 32, 32))
    check_windows(None, loaded([-1, -1], None, 1000))
    check_windows(None, loaded([], 32, 1000))  # no attention that is known here


@pytest.mark.parametrize(
    ("mode", "has_cache", "page_size", "is_refused"),
    [("decode", True, 1, True), ("decode", True, 16, False), ("decode", False, 1, False), ("prefill", True, 1, False)],
)
def test_decode_keeps_no_prefixes_in_single_rows(mode: str, has_cache: bool, page_size: int, is_refused: bool) -> None:
    arguments = SimpleNamespace(
        disaggregation_mode=mode, disaggregation_decode_enable_radix_cache=has_cache, page_size=page_size
    )
    assert keeps_single_rows(arguments) == is_refused
