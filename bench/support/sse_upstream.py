"""`python -m support.sse_upstream PORT`: a decode instance that streams; 64 events of about 200 bytes, 5 ms apart.

GET /sent tells how many events it has written.
"""

from __future__ import annotations

import asyncio
import json
import sys

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
    """Reads just enough HTTP to answer whole requests of well-behaved clients, one after the other."""

    sent_events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._input = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._input += data
        head, blank, rest = self._input.partition(b"\r\n\r\n")
        if not blank:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        if len(rest) < length:
            return
        self._input = rest[length:]
        method, target, _ = head.split(b" ", 2)
        if method == b"GET":
            self._answer(target.partition(b"?")[0])
            return
        self._transport.write(HEAD)
        self._left = EVENTS_PER_STREAM
        self._write_event()

    def _answer(self, path: bytes) -> None:
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
