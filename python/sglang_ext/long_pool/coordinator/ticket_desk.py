"""`POST /tickets` of a coordinator: a router announces a long prompt, and is answered when its turn has come.

The request waits until a member has been named. A router that closes its connection before that withdraws the prompt.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from sglang_ext.identifiers import BootstrapRoom
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.tickets import Announcement, BoundPrompt, TicketError, TicketProblem
from sglang_ext.long_pool.decide.kept_prompts import PromptText
from sglang_ext.long_pool.messages import AddressedMessage
from sglang_ext.long_pool.wire_types import Count

TICKETS_PATH = "/tickets"
_ROOM_BITS = 63  # of SGLang's
_MOST_TOKENS = 2**31
_MOST_PREFIXES = 1024
_STATUSES = {
    TicketProblem.BAD: HTTPStatus.BAD_REQUEST,
    TicketProblem.NO_POOL: HTTPStatus.SERVICE_UNAVAILABLE,
    TicketProblem.KNOWN: HTTPStatus.CONFLICT,
    TicketProblem.TOO_MANY: HTTPStatus.TOO_MANY_REQUESTS,
    TicketProblem.TOO_SHORT: HTTPStatus.UNPROCESSABLE_ENTITY,
}


class TicketDesk:
    """The routers that wait. Everything happens in the event loop's thread."""

    def __init__(self, protocol: PoolProtocol, deliver: Callable[[Sequence[AddressedMessage]], None]) -> None:
        """`deliver` sends what follows for members, and hands what has become of prompts to `settle`."""
        self._protocol = protocol
        self._deliver = deliver
        self._waiting: dict[BootstrapRoom, asyncio.Future[BoundPrompt | None]] = {}  # None: no member is left

    async def post(self, request: web.Request) -> web.Response:
        """The handler of `POST /tickets`; it is to be cancelled when the connection ends."""
        try:
            ticket = read_announcement(await request.read())
            messages = self._protocol.announce(ticket, time.monotonic())
        except TicketError as error:
            return _error(error)
        named = self._waiting[ticket.room] = asyncio.get_running_loop().create_future()
        try:
            self._deliver(messages)
            bound = await named
        except asyncio.CancelledError:
            self._deliver(self._protocol.withdraw(ticket.room, time.monotonic()))
            raise
        finally:
            del self._waiting[ticket.room]
        if bound is None:
            return _error(TicketError(TicketProblem.NO_POOL, "the pool has lost its members"))
        answer = {"ticket": ticket.room, "instance": bound.name, "members": bound.members, "chunk_s": bound.chunk_s}
        return web.json_response(answer)

    def settle(self, bound: Iterable[BoundPrompt], unserved: Iterable[BootstrapRoom]) -> None:
        """Answer those whose turn has come, and those whose turn will not come."""
        for room, prompt in (*((prompt.room, prompt) for prompt in bound), *((room, None) for room in unserved)):
            named = self._waiting.get(room)
            if named is not None and not named.done():
                named.set_result(prompt)


def _error(error: TicketError) -> web.Response:
    status = _STATUSES[error.problem]
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    described = {"message": str(error), "type": kind, "param": None, "code": error.problem.value}
    return web.json_response({"error": described}, status=status)


def read_announcement(body: bytes) -> Announcement:
    """The announcement that a body of JSON is. TicketError names the field that is not as it should be."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise TicketError(TicketProblem.BAD, "the body is not JSON") from None
    if not isinstance(fields, dict):
        raise TicketError(TicketProblem.BAD, "the body is not an object")
    known = ("ticket", "tokens", "cached_tokens", "waited_s", "slack_s", "online", "prefixes")
    for name in fields:
        if name not in known:
            raise TicketError(TicketProblem.BAD, f"{name!r} is no field of a ticket ({', '.join(known)})")
    tokens = _count(fields, "tokens", 1, _MOST_TOKENS)
    waited_s = _seconds(fields, "waited_s", 0.0)
    if waited_s < 0:
        raise TicketError(TicketProblem.BAD, "waited_s is below 0")
    is_online = fields.get("online", True)
    if type(is_online) is not bool:
        raise TicketError(TicketProblem.BAD, "online must be true or false")
    return Announcement(
        _count(fields, "ticket", 0, 2**_ROOM_BITS - 1),
        tokens,
        _count(fields, "cached_tokens", 0, tokens - 1, default=0),
        waited_s,
        None if fields.get("slack_s") is None else _seconds(fields, "slack_s", 0.0),
        is_online,
        _text(fields.get("prefixes")),
    )


def _text(prefixes: Any) -> PromptText | None:
    if prefixes is None:
        return None
    try:
        pairs = msgspec.convert(prefixes, list[tuple[Count, Count]])
    except msgspec.ValidationError as error:
        raise TicketError(TicketProblem.BAD, f"prefixes must be pairs of a hash and tokens ({error})") from None
    if len(pairs) > _MOST_PREFIXES:
        raise TicketError(TicketProblem.BAD, f"{len(pairs)} prefixes, at most {_MOST_PREFIXES} are taken")
    return PromptText(tuple(text_hash for text_hash, _ in pairs), tuple(tokens for _, tokens in pairs))


def _count(fields: dict[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise TicketError(TicketProblem.BAD, f"{name} must be a whole number from {least} to {most}")
    return value


def _seconds(fields: dict[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if type(value) not in (int, float) or not abs(value) <= _MOST_TOKENS or not math.isfinite(value):
        raise TicketError(TicketProblem.BAD, f"{name} must be a number of seconds")
    return float(value)
