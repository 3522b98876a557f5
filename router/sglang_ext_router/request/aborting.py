"""Has instances drop requests whose client or other leg has gone.

Closing a leg's connection is not enough: SGLang looks for closed connections only every few seconds, and a
decode instance would keep waiting for KV that never comes.

A request may have hundreds of sequences, and a stock instance needs a call for each: calls are paced, so that neither
the router nor the instance has more than a few of them under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import orjson

from sglang_ext_router.decide.pd_actions import Leg
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.request.upstream import NO_ATTEMPT, UpstreamConnection, UpstreamPools

# The first abort can arrive before the instance has registered the request; unknown ids are ignored there.
REPEAT_AFTER_S = 0.5
CALLS_AT_ONCE = 8  # to one instance, each on a connection that is kept
CALL_TIMEOUT_S = 10.0
ALL = ""  # in place of an id


class Aborter:
    """Sends aborts without waiting for answers: an instance that cannot be reached has nothing left to abort."""

    def __init__(self, pools: UpstreamPools, authorization: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._pools = pools
        self._authorization = authorization
        self._loop = loop
        self._queues: dict[int, _AbortQueue] = {}  # of instances with calls under way or waiting

    def abort(self, worker: Worker, request_ids: Sequence[str] | None) -> None:
        """Abort these requests on an instance, now and once more a little later; None: all of its requests, once."""
        if request_ids is None:
            self._send(worker, [ALL])
            return
        self._send(worker, request_ids)
        self._loop.call_later(REPEAT_AFTER_S, self._send, worker, request_ids)

    def _send(self, worker: Worker, request_ids: Sequence[str]) -> None:
        queue = self._queues.get(worker.id)
        if queue is None:
            queue = _AbortQueue(worker, self._pools, self._authorization, self._loop)
            self._queues[worker.id] = queue
        queue.add(request_ids)
        if not queue.is_busy:
            del self._queues[worker.id]

    @property
    def is_busy(self) -> bool:
        """Return whether an abort is on its way, or waits to be sent."""
        return any(queue.is_busy for queue in self._queues.values())


class _AbortQueue:
    """The abort calls to one instance: it owns the calls under way, and keeps the ids that wait."""

    def __init__(
        self, worker: Worker, pools: UpstreamPools, authorization: bytes, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._worker = worker
        self._pools = pools
        self._authorization = authorization
        self._loop = loop
        self._waiting: deque[str] = deque()
        self._calls: dict[UpstreamConnection, str] = {}  # under way, and what they abort

    @property
    def is_busy(self) -> bool:
        return bool(self._calls or self._waiting)

    def add(self, request_ids: Sequence[str]) -> None:
        """Send as many calls as may be under way now, and the others as answers come."""
        self._waiting.extend(request_ids)
        if len(self._calls) >= CALLS_AT_ONCE:
            overdue_s = self._loop.time() - CALL_TIMEOUT_S
            for call in [call for call in self._calls if call.sent_s < overdue_s]:
                call.lose()
        self._send_next()

    def _send_next(self) -> None:
        worker = self._worker
        if not worker.is_healthy:
            self._waiting.clear()
        while self._waiting and len(self._calls) < CALLS_AT_ONCE:
            request_id = self._waiting.popleft()
            body = orjson.dumps({"rid": request_id, "abort_all": True} if request_id == ALL else {"rid": request_id})
            head = worker.request_head(b"/abort_request")
            request = b"%b%bcontent-length: %d\r\n\r\n%b" % (head, self._authorization, len(body), body)
            self._calls[self._pools.start(worker, self, Leg.PREFILL, NO_ATTEMPT, request)] = request_id

    def on_leg_head(self, leg: UpstreamConnection) -> None: ...

    def on_leg_body(self, leg: UpstreamConnection) -> None: ...

    def on_leg_complete(self, leg: UpstreamConnection) -> None:
        del self._calls[leg]
        self._loop.call_soon(self._send_next)  # once its connection is free again

    def on_leg_lost(self, leg: UpstreamConnection) -> None:
        del self._calls[leg]
        self._loop.call_soon(self._send_next)

    def on_leg_stale(self, leg: UpstreamConnection) -> None:
        self._waiting.appendleft(self._calls.pop(leg))  # aborting twice does no harm
        self._loop.call_soon(self._send_next)
