"""`python -m support.sse_upstream PORT`: a decode instance that streams; 64 events of about 200 bytes, 5 ms apart.

GET /sent returns how many events it has written.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import httptools
import uvloop

from support.static_upstreams import control_replies

EVENTS_PER_STREAM = 64
INTERVAL_S = 0.005

_EVENT = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": " hello"}, "logprobs": None, "finish_reason": None}],
}


def _chunk(payload: bytes) -> bytes:
    event = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


CHUNK = _chunk(json.dumps(_EVENT).encode())
END = _chunk(b"[DONE]") + b"0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CONTROL = {path.encode(): json.dumps(reply).encode() for path, reply in control_replies("decode", None).items()}


class StreamingInstance(asyncio.Protocol):
    """Answers the requests of one connection, one after the other."""

    sent_events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._target = b""

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_message_complete(self) -> None:
        path = self._target.partition(b"?")[0]
        if path == b"/v1/chat/completions":
            self._transport.write(HEAD)
            self._left = EVENTS_PER_STREAM
            self._write_event()
            return
        body = b"%d" % StreamingInstance.sent_events if path == b"/sent" else CONTROL.get(path, b"{}")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _write_event(self) -> None:
        if self._transport.is_closing():
            return
        if self._left == 0:
            self._transport.write(END)
            return
        self._left -= 1
        StreamingInstance.sent_events += 1
        self._transport.write(CHUNK)
        asyncio.get_running_loop().call_later(INTERVAL_S, self._write_event)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(StreamingInstance, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
