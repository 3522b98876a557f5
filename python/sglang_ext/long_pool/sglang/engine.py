"""Describes what a scheduler brings into a long pool: its model and KV memory as chunk steps want them, and its member.

A chunk is a forward of its own between two scheduler iterations. It enters SGLang with a batch made by hand whose
one "sequence" is this member's rows, and with an attention backend that asks the ring; everything else in the model
(embedding, rotary positions, fully connected layers, logits) is SGLang's and does not notice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams, EvictResult
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_ext.long_pool.decide.orders import MemberReport
from sglang_ext.long_pool.member.kept_rows import KeptRows
from sglang_ext.long_pool.member.kv_streams import OpenTarget, Target
from sglang_ext.long_pool.member.landing import Landing
from sglang_ext.long_pool.member.pool_link import PoolLink, ReplicatedLink, TcpLink
from sglang_ext.long_pool.member.pool_member import PoolMember
from sglang_ext.long_pool.member.ranks import SINGLE_RANK, GroupRanks, Ranks
from sglang_ext.long_pool.member.ring_attention import Attention, AttentionRule
from sglang_ext.long_pool.member.shard import KvPoolFullError
from sglang_ext.long_pool.mesh.device_streams import DeviceStreams, streams_of
from sglang_ext.long_pool.mesh.nccl_library import NcclError, NcclLibrary
from sglang_ext.long_pool.mesh.nccl_mesh import NcclMeshes
from sglang_ext.long_pool.mesh.peer_links import MeshOver, PeerLinks, route_to
from sglang_ext.long_pool.mesh.shared_device_mesh import CudaSharing, SharedDeviceMeshes
from sglang_ext.long_pool.mesh.staged_mesh import StagedMeshes
from sglang_ext.long_pool.messages import PROTOCOL_VERSION, Destination, Hello
from sglang_ext.long_pool.sglang.cdsp_options import CdspOptions, MeshKind, model_conflict
from sglang_ext.shared_key import read_key_file
from sglang_ext.transfer.sglang.layout import shares_of
from sglang_ext.transfer.sglang.manager import HandshakeKVManager
from sglang_ext_kernels.block_attention import gather_kv, scatter_kv_

logger = logging.getLogger(__name__)

# SGLang's padding slot: written by rows that mean nothing, never read.
_PADDING_SLOT = 0


class UnsupportedModelError(ValueError):
    """A model whose attention or KV memory cannot be divided over instances."""


class SchedulerKvPool:
    """The KV pool of a scheduler; makes room by evicting from its prefix cache, as SGLang does.

    Layers with a sliding window may have a pool of their own (gpt-oss). A slot is one of the pool of all other layers
    then, and has a peer in that of the windows for as long as it is taken, as in SGLang.
    """

    def __init__(self, scheduler: Any) -> None:
        """Raises UnsupportedModelError, naming the pool."""
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._is_latent = type(pool) is MLATokenToKVPool
        self._has_windows = type(pool) is SWAKVPool
        parts = (pool.full_kv_pool, pool.swa_kv_pool) if self._has_windows else (pool,)
        for part in () if self._is_latent else parts:
            if type(part) is not MHATokenToKVPool or part.is_quantized_kv_cache:
                raise UnsupportedModelError(
                    f"KV memory of the kind {type(part).__name__} cannot be divided over instances"
                )
            if part.kv_cache_layout != "nhd":
                raise UnsupportedModelError(f"KV memory as {part.kv_cache_layout} cannot be divided over instances")
        if len({part.get_key_buffer(0).shape[1:] for part in parts}) > 1:
            raise UnsupportedModelError("layers whose KV has several shapes cannot be divided over instances")
        self._pool = pool
        if self._is_latent and self.device.type != "cpu":
            raise UnsupportedModelError(
                "latent attention (MLA) is divided over instances only on CPUs: its rows are too large for the kernels "
                "of a ring on GPUs; serve this model without --cdsp-coordinator"
            )
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._tree = scheduler.tree_cache
        self.layers: int = pool.layer_num
        self.page_tokens: int = scheduler.page_size

    @property
    def device(self) -> torch.device:
        """Return where its memory is."""
        device: torch.device = self._pool.get_key_buffer(0).device
        return device

    @property
    def free_tokens(self) -> int:
        allocator, tree = self._allocator, self._tree
        if not self._has_windows:
            return int(allocator.available_size() + tree.evictable_size())
        whole = allocator.full_available_size() + tree.full_evictable_size()
        return int(min(whole, allocator.swa_available_size() + tree.swa_evictable_size()))

    def allocate(self, tokens: int) -> torch.Tensor:
        whole = -(-tokens // self.page_tokens) * self.page_tokens
        evict_from_tree_cache(self._tree, whole)
        slots = self._take(whole)
        if slots is None:
            raise KvPoolFullError(f"{whole} KV slots are wanted, {self._allocator.available_size()} are free")
        return slots[:tokens]

    def _take(self, tokens: int) -> torch.Tensor | None:
        allocator = self._allocator
        if not self._has_windows:
            slots: torch.Tensor | None = allocator.alloc(tokens)
            return slots
        if allocator.available_size() < tokens:
            return None
        whole, windows = allocator.full_attn_allocator.alloc(tokens), allocator.swa_attn_allocator.alloc(tokens)
        allocator.set_full_to_swa_mapping(whole, windows)
        return whole

    def free(self, slots: torch.Tensor) -> None:
        self._allocator.free(slots)

    def count_freed(self, pages: torch.Tensor) -> int:
        return len(pages)

    def _in_layer(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return where the rows of these slots lie in a layer's own pool."""
        if self._has_windows and self._pool.layers_mapping[layer][1]:
            slots = self._pool.translate_loc_from_full_to_swa(slots)
        return slots

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        keys, slots = self._pool.get_key_buffer(layer), self._in_layer(layer, slots)
        if self._is_latent:
            return _movable(keys).index_select(0, slots)[None].view(keys.dtype)
        values = self._pool.get_value_buffer(layer)
        return gather_kv(_movable(keys), _movable(values), slots.to(keys.device)).view(keys.dtype)

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        keys, slots = _movable(self._pool.get_key_buffer(layer)), self._in_layer(layer, slots)
        if self._is_latent:
            keys.index_copy_(0, slots, _movable(kv)[0])
            return
        scatter_kv_(keys, _movable(self._pool.get_value_buffer(layer)), slots.to(keys.device), _movable(kv))

    def empty_block(self, tokens: int) -> torch.Tensor:
        buffer = self._pool.get_key_buffer(0)
        return buffer.new_empty((1 if self._is_latent else 2, tokens, *buffer.shape[1:]))


def _movable(rows: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a type that torch moves rows of: FP8 as bytes."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def share_memory(tree: Any, kept: KeptRows) -> None:
    """Let SGLang's prefix cache `tree` evict kept rows, too, and count them among what it could evict.

    What has been used least recently goes first, of both together.
    """
    stock_evictable_size, stock_reset = tree.evictable_size, tree.reset
    kept.others_tokens = stock_evictable_size

    def with_kept_rows(stock_evict: Callable[..., EvictResult]) -> Callable[..., EvictResult]:
        def evict(params: EvictParams, **kwargs: Any) -> EvictResult:
            wanted = params.num_tokens
            freed = kept.evict_outlived(wanted)
            result = stock_evict(replace(params, num_tokens=max(0, wanted - freed)), **kwargs)
            kept.others_evicted_tokens += result.num_tokens_evicted
            freed += result.num_tokens_evicted
            result.num_tokens_evicted = freed + kept.evict(wanted - freed)
            return result

        return evict

    def reset() -> None:
        kept.flush()
        stock_reset()

    # Where it is the base class's, it calls `evict`.
    has_its_own = type(tree).evict_for_alloc is not BasePrefixCache.evict_for_alloc
    if has_its_own:
        tree.evict_for_alloc = with_kept_rows(tree.evict_for_alloc)
    tree.evict = with_kept_rows(tree.evict)
    tree.evictable_size = lambda: stock_evictable_size() + kept.evictable_tokens
    tree.reset = reset


def prefix_namespace(extra_key: str | None, cache_salt: str | None) -> str:
    """Return what prompts that may share a prefix have in common, in one line."""
    return hashlib.blake2b(json.dumps([extra_key, cache_salt]).encode(), digest_size=16).hexdigest()


class SchedulerEngine:
    """A scheduler's model, one forward at a time, outside its own batches; each rank has its own heads of it."""

    def __init__(self, scheduler: Any, ranks: Ranks = SINGLE_RANK) -> None:
        """Raises UnsupportedModelError, naming what does not fit."""
        self._ranks = ranks
        self._runner = scheduler.tp_worker.model_runner
        problem = model_conflict(self._runner.model_config, on_gpu=self._runner.device != "cpu")
        if problem is not None:
            raise UnsupportedModelError(problem)
        self.pool = SchedulerKvPool(scheduler)

    @property
    def description(self) -> str:
        """Return what must be equal in all instances of a group, in one line."""
        config = self._runner.model_config
        shape = f"{config.num_hidden_layers}x{config.hidden_size}x{config.vocab_size}"
        ranks = self._ranks.size
        of_ranks = f", {ranks} ranks" if ranks > 1 else ""
        kv_dtype = self._runner.kv_cache_dtype
        of_kv = f", KV in {kv_dtype}" if kv_dtype != config.dtype else ""
        return f"{config.hf_config.architectures[0]} {shape} {config.dtype} {config.model_path}{of_kv}{of_ranks}"

    def forward(
        self, token_ids: Sequence[int], positions: torch.Tensor, slots: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """See `long_pool.member.chunk_step.Engine`."""
        if not token_ids:
            # A model cannot compute no rows, and the ring needs every member in every layer.
            token_ids = [0]
            positions, slots = positions.new_zeros(1), slots.new_full((1,), _PADDING_SLOT)
        runner = self._runner
        batch = _batch(torch.from_numpy(np.array(token_ids, np.int64)), positions, slots, runner.device)
        backend = _ChunkBackend(runner, attention, slots)
        # A graph that was captured has SGLang's attention.
        graphs, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, None
        try:
            with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
                output = runner.forward(batch)
        finally:
            runner.prefill_cuda_graph_runner = graphs
        logits: torch.Tensor = output.logits_output.next_token_logits[-1]
        return logits.float()

    def try_workspace(self, rows: int, held_tokens: int) -> None:
        """See `long_pool.member.chunk_step.Engine`. On a CPU nothing is tried: memory is there once it is written."""
        size_bytes, device = self.workspace_bytes(rows, held_tokens), self.pool.device
        if device.type != "cpu":
            torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def workspace_bytes(self, rows: int, held_tokens: int) -> int:
        """About what a chunk needs at its fullest moment: a layer's activations, attention's sums in float32, the keys
        and values that are held here and two blocks of others, and a row of logits."""
        config, kv = self._runner.model_config, self.pool.empty_block(1)
        text, ranks = config.hf_text_config, self._ranks.size
        experts = int(getattr(text, "num_experts_per_tok", 0) or 0)
        width = max(int(text.intermediate_size), experts * int(getattr(text, "moe_intermediate_size", 0) or 0))
        heads = -(-config.num_attention_heads // ranks)
        of_row = (4 * config.hidden_size + 3 * (width // ranks) + 3 * heads * config.head_dim) * kv.element_size()
        sums = 2 * heads * (config.head_dim + 1) * torch.float32.itemsize
        logits = config.vocab_size * torch.float32.itemsize
        return int(rows * (of_row + sums) + 3 * held_tokens * kv.nbytes + logits)


class _ChunkBackend(AttentionBackend):  # type: ignore[misc]  # SGLang has no type information here
    """Stores K and V of the chunk's rows, then asks the ring. SGLang's own backend is not touched."""

    def __init__(self, runner: Any, attention: Attention, slots: torch.Tensor) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._attention = attention
        # Of the rows that are computed, where layers have a pool of their own for windows.
        self._window_slots = (
            self.token_to_kv_pool.translate_loc_from_full_to_swa(slots) if runner.is_hybrid_swa else None
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        pass

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self._window_slots), k, v)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        rule = AttentionRule(layer.scaling, window, layer.logit_cap, sinks)
        # The values of latent rows are their first part.
        out = self._attention.attend(layer.layer_id, heads, rule)[..., : layer.v_head_dim]
        return out.to(q.dtype).reshape(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)


def _batch(token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, device: str) -> Any:
    rows = token_ids.numel()
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=token_ids.to(device),
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=torch.tensor([rows], device=device),
        out_cache_loc=slots.to(device),
        seq_lens_sum=rows,
        seq_lens_cpu=torch.tensor([rows]),
        orig_seq_lens=torch.tensor([rows], dtype=torch.int32, device=device),
        positions=positions.to(device),
        extend_num_tokens=rows,
        extend_seq_lens=torch.tensor([rows], dtype=torch.int32, device=device),
        extend_prefix_lens=torch.zeros(1, dtype=torch.int32, device=device),
        extend_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[rows],
        extend_logprob_start_lens_cpu=[rows],
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    batch.mark_forward_metadata_ready()
    return batch


def build_member(scheduler: Any, options: CdspOptions) -> PoolMember:
    """Connects in the background. Raises UnsupportedModelError, naming the model or what of it does not fit."""
    ranks = _ranks(scheduler)
    engine = SchedulerEngine(scheduler, ranks)
    open_target, how = _opener(scheduler)
    landing = _landing(scheduler)
    streams = streams_of(engine.pool.device)
    over, kind = _carrier(streams, options.mesh)
    model = engine.description + how + (f", between members by {kind}" if streams is not None else "")

    def hello() -> Hello:
        return Hello(
            PROTOCOL_VERSION,
            options.name,
            options.node,
            model,
            engine.pool.layers,
            engine.pool.page_tokens,
            MemberReport(0.0, engine.pool.free_tokens, max_chunk_tokens(scheduler, options)),
            options.min_tokens,
            links.rank_addresses,
            receivers,
            engine.pool.layers * engine.pool.empty_block(1).nbytes,
        )

    host = options.host or route_to(options.coordinator_host, options.coordinator_port)
    key = read_key_file(None if options.key_file is None else Path(options.key_file))
    links = PeerLinks(host, key, options.step_timeout_s, ranks.rank, over=over)
    links.rank_addresses = tuple(ranks.gather(links.address))
    receivers = () if landing is None else tuple(ranks.gather(landing.address))
    link: PoolLink | None = None
    if ranks.rank == 0:
        link = TcpLink(
            *(options.coordinator_host, options.coordinator_port, hello, key),
            silent_s=lambda: links.silent_s,
            give_up=links.give_up_now,
        )
    if ranks.size > 1 or link is None:
        link = ReplicatedLink(ranks, link)
    return PoolMember(engine, link, links, open_target, ranks, streams, landing)


def _carrier(streams: DeviceStreams | None, mesh: MeshKind) -> tuple[MeshOver, str]:
    """Return what moves tensors between members, and in words: it must be the same in all of them. Raises
    UnsupportedModelError where NCCL is wanted and cannot be had."""
    if streams is None:
        return nullcontext, "links"
    if mesh is MeshKind.LINKS:
        return StagedMeshes(streams).over, "links"
    shared = SharedDeviceMeshes(streams, CudaSharing(streams.device)).over
    try:
        meshes = NcclMeshes(NcclLibrary(), streams, fallback=shared, may_fall_back=mesh is MeshKind.AUTO)
    except NcclError as error:
        if mesh is MeshKind.NCCL:
            raise UnsupportedModelError(f"cdsp.mesh nccl: {error}") from None
        logger.warning("cdsp: tensors go over links: %s", error)
        return shared, "the device's memory or links"
    return meshes.over, "NCCL" if mesh is MeshKind.NCCL else "NCCL, the device's memory or links"


def max_chunk_tokens(scheduler: Any, options: CdspOptions) -> int:
    """Return how many tokens this instance computes at once: the option's number, else as many as SGLang's own batches
    may have."""
    return int(options.max_chunk_tokens or scheduler.max_prefill_tokens)


def _ranks(scheduler: Any) -> Ranks:
    if scheduler.tp_size == 1:
        return SINGLE_RANK
    group = scheduler.tp_group
    return GroupRanks(group.cpu_group, group.ranks[0])


def _sharing_manager(scheduler: Any) -> HandshakeKVManager | None:
    """Return the manager by which members send rows of a prompt of another one; None where they do not."""
    manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
    is_shared = isinstance(manager, HandshakeKVManager) and manager.shared_from_tokens is not None
    return manager if is_shared else None


def _opener(scheduler: Any) -> tuple[OpenTarget | None, str]:
    """Return how this instance sends KV of others' requests to decode, and in words: it must be the same in all
    members."""
    manager = _sharing_manager(scheduler)
    if manager is None:
        return None, ""

    def open_target(destination: Destination) -> Target | None:
        for share in shares_of(manager.attn_tp_rank, manager.heads, destination.heads):
            if share.decode_rank == destination.rank and share.head_count:
                handle = manager.endpoint.open_sender(destination.room, destination.receiver, is_helper=True)
                return Target(handle, share.first_head, share.head_count, destination.first_token)
        return None

    return open_target, f", KV to decode by handshake over {manager.transport_name}"


def _landing(scheduler: Any) -> Landing | None:
    """Return where kept rows of other members come to."""
    manager = _sharing_manager(scheduler)
    if manager is None:
        return None
    return Landing(manager.endpoint, manager.attn_tp_rank, manager.heads, manager.layer_count)
