"""Everything about a GPU in one run: correctness, then prefills by length and batch size, then kernels.

    python bench/h200.py [--stages kernels-check,tokens,buckets-7b,...] [--out FOLDER]
    python bench/h200.py --dry-run

On a machine that reaches no network, unpack what `bench/gpu/bundle.py` has packed and put it on PYTHONPATH first.
Stages run in the order given, each in processes of its own; one that fails is reported and the others go on. Results
are written after every stage, so that a run that is cut short leaves what it had. `--dry-run` goes the same way on a
CPU, with a tiny model and without the recording: its numbers are of no GPU and are not kept among results.

Prints a table of aims; the last line is `RESULT {json}`. Exit status 1 when a stage failed or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.figure5_picture import draw
from gpu.floor import Ceilings, floor_s
from gpu.model_shapes import SHAPES
from gpu.verdicts import (
    Verdict,
    bucket_verdicts,
    capture_verdicts,
    figure_5_verdicts,
    figure_6_verdicts,
    kernel_verdicts,
)
from support.result import machine, print_result, progress, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STAGES = ("kernels-check", "tokens", "buckets-7b", "figure6-32b", "kernels", "buckets-14b", "buckets-32b", "figure5-7b")
# The relative error of bfloat16 logits between two orders of additions, over 28 to 64 layers.
LOGITS_BOUND = 3e-2
FLOAT32_LOGITS_BOUND = 1e-4
STAGE_TIMEOUT_S = 540


class StageError(RuntimeError):
    """A process of a stage failed; the message is its last line."""


class Bench:
    """One run: its stages, what they found, and where that is written."""

    def __init__(self, out: Path, is_dry: bool) -> None:
        self._out = out
        self._is_dry = is_dry
        self.record: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "is_dry_run": is_dry,
            "machine": machine(),
            "versions": versions("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "sglang-ext"),
            "commit": _commit(),
            "stages": {},
        }
        self.failures: list[str] = []
        self.verdicts: list[Verdict] = []

    def run(self, stage: str) -> None:
        """Run a stage and write what is there so far."""
        progress(f"== {stage}")
        started_s = time.perf_counter()
        try:
            found = self._stage(stage)()
        except StageError as error:
            self.failures.append(f"{stage}: {error}")
            found = {"error": str(error)}
        found["seconds"] = time.perf_counter() - started_s
        self.record["stages"][stage] = found
        self._path_of(".json").write_text(json.dumps(self.record, indent=1), encoding="utf-8")

    def _stage(self, name: str) -> Callable[[], dict[str, Any]]:
        if name == "kernels-check":
            return self._check_kernels
        if name == "tokens":
            return self._tokens
        if name == "figure6-32b":
            return self._figure_6
        if name == "figure5-7b":
            return self._figure_5
        if name == "kernels":
            return self._kernels
        return lambda: self._buckets(f"qwen2.5-{name.removeprefix('buckets-')}")

    def _check_kernels(self) -> dict[str, Any]:
        output = self._python(
            "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "tests/kernels", "tests/gpu"
        )
        return {"tests": output.strip().splitlines()[-1]}

    def _tokens(self) -> dict[str, Any]:
        grid = ("--lengths", "8,32", "--batches", "1,4", "--reprefills", "8x4+40,20x1+33", "--repeats", "2")
        found = self._measured(
            "gpu.buckets", "--model", "tiny", "--mode", "grid", "--dtype", "float32", "--spread", *grid
        )
        if not found["tokens_equal"]:
            self.failures.append("tokens: with and without graphs they differ")
        return found

    def _figure_6(self) -> dict[str, Any]:
        found = self._measured("gpu.figure6", *(["--small"] if self._is_dry else []))
        self.verdicts += figure_6_verdicts({} if self._is_dry else found)
        self._check_loads("figure 6", found["systems"])
        return found

    def _figure_5(self) -> dict[str, Any]:
        found = self._measured("gpu.figure5", *(["--small"] if self._is_dry else []))
        self.verdicts += figure_5_verdicts({} if self._is_dry else found["windows"])
        self._check_loads("figure 5", found["windows"])
        if find_spec("matplotlib") is not None:
            draw(found["windows"], self._path_of("-figure5.png"))
        return found

    def _check_loads(self, figure: str, systems: dict[str, Any]) -> None:
        for name, system in systems.items():
            if "error" in system:
                self.failures.append(f"{figure}: {name}: {system['error']}")
        failed = sum(level["failed"] for system in systems.values() for level in system.get("levels", ()))
        if failed:
            self.failures.append(f"{figure}: {failed} requests failed")

    def _kernels(self) -> dict[str, Any]:
        found = self._measured("gpu.kernels", *(["--small"] if self._is_dry else []))
        self.verdicts += kernel_verdicts({} if self._is_dry else found["ratios"])
        bound = 1e-4 if self._is_dry else 1e-2
        for block in found["blocks"]:
            for name, value in block.items():
                if name.endswith("error") and not value < bound:
                    self.failures.append(f"kernels: {name} at {block['tokens']} tokens is {value:.2g}")
        return found

    def _buckets(self, model: str) -> dict[str, Any]:
        small = ("--lengths", "8,16", "--batches", "1,2", "--reprefills", "8x2+32,16x1+40", "--repeats", "3")
        grid = small if self._is_dry else ()
        model = "tiny" if self._is_dry else model
        ours = self._measured("gpu.buckets", "--model", model, "--mode", "grid", *grid)
        upstream: dict[str, Any] = {}
        for mode, attention in (("breakable", "triton"), ("full", "flashinfer")):
            try:
                upstream[mode] = self._measured(
                    "gpu.buckets", "--model", model, "--mode", mode, "--attention", attention, *grid
                )
            except StageError as error:
                upstream[mode] = {"error": str(error), "rows": []}
                progress(f"{mode}: not measured: {error}")
        rows = join_rows(model, ours, upstream)
        self._check(model, ours)
        self.verdicts += bucket_verdicts([] if self._is_dry else rows)
        self.verdicts += capture_verdicts(None if self._is_dry else ours["capture"])
        print_rows(rows)
        return {"model": model, "rows": rows, "grid": ours, "upstream": upstream}

    def _check(self, model: str, ours: dict[str, Any]) -> None:
        bound = FLOAT32_LOGITS_BOUND if self._is_dry else LOGITS_BOUND
        if not ours["worst_relative_error"] < bound:
            self.failures.append(f"{model}: logits differ by {ours['worst_relative_error']:.2g}, more than {bound:g}")
        if not ours["all_on_grid"]:
            self.failures.append(f"{model}: a batch that fits a captured shape did not run on it")

    def _path_of(self, ending: str) -> Path:
        """A file of this run's results."""
        name = "dry-run" if self._is_dry else self.record["date"][:16].replace(":", "")
        return self._out / f"h200-{name}{ending}"

    def _measured(self, module: str, *arguments: str) -> dict[str, Any]:
        path = self._out / "part.json"
        path.unlink(missing_ok=True)
        self._python("-m", module, "--out", str(path), *arguments)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return found

    def _python(self, *arguments: str) -> str:
        """Standard output of a Python process. Raises StageError."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(self._path(arguments)), "PYTHONUNBUFFERED": "1"}
        if self._is_dry and _needs_triton(arguments):
            environment["TRITON_INTERPRET"] = "1"
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        ) as stage:
            try:
                output, errors = stage.communicate(timeout=STAGE_TIMEOUT_S)
            except BaseException as error:
                # What the stage has started would go on and keep the device's memory.
                os.killpg(stage.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise StageError(f"not done after {STAGE_TIMEOUT_S} s") from error
                raise
        if stage.returncode != 0:
            lines = (errors.strip() or output.strip() or "no output").splitlines()
            (self._out / "failed.log").write_text(output + errors, encoding="utf-8")
            raise StageError(lines[-1])
        return output

    def _path(self, arguments: tuple[str, ...]) -> list[str]:
        own = [str(ROOT / name) for name in ("python", "router", "kernels", "cuda_graphs", "tests", "bench")]
        triton = [str(ROOT / ".venv/kernels")] if self._is_dry and _needs_triton(arguments) else []
        return [*triton, *own, *filter(None, [os.environ.get("PYTHONPATH")])]


def join_rows(model: str, ours: dict[str, Any], upstream: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a bucket: the floor, and seconds on each path."""
    ceilings = Ceilings(ours["read_bytes_per_s"], ours["operations_per_s"])

    def bucket(row: dict[str, Any]) -> tuple[int, int, int]:
        return row["length_tokens"], row["requests"], row["prefix_tokens"]

    others = {(bucket(row), mode): row.get(f"{mode}_s") for mode, found in upstream.items() for row in found["rows"]}
    return [
        {
            **row,
            "floor_s": floor_s(SHAPES[model], ceilings, *bucket(row)),
            **{f"{mode}_s": others.get((bucket(row), mode)) for mode in upstream},
        }
        for row in ours["rows"]
    ]


def print_rows(rows: list[dict[str, Any]]) -> None:
    progress("new x requests + cached   floor ms   grid   eager   breakable   full   (over the floor)")
    for row in rows:
        shown = "".join(
            f"{row[name] / row['floor_s']:9.2f}" if row.get(name) else "        -"
            for name in ("grid_s", "eager_s", "breakable_s", "full_s")
        )
        cached = f"+ {row['prefix_tokens']}" if row["prefix_tokens"] else ""
        name = f"{row['length_tokens']:3} x {row['requests']:<2} {cached}"
        progress(f"{name:<23} {row['floor_s'] * 1e3:10.3f} {shown}")


def _needs_triton(arguments: tuple[str, ...]) -> bool:
    return bool({"gpu.kernels", "tests/kernels"} & set(arguments))


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES[:6]))
    parser.add_argument("--out", type=Path, default=None, help="default: bench/results, bench/out for a dry run")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    stages = arguments.stages.split(",")
    unknown = sorted(set(stages) - set(STAGES))
    if unknown:
        parser.error(f"--stages: {', '.join(unknown)}: not among {', '.join(STAGES)}")
    if not arguments.dry_run:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no CUDA device; --dry-run goes without")
    out = arguments.out or HERE / ("out" if arguments.dry_run else "results")
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(out, arguments.dry_run)
    for stage in stages:
        bench.run(stage)
    progress("")
    for verdict in bench.verdicts:
        progress(verdict.line())
    for failure in bench.failures:
        progress(f"FAILED {failure}")
    print_result(
        {
            "dry_run": arguments.dry_run,
            "failures": bench.failures,
            "aims": {verdict.aim: [verdict.value, verdict.holds] for verdict in bench.verdicts},
        }
    )
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
