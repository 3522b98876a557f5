"""Describes what benchmarks share: their folders, and the `RESULT {json}` line at their end, with its machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from support.processor_time import OtherLoad

BENCH = Path(__file__).resolve().parents[1]


def benchmark_parser(description: str | None, *, has_traces: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the folder of the results and, where traces are replayed, that of these."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=BENCH / "out", metavar="FOLDER", help="where the results go")
    if has_traces:
        data = BENCH.parents[1] / "shared" / "data"
        parser.add_argument("--data", type=Path, default=data, metavar="FOLDER", help="where the traces are")
    return parser


class BenchmarkRun:
    """Describes one run of a benchmark: made before anything is measured, ended with its figures."""

    def __init__(self, *packages: str) -> None:
        """`packages` are those whose versions a reader needs."""
        self._packages = packages
        self._began_s = time.monotonic()
        self._others = OtherLoad()
        self._machine = machine()  # now: the benchmark may keep itself to one core later

    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._began_s

    def other_load_cores(self) -> float:
        """Return the mean number of cores that other programs have used; ask when all children have ended."""
        return round(self._others.mean_cores(), 2)

    def facts(self) -> dict[str, object]:
        """Return what a reader needs in addition to the figures."""
        return {
            "duration_s": round(self.elapsed_s(), 1),
            "other_load_cores": self.other_load_cores(),
            "machine": self._machine,
            "versions": versions(*self._packages),
            "date": datetime.now(UTC).date().isoformat(),
        }

    def end(self, figures: Mapping[str, object], file: Path | None = None) -> None:
        """Print the closing line of these figures, plain JSON values; write them to `file`, too."""
        result = {**figures, **self.facts()}
        if file is not None:
            write_json(file, result)
        print_result(result)


def print_result(values: Mapping[str, object]) -> None:
    """Print the closing line; `values` must be plain JSON values."""
    print("RESULT " + json.dumps(values, allow_nan=False), flush=True)


def write_json(path: Path, values: object) -> None:
    """Write plain JSON values; who reads it, also after a kill, finds the file before or after, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
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
