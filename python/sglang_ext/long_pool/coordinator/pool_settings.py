"""Describes what a long pool is served with: its settings, what is the same in all members, and the coordinator made of
both."""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.coordinator import Coordinator
from sglang_ext.long_pool.decide.pool_schedule import PoolSchedule
from sglang_ext.long_pool.decide.price_planner import PriceOptions, PricePlanner
from sglang_ext.long_pool.decide.sharding import Interleaving
from sglang_ext.long_pool.messages import Hello


class PoolSettings(NamedTuple):
    """One pool's settings."""

    interleaving: Interleaving = Interleaving.ZIGZAG
    min_chunk_tokens: int = 512
    cross_node_factor: float = 1.1
    step_timeout_s: float = 30.0
    member_timeout_s: float = 5.0
    collects: bool = False  # all KV, wherever it fits, also where members send it straight to decode
    max_chunk_s: float | None = None  # predicted; longer ones are cut
    keeps_rows: bool = True  # of streamed prompts, as a prefix cache of the pool
    block_tokens: int = 32  # of a prompt, that are found there or not; or the next multiple that is whole pages
    ttft_slo_s: float = 1.0  # of an announced prompt that brings none of its own, or
    slo_stretch: float = 5.0  # this many times its time on an idle pool if that is more
    gathers_rows: bool = True  # that several members keep of a prompt, before its next turn comes

    @property
    def stuck_s(self) -> float:
        """Return how long after the first failure in a step all other members have timed out as well."""
        return 2 * self.step_timeout_s + self.member_timeout_s


class Identity(NamedTuple):
    """Describes what is the same in all members."""

    model: str
    layers: int
    page_tokens: int
    kv_token_bytes: int  # on one rank

    @classmethod
    def of(cls, hello: Hello) -> Identity:
        """Return what a member says of itself."""
        return cls(hello.model, hello.layers, hello.page_tokens, hello.kv_token_bytes)

    def __str__(self) -> str:
        return f"{self.model} ({self.layers} layers, pages of {self.page_tokens})"


def new_coordinator(settings: PoolSettings, identity: Identity, planner: PricePlanner) -> Coordinator:
    """Return one without members."""
    fixed = CoordinationSettings(
        layers=identity.layers,
        page_tokens=identity.page_tokens,
        interleaving=settings.interleaving,
        chunk_s=settings.max_chunk_s,
        keeps_rows=settings.keeps_rows,
        kv_token_bytes=identity.kv_token_bytes,
        ttft_slo_s=settings.ttft_slo_s,
        slo_stretch=settings.slo_stretch,
        gathers_rows=settings.gathers_rows,
    )
    return Coordinator(PoolSchedule(planner), fixed)


def planner_of(settings: PoolSettings, identity: Identity, costs: PoolCosts) -> PricePlanner:
    """Return a planner by the present costs."""
    return PricePlanner(
        PriceOptions(
            tuple(costs.candidates), settings.min_chunk_tokens, identity.page_tokens, settings.cross_node_factor
        )
    )
