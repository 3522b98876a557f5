"""Requests that go to a prefill and a decode engine at the same time, as a router sends them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.engines import Engine, Reply


def new_room() -> int:
    """A bootstrap room that no other request uses, with a range behind it for samples."""
    return random.getrandbits(62)


def with_room(body: dict[str, Any], prefill: Engine, room: Any = None) -> dict[str, Any]:
    """The body with the fields that pair its prefill and its decode."""
    return {
        **body,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": new_room() if room is None else room,
    }


def send_both(
    prefill: Engine,
    decode: Engine,
    body: dict[str, Any],
    *,
    path: str = "/generate",
    room: Any = None,
    timeout_s: float = 120.0,
) -> tuple[Reply, Reply]:
    """Replies of the prefill and of the decode engine; the latter is what a client gets."""
    paired = with_room(body, prefill, room)
    with ThreadPoolExecutor(2) as legs:
        prefill_leg = legs.submit(prefill.post, path, paired, timeout_s)
        decode_leg = legs.submit(decode.post, path, paired, timeout_s)
        return prefill_leg.result(), decode_leg.result()


def greedy(prefill: Engine, decode: Engine, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Greedy continuation of `prompt` (token ids) through the pair."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    _, reply = send_both(prefill, decode, body)
    assert reply.status == 200, reply.body
    tokens: list[int] = reply.body["output_ids"]
    return tokens
