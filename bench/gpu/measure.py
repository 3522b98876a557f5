"""Times on a device, its ceilings, and the record that a script writes as it goes: what was expected, found and judged.

Times are those of device events behind a spin, so that what the host takes to start a kernel is not in them; of several
runs over different memory, taken in turn, so that nothing is read from the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.result import print_result, progress, versions, write_json

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# About 10 ms on a Hopper GPU: by its end the host has queued all runs of a few kernels each.
SPIN_CYCLES = 20_000_000
COPIED_BYTES = 2**32 if HAS_GPU else 2**20
PRODUCT_ROWS = 8192 if HAS_GPU else 128


class Ceilings(NamedTuple):
    """Holds the rates of a device: bytes read and written by a copy, bytes read, operations of a bfloat16 product."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    operations_per_s: float


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if HAS_GPU:
        torch.cuda.synchronize()


def median_s(runs: Callable[[], Any] | Sequence[Callable[[], Any]], repeats: int = 20) -> float:
    """Median seconds on the device of a run; several runs, over different memory, are taken in turn.

    Without a GPU: the host's seconds of one run, to try a script.
    """
    calls = [runs] if callable(runs) else list(runs)
    for call in calls:
        call()
    if not HAS_GPU:
        started_s = time.perf_counter()
        calls[0]()
        return time.perf_counter() - started_s
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    for number, (before, after) in enumerate(events):
        before.record()
        calls[number % len(calls)]()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3


def measure_ceilings() -> Ceilings:
    """Measure by a copy of 4 GiB, a maximum over as much, and a product of 8192 x 8192 of random numbers."""
    elements = COPIED_BYTES // 4
    sources = [torch.empty(elements, dtype=torch.int32, device=DEVICE).random_() for _ in range(2)]
    target = torch.empty_like(sources[0])
    copy_s = median_s([lambda source=source: target.copy_(source) for source in sources])
    read_s = median_s([lambda source=source: torch.amax(source) for source in sources])
    left, right = (torch.randn(PRODUCT_ROWS, PRODUCT_ROWS, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product_s = median_s(lambda: left @ right)
    return Ceilings(2 * COPIED_BYTES / copy_s, COPIED_BYTES / read_s, 2.0 * PRODUCT_ROWS**3 / product_s)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return |got - wanted| / |wanted| in float64."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


class Report:
    """Records a script's expectations, findings and checks, on the screen and, where `out` is given, in a file."""

    def __init__(self, name: str, out: Path | None, is_dry: bool) -> None:
        """`is_dry`: tried without a GPU, so that speed is not judged."""
        self._out = out
        self._is_dry = is_dry
        self._failed: list[str] = []
        self.found: dict[str, Any] = {
            "benchmark": f"gpu-{name}",
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "device": torch.cuda.get_device_name() if HAS_GPU else "cpu",
            "driver": _driver(),
            "versions": {"python": sys.version.split()[0], **versions("torch", "triton", "sglang", "sglang-kernel")},
            "command": " ".join(sys.argv),
            "is_dry_run": is_dry,
            "checks": [],
        }
        self._write()

    def expect(self, what: str, text: str) -> None:
        """Say beforehand what should be found."""
        progress(f"expected: {what}: {text}")

    def record(self, **found: Any) -> None:
        """Take plain JSON values into the record."""
        self.found |= found
        self._write()

    def check(
        self,
        what: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        is_speed: bool = False,
    ) -> bool:
        """Judge a value, which must be a number; return whether it is within its bounds."""
        bounds = [f"at least {at_least:g}"] if at_least is not None else []
        bounds += [f"at most {at_most:g}"] if at_most is not None else []
        # A value that is no number is within no bound.
        is_good = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        is_judged = not (is_speed and self._is_dry)
        word = "ok " if is_good else "BAD"
        progress(f"{word if is_judged else '-- '} {what}: {value:.4g} ({', '.join(bounds)})")
        if is_judged and not is_good:
            self._failed.append(what)
        check = {"what": what, "value": value, "at_least": at_least, "at_most": at_most, "is_good": is_good}
        self.found["checks"].append({**check, "is_judged": is_judged})
        self._write()
        return is_good

    def fail(self, what: str, error: BaseException) -> None:
        """Take a part that ended with an error as a check that failed; the others go on."""
        line = f"{type(error).__name__}: {str(error).strip()}"[:600]
        progress(f"BAD {what}: {line}")
        self._failed.append(what)
        self.found["checks"].append({"what": what, "error": line, "is_good": False, "is_judged": True})
        self._write()

    def end(self) -> int:
        """Print the closing line; return the exit status, 1 where a check failed."""
        self.found["failed"] = self._failed
        self._write()
        print_result(json.loads(json.dumps(self.found, default=str).replace("NaN", "null")))
        return 1 if self._failed else 0

    def _write(self) -> None:
        if self._out is not None:
            write_json(self._out, self.found)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every script takes."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, default=None, metavar="FILE", help="the record, written after each step")
    found.add_argument("--dry-run", action="store_true", help="small sizes, speed is not judged: for a CPU")
    return found


def _driver() -> str:
    if not HAS_GPU:
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
