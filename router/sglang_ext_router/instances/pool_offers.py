"""Long prompts are offered to the long pool's coordinator, which says in its own time which instance shall get each.

A prompt that is not offered, and one for which the coordinator names no instance in time, is routed as any other:
nothing of this is needed for an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import aiohttp
import orjson

from sglang_ext_router.config import RouterConfig
from sglang_ext_router.instances.long_pool import LongPoolMonitor, cached_rooms
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.observe.metrics import RouterMetrics
from sglang_ext_router.request.prepared_request import PreparedRequest
from sglang_ext_router.request.prompt import Prompt, beginnings
from sglang_ext_router.request.request_ids import RoomAllocator
from sglang_ext_router.request.routing import PoolPlace, RoutePlanner

TICKETS_PATH = "/tickets"
CONNECT_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 16_384
MAX_UNCACHED = 1024  # prompts that were sent, and that the coordinator may still report as cached


class OfferOutcome(StrEnum):
    """The outcome for a prompt that could be offered. Bounded: these are metric labels."""

    NAMED = "named"  # the coordinator has named an instance, which gets it
    AWAY = "away"  # the coordinator does not answer, or its connection has ended
    REFUSED = "refused"  # it has answered with an error
    INVALID = "invalid"  # it has answered with something else than an instance
    UNKNOWN = "unknown_instance"  # no prefill instance of this model that is ready has that name
    UNUSABLE = "unusable"  # that instance cannot take the prompt now
    TIMEOUT = "timeout"
    GIVEN_UP = "given_up"  # its client has left meanwhile, or its time is over


class _OfferError(Exception):
    def __init__(self, outcome: OfferOutcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class PoolAnswer(NamedTuple):
    """Names the member that shall get a prompt, and all that are to compute it, with the time of its first chunk."""

    instance: str
    members: list[str]
    chunk_s: float


class PoolOffers:
    """Asks one coordinator, a connection for each prompt; closing it withdraws the prompt."""

    def __init__(
        self,
        config: RouterConfig,
        monitor: LongPoolMonitor,
        planner: RoutePlanner,
        rooms: RoomAllocator,
        metrics: RouterMetrics,
        learn: Callable[[Prompt, Worker], None],
    ) -> None:
        """`learn` is called with each prompt that an instance has in its prefix cache."""
        self._config = config
        self._monitor = monitor
        self._planner = planner
        self._rooms = rooms
        self._counts = metrics.pool_offers
        self._uncached: dict[int, tuple[Worker, Prompt]] = {}  # by room, in order of sending
        self._learn = learn
        monitor.on_answer = self._learn_prefixes
        self._session: aiohttp.ClientSession | None = None
        self._asking: set[asyncio.Task[PoolAnswer]] = set()

    def count(self, outcome: OfferOutcome) -> None:
        """Count what became of a prompt that could be offered."""
        self._counts[outcome.value] = self._counts.get(outcome.value, 0) + 1

    def wants(self, request: PreparedRequest) -> bool:
        """Return whether to ask the coordinator.

        It is asked about a long prompt that members may share, and of which no instance holds half.
        """
        prompt, planner = request.prompt, self._planner
        if request.is_undivided:
            return False
        if request.prompt_tokens <= planner.boundary(request.model).limit_tokens:
            return False
        if prompt.sequence_count != 1 or request.scores.is_prefill_only or request.scores.entries_per_token:
            return False
        if prompt.images or prompt.audios:
            return False
        if 2 * planner.max_cached_tokens(request.model, prompt, request.prompt_tokens) >= request.prompt_tokens:
            return False  # it goes where its prefix is
        if not self._monitor.is_answering:
            self.count(OfferOutcome.AWAY)
            return False
        return True

    def ask(
        self, request: PreparedRequest, waited_s: float, on_answer: Callable[[PoolPlace | None], None]
    ) -> asyncio.Task[PoolAnswer]:
        """Offer a prompt; `on_answer` gets the instance that is named for it, or None: route it as any other.

        The task can be cancelled: the prompt is withdrawn then, and `on_answer` not called.
        """
        room = self._rooms.take(1)
        ticket: dict[str, Any] = {
            "ticket": room,
            "tokens": request.prompt_tokens,
            "waited_s": waited_s,
            "online": request.is_online,
            # For what members have kept of prompts that begin like it.
            "prefixes": beginnings(request.prompt, request.prompt_tokens),
        }
        # Else the coordinator sets it, which knows what a prompt of this length takes.
        if request.headers.ttft_slo_s is not None:
            ticket["slack_s"] = request.headers.ttft_slo_s - waited_s
        limit_s = min(self._config.coordinator_offer_timeout_secs, self._config.queue_timeout_secs - waited_s)
        task = asyncio.get_running_loop().create_task(self._name(ticket, limit_s))
        self._asking.add(task)

        def on_done(done: asyncio.Task[PoolAnswer]) -> None:
            self._asking.discard(done)
            if done.cancelled():
                self.count(OfferOutcome.GIVEN_UP)
                return
            error = done.exception()
            if error is None:
                on_answer(self._place(request, done.result(), room))
            elif isinstance(error, _OfferError):
                self.count(error.outcome)
                on_answer(None)
            else:
                raise error

        task.add_done_callback(on_done)
        return task

    def on_sent(self, room: int, prefill: Worker, prompt: Prompt) -> None:
        """The instance that was named gets it; whether it has it in its prefix cache is known later."""
        if prompt.hashes:
            self._uncached[room] = prefill, prompt
            if len(self._uncached) > MAX_UNCACHED:
                del self._uncached[next(iter(self._uncached))]

    def _learn_prefixes(self, answer: Mapping[str, Any]) -> None:
        if self._uncached:
            for room, is_cached in cached_rooms(answer):
                if is_cached and room in self._uncached:
                    prefill, prompt = self._uncached.pop(room)
                    self._learn(prompt, prefill)

    async def stop(self) -> None:
        """Ask no more."""
        for task in tuple(self._asking):
            task.cancel()
        if self._session is not None:
            await self._session.close()

    def _place(self, request: PreparedRequest, answer: PoolAnswer, room: int) -> PoolPlace | None:
        workers = {worker.name: worker for worker in request.model.ready_prefill}
        worker = workers.get(answer.instance)
        if worker is None:
            self.count(OfferOutcome.UNKNOWN)
            return None
        members = tuple(workers[one] for one in answer.members if one in workers) or (worker,)
        return PoolPlace(worker, room, members, answer.chunk_s)

    async def _name(self, ticket: dict[str, Any], limit_s: float) -> PoolAnswer:
        """Ask the coordinator. Raises _OfferError."""
        if self._session is None:
            # A kept connection might just have been closed by the coordinator.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        url = self._monitor.url + TICKETS_PATH
        try:
            async with asyncio.timeout(limit_s), self._session.post(url, json=ticket) as reply:
                if reply.status != 200:
                    raise _OfferError(OfferOutcome.REFUSED)
                body = await reply.content.read(MAX_ANSWER_BYTES)
        except aiohttp.ServerTimeoutError:
            raise _OfferError(OfferOutcome.AWAY) from None
        except TimeoutError:
            raise _OfferError(OfferOutcome.TIMEOUT) from None
        except (aiohttp.ClientError, OSError):
            raise _OfferError(OfferOutcome.AWAY) from None
        return _read_names(body)


def _read_names(body: bytes) -> PoolAnswer:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise _OfferError(OfferOutcome.INVALID) from None
    if not isinstance(answer, dict):
        raise _OfferError(OfferOutcome.INVALID)
    name, members, chunk_s = answer.get("instance"), answer.get("members", []), answer.get("chunk_s", 0.0)
    if not isinstance(name, str) or not isinstance(members, list) or type(chunk_s) not in (int, float):
        raise _OfferError(OfferOutcome.INVALID)
    return PoolAnswer(name, [str(member) for member in members], max(0.0, chunk_s))
