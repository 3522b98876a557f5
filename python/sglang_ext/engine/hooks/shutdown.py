"""An instance that is asked to end (SIGTERM) serves what it has, takes no request that it cannot serve, and ends.

SGLang looks every 5 s whether a request is left, and then stops its scheduler. Its server goes on taking requests until
then and a moment longer: a request that comes in that moment over a kept connection waits for a scheduler that is gone,
and the process waits for that request, until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

POLL_S = 0.1
IDLE_S = 1.0  # without a request: what is on its way to decode or to a client has left
# Longer than a router takes to notice by its health checks. Requests that it still sends then are served elsewhere.
NEW_REQUESTS_FOR_S = 15.0
ABORT_PATH = "/abort_request"
FORCE_VARIABLE = "SGL_FORCE_SHUTDOWN"  # SGLang's own: do not wait
REFUSAL = b'{"error":{"message":"this instance is ending","type":"service_unavailable","param":null,"code":503}}'


class ShutdownGate:
    """Count the HTTP requests that are being served, and answer 503 to requests that come too late."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.takes_work = True  # POST of anything but an abort
        self.is_closed = False  # to all

    async def serve(self, application: Application, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse it."""
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        is_work = scope["method"] == "POST" and scope["path"] != ABORT_PATH
        if self.is_closed or (is_work and not self.takes_work):
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
            return
        self.in_flight += 1
        try:
            await application(scope, receive, send)
        finally:
            self.in_flight -= 1


GATE = ShutdownGate()  # of this process's HTTP server


class ShutdownMiddleware:
    """`GATE` in front of SGLang's application, as ASGI middleware."""

    def __init__(self, app: Application) -> None:
        self._application = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await GATE.serve(self._application, scope, receive, send)


async def end_when_idle(stock: Callable[[Any], Awaitable[None]], manager: Any) -> None:
    """AROUND `TokenizerManager.sigterm_watchdog()`: SGLang ends its processes once nothing can be lost by that.

    Nothing is left to do when no request was known for `IDLE_S` and none is on any connection. An instance that SGLang
    takes for ill, and a shutdown that is not to wait, is left to SGLang at once.
    """
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    while not manager.gracefully_exit:  # noqa: ASYNC110 - SGLang sets a flag, no event
        await asyncio.sleep(POLL_S)
    asked_s = idle_since_s = time.monotonic()
    while manager.server_status != ServerStatus.UnHealthy and FORCE_VARIABLE not in os.environ:
        now_s = time.monotonic()
        GATE.takes_work = now_s - asked_s < NEW_REQUESTS_FOR_S
        if manager.rid_to_state:
            idle_since_s = now_s
        elif now_s - idle_since_s >= IDLE_S and not GATE.in_flight:
            break
        await asyncio.sleep(POLL_S)
    GATE.is_closed = True
    await stock(manager)
