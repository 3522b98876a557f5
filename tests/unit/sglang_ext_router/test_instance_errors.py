"""What an instance refuses reaches clients of OpenAI's paths in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext_router.http.replies import instance_error_json
from support.router_process import cluster
from support.scripted_engine import cut, reply, response

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"model": "m", "input": "a"},
}
SERVING = {"object": "error", "message": "no", "type": "BadRequestError", "param": None, "code": 400}
TOLD: list[tuple[Any, dict[str, Any]]] = [
    (SERVING, {"message": "no", "type": "BadRequestError", "param": None, "code": 400}),
    ({**SERVING, "param": "n"}, {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}),
    ({"error": {"message": "no"}}, {"message": "no", "type": "invalid_request_error", "param": None, "code": 400}),
    ({"error": "no"}, {"message": "no", "type": "invalid_request_error", "param": None, "code": 400}),
    ({"detail": "no"}, {"message": "no", "type": "invalid_request_error", "param": None, "code": 400}),
    ({"message": "no"}, {"message": "no", "type": "invalid_request_error", "param": None, "code": 400}),
    ("no", {"message": "no", "type": "invalid_request_error", "param": None, "code": 400}),
]
NOTHING = "an instance refused the request"


@pytest.mark.parametrize(("given", "told"), TOLD)
def test_each_shape_becomes_openais(given: Any, told: dict[str, Any]) -> None:
    assert json.loads(instance_error_json(400, json.dumps(given).encode())) == {"error": told}


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b'{"error": null}', b'{"error": {}}', b'{"message": ""}'])
def test_an_error_without_words_still_has_some(body: bytes) -> None:
    assert json.loads(instance_error_json(422, body))["error"]["message"] == NOTHING


def test_what_is_no_json_is_shown_as_it_is() -> None:
    assert json.loads(instance_error_json(500, b"Internal Server Error"))["error"] == {
        "message": "Internal Server Error",
        "type": "server_error",
        "param": None,
        "code": 500,
    }
    assert len(json.loads(instance_error_json(500, b"\xff" * 10**6))["error"]["message"]) < 20_000


def test_several_problems_of_a_form_are_all_there() -> None:
    problems = [{"loc": ["body", "n"], "msg": "not a number"}]
    error = json.loads(instance_error_json(422, json.dumps({"detail": problems}).encode()))["error"]
    assert json.loads(error["message"]) == problems


KNOWN = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (KNOWN, KNOWN),
        (
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of "
            "5000 tokens: 1000 tokens from the input messages and 4000 tokens for the completion.",
            None,
        ),
        (
            "Input length (5000 tokens) exceeds the maximum allowed length (4096 tokens). Use a shorter input or "
            "enable --allow-auto-truncate.",
            KNOWN,
        ),
        ("Request abc exceeds the maximum number of tokens: 5000 > 4096", KNOWN),
        ("Multimodal prompt is too long after expanding multimodal tokens.", None),
    ],
)
def test_a_context_overflow_has_a_code_and_known_words(given: str, told: str | None) -> None:
    error = json.loads(instance_error_json(400, json.dumps({**SERVING, "message": given}).encode()))["error"]
    assert (error["code"], error["message"]) == ("context_length_exceeded", told or given)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("code", [400, 404, 422])
async def test_through_the_router(path: str, is_stream: bool, code: int) -> None:
    async with cluster() as served:
        served.decode[0].script = reply({**SERVING, "code": code}, code, delay_s=0.05)
        answer = await served.ask("POST", path, {**BODIES[path], "stream": is_stream})
        assert (answer.status, answer.error["message"], answer.error["code"]) == (code, "no", code)
        assert {"x-request-id", "x-sglang-ext-decode"} <= answer.headers.keys()
        await served.until_idle()


async def test_a_native_path_keeps_sglangs_shape() -> None:
    async with cluster() as served:
        served.decode[0].script = reply({"error": {"message": "no"}}, 400)
        answer = await served.ask("POST", "/generate", {"text": "x"})
        assert (answer.status, answer.json) == (400, {"error": {"message": "no"}})


async def test_when_to_come_back_is_passed_on() -> None:
    async with cluster(disable_retries=True) as served:
        served.decode[0].script = reply({"error": {"message": "busy"}}, 429, headers=(("retry-after", "7"),))
        answer = await served.ask("POST", "/v1/completions", BODIES["/v1/completions"])
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")


async def test_an_error_that_breaks_off_is_one_of_the_routers() -> None:
    async with cluster(disable_retries=True) as served:
        served.decode[0].script = cut(response(b'{"object": "error"}', 400)[:-5])
        answer = await served.ask("POST", "/v1/completions", BODIES["/v1/completions"])
        assert (answer.status, answer.error["type"]) == (502, "server_error")
        await served.until_idle()
