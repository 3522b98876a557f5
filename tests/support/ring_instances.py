"""Instances for chunk steps: a process each with SGLang's model runner, joined by links, driven from the test.

with ring_instances(model, 3) as instances:
    logits = instances.run(plan)

Not a whole server: what is tested is the computation. Servers are tested beside it.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from support.engines import free_port
from support.preloaded import preloaded_context

START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 60.0
POOL_TOKENS = 8192


class Step(NamedTuple):
    """One chunk of one request, on every member of its group."""

    request: int
    layout: Any  # ChunkLayout
    token_ids: tuple[tuple[int, ...], ...]  # by place in the ring
    first_tag: int


class RingInstances:
    """Processes and the pipes to them."""

    def __init__(self, pipes: Sequence[Sequence[Connection]]) -> None:
        """Pipes by instance, then by rank."""
        self._pipes = pipes
        self._sequences = itertools.count(1)

    def step(self, step: Step) -> Any:
        """Logits of the chunk's last position, float32 [vocabulary]."""
        return next(answer for answer in self.steps([step]) if answer is not None)

    def steps(self, steps: Sequence[Step]) -> list[Any]:
        """Run steps in this order on every instance that belongs to them; what each of them returned."""
        for step in steps:
            sequence = next(self._sequences)
            for place, instance in enumerate(step.layout.group):
                self._tell(instance, "step", step._replace(token_ids=(step.token_ids[place],)), sequence)
        return [_answers(self._pipes[instance])[0] for step in steps for instance in step.layout.group]

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
        """Of every rank of every instance."""
        free = []
        for instance, pipes in enumerate(self._pipes):
            self._tell(instance, "free_tokens")
            free += _answers(pipes)
        return free

    def break_ring(self, instance: int, rank: int, calls: int) -> None:
        """The mesh of this rank fails with its `calls`-th call from now on, until `join`."""
        self._pipes[instance][rank].send(("break_ring", calls))
        _answer(self._pipes[instance][rank])

    def join(self) -> None:
        """Connect all again."""
        addresses = {}
        for instance, pipes in enumerate(self._pipes):
            self._tell(instance, "listen")
            addresses[instance] = _answers(pipes)
        for instance in addresses:
            self._tell(instance, "join", addresses)
        for pipes in self._pipes:
            _answers(pipes)

    def failures(self, step: Step) -> list[str | None]:
        """What every rank of every member says of a step: None, or its error."""
        sequence = next(self._sequences)
        for place, instance in enumerate(step.layout.group):
            self._tell(instance, "failure_of", step._replace(token_ids=(step.token_ids[place],)), sequence)
        return [answer for instance in step.layout.group for answer in _answers(self._pipes[instance])]

    def roll_back(self, instance: int, request: int) -> None:
        """The last step of a request counts for nothing there, as it has failed elsewhere."""
        self._tell(instance, "roll_back", request)
        _answers(self._pipes[instance])

    def _ask(self, instance: int, *message: Any) -> Any:
        """What the first rank answers."""
        self._tell(instance, *message)
        return _answers(self._pipes[instance])[0]

    def _tell(self, instance: int, *message: Any) -> None:
        for pipe in self._pipes[instance]:
            pipe.send(message)


@contextmanager
def ring_instances(
    model: Path,
    count: int,
    page_tokens: int = 1,
    dtype: str = "float32",
    ranks: int = 1,
    pool_tokens: int = POOL_TOKENS,
) -> Iterator[RingInstances]:
    """`count` instances of `ranks` tensor-parallel ranks, one thread for each."""
    context = preloaded_context()
    pipes: list[list[Connection]] = []
    processes = []
    for instance in range(count):
        port = free_port()
        pipes.append([])
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = Place(instance, count, rank, ranks, port, pool_tokens)
            process = context.Process(target=_serve, args=(theirs, str(model), place, page_tokens, dtype), daemon=True)
            process.start()
            processes.append(process)
            pipes[-1].append(ours)
    try:
        for pipe in itertools.chain(*pipes):
            assert _answer(pipe, START_TIMEOUT_S) == "ready"
        instances = RingInstances(pipes)
        instances.join()
        yield instances
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection, timeout_s: float = STEP_TIMEOUT_S) -> Any:
    assert pipe.poll(timeout_s), "an instance does not answer"
    kind, value = pipe.recv()
    assert kind == "ok", value
    return value


def _answers(pipes: Sequence[Connection]) -> list[Any]:
    return [_answer(pipe) for pipe in pipes]


class Place(NamedTuple):
    """Which process this is."""

    instance: int
    instances: int
    rank: int
    ranks: int
    port: int  # where the ranks of an instance meet
    pool_tokens: int = POOL_TOKENS


def _serve(pipe: Connection, model: str, place: Place, page_tokens: int, dtype: str) -> None:
    try:
        server = _Instance(model, place, page_tokens, dtype)
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

    def __init__(self, model: str, place: Place, page_tokens: int, dtype: str) -> None:
        import torch

        from sglang_ext import cpu

        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # One core for each rank, in turn: SGLang wants to be told.
        cores = sorted(os.sched_getaffinity(0))
        bound = (cores[rank % len(cores)] for rank in range(place.ranks))
        if place.ranks > 1:
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, bound))
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        cpu.install((*cpu.CANDIDATES, *cpu.BENCHMARK_CANDIDATES))
        torch.set_num_threads(1)
        from sglang_ext.long_pool.member.shard import Shard
        from sglang_ext.long_pool.sglang.engine import SchedulerEngine

        hook_attention()
        self._runner = model_runner(model, place, page_tokens, dtype)
        self._ranks = _ranks(place)
        scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=self._runner),
            token_to_kv_pool_allocator=self._runner.token_to_kv_pool_allocator,
            tree_cache=None,
            page_size=page_tokens,
        )
        self._engine = SchedulerEngine(scheduler, self._ranks)
        self._new_shard = lambda: Shard(self._engine.pool)
        self._shards: dict[int, Shard] = {}
        self._lent: dict[int, Any] = {}
        self._place = place

    def listen(self) -> Any:
        from sglang_ext.long_pool.mesh.peer_links import PeerLinks

        self._links = PeerLinks("127.0.0.1", b"", STEP_TIMEOUT_S, self._place.rank)
        return self._links.address

    def join(self, addresses: dict[int, Any]) -> None:
        from sglang_ext.long_pool.mesh.mesh import Membership

        place = self._place
        self._addresses = {instance: of_ranks[place.rank] for instance, of_ranks in addresses.items()}
        self._links.enter(Membership(16 * b"r", place.instance))
        self._breaks_after: int | None = None

    def break_ring(self, calls: int) -> None:
        self._breaks_after = calls

    def failure_of(self, step: Step, sequence: int) -> str | None:
        from sglang_ext.long_pool.mesh.mesh import MeshError

        try:
            self.step(step, sequence)
        except MeshError as error:
            return str(error)
        return None

    def step(self, step: Step, sequence: int) -> Any:
        from sglang_ext.long_pool.member.chunk_step import StepContext, run_chunk

        addresses = {instance: self._addresses[instance] for instance in step.layout.group}
        with self._links.step(sequence, addresses) as mesh:
            breaking = mesh if self._breaks_after is None else _Breaking(mesh, self._breaks_after)
            logits = run_chunk(
                StepContext(breaking, self._place.instance, step.first_tag, ranks=self._ranks),
                self._engine,
                self._shards.setdefault(step.request, self._new_shard()),
                step.layout,
                step.token_ids[0],
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

        from sglang_ext.long_pool.member.ring_attention import as_tensor

        shard = self._shards.get(request)
        if shard is None:
            return torch.empty(0, dtype=torch.int64), None
        pool = self._engine.pool
        layers = [pool.read(layer, shard.slots) for layer in range(pool.layers)]
        return as_tensor(shard.positions), torch.stack(layers)

    def roll_back(self, request: int) -> None:
        self._shards[request].roll_back()

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


class _Breaking:
    """A mesh whose calls fail after a while."""

    def __init__(self, mesh: Any, calls: int) -> None:
        self._mesh = mesh
        self._calls_left = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def send(self, *arguments: Any) -> Any:
        return self._call(self._mesh.send, arguments)

    def receive(self, *arguments: Any) -> Any:
        return self._call(self._mesh.receive, arguments)

    def _call(self, call: Any, arguments: Any) -> Any:
        self._calls_left -= 1
        if self._calls_left < 0:
            raise self._mesh.broken("broken: on purpose")
        return call(*arguments)


def _ranks(place: Place) -> Any:
    from sglang.srt.runtime_context import get_parallel

    from sglang_ext.long_pool.member.ranks import SINGLE_RANK, GroupRanks

    if place.ranks == 1:
        return SINGLE_RANK
    group = get_parallel().tp_group
    return GroupRanks(group.cpu_group, group.ranks[0])


def hook_attention() -> None:
    """Put this project's attention for CPUs into SGLang, as its plugin does in an engine."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ext.engine.device import Device
    from sglang_ext.engine.entry_point import load_implementation
    from sglang_ext.engine.hook_table import HOOK_TABLE

    for hook in HOOK_TABLE:
        if hook.device is Device.CPU:
            HookRegistry.register(hook.target, load_implementation(hook.implementation), HookType(hook.kind.value))
    HookRegistry.apply_hooks()


def model_runner(model: str, place: Place, page_tokens: int, dtype: str) -> Any:
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
        max_total_tokens=place.pool_tokens,
        page_size=page_tokens,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        tp_size=place.ranks,
        log_level="error",
    )
    arguments.resolve_once()
    ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=place.rank, pp_rank=0), gpu_id=place.rank)
    publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    config = ModelConfig.from_server_args(arguments)
    port = place.port
    bootstrap.init_parallel_runtime(server_args=arguments, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    runner = ModelRunner(
        model_config=config, mem_fraction_static=0.5, gpu_id=place.rank, nccl_port=port, server_args=arguments
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner
