"""One OpenTelemetry trace per request, sent to a collector over OTLP/HTTP in JSON (`--otlp-traces-endpoint`).

Nothing is done while a request runs but to give it its place in its trace: spans are made when it has ended, of the
times that are kept anyway. A collector that is away costs spans, which are counted, and holds no request up.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import orjson

from sglang_ext.live.decide.view import SeenRequest
from sglang_ext.types import LengthClass
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.instances.long_pool import LongPoolMonitor
from sglang_ext_router.observe.request_record import RequestRecord
from sglang_ext_router.observe.trace_spans import Span, SpanMaker, TraceContext, add_pool, add_request
from sglang_ext_router.request.prepared_request import ClientHeaders

logger = logging.getLogger(__name__)

MAX_PENDING = 4096  # traces that wait to be sent; further ones are dropped
MAX_BATCH = 256
INTERVAL_S = 0.5
POST_TIMEOUT_S = 5.0
POOL_TIMEOUT_S = 10.0  # how long a trace waits until the coordinator reports its request's end
COMPLAIN_S = 60.0
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class Ended(NamedTuple):
    """A request whose spans are to be made."""

    context: TraceContext
    seen: SeenRequest
    ended_s: float
    unix_offset_s: float  # not of the loop's time, which is that of its latest turn
    room: int | None  # under which a long pool may know it


class Tracer:
    """Gives requests their place in a trace, and sends the spans of sampled requests.

    `counts` has the sent traces and the dropped ones: too many waited, the collector did not take
    them, or no spans could be made of them.
    """

    def __init__(
        self, config: RouterConfig, loop: asyncio.AbstractEventLoop, long_pool: LongPoolMonitor | None
    ) -> None:
        endpoint = config.otlp_traces_endpoint.rstrip("/")
        self._url = endpoint if endpoint.endswith("/v1/traces") else endpoint + "/v1/traces"
        self._ratio = config.otlp_sample_ratio
        self._loop = loop
        self._long_pool = long_pool
        self._random = random.Random()  # seeded by the operating system: processes and routers differ
        self._pending: deque[Ended] = deque()
        self._task: asyncio.Task[None] | None = None
        self._complained_s = float("-inf")
        self.counts = {"sent": 0, "dropped": 0}

    # -- while a request comes --------------------------------------------------------------------------

    def join(self, raw: Sequence[tuple[bytes, bytes]], headers: ClientHeaders) -> ClientHeaders:
        """Put a request into its client's trace, or into a new one; instances are sent its own span as their parent.

        A client's decision to sample counts, else the ratio. Instances follow it, as SDKs do by default.
        """
        given = None
        for name, value in raw:
            if name == b"traceparent":
                given = _TRACEPARENT.fullmatch(value)
        is_valid = (
            given is not None
            and given[1] != b"ff"
            and (given[1] != b"00" or not given[5])
            and given[2].strip(b"0") != b""
            and given[3].strip(b"0") != b""
        )
        if given is not None and is_valid:
            if not int(given[4], 16) & _SAMPLED:
                return headers  # as it came
            trace_id, parent_id, is_sampled = given[2].decode(), given[3].decode(), True
        else:
            trace_id, parent_id = f"{self._random.getrandbits(128) or 1:032x}", ""
            is_sampled = self._random.random() < self._ratio
        # A state without a valid parent is to be ignored.
        unwanted = (b"traceparent:",) if parent_id else (b"traceparent:", b"tracestate:")
        lines = [line for line in headers.forwarded.splitlines(keepends=True) if not line.startswith(unwanted)]
        span_id = self._new_id()
        lines.append(f"traceparent: 00-{trace_id}-{span_id}-{'01' if is_sampled else '00'}\r\n".encode())
        context = TraceContext(trace_id, span_id, parent_id) if is_sampled else None
        return headers._replace(forwarded=b"".join(lines), trace=context)

    def record_end(self, record: RequestRecord) -> None:
        """Keep a request whose record is closed until its spans are made, if it is sampled."""
        context = None if record.request is None else record.request.headers.trace
        if context is None or record.ended_s is None:
            return
        if len(self._pending) >= MAX_PENDING:
            self._drop(1, "too many wait")
            return
        may_be_shared = self._long_pool is not None and record.length_class is LengthClass.LONG
        room = int(record.room_id[-16:], 16) if may_be_shared and record.room_id else None
        self._pending.append(Ended(context, record.seen(), record.ended_s, time.time() - time.monotonic(), room))
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    # -- behind the requests ----------------------------------------------------------------------------

    async def stop(self) -> None:
        """Send what waits, once, and no more."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        async with self._session() as session:
            while self._pending and await self._send(session, is_last=True):
                pass

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=POST_TIMEOUT_S), trust_env=False)

    async def _run(self) -> None:
        async with self._session() as session:
            while True:
                await asyncio.sleep(INTERVAL_S)
                while await self._send(session, is_last=False):
                    pass

    async def _send(self, session: aiohttp.ClientSession, is_last: bool) -> bool:
        """Send a batch; whether it was taken. What cannot be sent is dropped: a later batch is worth as much."""
        records, names = self._pool_records()
        now_s = self._loop.time()
        read_s = None if self._long_pool is None else self._long_pool.read_s
        spans: list[Span] = []
        count = 0
        for _ in range(min(MAX_BATCH, len(self._pending))):
            ended = self._pending.popleft()
            record = None if ended.room is None else records.get(ended.room)
            has_ended = record is not None and record.get("ended_s") is not None
            is_known = ended.room is None or (has_ended and read_s is not None and read_s > ended.ended_s)
            if not is_known and not is_last and now_s - ended.ended_s < POOL_TIMEOUT_S:
                self._pending.append(ended)
                continue
            try:
                spans += self._spans(ended, record, names)
            except Exception as error:  # a trace that cannot be sent must not cost the others
                self._drop(1, f"no spans can be made: {error!r}")
                continue
            count += 1
        if not spans:
            return False
        message = {
            "resourceSpans": [
                {
                    "resource": {
                        "attributes": [{"key": "service.name", "value": {"stringValue": "sglang-ext-router"}}]
                    },
                    "scopeSpans": [{"scope": {"name": "sglang_ext_router"}, "spans": spans}],
                }
            ]
        }
        try:
            headers = {"content-type": "application/json"}
            async with session.post(self._url, data=orjson.dumps(message), headers=headers) as reply:
                if reply.status >= 300:
                    self._drop(count, f"status {reply.status}")
                    return False
        except Exception as error:  # any answer of a collector or of a proxy before it
            self._drop(count, str(error) or type(error).__name__)
            return False
        except asyncio.CancelledError:
            self._drop(count, "the router ends")
            raise
        self.counts["sent"] += count
        return True

    def _pool_records(self) -> tuple[Mapping[int, Mapping[str, Any]], Mapping[str, str]]:
        """Return the coordinator's latest report of each request, by room, and the members' names."""
        pool = self._long_pool
        answer: Any = None if pool is None else pool.answer
        try:
            members = (*answer.get("former_members", ()), *answer.get("members", ()))
            names = {str(member.get("instance")): str(member.get("name")) for member in members}
            requests = (*answer.get("recent", ()), *answer.get("requests", ()))
            return {request["room"]: request for request in requests if request.get("room") is not None}, names
        except (AttributeError, TypeError) as error:
            if answer is not None:
                logger.debug("a coordinator's status makes no spans: %r", error)
            return {}, {}

    def _spans(self, ended: Ended, record: Mapping[str, Any] | None, names: Mapping[str, str]) -> list[Span]:
        maker = SpanMaker(ended.context.trace_id, ended.unix_offset_s, self._new_id)
        prefill_id = add_request(maker, ended.context, ended.seen, ended.ended_s)
        offset_s = None if self._long_pool is None else self._long_pool.clock_offset_s
        if record is not None and prefill_id and offset_s is not None:
            try:
                add_pool(maker, prefill_id, record, names, offset_s)
            except (KeyError, TypeError, ValueError) as error:
                logger.debug("a coordinator's entry makes no spans: %r", error)
        return maker.spans

    def _new_id(self) -> str:
        return f"{self._random.getrandbits(64) or 1:016x}"

    def _drop(self, count: int, why: str) -> None:
        self.counts["dropped"] += count
        now_s = self._loop.time()
        if now_s - self._complained_s >= COMPLAIN_S:
            self._complained_s = now_s
            logger.warning("traces are dropped, %d so far: %s", self.counts["dropped"], why)
