"""From a measured prompt to the two instances that serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from sglang_ext.policy.decode_choice import decode_policy, fits
from sglang_ext.policy.length_class import FixedBoundary, is_in_doubt
from sglang_ext.policy.pool_choice import choose_pool
from sglang_ext.policy.prefill_choice import predicted_wait_s, prefill_policy
from sglang_ext.policy.prefix_index import BLOCK_BYTES, PrefixIndex
from sglang_ext.policy.token_estimate import TokenEstimator
from sglang_ext.types import RouteDecision
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.prompt import Prompt
from sglang_ext_router.workers import Worker, WorkerRegistry


class Route(NamedTuple):
    """A decision and the instances that it names."""

    decision: RouteDecision
    prefill: Worker
    decode: Worker
    is_spilled: bool


class NoInstanceError(Exception):
    """No instance can take the request now; the message says of which kind."""


class RoutePlanner:
    """Holds what routing learns (prefixes, bytes per token) and asks the policies."""

    def __init__(self, config: RouterConfig, registry: WorkerRegistry, draw: Callable[[], float]) -> None:
        self._registry = registry
        self._draw = draw
        self._boundary = FixedBoundary(config.length_boundary_tokens)
        self._prefill_policy = prefill_policy(config.prefill_policy)
        self._decode_policy = decode_policy(config.decode_policy)
        self._allow_spill = config.pool_spill
        self._use_breakers = not config.disable_circuit_breaker
        self.estimator = TokenEstimator()
        self.index = PrefixIndex(capacity_blocks=config.prefix_index_blocks)
        for worker in registry:
            if worker.role.is_prefill:
                self.index.add_worker(worker.id)

    # -- size of the prompt -----------------------------------------------------------------------------

    def estimate_tokens(self, prompt: Prompt) -> int:
        """Tokens of the longest single prompt: what decides class and fit."""
        known = prompt.longest_known_tokens or 0
        return max(known, self.estimator.estimate(prompt.longest_bytes)) if prompt.longest_bytes else max(1, known)

    def needs_exact_count(self, prompt: Prompt) -> bool:
        """Whether estimate errors could change the class, or whether the prompt fits an instance."""
        if not prompt.longest_bytes:
            return False
        low, high = self.estimator.interval(prompt.longest_bytes)
        cached = self._best_cached_tokens(prompt, (low + high) // 2)
        if is_in_doubt(low, high, cached, self._boundary):
            return True
        limit = self.longest_prompt_tokens()
        return limit is not None and low <= limit < high

    def longest_prompt_tokens(self) -> int | None:
        """The longest prompt that some ready decode instance can hold; None while there is none."""
        return max((worker.max_prompt_tokens for worker in self._registry.ready_decode), default=None)

    def _best_cached_tokens(self, prompt: Prompt, prompt_tokens: int) -> int:
        if not prompt.hashes:
            return 0
        matched = self.index.matched_blocks(prompt.hashes)
        return _cached_tokens(max(matched.values(), default=0), prompt, prompt_tokens)

    # -- choice -----------------------------------------------------------------------------------------

    def route(
        self,
        prompt: Prompt,
        prompt_tokens: int,
        prefill_excluded: Set[int],
        decode_excluded: Set[int],
        now_s: float,
    ) -> Route:
        """Choose pool, prefill instance and decode instance; NoInstanceError if there is none.

        Excluded instances (by id) have failed this request before: they are used only if nothing else is left.
        """
        prefills = self._usable(self._registry.ready_prefill, prefill_excluded, now_s)
        decodes = self._usable(self._registry.ready_decode, decode_excluded, now_s)
        if not prefills or not decodes:
            raise NoInstanceError("no prefill instance is ready" if not prefills else "no decode instance is ready")

        matched = self.index.matched_blocks(prompt.hashes) if prompt.hashes else None
        if matched:
            cached = [_cached_tokens(matched.get(worker.id, 0), prompt, prompt_tokens) for worker in prefills]
        else:
            cached = [0] * len(prefills)
        pool = choose_pool(
            prompt_tokens, [worker.role for worker in prefills], cached, self._boundary, self._allow_spill
        )
        if not pool.candidates:
            raise NoInstanceError(f"no prefill instance for {pool.length_class} prompts is ready")
        prefill_loads = [prefills[i].prefill_load(cached[i]) for i in pool.candidates]
        chosen = self._prefill_policy.choose(prefill_loads, prompt_tokens, self._draw())
        load = prefill_loads[chosen]
        prefill = prefills[pool.candidates[chosen]]

        decode_loads = [worker.decode_load() for worker in decodes]
        able = [i for i, one in enumerate(decode_loads) if fits(one, prompt_tokens)]
        if not able:
            raise NoInstanceError("no decode instance that could hold the prompt is ready")
        chosen = self._decode_policy.choose([decode_loads[i] for i in able], self._draw())
        decode = decodes[able[chosen]]
        decision = RouteDecision(
            pool.length_class,
            prefill.id,
            decode.id,
            predicted_wait_s(load),
            prompt_tokens - load.cached_tokens,
            load.cached_tokens,
        )
        return Route(decision, prefill, decode, pool.is_spilled)

    def _usable(self, ready: Sequence[Worker], excluded: Set[int], now_s: float) -> Sequence[Worker]:
        """Without open circuits and excluded instances, unless that leaves none."""
        if self._use_breakers:
            closed = [worker for worker in ready if worker.breaker.can_try(now_s)]
            if closed and len(closed) < len(ready):
                ready = closed
        if excluded:
            others = [worker for worker in ready if worker.id not in excluded]
            if others:
                ready = others
        return ready

    # -- learning ---------------------------------------------------------------------------------------

    def learn_route(self, prompt: Prompt, prefill: Worker) -> None:
        """The prompt's prefix will be in this instance's cache."""
        if prompt.hashes:
            self.index.record(prefill.id, prompt.hashes)

    def learn_not_prefilled(self, prompt: Prompt, prefill: Worker, held_tokens: int, prompt_tokens: int) -> None:
        """The prefill did not end: what the instance did not hold before, it may not hold now."""
        if prompt.hashes and self._registry.contains(prefill):
            held_blocks = len(prompt.hashes) * held_tokens // max(1, prompt_tokens)
            self.index.forget(prefill.id, prompt.hashes, held_blocks)

    def learn_tokens(self, prompt: Prompt, prompt_tokens: int) -> None:
        """An instance told how many tokens the prompt had."""
        if prompt.sequence_count == 1 and prompt.text_bytes:
            self.estimator.observe(prompt.text_bytes, prompt_tokens)

    def learn_capacity(self, prefill: Worker) -> None:
        """An instance told the size of its KV cache: it cannot hold more prefixes than that."""
        if prefill.role.is_prefill:
            size_bytes = prefill.kv_capacity_tokens * self.estimator.bytes_per_token
            self.capacity_blocks = max(1, int(size_bytes / BLOCK_BYTES))


def _cached_tokens(blocks: int, prompt: Prompt, prompt_tokens: int) -> int:
    """Tokens in that many matched blocks; at least the last token is always computed anew."""
    size = prompt.longest_bytes or (prompt.longest_known_tokens or 1) * 8
    return min(blocks * BLOCK_BYTES * prompt_tokens // max(1, size), max(0, prompt_tokens - 1))
