"""A collector of traces: takes OTLP/HTTP in JSON, refuses what the protocol does not allow, and keeps the spans."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
        assert kind == "application/json", kind
        for resource in json.loads(body)["resourceSpans"]:
            names = [one["value"]["stringValue"] for one in resource["resource"]["attributes"]]
            assert names == ["sglang-ext-router"], names
            for scope in resource["scopeSpans"]:
                self.spans += [read_span(span) for span in scope["spans"]]

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


def read_span(span: dict[str, Any]) -> ReceivedSpan:
    """Check a span against the protocol's JSON mapping."""
    parent_id = span.get("parentSpanId", "")
    assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"]), span
    assert re.fullmatch(r"[0-9a-f]{16}", span["spanId"]), span
    assert re.fullmatch(r"([0-9a-f]{16})?", parent_id), span
    assert span["kind"] in range(1, 6), span
    attributes = {one["key"]: read_value(one["value"]) for one in span["attributes"]}
    start_s, end_s = (int(span[f"{edge}TimeUnixNano"]) / 1e9 for edge in ("start", "end"))
    assert start_s <= end_s, span
    return ReceivedSpan(span["traceId"], span["spanId"], parent_id, span["name"], start_s, end_s, attributes)


def read_value(value: dict[str, Any]) -> Any:
    ((kind, held),) = value.items()
    assert isinstance(held, _KINDS[kind]), value
    if kind == "arrayValue":
        return [read_value(one) for one in held["values"]]
    return int(held) if kind == "intValue" else held


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
