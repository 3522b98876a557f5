"""A completion endpoint that costs next to nothing: `python -m support.batch_stand_in PORT`.

Every POST gets the same small reply after `--delay-ms`; everything else 404. It keeps no count of what it served.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import uvloop

BODY = (
    b'{"id":"cmpl-1","object":"text_completion","model":"stand-in","choices":[{"index":0,"text":" yes, and more of it",'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":40,"completion_tokens":6,"total_tokens":46}}'
)
_REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
_UNKNOWN = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class _Connection(asyncio.Protocol):
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of another class

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            size = 0
            if (at := head.find(b"content-length:")) >= 0:
                size = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._received) < end + 4 + size:
                return
            self._received = self._received[end + 4 + size :]
            reply = _REPLY if head.startswith(b"post ") else _UNKNOWN
            if self._delay_s:
                asyncio.get_running_loop().call_later(self._delay_s, self._answer, reply)
            else:
                self._answer(reply)

    def _answer(self, reply: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(reply)


async def _serve(port: int, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(delay_s), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    arguments = parser.parse_args()
    uvloop.run(_serve(arguments.port, arguments.delay_ms / 1000))


if __name__ == "__main__":
    main()
