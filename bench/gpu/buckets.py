"""Prefills of one model by length and batch size on SGLang's model runner, in one process: a mode, and what it takes.

    python -m gpu.buckets --model NAME --mode {grid,breakable,full} --out FILE [--lengths ...] [--batches ...]

`grid` measures the ordinary path too, compares logits with it, and reports what the capture took; `breakable` and
`full` are upstream's prefill graphs, with a bucket for every number of tokens of the grid. `--reprefills` are new
tokens x requests + tokens of each that are cached already. Batches with the fewest new tokens come first; what there
is, is written after each, and no other is begun after `--within` seconds.

Weights are spread, so that logits differ between a right and a wrong path. Whether the comparison can see one is
measured, too: `control_error` is the error of a shape that was captured with attention of each token to itself only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from gpu.stage_plan import BATCHES, LENGTHS, repeats_within
from support.result import write_json

HAS_GPU = False
# The prefixes of a batch are computed in one pass, so no more tokens in all than the largest shape of the grid.
REPREFILLS = "16x1+1024,16x8+1024,64x8+1024,16x1+4096,16x4+4096,64x4+4096,256x4+4096"
WARM_UPS = 2
# Of one batch on one path: fewer repeats where they would take longer.
MOST_S = 1.0
Record = Callable[[dict[str, Any]], None]


class Bucket(NamedTuple):
    """A batch of equal requests."""

    length_tokens: int  # new ones of a request
    requests: int
    prefix_tokens: int = 0  # cached ones of a request


def parse_reprefills(text: str) -> list[Bucket]:
    """`16x4+1024,...`: 16 new tokens, 4 requests, 1024 cached tokens each. Raises ValueError where a number is none."""
    return [Bucket(*(int(part) for part in one.replace("x", "+").split("+"))) for one in filter(None, text.split(","))]


def in_order(buckets: list[Bucket]) -> list[Bucket]:
    """Those with the fewest new tokens first: they say most, and take least."""
    return sorted(buckets, key=lambda bucket: bucket.length_tokens * bucket.requests)


def prepare_process() -> None:
    """What must be so before SGLang is imported."""
    global HAS_GPU
    import torch

    HAS_GPU = torch.cuda.is_available()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not HAS_GPU:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        from sglang_ext import cpu

        cpu.install((*cpu.CANDIDATES, *cpu.BENCHMARK_CANDIDATES))


def engine_options(
    folder: Path, mode: str, attention: str | None, dtype: str, lengths: list[int], batches: list[int]
) -> dict[str, Any]:
    """Fields of SGLang's `ServerArgs`."""
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
            # upstream's `full` has no metadata for Triton's
            "attention_backend": attention or ("flashinfer" if mode == "full" else "triton"),
            "mem_fraction_static": 0.75,
            "chunked_prefill_size": max(tokens),
            "max_prefill_tokens": max(tokens),
            "disable_decode_cuda_graph": True,
            "cuda_graph_backend_prefill": "disabled" if mode == "grid" else mode,
        }
        if mode != "grid":
            options["cuda_graph_bs_prefill"] = tokens
        if mode == "full":
            # Otherwise a graph has a slot for every 512 tokens of a chunk, and a batch of more requests runs eagerly.
            options["cuda_graph_config"] = {"prefill": {"full_prefill_max_req": max(batches)}}
    else:
        options |= {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "max_total_tokens": 4096,
        }
    return options


def load_runner(options: dict[str, Any]) -> Any:
    """SGLang's model runner with weights of random numbers."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

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

    def median_s(self, bucket: Bucket, repeats: int) -> tuple[float, int]:
        """Seconds of a batch like the one before, and the runs; with a prefix, of that very one, which has KV."""
        import torch

        times: list[float] = []
        while len(times) < WARM_UPS + repeats:
            if bucket.prefix_tokens:
                with torch.no_grad():
                    self._timed(*self._last[0], **self._last[1])
            else:
                self.run(bucket, len(times))
            times.append(self._last_s)
            if len(times) == WARM_UPS:
                repeats = repeats_within(self._last_s, repeats, MOST_S)
        return statistics.median(times[WARM_UPS:]), len(times)

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


@contextmanager
def attention_to_oneself() -> Iterator[None]:
    """Return what is captured meanwhile has attention that leaves out all tokens but the query's own."""
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


def control_error(model_runner: Any, prefills: Prefills, bucket: Bucket, wanted: Any) -> float:
    """Relative error of logits that come from wrong attention, against those of the ordinary path."""
    before = model_runner.prefill_cuda_graph_runner
    with attention_to_oneself():
        broken, _ = build_grid(model_runner, [bucket.length_tokens], [bucket.requests])
    model_runner.prefill_cuda_graph_runner = broken
    try:
        return relative_error(prefills.run(bucket, 99), wanted)
    finally:
        model_runner.prefill_cuda_graph_runner = before


def relative_error(got: Any, wanted: Any) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


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


def build_grid(model_runner: Any, lengths: list[int], batches: list[int]) -> tuple[Any, dict[str, Any]]:
    """A runner with all shapes captured, and what that took."""
    import torch

    from sglang_ext.graphs.sglang.capture import build_graphs, cuda_recorder
    from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions, conflict
    from sglang_ext.graphs.sglang.runner import GridPrefillRunner

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
        cuda_recorder() if HAS_GPU else _NoGraphs(),
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
    model_runner: Any,
    lengths: list[int],
    batches: list[int],
    buckets: list[Bucket],
    repeats: int,
    record: Record,
    end_s: float,
) -> None:
    """Ordinary path and grid, bucket by bucket, and the error between their logits; `record` gets what there is."""
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
    record({"capture": {**capture, "eager_peak_bytes": eager_peak or None}})
    rows: list[dict[str, Any]] = []
    errors: list[float] = []
    tokens_equal, expected = True, 0
    control: float | None = None
    for number, bucket in enumerate(buckets):
        if time.perf_counter() > end_s:
            break
        model_runner.prefill_cuda_graph_runner = stock
        wanted = prefills.run(bucket, 99).double().clone()
        eager_s, _ = prefills.median_s(bucket, repeats)
        if control is None and bucket.length_tokens >= 16 and not bucket.prefix_tokens:
            # with the seed of `wanted`, and before the grid measures, as it captures
            control = control_error(model_runner, prefills, bucket, wanted)
        model_runner.prefill_cuda_graph_runner = grid
        got = prefills.run(bucket, 99)
        errors.append(relative_error(got, wanted))
        tokens_equal = tokens_equal and bool((got.argmax(-1) == wanted.argmax(-1)).all())
        grid_s, runs = prefills.median_s(bucket, repeats)
        expected += 1 + runs
        rows.append({**bucket._asdict(), "eager_s": eager_s, "grid_s": grid_s, "error": errors[-1]})
        record(
            {
                "rows": rows,
                "worst_relative_error": max(errors),
                "control_error": control,
                "tokens_equal": tokens_equal,
                "all_on_grid": sum(grid.graphs.replays.values()) == expected,
                "buckets_left": len(buckets) - number - 1,
            }
        )


def measure_upstream(
    model_runner: Any, mode: str, buckets: list[Bucket], repeats: int, record: Record, end_s: float
) -> None:
    """One of upstream's graphs; a bucket that it ran eagerly has no time, and re-prefills end where one fails."""
    prefills = Prefills(model_runner)
    rows: list[dict[str, Any]] = []
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
    failed: dict[str, Any] = {}
    for number, bucket in enumerate(buckets):
        if time.perf_counter() > end_s:
            break
        if bucket.prefix_tokens and failed:
            continue
        try:
            if bucket.prefix_tokens:
                prefills.run(bucket, 99)
            executed = 0
            seconds, runs = prefills.median_s(bucket, repeats)
        except Exception as error:
            if not bucket.prefix_tokens:
                raise
            failed = {"reprefills_error": f"{bucket}: {error}"}
        else:
            rows.append({**bucket._asdict(), f"{mode}_s": seconds if executed == runs else None})
        record({"rows": rows, "buckets_left": len(buckets) - number - 1, **failed})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", choices=["grid", "breakable", "full"], required=True)
    parser.add_argument("--attention", default=None, help="SGLang's (default: triton; for full: flashinfer)")
    parser.add_argument("--dtype", default="bfloat16", help="on a GPU; float32 elsewhere (default: bfloat16)")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--reprefills", default=REPREFILLS, help="LENGTHxREQUESTS+PREFIX,... (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--within", type=float, default=500.0, help="no batch is begun later (s; default: 500)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    end_s = time.perf_counter() + arguments.within
    lengths = [int(part) for part in arguments.lengths.split(",")]
    batches = [int(part) for part in arguments.batches.split(",")]
    buckets = [Bucket(length, requests) for length in lengths for requests in batches]
    buckets = in_order(buckets + parse_reprefills(arguments.reprefills))
    prepare_process()
    from gpu.ceilings import measure
    from gpu.model_shapes import write_model

    with tempfile.TemporaryDirectory() as folder:
        write_model(arguments.model, Path(folder))
        device = measure()
        found: dict[str, Any] = {
            "device": device.name,
            "read_bytes_per_s": device.ceilings.read_bytes_per_s,
            "operations_per_s": device.ceilings.operations_per_s,
            "copy_bytes_per_s": device.copy_bytes_per_s,
            "rows": [],
        }

        def record(more: dict[str, Any]) -> None:
            found.update(more)
            write_json(arguments.out, found)

        record({})
        runner = load_runner(
            engine_options(Path(folder), arguments.mode, arguments.attention, arguments.dtype, lengths, batches)
        )
        spread_weights(runner)
        if arguments.mode == "grid":
            measure_grid(runner, lengths, batches, buckets, arguments.repeats, record, end_s)
        else:
            measure_upstream(runner, arguments.mode, buckets, arguments.repeats, record, end_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
