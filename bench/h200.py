"""Everything about a GPU, in commands of ten minutes: correctness, then prefills by length and batch size, kernels.

    python bench/h200.py [--stages preflight,tokens,...] [--deadline SECONDS] [--out FOLDER]
    python bench/h200.py --stages buckets-7b --modes grid,breakable
    python bench/h200.py --stages figure6 --systems stock,all --concurrencies 64,8
    python bench/h200.py --expected [--card h100]     what each stage should take and show, by the roofline
    python bench/h200.py --judge RESULT.json ...      the aims over the results of several commands
    python bench/h200.py --dry-run

On a machine that reaches no network, unpack what `bench/gpu/bundle.py` has packed and put it on PYTHONPATH first; what
is compiled of this project is laid beside its sources then.
Stages run in the order given, their steps each in a process with a log of its own in `--out`. One that fails, or that
has not the time left that it needs before its first result, is reported, and the others go on. The result file is
`DEVICE-DATE.json`, by the device that ran, and is written after each step; a step that is stopped at the deadline
leaves what it had. `--dry-run` goes the same way on a CPU, with a tiny model and without the recording: its numbers are
of no GPU and are not kept among results.

Prints a table of aims; the last line is `RESULT {json}`. Exit status 1 when a step failed or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.bundle import lay_own
from gpu.card import CARDS, Card, read_card
from gpu.expected import expected_lines
from gpu.figure5_picture import draw
from gpu.jit_cache import environment as jit_environment
from gpu.judgement import failures_of, join_rows, merge, verdicts_of
from gpu.stage_plan import (
    COMMANDS,
    CONCURRENCIES,
    DEADLINE_S,
    MODES,
    RESERVE_S,
    STAGES,
    SYSTEMS,
    WINDOWS,
    Selection,
    Step,
    plan,
)
from support.result import give_up, machine, print_result, progress, versions, write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRITON = ROOT / ".venv/kernels"
# What pip puts on the path of an environment.
CUTLASS = "nvidia_cutlass_dsl/dsl_packages"
# SGLang's norms for CUDA take half precision alone. Triton multiplies float32 in tf32, and greedy choices would turn;
# three such products have float32's errors (multiplied plainly, SGLang's kernel spills 160 KB a thread).
FLOAT32 = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch", "TRITON_F32_DEFAULT": "tf32x3"}
DRY_CARD = Card("cpu", 0.0)
DRY_DEADLINE_S = 3600.0


class StepError(RuntimeError):
    """A step's process failed or was stopped; the message is its last line."""


class Run:
    """One command: its steps, what they found, and where that is written."""

    def __init__(self, out: Path, card: Card, deadline_s: float, is_dry: bool) -> None:
        self._out = out
        self._card = card
        self._end_s = time.perf_counter() + deadline_s
        self._is_dry = is_dry
        link = Path(tempfile.gettempdir()) / f"libcuda-{os.getuid()}"
        self._site = None if is_dry else bundle_site(os.environ)
        self._compiling = {} if is_dry else jit_environment(os.environ, self._site, link)
        if self._site is not None:
            progress(f"{lay_own(self._site, ROOT)} compiled files of this project are laid beside its sources")
        date = datetime.now(UTC).isoformat(timespec="seconds")
        name = "dry-run" if is_dry else f"{card.slug}-{date[:19].replace(':', '')}"
        self.path = out / f"{name}.json"
        self.record: dict[str, Any] = {
            "date": date,
            "is_dry_run": is_dry,
            "card": card.slug,
            "device": card._asdict(),
            "machine": machine(),
            "versions": versions("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "sglang-ext"),
            "commit": _commit(),
            "stages": {},
        }

    def stage(self, stage: str, selection: Selection) -> None:
        """Run a stage's steps and write after each what is there."""
        expected = [] if self._is_dry else list(expected_lines(stage, self._card, selection))
        progress("\n".join([f"== {stage}", *expected]))
        found: dict[str, Any] = {"expected": expected, "steps": {}}
        self.record["stages"][stage] = found
        try:
            steps = plan(stage, self._card, selection, self._is_dry)
        except ValueError as error:
            found["error"] = str(error)
            steps = []
        for step in steps:
            found["model"] = step.model
            found["steps"][step.name] = self._step(step)
            write_json(self.path, self.record)
        write_json(self.path, self.record)

    def _step(self, step: Step) -> dict[str, Any]:
        left_s = self._end_s - time.perf_counter()
        if left_s < step.start_s + RESERVE_S:
            progress(f"-- {step.name}: not begun: {left_s:.0f} s are left, it needs {step.start_s + RESERVE_S:.0f}")
            return {"not_measured": f"{left_s:.0f} s were left"}
        progress(f"-- {step.name}: {left_s:.0f} s are left, about {step.estimate_s:.0f} needed")
        limit_s = left_s if self._is_dry else min(left_s, step.max_s)
        started_s = time.perf_counter()
        log = self._out / step.log_name
        part = log.with_suffix(".json")
        part.unlink(missing_ok=True)
        found: dict[str, Any] = {}
        try:
            run_process(self._command(step, part, limit_s), log, self._environment(step), limit_s - RESERVE_S / 3)
        except StepError as error:
            found["error"] = str(error)
        if part.is_file():
            found = {**json.loads(part.read_text(encoding="utf-8")), **found}
            part.unlink()
        if "pytest" in step.arguments:
            found |= tests_in(log.read_text(encoding="utf-8", errors="replace"))
        seconds = time.perf_counter() - started_s
        not_possible = f"not possible: {found['not_possible']}" if "not_possible" in found else ""
        progress(f"-- {step.name}: {seconds:.0f} s {found.get('error', not_possible)}")
        return {**found, "seconds": seconds}

    def _command(self, step: Step, part: Path, limit_s: float) -> list[str]:
        command = [sys.executable, *step.arguments]
        if "pytest" not in step.arguments:
            command += ["--out", str(part), "--within", f"{limit_s - RESERVE_S:.0f}"]
        return command

    def _environment(self, step: Step) -> dict[str, str]:
        own = [str(ROOT / name) for name in ("python", "router", "kernels", "cuda_graphs", "tests", "bench")]
        is_interpreted = self._is_dry and step.stage in ("kernels", "kernels-check")
        path = [*([str(TRITON)] if is_interpreted else []), *own, *filter(None, [os.environ.get("PYTHONPATH")])]
        if self._site is not None:
            path.append(str(self._site / CUTLASS))
        added = {"TRITON_INTERPRET": "1"} if is_interpreted else {}
        if step.is_float32 and not self._is_dry:
            added |= FLOAT32
        # One machine: NVSHMEM need not look for a network between several.
        added |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "NVSHMEM_REMOTE_TRANSPORT": "none"}
        # FlashAttention 3 was carried without the kernels that are not called.
        added |= {"CUDA_MODULE_LOADING": "LAZY"}
        return {**os.environ, **self._compiling, **added}


def bundle_site(environment: Mapping[str, str]) -> Path | None:
    """The folder on PYTHONPATH that `bench/gpu/bundle.py` has packed; None without one."""
    folders = map(Path, filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    return next((folder for folder in folders if (folder / "sglang").is_dir()), None)


def run_process(command: Sequence[str], log: Path, environment: dict[str, str], timeout_s: float) -> None:
    """Run a process to its end, or end it and what it started. Raises StepError with the last line of its log."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except BaseException as error:
            # What the step has started would go on and keep the device's memory.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise StepError(f"not done after {timeout_s:.0f} s") from error
            raise
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise StepError(lines[-1] if lines else f"ended with status {status} and no output")


def tests_in(log: str) -> dict[str, Any]:
    """Of pytest's output: its last line, and a line for each test that was skipped."""
    lines = log.strip().splitlines()
    return {"tests": lines[-1] if lines else "", "skipped": re.findall(r"^SKIPPED \[\d+\] (.*)$", log, re.MULTILINE)}


def print_rows(rows: Iterable[dict[str, Any]]) -> None:
    progress("new x requests + cached   floor ms   grid   eager   breakable   full   (over the floor)")
    for row in rows:
        shown = "".join(
            f"{row[name] / row['floor_s']:9.2f}" if row.get(name) else "        -"
            for name in ("grid_s", "eager_s", "breakable_s", "full_s")
        )
        cached = f"+ {row['prefix_tokens']}" if row["prefix_tokens"] else ""
        name = f"{row['length_tokens']:3} x {row['requests']:<2} {cached}"
        progress(f"{name:<23} {row['floor_s'] * 1e3:10.3f} {shown}")


def report(record: dict[str, Any]) -> int:
    """Print rows, aims and failures; the exit status."""
    for stage, found in record["stages"].items():
        if stage.startswith("buckets") and found["steps"]:
            print_rows(join_rows(found["model"], found["steps"]))
    verdicts, failures = verdicts_of(record), failures_of(record)
    progress("")
    for verdict in verdicts:
        progress(verdict.line())
    for failure in failures:
        progress(f"FAILED {failure}")
    print_result(
        {
            "card": record["card"],
            "dry_run": record["is_dry_run"],
            "failures": failures,
            "aims": {verdict.aim: [verdict.value, verdict.holds] for verdict in verdicts},
        }
    )
    return 1 if failures else 0


def print_expected(card: Card, stages: Sequence[str], selection: Selection) -> None:
    for stage in stages:
        progress("\n".join(expected_lines(stage, card, selection)))
    progress("\nin this order, in commands of 600 s:")
    for command in COMMANDS:
        progress(f"{command.estimate_s(card):4.0f} s  bench/h200.py {' '.join(command.options)}")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _names(allowed: Sequence[str]) -> Any:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(allowed)}")
        return names

    return read


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers with commas between")
    return tuple(map(int, parts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=_names(STAGES), default=STAGES[:7], help=f"of {', '.join(STAGES)}")
    parser.add_argument("--modes", type=_names(MODES), default=MODES, help="of the bucket stages (default: all)")
    parser.add_argument("--systems", type=_names(SYSTEMS), default=SYSTEMS, help="of figure 6 (default: all)")
    parser.add_argument("--concurrencies", type=_numbers, default=CONCURRENCIES, help="of figure 6 (default: 64,8,1)")
    parser.add_argument("--windows", type=_names(WINDOWS), default=WINDOWS, help="of figure 5 (default: all)")
    parser.add_argument(
        "--attention", default=None, help="SGLang's backend in figures 5 and 6 (default: its own choice, or triton)"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="of each concurrency (default: 12)")
    parser.add_argument(
        "--deadline", type=float, default=None, help=f"seconds for all of it (default: {DEADLINE_S:.0f}; dry: an hour)"
    )
    parser.add_argument("--out", type=Path, default=None, help="default: bench/results, bench/out for a dry run")
    parser.add_argument("--card", choices=CARDS, default=None, help="for --expected (default: the one that is there)")
    parser.add_argument("--expected", action="store_true", help="print what is expected, and the commands; run nothing")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="RESULT", help="aims over results; run nothing")
    parser.add_argument("--dry-run", action="store_true")
    return parser


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.judge:
        try:
            return report(merge([json.loads(path.read_text(encoding="utf-8")) for path in arguments.judge]))
        except (OSError, ValueError) as error:
            give_up(f"--judge: {error}")
    selection = Selection(
        *(arguments.modes, arguments.systems, arguments.concurrencies),
        *(arguments.windows, arguments.seconds, arguments.attention),
    )
    card = DRY_CARD if arguments.dry_run else CARDS[arguments.card] if arguments.card else read_card()
    if card is None:
        parser.error("nvidia-smi shows no CUDA device; --dry-run goes without, --expected takes --card")
    if arguments.expected:
        print_expected(card, arguments.stages, selection)
        return 0
    wants_triton = not {"kernels", "kernels-check"}.isdisjoint(arguments.stages)
    if arguments.dry_run and wants_triton and not (TRITON / "triton").is_dir():
        parser.error(f"--dry-run runs the kernels in Triton's interpreter, which is not in {TRITON}: make kernels-env")
    out = arguments.out or HERE / ("out" if arguments.dry_run else "results")
    out.mkdir(parents=True, exist_ok=True)
    run = Run(out, card, arguments.deadline or (DRY_DEADLINE_S if arguments.dry_run else DEADLINE_S), arguments.dry_run)
    for stage in arguments.stages:
        run.stage(stage, selection)
    windows = run.record["stages"].get("figure5", {}).get("steps", {})
    if any("levels" in found for found in windows.values()) and find_spec("matplotlib") is not None:
        draw(windows, run.path.with_name(f"{run.path.stem}-figure5.png"))
    progress(f"\n{run.path}")
    return report(run.record)


if __name__ == "__main__":
    sys.exit(main())
