"""All instances that the router knows, and the ready ones of each model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from sglang_ext.laps.decide.boundary import DEFAULT_BOUNDARY_TOKENS
from sglang_ext.long_pool.decide.pool_load import ROUTED_WINDOW_S, PoolLoad
from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import PromptKind
from sglang_ext_router.decide.length_classes import ClassSpec, upper_bounds
from sglang_ext_router.decide.pool_choice import FixedBoundary, FixedBounds, ServedClasses
from sglang_ext_router.decide.served_models import ADAPTER_SEPARATOR, find_model
from sglang_ext_router.decide.token_estimate import TokenEstimator
from sglang_ext_router.decide.way_choice import WayCost
from sglang_ext_router.instances.workers import (
    PRIOR_TOKENS_PER_S,
    UNKNOWN_CAPACITY_TOKENS,
    Worker,
    blended_rate,
)
from sglang_ext_router.length_classes_file import read_length_classes
from sglang_ext_router.request.tokenising import PromptTokeniser

PLAIN_KIND = "plain"
SHOWN_FOR_S = 1.0  # how long the sums over a pool are used


class ModelPools:
    """One served model: its ready instances by kind, and what is learned of its prompts.

    Requests hold on to it from the moment their model is known, while instances come and go. The attributes are plain
    because the data path reads them for every request.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # empty: its instances report no name
        self.ready_prefill: tuple[Worker, ...] = ()
        self.ready_decode: tuple[Worker, ...] = ()
        self.ready_plain: tuple[Worker, ...] = ()  # undivided ones
        self.plain_cost, self.divided_cost = WayCost(), WayCost()
        self.prefill_classes: tuple[ServedClasses, ...] = ()  # of each of ready_prefill
        self.caches_at_decode = False  # some ready decode instance does
        self.has_revisions = False  # ready instances are of several
        self.silent_kinds: frozenset[str] = frozenset()  # of which an instance is silent and keeps its place
        self.generates = True  # by its instances; those of a model that embeds end when they are asked to
        self.is_undivided = False  # all its instances, ready or not, are undivided ones
        # Prompts up to the first fit every ready instance of the kind, beyond the second none.
        self.shortest_decode_tokens = 0
        self.longest_decode_tokens: int | None = None
        self.shortest_prefill_tokens = 0
        self.longest_prefill_tokens: int | None = None
        # The shortest context where ready instances have different ones: what exceeds it is not for all of them.
        self.shortest_context_tokens = UNKNOWN_CAPACITY_TOKENS
        self.boundary = FixedBoundary(DEFAULT_BOUNDARY_TOKENS)  # where short ends, as its prefill instances say
        # What this process has sent to the prefill instances that serve the same classes.
        self.prefill_loads: defaultdict[ServedClasses, PoolLoad] = defaultdict(lambda: PoolLoad(ROUTED_WINDOW_S))
        self.estimator = TokenEstimator()
        self.tokeniser: PromptTokeniser | None = None  # comes once a tokenizer is known
        self.alike: frozenset[PromptKind] = frozenset()  # of which any of its instances makes the same tokens as that

    def set_ready(self, ready: Sequence[Worker], silent: Sequence[Worker] = ()) -> None:
        """Take over the model's ready instances, except those whose revision lacks the other kind.

        Where there is no pair at all, none is left out: requests without a decode leg can be served.
        """
        self.ready_plain = tuple(worker for worker in ready if worker.role is Role.PLAIN)
        if ready:
            self.generates = all(worker.generates for worker in ready)
        ready = [worker for worker in ready if worker.role is not Role.PLAIN]
        decode_revisions = {worker.revision for worker in ready if not worker.role.is_prefill}
        pairs = {worker.revision for worker in ready if worker.role.is_prefill and worker.revision in decode_revisions}
        self.silent_kinds = frozenset(kind_of(worker.role) for worker in silent)
        if pairs:
            ready = [worker for worker in ready if worker.revision in pairs]
        self.ready_prefill = tuple(worker for worker in ready if worker.role.is_prefill)
        self.ready_decode = tuple(worker for worker in ready if not worker.role.is_prefill)
        self.prefill_classes = tuple(worker.served_classes for worker in self.ready_prefill)
        self.caches_at_decode = any(worker.caches_at_decode for worker in self.ready_decode)
        self.has_revisions = len({worker.revision for worker in ready}) > 1
        limits = [worker.max_prompt_tokens for worker in self.ready_prefill]
        self.longest_prefill_tokens, self.shortest_prefill_tokens = max(limits, default=None), min(limits, default=0)
        limits = [worker.max_prompt_tokens for worker in self.ready_decode]
        self.longest_decode_tokens, self.shortest_decode_tokens = max(limits, default=None), min(limits, default=0)
        contexts = {worker.context_tokens for worker in ready}
        self.shortest_context_tokens = min(contexts) if len(contexts) > 1 else UNKNOWN_CAPACITY_TOKENS

    def missing_roles(self) -> list[str]:
        """Return what the model lacks to be served: `prefill`, `decode`, both, a pair of one revision, or nothing.

        An instance that is silent and keeps its place is not lacking: requests wait until it is heard.
        """
        if self.ready_plain or PLAIN_KIND in self.silent_kinds:
            return []
        if self.is_undivided:
            return [PLAIN_KIND]
        missing = [] if self.ready_prefill or "prefill" in self.silent_kinds else ["prefill"]
        if not self.ready_decode:
            return missing if "decode" in self.silent_kinds else [*missing, "decode"]
        decode_revisions = {worker.revision for worker in self.ready_decode}
        if not self.ready_prefill or any(worker.revision in decode_revisions for worker in self.ready_prefill):
            return missing
        return ["prefill and decode of one revision"]

    def lacks_pair(self) -> str:
        """Return the message that no revision has both kinds."""
        return f"no prefill and decode instance{f' of {self.name}' if self.name else ''} of one revision are ready"

    def lacks(self, kind: str) -> str:
        """Return the message that there is no instance of this kind."""
        kind = PLAIN_KIND if self.is_undivided else kind
        return f"no {kind} instance{f' of {self.name}' if self.name else ''} is ready"


class WorkerRegistry:
    """All known instances, and the ready ones by model and kind; rebuilt only when something changes."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.classes = read_length_classes(config.length_classes)
        self._by_id: dict[int, Worker] = {}
        self._by_url: dict[str, Worker] = {}
        self._next_id = 0
        self.ready_prefill: tuple[Worker, ...] = ()  # of all models
        self.ready_decode: tuple[Worker, ...] = ()
        self.ready_plain: tuple[Worker, ...] = ()
        self.models: dict[str, ModelPools] = {}  # by the names under which instances serve them
        self._by_name: dict[str, ModelPools] = {}  # these, and their aliases
        self._for_any_name: ModelPools | None = None  # where there is no choice
        self._for_no_name: ModelPools | None = None
        # Recent tokens and busy seconds of each pool of each model, and when they were added up
        self._shown: dict[tuple[str, Role], tuple[float, float]] = {}
        self._shown_s = float("-inf")
        self.on_refreshed: Callable[[], None] | None = None  # called when the ready instances may be others
        self.suspects: set[int] = set()  # ids of instances whose circuit breaker may not be closed
        for address in config.workers:
            self.add(address)

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, url: str) -> Worker | None:
        return self._by_url.get(url)

    def contains(self, worker: Worker) -> bool:
        return self._by_id.get(worker.id) is worker

    def add(self, address: WorkerAddress) -> Worker:
        """Add an instance; it takes requests once a health check has passed."""
        worker = Worker(self._next_id, address, self._config)
        worker.assign_classes(*(_served(specs, worker.url, address.token_range) for specs in self.classes))
        self._next_id += 1
        self._by_id[worker.id] = worker
        self._by_url[worker.url] = worker
        return worker

    def remove(self, worker: Worker) -> None:
        self._by_id.pop(worker.id, None)
        if self._by_url.get(worker.url) is worker:
            del self._by_url[worker.url]
        self.suspects.discard(worker.id)
        self.refresh()

    def relabel(self, worker: Worker, role: Role) -> None:
        """Count an instance to another pool."""
        assert Role.PLAIN not in (worker.role, role)
        worker.take_role(role)
        self.refresh()

    def refresh(self) -> None:
        """Recompute the ready lists; call after any change of health, draining, moving, role or membership."""
        ready = [worker for worker in self._by_id.values() if worker.is_ready]
        self.ready_prefill = tuple(worker for worker in ready if worker.role.is_prefill)
        self.ready_decode = tuple(worker for worker in ready if worker.role is Role.DECODE)
        self.ready_plain = tuple(worker for worker in ready if worker.role is Role.PLAIN)
        silent = [worker for worker in self._by_id.values() if worker.is_healthy and worker.is_silent]
        by_model: dict[str, list[Worker]] = {worker.model: [] for worker in self._by_id.values() if worker.model}
        for worker in ready:
            by_model.setdefault(worker.model, []).append(worker)
        for name, pools in self.models.items():
            if name not in by_model:
                pools.set_ready(())  # requests may still hold it
        self.models = {name: self.models.get(name) or ModelPools(name) for name in sorted(by_model)}
        for name, pools in self.models.items():
            pools.set_ready(by_model[name], [worker for worker in silent if worker.model == name])
            roles = {worker.role for worker in self._by_id.values() if worker.model in ("", name)}
            pools.is_undivided = roles == {Role.PLAIN}
        aliases = {alias: self.models[model] for alias, model in self._config.aliases if model in self.models}
        self._by_name = {**aliases, **self.models}
        sole = next(iter(self.models.values())) if len(self.models) == 1 else None
        self._for_no_name = sole
        # Any name may mean an instance that reports none.
        takes_any = self._config.accept_any_model or (sole is not None and not sole.name)
        self._for_any_name = sole if takes_any else None
        if self.on_refreshed is not None:
            self.on_refreshed()

    def refresh_readings(self, name: str) -> None:
        """Some instance of a model reads other prompts as the router does."""
        model = self.models.get(name)
        if model is not None:
            readings = [worker.alike for worker in self if worker.model == name]
            model.alike = frozenset[PromptKind]().union(*readings)

    def find_model(self, name: str | None) -> ModelPools | None:
        """Return the model that a request names: a name, an alias, or `NAME:ADAPTER`; without a name the only model."""
        if not name:
            return self._for_no_name
        found = self._by_name.get(name)
        if found is None:
            return find_model(name, self._by_name) or self._for_any_name
        return found

    def names_adapter(self, name: str) -> bool:
        """Return whether this is `NAME:ADAPTER` and not the name of a model."""
        return ADAPTER_SEPARATOR in name and name not in self._by_name

    def served_names(self) -> list[str]:
        """Return the models and aliases that a client may name."""
        return [name for name in self._by_name if name]

    @property
    def aliases(self) -> dict[str, ModelPools]:
        """Return the aliases of models that are served."""
        return {name: pools for name, pools in self._by_name.items() if name not in self.models}

    @property
    def is_complete(self) -> bool:
        """Return whether every instance has been asked once: until then any model may turn out to be served."""
        return all(worker.is_checked for worker in self._by_id.values())

    def peers(self, worker: Worker) -> list[Worker]:
        """Return the ready instances that could serve what this one serves.

        Undivided instances serve everything; a prefill and a decode instance together serve what one of these serves.
        """
        role, spills = worker.role, self._config.pool_spill
        ready = [
            other
            for other in self._by_id.values()
            if other is not worker and other.is_ready and other.model == worker.model
        ]
        peers = [other for other in ready if other.role is Role.PLAIN]
        if role is Role.PLAIN:
            decodes = [other for other in ready if other.role is Role.DECODE]
            return peers + ([other for other in ready if other.role.is_prefill] if decodes else [])
        return peers + [
            other
            for other in ready
            if other.role.is_prefill is role.is_prefill
            and other.role is not Role.PLAIN
            and other.revision == worker.revision
            and (spills or other.role in (role, Role.BOTH))
        ]

    def may_return(self, model: ModelPools, kind: str) -> bool:
        """Return whether an instance of this kind (of any, where it is empty) is away now and may serve later."""
        return any(
            not worker.is_ready
            and not worker.is_draining
            and not worker.is_refused
            and worker.model in ("", model.name)
            and (kind in ("", kind_of(worker.role)) or worker.role is Role.PLAIN)
            for worker in self._by_id.values()
        )

    def may_be_undivided(self, model: ModelPools) -> bool:
        """Return whether the model has an undivided instance, ready or not, or one may turn out to serve it."""
        return any(
            worker.role is Role.PLAIN and not worker.is_refused and worker.model in ("", model.name)
            for worker in self._by_id.values()
        )

    def expected_tokens_per_s(self, worker: Worker, now_s: float) -> float:
        """Return the prefill rate of the other instances of its pool together; the prior where nothing was measured."""
        if now_s - self._shown_s >= SHOWN_FOR_S:  # not for every report: a pool has hundreds of instances
            self._shown_s = now_s
            self._shown = {}
            for other in self._by_id.values():
                key = (other.model, other.role)
                tokens, busy_s = self._shown.get(key, (0.0, 0.0))
                self._shown[key] = (tokens + other.rate.tokens, busy_s + other.rate.busy_s)
        tokens, busy_s = self._shown.get((worker.model, worker.role), (0.0, 0.0))
        return blended_rate(
            max(0.0, tokens - worker.rate.tokens), max(0.0, busy_s - worker.rate.busy_s), PRIOR_TOKENS_PER_S
        )

    def missing_roles(self) -> str | None:
        """Return what keeps the router from serving any model; None while it can serve one."""
        missing = {name: pools.missing_roles() for name, pools in self.models.items()}
        if not all(missing.values()):
            return None
        if len(missing) == 1:
            return ", ".join(*missing.values())
        if missing:
            return "; ".join(f"{', '.join(roles)} of {name}" for name, roles in missing.items())
        has_only_plain = {worker.role for worker in self._by_id.values()} == {Role.PLAIN}
        return PLAIN_KIND if has_only_plain else "prefill, decode"


def kind_of(role: Role) -> str:
    """Return the kind of an instance of this role: others of the kind serve the same."""
    if role is Role.PLAIN:
        return PLAIN_KIND
    return "prefill" if role.is_prefill else "decode"


def used_share(worker: Worker) -> float:
    """Return how much of its capacity an instance uses, from 0 to 1: time, or KV cache and places in a batch."""
    if worker.role.is_prefill:
        return worker.rate.busy_share
    kv_share = 1.0 - worker.reported_free_kv_tokens / worker.kv_capacity_tokens
    return max(0.0, kv_share, worker.reported_running / worker.max_running if worker.max_running else 0.0)


def describe_roles(workers: Iterable[Worker]) -> dict[str, int]:
    """Count the ready instances by role."""
    counts = {role.value: 0 for role in Role}
    for worker in workers:
        if worker.is_ready:
            counts[worker.role.value] += 1
    return counts


def _served(specs: Sequence[ClassSpec], url: str, token_range: tuple[int, int] | None) -> ServedClasses | None:
    """Return the classes of one stage that an instance serves, by the file or by its own range; None: by its role."""
    for number, spec in enumerate(specs):
        if url in spec.instances:
            return ServedClasses(number, number)
    if not specs or token_range is None:
        return None
    bounds = FixedBounds(upper_bounds(specs))
    return ServedClasses(bounds.class_of(token_range[0], 0), bounds.class_of(token_range[1], 0))
