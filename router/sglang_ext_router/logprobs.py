"""Joins the log-probabilities of the prompt, which only prefill knows, with those of the output.

Under prefill-decode disaggregation a decode instance reports an empty list for the prompt's tokens.
"""

from __future__ import annotations

from typing import Any

import orjson

_INPUT_FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def wants_input_logprobs(path: bytes, body: dict[str, Any]) -> bool:
    """Whether the reply to `/generate` needs what the prefill instance says: streamed replies do not carry it."""
    return path == b"/generate" and bool(body.get("return_logprob")) and body.get("stream") is not True


def reply_body(raw: bytes) -> bytes:
    """Body of a reply with Content-Length, given as received."""
    return raw[raw.index(b"\r\n\r\n") + 4 :]


def join(prefill: bytes, decode: bytes) -> bytes:
    """The decode reply with the prefill reply's prompt log-probabilities; ValueError if they do not match."""
    ours, theirs = orjson.loads(decode), orjson.loads(prefill)
    outputs = ours if isinstance(ours, list) else [ours]
    prompts = theirs if isinstance(theirs, list) else [theirs]
    if len(outputs) != len(prompts):
        raise ValueError("prefill and decode answered for different numbers of sequences")
    for output, prompt in zip(outputs, prompts, strict=True):
        for field in _INPUT_FIELDS:
            found = prompt["meta_info"].get(field)
            if found:
                output["meta_info"][field] = found + (output["meta_info"].get(field) or [])
    return orjson.dumps(ours)
