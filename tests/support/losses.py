"""A request to two instances of which one may be lost before it is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, TypeGuard

from support.engines import Engine, Reply
from support.laps import Pair
from support.pd import with_room
from support.reference import random_prompt


class Request:
    """A greedy request, sent to both of its instances."""

    def __init__(self, pair: Pair, threads: ThreadPoolExecutor, seed: int, prompt_tokens: int, new_tokens: int) -> None:
        self._prompt = random_prompt(prompt_tokens, seed)
        self._new_tokens = new_tokens
        body = with_room(
            {
                "input_ids": self._prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            },
            pair.prefill,
        )
        self._legs = [threads.submit(_post, engine, body) for engine in (pair.prefill, pair.decode)]

    @property
    def is_over(self) -> bool:
        return all(leg.done() for leg in self._legs)

    def reply(self, limit_s: float) -> Reply | None:
        """Return what the client gets, when both legs have ended; None for a lost connection."""
        replies = [leg.result(timeout=limit_s) for leg in self._legs]
        return replies[1]

    def is_right(self, reply: Reply, greedy: Callable[[Sequence[int], int], list[int]]) -> bool:
        """Return whether the answer is what `greedy` says of the prompt and a number of tokens."""
        tokens: list[int] = reply.body["output_ids"]
        return tokens == greedy(self._prompt, self._new_tokens)


def is_answer(reply: Reply | None) -> TypeGuard[Reply]:
    """Return whether it is a whole answer: neither an error, nor an abort, nor a lost connection."""
    if reply is None or reply.status != 200:
        return False
    kind: str = reply.body["meta_info"]["finish_reason"]["type"]
    return kind != "abort"


def _post(engine: Engine, body: dict[str, Any]) -> Reply | None:
    try:
        return engine.post("/generate", body)
    except (OSError, HTTPException):
        return None
