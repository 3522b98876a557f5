"""Flags and environment of `sglang.launch_server` for one worker: a pure function of options and machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sglang_ext.cpu.host_cache import IO_BACKEND, MEMORY_LAYOUT
from sglang_ext.engine.device import Device, MachineFacts
from sglang_ext.engine.model_facts import ModelFacts
from sglang_ext.engine.options import ExtensionOptions, KvEventsOptions
from sglang_ext.graphs.sglang.graph_options import GraphOptions
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.long_pool.sglang.cdsp_options import CdspOptions
from sglang_ext.transfer.sglang.transfer_backend import HANDSHAKE, default_backend
from sglang_ext.transfer.sglang.transfer_options import TransferOptions
from sglang_ext.types import Role

START_METHOD_VARIABLE = "SGLANG_EXT_START_METHOD"
LAUNCH_MODULE = "sglang_ext.engine.launch"
CHECK_FLAG = "--check"  # the first word: check the arguments that follow, and end
FLAGS_START = 3  # in the words of a command: behind `python -m LAUNCH_MODULE`
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})
TENSOR_PARALLEL_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")
PIPELINE_PARALLEL_FLAGS = ("--pp-size", "--pipeline-parallel-size")
DECODE_CONTEXT_FLAGS = ("--dcp-size", "--decode-context-parallel-size")
DATA_PARALLEL_FLAGS = ("--dp", "--dp-size", "--data-parallel-size")
# What of SGLang 0.5.23 has a path for decode context parallelism (KV-parallel decode), on CUDA and for latent
# attention; others compute from a part of the KV as if it were all, without an error.
DECODE_CONTEXT_ATTENTION = ("flashinfer", "flashmla", "cutedsl_mla", "trtllm_mla")
DECODE_CONTEXT_TRANSFERS = ("mooncake", "nixl")
DECODE_CONTEXT_MODELS = frozenset(
    {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "KimiLinearForCausalLM"}
)
# SGLang fills in this one for prefills where decode has the former.
_PREFILL_OF_DECODE_ATTENTION = {"cutedsl_mla": "trtllm_mla"}
HOST_CACHE_FLAG = "--enable-hierarchical-cache"
TORCH_COMPILE_FLAG = "--enable-torch-compile"
# Every chunk costs a CPU engine something for each token before it, but a chunk is also the time that an abort waits.
CPU_CHUNK_TOKENS = 512
CPU_LAPS_CHUNK_TOKENS = 4 * CPU_CHUNK_TOKENS  # the time that a batch may take bounds it before
ROLE_SWITCH_FLAG = "--enable-pd-role-switch"
ROLE_SWITCH_TRANSFERS = ("mooncake", "mori")  # whose managers of 0.5.23 have `supports_role_switch`
KV_CHECKSUM_FLAG = "--disaggregation-enable-kv-checksum"
ACCESS_LOG_FLAG = "--uvicorn-access-log-exclude-prefixes"
# Routers, supervisors and monitoring ask for these every second, and a line for each buries what an engine says.
POLLED_PATHS = ("/ping", "/health", "/v1/loads", "/laps", "/metrics")
CHUNK_FLAG = "--chunked-prefill-size"
CPU_MAX_RUNNING_REQUESTS = 32
MAX_KV_TOKENS = 65536
UNKNOWN_MODEL_KV_TOKENS = 8192
KV_RELEASE_TIMEOUT_S = 5
HANDSHAKE_KV_RELEASE_TIMEOUT_S = 86400


class StartMethod(StrEnum):
    """Describes how the processes of an engine start."""

    FORK = "fork"  # from a process that has imported SGLang; CPU only
    SPAWN = "spawn"  # as SGLang does it: each process imports SGLang itself


@dataclass(frozen=True)
class WorkerOptions:
    """The settings of `sglang-ext worker`."""

    role: Role
    model_path: str
    model_is_local: bool
    host: str = "127.0.0.1"
    port: int = 30000
    bootstrap_port: int = 8998
    transfer_backend: str | None = None  # None chooses by device
    advertise_host: str | None = None  # None: the host, or what SGLang finds for a wildcard host
    threads: int | None = None  # None chooses by machine
    kv_memory_mib: int = 512
    start_method: StartMethod | None = None  # None: fork on a CPU, spawn elsewhere
    laps: LapsOptions | None = None  # None: SGLang's own scheduler
    cdsp: CdspOptions | None = None  # None: no other instance shares its prefills
    transfer: TransferOptions | None = None  # None: another KV transfer backend than the handshake
    graphs: GraphOptions | None = None  # None: prefills are not captured by length and batch size
    revision: str = ""
    kv_events: KvEventsOptions | None = None  # None: only what is asked for behind `--`
    engine_arguments: tuple[str, ...] = field(default=())  # for sglang.launch_server; these win


@dataclass(frozen=True)
class LaunchCommand:
    """A process to start: its arguments, what its environment must hold, and what it holds unless the user says."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    default_environment: Mapping[str, str]

    def full_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment to start with, given the one of the caller."""
        return {**self.default_environment, **inherited, **self.environment}

    def checking(self) -> LaunchCommand:
        """Return the command that checks the arguments as this one does, and ends before anything is loaded."""
        words = (*self.argv[:FLAGS_START], CHECK_FLAG, *self.argv[FLAGS_START:])
        return replace(self, argv=words)

    def __str__(self) -> str:
        """Return the command as a line for a POSIX shell."""
        added = {**self.default_environment, **self.environment}
        assignments = [f"{name}={shlex.quote(value)}" for name, value in sorted(added.items())]
        return " ".join([*assignments, shlex.join(self.argv)])


def build_launch(worker: WorkerOptions, machine: MachineFacts, model: ModelFacts | None = None) -> LaunchCommand:
    """Return the command that serves `worker` on `machine`.

    `model` lets a CPU engine size its KV cache; None takes a fixed number of tokens. Arguments in
    `worker.engine_arguments` come last, so that they win over the flags chosen here.

    Raises ValueError when the options contradict each other.
    """
    stages = size_of(worker.engine_arguments, PIPELINE_PARALLEL_FLAGS)
    replicas = size_of(worker.engine_arguments, DATA_PARALLEL_FLAGS)
    ranks = size_of(worker.engine_arguments, TENSOR_PARALLEL_FLAGS) * stages * replicas
    problem = (
        pipeline_problem(stages, worker.role, model)
        or decode_context_problem(worker, machine.device)
        or kv_checksum_problem(worker, machine.device)
        or role_switch_problem(worker, machine.device)
    )
    if problem is not None:
        raise ValueError(problem)
    argv = [sys.executable, "-m", LAUNCH_MODULE, *_common_flags(worker, machine)]
    options = ExtensionOptions(
        worker.role,
        machine.device,
        _laps_options(worker, machine),
        worker.cdsp,
        worker.transfer,
        worker.graphs,
        worker.revision,
        stages,
        worker.kv_events,
        replicas,
    )
    environment = options.to_environment()
    by_device = StartMethod.FORK if machine.device is Device.CPU else StartMethod.SPAWN
    environment[START_METHOD_VARIABLE] = worker.start_method or by_device
    defaults = _common_environment(worker)
    if machine.device is not Device.CPU and worker.cdsp is not None:
        # A chunk comes behind the batch before it, in the same stream.
        argv.append("--disable-overlap-schedule")
    if machine.device is Device.CPU:
        argv += _cpu_flags(worker, model)
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"}
        defaults |= _cpu_environment(worker, machine, ranks)
    if worker.threads is not None:
        environment |= {"OMP_NUM_THREADS": str(worker.threads)}
    return LaunchCommand((*argv, *worker.engine_arguments), environment, defaults)


def _laps_options(worker: WorkerOptions, machine: MachineFacts) -> LapsOptions | None:
    """The CPU's chunk is small for SGLang's own order, which knows no time: LAPS chooses up to a multiple of it."""
    laps = worker.laps
    is_given = any(argument.partition("=")[0] == CHUNK_FLAG for argument in worker.engine_arguments)
    if laps is None or laps.max_chunk_tokens is not None or is_given or machine.device is not Device.CPU:
        return laps
    return replace(laps, max_chunk_tokens=CPU_LAPS_CHUNK_TOKENS)


def _common_flags(worker: WorkerOptions, machine: MachineFacts) -> Iterable[str]:
    yield from ("--model-path", worker.model_path, "--host", worker.host, "--port", str(worker.port))
    if worker.role is not Role.PLAIN:
        yield from ("--disaggregation-mode", "prefill" if worker.role.is_prefill else "decode")
        backend = worker.transfer_backend or default_backend(machine.device)
        yield from ("--disaggregation-transfer-backend", backend)
    if worker.role.is_prefill or ROLE_SWITCH_FLAG in worker.engine_arguments:  # which has a decode instance listen, too
        yield from ("--disaggregation-bootstrap-port", str(worker.bootstrap_port))
    yield from (ACCESS_LOG_FLAG, *POLLED_PATHS)
    yield from ("--enable-metrics", "--enable-cache-report")


def _cpu_flags(worker: WorkerOptions, model: ModelFacts | None) -> Iterable[str]:
    # "auto" would keep KV in float16, and tokens would differ from the float32 model's.
    yield from ("--device", "cpu", "--dtype", "float32")
    yield from ("--attention-backend", "torch_native", "--sampling-backend", "pytorch")
    yield "--disable-cuda-graph"
    if HOST_CACHE_FLAG in worker.engine_arguments:
        yield from ("--hicache-io-backend", IO_BACKEND, "--hicache-mem-layout", MEMORY_LAYOUT)
    # Overlap needs CUDA events as soon as a prefix is cached.
    yield "--disable-overlap-schedule"
    # An idle scheduler polls otherwise, with 90% of a core. Ranks that compute together wait for each other: one that
    # sleeps holds all up, for a second where the request is for another.
    if "--enable-dp-attention" not in worker.engine_arguments:
        yield "--sleep-on-idle"
    else:
        # By default ranks of a decode instance exchange logits by an operator that SGLang has for CUDA alone.
        yield "--no-enable-tp-lm-head-all-to-all"
    yield from (CHUNK_FLAG, str(CPU_CHUNK_TOKENS))
    yield from ("--max-running-requests", str(CPU_MAX_RUNNING_REQUESTS))
    yield from ("--max-total-tokens", str(_cpu_kv_tokens(worker.kv_memory_mib, model)))
    if worker.role is Role.DECODE:
        # The default keeps retracted KV in a host pool, which needs pinned memory.
        yield from ("--disaggregation-decode-retraction-backup", "cpu_tensor")


def _cpu_kv_tokens(kv_memory_mib: int, model: ModelFacts | None) -> int:
    if model is None:
        return UNKNOWN_MODEL_KV_TOKENS
    tokens = kv_memory_mib * 1024 * 1024 // model.kv_bytes_per_token
    if model.context_tokens is not None and tokens < 256:
        raise ValueError(
            f"--kv-memory-mib {kv_memory_mib} holds only {tokens} tokens of this model "
            f"({model.kv_bytes_per_token} bytes each); give at least {256 * model.kv_bytes_per_token // 2**20 + 1}"
        )
    return min(tokens, MAX_KV_TOKENS)


def _common_environment(worker: WorkerOptions) -> dict[str, str]:
    environment: dict[str, str] = {}
    address = worker.advertise_host or (None if worker.host in WILDCARD_HOSTS else worker.host)
    if address is not None:
        environment["SGLANG_HOST_IP"] = environment["HOST_IP"] = address
    if worker.model_is_local:
        environment["HF_HUB_OFFLINE"] = "1"
    # A router gives requests of /v1/messages their ids by a header, to abort them; it passes on none of its clients'.
    environment["SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"] = "1"
    # Notice a dead prefill instance in about 4 s instead of 10.
    environment["SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"] = "2"
    # A peer that came back is probed for after 30 s by default.
    environment["SGLANG_FAILED_SESSION_PROBE_INTERVAL_S"] = "2"
    # KV of an aborted request is held until prefill confirms that it no longer writes there; a dead one never does.
    # With the handshake the decode instance knows by itself, and no time limit may overrule it.
    held_s = HANDSHAKE_KV_RELEASE_TIMEOUT_S if worker.transfer_backend == HANDSHAKE else KV_RELEASE_TIMEOUT_S
    environment["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"] = str(held_s)
    return environment


_CPU_ENVIRONMENT = {
    # Several engines share the cores: a thread that waits must not spin.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    # numpy's library starts its threads when it is imported, and a process with threads must not be forked.
    "OPENBLAS_NUM_THREADS": "1",
    # SGLang compiles a few small functions under any flags: without this, each engine with tensor parallelism
    # needs a C++ compiler and a minute of start-up.
    "TORCHDYNAMO_DISABLE": "1",
    # The last inputs of short convolutions would be rounded to bfloat16, and tokens differ from the float32 model's.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}


def shared_cpu_environment(*, is_offline: bool) -> dict[str, str]:
    """Return the environment that CPU engines have in common: that of the process that they are forked from."""
    offline = {"HF_HUB_OFFLINE": "1"} if is_offline else {}
    return {**_CPU_ENVIRONMENT, **offline, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


def _cpu_environment(worker: WorkerOptions, machine: MachineFacts, ranks: int) -> dict[str, str]:
    threads = worker.threads or max(1, len(machine.core_ids) // 2 // ranks)
    environment = {**_CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    if TORCH_COMPILE_FLAG in worker.engine_arguments:
        del environment["TORCHDYNAMO_DISABLE"]
    if worker.transfer_backend == "mooncake":
        environment |= {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}
    if ranks > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = _bind_ranks(machine.core_ids, ranks, threads)
    return environment


def _bind_ranks(core_ids: Sequence[int], ranks: int, threads: int) -> str:
    """Cores of each rank, as SGLang reads them: '0,1|2,3'. Ranks share cores where there are too few."""
    groups = [[core_ids[(rank * threads + i) % len(core_ids)] for i in range(threads)] for rank in range(ranks)]
    return "|".join(",".join(map(str, sorted(set(group)))) for group in groups)


def pipeline_problem(stages: int, role: Role, model: ModelFacts | None) -> str | None:
    """Return why an instance with `stages` pipeline stages is refused; None where it is not."""
    if stages == 1:
        return None
    if not role.is_prefill:
        return (
            f"--pp-size {stages}: only prefill runs in stages (a token of decode waits for all of them); use --tp-size"
        )
    if model is not None and model.layers < stages:
        return f"--pp-size {stages}: the model has {model.layers} layers, and a stage needs at least one"
    return None


def decode_context_problem(worker: WorkerOptions, device: Device) -> str | None:
    """Return why an instance whose ranks share out the KV of a decode (`--dcp-size`) is refused; None where it is not.

    Which models go with it, `decode_context_model_problem` says.
    """
    size = size_of(worker.engine_arguments, DECODE_CONTEXT_FLAGS)
    if size == 1:
        return None
    ranks = size_of(worker.engine_arguments, TENSOR_PARALLEL_FLAGS)
    backend = worker.transfer_backend or default_backend(device)
    attention = last_value(worker.engine_arguments, "--attention-backend")
    decode_attention = last_value(worker.engine_arguments, "--decode-attention-backend") or attention
    prefill_attention = (
        last_value(worker.engine_arguments, "--prefill-attention-backend")
        or attention
        or _PREFILL_OF_DECODE_ATTENTION.get(decode_attention or "")
    )
    reason = None
    if worker.role is not Role.DECODE:
        reason = "only decode shares out its KV among ranks; a prefill instance has --tp-size and --pp-size"
    elif device is not Device.CUDA:
        reason = "SGLang has it only for GPUs"
    elif ranks % size:
        reason = f"--tp-size {ranks} is not a multiple of it"
    elif backend not in DECODE_CONTEXT_TRANSFERS:
        wanted = " or ".join(DECODE_CONTEXT_TRANSFERS)
        reason = f"--transfer-backend {backend} sends every rank the whole KV; use {wanted}"
    elif not {decode_attention, prefill_attention} <= set(DECODE_CONTEXT_ATTENTION):
        found = decode_attention if decode_attention not in DECODE_CONTEXT_ATTENTION else prefill_attention
        which = "the attention that SGLang chooses" if found is None else f"--attention-backend {found}"
        reason = f"{which} may ignore it; name a backend that has it: {', '.join(DECODE_CONTEXT_ATTENTION)}"
    return None if reason is None else f"--dcp-size {size}: {reason}"


def kv_checksum_problem(worker: WorkerOptions, device: Device) -> str | None:
    """Return why an instance that is to send or compare checksums of the KV cache is refused; None where it is not."""
    if KV_CHECKSUM_FLAG not in worker.engine_arguments:
        return None
    if device is not Device.CUDA:
        return f"{KV_CHECKSUM_FLAG}: SGLang has it only for GPUs; its scheduler ends at the first request elsewhere"
    if worker.cdsp is not None:
        return f"{KV_CHECKSUM_FLAG}: an instance of a long pool does not hold the KV of shared prompts; leave it out"
    return None


def role_switch_problem(worker: WorkerOptions, device: Device) -> str | None:
    """Return why an instance that is to change between prefill and decode is refused; None where it is not."""
    backend = worker.transfer_backend or default_backend(device)
    if ROLE_SWITCH_FLAG not in worker.engine_arguments or backend in ROLE_SWITCH_TRANSFERS:
        return None
    wanted = " and ".join(ROLE_SWITCH_TRANSFERS)
    return f"{ROLE_SWITCH_FLAG}: SGLang changes roles only with --transfer-backend {wanted}, not with {backend}"


def decode_context_model_problem(arguments: Sequence[str], architecture: str | None) -> str | None:
    """Return why a model does not go with `--dcp-size`; None where it does.

    `architecture` is None where the model's config cannot be read.

    The ranks of a group must have the same KV heads. With latent attention (MLA) all have; of other models SGLang
    divides the heads among the ranks all the same, but for Qwen3.5, and stores wrong KV. To these no prefill instance
    without `--dcp-size` can send, either: SGLang divides the KV only for latent attention.
    """
    size = size_of(arguments, DECODE_CONTEXT_FLAGS)
    if size == 1 or architecture in DECODE_CONTEXT_MODELS:
        return None
    if architecture is None:
        return f"--dcp-size {size}: --model-path must be a local folder, whose config says whether ranks share KV heads"
    return (
        f"--dcp-size {size}: {architecture} is not among the models whose ranks share KV that prefill sends whole: "
        + ", ".join(sorted(DECODE_CONTEXT_MODELS))
    )


def last_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value of the last `FLAG VALUE` or `FLAG=VALUE`; None where there is none."""
    found = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else "".join(arguments[position + 1 : position + 2])
    return found


def size_of(arguments: Sequence[str], flags: Sequence[str]) -> int:
    """Return the number behind the last of these flags; 1 without any. Raises ValueError for anything else."""
    size = 1
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in flags:
            text = value if equals else "".join(arguments[position + 1 : position + 2])
            if not text.isdigit() or int(text) < 1:
                raise ValueError(f"{flag} needs a positive number, got {text!r}")
            size = int(text)
    return size
