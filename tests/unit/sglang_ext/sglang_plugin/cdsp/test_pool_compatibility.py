"""Which SGLang arguments a member of a long pool refuses, and that they exist under these names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ext.sglang_plugin.cdsp.compatibility import conflict, model_conflict

FITTING = {
    "pp_size": 1,
    "dp_size": 1,
    "disable_radix_cache": False,
    "speculative_algorithm": None,
    "kv_cache_dtype": "auto",
}


def test_the_arguments_of_a_worker_fit() -> None:
    assert conflict(SimpleNamespace(**FITTING)) is None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"dp_size": 2}, "--dp-size"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype"),
    ],
)
def test_each_conflict_is_named(changes: dict[str, object], names: str) -> None:
    problem = conflict(SimpleNamespace(**{**FITTING, **changes}))
    assert problem is not None
    assert problem.startswith(f"{names} does not go with --cdsp-coordinator (")
    assert "\n" not in problem


def model(name: str, sliding_window_size: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(hf_config=SimpleNamespace(architectures=[name]), sliding_window_size=sliding_window_size)


def test_models_are_refused_by_name() -> None:
    assert model_conflict(model("Qwen2ForCausalLM")) is None
    for refused, name in (
        (model("DeepseekV3ForCausalLM"), "DeepseekV3ForCausalLM"),
        (model("MistralForCausalLM", 4096), "MistralForCausalLM with a sliding window"),
        (SimpleNamespace(hf_config=SimpleNamespace(architectures=None)), "a model without a name"),
    ):
        problem = model_conflict(refused)
        assert problem is not None
        assert problem.startswith(f"{name} does not go with --cdsp-coordinator (")


@pytest.mark.usefixtures("sglang_imported")
def test_the_arguments_exist_under_these_names() -> None:
    import msgspec
    from sglang.srt.server_args import ServerArgs

    assert set(FITTING) <= {field.name for field in msgspec.structs.fields(ServerArgs)}
