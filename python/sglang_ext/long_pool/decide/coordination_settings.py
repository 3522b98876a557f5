"""Describes what does not change while a long pool is served, for its coordinator."""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.long_pool.decide.sharding import Interleaving

KV_TOKEN_BYTES = 131_072  # 32 layers with 8 KV heads of 128 in 16 bits


class CoordinationSettings(NamedTuple):
    """Describes what does not change while a pool is served."""

    layers: int  # of the model: every layer of a transfer has a tag
    page_tokens: int = 1
    interleaving: Interleaving = Interleaving.ZIGZAG
    # Failed chunks of a request, one after the other, before its own instance computes it by itself.
    max_attempts: int = 3
    room_timeout_s: float = 30.0  # this long it waits for a group that can hold it, while others are computed
    report_timeout_s: float = 5.0  # to refuse a prompt, all members must have reported this long after the last change
    bind_ahead_s: float = 0.05  # a prompt is given to an instance this long before its turn, or earlier if all compute
    bind_timeout_s: float = 5.0  # such a prompt is forgotten when that instance has not offered it after this long
    ttft_slo_s: float = 1.0  # objective of an announced prompt that brings none of its own, or
    slo_stretch: float = 5.0  # this many times its time on an idle pool if that is more
    short_backlog_s: float = 0.05  # ordinary work that keeps no chunk waiting (or by its objective: PoolMembers), but
    backlog_timeout_s: float = 5.0  # where nothing else runs, not longer than this
    chunk_s: float | None = None  # longest time of a chunk, also where `chunk_length` would let it take longer
    keeps_rows: bool = True  # of streamed prompts, where they were computed: a prefix cache of the pool
    kept_share: float = 0.75  # of a member's memory, at most
    kv_token_bytes: int = KV_TOKEN_BYTES  # of one token on one rank
    pulls_rows: bool = True  # kept rows may be brought to one instance, where that is better than to use them in place
    gathers_rows: bool = True  # nor do those of several members stay spread until the next turn comes
