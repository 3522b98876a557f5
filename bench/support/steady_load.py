"""Streams at a constant rate, sent to whichever routers are ready in turn; every end is judged.

Each user keeps its connection, as SDKs do, and goes to the next ready router when the router closes it, and now and
then by itself. A request whose connection is lost before the reply counts as failed: nothing is sent twice here.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import aiohttp

REQUESTS_PER_CONNECTION = 12
OUTPUT_TOKENS = (16, 256, 64, 1024)
LONG_EVERY = 4  # requests


class Ended(NamedTuple):
    """A request that is over; times on the monotonic clock."""

    started_s: float
    first_token_s: float | None
    ended_s: float
    outcome: str  # ok, failed or hung
    detail: str
    router: str
    prefill: str
    decode: str

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else (self.first_token_s - self.started_s) * 1e3


class SteadyLoad:
    """Users who each send a request every `period_s`, independently of the other users."""

    def __init__(
        self,
        routers: Callable[[], Sequence[str]],
        *,
        users: int,
        period_s: float,
        boundary_tokens: int,
        limit_s: float = 60.0,
    ) -> None:
        """Send until the end; `routers` returns the URLs of ready routers. A request that lasts `limit_s` is hung."""
        self._routers = routers
        self._users = users
        self._period_s = period_s
        self._boundary_tokens = boundary_tokens
        self._limit_s = limit_s
        self._turn = 0
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self.ended: list[Ended] = []

    async def __aenter__(self) -> SteadyLoad:
        self._tasks = [asyncio.create_task(self._user(number)) for number in range(self._users)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Returns when every request has ended."""
        self._is_ending = True
        await asyncio.gather(*self._tasks)

    def between(self, from_s: float, to_s: float) -> list[Ended]:
        """Return the requests that were sent in this time."""
        return [one for one in self.ended if from_s <= one.started_s < to_s]

    async def _user(self, number: int) -> None:
        draw = random.Random(number)
        due_s = time.monotonic() + self._period_s * number / self._users
        session, router, sent = None, "", 0
        try:
            while not self._is_ending:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                due_s = max(due_s + self._period_s, time.monotonic())
                if session is None:
                    routers = self._routers()
                    self._turn += 1
                    router = routers[self._turn % len(routers)]
                    connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=600.0)
                    session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
                ended, keeps = await self._ask(session, router, draw, sent)
                self.ended.append(ended)
                sent += 1
                if not keeps or sent % REQUESTS_PER_CONNECTION == 0:
                    await session.close()
                    session = None
        finally:
            if session is not None:
                await session.close()

    async def _ask(
        self, session: aiohttp.ClientSession, router: str, draw: random.Random, number: int
    ) -> tuple[Ended, bool]:
        """One request, and whether its connection goes on."""
        is_long = number % LONG_EVERY == LONG_EVERY - 1
        size = (
            draw.randrange(2, 6) * self._boundary_tokens if is_long else draw.randrange(8, self._boundary_tokens // 2)
        )
        tokens = OUTPUT_TOKENS[number % len(OUTPUT_TOKENS)]
        body = {
            "text": "".join(draw.choices(string.ascii_letters + " ", k=size)),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        started_s = time.monotonic()
        first_s: float | None = None
        headers: dict[str, str] = {}
        outcome, detail, keeps = "failed", "", False
        try:
            async with asyncio.timeout(self._limit_s):
                async with session.post(f"{router}/generate", json=body) as reply:
                    headers = {name.lower(): value for name, value in reply.headers.items()}
                    keeps = headers.get("connection") != "close"
                    if reply.status != 200:
                        detail = f"status {reply.status}: {(await reply.text())[:200]}"
                    else:
                        last, first_s, is_whole = await _read(reply)
                        got = last.get("meta_info", {}).get("completion_tokens")
                        if is_whole and got == tokens:
                            outcome = "ok"
                        else:
                            detail = f"ended with {got} of {tokens} tokens: {json.dumps(last)[-200:]}"
        except TimeoutError:
            outcome, detail = "hung", f"no end after {self._limit_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
        ended = Ended(
            started_s,
            first_s,
            time.monotonic(),
            outcome,
            detail,
            router,
            headers.get("x-sglang-ext-prefill", ""),
            headers.get("x-sglang-ext-decode", ""),
        )
        return ended, keeps and outcome == "ok"


async def _read(reply: aiohttp.ClientResponse) -> tuple[dict[str, dict[str, object]], float | None, bool]:
    """The stream's last event, when its first came, and whether it ended as streams do."""
    last: dict[str, dict[str, object]] = {}
    first_s: float | None = None
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        if line.startswith(b"data: [DONE]"):
            return last, first_s, "error" not in last
        first_s = first_s or time.monotonic()
        last = json.loads(line[5:])
    return last, first_s, False
