"""Spans of this project under SGLang's own spans of a request (`--enable-trace`): batches, handshake, transfer.

Where SGLang traces nothing, or not this request, its sender has no trace, and nothing is kept or made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_ext.trace_keys import Key, SpanName

Attributes = Mapping[Key, str | int | float]
_LEVEL = 1  # of SGLang's --trace-level: with its own stages


class _LaunchedBatch(NamedTuple):
    at_s: float
    attributes: dict[Key, str | int | float]


class RequestTrace:
    """One request on one rank; times are those of `time.perf_counter`. Belongs to the scheduler's thread."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._launched: deque[_LaunchedBatch] = deque()
        self._queued_s: float | None = None

    def add(
        self,
        name: SpanName,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        inner: Iterable[tuple[SpanName, float, float, Attributes]] = (),
    ) -> None:
        """Add a span, and others that are within it."""
        from sglang.srt.observability.req_time_stats import convert_time_to_realtime_ns as to_unix_ns
        from sglang.srt.observability.trace import TraceSliceContext

        self._context.trace_slice_start(name.value, _LEVEL, to_unix_ns(start_s))
        for inner_name, inner_start_s, inner_end_s, inner_attributes in inner:
            self._context.trace_slice(
                TraceSliceContext(
                    inner_name.value,
                    to_unix_ns(max(start_s, inner_start_s)),
                    to_unix_ns(min(end_s, inner_end_s)),
                    level=_LEVEL,
                    attrs=_plain(inner_attributes),
                )
            )
        self._context.trace_slice_end(name.value, _LEVEL, to_unix_ns(end_s), _plain(attributes))

    def record_handshake(self, began_s: float) -> None:
        """Decode has KV slots for it: the request may be computed from now on."""
        now_s = self._queued_s = time.perf_counter()
        self.add(SpanName.HANDSHAKE, began_s, now_s, {})

    def leave_queue(self) -> None:
        """The request is computed, or offered to the long pool; only the first time counts."""
        if self._queued_s is not None:
            self.add(SpanName.QUEUE, self._queued_s, time.perf_counter(), {})
            self._queued_s = None

    def record_launch(self, attributes: dict[Key, str | int | float]) -> None:
        """A batch that computes some of the request has been launched."""
        self.leave_queue()
        self._launched.append(_LaunchedBatch(time.perf_counter(), attributes))

    def record_shape(self, shape: str) -> None:
        """The batch that was launched last is replayed as a graph of this shape."""
        self._launched[-1].attributes[Key.BATCH_SHAPE] = shape

    def record_result(self) -> None:
        """The first of those batches that are under way has ended; a prompt that a pool has computed has none."""
        if self._launched:
            launched = self._launched.popleft()
            self.add(SpanName.BATCH, launched.at_s, time.perf_counter(), launched.attributes)


def trace_of(request: Any) -> RequestTrace | None:
    """The request's trace; None where it is not traced."""
    trace = getattr(getattr(request, "disagg_kv_sender", None), "trace", None)
    return trace if isinstance(trace, RequestTrace) else None


def begin_trace(request: Any) -> None:
    """A request has come to a prefill instance, and has its sender: give that one its trace, if SGLang traces it."""
    sender = getattr(request, "disagg_kv_sender", None)
    if sender is not None:
        context = getattr(request.time_stats, "trace_ctx", None)
        if context is not None and context.tracing_enable:
            sender.trace = RequestTrace(context)


def record_launch(
    requests: Sequence[Any], new_tokens: Sequence[int], prefix_tokens: Sequence[int]
) -> list[RequestTrace]:
    """A prefill batch has been launched: the traces of those of its requests that are traced."""
    found = []
    for request, new, prefix in zip(requests, new_tokens, prefix_tokens, strict=True):
        trace = trace_of(request)
        if trace is not None:
            trace.record_launch(
                {
                    Key.BATCH_REQUESTS: len(requests),
                    Key.BATCH_TOKENS: sum(new_tokens),
                    Key.NEW_TOKENS: new,
                    Key.PREFIX_TOKENS: prefix,
                }
            )
            found.append(trace)
    return found


def _plain(attributes: Attributes) -> dict[str, str | int | float]:
    return {key.value: value for key, value in attributes.items()}
