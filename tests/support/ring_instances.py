"""Instances for chunk steps: a process each with SGLang's model runner, joined by a mesh, driven from the test.

with ring_instances(model, 3) as instances:
    logits = instances.run(plan)

Not a whole server: what is tested is the computation. Servers are tested beside it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 60.0
POOL_TOKENS = 8192


class Step(NamedTuple):
    """One chunk of one request, on every member of its group."""

    request: int
    layout: Any  # ChunkLayout
    token_ids: tuple[tuple[int, ...], ...]  # by place in the ring
    first_tag: int
    is_overlapped: bool


class RingInstances:
    """Processes and the pipes to them."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def step(self, step: Step) -> Any:
        """Logits of the chunk's last position, float32 [vocabulary]."""
        return next(answer for answer in self.steps([step]) if answer is not None)

    def steps(self, steps: Sequence[Step]) -> list[Any]:
        """Run steps in this order on every instance that belongs to them; what each of them returned."""
        for step in steps:
            for place, instance in enumerate(step.layout.group):
                self._pipes[instance].send(("step", step._replace(token_ids=(step.token_ids[place],))))
        return [_answer(self._pipes[instance]) for step in steps for instance in step.layout.group]

    def stock(self, instance: int, token_ids: Sequence[int]) -> Any:
        """Logits of the last position of a prompt as SGLang alone computes them there."""
        return self._ask(instance, "stock", list(token_ids))

    def keep_prefix(self, instance: int, request: int, token_ids: Sequence[int]) -> None:
        """Compute a prefix as SGLang alone does, and lend its KV to a request."""
        self._ask(instance, "keep_prefix", request, list(token_ids))

    def kv_of(self, instance: int, request: int) -> Any:
        """Positions and KV of a shard: ([tokens], [layers, 2, tokens, heads, size])."""
        return self._ask(instance, "kv_of", request)

    def end(self, request: int) -> None:
        """Forget a request everywhere."""
        for instance in range(len(self._pipes)):
            self._ask(instance, "end", request)

    def free_tokens(self) -> list[int]:
        return [self._ask(instance, "free_tokens") for instance in range(len(self._pipes))]

    def _ask(self, instance: int, *message: Any) -> Any:
        self._pipes[instance].send(message)
        return _answer(self._pipes[instance])


@contextmanager
def ring_instances(model: Path, count: int, page_tokens: int = 1, dtype: str = "float32") -> Iterator[RingInstances]:
    """`count` instances, one thread each."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for instance in range(count):
        ours, theirs = context.Pipe()
        arguments = (theirs, str(model), instance, count, page_tokens, dtype)
        processes.append(context.Process(target=_serve, args=arguments, daemon=True))
        pipes.append(ours)
        processes[-1].start()
    try:
        for pipe in pipes:
            assert _answer(pipe, START_TIMEOUT_S) == "ready"
        pipes[0].send(("open_store",))
        store_port = _answer(pipes[0])
        for pipe in pipes:
            pipe.send(("join", store_port))
        for pipe in pipes:
            _answer(pipe)
        yield RingInstances(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection, timeout_s: float = STEP_TIMEOUT_S) -> Any:
    assert pipe.poll(timeout_s), "an instance does not answer"
    kind, value = pipe.recv()
    assert kind == "ok", value
    return value


def _serve(pipe: Connection, model: str, instance: int, count: int, page_tokens: int, dtype: str) -> None:
    try:
        server = _Instance(model, instance, count, page_tokens, dtype)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        return
    pipe.send(("ok", "ready"))
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send(("ok", getattr(server, name)(*arguments)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


class _Instance:
    """Inside the process."""

    def __init__(self, model: str, instance: int, count: int, page_tokens: int, dtype: str) -> None:
        import torch

        from sglang_ext.sglang_plugin import cpu_platform

        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        cpu_platform.install((*cpu_platform.CANDIDATES, *cpu_platform.BENCHMARK_CANDIDATES))
        torch.set_num_threads(1)
        from sglang_ext.sequence_parallel.shard import Shard
        from sglang_ext.sglang_plugin.cdsp.engine import SchedulerEngine

        self._runner = _model_runner(model, page_tokens, dtype)
        scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=self._runner),
            token_to_kv_pool_allocator=self._runner.token_to_kv_pool_allocator,
            tree_cache=None,
            page_size=page_tokens,
        )
        self._engine = SchedulerEngine(scheduler)
        self._new_shard = lambda: Shard(self._engine.pool)
        self._shards: dict[int, Shard] = {}
        self._lent: dict[int, Any] = {}
        self._instance, self._count = instance, count

    def open_store(self) -> int:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def join(self, store_port: int) -> None:
        import torch.distributed as dist

        from sglang_ext.sequence_parallel.mesh import GlooMesh

        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        self._mesh = GlooMesh(store, 0, range(self._count), self._instance, STEP_TIMEOUT_S)

    def step(self, step: Step) -> Any:
        from sglang_ext.sequence_parallel.chunk_step import run_chunk

        logits = run_chunk(
            self._engine,
            self._shards.setdefault(step.request, self._new_shard()),
            step.layout,
            step.token_ids[0],
            self._mesh,
            self._instance,
            step.first_tag,
            is_overlapped=step.is_overlapped,
        )
        return None if logits is None else logits.clone()

    def stock(self, token_ids: list[int]) -> Any:
        logits, slots = self._stock(token_ids)
        self._engine.pool.free(slots)
        self._runner.req_to_token_pool.clear()
        return logits

    def keep_prefix(self, request: int, token_ids: list[int]) -> None:
        _, slots = self._stock(token_ids)
        self._runner.req_to_token_pool.clear()
        shard = self._shards.setdefault(request, self._new_shard())
        shard.borrow((range(len(token_ids)),), slots)
        self._lent[request] = slots

    def kv_of(self, request: int) -> Any:
        import torch

        from sglang_ext.sequence_parallel.positioned_attention import as_tensor

        shard = self._shards.get(request)
        if shard is None:
            return torch.empty(0, dtype=torch.int64), None
        pool = self._engine.pool
        layers = [torch.stack(pool.read(layer, shard.slots)) for layer in range(pool.layers)]
        return as_tensor(shard.positions), torch.stack(layers)

    def end(self, request: int) -> None:
        shard = self._shards.pop(request, None)
        if shard is not None:
            shard.drop()
        lent = self._lent.pop(request, None)
        if lent is not None:
            self._engine.pool.free(lent)

    def free_tokens(self) -> int:
        return int(self._runner.token_to_kv_pool_allocator.available_size())

    def _stock(self, token_ids: list[int]) -> tuple[Any, Any]:
        from sglang.benchmark import one_batch

        bench = one_batch._TorchBenchRunner(self._runner)
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(1, len(token_ids), [token_ids])
        _, logits, batch = bench.extend(requests)
        rows = self._runner.req_to_token_pool.req_to_token
        slots = rows[batch.req_pool_indices[0], : len(token_ids)].long().clone()
        return logits[0].float().clone(), slots


def _model_runner(model: str, page_tokens: int, dtype: str) -> Any:
    from sglang.benchmark import one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=model,
        device="cpu",
        dtype=dtype,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        max_total_tokens=POOL_TOKENS,
        page_size=page_tokens,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        log_level="error",
    )
    arguments.resolve_once()
    ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    config = ModelConfig.from_server_args(arguments)
    port = _free_port()
    bootstrap.init_parallel_runtime(server_args=arguments, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    runner = ModelRunner(model_config=config, mem_fraction_static=0.5, gpu_id=0, nccl_port=port, server_args=arguments)
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
