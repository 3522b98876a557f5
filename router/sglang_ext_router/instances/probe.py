"""Watches every instance: health, identity, load, and whether it is alive at all.

Health is what `/health` says, for which SGLang asks its scheduler: during a long chunk the answer is late.
Liveness is whether the server process answers anything, for which nothing is asked of the scheduler: a process that is
stopped, or a machine that is gone, keeps its connections open and is silent on all of them. What follows from either is
decided in `decide/signs_of_life.py`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import orjson

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress, may_be_forwarded
from sglang_ext_router.decide.role_choice import Side
from sglang_ext_router.decide.served_models import AUTO, PairingFacts, pairing_refusal
from sglang_ext_router.decide.signs_of_life import FailedChecks, Judgement, Silence, judge_checks, judge_silence
from sglang_ext_router.instances.registry import WorkerRegistry, kind_of
from sglang_ext_router.instances.workers import (
    MAX_RANKS,
    UNKNOWN_CAPACITY_TOKENS,
    KvEventsAddress,
    LoadAddress,
    RankReport,
    SchedulerLoad,
    TokenSource,
    Worker,
)

logger = logging.getLogger(__name__)

LIVENESS_PATH = "/ping"  # answered without the scheduler; an engine that does not know it answers 404, which will do
LIVENESS_STEPS = 10
CONNECT_TIMEOUT_S = 1.0  # for the machine of a silent instance to accept a connection
LATE_LOAD_TIMEOUT_S = 1.0  # for the load report of an instance that is late with its health check
RETURN_S = 60.0  # for which an ejected instance may come back to the others of its model as it was
REGISTRATION_TIMEOUT_S = 2.0  # for an instance that is being added to say what it is
EXTENSION_KEY = "sglang_ext"
MAX_EVENT_RANKS = 1024
PUBLISHED_CHECK_INTERVALS = 2.0  # between health checks of an instance whose scheduler shows by itself that it works
_ANY_HOST = frozenset({"*", "0.0.0.0", "::"})
_MODES = {Role.DECODE: "decode", Role.PLAIN: "null"}  # of SGLang's --disaggregation-mode; of other roles prefill
LAPS_PATH = "/laps"
MODEL_PATH = "/model_info"  # says the role that the instance has now, `/server_info` that of its start
PARALLEL_SAMPLES_HOOK = "parallel-samples"
ABORT_FAMILY_HOOK = "abort-family"
OUTPUT_HOOK = "continued-output"
RESTARTS_HOOK = "prefill-restarts"
_ELEMENT_TYPES = {"half": "float16", "float": "float32"}  # SGLang's other names of them
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # the caller has its own
# What a broken answer of an instance can raise while it is read.
_ANSWER_ERRORS = (
    aiohttp.ClientError,
    TimeoutError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
)


class _MisfitError(ValueError):
    """The instance does not fit; the message says why."""


class Prober:
    """Keeps the registry's view of the instances current until stopped."""

    def __init__(
        self,
        config: RouterConfig,
        registry: WorkerRegistry,
        on_restarted: Callable[[Worker], None],
        on_info: Callable[[Worker], None],
        tls: ssl.SSLContext,
        on_frozen: Callable[[Worker], None],
        last_received_s: Callable[[Worker], float],
        last_worked_s: Callable[[Worker], float],
    ) -> None:
        """Callbacks: `on_restarted` for an ejected instance, `on_frozen` for an instance whose requests are lost, too.

        `last_received_s` returns when an instance last sent anything on the connections of requests (the loop's clock),
        `last_worked_s` when it last sent a part of a reply.
        """
        self._config = config
        self._registry = registry
        self._on_restarted = on_restarted
        self._on_info = on_info
        self._tls = tls
        self._on_frozen = on_frozen
        self._last_received_s = last_received_s
        self._last_worked_s = last_worked_s
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._liveness_tasks: dict[int, asyncio.Task[None]] = {}
        self._wake: dict[int, asyncio.Event] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        key = self._config.key_for_workers
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._config.health_check_timeout_secs),
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
            trust_env=False,
        )
        for worker in self._registry:
            self.watch(worker)

    def watch(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        self._wake[worker.id] = asyncio.Event()
        self._tasks[worker.id] = loop.create_task(self._run(worker))
        self._liveness_tasks[worker.id] = loop.create_task(self._watch_liveness(worker))

    def forget(self, worker: Worker) -> None:
        self._wake.pop(worker.id, None)
        for tasks in (self._tasks, self._liveness_tasks):
            task = tasks.pop(worker.id, None)
            if task is not None:
                task.cancel()

    def check_now(self, worker: Worker) -> None:
        """A request saw the instance fail, or it has closed a connection: do not wait for the next interval."""
        wake = self._wake.get(worker.id)
        if wake is not None:
            wake.set()

    async def stop(self) -> None:
        self._wake.clear()
        pending = {*self._tasks.values(), *self._liveness_tasks.values()}
        while pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)
        if self._session is not None:
            await self._session.close()

    async def get_json(self, worker: Worker, path: str) -> Any:
        """GET from an instance; raises aiohttp.ClientError, TimeoutError or ValueError."""
        async with self._open_session().get(worker.url + path) as reply:
            reply.raise_for_status()
            return await reply.json(content_type=None)

    async def ask(
        self, worker: Worker, path: str, body: bytes | None, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """POST to an instance, or GET without a body; return status and body. Errors as for get_json."""
        method, headers = ("GET", {}) if body is None else ("POST", {"content-type": "application/json"})
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._config.health_check_timeout_secs)
        async with self._open_session().request(
            method, worker.url + path, data=body, headers=headers, timeout=timeout
        ) as reply:
            return reply.status, await reply.read()

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the HTTP client. Raise aiohttp.ClientConnectionError while the router stops: calls may still run."""
        assert self._session is not None
        if self._session.closed:
            raise aiohttp.ClientConnectionError("the router stops")
        return self._session

    async def _run(self, worker: Worker) -> None:
        config = self._config
        loop = asyncio.get_running_loop()
        checked_s = float("-inf")
        wake = self._wake[worker.id]
        # Not `while True`: a cancellation that meets a timeout of the HTTP client is lost in it.
        while self._wake.get(worker.id) is wake:
            is_due = loop.time() >= checked_s + self._check_interval_s(worker, loop.time())
            is_due |= wake.is_set() or not worker.is_healthy or worker.failed_checks > 0
            wake.clear()
            was_healthy = worker.is_healthy
            if was_healthy and not worker.publishes_load(loop.time()):
                await self._read_load(worker)
            if is_due:
                await self._check(worker)
                checked_s = loop.time()
            if worker.is_healthy and not was_healthy:
                await self._read_load(worker)
            interval_s = config.load_poll_interval_secs
            if worker.failed_checks:
                interval_s = min(1.0, config.health_check_interval_secs)
            try:
                async with asyncio.timeout(interval_s):
                    await wake.wait()
            except TimeoutError:
                pass

    def _check_interval_s(self, worker: Worker, now_s: float) -> float:
        """Return the time between two health checks of an instance that passes them.

        Published load shows what a check would, but for the server process; where that ends, so does the connection to
        the publisher, and the instance is checked at once. Checks also read the role of an instance that can change it.
        """
        shows_life = worker.publishes_load(now_s) and not (worker.is_doubted or worker.can_switch_roles)
        return self._config.health_check_interval_secs * (PUBLISHED_CHECK_INTERVALS if shows_life else 1.0)

    async def _check(self, worker: Worker) -> None:
        assert self._session is not None
        asked_s = asyncio.get_running_loop().time()
        try:
            async with self._session.get(worker.url + "/health") as reply:
                if reply.status != 200:
                    raise ValueError(f"/health answered {reply.status}")
            if not worker.has_info:
                if worker.role is Role.PLAIN:
                    worker.generates = (await self.get_json(worker, MODEL_PATH)).get("is_generation") is not False
                self._take_info(worker, await self.get_json(worker, "/server_info"))
            if worker.fits_length_boundary:
                await self._read_boundary(worker)
            if worker.can_switch_roles:
                await self._read_role(worker)
        except _ANSWER_ERRORS as error:
            is_refused = isinstance(error, _MisfitError)
            if is_refused and worker.last_error != str(error):
                logger.warning("worker %s (%s) is refused: %s", worker.url, worker.role, error)
            worker.is_refused = is_refused
            is_unanswered = worker.is_doubted = isinstance(error, TimeoutError)
            if is_unanswered and worker.is_healthy:
                await self._read_load(worker, LATE_LOAD_TIMEOUT_S)
            self._failed(worker, str(error) or type(error).__name__, is_unanswered, asked_s)
            return
        self._hear(worker)
        worker.is_refused = worker.is_doubted = False
        worker.failed_checks = 0
        worker.last_error = ""
        if not worker.is_healthy:
            worker.is_healthy = True
            self._registry.refresh()
            logger.info("worker %s (%s) is healthy", worker.url, worker.role)

    async def _read_boundary(self, worker: Worker) -> None:
        """An instance that finds out itself where short ends may find something else later."""
        try:
            status = worker.fresh_queues(asyncio.get_running_loop().time()) or await self.get_json(worker, LAPS_PATH)
            tokens = _positive(status.get("boundary_tokens"))
        except _ANSWER_ERRORS as error:
            logger.debug("no length boundary from %s: %s", worker.url, error)
            return
        if tokens is not None and tokens != worker.length_boundary_tokens:
            worker.length_boundary_tokens = tokens
            self._on_info(worker)

    async def _read_role(self, worker: Worker) -> None:
        """Another router, or an operator, may have changed the instance's role."""
        if worker.is_moving:  # the controller changes it just now
            return
        mode = (await self.get_json(worker, MODEL_PATH)).get("disaggregation_mode")
        if mode in tuple(Side) and not worker.is_moving:
            self.take_side(worker, Side(mode))

    def take_side(self, worker: Worker, side: Side) -> None:
        """Count an instance to prefill or to decode, as it says itself. It comes without what it had cached."""
        if kind_of(worker.role) == side:
            return
        given = worker.given_role
        role = given if kind_of(given) == side else Role.DECODE if side is Side.DECODE else Role.BOTH
        logger.info("worker %s (%s) says that it is %s: it serves as %s", worker.url, worker.role, side, role)
        self._on_restarted(worker)
        self._registry.relabel(worker, role)
        self._on_info(worker)

    async def refusal(self, address: WorkerAddress) -> str | None:
        """Return why an instance must not be added; None if it may, or does not answer yet and is checked later."""
        assert self._session is not None
        try:
            async with asyncio.timeout(min(REGISTRATION_TIMEOUT_S, self._config.health_check_timeout_secs)):
                async with self._session.get(address.url + "/server_info") as reply:
                    reply.raise_for_status()
                    info = await reply.json(content_type=None)
            return self._refusal(address.role, read_facts(address.url, info, address.revision), info)
        except _ANSWER_ERRORS:
            return None

    def _task_refusal(self, worker: Worker, facts: PairingFacts) -> str | None:
        """Return why an instance that generates must not serve a model together with one that embeds; None if it may.

        An instance that embeds ends when it is asked to generate.
        """
        for other in self._registry:
            differs = other.generates is not worker.generates
            if differs and other is not worker and other.serves_facts and other.model == facts.model:
                own, others = ("generates", "does not") if worker.generates else ("does not generate", "does")
                return (
                    f"it cannot serve {facts.model} together with {other.url}: {worker.url} {own}, {other.url} {others}"
                )
        return None

    def _refusal(self, role: Role, facts: PairingFacts, info: Mapping[str, Any]) -> str | None:
        """Return why an instance does not fit its role, or the others that serve its model.

        An instance that is out for a moment still counts: a misfit must not take the place of all others when they come
        back.
        """
        mode = info.get("disaggregation_mode")
        wanted = _MODES.get(role, "prefill")
        may_differ = role is not Role.PLAIN and mode != "null" and _can_switch_roles(info)
        if isinstance(mode, str) and mode in {"prefill", "decode", "null"} and mode != wanted and not may_differ:
            way_out = "; give it with --plain" if mode == "null" else ""
            return f"it runs with --disaggregation-mode {mode}, but was given to the router as {kind_of(role)}{way_out}"
        if role is Role.PLAIN:  # no KV passes between it and another one
            return None
        counted_s = asyncio.get_running_loop().time() - RETURN_S
        serving = (
            worker
            for worker in self._registry
            if worker.role is not Role.PLAIN
            and worker.serves_facts
            and (worker.has_info or worker.out_since_s > counted_s)
        )
        return pairing_refusal(facts, (instance.facts for instance in serving if instance.facts is not None))

    def _failed(self, worker: Worker, reason: str, is_unanswered: bool, asked_s: float) -> None:
        """A health check that was sent at `asked_s` has failed."""
        worker.failed_checks += 1
        worker.last_error = reason
        if not worker.is_healthy:
            return
        checks = FailedChecks(
            worker.failed_checks,
            is_refused="Cannot connect" in reason,
            is_unanswered=is_unanswered,
            has_worked=max(self._last_worked_s(worker), worker.worked_s) >= asked_s,
            has_peer=any(not peer.failed_checks for peer in self._registry.peers(worker)),
        )
        judgement = judge_checks(checks, self._config.health_failure_threshold)
        if judgement in (Judgement.OUT, Judgement.LOST):
            self.take_out(worker, reason)
            if judgement is Judgement.LOST:
                self._on_frozen(worker)
        elif is_unanswered and checks.has_worked:
            worker.failed_checks, worker.last_error = 0, ""
        elif worker.failed_checks == self._config.health_failure_threshold:
            logger.warning(
                "worker %s (%s) does not answer its health checks and stays, as no other could serve in its place",
                *(worker.url, worker.role),
            )

    def take_out(self, worker: Worker, reason: str) -> None:
        """Send the instance nothing until a health check passes."""
        worker.is_healthy = worker.is_silent = False
        # What it was and what it had cached may be gone when it comes back.
        worker.has_info = False
        worker.out_since_s = asyncio.get_running_loop().time()
        self._registry.refresh()
        self._on_restarted(worker)
        logger.warning("worker %s (%s) is out: %s", worker.url, worker.role, reason)

    async def _watch_liveness(self, worker: Worker) -> None:
        """Watch for the silence of an instance from which nothing comes, neither an answer nor a byte of any reply.

        An instance that says that it is not well, or closes its port, may still be serving what it has: only an
        instance that says nothing at all loses its requests.
        """
        interval_s, loop = self._config.liveness_interval_secs, asyncio.get_running_loop()
        wake = self._wake[worker.id]
        silent_s = 0.0
        while self._wake.get(worker.id) is wake:
            now_s = loop.time()
            next_s = self._question_due_s(worker, now_s) if worker.is_healthy else now_s + interval_s
            if next_s > now_s:
                silent_s = 0.0
            else:
                silent_s = await self._listen(worker, silent_s)
                next_s = now_s + interval_s
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    def _question_due_s(self, worker: Worker, now_s: float) -> float:
        """Return when an instance has to be asked whether it lives; not later than now: at once.

        It need not be where something has just come from it; or where its scheduler publishes its load, its server
        process has answered the last health check, and no request waits for it.
        """
        interval_s = self._config.liveness_interval_secs
        if worker.is_silent:
            return now_s
        if worker.publishes_load(now_s) and not (worker.in_flight or worker.is_doubted):
            return now_s + interval_s
        return self._last_received_s(worker) + interval_s

    async def _listen(self, worker: Worker, silent_s: float) -> float:
        """Ask for life once and wait for an answer, or anything else; return for how long nothing has come by then.

        `silent_s` is the silence before. The time is counted in steps: what has arrived while this process itself stood
        still is read before it counts.
        """
        config, loop = self._config, asyncio.get_running_loop()
        step_s = config.liveness_timeout_secs / LIVENESS_STEPS
        limit_s = config.liveness_timeout_secs * config.liveness_failure_threshold
        received_s = max(self._last_received_s(worker), loop.time())
        is_unreachable = silent_s >= limit_s and not await self._accepts_connections(worker)
        asking = loop.create_task(self._ask_for_life(worker))
        try:
            for _ in range(LIVENESS_STEPS):
                if not asking.done():
                    await asyncio.wait({asking}, timeout=step_s)
                if not worker.is_healthy:  # a health check has taken it out
                    return 0.0
                if asking.done() and asking.result():
                    self._hear(worker)
                    return 0.0
                latest_s = self._last_received_s(worker)
                if latest_s > received_s:
                    received_s, silent_s = latest_s, 0.0
                    self._hear(worker)
                    continue
                is_unreachable = is_unreachable or asking.done()  # without an answer: there is no way to it
                silent_s += config.liveness_timeout_secs if asking.done() else step_s
                if not self._stays(worker, silent_s, limit_s, is_unreachable):
                    return 0.0
                if asking.done():
                    break
            return silent_s
        finally:
            asking.cancel()

    def _stays(self, worker: Worker, silent_s: float, limit_s: float, is_unreachable: bool) -> bool:
        """Do what follows from the silence of an instance; return whether it stays."""
        if silent_s < limit_s:
            return True
        now_s = asyncio.get_running_loop().time()
        silence = Silence(
            silent_s,
            reading_s=worker.reading.within(now_s - silent_s, now_s),
            is_unreachable=is_unreachable,
            has_peer=any(
                max(peer.heard_s, self._last_received_s(peer)) > now_s - limit_s / 2
                for peer in self._registry.peers(worker)
            ),
        )
        judgement = judge_silence(silence, limit_s)
        if judgement is Judgement.LOST:
            worker.failed_checks += 1
            worker.last_error = f"it is frozen: no answer of any kind for {silent_s:.1f} s"
            self.take_out(worker, worker.last_error)
            self._on_frozen(worker)
            return False
        if judgement is Judgement.SILENT and not worker.is_silent:
            worker.is_silent = True
            worker.last_error = f"it is silent: no answer of any kind for {silent_s:.1f} s"
            self._registry.refresh()
            logger.warning(
                "worker %s (%s) is silent, and no other could serve in its place: it keeps its requests, new ones wait",
                *(worker.url, worker.role),
            )
        return True

    def _hear(self, worker: Worker) -> None:
        """Something has come from the instance."""
        worker.heard_s = asyncio.get_running_loop().time()
        if worker.is_silent:
            worker.is_silent = False
            worker.last_error = ""
            self._registry.refresh()
            logger.info("worker %s (%s) is heard again", worker.url, worker.role)

    async def _accepts_connections(self, worker: Worker) -> bool:
        """Return whether the instance's machine accepts a connection, which a stopped process does not hinder."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(worker.host, worker.port)
        except OSError:  # TimeoutError is one
            return False
        writer.close()
        return True

    async def _ask_for_life(self, worker: Worker) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(worker.url + LIVENESS_PATH, timeout=_NO_TIMEOUT):
                return True
        except aiohttp.ClientSSLError:  # it speaks, if not what was expected; a health check judges that
            self.check_now(worker)
            return True
        except aiohttp.ClientConnectorError as error:
            self.check_now(worker)
            return error.os_error.errno == errno.ECONNREFUSED
        except TimeoutError:
            return False
        except _ANSWER_ERRORS:  # it closed the connection, or speaks in tongues
            return True

    def _take_info(self, worker: Worker, info: dict[str, Any]) -> None:
        facts = read_facts(worker.url, info, worker.given_revision)
        worker.serves_facts = worker.serves_facts and facts == worker.facts
        worker.facts = facts
        worker.model = facts.model
        worker.revision = facts.revision
        refusal = self._task_refusal(worker, facts) or self._refusal(worker.role, facts, info)
        if refusal is not None:
            raise _MisfitError(refusal)
        worker.can_switch_roles = worker.role is not Role.PLAIN and _can_switch_roles(info)
        worker.token_source = read_token_source(info)
        capacity = _positive(info.get("max_total_num_tokens"))
        longest = _positive(info.get("max_req_input_len")) or _positive(info.get("context_length"))
        if capacity is not None:
            worker.kv_capacity_tokens = capacity
        worker.context_tokens = _positive(info.get("context_length")) or UNKNOWN_CAPACITY_TOKENS
        worker.max_prompt_tokens = min(longest or worker.kv_capacity_tokens, worker.kv_capacity_tokens)
        if (worker.role.is_prefill or worker.can_switch_roles) and not worker.has_given_bootstrap_port:
            port = _positive(info.get("disaggregation_bootstrap_port"))
            if port is None:
                raise ValueError("its /server_info has no disaggregation_bootstrap_port; give it on the command line")
            worker.set_bootstrap_port(port)
        label_header = info.get("tokenizer_metrics_custom_labels_header")
        is_used = isinstance(label_header, str) and bool(info.get("tokenizer_metrics_allowed_custom_labels"))
        name = str(label_header).lower() if is_used else ""
        worker.label_header = name.encode() if may_be_forwarded(name) else b""
        worker.max_running = _positive(scheduler_state(info).get("effective_max_running_requests_per_dp"))
        own = _extension(info)
        hooks = own.get("hooks")
        worker.serves_parallel_samples = isinstance(hooks, list) and PARALLEL_SAMPLES_HOOK in hooks
        worker.takes_output = isinstance(hooks, list) and OUTPUT_HOOK in hooks
        worker.aborts_families = isinstance(hooks, list) and ABORT_FAMILY_HOOK in hooks
        worker.length_boundary_tokens = _positive(own.get("length_boundary_tokens"))
        worker.fits_length_boundary = own.get("fits_length_boundary") is True
        worker.set_ranks(min(_positive(info.get("dp_size")) or 1, MAX_RANKS))
        is_decode = worker.role is Role.DECODE
        worker.caches_at_decode = is_decode and info.get("disaggregation_decode_enable_radix_cache") is True
        worker.kv_events = read_kv_events(worker.host, info) if worker.keeps_prefixes else None
        worker.load_events = read_load_address(worker.host, info)
        worker.has_info = worker.serves_facts = True
        self._registry.refresh()
        self._on_info(worker)

    async def _read_load(self, worker: Worker, timeout_s: float | None = None) -> None:
        """Take over the instance's load report, which its scheduler writes and its server process answers."""
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.get_json(worker, "/v1/loads?include=core")
            ranks = reply["loads"]
            report = SchedulerLoad(
                sum(int(rank["num_running_reqs"]) for rank in ranks),
                sum(int(rank.get("num_waiting_uncached_tokens", 0)) for rank in ranks),
                sum(int(rank["num_used_tokens"]) + _unallocated_tokens(rank) for rank in ranks),
                sum(_awaiting_tokens(rank) for rank in ranks),
                sum(int(rank["max_total_num_tokens"]) for rank in ranks),
                sum(int(rank.get("total_prefill_uncached_tokens", 0)) for rank in ranks),
                sum(int(rank.get("total_prefill_busy_us", 0)) for rank in ranks),
                tuple(map(_rank_report, sorted(ranks, key=_dp_rank))) if worker.ranks else (),
            )
            written_s = sum(float(rank.get("timestamp", 0.0)) for rank in ranks)
        except _ANSWER_ERRORS as error:
            logger.debug("no load report from %s: %s", worker.url, error)
            return
        now_s = asyncio.get_running_loop().time()
        worker.heard_s = now_s
        if worker.publishes_load(now_s):  # what came meanwhile is newer
            return
        stamp = (written_s, *report[:-1])
        if worker.load_stamp and stamp != worker.load_stamp:
            worker.worked_s = now_s
        worker.load_stamp = stamp
        self._take_load(worker, report, now_s, is_published=False)

    def take_published_load(self, worker: Worker, report: SchedulerLoad) -> None:
        """Take over a load report that came by itself, which shows that the instance's scheduler works."""
        now_s = asyncio.get_running_loop().time()
        worker.load_published_s = worker.worked_s = worker.heard_s = now_s
        self._take_load(worker, report, now_s, is_published=True)

    def _take_load(self, worker: Worker, report: SchedulerLoad, now_s: float, *, is_published: bool) -> None:
        worker.reported_running = report.running
        for rank, reported in zip(worker.ranks, report.ranks, strict=False):
            rank.take_report(reported, is_published=is_published)
        # The reply to a prompt that a published report still counts may have been faster than the report.
        own_tokens = worker.pending_tokens + (worker.released_tokens if is_published else 0)
        worker.released_tokens = 0
        worker.foreign_tokens = max(0, report.waiting_tokens - own_tokens - worker.sibling_tokens)
        # Slots that wait for their KV are counted with what is on its way, not with what is used.
        worker.reported_awaiting_tokens = report.awaiting_tokens
        used_tokens = report.used_tokens - report.awaiting_tokens
        worker.reported_free_kv_tokens = max(0, report.capacity_tokens - used_tokens)
        expected_rate = self._registry.expected_tokens_per_s(worker, now_s)
        worker.rate.observe(report.prefilled_tokens, report.busy_us, now_s, expected_rate)


def _dp_rank(rank: dict[str, Any]) -> int:
    return int(rank.get("dp_rank", 0))


def _rank_report(rank: dict[str, Any]) -> RankReport:
    used_tokens = int(rank["num_used_tokens"]) + _unallocated_tokens(rank) - _awaiting_tokens(rank)
    free_tokens = max(0, int(rank["max_total_num_tokens"]) - used_tokens)
    return RankReport(int(rank.get("num_waiting_uncached_tokens", 0)), free_tokens, _awaiting_tokens(rank))


def _awaiting_tokens(rank: dict[str, Any]) -> int:
    """KV tokens that a decode rank waits for, with or without slots; 0 for an engine that does not say."""
    return max(0, int(rank["num_total_tokens"]) - int(rank["num_active_tokens"])) if "num_active_tokens" in rank else 0


def _unallocated_tokens(rank: dict[str, Any]) -> int:
    """Tokens of requests that a decode rank knows and that have no slots yet; 0 for an engine that does not say."""
    return max(0, int(rank["num_total_tokens"]) - int(rank["num_used_tokens"])) if "num_active_tokens" in rank else 0


def read_facts(url: str, info: Mapping[str, Any], given_revision: str | None = None) -> PairingFacts:
    """Return the facts of an instance's `/server_info` in which all instances of one model must agree.

    A revision that it was given here wins over its own.
    """
    own = _extension(info)
    states = own.get("states_of_equal_ranks")
    states = states if isinstance(states, list) else []
    return PairingFacts(
        url,
        str(info.get("served_model_name") or info.get("model_path") or ""),
        kv_cache_dtype=_text(info.get("kv_cache_dtype")),
        resolved_kv_cache_dtype=_text(own.get("kv_cache_dtype")),
        kv_element_type=_text(own.get("kv_element_type")) or _element_type(info),
        page_size_tokens=_positive(info.get("page_size")),
        transfer_backend=_text(info.get("disaggregation_transfer_backend")),
        architecture=_text(own.get("architecture")),
        has_kv_checksums=_flag(info.get("disaggregation_enable_kv_checksum")),
        side=None if _can_switch_roles(info) else _text(info.get("disaggregation_mode")),
        ranks=_attention_ranks(info),
        stages=_positive(info.get("pp_size")),
        states_of_equal_ranks=tuple(state for state in states if isinstance(state, str)),
        revision=(_text(own.get("revision")) or "") if given_revision is None else given_revision,
    )


def read_token_source(info: Mapping[str, Any]) -> TokenSource:
    """Return what an instance makes tokens with, by its `/server_info`."""
    variables = info.get("default_chat_template_kwargs")
    return TokenSource(
        str(info.get("tokenizer_path") or info.get("model_path") or ""),
        _text(info.get("chat_template")),
        orjson.dumps(variables).decode() if isinstance(variables, dict) and variables else "",
    )


def read_kv_events(host: str, info: Mapping[str, Any]) -> KvEventsAddress | None:
    """Return where an instance on this host publishes its KV events; None where it does not, or cannot be followed.

    Pairs of tokens, which EAGLE's engines hash, are not known here.
    """
    given = info.get("kv_events")
    if not isinstance(given, dict) or given.get("publisher") != "zmq":
        return None
    if info.get("speculative_algorithm") not in (None, "NGRAM", "STANDALONE"):
        return None
    port, block_tokens = _positive(given.get("endpoint_port_base")), _positive(given.get("block_size"))
    if port is None or block_tokens is None:
        return None
    bound = (_text(given.get("endpoint_host")) or "*").strip("[]")
    topic = given.get("topic")
    return KvEventsAddress(
        host if bound in _ANY_HOST else bound,
        port,
        _positive(given.get("replay_endpoint_port_base")),
        topic.encode() if isinstance(topic, str) else b"",
        block_tokens,
        min(_positive(given.get("dp_size")) or 1, MAX_EVENT_RANKS),
    )


def read_load_address(host: str, info: Mapping[str, Any]) -> LoadAddress | None:
    """Return where an instance on this host publishes its load; None where it does not."""
    given = info.get("kv_events")
    stock = _positive(given.get("load_endpoint_port_base")) if isinstance(given, dict) else None
    port = _positive(_extension(info).get("load_port")) or stock
    return None if port is None else LoadAddress(host, port, min(_positive(info.get("dp_size")) or 1, MAX_RANKS))


def _can_switch_roles(info: Mapping[str, Any]) -> bool:
    """Return whether SGLang lets the instance change between prefill and decode, and it notices when others do."""
    hooks = _extension(info).get("hooks")
    return info.get("enable_pd_role_switch") is True and isinstance(hooks, list) and RESTARTS_HOOK in hooks


def scheduler_state(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the scheduler says in `/server_info`; the other fields are those of the instance's start."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else None
    return state if isinstance(state, dict) else {}


def _attention_ranks(info: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that divide the heads of attention among them."""
    ranks = _positive(info.get("tp_size"))
    groups = (_positive(info.get("attn_dp_size")) or 1) * (_positive(info.get("attn_cp_size")) or 1)
    return None if ranks is None else max(1, ranks // groups)


def _extension(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what only an instance of `sglang-ext worker` reports; empty for any other."""
    reported = info.get(EXTENSION_KEY)
    return reported if isinstance(reported, dict) else {}


def _element_type(info: Mapping[str, Any]) -> str | None:
    """Return the KV dtype of an instance that does not report it; None where its model decides."""
    given = _text(info.get("dtype"))
    if info.get("kv_cache_dtype") != AUTO or given == AUTO:
        return None
    return None if given is None else _ELEMENT_TYPES.get(given, given)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
