"""A trace of a long prompt through a real pool, and of a short one, as a collector gets them over OTLP."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.long_pool import Coordinator
from support.otlp_receiver import ENVIRONMENT, OtlpReceiver, ReceivedSpan, needs_protocol, otlp_receiver
from support.reference import random_prompt
from support.router_cli import RunningRouter, running_router
from support.running_time import running_s
from support.tiny_model import STANDARD_SHAPE

pytestmark = pytest.mark.integration
LONG, SHORT = 900, 40
NEW_TOKENS = 4


def member(coordinator: Coordinator, number: int) -> EngineSpec:
    options = (
        *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", "200"),
        *("--laps-boundary-tokens", "256", "--cdsp-step-timeout-s", "10"),
    )
    return EngineSpec(Role.LONG, worker_options=options, name=f"traced{number}")


def trace_of(router: RunningRouter, receiver: OtlpReceiver, prompt: list[int], number: int) -> list[ReceivedSpan]:
    trace_id = f"{number:032x}"
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
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


def traced(role: Role, receiver: OtlpReceiver, *worker_options: str, chunk_tokens: int = 256) -> EngineSpec:
    """An instance that sends SGLang's own spans, and this project's below them."""
    return EngineSpec(
        role,
        arguments=(
            *("--enable-trace", "--otlp-traces-endpoint", f"{receiver.url}/v1/traces"),
            *(() if role is Role.DECODE else ("--chunked-prefill-size", str(chunk_tokens))),
        ),
        worker_options=("--transfer-backend", "handshake", *worker_options),
        environment=ENVIRONMENT,
        name=f"spans of {role}",
    )


def ancestors(span: ReceivedSpan, by_id: dict[str, ReceivedSpan]) -> list[str]:
    """Names of what it lies in, from the inside."""
    names = []
    while (parent := by_id.get(span.parent_id)) is not None:
        names.append(parent.name)
        span = parent
    return names


@pytest.mark.full
@needs_protocol
def test_spans_of_both_instances_lie_in_the_routers() -> None:
    with otlp_receiver() as receiver:
        by_layer = ("--transfer-stream-layer-kib", "0")
        engines = FLEET.get(traced(Role.BOTH, receiver, *by_layer), traced(Role.DECODE, receiver))
        try:
            with running_router(engines, "--otlp-traces-endpoint", receiver.url) as router:
                trace_of(router, receiver, random_prompt(LONG, seed=83), 9)
                expected = {"sglang_ext.handshake", "sglang_ext.batch", "sglang_ext.transfer", "decode_transferred"}
                end_s = running_s() + 60
                trace_id = f"{9:032x}"

                def roots() -> list[ReceivedSpan]:
                    return [
                        span for span in receiver.of(trace_id) if span.attributes.get("module") == "sglang::request"
                    ]

                while len(roots()) < 2 or not expected <= {span.name for span in receiver.of(trace_id)}:
                    assert running_s() < end_s, sorted(span.name for span in receiver.of(trace_id))
                    time.sleep(0.05)
        finally:
            for engine in engines:
                engine.stop()
    spans = receiver.of(trace_id)
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.name == "sglang_ext.request"]
    # One root of SGLang's in each instance, right under the router's; everything else lies in one of these.
    assert {span.parent_id for span in roots()} == {root.span_id}
    assert {span.name.split()[0] for span in roots()} == {"prefill", "decode"}
    for span in spans:
        if span is not root:
            assert ancestors(span, by_id)[-1] == root.name
            parent = by_id[span.parent_id]
            assert parent.start_s - 0.05 <= span.start_s <= span.end_s <= parent.end_s + 0.5, (parent, span)
    named = {name: [span for span in spans if span.name == name] for name in expected | {"sglang_ext.transfer.layers"}}
    chunks = sorted(named["sglang_ext.batch"], key=lambda span: span.start_s)
    new_tokens = [span.attributes["sglang_ext.new_tokens"] for span in chunks]
    assert sum(new_tokens) == LONG
    assert len(new_tokens) > 1
    prefixes = [span.attributes["sglang_ext.prefix_tokens"] for span in chunks]
    assert prefixes == [sum(new_tokens[:number]) for number in range(len(chunks))]
    assert all(span.attributes["sglang_ext.batch.requests"] == 1 for span in chunks)
    (handshake,), (transfer,) = named["sglang_ext.handshake"], named["sglang_ext.transfer"]
    assert handshake.end_s <= chunks[0].start_s + 0.01
    assert transfer.attributes["sglang_ext.transfer.tokens"] == LONG
    assert chunks[0].start_s <= transfer.start_s < chunks[-1].start_s, "the first chunks have left before the last one"
    layers = named["sglang_ext.transfer.layers"]
    assert {span.parent_id for span in layers} == {transfer.span_id}
    # Every layer of every token is in one of the ranges.
    sent = sum(
        span.attributes["sglang_ext.transfer.tokens"] * span.attributes["sglang_ext.transfer.layer_count"]
        for span in layers
    )
    assert sent == LONG * STANDARD_SHAPE.layers
    # What the instances measured adds up to what the router did: handshake, chunks, and the end of the transfer.
    (prefill,) = [span for span in spans if span.name == "sglang_ext.prefill"]
    assert prefill.start_s - 0.01 <= handshake.start_s
    assert transfer.end_s <= prefill.end_s + 0.05
    in_model = root.attributes["gen_ai.latency.time_in_model_prefill"]
    assert in_model == pytest.approx(root.attributes["gen_ai.latency.time_to_first_token"], rel=0.2)
    assert in_model + root.attributes["gen_ai.latency.time_in_model_decode"] == pytest.approx(
        root.attributes["gen_ai.latency.time_in_model_inference"]
    )
