"""What one request costs its instances, from the moment it is sent: load, reputation, and what is learned."""

from __future__ import annotations

from sglang_ext.policy.routing.pd_actions import Leg
from sglang_ext_router.prompt import Prompt
from sglang_ext_router.routing import Route
from sglang_ext_router.services import Services
from sglang_ext_router.workers import Worker

_PREFILL = Leg.PREFILL


class AttemptAccount:
    """One attempt of one request on two instances. Every leg ends with exactly one of the three verdicts."""

    __slots__ = ("_has_first_byte", "_new_tokens", "_prompt", "_prompt_tokens", "_services", "_started_s", "route")

    def __init__(self, services: Services, route: Route, prompt: Prompt, prompt_tokens: int, now_s: float) -> None:
        """Take the load upon the instances."""
        self._services = services
        self.route = route
        self._prompt = prompt
        self._prompt_tokens = prompt_tokens
        self._started_s = now_s
        self._has_first_byte = False
        self._new_tokens = new_tokens = route.decision.new_tokens * prompt.sequence_count
        prefill, decode = route.prefill, route.decode
        prefill.in_flight += 1
        prefill.pending_tokens += new_tokens
        decode.in_flight += 1
        decode.reserved_tokens += prompt_tokens
        if services.registry.suspects:
            prefill.breaker.on_start(now_s)
            decode.breaker.on_start(now_s)
        services.planner.learn_route(prompt, prefill)
        if services.siblings.shares_prefixes and prompt.hashes:
            services.siblings.tell_prefix(prefill.url, prompt.hashes)
        services.metrics.count_route(route, prompt_tokens)

    def worker(self, leg: Leg) -> Worker:
        return self.route.prefill if leg is _PREFILL else self.route.decode

    def first_byte(self) -> None:
        """The KV has arrived: no longer on its way but used, which decode's next report will say."""
        self._has_first_byte = True
        decode = self.route.decode
        decode.reserved_tokens -= self._prompt_tokens
        decode.reported_free_kv_tokens -= self._prompt_tokens
        decode.reported_awaiting_tokens = max(0, decode.reported_awaiting_tokens - self._prompt_tokens)

    def credit(self, leg: Leg) -> None:
        """The instance did its part."""
        worker = self.worker(leg)
        registry = self._services.registry
        if registry.suspects and worker.id in registry.suspects:
            worker.breaker.on_success(self._services.loop.time(), self._started_s)
            if worker.breaker.is_quiet:
                registry.suspects.discard(worker.id)
        self._release(leg, worker)

    def absolve(self, leg: Leg) -> None:
        """The leg has ended and says nothing about the instance."""
        worker = self.worker(leg)
        if worker.id in self._services.registry.suspects:
            worker.breaker.on_abandoned()
        self._release(leg, worker)
        self._not_prefilled(leg, worker)

    def blame(self, leg: Leg) -> None:
        """The instance failed."""
        worker = self.worker(leg)
        registry = self._services.registry
        worker.breaker.on_failure(self._started_s, self._services.loop.time())
        if registry.contains(worker):
            registry.suspects.add(worker.id)
        self._services.metrics.count(self._services.metrics.worker_failures, worker.url)
        self._release(leg, worker)
        self._not_prefilled(leg, worker)

    def _release(self, leg: Leg, worker: Worker) -> None:
        worker.in_flight -= 1
        if leg is _PREFILL:
            worker.pending_tokens -= self._new_tokens
        elif not self._has_first_byte:
            worker.reserved_tokens -= self._prompt_tokens

    def _not_prefilled(self, leg: Leg, worker: Worker) -> None:
        if leg is _PREFILL:
            held_tokens = self.route.decision.cached_tokens
            self._services.planner.learn_not_prefilled(self._prompt, worker, held_tokens, self._prompt_tokens)
