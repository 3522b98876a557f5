"""Requests of many tenants to one router: some send lightly at random times, some always have requests under way."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

REFUSED_PAUSE_S = 0.05  # before a flooding connection asks again


class TenantRequest(NamedTuple):
    """A request of a tenant: a prompt of random token ids, and the number of tokens that it wants."""

    prompt_tokens: int
    output_tokens: int


class Served(NamedTuple):
    """A request that is over; `status` 0 is a lost connection."""

    tenant: str
    status: int
    duration_s: float  # from when it was due


class TenantLoad:
    """Sends requests with the key of each tenant, which is its name, over connections that are kept."""

    def __init__(self, port: int, path: str = "/generate", vocabulary: int = 4096, seed: int = 0) -> None:
        self._port = port
        self._path = path
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        self.served: list[Served] = []

    async def send_lightly(self, tenants: Mapping[str, TenantRequest], rate_per_s: float, duration_s: float) -> None:
        """Let each tenant send `rate_per_s` requests a second at random times, each at its time in any case."""
        due: list[tuple[float, str]] = []
        for tenant in tenants:
            at_s = self._random.expovariate(rate_per_s)
            while at_s < duration_s:
                due.append((at_s, tenant))
                at_s += self._random.expovariate(rate_per_s)
        began_s = time.monotonic()
        tasks = []
        for at_s, tenant in sorted(due):
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._ask(tenant, tenants[tenant], began_s + at_s)))
        await asyncio.gather(*tasks)

    async def flood(self, tenant: str, request: TenantRequest, connections: int, duration_s: float) -> None:
        """Keep `connections` requests of a tenant under way or waiting."""
        end_s = time.monotonic() + duration_s

        async def ask_again_and_again() -> None:
            while time.monotonic() < end_s:
                if await self._ask(tenant, request, time.monotonic()) != 200:
                    await asyncio.sleep(REFUSED_PAUSE_S)

        await asyncio.gather(*(ask_again_and_again() for _ in range(connections)))

    async def close(self) -> None:
        """Close all connections."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _ask(self, tenant: str, request: TenantRequest, due_s: float) -> int:
        ids = self._random.choices(range(2, self._vocabulary), k=request.prompt_tokens)
        parameters = {"max_new_tokens": request.output_tokens, "ignore_eos": True, "temperature": 0}
        body = json.dumps({"input_ids": ids, "sampling_params": parameters}).encode()
        head = f"POST {self._path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {tenant}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        status = 0
        try:
            reader, writer = await self._connection()
            writer.write(head.encode() + body)
            reply = await reader.readuntil(b"\r\n\r\n")
            status = int(reply.split(b" ", 2)[1])
            await reader.readexactly(_content_length(reply))
            self._idle.append((reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass
        self.served.append(Served(tenant, status, time.monotonic() - due_s))
        return status

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a kept connection that the router has not closed for being idle, or a new one."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)

    # -- reading the outcome ----------------------------------------------------------------------------

    def take_served(self) -> list[Served]:
        """Return what is over since the last call."""
        served, self.served = self.served, []
        return served


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by `share` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def usage_tokens(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the tokens of each tenant in the data of `GET /v1/usage`."""
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row["tenant"]] = tokens.get(row["tenant"], 0) + row["prompt_tokens"] + row["output_tokens"]
    return tokens
