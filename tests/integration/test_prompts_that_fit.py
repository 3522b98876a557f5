"""What a prompt is made of decides nothing: it is served where it fits, and refused with its exact length where not.

The texts have from less than one to more than ten bytes a token; the router's estimates are wrong for most of them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, PLAIN_SERVER, Engine, EngineSpec
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router

pytestmark = [pytest.mark.integration]

_draw = random.Random(11)
TEXTS = {
    "cyrillic": "Съешь же ещё этих мягких французских булок. ",
    "hindi": "नमस्ते दुनिया, यह एक परीक्षा है। ",
    "thai": "สวัสดีชาวโลกนี่คือการทดสอบ",
    "chinese": "你好，世界。這是一個測試。",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈🤷🏽‍♀️",
    "base64": "".join(_draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", k=76)) + "\n",
    "indented code": " " * 24 + "if value is not None:\n" + " " * 28 + "return value\n",
    "a rule": "#" + "-" * 78 + "\n",
    "a padded table": f"{'name':<40}{'value':>40}\n",
    "blank lines": "\n\n\n\n    \n\t\t\n",
    "long words": " NotImplementedError DeprecationWarning",
    "null characters": "\x00\x01\x7f ",
}


@pytest.fixture(scope="module")
def plain(engines: list[Engine]) -> Engine:
    return FLEET.get(PLAIN_SERVER)[0]


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.LONG), EngineSpec(Role.DECODE))


def body_of(path: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the path without its fragment, and a body."""
    messages = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/completions#scores": {"prompt": text, "max_tokens": 1, "prompt_logprobs": 0},
        "/v1/completions#several": {"prompt": ["x", text], "max_tokens": 1, "n": 2},
        "/v1/completions#stream": {"prompt": text, "max_tokens": 1, "stream": True},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/chat/completions#stream": {"messages": messages, "max_tokens": 1, "stream": True},
        "/v1/messages": {"model": "m", "messages": messages, "max_tokens": 1},
        "/generate": {"text": text, "sampling_params": {"max_new_tokens": 1}},
        "/generate#scores": {
            "text": text,
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1},
        },
    }
    return path.partition("#")[0], bodies[path]


PATHS = (
    *("/v1/completions", "/v1/completions#scores", "/v1/completions#several", "/v1/completions#stream"),
    *("/v1/chat/completions", "/v1/chat/completions#stream", "/v1/messages", "/generate", "/generate#scores"),
)


def longest(router: RunningRouter, piece: str, tokens: int) -> str:
    """Return as many repetitions of a piece as `tokens` tokens hold."""

    def count(times: int) -> int:
        found: int = router.post("/tokenize", {"prompt": piece * times}).body["count"]
        return found

    low, high = 1, 2
    while count(high) <= tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= tokens else (low, middle)
    return piece * low


@pytest.mark.full
@pytest.mark.parametrize("name", TEXTS)
def test_a_prompt_that_fits_is_served(router: RunningRouter, name: str) -> None:
    limit = router.call("GET", "/v1/models")[0].body["data"][0]["max_model_len"]
    text = longest(router, TEXTS[name], limit - 20)  # room for a chat's template and the reply
    for path in PATHS:
        reply = router.post(*body_of(path, text))
        assert reply.status == 200, (path, reply.body)


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["cyrillic", "thai", "indented code", "a padded table", "blank lines"])
def test_a_prompt_that_does_not_fit_is_refused_as_by_a_plain_server(
    router: RunningRouter, plain: Engine, path: str, name: str
) -> None:
    limit = router.call("GET", "/v1/models")[0].body["data"][0]["max_model_len"]
    text = longest(router, TEXTS[name], limit - 20)
    text += TEXTS[name] * (1 + text.count(TEXTS[name]) // 10)  # ten percent more
    ours, theirs = (server.post(*body_of(path, text)) for server in (router, plain))
    assert ours.status == theirs.status == 400
    words = message_of(theirs.body)
    assert "longer than the model's context length" in words
    assert message_of(ours.body) == words
    if path.startswith("/v1/c"):
        assert ours.body["error"]["code"] == "context_length_exceeded"


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"max_tokens": 1900}),
        ("/v1/completions", {"max_tokens": 1900, "stream": True}),
        ("/v1/completions", {"max_tokens": 1900, "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"max_tokens": 1900}),
        ("/v1/chat/completions", {"max_completion_tokens": 1900, "stream": True}),
        ("/v1/messages", {"model": "m", "max_tokens": 1900}),
    ],
)
def test_a_prompt_that_does_not_fit_with_its_reply_is_refused_as_by_a_plain_server(
    router: RunningRouter, plain: Engine, path: str, body: dict[str, Any]
) -> None:
    text = TEXTS["thai"] * 20
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    ours, theirs = (server.post(path, {**prompt, **body}) for server in (router, plain))
    assert ours.status == theirs.status == 400
    words = message_of(theirs.body)
    assert "maximum context length" in words
    assert message_of(ours.body) == words
    if path != "/v1/messages":
        assert ours.body["error"]["code"] == "context_length_exceeded"


def message_of(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    message: str = error if isinstance(error, str) else error["message"]
    return message


@pytest.mark.parametrize("kind", [Role.DECODE, pytest.param(Role.SHORT, marks=pytest.mark.full)])
def test_prompt_and_reply_go_to_the_instance_whose_context_holds_both(kind: Role) -> None:
    """Nothing is sent to the smaller one, which would refuse it."""
    other = Role.SHORT if kind is Role.DECODE else Role.DECODE
    instances = FLEET.get(
        EngineSpec(other), EngineSpec(kind), EngineSpec(kind, arguments=("--context-length", "500"), name="small")
    )
    policies = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin")
    with running_router(instances, *policies) as router:
        header = "x-sglang-ext-decode" if kind is Role.DECODE else "x-sglang-ext-prefill"
        served = set()
        for new_tokens in (5, 5, 120, 120, 120):
            body = {
                "input_ids": random_prompt(400, seed=new_tokens),
                "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            }
            reply, headers = router.call("POST", "/generate", body)
            assert reply.body["output_ids"] == greedy_reference(random_prompt(400, seed=new_tokens), new_tokens)
            served.add((new_tokens, headers[header]))
        assert served == {(5, instances[1].url), (5, instances[2].url), (120, instances[1].url)}
