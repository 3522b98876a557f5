"""An HTTP/1.1 client over a bare socket, for tests that care about every byte. Replies are parsed strictly."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from support.running_time import running_s

_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [\t\x20-\x7e]*")
_HEADER_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+): ?([\t\x20-\x7e\x80-\xff]*)")

CLIENT_TIMEOUT_S = 10.0
KEPT_BYTES = 1 << 14  # of a reply, for the message if it breaks off


class Reply(NamedTuple):
    """A whole reply. Header names are lower case; `chunks` is None where the body had a length."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: tuple[bytes, ...] | None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked to be in OpenAI's shape."""
        content = self.json
        assert set(content) == {"error"}, content
        error = content["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        codes = ("model_not_found", "context_length_exceeded", "rate_limit_exceeded", "request_too_large")
        assert error["code"] in (self.status, *codes), error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert "\n" not in error["message"]
        assert self.headers["content-type"].startswith("application/json")
        return dict(error)


class BrokenReplyError(Exception):
    """The connection ended, or what came was not a whole well-formed reply; `got` is the end of what had come."""

    def __init__(self, why: str, got: bytes = b"") -> None:
        super().__init__(f"{why}: {got[-200:]!r}")
        self.got = got


def request_bytes(
    method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None, version: str = "1.1"
) -> bytes:
    """A request with Host and, if there is a body, Content-Length."""
    lines = [f"{method} {target} HTTP/{version}", "Host: router"]
    if body or method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class RawClient:
    """One connection. Every read gives up after `CLIENT_TIMEOUT_S`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._got = b""  # of the reply being read

    @classmethod
    async def connect(cls, port: int, receive_buffer_bytes: int | None = None) -> RawClient:
        """Connect to this host; a small receive buffer makes the sender feel a slow reader."""
        sock = socket.socket()
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except OSError:
            sock.close()
            raise
        limit = 1 << 26 if receive_buffer_bytes is None else receive_buffer_bytes
        return cls(*await asyncio.open_connection(sock=sock, limit=limit))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def ask(
        self,
        method: str,
        target: str,
        content: object = None,
        headers: Mapping[str, str] | None = None,
        version: str = "1.1",
    ) -> Reply:
        """Send a request with a JSON body (bytes are sent as they are) and read its reply."""
        body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        await self.send(request_bytes(method, target, body, headers, version))
        return await self.reply(has_body=method != "HEAD")

    async def reply(self, has_body: bool = True) -> Reply:
        """Read one reply; BrokenReplyError if there is none."""
        self._got = b""
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                return await self._reply(has_body)
        except asyncio.IncompleteReadError as error:
            raise BrokenReplyError("connection closed", self._got + error.partial) from None
        except ConnectionError as error:
            raise BrokenReplyError(type(error).__name__, self._got) from None
        except TimeoutError:
            raise BrokenReplyError("no reply in time", self._got) from None

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read status and headers."""
        head = await self._until(b"\r\n\r\n")
        lines = head[:-4].split(b"\r\n")
        first = _STATUS_LINE.fullmatch(lines[0])
        if first is None:
            raise BrokenReplyError("status line", lines[0])
        headers: dict[str, str] = {}
        for line in lines[1:]:
            match = _HEADER_LINE.fullmatch(line)
            if match is None:
                raise BrokenReplyError("header line", line)
            name = match[1].decode().lower()
            if name in headers:
                raise BrokenReplyError("header twice", line)
            headers[name] = match[2].decode("latin-1")
        return int(first[1]), headers

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; empty at the end."""
        size_line = await self._until(b"\r\n")
        if not re.fullmatch(rb"[0-9a-f]+\r\n", size_line):
            raise BrokenReplyError("chunk size", size_line)
        size = int(size_line, 16)
        data = await self._exactly(size + 2)
        if not data.endswith(b"\r\n"):
            raise BrokenReplyError("chunk end", data)
        return data[:-2]

    async def exactly(self, count: int) -> bytes:
        """The next bytes, whatever they are."""
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            return await self._exactly(count)

    async def rest(self) -> bytes:
        """Everything until the connection is closed, in whichever way."""
        got = b""
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                while piece := await self._reader.read(1 << 16):
                    got += piece
        except ConnectionError:
            pass
        return got

    async def is_closed_within(self, seconds: float) -> bool:
        """Whether the router closes the connection, without another byte, in that time."""
        end_s = running_s() + seconds
        while True:
            try:
                async with asyncio.timeout(max(0.01, end_s - running_s())):
                    return await self._reader.read(1) == b""
            except ConnectionError:
                return True
            except TimeoutError:
                if running_s() >= end_s:
                    return False

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Leave at once: the other side gets RST."""
        self._writer.transport.abort()

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def resume_reading(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _reply(self, has_body: bool) -> Reply:
        status, headers = await self.head()
        if status == 100:
            return Reply(status, headers, b"", None)
        if "transfer-encoding" in headers:
            if headers["transfer-encoding"] != "chunked" or "content-length" in headers:
                raise BrokenReplyError("framing", repr(headers).encode())
            chunks: list[bytes] = []
            while piece := await self.chunk():
                chunks.append(piece)
            return Reply(status, headers, b"".join(chunks), tuple(chunks))
        if has_body and "content-length" not in headers:
            if headers.get("connection") != "close":
                raise BrokenReplyError("framing", repr(headers).encode())
            return Reply(status, headers, await self._reader.read(), None)
        length = int(headers["content-length"]) if has_body else 0
        return Reply(status, headers, await self._exactly(length), None)

    async def _until(self, end: bytes) -> bytes:
        try:
            data = await self._reader.readuntil(end)
        except asyncio.LimitOverrunError:
            raise BrokenReplyError("line too long", self._got) from None
        self._got = (self._got + data)[-KEPT_BYTES:]
        return data

    async def _exactly(self, count: int) -> bytes:
        data = await self._reader.readexactly(count)
        self._got = (self._got + data)[-KEPT_BYTES:]
        return data
