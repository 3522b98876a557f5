"""`sglang-ext live record`: the live page's stream of a running router into a file, to be looked at again later."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from sglang_ext.live.recording import RecordingError, check_lines
from sglang_ext.live.stream_client import (
    KEY_HELP,
    AddressError,
    LiveStreamError,
    StoppedError,
    given_key,
    router_address,
    stopped_by_signals,
    stream_messages,
)

_FRAME = b'{"kind":"frame"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext live record`."""
    add = parser.add_argument
    add("url", metavar="URL", help="address of the router, such as http://127.0.0.1:30000")
    add("--out", type=Path, metavar="FILE", default=Path("recording.jsonl"), help="file to write, one message a line")
    add("--seconds", type=float, metavar="S", help="seconds to record (default: until Ctrl-C, or the router ends)")
    add("--api-key", default="", metavar="TEXT", help=KEY_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Record until a signal stops it; return 0 unless nothing was recorded, or the connection was lost."""
    if arguments.seconds is not None and not 0 < arguments.seconds < float("inf"):
        return _fail(f"--seconds must be above 0, got {arguments.seconds:g}", 2)
    try:
        address = router_address(arguments.url)
    except AddressError as error:
        return _fail(str(error), 2)
    messages = stream_messages(address, given_key(arguments.api_key))
    try:
        first = next(messages)
        next(check_lines([first]))
        with arguments.out.open("wb") as file:
            frames, lost = _record(first, messages, file, arguments.seconds or float("inf"))
    except (LiveStreamError, RecordingError) as error:
        return _fail(f"{address}: {error}" if isinstance(error, RecordingError) else str(error), 1)
    except OSError as error:
        return _fail(f"--out {arguments.out}: {error.strerror or error}", 1)
    with suppress(BrokenPipeError):
        print(json.dumps({"frames": frames, "file": str(arguments.out)}))
    return _fail(f"{lost}: {frames} frames are in {arguments.out}", 1) if lost else int(not frames)


def _record(first: bytes, messages: Iterator[bytes], file: IO[bytes], seconds: float) -> tuple[int, str]:
    """Write messages as they come, each whole; the number of frames, and why no more came, if not as asked."""
    end_s = time.monotonic() + seconds
    frames = 0
    try:
        with stopped_by_signals():
            message = first
            while True:
                file.write(message)
                file.flush()
                frames += message.startswith(_FRAME)
                if time.monotonic() >= end_s:
                    break
                message = next(messages)
    except StoppedError:
        pass
    except LiveStreamError as error:
        return frames, str(error)
    return frames, ""


def _fail(message: str, status: int) -> int:
    print(f"sglang-ext live record: {message}", file=sys.stderr)
    return status
