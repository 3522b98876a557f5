"""A trace of a long prompt through a real pool, and of a short one, as a collector gets them over OTLP."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.long_pool import Coordinator
from support.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from support.reference import random_prompt
from support.router_cli import RunningRouter, running_router
from support.running_time import running_s

pytestmark = pytest.mark.integration
LONG, SHORT = 900, 40


def member(coordinator: Coordinator, number: int) -> EngineSpec:
    options = (
        *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", "200"),
        *("--laps-boundary-tokens", "256", "--cdsp-step-timeout-s", "10"),
    )
    return EngineSpec(Role.LONG, worker_options=options, name=f"traced{number}")


def trace_of(router: RunningRouter, receiver: OtlpReceiver, prompt: list[int], number: int) -> list[ReceivedSpan]:
    trace_id = f"{number:032x}"
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
    headers = {"traceparent": f"00-{trace_id}-{number:016x}-01"}
    reply, _ = router.call("POST", "/generate", body, 120, headers)
    assert reply.status == 200, reply.body
    end_s = running_s() + 60
    while not receiver.of(trace_id):
        assert running_s() < end_s
        time.sleep(0.05)
    return receiver.of(trace_id)


def check_nested(spans: list[ReceivedSpan], client_id: str) -> tuple[ReceivedSpan, dict[str, ReceivedSpan]]:
    """The root, and those right under it by name, which add up to the time to the first token."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = [span for span in spans if span.name == "sglang_ext.request"]
    assert root.parent_id == client_id
    for span in spans:
        if span is not root:
            parent = by_id[span.parent_id]
            assert parent.start_s - 0.01 <= span.start_s, (parent, span)
            assert span.end_s <= parent.end_s + 0.01, (parent, span)
    under = {span.name.removeprefix("sglang_ext."): span for span in spans if span.parent_id == root.span_id}
    ttft_s = root.attributes["gen_ai.latency.time_to_first_token"]
    parts_s = sum(span.took_s for name, span in under.items() if name != "decode")
    assert parts_s == pytest.approx(ttft_s, rel=0.05)
    return root, under


def is_complete(status: dict[str, Any]) -> bool:
    return len(status["members"]) == 2


def test_traces_of_a_long_and_a_short_prompt() -> None:
    with otlp_receiver() as receiver, Coordinator.running("--sp-sizes", "2", "--min-chunk-tokens", "64") as coordinator:
        engines = FLEET.get(*(member(coordinator, number) for number in range(2)), EngineSpec(Role.DECODE))
        coordinator.wait_for(is_complete)
        arguments = (
            *("--coordinator-url", coordinator.http_url, "--length-boundary-tokens", "256"),
            *("--otlp-traces-endpoint", receiver.url),
        )
        with running_router(engines, *arguments) as router:
            spans = trace_of(router, receiver, random_prompt(LONG, seed=81), 7)
            root, under = check_nested(spans, f"{7:016x}")
            assert root.attributes["sglang_ext.length_class"] == "long"
            chunks = [span for span in spans if span.name == "sglang_ext.pool.chunk"]
            # Of a prompt that is collected its own instance computes the last token itself.
            assert sum(span.attributes["sglang_ext.step.new_tokens"] for span in chunks) in {LONG - 1, LONG}
            assert all(span.parent_id == under["prefill"].span_id for span in chunks)
            assert all(len(span.attributes["sglang_ext.step.members"]) == 2 for span in chunks)
            assert {span.name for span in spans} >= {"sglang_ext.pool.wait"}

            spans = trace_of(router, receiver, random_prompt(SHORT, seed=82), 8)
            root, under = check_nested(spans, f"{8:016x}")
            assert root.attributes["sglang_ext.length_class"] == "short"
            assert not [span for span in spans if "pool" in span.name]
        for engine in engines[:2]:
            engine.stop()
