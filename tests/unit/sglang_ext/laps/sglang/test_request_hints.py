"""What a client asks for in the wrong way is refused before anything is computed, and nothing else is."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.sglang.request_hints import (
    check_hints,
    generate_contract_error,
    handle_request,
)
from sglang_ext.types import PRIORITIES
from sglang_ext_router.request.prepared_request import _slo_seconds
from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.request_body import CleanBody, HintField, RequestHints

WRONG = {"sglang_ext_ttft_slo_ms": -5}
RIGHT = {"sglang_ext_ttft_slo_ms": 250.5, "sglang_ext_priority": "low"}
PARAM = "custom_params.sglang_ext_ttft_slo_ms"


def with_parameters(custom: object) -> dict[str, Any]:
    return {"text": "x", "sampling_params": {"custom_params": custom}}


@pytest.mark.parametrize(
    "body", [with_parameters(WRONG), {"sampling_params": [{}, {"custom_params": RIGHT}, {"custom_params": WRONG}]}]
)
def test_generate_is_refused(body: object) -> None:
    error = generate_contract_error(lambda _: None, body)
    assert error == {
        "message": f"{PARAM} must be a positive number of milliseconds, got -5",
        "type": "invalid_request_error",
        "param": PARAM,
        "code": None,
    }


@pytest.mark.parametrize(
    "body",
    [
        *(with_parameters(custom) for custom in (RIGHT, {}, None, [], "x")),
        *({}, [], None, {"sampling_params": None}, {"sampling_params": "x"}, {"sampling_params": [None, 3]}),
    ],
)
def test_generate_is_not_refused(body: object) -> None:
    assert generate_contract_error(lambda _: None, body) is None


def test_what_sglang_finds_comes_first() -> None:
    assert generate_contract_error(lambda _: "no such field", with_parameters(WRONG)) == "no such field"


def served(custom: object) -> Any:
    async def stock(serving: object, request: object, raw_request: object) -> object:
        return serving, request, raw_request

    return asyncio.run(handle_request(stock, "serving", SimpleNamespace(custom_params=custom), "raw"))


def test_openai_requests_are_refused() -> None:
    reply = served(WRONG)
    assert reply.status_code == 400
    assert json.loads(reply.body)["error"]["param"] == PARAM


@pytest.mark.parametrize("custom", [RIGHT, {}, None])
def test_openai_requests_are_passed_on(custom: object) -> None:
    assert served(custom)[0] == "serving"


@given(
    header=st.one_of(
        st.floats().map(lambda value: repr(value).encode()),
        st.floats(min_value=0, exclude_min=True).map(lambda value: repr(value).encode()),
        st.binary(max_size=12),
    ),
    spent_s=st.floats(0, 1e9),
    priority=st.sampled_from((None, *PRIORITIES)),
    field=st.sampled_from(("sampling_params", "custom_params")),
)
def test_whatever_a_router_takes_and_forwards_is_valid(
    header: bytes, spent_s: float, priority: str | None, field: str
) -> None:
    """An engine's refusal of what the router made of a header would be the router's mistake."""
    try:
        slo_s = _slo_seconds(header)
    except BadRequestError:
        return
    hints = RequestHints(HintField(field, None, CleanBody(b"{}", True, None)), slo_s, priority)
    sent = json.loads(b"{%b}" % hints.member(spent_s))[field]
    custom = sent["custom_params"] if field == "sampling_params" else sent
    assert custom["sglang_ext_ttft_slo_ms"] >= 1.0
    check_hints(custom)
