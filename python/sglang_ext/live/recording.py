"""Recordings of the live page's stream: lines of JSON, read strictly, and a page that holds one and needs no server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from sglang_ext.live.decide.messages import GONE, ROWS, VERSION, InstanceRow, RequestRow

MAX_LINE_BYTES = 1 << 20
_SCRIPT = "\n<script>\n"


class RecordingError(ValueError):
    """A file that is no recording; the text is one line and names the line of the file."""


class Recorded(NamedTuple):
    """The state at the end of a recording: every instance and request in it, with its last fields."""

    hello: Mapping[str, Any]
    frames: int
    end_s: float
    instances: Mapping[int, InstanceRow]
    requests: Mapping[int, RequestRow]  # in the order of their numbers


def check_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a recording, whose last line may be cut off. Raises RecordingError for a damaged one."""
    is_first = True
    cut_off: str | None = None
    for number, line in enumerate(lines, 1):
        if cut_off is not None:
            raise RecordingError(cut_off)
        if not line.strip():
            continue
        if len(line) > MAX_LINE_BYTES:
            raise RecordingError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
        try:
            message = json.loads(line)
        except ValueError:
            cut_off = f"line {number} is not JSON"
            continue
        kind = message.get("kind") if isinstance(message, dict) else None
        if is_first:
            _check_hello(message, kind)
        elif kind not in {"hello", "frame"}:
            raise RecordingError(f"line {number} is neither a frame nor a hello")
        elif kind == "frame" and not isinstance(message.get("at_s"), int | float):
            raise RecordingError(f"line {number}: at_s must be a number")
        is_first = False
        yield message
    if is_first:
        raise RecordingError(cut_off or "it is empty")


def _check_hello(message: Any, kind: object) -> None:
    if kind != "hello":
        raise RecordingError(
            "line 1 is not a hello: not a recording of `sglang-ext live record` or `simulate --record`"
        )
    if message.get("version") != VERSION:
        raise RecordingError(f"line 1: version {message.get('version')!r} is not {VERSION}")
    fields = message.get("fields")
    if not isinstance(fields, dict) or any(list(ROWS[name].__annotations__) != fields.get(name) for name in ROWS):
        raise RecordingError("line 1: the fields are not those of this version")


def read_recording(path: Path) -> Recorded:
    """Read a recording to its end. RecordingError, OSError."""
    hello: dict[str, Any] = {}
    instances: dict[int, InstanceRow] = {}
    requests: dict[int, RequestRow] = {}
    frames, end_s = 0, 0.0
    with path.open("rb") as file:
        for message in check_lines(file):
            if message["kind"] == "hello":
                is_same = message.get("began_unix_s") is not None and {**message, "notes": 0} == {**hello, "notes": 0}
                frames = frames if is_same else 0
                # Of the same stream some messages were missed: what is under way is sent again, ends are not.
                requests = {number: row for number, row in requests.items() if is_same and row.ended_s is not None}
                hello = message
                instances.clear()
                continue
            frames += 1
            end_s = float(message["at_s"])
            try:
                for values in message.get("instances", ()):
                    row = InstanceRow(*values)
                    if row.state != GONE:
                        instances[row.instance] = row
                for values in message.get("requests", ()):
                    request = RequestRow(*values)
                    requests[request.request] = request
            except TypeError as error:
                raise RecordingError(f"frame {frames}: {error}") from None
    return Recorded(hello, frames, end_s, instances, dict(sorted(requests.items())))


def write_page(recording: Path, out: Path) -> int:
    """Write the page with a recording inside; the number of its messages. RecordingError, OSError."""
    with recording.open("rb") as file:
        texts = [json.dumps(message, separators=(",", ":")) for message in check_lines(file)]
    # A text of the recording must not end the element that holds it.
    content = "\n".join(texts).replace("<", "\\u003c")
    page = files("sglang_ext.live").joinpath("page.html").read_text(encoding="utf-8")
    assert page.count(_SCRIPT) == 1
    held = f'\n<script type="application/x-ndjson" id="recording">\n{content}\n</script>'
    out.write_text(page.replace(_SCRIPT, held + _SCRIPT), encoding="utf-8")
    return len(texts)
