"""Spans under those of SGLang: what its trace context is told, and that nothing is where it traces nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.engine.request_traces import RequestTrace, begin_trace, record_launch, trace_of
from sglang_ext.trace_keys import SpanName

pytestmark = pytest.mark.usefixtures("sglang_imported")


class Context:
    """SGLang's trace context of one request, as far as it is used."""

    tracing_enable = True

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, dict[str, Any]]] = []  # with their seconds, in the order of their end
        self._open: list[tuple[str, int]] = []

    def trace_slice_start(self, name: str, level: int, ts: int) -> None:
        self._open.append((name, ts))

    def trace_slice_end(self, name: str, level: int, ts: int, attrs: dict[str, Any]) -> None:
        started, start_ns = self._open.pop()
        assert started == name
        self.spans.append((name, (ts - start_ns) / 1e9, attrs))

    def trace_slice(self, part: Any) -> None:
        assert self._open, "it has a parent"
        assert self._open[-1][1] <= part.start_time_ns <= part.end_time_ns
        self.spans.append((part.slice_name, (part.end_time_ns - part.start_time_ns) / 1e9, part.attrs))


def request(context: Any) -> Any:
    return SimpleNamespace(disagg_kv_sender=SimpleNamespace(trace=None), time_stats=SimpleNamespace(trace_ctx=context))


def test_what_sglang_does_not_trace_has_no_trace() -> None:
    for context in (None, SimpleNamespace(tracing_enable=False)):
        untraced = request(context)
        begin_trace(untraced)
        assert trace_of(untraced) is None
        assert record_launch([untraced], [5], [0]) == []
    without_sender = SimpleNamespace(disagg_kv_sender=None)
    begin_trace(without_sender)
    assert trace_of(without_sender) is None


def test_a_batch_is_a_span_of_each_traced_request_in_it() -> None:
    context = Context()
    traced, other = request(context), request(None)
    begin_trace(traced)
    begin_trace(other)
    (trace,) = record_launch([traced, other], [5, 7], [3, 0])
    trace.record_shape("8x2")
    assert trace_of(traced) is trace
    trace.record_result()
    ((name, took_s, attributes),) = context.spans
    assert name == "sglang_ext.batch"
    assert took_s >= 0
    assert attributes == {
        "sglang_ext.batch.requests": 2,
        "sglang_ext.batch.new_tokens": 12,
        "sglang_ext.batch.graph_shape": "8x2",
        "sglang_ext.new_tokens": 5,
        "sglang_ext.prefix_tokens": 3,
    }
    trace.record_result()  # of a prompt that a pool has computed
    assert len(context.spans) == 1


def test_inner_spans_are_within_the_outer_one() -> None:
    context = Context()
    inner = [(SpanName.LAYERS, 8.0, 10.5, {}), (SpanName.LAYERS, 11.0, 14.0, {})]
    RequestTrace(context).add(SpanName.TRANSFER, 10.0, 12.0, {}, inner)
    assert [name for name, _, _ in context.spans] == ["sglang_ext.transfer.layers"] * 2 + ["sglang_ext.transfer"]
    assert [took_s for _, took_s, _ in context.spans] == pytest.approx([0.5, 1.0, 2.0], abs=1e-5)
