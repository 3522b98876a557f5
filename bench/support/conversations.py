"""Conversations over long documents, and chat prompts: who says what when, and the client that sends it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp

FIRST_ORDINARY_TOKEN = 8
_FIRST_CHAT = 500_000  # of the keys in a round
_CLOSING_S = 12.0  # of a round, in which no conversation begins: the last turns shall not be alone
_JSON = {"content-type": "application/json"}


class Chat(NamedTuple):
    """A prompt that belongs to nothing else."""

    at_s: float
    tokens: int


class Conversation(NamedTuple):
    """A document and questions about it: each turn sends all before it, the answer and some new tokens."""

    at_s: float
    document_tokens: int
    turn_tokens: tuple[int, ...]  # new ones of the second turn, the third, …
    pause_s: float  # between an answer and the next turn


class Load(NamedTuple):
    """Describes what one round sends."""

    chats: tuple[Chat, ...]
    conversations: tuple[Conversation, ...]


class Answer(NamedTuple):
    """Describes one request: `turn` is 0 for a chat prompt, and for a document's first turn 1."""

    key: tuple[int, int]  # of its round, which conversation or chat prompt, and which turn
    tokens: int
    sent_s: float
    ttft_s: float | None  # None: it failed
    output: tuple[int, ...]

    def in_round(self, number: int) -> Answer:
        """Return it with a key that no other round has."""
        return self._replace(key=(self.key[0] + 1_000_000 * number, self.key[1]))

    @property
    def turn(self) -> int:
        return self.key[1]


def opening_s(duration_s: float) -> float:
    """Return how long conversations begin in a round of this length."""
    return max(0.5 * duration_s, duration_s - _CLOSING_S)


def draw_load(duration_s: float, chats_per_s: float, conversations: int, seed: int) -> Load:
    """Draw a round. Documents have 2,000 to 6,000 tokens, evenly over that range; deterministic by seed."""
    draw = random.Random(seed)
    chats, at_s = [], draw.expovariate(chats_per_s)
    while at_s < duration_s:
        chats.append(Chat(at_s, min(200, max(10, int(draw.lognormvariate(3.9, 0.7))))))
        at_s += draw.expovariate(chats_per_s)
    documents = [2000 + int(4000 * (number + draw.random()) / conversations) for number in range(conversations)]
    draw.shuffle(documents)
    begin_s = opening_s(duration_s) / conversations
    talks = tuple(
        Conversation(begin_s * (number + draw.random()), tokens, (draw.randint(30, 120), draw.randint(30, 120)), 3.0)
        for number, tokens in enumerate(documents)
    )
    return Load(tuple(chats), talks)


class Client:
    """Sends a load to a router and times first tokens. The same seed sends the same tokens."""

    def __init__(self, url: str, vocabulary: int, output_tokens: int) -> None:
        self._url, self._vocabulary, self._output_tokens = url, vocabulary, output_tokens

    def run(self, load: Load, seed: int) -> list[Answer]:
        """Send it all and wait for the last answer."""
        return asyncio.run(self._run(load, seed))

    def ask(self, prompt: Sequence[int]) -> Answer:
        """Send one prompt and wait for its answer."""

        async def one() -> Answer:
            async with _session() as session:
                return await self._send(session, (0, 0), list(prompt))

        return asyncio.run(one())

    def ask_beside(
        self, cold: Sequence[Sequence[int]], warm: Sequence[Sequence[int]], every_s: float
    ) -> tuple[list[Answer], list[Answer]]:
        """Send all cold prompts, and a warm one every so often as long as one of them has no first token."""
        return asyncio.run(self._ask_beside(cold, warm, every_s))

    def tokens(self, count: int, seed: int) -> list[int]:
        """Random ordinary tokens."""
        draw = random.Random(seed)
        return [draw.randrange(FIRST_ORDINARY_TOKEN, self._vocabulary) for _ in range(count)]

    async def _run(self, load: Load, seed: int) -> list[Answer]:
        async with _session() as session:
            began_s = time.perf_counter() + 0.2
            answers = await asyncio.gather(
                *(
                    self._chat(session, chat, number, began_s, seed)
                    for number, chat in enumerate(load.chats, _FIRST_CHAT)
                ),
                *(
                    self._converse(session, conversation, number + 1, began_s, seed)
                    for number, conversation in enumerate(load.conversations)
                ),
            )
        return [answer for several in answers for answer in several]

    async def _chat(
        self, session: aiohttp.ClientSession, chat: Chat, number: int, began_s: float, seed: int
    ) -> list[Answer]:
        prompt = self.tokens(chat.tokens, 1_000_000 * seed + number)
        await asyncio.sleep(max(0.0, began_s + chat.at_s - time.perf_counter()))
        return [await self._send(session, (number, 0), prompt)]

    async def _converse(
        self, session: aiohttp.ClientSession, conversation: Conversation, number: int, began_s: float, seed: int
    ) -> list[Answer]:
        prompt = self.tokens(conversation.document_tokens, 1_000_000 * seed + 10 * number)
        await asyncio.sleep(max(0.0, began_s + conversation.at_s - time.perf_counter()))
        answers = [await self._send(session, (number, 1), prompt)]
        for turn, tokens in enumerate(conversation.turn_tokens, start=2):
            await asyncio.sleep(conversation.pause_s)
            prompt = prompt + self.tokens(self._output_tokens + tokens, 1_000_000 * seed + 10 * number + turn)
            answers.append(await self._send(session, (number, turn), prompt))
        return answers

    async def _ask_beside(
        self, cold: Sequence[Sequence[int]], warm: Sequence[Sequence[int]], every_s: float
    ) -> tuple[list[Answer], list[Answer]]:
        async with _session() as session:
            cold_answers = [asyncio.create_task(self._send(session, (1, 1), list(prompt))) for prompt in cold]
            warm_answers = []
            for prompt in warm:
                await asyncio.sleep(every_s)
                if all(one.done() for one in cold_answers):
                    break
                warm_answers.append(asyncio.create_task(self._send(session, (1, 2), list(prompt))))
            return await asyncio.gather(*cold_answers), await asyncio.gather(*warm_answers)

    async def _send(self, session: aiohttp.ClientSession, key: tuple[int, int], prompt: list[int]) -> Answer:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": self._output_tokens, "ignore_eos": True},
            "stream": True,
        }
        sent_s = time.perf_counter()
        ttft_s: float | None = None
        output: list[int] = []
        try:
            async with session.post(self._url + "/generate", data=json.dumps(body), headers=_JSON) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        ttft_s = ttft_s or time.perf_counter() - sent_s
                        output = json.loads(line[6:]).get("output_ids") or output
                is_complete = reply.status == 200 and len(output) == self._output_tokens
        except (aiohttp.ClientError, TimeoutError):
            is_complete = False
        return Answer(key, len(prompt), sent_s, ttft_s if is_complete else None, tuple(output))


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300), trust_env=False)
