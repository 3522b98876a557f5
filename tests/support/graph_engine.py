"""SGLang's model runner on a CPU with prefills on the grid of shapes, a replay being a run, beside the ordinary path.

Everything is as with graphs but the recording itself: choice of the shape, static tensors, padding, attention over
them, and the tail on the batch itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from support.preloaded import preloaded_context

TIMEOUT_S = 300.0


class Request(NamedTuple):
    """Token ids that were computed before, and those that are computed now."""

    prefix: tuple[int, ...]
    new: tuple[int, ...]


class Pass(NamedTuple):
    """What one prefill left: logits [requests, vocabulary] and, by request, the KV of all its tokens.

    With hidden states of all tokens where they are asked for, as they are once all batches have run.
    """

    logits: Any
    kv: list[Any]
    hidden: Any = None


class Outcome(NamedTuple):
    """A batch on the ordinary path and on the grid."""

    ordinary: Pass
    on_grid: Pass
    shape: tuple[int, int] | None  # tokens of a request, requests; None: it ran on the ordinary path
    fallback: str | None


class Setting(NamedTuple):
    """The grid of an engine, and what else differs between tests."""

    lengths_tokens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    page_tokens: int = 1
    capture: str = "start"
    memory_gb: float | None = None
    wants_hidden: bool = False
    ranks: int = 1
    is_hooked: bool = False  # as the plugin does it, over a stand-in for torch.cuda
    is_paged: bool = False  # attends over pages, as on an engine with FlashAttention 3, by plain mathematics
    # by rank, tokens of the shapes that cannot be recorded there
    failing: tuple[frozenset[int], ...] = (frozenset(), frozenset())


def run_batches(
    model: Path, batches: Sequence[Sequence[Request]], lengths: tuple[int, ...], sizes: tuple[int, ...], **more: Any
) -> list[Outcome]:
    """Each batch in turn, in a process of its own, as SGLang changes the one that it is imported into; `more` is of
    a `Setting`."""
    return run_ranks(model, batches, Setting(lengths, sizes, **more))[0]


def run_ranks(model: Path, batches: Sequence[Sequence[Request]], setting: Setting) -> list[list[Outcome]]:
    """The same on every tensor-parallel rank."""
    from support.engines import free_port

    port = free_port()
    with ProcessPoolExecutor(setting.ranks, mp_context=preloaded_context()) as pool:
        futures = [pool.submit(_run, str(model), batches, rank, port, setting) for rank in range(setting.ranks)]
        return [future.result(TIMEOUT_S) for future in futures]


def _run(model: str, batches: Sequence[Sequence[Request]], rank: int, port: int, setting: Setting) -> list[Outcome]:
    import torch

    from sglang_ext import cpu

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if setting.ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        bound = (str(cores[one % len(cores)]) for one in range(setting.ranks))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    cpu.install((*cpu.CANDIDATES, *cpu.BENCHMARK_CANDIDATES))
    torch.set_num_threads(1)
    from sglang_ext.graphs.sglang.capture import build_graphs
    from sglang_ext.graphs.sglang.graph_options import Capture, GraphOptions, conflict
    from sglang_ext.graphs.sglang.runner import GridPrefillRunner
    from support.ring_instances import Place, hook_attention, model_runner

    hook_attention()
    engine = model_runner(model, Place(0, 1, rank, setting.ranks, port), setting.page_tokens, "float32")
    assert conflict(engine) is None
    if setting.is_paged:
        from sglang_ext.graphs.sglang import attention

        attention.flash_attention = lambda: attend_over_pages
        splits_of = attention.splits_of
        # As of shapes that have programs enough, which a tiny model has not.
        attention.splits_of = lambda *shape: splits_of(*shape)._replace(splits=1)
        engine.prefill_attention_backend_str = "fa3"
    grid = GraphOptions(Capture(setting.capture), setting.lengths_tokens, setting.batch_sizes, setting.memory_gb)
    stock = engine.prefill_cuda_graph_runner
    if setting.is_hooked:
        runner = _hooked(engine, grid)
    else:
        runner = GridPrefillRunner(engine, stock or engine.eager_runner, engine.eager_runner)
        runner.use(build_graphs(runner, engine, grid, _recorder(setting.failing[rank]), free_bytes=1 << 30))
    graphs = runner.graphs
    assert graphs is not None
    hidden: list[Any] = []
    if setting.wants_hidden:
        _ask_for_hidden_states(engine, hidden)
    outcomes = []
    for batch in batches:
        ordinary = _forward(engine, batch, lambda: None, hidden)
        engine.prefill_cuda_graph_runner = runner
        runner.use(None)
        replays, fallbacks = graphs.replays.copy(), graphs.fallbacks.copy()
        on_grid = _forward(engine, batch, lambda: runner.use(graphs), hidden)
        engine.prefill_cuda_graph_runner = stock
        shape = next(iter(graphs.replays - replays), None)
        fallback = next(iter(graphs.fallbacks - fallbacks), None)
        outcomes.append(Outcome(ordinary, on_grid, shape and tuple(shape), fallback and fallback.value))
    return [one._replace(ordinary=_as_arrays(one.ordinary), on_grid=_as_arrays(one.on_grid)) for one in outcomes]


def attend_over_pages(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    page_table: Any,
    cache_seqlens: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    softmax_scale: float,
    softcap: float,
    causal: bool,
    out: Any,
) -> Any:
    """Stands in for FlashAttention 3: the same arguments, of the same types, and the same result."""
    import torch

    from sglang_ext_kernels.block_attention import attention_block_reference

    assert (page_table.dtype, cache_seqlens.dtype, cu_seqlens_q.dtype) == (torch.int32,) * 3
    assert causal
    assert not softcap
    slots, page_tokens = page_table.shape[0], k_cache.shape[1]
    assert cache_seqlens.shape == (slots,)
    assert cu_seqlens_q.shape == (slots + 1,)
    ends = cu_seqlens_q.tolist()
    for request, total in enumerate(cache_seqlens.tolist()):
        new = slice(ends[request], ends[request + 1])
        if new.stop == new.start:
            continue
        assert new.stop - new.start <= max_seqlen_q
        pages = page_table[request, : -(-total // page_tokens)].long()
        keys, values = (cache[pages].flatten(0, 1)[:total] for cache in (k_cache, v_cache))
        visible = torch.ones(new.stop - new.start, total, dtype=torch.bool).tril(total - (new.stop - new.start))
        out[new] = attention_block_reference(q[new], keys, values, softmax_scale, visible)[0].to(out.dtype)
    return out


def _hooked(engine: Any, grid: Any) -> Any:
    """The runner that the hook puts in the place of SGLang's; replays run again what was captured."""
    import pytest
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    from sglang_ext.graphs.sglang.capture import with_grid
    from sglang_ext.graphs.sglang.runner import GridPrefillRunner
    from sglang_ext_cuda_graphs.recorders import CudaRecorder
    from support.fake_cuda import Cuda

    cuda = Cuda()
    cuda.install(pytest.MonkeyPatch())  # for good: the process ends with the test
    capture_once = CudaRecorder._capture

    def capture(self: CudaRecorder, compute: Callable[[], None]) -> Any:
        graph: Any = capture_once(self, compute)
        graph.replay = compute
        return graph

    CudaRecorder._capture = capture  # type: ignore[method-assign]
    stock = GraphCapture(runner=None, memory_phase="prefill", memory_usage_gb=0.0, capture_time=0.0)
    taken = with_grid(stock, engine, engine.eager_runner, grid)
    assert isinstance(taken.runner, GridPrefillRunner)
    assert taken.capture_time > 0
    return taken.runner


def _recorder(failing: frozenset[int]) -> Any:
    from sglang_ext_cuda_graphs.recorders import Recording
    from support.direct_recorder import DirectRecorder

    class Failing(DirectRecorder):
        """Does not record what computes so many tokens."""

        def record(self, compute: Callable[[], None]) -> Recording:
            recording = super().record(compute)
            (output,) = (cell.cell_contents for cell in compute.__closure__ or () if _is_tensor(cell.cell_contents))
            if output.shape[0] in failing:
                raise RuntimeError("operation not permitted when stream is capturing")
            return recording

    return Failing()


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _as_arrays(one: Pass) -> Pass:
    return one if one.hidden is None else one._replace(hidden=one.hidden.float().numpy().copy())


def _ask_for_hidden_states(model_runner: Any, kept: list[Any]) -> None:
    """Of all tokens, in every pass from now on; they are put into `kept` as they come out."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    stock = model_runner.forward

    def forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        forward_batch.capture_hidden_mode = CaptureHiddenMode.FULL
        output = stock(forward_batch, *args, **kwargs)
        kept.append(output.logits_output.hidden_states)
        return output

    model_runner.forward = forward


def _forward(
    model_runner: Any, batch: Sequence[Request], before_new_tokens: Callable[[], None], hidden: list[Any]
) -> Pass:
    """Prefixes first, those of all requests together, then the new tokens of all."""
    import torch
    from sglang.benchmark import one_batch

    model_runner.req_to_token_pool.clear()
    allocator = model_runner.token_to_kv_pool_allocator
    allocator.clear()
    if hasattr(allocator, "swa_attn_allocator"):
        # A token has another slot in the pool of layers with a window than in that of the others.
        assert allocator.swa_attn_allocator.alloc(3 * model_runner.page_size) is not None
    pool = model_runner.token_to_kv_pool
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    for layer in layers:
        for buffer in pool.get_kv_buffer(layer):
            buffer.fill_(7.0)  # what is read and was not written shows
    first = [list(request.prefix or request.new) for request in batch]
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(len(batch), 0, first)
    prefixed = [(one, request) for one, request in zip(requests, batch, strict=True) if request.prefix]
    if prefixed:
        one_batch.extend([one for one, _ in prefixed], model_runner)
    for one, request in prefixed:
        one.full_untruncated_fill_ids.extend(request.new)
        one.prefix_len = len(request.prefix)
        one.extend_end = len(one.full_untruncated_fill_ids)
    before_new_tokens()
    _, logits, ran = one_batch.extend(requests, model_runner)
    rows = model_runner.req_to_token_pool.req_to_token
    kv = []
    for row, request in zip(ran.req_pool_indices.tolist(), batch, strict=True):
        slots = rows[row, : len(request.prefix) + len(request.new)].long()
        kv.append(torch.stack([_kv_of(pool, layer, slots) for layer in layers]).numpy())
    return Pass(logits.float().numpy().copy(), kv, hidden[-1] if hidden else None)


def _kv_of(pool: Any, layer: int, slots: Any) -> Any:
    """Keys and values of a layer [tokens, heads, size of both], of one with a window from the pool of those."""
    import torch

    is_in_window_pool = getattr(pool, "layers_mapping", {layer: (layer, False)})[layer][1]
    if is_in_window_pool:
        slots = pool.translate_loc_from_full_to_swa(slots)
    keys, values = pool.get_kv_buffer(layer)
    return torch.cat([keys[slots], values[slots]], dim=-1)
