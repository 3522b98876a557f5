"""A request's deadline and priority reach both instances; requests without them are not touched."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import PRIORITIES
from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.request_body import (
    ROUTER_FIELDS,
    RequestHints,
    body_end,
    clean_body,
    hint_field,
)
from support.router_process import cluster
from support.scripted_engine import hang, status

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SLO, PRIORITY = "sglang_ext_ttft_slo_ms", "sglang_ext_priority"
PATHS = ["/generate", "/v1/completions", "/v1/chat/completions"]


def hinted(path: str, body: dict[str, Any], slo_s: float | None, priority: str | None, spent_s: float = 0.0) -> Any:
    field = hint_field(path.encode(), body, clean_body(orjson.dumps(body), body))
    hints = RequestHints(field, slo_s, priority)
    end = body_end(hints.clean, hints.member(spent_s), b'"bootstrap_room":', 7, b"id")
    sent = json.loads(hints.clean.raw[: hints.clean.raw.rindex(b"}")] + end)
    return {key: value for key, value in sent.items() if key not in ROUTER_FIELDS}


def test_what_is_left_of_the_deadline() -> None:
    for spent_s, left_ms in ((0.0, 400.0), (0.1505, 249.5), (0.4, 1.0), (9.0, 1.0)):
        body = hinted("/v1/completions", {"prompt": "x"}, 0.4, None, spent_s)
        assert body == {"prompt": "x", "custom_params": {SLO: left_ms}}


@pytest.mark.parametrize("path", PATHS[1:])
def test_the_clients_own_parameters_stay_but_not_under_our_names(path: str) -> None:
    own = {"a": 1, "sglang_ext_priority": "real-time", "sglang_ext_other": 2}
    body = hinted(path, {"prompt": "x", "custom_params": own, "rid": "r", "bootstrap_room": 1}, None, "low")
    assert body == {"prompt": "x", "custom_params": {"a": 1, PRIORITY: "low"}}


def test_generate_has_them_in_its_sampling_parameters() -> None:
    mine = {PRIORITY: "high"}
    for given_parameters, expected in (
        ({}, {"custom_params": mine}),
        (None, {"custom_params": mine}),
        ({"n": 2, "custom_params": None}, {"n": 2, "custom_params": mine}),
        ({"custom_params": {"a": 1, SLO: 5}}, {"custom_params": {"a": 1, **mine}}),
        (
            [{"n": 1}, {"custom_params": {"b": 2}}],
            [{"n": 1, "custom_params": mine}, {"custom_params": {"b": 2, **mine}}],
        ),
    ):
        body = hinted("/generate", {"text": "x", "sampling_params": given_parameters}, None, "high")
        assert body == {"text": "x", "sampling_params": expected}
    assert hinted("/generate", {"text": "x"}, None, "high") == {"text": "x", "sampling_params": {"custom_params": mine}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"custom_params": [1]}, "custom_params"),
        ("/v1/chat/completions", {"custom_params": "x"}, "custom_params"),
        ("/generate", {"sampling_params": 5}, "sampling_params"),
        ("/generate", {"sampling_params": [5]}, "sampling_params"),
        ("/generate", {"sampling_params": {"custom_params": []}}, "sampling_params.custom_params"),
    ],
)
def test_parameters_that_are_none(path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        hinted(path, body, 1.0, None)
    assert caught.value.param == param


def test_what_cannot_be_written_again_is_refused_at_once() -> None:
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    for body in ({"custom_params": {"deep": deep}}, {"custom_params": {}, "deep": [deep]}):
        with pytest.raises(BadRequestError, match="nested"):
            RequestHints(hint_field(b"/v1/completions", body, clean_body(b"{}", {})), 1.0, None)


JSON = st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), st.lists, max_leaves=5)


@pytest.mark.slow
@given(st.dictionaries(st.text(), JSON), st.none() | st.dictionaries(st.text(), JSON), st.sampled_from(PATHS))
def test_everything_else_is_kept(rest: dict[str, Any], own: dict[str, Any] | None, path: str) -> None:
    body = {
        key: value for key, value in rest.items() if key not in ROUTER_FIELDS | {"sampling_params", "custom_params"}
    }
    expected = dict(body)
    field = "sampling_params" if path == "/generate" else "custom_params"
    if own is not None:
        body[field] = {"custom_params": own} if path == "/generate" else own
    result = hinted(path, body, 1.0, None)
    parameters = result.pop(field)
    assert result == expected
    parameters = parameters["custom_params"] if path == "/generate" else parameters
    assert parameters == {**{k: v for k, v in (own or {}).items() if not k.startswith("sglang_ext_")}, SLO: 1000.0}


# -- in a router ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_both_instances_get_them(path: str) -> None:
    content = CHAT if path.endswith("chat/completions") else {"text": "x"} if path == "/generate" else {"prompt": "x"}
    headers = {"x-sgl-ttft-slo-ms": "30000", "x-sgl-priority": "High"}
    async with cluster() as served:
        assert (await served.ask("POST", path, content, headers)).status == 200
        for engine in (served.short[0], served.decode[0]):
            body = engine.requests[0].json
            own = (body["sampling_params"] if path == "/generate" else body)["custom_params"]
            assert own[PRIORITY] == "high"
            assert 25000 < own[SLO] <= 30000
            assert body["bootstrap_room"] == engine.requests[0].room


async def test_a_request_without_them_is_sent_as_it_came() -> None:
    async with cluster() as served:
        await served.ask("POST", "/generate", {"text": "x", "sampling_params": {"custom_params": {"a": 1}}})
        sent = served.short[0].requests[0].body
        assert sent.startswith(b'{"text": "x", "sampling_params": {"custom_params": {"a": 1}}')


@pytest.mark.parametrize("given_priority", ["", "urgent", "0", "real_time", "h\xe9gh"])
async def test_a_priority_that_is_none(given_priority: str) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/generate", {"text": "x"}, {"x-sgl-priority": given_priority})
        assert (answer.status, answer.error["param"]) == (400, "x-sgl-priority")
        assert all(name in answer.error["message"] for name in PRIORITIES)
        assert served.upstream_requests() == 0


@pytest.mark.slow
async def test_time_in_the_queue_and_in_attempts_counts() -> None:
    async with cluster(max_concurrent_requests=1, long=0) as served:
        served.decode[0].script = hang()
        served.short[0].script = hang()
        first = asyncio.create_task(served.ask("POST", "/generate", {"text": "x"}))
        await served.short[0].received(1)
        served.short[0].plan(status(503))
        second = asyncio.create_task(served.ask("POST", "/generate", {"text": "y"}, {"x-sgl-ttft-slo-ms": "20000"}))
        await asyncio.sleep(0.2)
        first.cancel()
        served.clients[0].close()
        await served.short[0].received(3)
        left = [
            request.json["sampling_params"]["custom_params"][SLO]
            for request in served.short[0].requests
            if request.json["text"] == "y"
        ]
        assert len(left) == 2
        assert left[1] < left[0] <= 19_900
        second.cancel()
        for client in served.clients:
            client.close()
