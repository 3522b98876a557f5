"""Which command serves a worker: decided from options and machine alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest

from sglang_ext.engine.device import Device, MachineFacts
from sglang_ext.engine.launch_plan import MAX_KV_TOKENS, WorkerOptions, build_launch
from sglang_ext.engine.model_facts import ModelFacts
from sglang_ext.engine.options import options_from_environment
from sglang_ext.long_pool.sglang.cdsp_options import CdspOptions
from sglang_ext.transfer.sglang import transfer_backend
from sglang_ext.types import Role

CPU = MachineFacts(Device.CPU, tuple(range(8)), 32 << 30)
CUDA = MachineFacts(Device.CUDA, tuple(range(8)), 32 << 30)
SHORT = WorkerOptions(role=Role.SHORT, model_path="/models/tiny", model_is_local=True)
# SmolLM2-135M: 2 * 30 * 3 * 64 * 4 bytes = 46080 bytes per token.
SMOL = ModelFacts(layers=30, kv_heads=3, head_dim=64, context_tokens=8192)


def value_of(argv: tuple[str, ...], flag: str) -> str:
    """The value that argparse would take: the last one."""
    return argv[len(argv) - argv[::-1].index(flag)]


@pytest.mark.parametrize("role", [Role.SHORT, Role.LONG, Role.BOTH])
def test_prefill_roles(role: Role) -> None:
    argv = build_launch(replace(SHORT, role=role, bootstrap_port=9001), CPU).argv
    assert value_of(argv, "--disaggregation-mode") == "prefill"
    assert value_of(argv, "--disaggregation-bootstrap-port") == "9001"
    assert "--disaggregation-decode-retraction-backup" not in argv


def test_an_undivided_instance_is_a_stock_server() -> None:
    argv = build_launch(replace(SHORT, role=Role.PLAIN), CPU).argv
    assert not [word for word in argv if word.startswith("--disaggregation")]


def test_decode_role() -> None:
    argv = build_launch(replace(SHORT, role=Role.DECODE), CPU).argv
    assert value_of(argv, "--disaggregation-mode") == "decode"
    assert "--disaggregation-bootstrap-port" not in argv
    assert value_of(argv, "--disaggregation-decode-retraction-backup") == "cpu_tensor"


@pytest.mark.parametrize("role", Role)
def test_what_is_polled_is_not_in_the_access_log(role: Role) -> None:
    argv = build_launch(replace(SHORT, role=role), CPU).argv
    paths = argv[argv.index("--uvicorn-access-log-exclude-prefixes") + 1 :]
    assert list(takewhile(lambda word: word.startswith("/"), paths)) == [
        "/ping",
        "/health",
        "/v1/loads",
        "/laps",
        "/metrics",
    ]


def test_cpu_flags_keep_float32_and_stay_off_cuda() -> None:
    argv = build_launch(SHORT, CPU).argv
    assert value_of(argv, "--device") == "cpu"
    assert value_of(argv, "--dtype") == "float32"
    assert value_of(argv, "--attention-backend") == "torch_native"
    assert value_of(argv, "--disaggregation-transfer-backend") == "sglang_ext_tcp"
    assert {"--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"} <= set(argv)


def test_ranks_that_compute_together_never_sleep() -> None:
    ranks = ("--tp", "2", "--dp-size", "2", "--enable-dp-attention")
    assert "--sleep-on-idle" not in build_launch(replace(SHORT, engine_arguments=ranks), CPU).argv


def test_ranks_that_compute_together_exchange_logits_without_an_operator_for_cuda() -> None:
    off = "--no-enable-tp-lm-head-all-to-all"
    decode = replace(SHORT, role=Role.DECODE, engine_arguments=("--tp", "2", "--dp-size", "2", "--enable-dp-attention"))
    assert off in build_launch(decode, CPU).argv
    assert off not in build_launch(decode, CUDA).argv
    assert off not in build_launch(replace(decode, engine_arguments=("--tp", "2")), CPU).argv


def test_a_host_cache_on_a_cpu_is_copied_without_a_kernel() -> None:
    worker = replace(SHORT, engine_arguments=("--enable-hierarchical-cache", "--hicache-ratio", "4"))
    argv = build_launch(worker, CPU).argv
    assert value_of(argv, "--hicache-io-backend") == "direct"
    assert value_of(argv, "--hicache-mem-layout") == "layer_first"
    assert not {"--hicache-io-backend", "--hicache-mem-layout"} & set(build_launch(SHORT, CPU).argv)
    assert "--hicache-io-backend" not in build_launch(worker, CUDA).argv


def test_cuda_flags_leave_the_engine_to_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sglang_ext.transfer.sglang.transfer_backend.find_spec", lambda module: None
    )  # wherever it runs
    command = build_launch(SHORT, CUDA)
    assert value_of(command.argv, "--disaggregation-transfer-backend") == "mooncake"
    assert not {"--device", "--dtype", "--disable-cuda-graph", "--max-total-tokens"} & set(command.argv)
    assert "SGLANG_USE_CPU_ENGINE" not in command.environment
    assert "OMP_NUM_THREADS" not in command.default_environment


@pytest.mark.parametrize("machine", [CPU, CUDA], ids=["cpu", "cuda"])
def test_metrics_and_cache_report_are_on(machine: MachineFacts) -> None:
    assert {"--enable-metrics", "--enable-cache-report"} <= set(build_launch(SHORT, machine).argv)


def test_arguments_of_the_user_come_last() -> None:
    own = ("--chunked-prefill-size", "64", "--dtype", "bfloat16")
    argv = build_launch(replace(SHORT, engine_arguments=own), CPU).argv
    assert argv[-4:] == own
    assert value_of(argv, "--dtype") == "bfloat16"


def test_kv_cache_fits_its_memory() -> None:
    argv = build_launch(replace(SHORT, kv_memory_mib=512), CPU, SMOL).argv
    assert int(value_of(argv, "--max-total-tokens")) == 512 * 2**20 // 46080


def test_kv_cache_of_a_tiny_model_is_bounded() -> None:
    tiny = ModelFacts(layers=2, kv_heads=2, head_dim=16, context_tokens=2048)
    assert int(value_of(build_launch(SHORT, CPU, tiny).argv, "--max-total-tokens")) == MAX_KV_TOKENS


def test_kv_memory_that_holds_no_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="--kv-memory-mib 1 holds only 22 tokens"):
        build_launch(replace(SHORT, kv_memory_mib=1), CPU, SMOL)


@pytest.mark.parametrize(
    ("host", "advertise", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("10.0.0.5", None, "10.0.0.5"),
        ("0.0.0.0", None, None),
        ("::", None, None),
        ("0.0.0.0", "10.0.0.7", "10.0.0.7"),
    ],
)
def test_address_for_peers(host: str, advertise: str | None, expected: str | None) -> None:
    command = build_launch(replace(SHORT, host=host, advertise_host=advertise), CPU)
    assert command.default_environment.get("SGLANG_HOST_IP") == expected


def test_hub_is_left_alone_only_for_a_local_model() -> None:
    assert build_launch(SHORT, CPU).default_environment["HF_HUB_OFFLINE"] == "1"
    remote = replace(SHORT, model_path="org/model", model_is_local=False)
    assert "HF_HUB_OFFLINE" not in build_launch(remote, CPU).default_environment


@pytest.mark.parametrize(
    ("arguments", "threads", "binding"),
    [
        ((), "4", None),
        (("--tp", "2"), "2", "0,1|2,3"),
        (("--tp-size=4",), "1", "0|1|2|3"),
        (("--tensor-parallel-size", "16"), "1", "0|1|2|3|4|5|6|7|0|1|2|3|4|5|6|7"),
        (("--pp-size", "2"), "2", "0,1|2,3"),
        (("--pipeline-parallel-size=2", "--tp", "2"), "1", "0|1|2|3"),
    ],
)
def test_cores_are_divided_among_ranks(arguments: tuple[str, ...], threads: str, binding: str | None) -> None:
    environment = build_launch(replace(SHORT, engine_arguments=arguments), CPU).default_environment
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment.get("SGLANG_CPU_OMP_THREADS_BIND") == binding


@pytest.mark.parametrize("arguments", [("--tp",), ("--tp", "many"), ("--tp=0",)])
def test_nonsense_tensor_parallel_size_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--tp needs a positive number"):
        build_launch(replace(SHORT, engine_arguments=arguments), CPU)


@pytest.mark.parametrize("arguments", [("--dp-size", "2"), ("--dp=2",), ("--data-parallel-size", "2")])
def test_each_data_parallel_rank_has_cores_of_its_own(arguments: tuple[str, ...]) -> None:
    command = build_launch(replace(SHORT, engine_arguments=(*arguments, "--tp-size", "2"), threads=1), CPU)
    groups = command.default_environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(groups) == 4
    with pytest.raises(ValueError, match=r"^--dp needs a positive number"):
        build_launch(replace(SHORT, engine_arguments=("--dp", "0")), CPU)


@pytest.mark.parametrize(
    ("options", "model", "problem"),
    [
        (replace(SHORT, role=Role.DECODE), SMOL, "only prefill runs in stages"),
        (SHORT, replace(SMOL, layers=1), "the model has 1 layers"),
    ],
)
def test_stages_that_cannot_be_are_refused(options: WorkerOptions, model: ModelFacts, problem: str) -> None:
    staged = replace(options, engine_arguments=("--pp-size", "2"))
    with pytest.raises(ValueError, match=rf"^--pp-size 2: {problem}") as it:
        build_launch(staged, CPU, model)
    assert "\n" not in str(it.value)


def test_processes_are_told_of_stages() -> None:
    for arguments, stages in (((), 1), (("--pp-size", "3"), 3)):
        environment = build_launch(replace(SHORT, engine_arguments=arguments), CPU).environment
        told = options_from_environment(environment)
        assert told is not None
        assert told.stages == stages


DECODE_CONTEXT = replace(
    SHORT,
    role=Role.DECODE,
    transfer_backend="nixl",
    engine_arguments=("--tp", "4", "--dcp-size", "2", "--attention-backend", "flashinfer"),
)


def test_kv_parallel_decode_is_passed_on() -> None:
    own = DECODE_CONTEXT.engine_arguments
    assert build_launch(DECODE_CONTEXT, CUDA).argv[-len(own) :] == own
    by_phase = ("--tp", "2", "--decode-context-parallel-size=2", "--decode-attention-backend", "cutedsl_mla")
    assert build_launch(replace(DECODE_CONTEXT, engine_arguments=by_phase), CUDA).argv[-5:] == by_phase
    one = replace(SHORT, engine_arguments=("--dcp-size", "1"))
    assert build_launch(one, CPU).argv[-2:] == ("--dcp-size", "1")


@pytest.mark.parametrize(
    ("changes", "machine", "problem"),
    [
        ({"role": Role.LONG}, CUDA, "only decode shares out its KV among ranks"),
        ({}, CPU, "SGLang has it only for GPUs"),
        ({"transfer_backend": "handshake"}, CUDA, "--transfer-backend handshake sends every rank the whole KV"),
        ({"transfer_backend": "sglang_ext_tcp"}, CUDA, "--transfer-backend sglang_ext_tcp sends every rank"),
        ({"engine_arguments": ("--tp", "3", "--dcp-size=2")}, CUDA, "--tp-size 3 is not a multiple of it"),
        ({"engine_arguments": ("--dcp-size=2",)}, CUDA, "--tp-size 1 is not a multiple of it"),
        (
            {"engine_arguments": ("--tp", "2", "--dcp-size=2")},
            CUDA,
            "the attention that SGLang chooses may ignore it",
        ),
        (
            {"engine_arguments": ("--tp", "2", "--dcp-size=2", "--attention-backend", "fa3")},
            CUDA,
            "--attention-backend fa3 may ignore it; name a backend that has it: flashinfer, ",
        ),
        (
            {
                "engine_arguments": (
                    *("--tp", "2", "--dcp-size=2", "--attention-backend=flashinfer"),
                    "--decode-attention-backend=triton",
                )
            },
            CUDA,
            "--attention-backend triton may ignore it",
        ),
        (
            {"engine_arguments": ("--tp", "2", "--dcp-size=2", "--decode-attention-backend=flashmla")},
            CUDA,
            "the attention that SGLang chooses may ignore it",
        ),
    ],
)
def test_kv_parallel_decode_that_would_be_wrong_is_refused(
    changes: dict[str, Any], machine: MachineFacts, problem: str
) -> None:
    options = replace(DECODE_CONTEXT, **changes)
    with pytest.raises(ValueError, match=rf"^--dcp-size 2: {problem}") as it:
        build_launch(options, machine)
    assert "\n" not in str(it.value)


def test_compilation_is_off_unless_asked_for() -> None:
    assert build_launch(SHORT, CPU).default_environment["TORCHDYNAMO_DISABLE"] == "1"
    compiled = replace(SHORT, engine_arguments=("--enable-torch-compile",))
    assert "TORCHDYNAMO_DISABLE" not in build_launch(compiled, CPU).default_environment


def test_environment_of_the_user_wins_over_defaults_but_not_over_options() -> None:
    command = build_launch(replace(SHORT, threads=3), CPU)
    inherited = {
        "OMP_NUM_THREADS": "7",
        "SGLANG_HOST_IP": "192.0.2.1",
        "SGLANG_EXT_OPTIONS": '{"role": "decode", "device": "cuda"}',
        "HOME": "/root",
    }
    environment = command.full_environment(inherited)
    assert environment["SGLANG_HOST_IP"] == "192.0.2.1"
    assert environment["HOME"] == "/root"
    assert environment["OMP_NUM_THREADS"] == "3"
    options = options_from_environment(environment)
    assert options is not None
    assert (options.role, options.device) == (Role.SHORT, Device.CPU)


def test_printed_command_is_one_shell_line() -> None:
    line = str(build_launch(replace(SHORT, engine_arguments=("--served-model-name", "a b")), CPU))
    assert "\n" not in line
    assert line.endswith("--served-model-name 'a b'")
    assert "SGLANG_EXT_OPTIONS='{" in line


@pytest.mark.parametrize(
    ("installed", "chosen"), [((), "mooncake"), (("nixl",), "nixl"), (("mooncake", "nixl"), "mooncake")]
)
def test_a_gpu_machine_without_mooncake_transfers_by_nixl(
    installed: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_backend, "find_spec", lambda name: name if name in installed else None)
    argv = build_launch(SHORT, CUDA).argv
    assert value_of(argv, "--disaggregation-transfer-backend") == chosen
    assert value_of(build_launch(SHORT, CPU).argv, "--disaggregation-transfer-backend") == "sglang_ext_tcp"


def test_a_role_switch_is_refused_where_the_transfer_backend_has_none() -> None:
    switched = replace(SHORT, engine_arguments=("--enable-pd-role-switch",))
    for machine, backend in ((CPU, None), (CPU, "handshake"), (CUDA, "nixl")):
        with pytest.raises(ValueError, match=r"^--enable-pd-role-switch: SGLang changes roles only with .* not with "):
            build_launch(replace(switched, transfer_backend=backend), machine)
    assert "--enable-pd-role-switch" in build_launch(replace(switched, transfer_backend="mooncake"), CUDA).argv


def test_decode_that_may_become_prefill_has_a_bootstrap_server() -> None:
    decode = replace(SHORT, role=Role.DECODE, transfer_backend="mooncake", bootstrap_port=9001)
    assert "--disaggregation-bootstrap-port" not in build_launch(decode, CUDA).argv
    switched = build_launch(replace(decode, engine_arguments=("--enable-pd-role-switch",)), CUDA)
    assert value_of(switched.argv, "--disaggregation-bootstrap-port") == "9001"


def test_kv_checksums_are_refused_where_they_would_end_the_instance() -> None:
    checked = replace(SHORT, engine_arguments=("--disaggregation-enable-kv-checksum",))
    with pytest.raises(ValueError, match=r"^--disaggregation-enable-kv-checksum: SGLang has it only for GPUs"):
        build_launch(checked, CPU)
    assert "--disaggregation-enable-kv-checksum" in build_launch(checked, CUDA).argv
    with pytest.raises(ValueError, match=r"does not hold the KV of shared prompts"):
        build_launch(replace(checked, cdsp=CdspOptions("h", 1, "m", "n", 1, 1.0)), CUDA)
