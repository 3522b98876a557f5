"""Recordings of the live page's stream to test it with, made by the simulator."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sglang_ext.cli import main
from sglang_ext.live.decide.messages import InstanceRow, LoadRow, PromptRow, hello
from sglang_ext.live.decide.view import Counts, LiveView, SeenInstance, SeenSpan
from support.settings import sets


def simulated_recording(folder: Path, *, seconds: float = 20.0, seed: int = 1) -> Path:
    """Short prompts, one in seven long, on three short and five long instances, of which some move; two decode."""
    return _simulated(folder, seconds, seed, sets("policy.name=laps", "policy.move_pools=true"))


def shared_recording(folder: Path, *, seconds: float = 20.0, seed: int = 1) -> Path:
    """The same prompts where the five long instances share the long ones, and none moves."""
    return _simulated(folder, seconds, seed, sets("policy.name=pool"))


def _simulated(folder: Path, seconds: float, seed: int, policy: Sequence[str]) -> Path:
    draw = random.Random(seed)
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(25)) < seconds:
        tokens = draw.choice((30, 60, 100, 180, 240)) if draw.random() < 0.85 else draw.randint(4_000, 30_000)
        lines.append(f"{at_s:.3f},{tokens},{draw.randint(20, 300)}")
    workload = folder / "workload.csv"
    workload.write_text("\n".join(lines) + "\n")
    out = folder / "recording.jsonl"
    options = [*policy, *sets("instances.prefill=8", "instances.short=3", "decode.instances=2")]
    assert (
        main(
            [
                "simulate",
                *sets(f"workload.file={workload}"),
                *options,
                *sets("policy.boundary_tokens=256"),
                "--record",
                str(out),
            ]
        )
        == 0
    )
    return out


def long_pool_recording(folder: Path) -> Path:
    """Four instances that share two prompts: one is collected, of the other two chunks are begun, one is planned."""
    view = LiveView(0.0, {"long": 5.0})
    lines = [hello(source="router", name="r", began_unix_s=1e9, interval_s=0.25, boundary_tokens=256, notes=["a note"])]
    names = [f"host:{number}" for number in range(4)]
    load = LoadRow(0, 1, 2, 0, 1, 1, 0.0, 0.8, 0.5, 0.3, 1)
    instances = [SeenInstance(InstanceRow(0, name, "long", "m", "ready", "long", ""), load) for name in names]
    collected = [(2_000, names[:1], 1.25, 3.0), (6_500, names[:3], 3.0, 14.0)]
    under_way = [(4_000, names[3:], 5.0, 9.0), (5_000, [names[3], names[1]], 9.0, None)]
    prompts = [
        PromptRow(1, names[0], 9_000, 500, 1.0, 15.0, "collected", collected, []),
        PromptRow(2, names[3], 20_000, 0, 4.0, None, None, under_way, [(11_000, names)]),
    ]
    for frame in range(80):
        at_s = 0.25 * frame
        view.take_instances(instances, at_s)
        view.take_in_flight([], Counts(0, 0, {}), at_s)
        if at_s == 16.0:
            view.take_prompts(prompts)
            for name in names[:3]:
                view.add_spans(
                    SeenSpan(name, kind, start_s, end_s, "long", "9,000 tokens of host:0")
                    for kind, start_s, end_s in (("compute", 3.0, 10.0), ("ring", 10.0, 14.0), ("collect", 14.0, 15.0))
                )
        lines.append(view.frame(at_s) or b"")
    out = folder / "long-pool.jsonl"
    out.write_bytes(b"\n".join(lines) + b"\n")
    return out


def fleet_recording(folder: Path, count: int) -> Path:
    """So many instances for short prompts, the last of which is out."""
    view = LiveView(0.0)
    lines = [hello(source="router", name="r", began_unix_s=1e9, interval_s=0.25, boundary_tokens=256, notes=[])]
    load = LoadRow(0, 3, 2, 0, 1, 0, 0.5, 0.25, 0.5, 0.3, 1)
    rows = [
        InstanceRow(0, f"host:{number}", "short", "m", "ready" if number < count - 1 else "unhealthy", None, "")
        for number in range(count)
    ]
    for frame in range(40):
        view.take_instances([SeenInstance(row, load) for row in rows], 0.25 * frame)
        lines.append(view.frame(0.25 * frame) or b"")
    out = folder / "fleet.jsonl"
    out.write_bytes(b"\n".join(lines) + b"\n")
    return out


class StreamingRouter(ThreadingHTTPServer):
    """Streams the same messages to all; then it ends the stream, or waits."""

    daemon_threads = True

    def __init__(self, messages: Sequence[bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _StreamHandler)
        self.answer = b"".join(b"data: %b\n\n" % message for message in messages)
        self.code = 200
        self.location = ""  # where it sends its clients on to
        self.waits = False
        self.asked: list[tuple[str, str | None]] = []  # path and Authorization

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _StreamHandler(BaseHTTPRequestHandler):
    server: StreamingRouter

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("authorization")))
        self.send_response(self.server.code)
        if self.server.location:
            self.send_header("location", self.server.location)
        self.end_headers()
        self.wfile.write(self.server.answer)
        self.wfile.flush()
        if self.server.waits:
            time.sleep(30)

    def log_message(self, *_: object) -> None:
        """Not on standard error."""


@contextmanager
def streaming_router(messages: Sequence[bytes]) -> Iterator[StreamingRouter]:
    """One in a thread of its own."""
    with StreamingRouter(messages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
