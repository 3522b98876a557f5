"""The `--cdsp-…` options as a user types them, and the SGLang arguments that a member of a long pool refuses."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_ext.engine import worker
from sglang_ext.engine.device import Device
from sglang_ext.engine.hook_table import HOOK_TABLE
from sglang_ext.engine.options import ExtensionOptions, options_from_environment
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.long_pool.sglang.cdsp_options import (
    SETTINGS,
    CdspOptions,
    add_cdsp_arguments,
    cdsp_options,
    conflict,
    model_conflict,
)
from sglang_ext.types import Role
from support.settings import parse_with_settings

MEMBER = CdspOptions("coordinator", 8990, "here:30000", "node-1", 1024, 5.0)


def parse(*argv: str) -> argparse.Namespace:
    return parse_with_settings([add_cdsp_arguments], SETTINGS, argv)


def test_without_a_coordinator_an_instance_computes_alone() -> None:
    assert cdsp_options(parse(), Role.LONG, "here:1") is None


def test_everything_given() -> None:
    given = parse(
        *("--cdsp-coordinator", "[::1]:8990", "--cdsp-min-tokens", "1024"),
        *("--set", "cdsp.node=rack-7", "--set", "cdsp.step_timeout_s=2.5", "--set", "cdsp.max_chunk_tokens=4096"),
    )
    assert cdsp_options(given, Role.BOTH, "here:1", "here") == CdspOptions(
        "::1", 8990, "here:1", "rack-7", 1024, 2.5, "here", max_chunk_tokens=4096
    )


def test_the_node_is_the_host_unless_given() -> None:
    options = cdsp_options(parse("--cdsp-coordinator", "a:1"), Role.LONG, "here:1")
    assert options is not None
    assert options.node == socket.gethostname()


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (("--cdsp-coordinator", "nowhere"), "--cdsp-coordinator"),
        (("--cdsp-coordinator", ":8990"), "--cdsp-coordinator"),
        (("--cdsp-coordinator", "a:0"), "--cdsp-coordinator"),
        (("--cdsp-coordinator", "a:70000"), "--cdsp-coordinator"),
        (("--cdsp-coordinator", "a:1", "--cdsp-min-tokens", "0"), "--cdsp-min-tokens"),
        (("--cdsp-coordinator", "a:1", "--set", "cdsp.max_chunk_tokens=0"), "cdsp.max_chunk_tokens"),
        (("--cdsp-coordinator", "a:1", "--set", "cdsp.step_timeout_s=0"), "cdsp.step_timeout_s"),
        (("--cdsp-coordinator", "a:1", "--set", "cdsp.step_timeout_s=nan"), "cdsp.step_timeout_s"),
        (("--cdsp-coordinator", "a:1", "--set", "cdsp.step_timeout_s=inf"), "cdsp.step_timeout_s"),
    ],
)
def test_what_makes_no_sense_is_named(argv: tuple[str, ...], names: str) -> None:
    with pytest.raises(ValueError, match=f"^{names}") as refusal:
        cdsp_options(parse(*argv), Role.LONG, "here:1")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        ("--role", "decode", "--cdsp-coordinator", "a:1"),
        ("--role", "long", "--cdsp-coordinator", "a:1", "--laps-mode", "off"),
    ],
)
def test_a_worker_that_cannot_be_a_member_is_refused(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    assert worker.run(parser.parse_args(["--device", "cpu", *options, "--model-path", str(tmp_path)])) == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang-ext worker: --cdsp-coordinator: ")
    assert error.count("\n") == 1


def test_nccl_is_refused_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    options = ("--role", "long", "--cdsp-coordinator", "a:1", "--set", "cdsp.mesh=nccl", "--model-path", str(tmp_path))
    assert worker.run(parser.parse_args([*options, "--device", "cpu"])) == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang-ext worker: cdsp.mesh nccl: ")
    assert error.count("\n") == 1


def test_a_member_on_a_gpu_computes_in_one_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    options = ("--role", "long", "--model-path", str(tmp_path), "--device", "cuda", "--dry-run")
    for more, is_there in (((), False), (("--cdsp-coordinator", "a:1"), True)):
        assert worker.run(parser.parse_args([*options, *more])) == 0
        assert ("--disable-overlap-schedule" in capsys.readouterr().out) is is_there


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GPT2LMHeadModel", "not compared with one instance; docs/reference/compatibility.md"),
        ("DeepseekV32ForCausalLM", "its attention chooses the tokens that it sees (DSA)"),
        ("Qwen3NextForCausalLM", "a state goes from member to member in order: four would be at most 1.8 to 2.1 times"),
        ("NemotronHForCausalLM", "a state goes from member to member in order"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{name}"]}}')
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    options = ("--role", "long", "--cdsp-coordinator", "a:1", "--model-path", str(tmp_path), "--device", "cpu")
    assert worker.run(parser.parse_args(options)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sglang-ext worker: {name} does not go with --cdsp-coordinator ({why}")
    assert error.count("\n") == 1


def test_they_travel_to_every_process() -> None:
    sent = ExtensionOptions(Role.LONG, Device.CPU, LapsOptions(), MEMBER)
    assert options_from_environment(sent.to_environment()) == sent


@pytest.mark.parametrize(
    ("options", "schedulers"),
    [
        (ExtensionOptions(Role.LONG, Device.CPU), []),
        (ExtensionOptions(Role.LONG, Device.CPU, LapsOptions()), ["laps-scheduler"]),
        (ExtensionOptions(Role.LONG, Device.CPU, LapsOptions(), MEMBER), ["cdsp-scheduler"]),
    ],
)
def test_one_scheduler_takes_the_place_of_stock(options: ExtensionOptions, schedulers: list[str]) -> None:
    wanted = [hook.name for hook in HOOK_TABLE if hook.is_wanted(options) and hook.name.endswith("-scheduler")]
    assert wanted == schedulers


FITTING = {
    "pp_size": 1,
    "dp_size": 1,
    "disable_radix_cache": False,
    "enable_hierarchical_cache": False,
    "speculative_algorithm": None,
    "kv_cache_dtype": "auto",
    "device": "cpu",
    "disable_overlap_schedule": False,
}


def test_the_arguments_of_a_worker_fit() -> None:
    assert conflict(SimpleNamespace(**FITTING)) is None
    assert conflict(SimpleNamespace(**{**FITTING, "kv_cache_dtype": "fp8_e4m3"})) is None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"dp_size": 2}, "--dp-size"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"kv_cache_dtype": "fp8_e4m3", "device": "cuda"}, "--kv-cache-dtype"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype"),
        ({"device": "cuda"}, "the overlap schedule"),
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
    for name in ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"):
        assert model_conflict(model(name), on_gpu=False) is None
    assert model_conflict(model("Gemma3ForCausalLM", 4096), on_gpu=False) is None
    problem = model_conflict(model("DeepseekV3ForCausalLM"), on_gpu=True)
    assert problem is not None
    assert problem.startswith("DeepseekV3ForCausalLM does not go with --cdsp-coordinator on a GPU (")
    problem = model_conflict(model("MistralForCausalLM", 4096), on_gpu=True)
    assert problem is not None
    assert problem.startswith("MistralForCausalLM with a sliding window does not go with --cdsp-coordinator (")
    for refused, name in (
        (model("DeepseekV32ForCausalLM"), "DeepseekV32ForCausalLM"),
        (SimpleNamespace(hf_config=SimpleNamespace(architectures=None)), "a model without a name"),
    ):
        problem = model_conflict(refused, on_gpu=False)
        assert problem is not None
        assert problem.startswith(f"{name} does not go with --cdsp-coordinator (")


@pytest.mark.full
@pytest.mark.usefixtures("sglang_imported")
def test_the_arguments_exist_under_these_names() -> None:
    import msgspec
    from sglang.srt.server_args import ServerArgs

    assert set(FITTING) <= {field.name for field in msgspec.structs.fields(ServerArgs)}
