"""A collector of traces: takes OTLP/HTTP, refuses what the protocol does not allow, and keeps the spans.

JSON, which the router sends, is checked by hand and, where the messages of the protocol are there (`make traces-env`),
made into these; binary ones, which instances send, need them.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / ".venv/traces"
if FOLDER.is_dir() and str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
ENVIRONMENT = (
    ("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(FOLDER))))),
    ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
    ("SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS", "200"),
    ("NO_PROXY", "127.0.0.1"),
)
"""Of instances that send their spans."""
HAS_PROTOCOL = importlib.util.find_spec("opentelemetry") is not None and (FOLDER / "opentelemetry/proto").is_dir()
needs_protocol = pytest.mark.skipif(not HAS_PROTOCOL, reason="OTLP's messages are not there: `make traces-env`")
_IDS = frozenset({"traceId", "spanId", "parentSpanId"})
_KINDS = {"stringValue": str, "boolValue": bool, "intValue": str, "doubleValue": float, "arrayValue": dict}


@dataclass(frozen=True)
class ReceivedSpan:
    """A span; times in seconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    service: str = ""

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


class OtlpReceiver:
    """What came to one collector."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.problems: list[str] = []
        self.url = ""

    def take(self, path: str, kind: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        if kind == "application/x-protobuf":
            self.spans += read_binary(body)
            return
        assert kind == "application/json", kind
        message = json.loads(body)
        spans = []
        for resource in message["resourceSpans"]:
            names = [one["value"]["stringValue"] for one in resource["resource"]["attributes"]]
            assert names == ["sglang-ext-router"], names
            for scope in resource["scopeSpans"]:
                spans += [read_span(span, names[0]) for span in scope["spans"]]
        if HAS_PROTOCOL:
            assert read_binary(as_binary(message)) == spans
        self.spans += spans

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


def read_span(span: dict[str, Any], service: str) -> ReceivedSpan:
    """Check a span against the protocol's JSON mapping."""
    parent_id = span.get("parentSpanId", "")
    assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"]), span
    assert re.fullmatch(r"[0-9a-f]{16}", span["spanId"]), span
    assert re.fullmatch(r"([0-9a-f]{16})?", parent_id), span
    assert span["kind"] in range(1, 6), span
    attributes = {one["key"]: read_value(one["value"]) for one in span["attributes"]}
    start_s, end_s = (int(span[f"{edge}TimeUnixNano"]) / 1e9 for edge in ("start", "end"))
    assert start_s <= end_s, span
    return ReceivedSpan(span["traceId"], span["spanId"], parent_id, span["name"], start_s, end_s, attributes, service)


def read_value(value: dict[str, Any]) -> Any:
    ((kind, held),) = value.items()
    assert isinstance(held, _KINDS[kind]), value
    if kind == "arrayValue":
        return [read_value(one) for one in held["values"]]
    return int(held) if kind == "intValue" else held


def as_binary(message: dict[str, Any]) -> bytes:
    """A message in JSON as the protocol's own; an error of its parser for fields that it has not.

    Ids are hexadecimal in OTLP's JSON, and in base64 in that of protocol buffers.
    """
    from google.protobuf.json_format import Parse
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def with_ids(value: Any) -> Any:
        if isinstance(value, list):
            return [with_ids(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            name: base64.b64encode(bytes.fromhex(one)).decode() if name in _IDS else with_ids(one)
            for name, one in value.items()
        }

    parsed: bytes = Parse(json.dumps(with_ids(message)), ExportTraceServiceRequest()).SerializeToString()
    return parsed


def read_binary(body: bytes) -> list[ReceivedSpan]:
    """The spans of a message."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        services = {one.key: plain(one.value) for one in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                assert (len(span.trace_id), len(span.span_id)) == (16, 8), span
                assert span.start_time_unix_nano <= span.end_time_unix_nano, span
                spans.append(
                    ReceivedSpan(
                        *(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name),
                        *(span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9),
                        {one.key: plain(one.value) for one in span.attributes},
                        services["service.name"],
                    )
                )
    return spans


def plain(value: Any) -> Any:
    """What an AnyValue holds."""
    kind = value.WhichOneof("value")
    return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A collector at a port of its own; what it had to refuse fails the test at the end."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            try:
                receiver.take(self.path, self.headers["content-type"], body)
            except (AssertionError, KeyError, ValueError) as error:
                receiver.problems.append(repr(error))
            self.send_response(400 if receiver.problems else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
    assert receiver.problems == []
