"""Prefills of one model by length and batch size on SGLang's model runner, in one process: a mode, and what it takes.

    python -m gpu.buckets --model NAME --mode {grid,breakable,full} --out FILE [--lengths ...] [--batches ...]

`grid` measures the ordinary path too, compares logits with it, and reports what the capture took; `breakable` and
`full` are upstream's prefill graphs, with a bucket for every number of tokens of the grid. `--reprefills` are measured
after the grid of new prompts, in each mode: new tokens x requests + tokens of each that are cached already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

HAS_GPU = False
# The prefixes of a batch are computed in one pass, so no more tokens in all than the largest shape of the grid.
REPREFILLS = "16x1+1024,16x8+1024,64x8+1024,16x1+4096,16x4+4096,64x4+4096,256x4+4096"
WARM_UPS = 2


class Bucket(NamedTuple):
    """A batch of equal requests."""

    length_tokens: int  # new ones of a request
    requests: int
    prefix_tokens: int = 0  # cached ones of a request


def parse_reprefills(text: str) -> list[Bucket]:
    """`16x4+1024,...`: 16 new tokens, 4 requests, 1024 cached tokens each. Raises ValueError where a number is none."""
    return [Bucket(*(int(part) for part in one.replace("x", "+").split("+"))) for one in filter(None, text.split(","))]


def prepare_process() -> None:
    """What must be so before SGLang is imported."""
    global HAS_GPU
    import torch

    HAS_GPU = torch.cuda.is_available()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not HAS_GPU:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        from sglang_ext.sglang_plugin import cpu_platform

        cpu_platform.install((*cpu_platform.CANDIDATES, *cpu_platform.BENCHMARK_CANDIDATES))


def load_runner(
    folder: Path, mode: str, attention: str | None, dtype: str, lengths: list[int], batches: list[int]
) -> Any:
    """SGLang's model runner with weights of random numbers."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    options: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "log_level": "error",
        "max_running_requests": max(batches),
        "random_seed": 7,
    }
    if HAS_GPU:
        tokens = sorted({length * batch for length in lengths for batch in batches})
        options |= {
            "dtype": dtype,
            "attention_backend": attention or "triton",
            "mem_fraction_static": 0.75,
            "chunked_prefill_size": max(tokens),
            "max_prefill_tokens": max(tokens),
            "disable_decode_cuda_graph": True,
            "cuda_graph_backend_prefill": "disabled" if mode == "grid" else mode,
        }
        if mode != "grid":
            options["cuda_graph_bs_prefill"] = tokens
    else:
        options |= {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "max_total_tokens": 4096,
        }
    arguments = ServerArgs(**options)
    one_batch.get_tokenizer = lambda *args, **kwargs: None
    one_batch.suppress_other_loggers = lambda: None
    ports = PortArgs.init_new(arguments)
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

        ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
        publish(arguments, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
    else:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(arguments)
        one_batch.initialize_moe_config(arguments)
        one_batch.initialize_fp8_gemm_config(arguments)
        one_batch.initialize_fp4_gemm_config(arguments)
    runner = one_batch.load_model(arguments, ports, 0, 0)[0]
    return getattr(runner, "torch_runner", runner)


class Prefills:
    """Runs batches of random prompts and times the forward pass alone, from the batch to its logits.

    What a prefix takes is not timed.
    """

    def __init__(self, model_runner: Any) -> None:
        from sglang.benchmark import one_batch

        self._one_batch = one_batch
        self._runner = model_runner
        self._forward = model_runner.forward
        self._last_s = 0.0
        self._last: tuple[Any, Any] = (), {}
        model_runner.forward = self._timed

    def run(self, bucket: Bucket, seed: int) -> Any:
        """Logits [requests, vocabulary]."""
        import torch

        length, requests, prefix = bucket
        generator = torch.Generator().manual_seed(seed)
        high = min(10000, self._runner.model_config.vocab_size)
        ids = torch.randint(5, high, (requests, prefix + length), generator=generator).tolist()
        self._runner.req_to_token_pool.clear()
        self._runner.token_to_kv_pool_allocator.clear()
        first = [one[: prefix or length] for one in ids]
        batch = self._one_batch.prepare_synthetic_inputs_for_latency_test(requests, len(first[0]), first)
        with torch.no_grad():
            if prefix:
                self._one_batch.extend(batch, self._runner)
                self._one_batch.prepare_extend_inputs_for_correctness_test(
                    SimpleNamespace(cut_len=prefix), ids, batch, self._runner
                )
            _, logits, _ = self._one_batch.extend(batch, self._runner)
        return logits

    def median_s(self, bucket: Bucket, repeats: int) -> float:
        """Seconds of a batch like the one before; with a prefix, of that very one: its KV is there."""
        import torch

        times = []
        for seed in range(WARM_UPS + repeats):
            if bucket.prefix_tokens:
                with torch.no_grad():
                    self._timed(*self._last[0], **self._last[1])
            else:
                self.run(bucket, seed)
            times.append(self._last_s)
        return statistics.median(times[WARM_UPS:])

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        from gpu.ceilings import synchronize

        self._last = args, kwargs
        synchronize()
        started_s = time.perf_counter()
        output = self._forward(*args, **kwargs)
        synchronize()
        self._last_s = time.perf_counter() - started_s
        return output


def spread_weights(model_runner: Any) -> None:
    """Weights for which logits are far apart, so that the greedy token of two right paths is the same."""
    import torch

    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model_runner.model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.fill_(1.0)


def build_grid(model_runner: Any, lengths: list[int], batches: list[int]) -> tuple[Any, dict[str, Any]]:
    """A runner with all shapes captured, and what that took."""
    import torch

    from sglang_ext.sglang_plugin.graphs.capture import build_graphs, cuda_recorder
    from sglang_ext.sglang_plugin.graphs.graph_options import Capture, GraphOptions, conflict
    from sglang_ext.sglang_plugin.graphs.runner import GridPrefillRunner
    from sglang_ext_cuda_graphs.recorders import DirectRecorder

    problem = conflict(model_runner)
    if problem is not None:
        raise SystemExit(f"the grid cannot be captured: {problem}")
    eager = model_runner.eager_runner
    runner = GridPrefillRunner(model_runner, model_runner.prefill_cuda_graph_runner or eager, eager)
    free_bytes = torch.cuda.mem_get_info()[0] if HAS_GPU else 1 << 32
    started_s = time.perf_counter()
    graphs = build_graphs(
        runner,
        model_runner,
        GraphOptions(Capture.START, tuple(lengths), tuple(batches), free_bytes / 1e9),
        cuda_recorder() if HAS_GPU else DirectRecorder(),
        free_bytes,
    )
    assert graphs is not None
    count = len(graphs.captured)
    capture = {
        "graphs": count,
        "seconds": time.perf_counter() - started_s,
        "seconds_per_graph": max(cost.seconds for cost in graphs.costs),
        "pool_bytes": graphs.pool_bytes,
        "own_bytes_per_graph": (graphs.used_bytes - graphs.pool_bytes) / count,
        "taken_bytes": free_bytes - torch.cuda.mem_get_info()[0] if HAS_GPU else 0,
        "costs": [[*cost.shape, cost.pool_growth_bytes, cost.own_bytes, cost.seconds] for cost in graphs.costs],
    }
    runner.use(graphs)
    return runner, capture


def measure_grid(
    model_runner: Any, lengths: list[int], batches: list[int], buckets: list[Bucket], repeats: int
) -> dict[str, Any]:
    """Ordinary path and grid, bucket by bucket, and the error between their logits."""
    import torch

    prefills = Prefills(model_runner)
    largest = Bucket(max(lengths), max(batches))
    prefills.run(largest, 0)
    eager_peak = 0
    if HAS_GPU:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        prefills.run(largest, 1)
        eager_peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
    stock = model_runner.prefill_cuda_graph_runner
    grid, capture = build_grid(model_runner, lengths, batches)
    rows, errors, tokens_equal = [], [], True
    for bucket in buckets:
        model_runner.prefill_cuda_graph_runner = stock
        wanted = prefills.run(bucket, 99).double().clone()
        eager_s = prefills.median_s(bucket, repeats)
        model_runner.prefill_cuda_graph_runner = grid
        got = prefills.run(bucket, 99)
        errors.append(float((got.double() - wanted).norm() / wanted.norm()))
        tokens_equal = tokens_equal and bool((got.argmax(-1) == wanted.argmax(-1)).all())
        grid_s = prefills.median_s(bucket, repeats)
        rows.append({**bucket._asdict(), "eager_s": eager_s, "grid_s": grid_s})
    replays = sum(grid.graphs.replays.values())
    expected = len(rows) * (1 + WARM_UPS + repeats)
    return {
        "rows": rows,
        "capture": {**capture, "eager_peak_bytes": eager_peak or None},
        "worst_relative_error": max(errors),
        "tokens_equal": tokens_equal,
        "all_on_grid": replays == expected,
    }


def measure_upstream(model_runner: Any, mode: str, buckets: list[Bucket], repeats: int) -> dict[str, Any]:
    """One of upstream's graphs; a bucket that it ran eagerly is left out, as are re-prefills if one fails."""
    prefills = Prefills(model_runner)
    rows = []
    runner = model_runner.prefill_cuda_graph_runner
    if runner is None or runner is model_runner.eager_runner:
        raise SystemExit(f"SGLang has made no {mode} graphs here")
    executed = 0
    stock = runner.execute

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal executed
        executed += 1
        return stock(*args, **kwargs)

    runner.execute = counted
    for bucket in buckets:
        try:
            if bucket.prefix_tokens:
                prefills.run(bucket, 99)
            executed = 0
            seconds = prefills.median_s(bucket, repeats)
        except Exception as error:
            if not bucket.prefix_tokens:
                raise
            return {"rows": rows, "error": f"{bucket}: {error}"}
        is_whole = executed == WARM_UPS + repeats
        rows.append({**bucket._asdict(), f"{mode}_s": seconds if is_whole else None})
    return {"rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", choices=["grid", "breakable", "full"], required=True)
    parser.add_argument("--attention", default=None, help="SGLang's attention backend (default: triton)")
    parser.add_argument("--dtype", default="bfloat16", help="on a GPU; float32 elsewhere (default: bfloat16)")
    parser.add_argument("--spread", action="store_true", help="weights for which logits are far apart")
    parser.add_argument("--lengths", default="8,16,32,64,128,256")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--reprefills", default=REPREFILLS, help="LENGTHxREQUESTS+PREFIX,... (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    lengths = [int(part) for part in arguments.lengths.split(",")]
    batches = [int(part) for part in arguments.batches.split(",")]
    buckets = [Bucket(length, requests) for length in lengths for requests in batches]
    buckets += parse_reprefills(arguments.reprefills)
    prepare_process()
    from gpu.ceilings import measure
    from gpu.model_shapes import write_model

    with tempfile.TemporaryDirectory() as folder:
        write_model(arguments.model, Path(folder))
        device = measure()
        runner = load_runner(Path(folder), arguments.mode, arguments.attention, arguments.dtype, lengths, batches)
        if arguments.spread:
            spread_weights(runner)
        if arguments.mode == "grid":
            found = measure_grid(runner, lengths, batches, buckets, arguments.repeats)
        else:
            found = measure_upstream(runner, arguments.mode, buckets, arguments.repeats)
    found |= {
        "device": device.name,
        "read_bytes_per_s": device.ceilings.read_bytes_per_s,
        "operations_per_s": device.ceilings.operations_per_s,
        "copy_bytes_per_s": device.copy_bytes_per_s,
    }
    arguments.out.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
