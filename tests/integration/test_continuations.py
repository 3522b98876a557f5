"""A request that brings its output so far goes on behind it, as if the instance had generated it: real SGLang."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from sglang_ext.token_marks import MARKS_HEADER, read_marks
from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.pd import send_both
from support.reference import greedy_reference, random_prompt

pytestmark = pytest.mark.integration

PROMPT = random_prompt(60, seed=3)
NEW_TOKENS = 40
PARAMETERS = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.DECODE), EngineSpec(Role.PLAIN))


def answers(engines: list[Engine], output: list[int], **parameters: Any) -> list[dict[str, Any]]:
    """The replies of the pair and of the undivided instance behind this output."""
    prefill, decode, plain = engines
    given = {**PARAMETERS, **parameters}
    if output:
        given["custom_params"] = {"sglang_ext_output_ids": output}
    body = {"input_ids": PROMPT, "sampling_params": given}
    replies = [send_both(prefill, decode, body)[1], plain.post("/generate", body)]
    assert [reply.status for reply in replies] == [200, 200], replies
    return [reply.body for reply in replies]


def summary(reply: dict[str, Any]) -> tuple[Any, ...]:
    meta = reply["meta_info"]
    counts = meta["prompt_tokens"], meta["completion_tokens"]
    return reply["output_ids"], reply["text"], meta["finish_reason"], counts


def test_tokens_text_and_usage_are_those_of_one_instance_wherever_the_seam_is(engines: list[Engine]) -> None:
    whole = [summary(reply) for reply in answers(engines, [])]
    tokens = whole[0][0]
    assert tokens == greedy_reference(PROMPT, NEW_TOKENS)
    assert "�" in whole[0][1]  # characters of several tokens are among them
    for size in range(1, NEW_TOKENS):
        assert [summary(reply) for reply in answers(engines, tokens[:size])] == whole, size
    for engine in engines:
        engine.wait_idle(10.0)


def test_a_stop_string_that_begins_before_the_seam_ends_the_text(engines: list[Engine]) -> None:
    text = answers(engines, [])[0]["text"]
    stop = text[20:32]
    assert "�" not in stop
    whole = [summary(reply) for reply in answers(engines, [], stop=stop)]
    tokens = whole[0][0]
    assert whole[0][1] == text[: text.index(stop)]
    for size in range(1, len(tokens)):
        assert [summary(reply) for reply in answers(engines, tokens[:size], stop=stop)] == whole, size


def test_special_tokens_and_the_fewest_tokens_count_over_the_seam(engines: list[Engine]) -> None:
    for parameters in (
        {"skip_special_tokens": False},
        {"ignore_eos": False, "min_new_tokens": 30},
        {"stop_token_ids": [greedy_reference(PROMPT, NEW_TOKENS)[25]], "min_new_tokens": 10},
    ):
        whole = [summary(reply) for reply in answers(engines, [], **parameters)]
        for way, (tokens, *_) in enumerate(whole):  # an undivided instance counts the fewest tokens otherwise
            for size in (1, 7, 12, 24):
                if size < len(tokens):
                    reply = answers(engines, tokens[:size], **parameters)[way]
                    assert summary(reply) == whole[way], (parameters, size)


def test_what_cannot_go_on_is_refused_with_a_reason(engines: list[Engine]) -> None:
    plain = engines[2]
    for output, further in (
        ([5] * NEW_TOKENS, {}),
        ([1_000_000], {}),
        ([], {}),
        ("5", {}),
        ([5], {"return_logprob": True}),
        ([5], {"sampling_params": {**PARAMETERS, "regex": "a+"}}),
        ([5] * 2000, {"sampling_params": {**PARAMETERS, "max_new_tokens": None}}),
    ):
        body: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": PARAMETERS, **further}
        parameters = {**body["sampling_params"], "custom_params": {"sglang_ext_output_ids": output}}
        reply = plain.post("/generate", {**body, "sampling_params": parameters})
        assert reply.status == 400, output
        assert "sglang_ext_output_ids" in json.dumps(reply.body)


CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(("path", "prompt"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello"})])
def test_events_carry_their_tokens_where_a_header_asks_for_it(
    engines: list[Engine], path: str, prompt: dict[str, Any]
) -> None:
    plain = engines[2]
    body = {**prompt, "model": "m", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": True}
    without, marked = stream(plain, path, body, {}), stream(plain, path, body, {MARKS_HEADER: "1"})
    assert [json.loads(line[6:])["choices"] for line in marked] != []
    assert text_of(without) == text_of(marked)
    assert not any(read_marks(line) for line in without)
    tokens = [token for line in marked for token in read_marks(line)]
    choice = plain.post(path, {**body, "stream": False, "return_token_ids": True}).body["choices"][0]
    assert tokens == choice.get("token_ids", choice.get("response_token_ids"))


def stream(engine: Engine, path: str, body: dict[str, Any], headers: dict[str, str]) -> list[bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
    lines = connection.getresponse().read().split(b"\n")
    connection.close()
    return [line for line in lines if line.startswith(b"data: {")]


def text_of(lines: list[bytes]) -> str:
    choices = [choice for line in lines for choice in json.loads(line[6:])["choices"]]
    return "".join((choice.get("delta", choice).get("content") or choice.get("text") or "") for choice in choices)
