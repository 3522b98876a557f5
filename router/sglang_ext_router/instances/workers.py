"""One instance as the router knows it: address, health, load, prefill rate, and what the router has sent to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from sglang_ext.types import DecodeLoad, PrefillLoad, Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import PromptKind
from sglang_ext_router.decide.circuit_breaker import CircuitBreaker
from sglang_ext_router.decide.pool_choice import ServedClasses, classes_of_role
from sglang_ext_router.decide.prefill_progress import PrefillProgress
from sglang_ext_router.decide.served_models import PairingFacts
from sglang_ext_router.decide.signs_of_life import ReadingTime

PRIOR_TOKENS_PER_S = 2000.0
PRIOR_BUSY_S = 0.5  # what is expected of an instance weighs as much as this much busy time of its own
MEMORY_S = 30.0  # time after which old observations count half
_new = tuple.__new__  # a named tuple without its slow constructor: several are made for every request
FRESH_LOAD_S = 2.5  # from a published load report, of which one comes every second, until one is asked for again
MAX_RANKS = 4096  # data-parallel ones of an instance
UNKNOWN_CAPACITY_TOKENS = 1 << 40  # until an instance has reported its own


class PrefillRate:
    """Prefill rate of one instance: its recent work, blended with the rate that is expected of its pool.

    It follows the running totals that the instance reports, and stays at the prior for an engine that reports none.
    Old observations decay. An instance that looked slow, after its start for example, gets few requests and cannot show
    that it has become fast: without decay it would never get requests again.
    """

    def __init__(self) -> None:
        self._last_tokens: int | None = None
        self._last_busy_us = 0
        self._last_s = 0.0
        self.tokens = 0.0
        self.busy_s = 0.0
        self._elapsed_s = 0.0
        self.tokens_per_s = PRIOR_TOKENS_PER_S

    def observe(
        self, total_tokens: int, total_busy_us: int, now_s: float, expected_tokens_per_s: float = PRIOR_TOKENS_PER_S
    ) -> None:
        """Take the totals of a report; smaller totals than before mean that the instance was restarted."""
        last, last_us, last_s = self._last_tokens, self._last_busy_us, self._last_s
        self._last_tokens, self._last_busy_us, self._last_s = total_tokens, total_busy_us, now_s
        if last is None:
            return
        if total_tokens < last or total_busy_us < last_us:
            self.tokens = self.busy_s = self._elapsed_s = 0.0
        else:
            elapsed_s = max(0.0, now_s - last_s)
            keep = 0.5 ** (elapsed_s / MEMORY_S)
            self._elapsed_s = self._elapsed_s * keep + elapsed_s
            # An iteration counts when it has ended: tokens without busy time are those of the next report, too.
            self.tokens = self.tokens * keep + (total_tokens - last)
            self.busy_s = self.busy_s * keep + (total_busy_us - last_us) / 1e6
        self.tokens_per_s = blended_rate(self.tokens, self.busy_s, expected_tokens_per_s)

    @property
    def busy_share(self) -> float:
        """Return the share of the last half minute or so in which the instance prefilled."""
        return min(1.0, self.busy_s / self._elapsed_s) if self._elapsed_s else 0.0

    def forget(self) -> None:
        """The instance is gone: what comes back at its address is another one."""
        self.__init__()  # type: ignore[misc]


def blended_rate(tokens: float, busy_s: float, expected_tokens_per_s: float) -> float:
    """Return the tokens/s of `tokens` in `busy_s`, with `PRIOR_BUSY_S` of the expected rate added."""
    return (tokens + PRIOR_BUSY_S * expected_tokens_per_s) / (busy_s + PRIOR_BUSY_S)


class KvEventsAddress(NamedTuple):
    """Address at which an instance publishes its KV events; the ports of rank r are r higher."""

    host: str
    port: int
    replay_port: int | None
    topic: bytes
    block_tokens: int
    ranks: int


class LoadAddress(NamedTuple):
    """Address at which an instance publishes its load; the port of rank r is r higher."""

    host: str
    port: int
    ranks: int


class SchedulerLoad(NamedTuple):
    """The load of an instance as its scheduler reports it, all ranks together."""

    running: int
    waiting_tokens: int  # of prompts whose prefill has not ended, without what is cached
    used_tokens: int  # of the KV cache, and of what waits for room in it
    awaiting_tokens: int  # of these, KV that comes from prefill
    capacity_tokens: int
    prefilled_tokens: int  # all ever
    busy_us: int  # of prefill, all ever
    ranks: tuple[RankReport, ...] = ()  # in their order, of an instance with several


class TokenSource(NamedTuple):
    """Sources of an instance's tokens: its tokenizer's folder, its own chat template, the template's variables."""

    folder: str
    chat_template: str | None = None  # SGLang's --chat-template
    variables: str = ""  # SGLang's --default-chat-template-kwargs, as JSON


class RankReport(NamedTuple):
    """The load of one data-parallel rank as its scheduler reports it."""

    waiting_tokens: int
    free_tokens: int  # of its KV cache; what waits for KV of others counts as free
    awaiting_tokens: int


class RankLoad:
    """The load of one data-parallel rank of an instance: what this router has sent there, and its last report."""

    __slots__ = (
        *("awaiting_tokens", "foreign_tokens", "free_kv_tokens", "in_flight", "pending_tokens"),
        *("prefix_id", "released_tokens", "reserved_tokens"),
    )

    def __init__(self, prefix_id: int) -> None:
        self.prefix_id = prefix_id  # by which the prefix index knows it
        self.in_flight = 0
        self.pending_tokens = 0  # of prompts, whose prefill has not ended
        self.released_tokens = 0  # of prompts whose prefill has ended since the last report
        self.foreign_tokens = 0  # waiting there, sent by another client
        self.reserved_tokens = 0  # decode: KV on its way
        self.awaiting_tokens = 0  # decode: the same by its own report
        self.free_kv_tokens = UNKNOWN_CAPACITY_TOKENS

    def take_report(self, report: RankReport, *, is_published: bool = False) -> None:
        """Take a report over. A published one may be from before prefills that have ended since the last report."""
        own_tokens = self.pending_tokens + (self.released_tokens if is_published else 0)
        self.released_tokens = 0
        self.foreign_tokens = max(0, report.waiting_tokens - own_tokens)
        self.free_kv_tokens = report.free_tokens
        self.awaiting_tokens = report.awaiting_tokens


class HeldBlocks:
    """Names where the index has what an instance with events holds: its sources, and the size of a block."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.sources: tuple[int, ...] = ()  # by rank
        self.is_whole = False  # the index has all that it holds


class Worker:
    """One instance. Plain attributes: the data path reads and adjusts them on every request."""

    def __init__(self, worker_id: int, address: WorkerAddress, config: RouterConfig) -> None:
        parts = urlsplit(address.url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.id = worker_id  # never reused while the router lives
        self.url = address.url
        self.role = self.given_role = address.role
        self.token_range = address.token_range
        self._classes: tuple[ServedClasses | None, ServedClasses | None] = (None, None)
        self.can_switch_roles = False  # between prefill and decode, by its own report
        self.host = parts.hostname
        self.port = parts.port
        self.is_tls = parts.scheme == "https"
        self.breaker = CircuitBreaker(
            failure_threshold=config.cb_failure_threshold,
            success_threshold=config.cb_success_threshold,
            open_s=config.cb_timeout_duration_secs,
            window_s=config.cb_window_duration_secs,
        )
        self.rate = PrefillRate()
        self.progress = PrefillProgress()
        # Reported by the instance
        self.bootstrap_port = address.bootstrap_port
        self.has_given_bootstrap_port = address.bootstrap_port is not None
        self.model = ""  # the name under which it is served
        self.given_revision = address.revision
        self.revision = address.revision or ""
        self.topology = address.topology
        self.facts: PairingFacts | None = None  # in which all instances of one model must agree
        self.serves_facts = False  # it was let in with these
        self.out_since_s = 0.0  # when it was taken out, on the loop's clock
        self.token_source = TokenSource("")
        self.alike: frozenset[PromptKind] = frozenset()  # of which it makes the same tokens as the router
        self.length_boundary_tokens: int | None = None  # of its own scheduler
        self.fits_length_boundary = False  # the scheduler finds it out, and may change it
        self.kv_capacity_tokens = UNKNOWN_CAPACITY_TOKENS
        self.max_prompt_tokens = UNKNOWN_CAPACITY_TOKENS  # by context length and KV capacity
        self.context_tokens = UNKNOWN_CAPACITY_TOKENS  # of prompt and reply together
        self.max_running: int | None = None  # requests that its scheduler runs at once
        self.label_header = b""  # of clients, from which it takes labels of its metrics
        self.serves_parallel_samples = False
        self.generates = True  # text; else it embeds, classifies or ranks
        self.takes_output = False  # a request may bring the output so far, and goes on behind it
        self.aborts_families = False  # the id of a batch aborts all of its sequences
        self.kv_events: KvEventsAddress | None = None
        self.held_blocks: HeldBlocks | None = None  # while its events are followed
        self.load_events: LoadAddress | None = None
        self.published_queues: tuple[float, Mapping[str, object]] | None = None  # when they came; as `GET /laps`
        self.ranks: list[RankLoad] = []  # data-parallel ones, by number; empty for an instance with one scheduler
        self.caches_at_decode = False  # a decode instance with a prefix cache: what it holds is not sent to it
        self.has_info = False
        # Health
        self.is_healthy = False
        self.is_silent = False  # it answers nothing, and no other could serve: keeps what it has, takes nothing new
        self.is_draining = False
        self.is_moving = False  # between two pools: takes nothing new
        self.is_refused = False  # it does not fit the instances that serve its model
        self.failed_checks = 0
        self.last_error = "not checked yet"
        self.heard_s = float("-inf")  # when it last answered a check, on the loop's clock
        self.reading = ReadingTime()
        self.load_stamp: tuple[float, ...] = ()  # of its last load report: other numbers show that its scheduler works
        self.worked_s = float("-inf")  # when a load report last had other numbers than the one before
        self.load_published_s = float("-inf")  # when a load report last came by itself
        self.is_doubted = False  # its last health check was not answered
        # Load: the router's own view, exact for what it sent, and the instance's last report
        self.in_flight = 0
        self.pending_tokens = 0
        self.released_tokens = 0  # of prompts whose prefill has ended since its last report
        self.foreign_tokens = 0  # waiting there, sent by another client of the instance
        self.reported_running = 0
        self.sent_legs = 0  # by this process, all ever
        self.failed_legs = 0
        self.reported_free_kv_tokens = UNKNOWN_CAPACITY_TOKENS
        self.reserved_tokens = 0  # decode: KV of prompts that were sent there and whose first token has not come
        self.reported_awaiting_tokens = 0  # decode: KV that it waits for by its own report, wherever it comes from
        self.sibling_in_flight = 0  # sent by the router's other processes
        self.sibling_tokens = 0
        self._bind()

    def take_role(self, role: Role) -> None:
        """Serve in another role from now on; what is under way and cached stays the instance's own."""
        self.role = role
        self._bind()

    def assign_classes(self, prefill: ServedClasses | None, decode: ServedClasses | None) -> None:
        """Serve these length classes, as prefill and as decode instance; None: those of its role."""
        self._classes = prefill, decode
        self._bind()

    def _bind(self) -> None:
        given = self._classes[self.role is Role.DECODE]
        self.served_classes = given if given is not None else classes_of_role(self.role)
        self.name = self.url.partition("://")[2]  # in paths, and for people: `host:port`
        self.host_header = self.name.encode()
        self.request_heads: dict[bytes, bytes] = {}
        kind = "prefill" if self.role.is_prefill else self.role.value
        self.route_header = f"x-sglang-ext-{kind}: {self.url}\r\n".encode()
        self.set_bootstrap_port(self.bootstrap_port)

    def set_bootstrap_port(self, port: int | None) -> None:
        """Take the port of its bootstrap server into the bytes that go into every body."""
        self.bootstrap_port = port
        self.bootstrap_json = b'"bootstrap_host":"%b","bootstrap_port":%d,"bootstrap_room":' % (
            self.host.encode(),
            port or 0,
        )

    def request_head(self, target: bytes) -> bytes:
        """Return the start of a request to `target`, up to the headers that differ from request to request."""
        head = self.request_heads.get(target)
        if head is None:
            head = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n" % (
                target,
                self.host_header,
            )
            if len(self.request_heads) < 64:  # targets come from clients (query strings): keep it bounded
                self.request_heads[target] = head
        return head

    def publishes_load(self, now_s: float) -> bool:
        """Return whether its load reports come by themselves, and have not stopped."""
        return now_s - self.load_published_s <= FRESH_LOAD_S

    def fresh_queues(self, now_s: float) -> Mapping[str, object] | None:
        """Return what it has published of its queues, unless that is old; as the answer of `GET /laps`."""
        if self.published_queues is None or now_s - self.published_queues[0] > FRESH_LOAD_S:
            return None
        return self.published_queues[1]

    def on_load_unpublished(self) -> None:
        """Forget what it has published of its load: nothing more comes."""
        self.load_published_s, self.published_queues = float("-inf"), None

    @property
    def is_ready(self) -> bool:
        """Return whether the instance takes new requests; its circuit breaker is asked separately."""
        return self.is_healthy and not (self.is_silent or self.is_draining or self.is_moving)

    @property
    def is_checked(self) -> bool:
        """Return whether its first health check has ended, either way."""
        return self.has_info or self.failed_checks > 0

    def prefill_load(self, cached_tokens: int, now_s: float) -> PrefillLoad:
        ranks = len(self.ranks) or 1  # of which each has its share of what waits, and a rate of its own
        return _new(
            PrefillLoad,
            (
                self.id,
                (self.pending_tokens + self.foreign_tokens + self.sibling_tokens) // ranks,
                self.in_flight + self.sibling_in_flight,
                cached_tokens,
                self.rate.tokens_per_s,
                0 if self.ranks else self.progress.computed_tokens(now_s, self.rate.tokens_per_s),
            ),
        )

    def set_ranks(self, count: int) -> None:
        """It has this many schedulers, each with a queue and a prefix cache of its own."""
        if count != max(1, len(self.ranks)):
            self.ranks = [RankLoad(-self.id * MAX_RANKS - rank) for rank in range(count)] if count > 1 else []

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The names of its prefix caches in the prefix index, by rank."""
        return tuple([rank.prefix_id for rank in self.ranks]) or (self.id,)

    def rank_prefill_loads(self, cached_tokens: Sequence[int]) -> list[PrefillLoad]:
        """Return the load of each rank as that of an instance; `cached_tokens` by rank.

        What the router's other processes have sent is known of all ranks together.
        """
        sibling_tokens = self.sibling_tokens // len(self.ranks)
        return [
            PrefillLoad(
                self.id,
                rank.pending_tokens + rank.foreign_tokens + sibling_tokens,
                rank.in_flight,
                cached,
                self.rate.tokens_per_s,
            )
            for rank, cached in zip(self.ranks, cached_tokens, strict=True)
        ]

    def rank_decode_loads(self, held_shares: Sequence[float]) -> list[DecodeLoad]:
        """Do the same for a decode instance."""
        return [
            DecodeLoad(
                self.id,
                rank.free_kv_tokens,
                max(rank.reserved_tokens, rank.awaiting_tokens),
                rank.in_flight,
                self.max_prompt_tokens,
                held,
            )
            for rank, held in zip(self.ranks, held_shares, strict=True)
        ]

    @property
    def keeps_prefixes(self) -> bool:
        """Return whether it has a prefix cache in which the next prompt may be found."""
        return self.role.computes_prompts or self.caches_at_decode

    def decode_load(self, held_share: float = 0.0) -> DecodeLoad:
        return _new(
            DecodeLoad,
            (
                self.id,
                self.reported_free_kv_tokens,
                self.virtual_tokens,
                self.in_flight + self.sibling_in_flight,
                self.max_prompt_tokens,
                held_share,
            ),
        )

    @property
    def virtual_tokens(self) -> int:
        """Return the tokens whose KV is on its way to a decode instance, from dispatch to first token (Tetris).

        The prompts that the routers have sent and the prompts that the instance reports to wait for are mostly the
        same, so the larger number counts: there are dispatches since the report, or transfers that another router has
        started.
        """
        sent_tokens = self.reserved_tokens + self.sibling_tokens
        return sent_tokens if sent_tokens > self.reported_awaiting_tokens else self.reported_awaiting_tokens

    def address(self) -> WorkerAddress:
        port = self.bootstrap_port if self.has_given_bootstrap_port else None
        return WorkerAddress(self.url, self.role, port, self.given_revision, self.topology, self.token_range)
