"""The choice of the two instances that serve a measured prompt for one model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence, Set
from math import inf
from typing import NamedTuple

from sglang_ext.types import DecodeLoad, LengthClass, PrefillLoad, Role, RouteDecision
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.decide.block_index import PromptKind
from sglang_ext_router.decide.decode_choice import Freeness, decode_policy
from sglang_ext_router.decide.length_classes import upper_bounds
from sglang_ext_router.decide.pairing import choose_revision, nearest
from sglang_ext_router.decide.pool_choice import (
    Boundary,
    FixedBoundary,
    FixedBounds,
    PoolChoice,
    ServedClasses,
    choose_decode_pool,
    choose_pool,
    classify,
    is_in_doubt,
)
from sglang_ext_router.decide.prefill_choice import (
    PredictedWait,
    choose_helper,
    predicted_end_s,
    predicted_wait_s,
    prefill_policy,
)
from sglang_ext_router.decide.session_hints import NO_SESSION
from sglang_ext_router.decide.way_choice import PlainLoad, choose_plain, common_rate, way_costs_s
from sglang_ext_router.instances.registry import PLAIN_KIND, ModelPools, WorkerRegistry
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.request.known_prefixes import KnownPrefixes
from sglang_ext_router.request.prompt import Prompt

logger = logging.getLogger(__name__)

# Choose among the data-parallel ranks of an instance, also where another policy chooses among instances.
_RANK_POLICY, _DECODE_RANK_POLICY = PredictedWait(), Freeness()


class Route(NamedTuple):
    """A decision and the instances that it names."""

    decision: RouteDecision
    prefill: Worker
    decode: Worker | None  # None: no decode leg
    is_spilled: bool
    # Tokens/s at which the divided way and the undivided one were compared; 0: there was no choice.
    compared_rate: float = 0.0
    prefill_rank: int | None = None  # of an instance with several data-parallel ranks
    decode_rank: int | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether an undivided instance serves the request."""
        return self.prefill.role is Role.PLAIN


class PoolPlace(NamedTuple):
    """The instance that a long pool's coordinator has named for a prompt, and the room under which it was asked."""

    prefill: Worker
    room: int
    members: tuple[Worker, ...]  # that are to compute the prompt together; the instance itself, where it is alone
    chunk_s: float = 0.0  # how long its first chunk keeps the members from batches; 0: batches compute it


class CapacityRefusal(NamedTuple):
    """Holds what an instance says of a prompt that it cannot hold; 0 where it does not name a number."""

    prompt_tokens: int
    needed_tokens: int  # the prompt, and the reply where that counts


# SGLang's sentences where a prompt exceeds the context or the KV cache of an instance, with the prompt's tokens.
_CAPACITY = re.compile(
    rb"The input \((\d+) tokens\) is longer than the model's context length"
    rb"|Input length \((\d+) tokens\) exceeds the maximum allowed length"
    rb"|exceeds the maximum number of tokens: (\d+) >"
    rb"|exceeds the KV memory budget: input_len=(\d+)"
    rb"|exceeds the unified FULL/SWA KV byte budget: full=(\d+)"
    rb"|requires too many SWA KV tokens for decode preallocation: (\d+) >"
    rb"|Multimodal prompt is too long after expanding[^\"]*=> (\d+) >="
)
# The same where it fits and its reply does not: with the tokens of both, and of the prompt.
_CAPACITY_WITH_REPLY = re.compile(
    rb"maximum context length of \d+ tokens\. You requested a total of (\d+) tokens: (\d+) tokens from the input"
)


def capacity_refusal(reply: bytes) -> CapacityRefusal | None:
    """Return what a refused request would need, where the instance refuses it for lack of capacity; else None."""
    found = _CAPACITY.search(reply)
    if found is not None:
        tokens = int(found[found.lastindex or 0])
        return CapacityRefusal(tokens, tokens)
    found = _CAPACITY_WITH_REPLY.search(reply)
    return None if found is None else CapacityRefusal(int(found[2]), int(found[1]))


class NoInstanceError(Exception):
    """No instance can take the request now; the message says of which kind.

    `kind` is the one that is missing: `prefill`, `decode`, or, where a pair is missing, empty.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class RoutePlanner:
    """Chooses instances by the policies, and learns from their answers."""

    def __init__(self, config: RouterConfig, registry: WorkerRegistry, draw: Callable[[], float]) -> None:
        self._registry = registry
        self._draw = draw
        given = config.length_boundary_tokens
        self._given_boundary = FixedBoundary(given) if given else None
        self._prefill_policy = prefill_policy(config.prefill_policy)
        self._decode_policy = decode_policy(config.decode_policy)
        self._allow_spill = config.pool_spill
        # A long pool that computes one prompt on several instances is planned only by its coordinator.
        may_overflow = config.pool_spill and not config.coordinator_url and config.pool_overflow_share > 0
        self._prefill_classes, decode_classes = registry.classes
        self._prefill_bounds = FixedBounds(upper_bounds(self._prefill_classes)) if self._prefill_classes else None
        self._decode_bounds = FixedBounds(upper_bounds(decode_classes)) if decode_classes else None
        objectives_s = [spec.ttft_s for spec in self._prefill_classes]
        objectives_s = objectives_s or [config.controller_short_slo_secs, config.controller_long_slo_secs]
        share = config.pool_overflow_share if may_overflow else 0.0
        self._longest_wait_s = [share * objective_s or inf for objective_s in objectives_s]  # by class
        self._shares_long = bool(config.coordinator_url)
        self._max_local_tokens = config.max_local_prefill_length
        self.router_count = config.processes  # processes, or routers of a group, that send to the same instances
        self._prefers_near = config.prefer_same_topology
        self._use_breakers = not config.disable_circuit_breaker
        self._replies_seen = 0
        self.prefixes = KnownPrefixes(registry, config.prefix_index_blocks, config.event_blocks)

    # -- size of the prompt -----------------------------------------------------------------------------

    def estimate_tokens(self, model: ModelPools, prompt: Prompt) -> int:
        """Estimate the tokens of the longest single prompt, which decide class and fit."""
        known = prompt.longest_known_tokens or 0
        return max(known, model.estimator.estimate(prompt.longest_bytes)) if prompt.longest_bytes else max(1, known)

    def needs_exact_count(self, model: ModelPools, prompt: Prompt) -> bool:
        """Return whether the estimate's error could change the class, or which instances hold the prompt."""
        size_bytes = prompt.longest_bytes
        if not size_bytes:
            return False
        low, high = model.estimator.interval(size_bytes)
        for shortest, longest in (
            (model.shortest_prefill_tokens, model.longest_prefill_tokens),
            (model.shortest_decode_tokens, model.longest_decode_tokens),
        ):
            if shortest != longest and low <= shortest < high:
                return True
        if low <= model.shortest_context_tokens - prompt.max_new_tokens < high:
            return True
        cached = self.prefixes.most_sent_tokens(prompt, (low + high) // 2, model.ready_prefill)
        if self._decode_bounds is not None:
            low_peak, high_peak = low + prompt.max_new_tokens, high + prompt.max_new_tokens
            if is_in_doubt(low_peak, high_peak, 0, self._decode_bounds):
                return True
        return is_in_doubt(low, high, cached, self._bounds(model))

    def max_cached_tokens(self, model: ModelPools, prompt: Prompt, prompt_tokens: int) -> int:
        """Return how many of the prompt's tokens the instance with the longest cached prefix is believed to hold."""
        return max(self.prefixes.cached_tokens(prompt, prompt_tokens, model.ready_prefill), default=0)

    def boundary(self, model: ModelPools) -> FixedBoundary:
        """Return where short ends for a model: by the option, otherwise by its prefill instances."""
        return self._given_boundary or model.boundary

    def _bounds(self, model: ModelPools) -> Boundary:
        """Return where the classes of prefill end: the file's, otherwise short and long."""
        return self._prefill_bounds or self.boundary(model)

    def _named_class(self, number: int) -> tuple[str, float]:
        """Return name and objective of a class of the file; of short and long neither."""
        if not self._prefill_classes:
            return "", 0.0
        spec = self._prefill_classes[number]
        return spec.name, spec.ttft_s

    # -- choice -----------------------------------------------------------------------------------------

    def route(
        self,
        model: ModelPools,
        prompt: Prompt,
        prompt_tokens: int,
        prefill_excluded: Set[int],
        decode_excluded: Set[int],
        now_s: float,
        needs_decode: bool = True,
        place: PoolPlace | None = None,
        may_be_plain: bool = True,
        session: int = NO_SESSION,
    ) -> Route:
        """Choose pool, prefill instance and, if it is needed, decode instance; NoInstanceError if there is none.

        Excluded instances (by id) have failed this request before: they are used only if nothing else is left.
        The prefill instance of a `place` in the long pool is taken if it is a candidate. An undivided instance is the
        `prefill` of the route: it is taken where the request cannot be divided, and with `may_be_plain` also where it
        is the better way. A `session` is a hint: of the instances that may get the request, that of the turn before is
        taken to hold it.
        """
        try:
            divided = self._divided(
                model, prompt, prompt_tokens, prefill_excluded, decode_excluded, now_s, needs_decode, place, session
            )
        except NoInstanceError:
            plain = None
            if model.ready_plain:
                plain = self._sooner_way(model, prompt, prompt_tokens, prefill_excluded, now_s, None, session)
            if plain is None:
                raise
            return plain
        if place is not None or not may_be_plain or not model.ready_plain:
            return divided
        largest = max([worker.max_prompt_tokens for worker in model.ready_plain])
        is_held = self._holds(divided, prompt_tokens) or prompt_tokens > largest
        alternative = divided if is_held else None
        return self._sooner_way(model, prompt, prompt_tokens, prefill_excluded, now_s, alternative) or divided

    def route_undivided(
        self, model: ModelPools, prompt: Prompt, prompt_tokens: int, excluded: Set[int], now_s: float
    ) -> Route:
        """Choose an undivided instance for what no pair can serve; NoInstanceError if there is none."""
        route = None
        if model.ready_plain:
            route = self._sooner_way(model, prompt, prompt_tokens, excluded, now_s, None)
        if route is None:
            raise NoInstanceError(model.lacks(PLAIN_KIND), PLAIN_KIND)
        return route

    def soonest_end_s(
        self, model: ModelPools, prompt: Prompt, prompt_tokens: int, avoided: Collection[Worker], now_s: float
    ) -> float:
        """Return how soon another prefill instance for short prompts would end this one; infinity without one."""
        others = [
            worker
            for worker in self._usable(model.ready_prefill, set(), now_s)
            if worker not in avoided
            and worker.role.serves(LengthClass.SHORT)
            and prompt_tokens <= worker.max_prompt_tokens
        ]
        cached = self.prefixes.cached_tokens(prompt, prompt_tokens, others)
        loads = [worker.prefill_load(tokens, now_s) for worker, tokens in zip(others, cached, strict=True)]
        return min([predicted_end_s(load, prompt_tokens) for load in loads], default=inf)

    def _sooner_way(
        self,
        model: ModelPools,
        prompt: Prompt,
        prompt_tokens: int,
        excluded: Set[int],
        now_s: float,
        divided: Route | None,
        session: int = NO_SESSION,
    ) -> Route | None:
        """Return the route to an undivided instance, or `divided` where that is sooner; None where there is neither.

        An instance that has failed the request, or cannot hold it, is taken only where the request cannot be divided.
        """
        total_tokens = prompt_tokens + prompt.max_new_tokens
        plains: Sequence[Worker] = [
            worker
            for worker in model.ready_plain
            if prompt_tokens <= worker.max_prompt_tokens and total_tokens <= worker.context_tokens
        ]
        if self._use_breakers:
            plains = [worker for worker in plains if worker.breaker.can_try(now_s)]
        plains = [worker for worker in plains if worker.id not in excluded]
        if not plains and divided is None:
            plains = self._usable(_with_context(model.ready_plain, total_tokens), excluded, now_s)
        if not plains:
            return divided
        cached = self.prefixes.cached_tokens(prompt, prompt_tokens, plains)
        loads = [worker.prefill_load(tokens, now_s) for worker, tokens in zip(plains, cached, strict=True)]
        shown_loads: Sequence[PrefillLoad] = loads
        if session and divided is None:
            shown_loads = self.prefixes.sessions.hinted(session, loads, prompt.hashes, prompt_tokens)
        boundary = self.boundary(model)
        max_local_tokens = self._max_local_tokens or boundary.limit_tokens
        divided_load: PrefillLoad | None = None
        rate = 0.0
        if divided is not None:
            divided_load = divided.prefill.prefill_load(divided.decision.cached_tokens, now_s)
            if (prompt_tokens - max(cached)) * prompt.sequence_count <= max_local_tokens:
                rate = common_rate([*loads, divided_load])
                divided = divided._replace(compared_rate=rate)
        plain_cost_s, divided_cost_s = way_costs_s(model.plain_cost, model.divided_cost, now_s)
        chosen = choose_plain(
            [PlainLoad(load, worker.reported_free_kv_tokens) for worker, load in zip(plains, shown_loads, strict=True)],
            divided_load,
            prompt_tokens,
            prompt.max_new_tokens,
            prompt.sequence_count,
            max_local_tokens,
            rate,
            plain_cost_s,
            divided_cost_s,
        )
        if chosen is None:
            return divided
        load, rank = self._of_rank(plains[chosen], loads[chosen], prompt, prompt_tokens)
        new_tokens = prompt_tokens - load.cached_tokens
        decision = RouteDecision(
            classify(new_tokens, load.cached_tokens, boundary),
            load.worker_id,
            None,
            predicted_wait_s(load),
            new_tokens,
            load.cached_tokens,
            0,
            *self._named_class(self._bounds(model).class_of(new_tokens, load.cached_tokens)),
        )
        return Route(decision, plains[chosen], None, False, rate, rank)

    def _divided(
        self,
        model: ModelPools,
        prompt: Prompt,
        prompt_tokens: int,
        prefill_excluded: Set[int],
        decode_excluded: Set[int],
        now_s: float,
        needs_decode: bool,
        place: PoolPlace | None,
        session: int,
    ) -> Route:
        """Choose a prefill and, if it is needed, a decode instance; NoInstanceError if there is none."""
        ready_prefill: Sequence[Worker] = model.ready_prefill
        ready_decode: Sequence[Worker] = model.ready_decode
        served: Sequence[ServedClasses] = model.prefill_classes
        if prompt_tokens > model.shortest_prefill_tokens:
            ready_prefill = self._that_hold(ready_prefill, prompt_tokens)
            served = [worker.served_classes for worker in ready_prefill]
        if prompt_tokens > model.shortest_decode_tokens:
            ready_decode = self._that_hold(ready_decode, prompt_tokens)
        if prompt_tokens + prompt.max_new_tokens > model.shortest_context_tokens:
            ready_prefill = _with_context(ready_prefill, prompt_tokens + prompt.max_new_tokens)
            ready_decode = _with_context(ready_decode, prompt_tokens + prompt.max_new_tokens)
            served = [worker.served_classes for worker in ready_prefill]
        prefills, decodes = ready_prefill, ready_decode
        if self._registry.suspects or prefill_excluded or decode_excluded:
            prefills = self._usable(prefills, prefill_excluded, now_s)
            decodes = self._usable(decodes, decode_excluded, now_s)
            served = [worker.served_classes for worker in prefills]
        if not prefills or (needs_decode and not decodes):
            kind = "decode" if prefills else "prefill"
            raise NoInstanceError(model.lacks(kind), kind)

        if needs_decode and model.has_revisions:
            prefills, decodes = (
                _pairs(prefills, decodes)
                or _pairs(ready_prefill, ready_decode)
                or _pairs(model.ready_prefill, model.ready_decode)
                or ((), ())
            )
            if not prefills:
                raise NoInstanceError(model.lacks_pair())
            served = [worker.served_classes for worker in prefills]
        cached = self.prefixes.cached_tokens(prompt, prompt_tokens, prefills)
        # Where only instances of the other pool hold the prompt, it goes there.
        allow_spill = self._allow_spill or len(ready_prefill) < len(model.ready_prefill)
        pool = choose_pool(prompt_tokens, served, cached, self._bounds(model), allow_spill)
        best_cached = max(cached)
        length_class = classify(prompt_tokens - best_cached, best_cached, self.boundary(model))
        class_name, objective_s = self._named_class(pool.class_number)
        if not pool.candidates:
            raise NoInstanceError(f"no prefill instance for {class_name or length_class} prompts is ready", "prefill")
        if place is not None:
            position = next((i for i in pool.candidates if prefills[i] is place.prefill), None)
            if position is not None:
                pool = pool._replace(candidates=(position,))
        if needs_decode and model.has_revisions:
            pool, decodes = self._of_one_revision(pool, prefills, cached, prompt_tokens, decodes)
        prefill_loads = [prefills[i].prefill_load(cached[i], now_s) for i in pool.candidates]
        shown_loads: Sequence[PrefillLoad] = prefill_loads
        if session:
            shown_loads = self.prefixes.sessions.hinted(session, prefill_loads, prompt.hashes, prompt_tokens)
        price = self._price(model, served[pool.candidates[0]], shown_loads, now_s)
        chosen = self._prefill_policy.choose(shown_loads, prompt_tokens, self._draw(), price)
        load = prefill_loads[chosen]
        prefill = prefills[pool.candidates[chosen]]
        is_spilled = pool.is_spilled
        wait_s = predicted_wait_s(load)
        if wait_s > self._longest_wait_s[pool.class_number] and len(pool.candidates) < len(prefills):
            helper = self._helper(pool, prefills, cached, shown_loads[chosen], prefill, prompt_tokens, now_s)
            if helper is not None:
                prefill, load = helper
                is_spilled = True
        load, prefill_rank = self._of_rank(prefill, load, prompt, prompt_tokens)
        wait_s = predicted_wait_s(load)

        decode: Worker | None = None
        decode_rank: int | None = None
        held_share = 0.0
        if needs_decode:
            if self._decode_bounds is not None:
                peak_class = self._decode_bounds.class_of(prompt_tokens + prompt.max_new_tokens, 0)
                may_help = self._allow_spill or len(ready_decode) < len(model.ready_decode)
                suited = choose_decode_pool(peak_class, [worker.served_classes for worker in decodes], may_help)
                if not suited:
                    raise NoInstanceError("no decode instance for a request of this length is ready", "decode")
                decodes = [decodes[i] for i in suited]
            decode_loads = self._decode_loads(model, prompt, prompt_tokens, decodes)
            if self._prefers_near and prefill.topology:
                near = nearest(prefill.topology, [one.topology for one in decodes], decode_loads, prompt_tokens)
                decodes = [decodes[i] for i in near]
                decode_loads = [decode_loads[i] for i in near]
            position = self._decode_policy.choose(decode_loads, self._draw())
            decode, held_share = decodes[position], decode_loads[position].held_share
            if decode.ranks:
                decode_rank, held_share = self._decode_rank(decode, prompt, prompt_tokens)
        decision = RouteDecision(
            length_class,
            prefill.id,
            None if decode is None else decode.id,
            wait_s,
            prompt_tokens - load.cached_tokens,
            load.cached_tokens,
            round(held_share * prompt_tokens),
            class_name,
            objective_s,
        )
        return Route(decision, prefill, decode, is_spilled, 0.0, prefill_rank, decode_rank)

    def _price(self, model: ModelPools, classes: ServedClasses, loads: Sequence[PrefillLoad], now_s: float) -> float:
        """Return the seconds by which a second of an instance's time delays others; 0 where the choice does not ask.

        A prompt takes as much of the time of each instance unless some of it is cached. Each process or router of a
        group has its share of the prompts, and so of the instances.
        """
        if len(loads) == 1 or not any(load.cached_tokens for load in loads):
            return 0.0
        left_s = sum([predicted_wait_s(load) for load in loads])
        if left_s == inf:
            return 0.0
        share = 1.0 / self.router_count
        return model.prefill_loads[classes].price(now_s, share * left_s, share * len(loads))

    def _of_rank(
        self, worker: Worker, load: PrefillLoad, prompt: Prompt, prompt_tokens: int
    ) -> tuple[PrefillLoad, int | None]:
        """Return the load of the rank that begins to decode the prompt first, and its number.

        An instance with one scheduler keeps its load.
        """
        if not worker.ranks:
            return load, None
        cached = self.prefixes.cached_tokens_by_rank(prompt, prompt_tokens, worker)
        loads = worker.rank_prefill_loads(cached)
        rank = _RANK_POLICY.choose(loads, prompt_tokens, self._draw())
        return loads[rank], rank

    def _decode_rank(self, worker: Worker, prompt: Prompt, prompt_tokens: int) -> tuple[int, float]:
        """Return the freest rank, and the share of the prompt that it holds."""
        shares = [0.0] * len(worker.ranks)
        if worker.caches_at_decode:
            cached = self.prefixes.cached_tokens_by_rank(prompt, prompt_tokens, worker)
            shares = [tokens / prompt_tokens for tokens in cached]
        rank = _DECODE_RANK_POLICY.choose(worker.rank_decode_loads(shares), self._draw())
        return rank, shares[rank]

    def _decode_loads(
        self, model: ModelPools, prompt: Prompt, prompt_tokens: int, decodes: Sequence[Worker]
    ) -> list[DecodeLoad]:
        """Return the loads of decode instances, with the share of the prompt that each of them holds."""
        if not model.caches_at_decode:
            return [worker.decode_load() for worker in decodes]
        cached = self.prefixes.cached_tokens(prompt, prompt_tokens, decodes)
        return [worker.decode_load(tokens / prompt_tokens) for worker, tokens in zip(decodes, cached, strict=True)]

    def _helper(
        self,
        pool: PoolChoice,
        prefills: Sequence[Worker],
        cached_tokens: Sequence[int],
        load: PrefillLoad,
        prefill: Worker,
        prompt_tokens: int,
        now_s: float,
    ) -> tuple[Worker, PrefillLoad] | None:
        """Return an instance of the other pool that would begin the request sooner than its own pool."""
        own = set(pool.candidates)
        others = [
            i
            for i, worker in enumerate(prefills)
            if i not in own and worker.revision == prefill.revision and prompt_tokens <= worker.max_prompt_tokens
        ]
        loads = [prefills[i].prefill_load(cached_tokens[i], now_s) for i in others]
        longest_wait_s = self._longest_wait_s[pool.class_number]
        helper = choose_helper(load, loads, prompt_tokens, longest_wait_s, self._draw())
        return None if helper is None else (prefills[others[helper]], loads[helper])

    def _of_one_revision(
        self,
        pool: PoolChoice,
        prefills: Sequence[Worker],
        cached_tokens: Sequence[int],
        prompt_tokens: int,
        decodes: Sequence[Worker],
    ) -> tuple[PoolChoice, Sequence[Worker]]:
        """Choose a revision; return its candidates and its decode instances, of which there is at least one."""
        revision = choose_revision(
            [prefills[i].revision for i in pool.candidates],
            [cached_tokens[i] for i in pool.candidates],
            prompt_tokens,
            [worker.revision for worker in decodes],
            self._draw(),
        )
        candidates = tuple(i for i in pool.candidates if prefills[i].revision == revision)
        return (
            PoolChoice(pool.class_number, candidates, pool.is_spilled),
            [worker for worker in decodes if worker.revision == revision],
        )

    def _that_hold(self, ready: Sequence[Worker], prompt_tokens: int) -> Sequence[Worker]:
        """Return the instances that hold a prompt of this length; the largest ones where none does.

        The instances of a long pool hold it together.
        """
        if not ready:
            return ready
        longest_tokens = min(prompt_tokens, max([worker.max_prompt_tokens for worker in ready]))
        return [worker for worker in ready if worker.max_prompt_tokens >= longest_tokens or self._is_member(worker)]

    def _holds(self, route: Route, prompt_tokens: int) -> bool:
        """Return whether both instances of a route hold a prompt."""
        prefill, decode = route.prefill, route.decode
        if prompt_tokens > prefill.max_prompt_tokens and not self._is_member(prefill):
            return False
        return decode is None or prompt_tokens <= decode.max_prompt_tokens

    def _is_member(self, worker: Worker) -> bool:
        """Return whether it holds long prompts together with others."""
        return self._shares_long and worker.role.serves(LengthClass.LONG)

    def too_small(self, model: ModelPools, refuser: Worker, needed_tokens: int, refused: Set[int]) -> set[int]:
        """Return the ready instances that hold no more than `refuser`; none where all others have refused, too.

        `refused` are the ids of the instances of its kind that have failed the request before.
        """
        ready = (*model.ready_prefill, *model.ready_plain) if refuser.role.computes_prompts else model.ready_decode
        is_member = self._is_member(refuser)
        smaller = {
            worker.id
            for worker in ready
            if worker is refuser
            or (worker.max_prompt_tokens < needed_tokens and (is_member or not self._is_member(worker)))
        }
        is_any_left = any(worker.id not in smaller and worker.id not in refused for worker in ready)
        return smaller if is_any_left and refuser.id not in refused else set()

    def _usable(self, ready: Sequence[Worker], excluded: Set[int], now_s: float) -> Sequence[Worker]:
        """Return the instances without open circuits and without excluded ones, unless that leaves none."""
        if self._use_breakers:
            closed = [worker for worker in ready if worker.breaker.can_try(now_s)]
            ready = closed or ready
        if excluded:
            others = [worker for worker in ready if worker.id not in excluded]
            if others:
                ready = others
        return ready

    # -- learning ---------------------------------------------------------------------------------------

    def wants_token_count(self) -> bool:
        """Return whether to read this reply's token count: that of every reply at first, then of a sample."""
        self._replies_seen += 1
        return self._replies_seen < 256 or self._replies_seen % 8 == 0

    def learn_tokens(self, model: ModelPools, prompt: Prompt, prompt_tokens: int) -> None:
        """Learn from an instance's count of the prompt's tokens."""
        if prompt.sequence_count == 1 and prompt.text_bytes and not (prompt.images or prompt.audios):
            model.estimator.observe(prompt.text_bytes, prompt_tokens)

    def learn_misread(self, worker: Worker, kind: PromptKind) -> None:
        """An instance makes other tokens of this kind of prompts than the router."""
        if kind in worker.alike:
            logger.info("worker %s makes other tokens of %s: estimated for them", worker.url, kind)
            worker.alike -= {kind}
            self._registry.refresh_readings(worker.model)

    def learn_boundary(self, prefill: Worker) -> None:
        """Learn where short ends on a prefill instance; of several that differ the middle boundary counts."""
        model = self._registry.models.get(prefill.model)
        boundaries = sorted(
            worker.length_boundary_tokens
            for worker in self._registry
            if worker.model == prefill.model and worker.role.is_prefill and worker.length_boundary_tokens is not None
        )
        if model is not None and boundaries:
            tokens = boundaries[(len(boundaries) - 1) // 2]
            if tokens != model.boundary.limit_tokens:
                model.boundary = FixedBoundary(tokens)

    def learn_capacity(self, prefill: Worker) -> None:
        """Learn the size of an instance's KV cache: it cannot hold more prefixes than that."""
        model = self._registry.models.get(prefill.model)
        if prefill.keeps_prefixes and model is not None:
            size_bytes = prefill.kv_capacity_tokens * model.estimator.bytes_per_token
            self.prefixes.set_capacity(prefill, int(size_bytes))


def _pairs(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> tuple[Sequence[Worker], Sequence[Worker]] | None:
    """Return the instances whose revision has both kinds; None if there are none."""
    revisions = {worker.revision for worker in prefills}.intersection([worker.revision for worker in decodes])
    if not revisions:
        return None
    return (
        [worker for worker in prefills if worker.revision in revisions],
        [worker for worker in decodes if worker.revision in revisions],
    )


def _with_context(ready: Sequence[Worker], tokens: int) -> Sequence[Worker]:
    """Return the instances whose context holds a prompt and its reply; those with the longest where none does."""
    needed_tokens = min(tokens, max([worker.context_tokens for worker in ready], default=0))
    return [worker for worker in ready if worker.context_tokens >= needed_tokens]
