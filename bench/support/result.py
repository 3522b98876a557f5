"""Describes what every benchmark prints at its end: one `RESULT {json}` line, with the machine that it ran on."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn


def print_result(values: Mapping[str, object]) -> None:
    """Print the closing line; `values` must be plain JSON values."""
    print("RESULT " + json.dumps(values, allow_nan=False), flush=True)


def write_json(path: Path, values: object) -> None:
    """Write plain JSON values; who reads it, also after a kill, finds the file before or after, never half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(values, indent=1), encoding="utf-8")
    part.replace(path)


def machine() -> dict[str, object]:
    """Return what a reader needs to compare numbers: processor, cores, kernel, Python."""
    processor = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the installed version of each package, "not installed" where there is none."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def progress(line: str) -> None:
    """Print one line of progress."""
    print(line, flush=True)


def give_up(reason: str) -> NoReturn:
    """End the benchmark with one line and status 1; there is no result then."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    sys.exit(1)
