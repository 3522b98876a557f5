"""Hooks of schemathesis, which finds this module by its name in SCHEMATHESIS_HOOKS: what would take long is made short.

It imports nothing of this project: hypothesis makes field names of the words in sources that are imported.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MODEL = "SGLANG_EXT_TEST_MODEL"  # what a request that names one asks for
MAX_INT32 = 2**31 - 1
LENGTHS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/generate": "max_new_tokens",
}
UNDIVIDED = ("/v1/embeddings", "/v1/classify", "/v1/rerank", "/v1/score")
MOST_TOKENS = 4  # of /v1/responses two fewer
MOST_PROMPTS = 8
MOST = {**dict.fromkeys((*LENGTHS.values(), "max_completion_tokens"), MOST_TOKENS), "n": 2}
MOST |= dict.fromkeys(("logprobs", "prompt_logprobs"), 2)
DOCUMENTED = dict.fromkeys(("logprobs", "prompt_logprobs"), 256)  # what is beyond the document's own limit stays


@schemathesis.hook("before_call")
def shorten(context: schemathesis.HookContext, case: schemathesis.Case, **_: Any) -> None:
    """Ask for few tokens and samples where the case allows many, and write whole numbers as such."""
    body = case.body = _whole(case.body)
    path = case.operation.path
    if not isinstance(body, dict) or path not in (*LENGTHS, *UNDIVIDED):
        return
    if isinstance(body.get("model"), str):
        body["model"] = os.environ[MODEL]
    if path in UNDIVIDED:
        _shorten_inputs(body)
        if path == "/v1/score":
            _label(body)
        return
    for name in ("prompt", "text", "input_ids"):
        if isinstance(body.get(name), list):
            body[name] = [_of_vocabulary(item) for item in body[name][:MOST_PROMPTS]]
        if isinstance(body.get(name), list) and "" in body[name] and body.get("stream") is True:
            body["stream"] = False  # what an instance refuses of a stream it tells in an event of status 200
    asked = body
    if path == "/generate":
        asked = body.setdefault("sampling_params", {})
        if not isinstance(asked, dict):
            return  # 128 tokens
    asked.setdefault(LENGTHS[path], MOST_TOKENS)
    if path == "/v1/responses" and body.get("stream", False) is None:
        del body["stream"]  # SGLang's field may be null, and its undivided server refuses that later
    for name, most in MOST.items():
        value = asked.get(name)
        if type(value) is int and most < value <= DOCUMENTED.get(name, MAX_INT32):
            asked[name] = most
    _lower_the_minimum(asked)
    if type(body.get("prompt_logprobs")) is int:
        # What is served with it: one sample, not streamed, not echoed.
        if type(body.get("n")) is int and 1 <= body["n"] <= MAX_INT32:
            body["n"] = 1
        for name in ("stream", "echo"):
            if body.get(name) is True:
                body[name] = False
    if body.get("logprobs") and body.get("echo") is True and (body.get("stream") is True or body.get("n", 1) != 1):
        body["echo"] = False  # which is not served together


def _lower_the_minimum(asked: dict[str, Any]) -> None:
    """Ask for no more tokens at least than at most, which is refused and no schema can say."""
    limits = [asked[name] for name in (*LENGTHS.values(), "max_completion_tokens") if type(asked.get(name)) is int]
    for name in ("min_tokens", "min_new_tokens"):
        value = asked.get(name)
        if limits and type(value) is int and min(limits) < value <= MAX_INT32:
            asked[name] = max(min(limits), 0)


def _shorten_inputs(body: dict[str, Any]) -> None:
    """Leave what the tests' models can do: their vectors have one size."""
    body.pop("dimensions", None)
    body.pop("score_extraction_token", None)
    if body.get("apply_softmax") is not True:
        body.pop("temperature", None)
    for name in ("input", "items", "query"):
        if isinstance(body.get(name), list):
            body[name] = [_of_vocabulary(item) for item in body[name][:MOST_PROMPTS]]


def _label(body: dict[str, Any]) -> None:
    """Leave what a model that generates can score: labels, each of them once, in one list or in one per item."""
    body.pop("return_pooled_hidden_states", None)
    if isinstance(body.get("items"), list) and any(isinstance(item, list) for item in body["items"]):
        if isinstance(body.get("query"), str):
            body["query"] = [_of_vocabulary(0)]  # both are text, or both token ids
    elif isinstance(body.get("query"), list):
        body["query"] = "x"
    labels, items = body.get("label_token_ids", []), body.get("items")
    if not isinstance(labels, list):
        return
    flat = [token for label in labels for token in (label if isinstance(label, list) else [label])]
    if all(type(token) is int and token >= 0 for token in flat):
        once = sorted({_of_vocabulary(token) for token in flat}) or [_of_vocabulary(0)]
        is_nested = any(isinstance(label, list) for label in labels)
        body["label_token_ids"] = [once] * (len(items) if isinstance(items, list) else 1) if is_nested else once


def _of_vocabulary(value: Any) -> Any:
    """Token ids that the tests' model has and that stand for text; other ids are one test's own."""
    if isinstance(value, list):
        return [_of_vocabulary(item) for item in value]
    return 100 + value % 1000 if type(value) is int and value >= 0 else value


def _whole(value: Any) -> Any:
    """JSON whose integers have no point: 3.0 is an integer by JSON Schema, and no token id."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value
