"""The spans of one request in OTLP's JSON, made from the records of the router and of a long pool's coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_ext.live.decide.view import SeenRequest
from sglang_ext.trace_keys import Key, SpanName

Span = dict[str, Any]
Value = str | bool | int | float | Sequence[str] | None
_INTERNAL, _SERVER = 1, 2  # kinds of span
_ERROR = 2  # status code


class TraceContext(NamedTuple):
    """A request's place in its trace, in hexadecimal digits."""

    trace_id: str
    span_id: str  # of the request's own span
    parent_id: str  # of the client's; empty without one


class SpanMaker:
    """Makes the spans of one trace; its callers give times of the event loop."""

    def __init__(self, trace_id: str, unix_offset_s: float, next_id: Callable[[], str]) -> None:
        self._trace_id = trace_id
        self._offset_s = unix_offset_s
        self._next_id = next_id
        self.spans: list[Span] = []

    def add(
        self,
        name: SpanName,
        start_s: float,
        end_s: float,
        parent_id: str,
        attributes: Mapping[Key, Value],
        span_id: str = "",
        is_error: bool = False,
    ) -> str:
        """Add a span; returns its id."""
        own_id = span_id or self._next_id()
        span: Span = {
            "traceId": self._trace_id,
            "spanId": own_id,
            "name": name.value,
            "kind": _SERVER if name is SpanName.REQUEST else _INTERNAL,
            "startTimeUnixNano": self._nanoseconds(start_s),
            "endTimeUnixNano": self._nanoseconds(max(start_s, end_s)),
            "attributes": [
                {"key": key.value, "value": _any_value(value)} for key, value in attributes.items() if value is not None
            ],
        }
        if parent_id:
            span["parentSpanId"] = parent_id
        if is_error:
            span["status"] = {"code": _ERROR}
        self.spans.append(span)
        return own_id

    def _nanoseconds(self, at_s: float) -> str:
        return str(round((at_s + self._offset_s) * 1e9))


def add_request(maker: SpanMaker, context: TraceContext, seen: SeenRequest, ended_s: float) -> str:
    """Add the router's spans; return the id of the prefill's span, empty where nothing was sent."""
    sent_s, prefill_s, token_s = seen.sent_s, seen.prefilled_s, seen.first_token_s
    maker.add(
        SpanName.REQUEST,
        seen.received_s,
        ended_s,
        context.parent_id,
        {
            Key.REQUEST_ID: seen.id,
            Key.PROMPT_TOKENS: seen.prompt_tokens,
            Key.CACHED_TOKENS: seen.cached_tokens,
            Key.OUTPUT_TOKENS: seen.output_tokens,
            Key.QUEUE_S: None if sent_s is None else sent_s - seen.received_s,
            Key.TTFT_S: None if token_s is None else token_s - seen.received_s,
            Key.E2E_S: ended_s - seen.received_s,
            **_time_in_model(seen, ended_s),
            Key.LENGTH_CLASS: seen.length_class,
            Key.PREFILL: seen.prefill,
            Key.DECODE: seen.decode,
            Key.ATTEMPTS: seen.attempts,
            Key.OUTCOME: seen.outcome,
        },
        context.span_id,
        is_error=seen.outcome != "ok",
    )
    maker.add(SpanName.WAIT, seen.received_s, ended_s if sent_s is None else sent_s, context.span_id, {})
    if sent_s is None:
        return ""
    # Decode may send its first token before the last of prefill's reply has come.
    ends = [at_s for at_s in (prefill_s, token_s) if at_s is not None]
    prefill_end_s = min(ends, default=ended_s)
    prefill_id = maker.add(SpanName.PREFILL, sent_s, prefill_end_s, context.span_id, {Key.PREFILL: seen.prefill})
    if token_s is not None:
        if token_s > prefill_end_s:
            maker.add(SpanName.FIRST_TOKEN, prefill_end_s, token_s, context.span_id, {Key.DECODE: seen.decode})
        maker.add(SpanName.DECODE, token_s, ended_s, context.span_id, {Key.DECODE: seen.decode})
    return prefill_id


def _time_in_model(seen: SeenRequest, ended_s: float) -> dict[Key, float]:
    """Return the times that SGLang measures in an instance; here they begin when both legs are sent."""
    sent_s, token_s = seen.sent_s, seen.first_token_s
    if sent_s is None or token_s is None:
        return {}
    return {
        Key.MODEL_PREFILL_S: token_s - sent_s,
        Key.MODEL_DECODE_S: ended_s - token_s,
        Key.MODEL_INFERENCE_S: ended_s - sent_s,
    }


def add_pool(
    maker: SpanMaker, prefill_id: str, record: Mapping[str, Any], names: Mapping[str, str], offset_s: float
) -> None:
    """Add what a long pool did for a request, from its entry in the coordinator's /status.

    `offset_s` turns the coordinator's times into the loop's. KeyError, TypeError or ValueError where the
    entry is none.
    """
    steps = record["steps"]
    offered_s = float(record["offered_s"]) + offset_s
    if steps:
        maker.add(SpanName.POOL_WAIT, offered_s, float(steps[0]["ordered_s"]) + offset_s, prefill_id, {})
    for step in steps:
        if step["ended_s"] is None:
            continue
        is_chunk, has_failed = step["kind"] == "chunk", bool(step["has_failed"])
        maker.add(
            SpanName.POOL_CHUNK if is_chunk else SpanName.POOL_COLLECT,
            float(step["ordered_s"]) + offset_s,
            float(step["ended_s"]) + offset_s,
            prefill_id,
            {
                Key.STEP_TOKENS: int(step["new_tokens"]) if is_chunk else None,
                Key.STEP_MOVED_TOKENS: int(step["moved_tokens"]),
                Key.STEP_MEMBERS: [names.get(str(member), str(member)) for member in step["members"]],
                Key.STEP_FAILED: has_failed,
            },
            is_error=has_failed,
        )
    transfer_s = record["transfer_s"]
    if transfer_s is not None:
        exposed_s = record["exposed_transfer_s"]
        maker.add(
            SpanName.POOL_TRANSFER, offered_s, offered_s + float(transfer_s), prefill_id, {Key.EXPOSED_S: exposed_s}
        )


def _any_value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [{"stringValue": member} for member in value or ()]}}
