"""Mixed traffic of a few users who do not wait for each other, some of whom leave; every end is judged."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp

PROMPTS = 300  # different ones: what the router remembers of them is bounded by the warm-up
LEAVE_SHARE = 0.2
LEAVE_WITHIN_S = 0.6
THINK_S = 0.3
OUTPUT_TOKENS = (1, 8, 32, 96, 256)
WRONG_TEXT = "another text than before"
_MODEL = "soak"
_OUTCOMES = ("ok", "left", "cut_by_faults", "refused_by_faults", "failed", "hung")


class Ended(NamedTuple):
    """A request that is over; times on the monotonic clock."""

    started_s: float
    ended_s: float
    outcome: str  # one of `_OUTCOMES`
    detail: str  # of what is neither ok nor left
    may_migrate: bool  # a stream of one sequence, with which other instances can go on


class Asked(NamedTuple):
    """A request to send and what its reply must hold."""

    path: str
    body: dict[str, Any]
    sequences: int
    output_tokens: int
    leaves_after_s: float | None


class Traffic:
    """Users in a closed loop, with a pause to think; `judge` says whether a fault was active between two times."""

    def __init__(
        self, url: str, users: int, boundary_tokens: int, limit_s: float, judge: Callable[[float, float], bool]
    ) -> None:
        self._url = url
        self._users = users
        self._limit_s = limit_s
        self._judge = judge
        self._random = random.Random(0)
        self._is_on = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._under_way = 0
        self._texts: dict[str, str] = {}  # of each request that was answered, by path and body
        self.ended: list[Ended] = []
        letters = string.ascii_letters + " "
        lengths = [self._random.randrange(4, boundary_tokens // 2) for _ in range(PROMPTS * 3 // 4)]
        lengths += [self._random.randrange(2 * boundary_tokens, 12 * boundary_tokens) for _ in range(PROMPTS // 4)]
        self._prompts = ["".join(self._random.choices(letters, k=length)) for length in lengths]

    async def __aenter__(self) -> Traffic:
        self._tasks = [asyncio.create_task(self._user(number)) for number in range(self._users)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def resume(self) -> None:
        """Let the users send."""
        self._is_on.set()

    async def pause(self) -> None:
        """Return when every request has ended; no further one is sent."""
        self._is_on.clear()
        while self._under_way:  # noqa: ASYNC110 - a poll is enough
            await asyncio.sleep(0.05)

    async def _user(self, number: int) -> None:
        draw = random.Random(number)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=aiohttp.ClientTimeout()) as session:
            while True:
                await self._is_on.wait()
                self._under_way += 1
                try:
                    self.ended.append(await self._ask(session, self._draw(draw)))
                finally:
                    self._under_way -= 1
                await asyncio.sleep(draw.expovariate(1 / THINK_S))

    def _draw(self, draw: random.Random) -> Asked:
        prompt, tokens = draw.choice(self._prompts), draw.choice(OUTPUT_TOKENS)
        is_stream = draw.random() < 0.5
        leaves = draw.uniform(0.0, LEAVE_WITHIN_S) if draw.random() < LEAVE_SHARE else None
        sequences = 2 if draw.random() < 0.1 else 1
        kind = draw.choice(("chat", "completions", "generate", "generate", "logprobs"))
        if kind == "chat":
            body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "n": sequences}
            return self._openai("/v1/chat/completions", body, is_stream, sequences, tokens, leaves)
        if kind == "completions":
            other = draw.choice(self._prompts)
            body = {"prompt": prompt if sequences == 1 else [prompt, other]}
            return self._openai("/v1/completions", body, is_stream, sequences, tokens, leaves)
        body = {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "n": sequences},
            "stream": is_stream,
        }
        if kind == "logprobs":  # both legs' replies are joined
            body |= {"return_logprob": True, "logprob_start_len": 0, "stream": False}
        return Asked("/generate", body, sequences, tokens, leaves)

    def _openai(
        self, path: str, body: dict[str, Any], is_stream: bool, sequences: int, tokens: int, leaves: float | None
    ) -> Asked:
        body |= {"model": _MODEL, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": is_stream}
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        return Asked(path, body, sequences, tokens, leaves)

    async def _ask(self, session: aiohttp.ClientSession, asked: Asked) -> Ended:
        started_s = time.monotonic()
        limit_s = self._limit_s if asked.leaves_after_s is None else asked.leaves_after_s
        outcome, detail = "ok", ""
        try:
            async with asyncio.timeout(limit_s):
                async with session.post(asked.path, json=asked.body) as reply:
                    data = await reply.read()
                    status = reply.status
            if status != 200:
                outcome, detail = "refused_by_faults", f"{status} {data[:200].decode(errors='replace')}"
            elif asked.body["stream"]:
                outcome, detail = _judge_stream(asked, data)
            else:
                outcome, detail = _judge_reply(asked, data)
            if outcome == "ok" and asked.sequences == 1:
                outcome, detail = self._judge_text(asked, _text(asked, data))
        except TimeoutError:
            if asked.leaves_after_s is None:
                outcome, detail = "hung", f"no end within {limit_s:g} s"
            else:
                outcome = "left"
        except aiohttp.ClientPayloadError as error:
            outcome, detail = "cut_by_faults", f"cut: {error}"
        except (aiohttp.ClientError, OSError) as error:
            outcome, detail = "failed", f"{type(error).__name__}: {error}"
        ended_s = time.monotonic()
        if outcome in ("cut_by_faults", "refused_by_faults") and not self._judge(started_s, ended_s):
            outcome, detail = "failed", f"without a fault: {detail}"
        if detail:
            what = "stream" if asked.body["stream"] else "reply"
            detail = f"{asked.path} {what} x{asked.sequences}: {detail}"
        return Ended(started_s, ended_s, outcome, detail, bool(asked.body["stream"]) and asked.sequences == 1)

    def _judge_text(self, asked: Asked, text: str) -> tuple[str, str]:
        """Compare a greedy reply with the earlier ones to the same prompt, streamed or not."""
        prompt = [asked.body.get(name) for name in ("messages", "prompt", "text")]
        known = self._texts.setdefault(f"{asked.path} {asked.output_tokens} {prompt}", text)
        return ("ok", "") if text == known else ("failed", WRONG_TEXT)


def _text(asked: Asked, data: bytes) -> str:
    """Return the text of a whole reply of one sequence."""
    if not asked.body["stream"]:
        replies = [json.loads(data)]
    else:
        events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n")]
        replies = [json.loads(event) for event in events if event.startswith(b"{")]
    if asked.path == "/generate":
        return str(replies[-1]["text"])
    choices = [choice for reply in replies for choice in reply["choices"]]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    return "".join([part.get("content") or part.get("text") or "" for part in parts])


def _judge_stream(asked: Asked, data: bytes) -> tuple[str, str]:
    events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    errors = [event for event in events if event.startswith(b'{"error"') or b'"type":"abort"' in event]
    if errors:
        return "cut_by_faults", errors[0][:200].decode(errors="replace")
    if not events or events[-1] != b"[DONE]":
        return "failed", f"the stream does not end with [DONE] but {data[-100:]!r}"
    wanted, tokens = asked.sequences * asked.output_tokens, 0
    if asked.path == "/generate":
        ends = {}
        for event in map(json.loads, events[:-1]):
            ends[event.get("index", 0)] = event["meta_info"]["completion_tokens"]
        tokens = sum(ends.values())
    else:
        tokens = sum((json.loads(event).get("usage") or {}).get("completion_tokens", 0) for event in events[:-1])
    return ("ok", "") if tokens == wanted else ("failed", f"{tokens} tokens of {wanted}")


def _judge_reply(asked: Asked, data: bytes) -> tuple[str, str]:
    try:
        reply = json.loads(data)
        if asked.path == "/generate":
            parts = reply if isinstance(reply, list) else [reply]
            tokens = sum(part["meta_info"]["completion_tokens"] for part in parts)
        else:
            tokens = reply["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        return "failed", f"not a whole reply ({error!r}): {data[-100:]!r}"
    wanted = asked.sequences * asked.output_tokens
    return ("ok", "") if tokens == wanted else ("failed", f"{tokens} tokens of {wanted}")


def count_outcomes(ended: list[Ended]) -> dict[str, int]:
    """Return how many requests ended in which way, every way named."""
    counts = dict.fromkeys(_OUTCOMES, 0)
    for one in ended:
        counts[one.outcome] += 1
    return counts
