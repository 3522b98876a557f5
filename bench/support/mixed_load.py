"""Short and long prompts from real traces, scaled to a small machine, and their replay at one engine pair.

Prompt lengths and arrival times come from public traces where those are there, else from distributions with the
same quantiles; `TraceMix.describe` says which. Prompts are random tokens: nothing is shared between them.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

if TYPE_CHECKING:
    from support.engines import BenchEngine

SHORT_LIMIT_TOKENS = 256
FIRST_ORDINARY_TOKEN = 8
_LMSYS = Path("lmsys_arena") / "lmsys_arena_trace_1500.csv"
_JSON = {"content-type": "application/json"}
_AZURE = Path("azure2023") / "AzureLLMInferenceTrace_conv.csv"


class Arrival(NamedTuple):
    """One request of a workload."""

    at_s: float
    is_long: bool
    prompt_tokens: int


class Outcome(NamedTuple):
    """Describes what became of it: times from its planned arrival; None where it failed."""

    arrival: Arrival
    ttft_s: float | None
    end_s: float | None


@dataclass(frozen=True)
class TraceMix:
    """Lengths and gaps to draw from."""

    short_tokens: tuple[int, ...]
    long_tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # consecutive gaps of the arrival trace, with mean 1
    source: str

    def describe(self, long_share: float) -> str:
        return (
            f"{self.source}; {long_share:.0%} long: {min(self.long_tokens)}-{max(self.long_tokens)} tokens, median "
            f"{_median(self.long_tokens)}; short: up to {max(self.short_tokens)}, median {_median(self.short_tokens)}"
        )

    def arrivals(self, rate_per_s: float, duration_s: float, long_share: float, seed: int) -> list[Arrival]:
        """Requests over `duration_s`, `rate_per_s` of them on average, in bursts as in the trace.

        A window of the trace is stretched to the duration, and lengths are drawn evenly over their quantiles: so
        every seed brings the same work, in another order and at other times. Deterministic by seed.
        """
        draw = random.Random(seed)
        count = max(2, round(rate_per_s * duration_s))
        long_count = max(1, round(long_share * count))
        lengths = [(True, tokens) for tokens in _stratified(self.long_tokens, long_count, draw)]
        lengths += [(False, tokens) for tokens in _stratified(self.short_tokens, count - long_count, draw)]
        draw.shuffle(lengths)
        first = draw.randrange(len(self.gaps))
        gaps = [self.gaps[(first + number) % len(self.gaps)] for number in range(count)]
        scale = duration_s / sum(gaps)
        arrivals: list[Arrival] = []
        at_s = 0.0
        for gap, (is_long, tokens) in zip(gaps, lengths, strict=True):
            arrivals.append(Arrival(at_s, is_long, tokens))
            at_s += gap * scale
        return arrivals


def load_mix(folder: Path, long_range: tuple[int, int], divide_by: int, least_short_tokens: int = 1) -> TraceMix:
    """Short prompts of first chat turns, long prompts and arrival times of a chat service.

    Prompts of `least_short_tokens` to 256 tokens are short, those within `long_range` long; both are then divided by
    `divide_by`.
    """
    lmsys, azure = folder / _LMSYS, folder / _AZURE
    low, high = long_range
    if not (lmsys.is_file() and azure.is_file()):
        return _synthetic_mix(long_range, divide_by, least_short_tokens)
    with lmsys.open(newline="") as file:
        short = [int(row["num_prefill_tokens"]) for row in csv.DictReader(file)]
    with azure.open(newline="") as file:
        rows = list(csv.DictReader(file))
    long = [int(row["ContextTokens"]) for row in rows]
    times_s = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return TraceMix(
        tuple(max(1, tokens // divide_by) for tokens in short if least_short_tokens <= tokens <= SHORT_LIMIT_TOKENS),
        tuple(tokens // divide_by for tokens in long if low <= tokens <= high),
        _unit_mean([later - earlier for earlier, later in pairwise(sorted(times_s))]),
        f"short: LMSYS arena first turns of {least_short_tokens}-{SHORT_LIMIT_TOKENS} tokens; long: Azure 2023 "
        f"conversation trace, {low}-{high} tokens, arrival times too; all lengths divided by {divide_by}",
    )


def _synthetic_mix(long_range: tuple[int, int], divide_by: int, least_short_tokens: int) -> TraceMix:
    draw = random.Random(0)
    low, high = long_range
    drawn = [min(SHORT_LIMIT_TOKENS, int(draw.lognormvariate(3.4, 1.1))) for _ in range(2000)]
    short = [max(1, tokens // divide_by) for tokens in drawn if tokens >= least_short_tokens]
    long = [min(high, max(low, int(draw.lognormvariate(7.2, 0.4)))) // divide_by for _ in range(2000)]
    gaps = [draw.expovariate(1.0) for _ in range(5000)]
    return TraceMix(
        tuple(short), tuple(long), _unit_mean(gaps), "SYNTHETIC lengths and Poisson arrivals: no traces here"
    )


class Replayer:
    """Sends requests to an endpoint and times the first token.

    With `prefill` the endpoint is a decode instance, and each request goes to both at once, as a router sends it.
    """

    def __init__(
        self, endpoint_url: str, vocabulary: int, output_tokens: int, prefill: BenchEngine | None = None
    ) -> None:
        self._endpoint_url, self._prefill = endpoint_url, prefill
        self._vocabulary = vocabulary
        self._output_tokens = output_tokens
        self._rooms = random.Random()

    def run(self, arrivals: Sequence[Arrival], seed: int) -> list[Outcome]:
        """Replay open-loop and wait for the last answer."""
        return asyncio.run(self._run(arrivals, random.Random(seed)))

    def run_closed(self, prompts: Sequence[int], concurrency: int, seed: int) -> float:
        """Seconds to serve prompts of these lengths with at most `concurrency` at a time."""
        return asyncio.run(self._run_closed(prompts, concurrency, random.Random(seed)))

    async def _run(self, arrivals: Sequence[Arrival], draw: random.Random) -> list[Outcome]:
        bodies = [self._body(arrival.prompt_tokens, draw) for arrival in arrivals]
        async with _session() as session:
            began_s = time.perf_counter() + 0.2
            return list(
                await asyncio.gather(
                    *(
                        self._request(session, arrival, body, began_s + arrival.at_s)
                        for arrival, body in zip(arrivals, bodies, strict=True)
                    )
                )
            )

    async def _run_closed(self, prompts: Sequence[int], concurrency: int, draw: random.Random) -> float:
        gate = asyncio.Semaphore(concurrency)
        bodies = [self._body(tokens, draw) for tokens in prompts]
        async with _session() as session:

            async def one(body: bytes) -> None:
                async with gate:
                    await self._request(session, Arrival(0.0, False, 0), body, time.perf_counter())

            began_s = time.perf_counter()
            await asyncio.gather(*map(one, bodies))
            return time.perf_counter() - began_s

    def _body(self, tokens: int, draw: random.Random) -> bytes:
        body: dict[str, object] = {
            "input_ids": [draw.randrange(FIRST_ORDINARY_TOKEN, self._vocabulary) for _ in range(tokens)],
            "sampling_params": {"temperature": 0, "max_new_tokens": self._output_tokens, "ignore_eos": True},
            "stream": True,
        }
        if self._prefill is not None:
            body["bootstrap_host"] = "127.0.0.1"
            body["bootstrap_port"] = self._prefill.bootstrap_port
            body["bootstrap_room"] = self._rooms.getrandbits(62)
        return json.dumps(body).encode()

    async def _request(self, session: aiohttp.ClientSession, arrival: Arrival, body: bytes, start_s: float) -> Outcome:
        await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
        # Neither leg answers before the other one has been sent.
        prefill_leg = asyncio.create_task(_read(session, self._prefill, body))
        ttft_s: float | None = None
        is_complete = False
        try:
            async with session.post(self._endpoint_url + "/generate", data=body, headers=_JSON) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: {") and ttft_s is None:
                        ttft_s = time.perf_counter() - start_s
                    is_complete = is_complete or line.startswith(b"data: [DONE]")
                is_complete = is_complete and reply.status == 200
            is_complete = await prefill_leg and is_complete
        except (aiohttp.ClientError, TimeoutError):
            is_complete = False
        finally:
            prefill_leg.cancel()
        if not is_complete:
            return Outcome(arrival, None, None)
        return Outcome(arrival, ttft_s, time.perf_counter() - start_s)


async def _read(session: aiohttp.ClientSession, prefill: BenchEngine | None, body: bytes) -> bool:
    """Return whether the prefill leg, if there is one, was answered well."""
    if prefill is None:
        return True
    async with session.post(prefill.url + "/generate", data=body, headers=_JSON) as reply:
        await reply.read()
        return reply.status == 200


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; not a number for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _session() -> aiohttp.ClientSession:
    # uvicorn closes a connection that was idle for 5 s; a request that is just being sent on it would be lost.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300), trust_env=False)


def _stratified(values: Sequence[int], count: int, draw: random.Random) -> list[int]:
    """One value of each of `count` equal shares of the sorted values."""
    ordered = sorted(values)
    return [ordered[int((number + draw.random()) / count * len(ordered))] for number in range(count)]


def _unit_mean(gaps: Sequence[float]) -> tuple[float, ...]:
    mean = sum(gaps) / len(gaps)
    return tuple(gap / mean for gap in gaps)


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
