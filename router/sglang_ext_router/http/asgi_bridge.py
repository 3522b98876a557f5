"""Run the FastAPI control plane for requests that are not generation requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sglang_ext_router.http import replies
from sglang_ext_router.http.access import PROBE_PATHS
from sglang_ext_router.http.http1 import ClientConnection
from sglang_ext_router.http.request_parser import Request
from sglang_ext_router.observe.access_log import AccessEntry, AccessLog, peer_of

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


class AsgiCall:
    """Serves one request by an ASGI application: with its whole body, and a reply that is sent in one piece."""

    def __init__(
        self, app: AsgiApp, connection: ClientConnection, request: Request, access_log: AccessLog | None = None
    ) -> None:
        self._connection = connection
        self._access_log = access_log
        self._started_s = asyncio.get_running_loop().time()
        self._request = request
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._is_gone = asyncio.Event()
        self._received = False
        self._task = asyncio.get_running_loop().create_task(self._run(app))

    def on_client_gone(self) -> None:
        self._is_gone.set()

    def pause(self) -> None:
        """Do nothing: replies of the control plane are small enough to be buffered."""

    def resume(self) -> None:
        """Do nothing, as `pause` does."""

    async def _run(self, app: AsgiApp) -> None:
        request = self._request
        server = self._connection.transport.get_extra_info("sockname")
        client = self._connection.transport.get_extra_info("peername")
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1" if request.is_http_11 else "1.0",
            "method": request.method.decode("ascii", "replace"),
            "scheme": "http" if self._connection.transport.get_extra_info("ssl_object") is None else "https",
            "path": request.path.decode("utf-8", "replace"),
            "raw_path": request.path,
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "server": server[:2] if server else None,
            "client": client[:2] if client else None,
        }
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            self._status, self._headers = 500, [(b"content-type", b"application/json")]
            self._body = [replies.error_json(500, "internal error of the router")]
        self._log(499 if self._is_gone.is_set() else self._status)
        if not self._is_gone.is_set():
            self._reply()

    def _log(self, status: int) -> None:
        request = self._request
        if self._access_log is None or (request.path in PROBE_PATHS and status < 400):  # probes are no clients
            return
        outcome = "client_left" if status == 499 else "ok" if status < 400 else "error_before"
        total_s = asyncio.get_running_loop().time() - self._started_s
        path, method = request.path.decode("latin-1"), request.method.decode("latin-1")
        client = peer_of(self._connection.transport)
        self._access_log.add(AccessEntry(path, status, outcome, total_s, client=client, method=method))

    async def _receive(self) -> Message:
        if not self._received:
            self._received = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))

    def _reply(self) -> None:
        kept = [
            (name, value) for name, value in self._headers if name.lower() not in {b"content-length", b"connection"}
        ]
        content_type = next((value for name, value in kept if name.lower() == b"content-type"), b"text/plain")
        extra = b"".join(b"%b: %b\r\n" % pair for pair in kept if pair[0].lower() != b"content-type")
        self._connection.respond(self._status, b"".join(self._body), content_type, extra)
