"""Tells instances to drop requests whose client or other leg has gone.

Closing a leg's connection is not enough: SGLang looks for closed connections only every few seconds, and a
decode instance would keep waiting for KV that never comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson

from sglang_ext.policy.routing.pd_actions import Leg
from sglang_ext_router.upstream import UpstreamConnection, UpstreamPools
from sglang_ext_router.workers import Worker

# The first abort can arrive before the instance has registered the request; unknown ids are ignored there.
REPEAT_AFTER_S = 0.5


class Aborter:
    """Fire and forget: an instance that cannot be reached has nothing left to abort."""

    def __init__(self, pools: UpstreamPools, authorization: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._pools = pools
        self._authorization = authorization
        self._loop = loop
        self._calls = _AbortCalls()

    def abort(self, worker: Worker, request_ids: Sequence[str]) -> None:
        """Abort these requests on an instance, now and once more a little later."""
        self._send(worker, request_ids)
        self._loop.call_later(REPEAT_AFTER_S, self._send, worker, request_ids)

    def _send(self, worker: Worker, request_ids: Sequence[str]) -> None:
        if not worker.is_healthy:
            return
        for request_id in request_ids:
            body = orjson.dumps({"rid": request_id})
            head = worker.request_head(b"/abort_request")
            request = b"%b%bcontent-length: %d\r\n\r\n%b" % (head, self._authorization, len(body), body)
            self._calls.open_requests += 1
            self._pools.start(worker, self._calls, Leg.PREFILL, 0, request)

    @property
    def is_busy(self) -> bool:
        """Whether an abort is on its way."""
        return self._calls.open_requests > 0


class _AbortCalls:
    """Owner of requests whose answers are of no interest."""

    def __init__(self) -> None:
        self.open_requests = 0

    def on_leg_head(self, leg: UpstreamConnection) -> None: ...

    def on_leg_body(self, leg: UpstreamConnection) -> None: ...

    def on_leg_complete(self, leg: UpstreamConnection) -> None:
        self.open_requests -= 1

    def on_leg_lost(self, leg: UpstreamConnection) -> None:
        self.open_requests -= 1

    def replace_leg(self, lost: UpstreamConnection, fresh: UpstreamConnection) -> None: ...
