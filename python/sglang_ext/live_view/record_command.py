"""`sglang-ext record`: the live page's stream of a running router into a file, to be looked at again later."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlsplit

from sglang_ext.live_view.recording import MAX_LINE_BYTES, RecordingError, check_lines

_TIMEOUT_S = 15.0  # without a message, of which four come a second
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEY_VARIABLES = ("SGLANG_EXT_ADMIN_API_KEY", "SGLANG_EXT_API_KEY")


class _StoppedError(Exception):
    """Ctrl-C or SIGTERM: what has been written stays."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext record`."""
    add = parser.add_argument
    add("url", metavar="URL", help="address of the router, such as http://127.0.0.1:30000")
    add("--out", type=Path, metavar="FILE", default=Path("recording.jsonl"), help="file to write, one message a line")
    add("--seconds", type=float, metavar="S", help="for how long; without it until Ctrl-C, or the router ends")
    add(
        "--api-key",
        default="",
        metavar="TEXT",
        help=f"key for the stream, where the router asks for one; also read from {' or '.join(KEY_VARIABLES)}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Record until told to stop; 0 unless nothing was recorded, or the connection was lost."""
    if arguments.seconds is not None and not 0 < arguments.seconds < float("inf"):
        return _fail(f"--seconds must be above 0, got {arguments.seconds:g}", 2)
    address = arguments.url if "://" in arguments.url else f"http://{arguments.url}"
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        return _fail(f"{arguments.url!r} is not of the form http://HOST:PORT", 2)
    key = arguments.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    base = address.rstrip("/").removesuffix("/ui")
    request = urllib.request.Request(f"{base}/ui/stream", headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        reply = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        why = {401: "a key is needed, or this one is wrong (--api-key)", 404: "it has no live page"}.get(error.code, "")
        return _fail(f"{base} answers {error.code}{why and ': '}{why}", 1)
    except (OSError, http.client.HTTPException) as error:
        return _fail(f"{base} does not answer ({getattr(error, 'reason', error)})", 1)
    previous = [signal.signal(number, _stop) for number in _SIGNALS]
    try:
        with reply, arguments.out.open("wb") as file:
            return _record(reply, file, arguments)
    except OSError as error:
        return _fail(f"--out {arguments.out}: {error.strerror or error}", 1)
    finally:
        for number, handler in zip(_SIGNALS, previous, strict=True):
            signal.signal(number, handler)


def _record(reply: http.client.HTTPResponse, file: IO[bytes], arguments: argparse.Namespace) -> int:
    """Write messages as they come, each whole."""
    end_s = time.monotonic() + (arguments.seconds or float("inf"))
    written = 0
    lost = ""
    try:
        while time.monotonic() < end_s:
            line = _next_line(reply)
            if line is None:
                lost = "the router has ended the stream"
                break
            if not line.startswith(b"data: "):
                continue
            message = line[6:]
            if not written:
                next(check_lines([message]))
            file.write(message)
            file.flush()
            written += 1
    except _StoppedError:
        pass
    except RecordingError as error:
        return _fail(f"{arguments.url}: {error}", 1)
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        lost = f"the connection was lost ({str(error) or type(error).__name__})"
    frames = max(0, written - 1)
    with suppress(BrokenPipeError):
        print(json.dumps({"frames": frames, "file": str(arguments.out)}))
    return _fail(f"{lost}: {frames} frames are in {arguments.out}", 1) if lost else int(not frames)


def _next_line(reply: http.client.HTTPResponse) -> bytes | None:
    line = reply.readline(MAX_LINE_BYTES)
    return line if line.endswith(b"\n") else None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise _StoppedError


def _fail(message: str, status: int) -> int:
    print(f"sglang-ext record: {message}", file=sys.stderr)
    return status
