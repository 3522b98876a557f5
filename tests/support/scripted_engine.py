"""An HTTP server in the place of one SGLang instance, for tests that decide byte by byte how it behaves.

    engine = ScriptedEngine(Role.DECODE)
    await engine.start()
    engine.plan(status(503), reply({"text": "second try"}))

A generation request plays the next planned script, else `engine.script`. Requests are parsed strictly: one that
is not exactly what an HTTP/1.1 client should send is noted in `engine.malformed`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, cast

from sglang_ext.types import Role
from support.running_time import pause, running_s

GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"})
GENERATION_PATHS |= {"/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"}
MODEL = "m"
CONTEXT_TOKENS = 8192
BOOTSTRAP_PORT = 8998

_REQUEST_LINE = re.compile(rb"(POST|GET) (/[!-~]*) HTTP/1\.1")
_HEADER_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")


class Received(NamedTuple):
    """A request as it arrived. Header names are lower case."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    at_s: float  # clock of the event loop
    connection: int  # number of the connection that brought it
    is_reused: bool  # whether that connection had brought another one before

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def room(self) -> int:
        room = self.json["bootstrap_room"]
        assert type(room) is int
        return room

    @property
    def rid(self) -> Any:
        return self.json["rid"] if "rid" in self.json else self.json["request_id"]

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, f"{name} occurs {len(values)} times"
        return values[0] if values else None


class Abort(NamedTuple):
    """An /abort_request that arrived."""

    rid: str
    at_s: float


class Turn:
    """One request being answered by a script."""

    def __init__(self, engine: ScriptedEngine, connection: _Connection, request: Received) -> None:
        self.engine = engine
        self.request = request
        self.aborted = asyncio.Event()  # an /abort_request named it
        self.gone = connection.gone  # its connection is closed
        self._connection = connection

    async def write(self, data: bytes) -> None:
        """Write, and wait while the other side does not read, or the engine is frozen."""
        await self.engine.thawed.wait()
        if not self.gone.is_set():
            self._connection.transport.write(data)
            await self._connection.writable()

    async def write_in_pieces(self, data: bytes, piece_bytes: int, pause_s: float = 0.0005) -> None:
        """Write so that the reader most likely gets every piece alone."""
        for start in range(0, len(data), piece_bytes):
            await self.write(data[start : start + piece_bytes])
            await asyncio.sleep(pause_s)

    def cut(self) -> None:
        """Close the connection at once, unread data or not."""
        self._connection.transport.abort()

    def close(self) -> None:
        """Close the connection once all is written."""
        self._connection.transport.close()

    async def until_aborted(self) -> None:
        """Return when an /abort_request names the request or its connection is closed."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.aborted, self.gone)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


Script: TypeAlias = Callable[[Turn], Awaitable[None]]


# -- replies as bytes ---------------------------------------------------------------------------------------


def response(body: bytes, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A whole response with Content-Length."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{lines}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream_head(headers: Sequence[tuple[str, str]] = ()) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{lines}transfer-encoding: chunked\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(content: object) -> bytes:
    """One SSE event, as SGLang writes it."""
    return b"data: %b\n\n" % (content if isinstance(content, bytes) else json.dumps(content).encode())


OK = {"text": "ok", "usage": {"prompt_tokens": 7}}
STREAM_END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


# -- scripts ------------------------------------------------------------------------------------------------


def reply(
    content: object = OK, status: int = 200, headers: Sequence[tuple[str, str]] = (), delay_s: float = 0.0
) -> Script:
    """Answer with JSON."""
    body = json.dumps(content).encode()

    async def play(turn: Turn) -> None:
        if delay_s:
            await pause(delay_s)
        await turn.write(response(body, status, headers))

    return play


def status(code: int, message: str = "scripted", delay_s: float = 0.0) -> Script:
    """Answer with an error in SGLang's shape."""
    return reply({"error": {"message": message, "code": code}}, code, delay_s=delay_s)


def stream(*events: bytes, delay_s: float = 0.0, end: bytes = STREAM_END) -> Script:
    """Answer with SSE events, one chunk each."""

    async def play(turn: Turn) -> None:
        await turn.write(stream_head())
        for one in events:
            if delay_s:
                await pause(delay_s)
            await turn.write(chunk(one))
        await turn.write(end)

    return play


def one_token_until(release: asyncio.Event) -> Script:
    """A stream whose first token comes at once, and whose end when `release` is set."""

    async def play(turn: Turn) -> None:
        await turn.write(stream_head() + chunk(event({"text": "a"})))
        await release.wait()
        await turn.write(chunk(DONE) + STREAM_END)

    return play


def raw(*pieces: bytes, pause_s: float = 0.0, then: str = "keep") -> Script:
    """Write these bytes; `then` is keep, hang, close or cut."""

    async def play(turn: Turn) -> None:
        for piece in pieces:
            await turn.write(piece)
            if pause_s:
                await asyncio.sleep(pause_s)
        if then == "hang":
            await turn.until_aborted()
        elif then == "close":
            turn.close()
        elif then == "cut":
            await asyncio.sleep(0.01)  # what was written shall arrive
            turn.cut()
        else:
            assert then == "keep"

    return play


def hang(first: bytes = b"") -> Script:
    """Write `first`, then nothing until the request is aborted."""
    return raw(first, then="hang") if first else raw(then="hang")


def cut(after: bytes = b"") -> Script:
    """Write `after`, then drop the connection."""
    return raw(after, then="cut") if after else raw(then="cut")


def in_pieces(data: bytes, piece_bytes: int) -> Script:
    """Write a whole response in small packets."""

    async def play(turn: Turn) -> None:
        await turn.write_in_pieces(data, piece_bytes)

    return play


def drop_when_reused(script: Script) -> Script:
    """Close a kept connection at its next request, as a server does whose idle timeout has just passed."""

    async def play(turn: Turn) -> None:
        if turn.request.is_reused:
            turn.cut()
        else:
            await script(turn)

    return play


# -- the engine ---------------------------------------------------------------------------------------------


class ScriptedEngine:
    """One instance. `requests` holds the generation requests, `control` all others but health and load checks."""

    def __init__(self, role: Role, script: Script | None = None) -> None:
        self.role = role
        self.script: Script = script or reply()
        self.requests: list[Received] = []
        self.control: list[Received] = []
        self.aborts: list[Abort] = []
        self.malformed: list[str] = []
        self.turns: list[Turn] = []  # under way
        self.health_status: int | None = 200  # None: no answer at all
        self.health_checks = 0
        self.liveness_delay_s: float | None = 0.0  # None: no answer at all
        self.liveness_checks = 0
        self.info: object = {
            "disaggregation_mode": {Role.DECODE: "decode", Role.PLAIN: "null"}.get(role, "prefill"),
            "served_model_name": MODEL,
            "max_total_num_tokens": 1 << 20,
            "context_length": CONTEXT_TOKENS,
            "disaggregation_bootstrap_port": BOOTSTRAP_PORT,
            "sglang_ext": {"hooks": ["parallel-samples"]},
        }
        self.is_generation = True  # by its /model_info; else it embeds
        self.loads_read = 0
        self.loads: object = {"loads": [{"num_running_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 1 << 20}]}
        self.pages: dict[str, Script] = {}  # path → answer to what is no generation, in place of an echo
        self.connections_made = 0
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.port = 0
        self._planned: deque[Script] = deque()
        self._open: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        """Listen; on the same port as before after a stop."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As if killed: the port is closed, and every connection is cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self._open):
            connection.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.sleep(0)

    def plan(self, *scripts: Script) -> None:
        """The next generation requests play these, one each."""
        self._planned.extend(scripts)

    def close_port(self) -> None:
        """Take no more connections, as a server that ends once its requests are served."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def freeze(self) -> None:
        """As if stopped by SIGSTOP: connections are accepted and stay open, and nothing is written."""
        self.thawed.clear()

    def thaw(self) -> None:
        """Go on where it was frozen."""
        self.thawed.set()

    def close_idle(self) -> None:
        """Close the connections on which nothing is under way."""
        for connection in tuple(self._open):
            if not connection.is_busy:
                connection.transport.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        return len(self._open)

    async def received(self, count: int, within_s: float = 5.0) -> list[Received]:
        """Wait until so many generation requests have arrived in all."""
        await self._until(lambda: len(self.requests) >= count, within_s, f"{count} requests")
        return self.requests

    async def abort_of(self, rid: str, within_s: float = 5.0) -> Abort:
        """Wait for an abort of this very id; the first."""
        await self._until(lambda: any(abort.rid == rid for abort in self.aborts), within_s, f"abort of {rid}")
        return next(abort for abort in self.aborts if abort.rid == rid)

    async def _until(self, is_so: Callable[[], bool], within_s: float, what: str) -> None:
        end_s = running_s() + within_s
        while not is_so():
            left_s = end_s - running_s()
            assert left_s > 0, f"{self.role} engine: no {what} within {within_s} s"
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._arrived.wait()

    # -- called by the connections --

    def opened(self, connection: _Connection) -> int:
        self._open.add(connection)
        self.connections_made += 1
        return self.connections_made

    def closed(self, connection: _Connection) -> None:
        self._open.discard(connection)

    def serve(self, connection: _Connection, request: Received) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(connection, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, connection: _Connection, request: Received) -> None:
        turn = Turn(self, connection, request)
        if request.path in GENERATION_PATHS:
            self.requests.append(request)
            self.turns.append(turn)
            script = self._planned.popleft() if self._planned else self.script
        else:
            script = self._control(request)
        self._arrived.set()
        try:
            await script(turn)
        finally:
            if turn in self.turns:
                self.turns.remove(turn)
            connection.answered()

    def _control(self, request: Received) -> Script:
        if request.path == "/health":
            self.health_checks += 1
            return hang() if self.health_status is None else reply({}, self.health_status)
        if request.path == "/v1/loads":
            self.loads_read += 1
            return reply(self.loads)
        if request.path == "/ping":
            self.liveness_checks += 1
            return hang() if self.liveness_delay_s is None else reply({}, 404, delay_s=self.liveness_delay_s)
        self.control.append(request)
        if request.path == "/server_info":
            return reply(self.info)
        if request.path == "/model_info" and not self.is_generation:
            return reply({"is_generation": False})
        if request.path == "/abort_request":
            return self._abort(request)
        if request.path in self.pages:
            return self.pages[request.path]
        known = {"/flush_cache", "/v1/models", "/model_info", "/v1/messages/count_tokens"}
        known |= {"/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize"}
        known |= {"/parse_function_call", "/separate_reasoning", "/api/show"}
        return reply({"path": request.path, "got": request.body.decode()}, 200 if request.path in known else 404)

    def _abort(self, request: Received) -> Script:
        rid = request.json["rid"]
        self.aborts.append(Abort(rid, request.at_s))
        for turn in self.turns:
            # SGLang's scheduler matches the beginning of ids; those of a batch are ID_0, ID_1, ...
            if f"{turn.request.rid}_0".startswith(rid):
                turn.aborted.set()
        return reply({})


class _Connection(asyncio.Protocol):
    """Parses strictly, one request at a time."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._buffer = b""
        self._requests = 0
        self._number = 0
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.is_busy = False
        self.gone = asyncio.Event()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._number = self._engine.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        self._can_write.set()
        self._engine.closed(self)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    async def writable(self) -> None:
        await self._can_write.wait()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._take_next()

    def answered(self) -> None:
        self.is_busy = False
        self._take_next()

    def _take_next(self) -> None:
        end = -1 if self.is_busy else self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        try:
            self._take(end)
        except ValueError as error:
            self._engine.malformed.append(str(error))
            self.transport.abort()

    def _take(self, end: int) -> None:
        """Take a request whose head is complete; ValueError if it is not well formed."""
        lines = self._buffer[:end].split(b"\r\n")
        first = _REQUEST_LINE.fullmatch(lines[0])
        if first is None:
            raise ValueError(f"request line {lines[0]!r}")
        headers = []
        for line in lines[1:]:
            match = _HEADER_LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"header line {line!r}")
            headers.append((match[1].decode().lower(), match[2].decode("latin-1").rstrip(" \t")))
        names = [name for name, _ in headers]
        if names.count("host") != 1 or "transfer-encoding" in names or names.count("content-length") > 1:
            raise ValueError(f"framing headers {headers}")
        length = int(dict(headers).get("content-length", "0"))
        body = self._buffer[end + 4 : end + 4 + length]
        if len(body) < length:
            return
        if len(self._buffer) > end + 4 + length:
            raise ValueError(f"{self._buffer[end + 4 + length :][:80]!r} behind a request")
        self._buffer = b""
        self._requests += 1
        self.is_busy = True
        request = Received(
            first[1].decode(),
            first[2].decode(),
            tuple(headers),
            body,
            asyncio.get_running_loop().time(),
            self._number,
            self._requests > 1,
        )
        if request.path in GENERATION_PATHS and type(request.json) is not dict:
            raise ValueError(f"body {body[:80]!r}")
        self._engine.serve(self, request)
