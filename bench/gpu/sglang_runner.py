"""SGLang's model runner in this process, with random weights, and our grid of prefill graphs on it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.measure import HAS_GPU

MAX_KV_TOKENS = 65536
# SGLang's norms for CUDA take half precision only. Triton multiplies float32 in tf32, which turns greedy choices; three
# such products have float32's errors.
FLOAT32_ENVIRONMENT = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch", "TRITON_F32_DEFAULT": "tf32x3"}


def prepare_process(is_float32: bool) -> None:
    """Set what must be so before SGLang is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if HAS_GPU:
        os.environ.update(FLOAT32_ENVIRONMENT if is_float32 else {})
        return
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    from sglang_ext import cpu

    cpu.install((*cpu.CANDIDATES, *cpu.BENCHMARK_CANDIDATES))


def engine_options(
    folder: Path,
    dtype: str,
    attention: str,
    own: str | None,
    lengths: Sequence[int],
    batches: Sequence[int],
) -> dict[str, Any]:
    """Return fields of SGLang's `ServerArgs`; `own`: which of SGLang's own prefill graphs, None without."""
    options: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "error",
        "max_running_requests": max(batches),
        "random_seed": 7,
    }
    if not HAS_GPU:
        cpu = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "max_total_tokens": 4096}
        return options | cpu | {"disable_cuda_graph": True}
    tokens = sorted({length * batch for length in lengths for batch in batches})
    options |= {
        "dtype": dtype,
        "attention_backend": attention,
        "mem_fraction_static": 0.75,
        "max_total_tokens": MAX_KV_TOKENS,
        "chunked_prefill_size": max(tokens),
        "max_prefill_tokens": max(tokens),
        "disable_decode_cuda_graph": True,
        "cuda_graph_backend_prefill": own or "disabled",
    }
    if own:
        options["cuda_graph_bs_prefill"] = tokens
    if own == "full":
        # By default a graph has a slot for every 512 tokens of a chunk, and a batch of more requests runs eagerly.
        options["cuda_graph_config"] = {"prefill": {"full_prefill_max_req": max(batches)}}
    return options


def load_runner(options: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """Return SGLang's model runner with random weights, and what captures its own prefill graphs: not done yet."""
    from sglang.benchmark import one_batch
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(**options)
    one_batch.get_tokenizer = lambda *args, **kwargs: None
    one_batch.suppress_other_loggers = lambda: None
    ports = PortArgs.init_new(arguments)
    arguments.resolve_once()
    ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    stock = cuda_graph_setup.capture_prefill_graph

    def later(*, eager_runner: Any, **more: Any) -> Any:
        return cuda_graph_setup.GraphCapture(
            runner=eager_runner, memory_phase="prefill", memory_usage_gb=0.0, capture_time=0.0
        )

    cuda_graph_setup.capture_prefill_graph = later
    try:
        runner = one_batch.load_model(arguments, ports, 0, 0)[0].torch_runner
    finally:
        cuda_graph_setup.capture_prefill_graph = stock
    return runner, lambda: stock(model_runner=runner, eager_runner=runner.eager_runner).runner


def compile_kernels(model_runner: Any) -> str | None:
    """Compile at once what SGLang compiles when it is first called, some 15 s each; return why it failed, or None."""
    try:
        import torch
        from sglang.kernels.jit.utils import parallel_compile
        from sglang.kernels.ops.activation import activation
        from sglang.kernels.ops.attention import rope
        from sglang.kernels.ops.kvcache import kvcache

        config, dtype = model_runner.model_config, model_runner.dtype
        row_bytes = config.get_num_kv_heads(1) * config.head_dim * torch.finfo(dtype).bits // 8
        parallel_compile(
            [
                lambda: activation.activation_module(dtype),
                lambda: rope._jit_fused_rope_module(True, config.head_dim, dtype, dtype),
                lambda: kvcache._jit_kvcache_module(row_bytes, row_bytes, 0),
            ]
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"[-600:]
    return None


def spread_weights(model_runner: Any) -> None:
    """Draw weights for which logits are far apart, so that the greedy token of two right paths is the same."""
    import torch

    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model_runner.model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.fill_(1.0)


def default_attention() -> str | None:
    """Return None, SGLang's choice, where its default on Hopper GPUs, FlashAttention 3, is installed; else Triton's."""
    kernels = find_spec("sgl_kernel")
    folders = [] if kernels is None else list(kernels.submodule_search_locations or ())
    return None if any(list(Path(folder).glob("flash_ops*.so")) for folder in folders) else "triton"


def free_cached_memory() -> None:
    """Give what torch keeps back to the device: SGLang sizes its pools by what is free."""
    import torch

    if HAS_GPU:
        torch.cuda.empty_cache()


class _NoGraphs:
    """Records nothing, to check this script without a GPU: a replay computes again."""

    def __init__(self, compute: Any = None) -> None:
        self.replay = compute

    def session(self) -> Any:
        return contextlib.nullcontext()

    def warm_up(self, compute: Any) -> None:
        pass

    def record(self, compute: Any) -> Any:
        compute()
        return _NoGraphs(compute)

    def memory(self) -> Any:
        from sglang_ext_cuda_graphs.recorders import DeviceMemory

        return DeviceMemory(0, 0)


def build_grid(model_runner: Any, lengths: Sequence[int], batches: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Return a runner with all shapes captured, and what the captures took."""
    import torch

    from sglang_ext.graphs.sglang.capture import build_graphs, cuda_recorder
    from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions, conflict
    from sglang_ext.graphs.sglang.runner import GridPrefillRunner

    problem = conflict(model_runner)
    if problem is not None:
        raise RuntimeError(f"the grid cannot be captured: {problem}")
    eager = model_runner.eager_runner
    runner = GridPrefillRunner(model_runner, eager, eager)
    free_bytes = torch.cuda.mem_get_info()[0] if HAS_GPU else 1 << 32
    started_s = time.perf_counter()
    options = GraphOptions(Capture.START, tuple(lengths), tuple(batches), free_bytes / 1e9)
    recorder = cuda_recorder() if HAS_GPU else _NoGraphs()
    graphs = build_graphs(runner, model_runner, options, recorder, free_bytes)
    if graphs is None:
        raise RuntimeError("no shape of the grid was captured")
    count = len(graphs.captured)
    capture = {
        "graphs": count,
        "seconds": time.perf_counter() - started_s,
        "max_seconds_per_graph": max(cost.seconds for cost in graphs.costs),
        "pool_bytes": graphs.pool_bytes,
        "own_bytes_per_graph": (graphs.used_bytes - graphs.pool_bytes) / count,
        "taken_bytes": free_bytes - torch.cuda.mem_get_info()[0] if HAS_GPU else 0,
        "costs": [[*cost.shape, cost.pool_growth_bytes, cost.own_bytes, cost.seconds] for cost in graphs.costs],
    }
    runner.use(graphs)
    return runner, capture


@contextmanager
def attention_to_oneself() -> Iterator[None]:
    """Capture meanwhile with attention that leaves out all tokens but the query's own."""
    from sglang_ext.graphs.sglang import runner

    class ToOneself(runner.CapturedAttention):
        def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            super().forward(q, k, v, layer, forward_batch, *args, **kwargs)
            group = layer.tp_q_head_num // layer.tp_v_head_num
            own = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            return own.repeat_interleave(group, dim=1).reshape(own.shape[0], -1).contiguous()

    right = runner.CapturedAttention
    runner.CapturedAttention = ToOneself  # type: ignore[misc]
    try:
        yield
    finally:
        runner.CapturedAttention = right  # type: ignore[misc]
