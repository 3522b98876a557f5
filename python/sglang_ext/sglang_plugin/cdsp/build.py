"""A scheduler's member of a long pool, put together."""

from __future__ import annotations

from typing import Any

from sglang_ext.policy.cdsp.orders import MemberReport
from sglang_ext.sequence_parallel.kv_streams import OpenTarget, Target
from sglang_ext.sequence_parallel.member import PoolMember
from sglang_ext.sequence_parallel.mesh import Mesh
from sglang_ext.sequence_parallel.mesh_store import connect_mesh
from sglang_ext.sequence_parallel.messages import PROTOCOL_VERSION, Destination, Hello, Welcome
from sglang_ext.sequence_parallel.pool_link import PoolLink, ReplicatedLink, TcpLink
from sglang_ext.sequence_parallel.ranks import SINGLE_RANK, GroupRanks, Ranks
from sglang_ext.sglang_plugin.cdsp.arguments import CdspOptions
from sglang_ext.sglang_plugin.cdsp.engine import SchedulerEngine
from sglang_ext.sglang_plugin.handshake.manager import HandshakeKVManager
from sglang_ext.sglang_plugin.handshake.rank_pairing import shares_of


def build_member(scheduler: Any, options: CdspOptions) -> PoolMember:
    """Connects in the background. Raises UnsupportedModelError, naming the model or what of it does not fit."""
    ranks = _ranks(scheduler)
    engine = SchedulerEngine(scheduler, ranks)
    open_target, how = _opener(scheduler)
    model = engine.description + how

    def hello() -> Hello:
        free_tokens = int(scheduler.token_to_kv_pool_allocator.available_size())
        return Hello(
            PROTOCOL_VERSION,
            options.name,
            options.node,
            model,
            engine.pool.layers,
            engine.pool.page_tokens,
            MemberReport(0.0, free_tokens),
        )

    def connect(welcome: Welcome, epoch: int, members: tuple[int, ...]) -> Mesh:
        return connect_mesh(welcome, epoch, members, options.step_timeout_s, ranks)

    link: PoolLink | None = None
    if ranks.rank == 0:
        link = TcpLink(options.coordinator_host, options.coordinator_port, hello)
    if ranks.size > 1 or link is None:
        link = ReplicatedLink(ranks, link)
    return PoolMember(engine, link, connect, open_target, ranks)


def _ranks(scheduler: Any) -> Ranks:
    if scheduler.tp_size == 1:
        return SINGLE_RANK
    group = scheduler.tp_group
    return GroupRanks(group.cpu_group, group.ranks[0])


def _opener(scheduler: Any) -> tuple[OpenTarget | None, str]:
    """How this instance sends KV of others' requests to decode, and in words: it must be the same in all members."""
    manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
    if not isinstance(manager, HandshakeKVManager):
        return None, ""

    def open_target(destination: Destination) -> Target | None:
        for share in shares_of(manager.attn_tp_rank, manager.heads, destination.heads):
            if share.decode_rank == destination.rank and share.head_count:
                handle = manager.endpoint.open_sender(destination.room, destination.receiver, is_helper=True)
                return Target(handle, share.first_head, share.head_count, destination.first_token)
        return None

    return open_target, f", KV to decode by handshake over {manager.transport_name}"
