"""A publisher of one rank's load as SGLang's, and as the one of `sglang-ext worker`, which has a second message."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq


class LoadPublisher:
    """A PUB socket on a port of its own, or on a given one."""

    def __init__(self, port: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        if port:
            self._socket.bind(f"tcp://127.0.0.1:{port}")
        self.port = port or self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._number = 0

    def publish(self, *fields: object, topic: bytes = b"load") -> None:
        """Publish SGLang's message with these fields."""
        self._send(topic, ["LoadStat", *fields])

    def supplement(self, awaiting_tokens: int, queues: dict[str, Any] | None = None) -> None:
        """Publish the second message."""
        self._send(b"sglang_ext", {"awaiting_tokens": awaiting_tokens, "queues": queues})

    def _send(self, topic: bytes, content: object) -> None:
        self._socket.send_multipart((topic, self._number.to_bytes(8, "big"), msgspec.msgpack.encode(content)))
        self._number += 1

    def stop(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
