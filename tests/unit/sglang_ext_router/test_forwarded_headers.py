"""The headers of a client that its instances get: what SGLang reads, what is asked for, and no key."""

from __future__ import annotations

import pytest

from sglang_ext_router.config import RouterConfig, RouterConfigError, may_be_forwarded
from support.router_process import cluster

PROMPT = {"text": "x"}
READ_BY_SGLANG = ("x-sglext-return-input-ids", "x-sglext-return-output-ids", "x-sglext-ids-framed", "traceparent")
KEPT_BACK = (
    *("x-override-rid", "X-Override-Bootstrap-Room", "x-override-priority", "authorization", "x-api-key", "cookie"),
    *("connection", "host", "content-length", "transfer-encoding", "upgrade", "te", "proxy-authorization", "", "a b"),
)


@pytest.mark.parametrize("name", READ_BY_SGLANG)
async def test_what_sglang_reads_is_passed_on(name: str) -> None:
    async with cluster() as served:
        await served.ask("POST", "/generate", PROMPT, {name: "1"})
        for engine in (served.decode[0], served.short[0]):
            assert engine.requests[0].header(name) == "1"


async def test_other_headers_stay_with_the_router() -> None:
    async with cluster(api_key="secret") as served:
        headers = {"x-team": "a", "x-override-rid": "b", "x-api-key": "c", "Authorization": "Bearer secret"}
        await served.ask("POST", "/generate", PROMPT, headers)
        (request,) = served.decode[0].requests
        assert [request.header(name) for name in ("x-team", "x-override-rid", "x-api-key")] == [None] * 3


async def test_a_header_that_is_asked_for_is_passed_on() -> None:
    async with cluster(forward_headers="X-Team, x-caller") as served:
        await served.ask("POST", "/generate", PROMPT, {"X-TEAM": "a", "x-caller": "b", "x-other": "c"})
        request = served.decode[0].requests[0]
        assert [request.header(name) for name in ("x-team", "x-caller", "x-other")] == ["a", "b", None]


async def test_the_header_of_an_instances_labels_is_learned_from_it() -> None:
    async with cluster() as served:
        engine = served.short[0]
        assert isinstance(engine.info, dict)
        labels = {
            "tokenizer_metrics_custom_labels_header": "X-Labels",
            "tokenizer_metrics_allowed_custom_labels": ["a"],
        }
        engine.info = {**engine.info, **labels}
        served.worker(engine.url).has_info = False
        await served.until(lambda: bool(served.worker(engine.url).label_header))
        await served.ask("POST", "/generate", PROMPT, {"x-labels": '{"a": "b"}'})
        assert engine.requests[0].header("x-labels") == '{"a": "b"}'


@pytest.mark.parametrize("name", KEPT_BACK)
def test_no_key_and_no_order_can_be_asked_for(name: str) -> None:
    assert not may_be_forwarded(name.lower())
    if name:
        with pytest.raises(RouterConfigError, match="--forward-headers"):
            RouterConfig(forward_headers=f"x-team,{name}").validate()
