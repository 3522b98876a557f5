"""Answers HTTP requests for many instances at once, each at a loopback address of its own, and counts them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import orjson

HEAD_END = b"\r\n\r\n"
CAPACITY_TOKENS = 1 << 20


class InstanceStandIn:
    """Instances that all say the same of themselves. Requests have no body; what is not known is answered with {}."""

    def __init__(self, info: Mapping[str, Any] | None = None) -> None:
        """`info`: what `/server_info` says in addition."""
        self.asked: Counter[str] = Counter()  # by path
        rank = {
            "num_running_reqs": 3,
            "num_waiting_uncached_tokens": 9,
            "num_used_tokens": 9,
            "max_total_num_tokens": CAPACITY_TOKENS,
        }
        server_info = {
            "served_model_name": "model",
            "max_total_num_tokens": CAPACITY_TOKENS,
            "context_length": 8192,
            "disaggregation_mode": "prefill",
            "disaggregation_bootstrap_port": 8998,
            **(info or {}),
        }
        bodies = {b"/v1/loads?include=core": {"loads": [rank]}, b"/server_info": server_info}
        self._replies = {target: _reply(orjson.dumps(body)) for target, body in bodies.items()}

    async def serve(self) -> int:
        """Listen at every address of this machine until the loop ends; return the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "0.0.0.0", 0, backlog=4096)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def answer(self, head: bytes) -> bytes:
        """Return the reply to one request."""
        target = head.split(b" ", 2)[1]
        self.asked[target.partition(b"?")[0].decode()] += 1
        return self._replies.get(target) or _reply(b"{}")


def _reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class _Connection(asyncio.Protocol):
    def __init__(self, instances: InstanceStandIn) -> None:
        self._instances = instances
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *heads, self._unread = (self._unread + data).split(HEAD_END)
        for head in heads:
            self._transport.write(self._instances.answer(head))
