"""Traces of requests: spans that add up, contexts in and out, and a collector that is away costs nothing but spans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from sglang_ext_router.config import RouterConfig, RouterConfigError
from sglang_ext_router.observe import traces
from support.engines import free_port
from support.otlp_receiver import otlp_receiver
from support.router_process import cluster
from support.scripted_engine import DONE, event, status, stream

TRACE_ID, CLIENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{CLIENT_ID}-01"
BODY = {"input_ids": [1, 2, 3], "stream": True}
TOKENS = [event({"meta_info": {"prompt_tokens": 3, "completion_tokens": count}}) for count in (1, 2)]


@pytest.mark.slow
async def test_a_request_has_one_trace_that_adds_up() -> None:
    with otlp_receiver() as receiver:
        async with cluster(otlp_traces_endpoint=receiver.url) as served:
            served.short[0].script = stream(TOKENS[0], DONE)
            served.decode[0].script = stream(*TOKENS, DONE, delay_s=0.05)
            client = await served.connect()
            reply = await client.ask("POST", "/generate", BODY, {"traceparent": PARENT, "tracestate": "a=b"})
            assert reply.status == 200
            await served.until(lambda: bool(receiver.spans), 20)
            spans = {span.name.removeprefix("sglang_ext."): span for span in receiver.spans}
            root = spans.pop("request")
            assert (root.trace_id, root.parent_id) == (TRACE_ID, CLIENT_ID)
            assert set(spans) >= {"wait", "prefill", "decode"}
            for span in spans.values():
                assert (span.trace_id, span.parent_id) == (TRACE_ID, root.span_id)
                assert root.start_s <= span.start_s <= span.end_s <= root.end_s + 1e-6
            before = sum(span.took_s for name, span in spans.items() if name != "decode")
            assert before == pytest.approx(root.attributes["gen_ai.latency.time_to_first_token"], abs=1e-5)
            assert before + spans["decode"].took_s == pytest.approx(root.attributes["gen_ai.latency.e2e"], abs=1e-5)
            assert root.attributes["sglang_ext.outcome"] == "ok"
            assert root.attributes["gen_ai.usage.completion_tokens"] == 2
            for engine in (served.short[0], served.decode[0]):
                headers = dict(engine.requests[-1].headers)
                assert headers["traceparent"] == f"00-{TRACE_ID}-{root.span_id}-01"
                assert headers["tracestate"] == "a=b"


@pytest.mark.slow
async def test_what_is_not_sampled_is_sent_on_and_not_recorded() -> None:
    with otlp_receiver() as receiver:
        async with cluster(otlp_traces_endpoint=receiver.url, otlp_sample_ratio=0.0) as served:
            client = await served.connect()
            for given in (PARENT[:-1] + "0", None, "00-" + "0" * 32 + f"-{CLIENT_ID}-01", PARENT):
                await client.ask(
                    "POST", "/generate", {"input_ids": [1]}, {} if given is None else {"traceparent": given}
                )
            sent = [dict(request.headers)["traceparent"] for request in served.decode[0].requests]
            assert sent[0] == PARENT[:-1] + "0"
            assert [one[-2:] for one in sent] == ["00", "00", "00", "01"]
            assert "0" * 32 not in sent[2]
            await served.until(lambda: bool(receiver.spans), 20)
            assert {span.trace_id for span in receiver.spans} == {TRACE_ID}


@pytest.mark.slow
async def test_a_failed_request_has_a_trace() -> None:
    with otlp_receiver() as receiver:
        async with cluster(otlp_traces_endpoint=receiver.url, retry_max_retries=0) as served:
            served.decode[0].script = status(500)
            client = await served.connect()
            assert (await client.ask("POST", "/generate", {"input_ids": [1]})).status == 500
            await served.until(lambda: bool(receiver.spans), 20)
            (root,) = [span for span in receiver.spans if not span.parent_id]
            assert root.attributes["sglang_ext.outcome"] == "error_before"


@pytest.mark.slow
async def test_a_collector_that_is_away_loses_traces_and_holds_nothing_up() -> None:
    async with cluster(otlp_traces_endpoint=f"http://127.0.0.1:{free_port()}") as served:
        tracer = served.router.services.tracer
        assert tracer is not None
        client = await served.connect()
        for _ in range(20):
            assert (await client.ask("POST", "/generate", {"input_ids": [1]})).status == 200
        await served.until(lambda: tracer.counts == {"sent": 0, "dropped": 20}, 20)
        exposed = (await served.ask("GET", "/metrics")).body.decode()
        assert 'sglang_ext_router_traces_total{result="dropped"} 20.0' in exposed


@pytest.mark.slow
async def test_a_trace_that_cannot_be_made_and_an_answer_that_is_none_cost_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = traces.add_request
    failing = [RuntimeError("a record of another version")]

    def add(*arguments: Any) -> str:
        if failing:
            raise failing.pop()
        return made(*arguments)

    monkeypatch.setattr(traces, "add_request", add)
    with otlp_receiver() as receiver:
        async with cluster(otlp_traces_endpoint=receiver.url) as served:
            tracer = served.router.services.tracer
            assert tracer is not None
            pool = SimpleNamespace(answer={"members": [3], "recent": "x"}, read_s=None, clock_offset_s=None)
            monkeypatch.setattr(tracer, "_long_pool", pool)
            client = await served.connect()
            await client.ask("POST", "/generate", {"input_ids": [1]}, {"traceparent": PARENT})
            await served.until(lambda: tracer.counts == {"sent": 0, "dropped": 1}, 20)

            posting = [ValueError("what no HTTP library should raise")]
            post = aiohttp.ClientSession.post

            def post_once(self: Any, *arguments: Any, **options: Any) -> Any:
                if posting:
                    raise posting.pop()
                return post(self, *arguments, **options)

            monkeypatch.setattr(aiohttp.ClientSession, "post", post_once)
            await client.ask("POST", "/generate", {"input_ids": [1]})
            await served.until(lambda: tracer.counts == {"sent": 0, "dropped": 2}, 20)
            await client.ask("POST", "/generate", {"input_ids": [1]})
            await served.until(lambda: tracer.counts == {"sent": 1, "dropped": 2}, 20)
            exposed = (await served.ask("GET", "/metrics")).body.decode()
            assert 'sglang_ext_router_traces_total{result="sent"} 1.0' in exposed
            assert receiver.spans


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://c:4317", "http://", "http://c:x", "http://c:4318/?a=b"])
async def test_an_endpoint_that_is_none_is_refused_at_the_start(endpoint: str) -> None:
    with pytest.raises(RouterConfigError, match=r"--otlp-traces-endpoint: .* is not of the form http://HOST:PORT"):
        async with cluster(otlp_traces_endpoint=endpoint):
            pass


@pytest.mark.parametrize("endpoint", ["http://c:4318", "https://api.example.org/otlp/v1/traces", "http://[::1]:4318/"])
def test_an_endpoint_may_have_a_path_and_no_port(endpoint: str) -> None:
    assert RouterConfig(otlp_traces_endpoint=endpoint).otlp_traces_endpoint == endpoint


async def test_without_a_collector_nothing_is_added() -> None:
    async with cluster() as served:
        assert served.router.services.tracer is None
        client = await served.connect()
        await client.ask("POST", "/generate", {"input_ids": [1]})
        await client.ask("POST", "/generate", {"input_ids": [1]}, {"traceparent": PARENT})
        first, second = (dict(request.headers) for request in served.decode[0].requests)
        assert "traceparent" not in first
        assert second["traceparent"] == PARENT


async def test_a_ratio_is_at_most_one() -> None:
    with pytest.raises(RouterConfigError, match="--otlp-sample-ratio must be at most 1"):
        async with cluster(otlp_sample_ratio=1.5):
            pass
