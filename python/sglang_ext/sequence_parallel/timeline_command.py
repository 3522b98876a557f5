"""`sglang-ext timeline`: a picture of who computed what when in a long pool."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_ext.sequence_parallel.status_client import StatusUnavailableError, read_status
from sglang_ext.sequence_parallel.timeline import TimelineError, timeline_of
from sglang_ext.sequence_parallel.timeline_picture import PictureError, draw_timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sglang-ext timeline`."""
    add = parser.add_argument
    add("--coordinator", metavar="URL", default="http://127.0.0.1:8991", help="HTTP address of the coordinator")
    add("--out", type=Path, metavar="FILE", default=Path("timeline.png"), help="picture to write: .png, .svg or .pdf")
    add("--requests", type=int, metavar="N", default=20, help="how many of the latest prompts")


def run(arguments: argparse.Namespace) -> int:
    """Draw it; the exit status."""
    if arguments.requests < 1:
        return _fail(f"--requests must be at least 1, got {arguments.requests}", 2)
    try:
        timeline = timeline_of(read_status(arguments.coordinator), arguments.requests)
        if not timeline.requests:
            return _fail(f"--coordinator {arguments.coordinator}: no prompt has been shared yet", 1)
        draw_timeline(timeline, arguments.out)
    except (StatusUnavailableError, TimelineError) as error:
        return _fail(f"--coordinator {arguments.coordinator}: {error}", 1)
    except PictureError as error:
        return _fail(f"--out: {error}", 1)
    print(f"{len(timeline.requests)} prompts on {len(timeline.instances)} instances: {arguments.out}")
    return 0


def _fail(message: str, status: int) -> int:
    print(f"sglang-ext timeline: {message}", file=sys.stderr)
    return status
