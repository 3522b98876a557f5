"""Command lines for GPU machines, without a GPU: SGLang accepts them there, and our hooks are in force."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.engine.device import Device, MachineFacts
from sglang_ext.engine.launch_plan import WorkerOptions, build_launch
from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.long_pool.sglang.cdsp_options import CdspOptions
from sglang_ext.transfer.sglang.transfer_options import TransferOptions
from sglang_ext.types import Role

ROOT = Path(__file__).resolve().parents[4]
sys.path.append(str(ROOT / "bench"))

from gpu import serve, two_engines  # noqa: E402
from support.engines import PLAIN_SERVER  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.full]

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
CUDA = MachineFacts(Device.CUDA, tuple(range(8)), 32 << 30)
WORKERS = {
    "short": (Role.SHORT, ()),
    "decode": (Role.DECODE, ()),
    "both, beside another": (Role.BOTH, ("--mem-fraction-static", "0.40")),
}
TWO_ENGINES = {
    "two engines, prefill": (Role.BOTH, two_engines.engine_arguments(True)),
    "two engines, decode": (Role.DECODE, two_engines.engine_arguments(True)),
    "two engines, one instance": (Role.BOTH, (*two_engines.engine_arguments(True), *PLAIN_SERVER.arguments)),
}
SERVED = {**serve.SYSTEMS, **serve.WINDOWS}
# By the handshake, and as members of a long pool.
POOLS = {
    "two engines, member": (Role.LONG, CdspOptions("coordinator", 8990, "here:30000", "node", 200, 30.0)),
    "two engines, decode of members": (Role.DECODE, None),
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SGLang's own view, of a process that takes some seconds."""
    model = tmp_path_factory.mktemp("models") / "qwen"
    command_lines = {}
    for name, (role, arguments) in (WORKERS | TWO_ENGINES).items():
        worker = WorkerOptions(role, str(model), True, transfer_backend="nixl", engine_arguments=arguments)
        worker = replace(worker, laps=LapsOptions(), graphs=GraphOptions(Capture.START)) if role.is_prefill else worker
        launch = build_launch(worker, CUDA)
        command_lines[name] = launch.argv[3:]
        if role is Role.SHORT:
            environment = dict(launch.environment)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(serve, "HAS_GPU", True)
        for name, system in SERVED.items():
            command_lines[f"serve, {name}"] = serve.launch_command(model, system, (30000, 30001), None)[3:]
    command_lines["refused"] = ["--model-path", str(model), "--disaggregation-transfer-backend", "pigeon"]
    return view(model, environment, command_lines, ["none", "breakable", "full"])


def view(
    model: Path, environment: dict[str, str], command_lines: dict[str, tuple[str, ...]], buckets: list[str]
) -> dict[str, Any]:
    """What SGLang makes of command lines where these options of ours are set."""
    request = {
        "model": str(model),
        "environment": environment,
        "command_lines": list(command_lines.values()),
        "buckets": buckets,
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/cuda_arguments.py")],
        input=json.dumps(request),
        env={name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"},  # of other tests
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]  # a hook that is not in force ends it, too
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["command_lines"] = dict(zip(command_lines, found["command_lines"], strict=True))
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", POOLS)
def test_sglang_accepts_what_a_pool_on_gpus_starts_with(name: str, tmp_path: Path) -> None:
    """With the hooks of the handshake, and of a member, in force."""
    role, cdsp = POOLS[name]
    worker = WorkerOptions(
        *(role, str(tmp_path / "qwen"), True),
        transfer_backend="handshake",
        transfer=TransferOptions("nixl"),
        cdsp=cdsp,
        laps=LapsOptions() if role.is_prefill else None,
        engine_arguments=two_engines.engine_arguments(True),
    )
    launch = build_launch(worker, CUDA)
    found = view(tmp_path / "qwen", dict(launch.environment), {name: launch.argv[3:]}, [])["command_lines"][name]
    assert "error" not in found, found
    assert found["disaggregation_transfer_backend"] == "handshake"
    assert found["disable_overlap_schedule"] is (cdsp is not None)


@pytest.mark.full
def test_sglang_accepts_kv_parallel_decode(tmp_path: Path) -> None:
    """Of a model with latent attention; and it does refuse what `sglang-ext worker` calls unsupported by SGLang."""
    model = tmp_path / "deepseek"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(DEEPSEEK))
    worker = WorkerOptions(
        *(Role.DECODE, str(model), True),
        transfer_backend="nixl",
        engine_arguments=("--tp", "2", "--dcp-size", "2", "--attention-backend", "flashinfer"),
    )
    launch = build_launch(worker, CUDA)
    refused = [word if word != "nixl" else "handshake" for word in launch.argv[3:]]
    command_lines = {"accepted": launch.argv[3:], "refused": tuple(refused)}
    found = view(tmp_path / "qwen", dict(launch.environment), command_lines, [])["command_lines"]
    assert "error" not in found["accepted"], found["accepted"]
    assert (found["accepted"]["dcp_size"], found["accepted"]["tp_size"]) == (2, 2)
    assert found["accepted"]["attention_backend"] == "flashinfer"
    assert "PD decode DCP requires --disaggregation-transfer-backend" in found["refused"]["error"]


@pytest.mark.full
def test_sglang_accepts_what_workers_start_with(answer: dict[str, Any]) -> None:
    for name in WORKERS:
        found = answer["command_lines"][name]
        assert "error" not in found, (name, found)
        assert found["device"] == "cuda"
        assert found["disaggregation_transfer_backend"] == "nixl"
        assert found["disaggregation_mode"] == ("decode" if name == "decode" else "prefill")
        assert found["attention_backend"] == "fa3"  # SGLang's choice on Hopper
        assert found["page_size"] == 1
    assert answer["command_lines"]["both, beside another"]["mem_fraction_static"] == 0.4
    assert 0.5 < answer["command_lines"]["short"]["mem_fraction_static"] < 0.95


@pytest.mark.slow
def test_sglang_accepts_what_the_benchmarks_start_with(answer: dict[str, Any]) -> None:
    for name in SERVED:
        found = answer["command_lines"][f"serve, {name}"]
        assert "error" not in found, (name, found)
        assert found["disaggregation_mode"] == "prefill"
        assert found["attention_backend"] == "fa3"
        # SGLang's own prefill graphs are its default, so `stock` has them.
        assert serve.has_own_graphs({"server": found})


def test_sglang_accepts_what_two_engines_on_one_device_start_with(answer: dict[str, Any]) -> None:
    for name, mode in zip(TWO_ENGINES, ("prefill", "decode", "null"), strict=True):
        found = answer["command_lines"][name]
        assert "error" not in found, (name, found)
        assert (found["disaggregation_mode"], found["dtype"]) == (mode, "float32")
        assert (found["attention_backend"], found["mem_fraction_static"]) == ("triton", 0.6)


def test_upstream_s_prefill_graphs_are_what_the_buckets_ask_for(answer: dict[str, Any]) -> None:
    for mode, found in answer["buckets"].items():
        graphs = found["cuda_graph_config"]["prefill"]
        assert graphs["backend"] == ("disabled" if mode == "none" else mode)
        assert found["attention_backend"] == ("flashinfer" if mode == "full" else "triton")
        if mode != "none":
            assert graphs["bs"] == [16, 64, 1024, 4096]
        assert graphs["full_prefill_max_req"] == (64 if mode == "full" else None)  # a slot for each request
        assert found["cuda_graph_config"]["decode"]["backend"] == "disabled"
        assert found["chunked_prefill_size"] == 4096


def test_what_sglang_does_not_know_is_noticed(answer: dict[str, Any]) -> None:
    assert answer["command_lines"]["refused"] == {"error": "SystemExit: 2"}
