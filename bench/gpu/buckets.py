"""Prefills by length and batch size on SGLang's model runner: eager, our grid of graphs, SGLang's own prefill graphs.

    python bench/gpu/buckets.py [--out FILE] [--model qwen2.5-7b] [--modes eager,grid,breakable] [--within 150]
    python bench/gpu/buckets.py --exact [--out FILE]     a float32 model: tokens and logits are those without graphs

One process loads the model once, with random weights. Batches with the fewest new tokens come first; each row is
written as it is measured, and none is begun after `--within` seconds. SGLang's own graphs come last, so that a failure
of theirs costs nothing else; the grid is then measured again after each of their batches. Times are those of device
events between forwards that are queued one behind the other, as under load; `_host_s` is one forward from an idle
device to its end.

Weights are spread, so that logits differ between a right and a wrong path. Each run shows that the comparison can see
a wrong path: `control_error` is the error of a graph that was captured with attention of each token to itself only.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gpu.checkout  # noqa: F401
from gpu.measure import HAS_GPU, SPIN_CYCLES, Report, measure_ceilings, parser, relative_error, synchronize
from gpu.model_shapes import SHAPES, floor_s, write_model
from gpu.sglang_runner import (
    attention_to_oneself,
    build_grid,
    compile_kernels,
    default_attention,
    engine_options,
    free_cached_memory,
    load_runner,
    prepare_process,
    spread_weights,
)

LENGTHS_TOKENS = (8, 16, 32, 64, 128, 256)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
# New tokens x requests + cached tokens of each request. The prefixes of a batch are computed in one pass, so they have
# no more tokens than the largest shape of the grid.
REPREFILLS = "16x1+1024,16x8+1024,64x8+1024,16x1+4096,16x4+4096,64x4+4096,256x4+4096"
MODES = ("eager", "grid", "breakable", "full")
MAX_SERIES_S = 0.25  # of one batch in one mode; longer batches are repeated less often
SMALL_TOKENS = 128
BFLOAT16_ERROR = 0.03  # two orders of additions differ by 0.022 to 0.027 on a decoder of 28 to 64 layers
FLOAT32_ERROR = 2e-3 if HAS_GPU else 1e-4  # on a GPU products are three of tf32, in tiles of other sizes
MIN_CONTROL_ERROR = 0.3


class Bucket(NamedTuple):
    """A batch of equal requests."""

    length_tokens: int  # new tokens of a request
    requests: int
    prefix_tokens: int = 0  # cached tokens of a request

    @property
    def new_tokens(self) -> int:
        return self.length_tokens * self.requests


class Times(NamedTuple):
    """Seconds of one forward."""

    device_s: float  # between the ends of forwards that are queued one behind the other
    host_s: float  # from an idle device to its end


def parse_reprefills(text: str) -> list[Bucket]:
    """Return the buckets of `16x4+1024,...`. Raises ValueError where a number is none."""
    return [Bucket(*map(int, part.replace("x", "+").split("+"))) for part in filter(None, text.split(","))]


class Prefills:
    """Runs batches of random prompts, and the last forward of a batch again to time it: the batch to its logits."""

    def __init__(self, model_runner: Any) -> None:
        from sglang.benchmark import one_batch

        self._one_batch = one_batch
        self._runner = model_runner
        self._forward = model_runner.forward
        self._last: tuple[Any, Any] = (), {}
        model_runner.forward = self._noted

    def run(self, bucket: Bucket, path: Any, seed: int = 99) -> Any:
        """Return logits [requests, vocabulary] of a batch on `path`, SGLang's or our prefill runner."""
        import torch

        self._runner.prefill_cuda_graph_runner = path
        length, requests, prefix = bucket
        generator = torch.Generator().manual_seed(seed)
        high = min(10000, self._runner.model_config.vocab_size)
        ids = torch.randint(5, high, (requests, prefix + length), generator=generator).tolist()
        self._runner.req_to_token_pool.clear()
        self._runner.token_to_kv_pool_allocator.clear()
        first = [prompt[: prefix or length] for prompt in ids]
        batch = self._one_batch.prepare_synthetic_inputs_for_latency_test(requests, len(first[0]), first)
        with torch.no_grad():
            if prefix:
                self._one_batch.extend(batch, self._runner)
                self._one_batch.prepare_extend_inputs_for_correctness_test(
                    SimpleNamespace(cut_len=prefix), ids, batch, self._runner
                )
            _, logits, _ = self._one_batch.extend(batch, self._runner)
        return logits.clone()

    def time(self, repeats: int) -> tuple[Times, int]:
        """Time the last forward, on the path it ran on; and how often it was run again."""
        import torch

        host_s = statistics.median(self._host_s() for _ in range(3))
        if not HAS_GPU:
            return Times(host_s, host_s), 3
        repeats = max(2, min(repeats, int(MAX_SERIES_S / host_s)))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        with torch.no_grad():
            torch.cuda._sleep(SPIN_CYCLES)
            events[0].record()
            for event in events[1:]:
                self._again()
                event.record()
        torch.cuda.synchronize()
        device_s = statistics.median(before.elapsed_time(after) / 1e3 for before, after in pairwise(events))
        return Times(device_s, host_s), 3 + repeats

    def _host_s(self) -> float:
        import torch

        synchronize()
        started_s = time.perf_counter()
        with torch.no_grad():
            self._again()
        synchronize()
        return time.perf_counter() - started_s

    def _again(self) -> None:
        self._forward(*self._last[0], **self._last[1])

    def _noted(self, *args: Any, **kwargs: Any) -> Any:
        self._last = args, kwargs
        return self._forward(*args, **kwargs)


def own_mode(modes: Sequence[str]) -> str | None:
    """Return which of SGLang's own prefill graphs are asked for; None without."""
    return next((mode for mode in modes if mode not in ("eager", "grid")), None)


def attention_of(own: str | None, is_float32: bool) -> str:
    """Return the attention backend that SGLang takes by itself on a Hopper GPU, as far as it is installed."""
    if own == "full":
        return "flashinfer"  # `full` has no metadata for Triton's
    return "triton" if is_float32 else default_attention() or "fa3"


def control_error(model_runner: Any, prefills: Prefills, bucket: Bucket, wanted: Any) -> float:
    """Return the relative error of logits that come from wrong attention, against those of the ordinary path."""
    with attention_to_oneself():
        broken, _ = build_grid(model_runner, [bucket.length_tokens], [bucket.requests])
    return relative_error(prefills.run(bucket, broken), wanted)


class Measurement:
    """All batches in all modes, written row by row."""

    def __init__(
        self, model_runner: Any, buckets: list[Bucket], report: Report, floor: Callable[..., float], repeats: int
    ) -> None:
        """`floor(*bucket)`: the least seconds that the device allows."""
        self._runner = model_runner
        self._report = report
        self._repeats = repeats
        self._prefills = Prefills(model_runner)
        self._logits: dict[Bucket, Any] = {}  # of the ordinary path
        self.buckets = sorted(buckets, key=lambda bucket: bucket.new_tokens)  # least time first
        self.rows = {bucket: {**bucket._asdict(), "floor_s": floor(*bucket)} for bucket in self.buckets}

    def eager_peak_bytes(self, largest: Bucket) -> int | None:
        """Return what the largest batch takes on the ordinary path; kernels are compiled meanwhile."""
        import torch

        eager = self._runner.eager_runner
        self._prefills.run(largest, eager)
        if not HAS_GPU:
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._prefills.run(largest, eager)
        peak = torch.cuda.max_memory_allocated() - before
        free_cached_memory()
        return peak

    def eager_and_grid(self, grid: Any | None, is_timed: bool, end_s: float) -> None:
        """Measure the ordinary path, timed if `is_timed`, and the grid; compare their logits."""
        for bucket in self._before(end_s):
            row, eager = self.rows[bucket], self._runner.eager_runner
            self._logits[bucket] = wanted = self._prefills.run(bucket, eager)
            if is_timed:
                self._time("eager", row)
            if grid is not None:
                if (
                    "control_error" not in self._report.found
                    and bucket.length_tokens >= 16
                    and not bucket.prefix_tokens
                ):
                    error = control_error(self._runner, self._prefills, bucket, wanted)
                    self._report.record(control_error=error)
                got = self._prefills.run(bucket, grid)
                row["error"] = relative_error(got, wanted)
                row["tokens_equal"] = bool((got.argmax(-1) == wanted.argmax(-1)).all())
                self._time_grid("grid", row, grid)
            self._write()

    def own(self, mode: str, path: Any, grid: Any | None, end_s: float) -> None:
        """Measure SGLang's own graphs, and the grid again behind each of their batches."""
        executed = 0
        stock = path.execute

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal executed
            executed += 1
            return stock(*args, **kwargs)

        path.execute = counted
        for bucket in self._before(end_s):
            row = self.rows[bucket]
            if bucket not in self._logits:
                continue
            try:
                got = self._prefills.run(bucket, path)
                row[f"{mode}_error"] = relative_error(got, self._logits[bucket])
                before = executed
                runs = self._time(mode, row)
                row[f"{mode}_eager_runs"] = runs - (executed - before)
            except Exception as error:
                row[f"{mode}_failed"] = f"{type(error).__name__}: {error}"[:300]
            if grid is not None:
                self._prefills.run(bucket, grid)
                self._time_grid("grid_again", row, grid)
            self._write()

    def _before(self, end_s: float) -> Iterator[Bucket]:
        for number, bucket in enumerate(self.buckets):
            if time.perf_counter() > end_s:
                self._report.record(not_measured=f"the last {len(self.buckets) - number} batches: the time was used up")
                return
            yield bucket

    def _time(self, name: str, row: dict[str, Any]) -> int:
        times, runs = self._prefills.time(self._repeats)
        row[f"{name}_s"], row[f"{name}_host_s"] = times
        return runs

    def _time_grid(self, name: str, row: dict[str, Any], grid: Any) -> None:
        before = sum(grid.graphs.replays.values())
        runs = self._time(name, row)
        row[f"{name}_eager_runs"] = runs - (sum(grid.graphs.replays.values()) - before)

    def _write(self) -> None:
        self._report.record(rows=list(self.rows.values()))


def judge_rightness(report: Report, rows: Sequence[dict[str, Any]], max_error: float) -> None:
    """Check logits on the grid, and that the comparison sees wrong attention."""
    nan = float("nan")
    on_grid = [row for row in rows if "grid_s" in row]
    errors = [row["error"] for row in on_grid] or [nan]
    # An error that is no number is the worst.
    worst = next((error for error in errors if not error <= max_error), max(errors))
    report.check("error of logits on the grid", worst, at_most=max_error)
    control = report.found.get("control_error", nan)
    report.check("error of attention to oneself, which must be seen", control, at_least=MIN_CONTROL_ERROR)
    strays = sum(row["grid_eager_runs"] + row.get("grid_again_eager_runs", 0) for row in on_grid)
    report.check("forwards that fit a captured shape and ran without", strays, at_most=0)


def judge_speed(report: Report, rows: Sequence[dict[str, Any]], modes: Sequence[str]) -> None:
    """Check the worst batch of each kind; where none was measured, the check fails."""

    def over(name: str, other: str, chosen: Sequence[dict[str, Any]]) -> list[float]:
        return [row[name] / row[other] for row in chosen if name in row and other in row] or [float("nan")]

    measured = sum("grid_s" in row for row in rows) / len(rows)
    report.check("batches measured on the grid, of all", measured, at_least=1, is_speed=True)
    own = own_mode(modes)
    for kind, has_prefix in (("", False), ("re-prefills, ", True)):
        of_kind = [row for row in rows if bool(row["prefix_tokens"]) == has_prefix]
        small = [row for row in of_kind if row["length_tokens"] * row["requests"] <= SMALL_TOKENS]
        for name, part, bound in (
            (f"to {SMALL_TOKENS} tokens", small, 1.25),
            ("above", [row for row in of_kind if row not in small], 1.5),
        ):
            worst = max(over("grid_s", "floor_s", part))
            report.check(f"{kind}grid over floor, {name}", worst, at_most=bound, is_speed=True)
        if "eager" in modes:
            worst = min(over("eager_s", "grid_s", small))
            report.check(f"{kind}eager over grid, to {SMALL_TOKENS} tokens", worst, at_least=1.5, is_speed=True)
        if own:
            worst = min(over(f"{own}_s", "grid_again_s", of_kind))
            report.check(f"{kind}SGLang's {own} over grid", worst, at_least=0.98, is_speed=True)


def judge_capture(report: Report, capture: dict[str, Any]) -> None:
    """Check what the captures took."""
    report.check("graphs captured", capture["graphs"], at_least=capture["wanted"])
    report.check("seconds of all captures", capture["seconds"], at_most=30, is_speed=True)
    report.check("seconds of a capture, longest", capture["max_seconds_per_graph"], at_most=0.5, is_speed=True)
    report.check("MB of a graph", capture["own_bytes_per_graph"] / 1e6, at_most=20, is_speed=True)
    if capture["eager_peak_bytes"]:
        over_peak = capture["pool_bytes"] / capture["eager_peak_bytes"]
        report.check("memory pool over what an eager batch takes", over_peak, at_most=1.1, is_speed=True)


def print_rows(rows: Sequence[dict[str, Any]], own: str | None) -> None:
    """Print times over the floor, by batch."""
    names = ["grid_s", "eager_s", *([f"{own}_s", "grid_again_s"] if own else [])]
    print("new x requests + cached    floor ms" + "".join(f"{name.removesuffix('_s'):>12}" for name in names))
    for row in rows:
        cached = f"+ {row['prefix_tokens']}" if row["prefix_tokens"] else ""
        shown = (f"{row[name] / row['floor_s']:12.2f}" if name in row else f"{'-':>12}" for name in names)
        label = f"{row['length_tokens']:3} x {row['requests']:<2} {cached}"
        print(f"{label:<26}{row['floor_s'] * 1e3:9.3f}" + "".join(shown), flush=True)


def arguments_of(argv: Sequence[str] | None) -> Any:
    """Return the options, with the sizes of `--exact` and `--dry-run` filled in."""
    options = parser(__doc__)
    options.add_argument("--model", choices=SHAPES, default=None, help="shape of the model (default: qwen2.5-7b)")
    options.add_argument(
        "--modes", default=None, help=f"of {', '.join(MODES)}; one of the last two (default: all but full)"
    )
    options.add_argument(
        "--attention", default=None, help="SGLang's backend (default: fa3 where installed, else triton)"
    )
    options.add_argument("--exact", action="store_true", help="a tiny model in float32: tokens equal, no times")
    options.add_argument("--lengths", default=None, help="new tokens of a request, of the grid")
    options.add_argument("--batches", default=None, help="requests of a batch, of the grid")
    options.add_argument("--reprefills", default=None, help=f"LENGTHxREQUESTS+PREFIX,... (default: {REPREFILLS})")
    options.add_argument("--repeats", type=int, default=12)
    options.add_argument("--within", type=float, default=150.0, help="no batch is begun later (s; default: 150)")
    given = options.parse_args(argv)
    is_small = given.exact or given.dry_run
    small = ("8,32", "1,4", "8x4+40,20x1+33") if given.exact else ("8,16", "1,2", "8x2+32,16x1+40")
    full = (",".join(map(str, LENGTHS_TOKENS)), ",".join(map(str, BATCH_SIZES)), REPREFILLS)
    for name, default in zip(("lengths", "batches", "reprefills"), small if is_small else full, strict=True):
        if getattr(given, name) is None:
            setattr(given, name, default)
    given.model = given.model or ("tiny" if is_small else "qwen2.5-7b")
    # Only a GPU has SGLang's own graphs.
    given.modes = (given.modes or ("eager,grid" if is_small else "eager,grid,breakable")).split(",")
    unknown = set(given.modes) - set(MODES)
    if unknown or {"breakable", "full"} <= set(given.modes):
        options.error(
            f"--modes: {', '.join(sorted(unknown)) or 'breakable and full'}: one or more of {', '.join(MODES)}"
        )
    given.lengths, given.batches = ([int(part) for part in text.split(",")] for text in (given.lengths, given.batches))
    given.repeats = 2 if is_small else given.repeats
    return given


def main(argv: Sequence[str] | None = None) -> int:
    started_s = time.perf_counter()
    given = arguments_of(argv)
    end_s = started_s + given.within
    report = Report("buckets-exact" if given.exact else "buckets", given.out, given.dry_run)
    max_error = FLOAT32_ERROR if given.exact or not HAS_GPU else BFLOAT16_ERROR
    if given.exact:
        report.expect("logits", f"differ by 1e-4 or less, must by less than {max_error:g}; greedy tokens equal")
    else:
        report.expect("grid over floor", f"1.25 to {SMALL_TOKENS} tokens, 1.5 above; eager over grid 1.5 or more")
        report.expect("error", f"below {max_error:g}; with attention to oneself about 1, more than {MIN_CONTROL_ERROR}")
        report.expect("capture", "42 graphs in 10 to 25 s, a pool of 2 to 3 GB, at most 20 MB a graph")
    prepare_process(given.exact)
    shape = SHAPES[given.model]
    buckets = [Bucket(length, requests) for length in given.lengths for requests in given.batches]
    buckets += parse_reprefills(given.reprefills)
    own = own_mode(given.modes)
    with tempfile.TemporaryDirectory() as folder:
        write_model(given.model, Path(folder))
        ceilings = measure_ceilings()
        free_cached_memory()
        attention = given.attention or attention_of(own, given.exact)
        report.record(model=given.model, modes=given.modes, attention=attention, ceilings=ceilings._asdict())
        dtype = "float32" if given.exact else "bfloat16"
        options = engine_options(Path(folder), dtype, attention, own, given.lengths, given.batches)
        try:
            _measure(given, report, options, buckets, lambda *bucket: floor_s(shape, ceilings, *bucket), end_s)
        except Exception as error:
            traceback.print_exc()
            report.fail("measurement", error)
    rows = list(report.found.get("rows", []))
    if rows and "grid" in given.modes:
        judge_rightness(report, rows, max_error)
    if rows and given.exact:
        equal = sum(row.get("tokens_equal", False) for row in rows)
        report.check("batches with equal tokens, of all", equal / len(rows), at_least=1)
        print("tokens equal" if equal == len(rows) else f"TOKENS DIFFER in {len(rows) - equal} of {len(rows)} batches")
    elif rows and "grid" in given.modes:
        judge_speed(report, rows, given.modes)
    print_rows(rows, own)
    return report.end()


def _measure(
    given: Any,
    report: Report,
    options: dict[str, Any],
    buckets: list[Bucket],
    floor: Callable[..., float],
    end_s: float,
) -> None:
    def elapsed() -> float:
        return round(given.within - (end_s - time.perf_counter()), 1)

    runner, capture_own = load_runner(options)
    spread_weights(runner)
    report.record(loaded_after_s=elapsed())
    if HAS_GPU and not given.exact:
        report.record(compile_problem=compile_kernels(runner), compiled_after_s=elapsed())
    measurement = Measurement(runner, buckets, report, floor, given.repeats)
    peak = measurement.eager_peak_bytes(Bucket(max(given.lengths), max(given.batches)))
    report.record(first_batch_after_s=elapsed())
    grid = None
    if "grid" in given.modes:
        try:
            grid, capture = build_grid(runner, given.lengths, given.batches)
        except Exception as error:
            traceback.print_exc()
            report.fail("grid", error)
        else:
            wanted = len(given.lengths) * len(given.batches)
            capture |= {"eager_peak_bytes": peak, "wanted": wanted}
            report.record(capture=capture, captured_after_s=elapsed())
            judge_capture(report, capture)
    measurement.eager_and_grid(grid, "eager" in given.modes, end_s)
    report.record(eager_and_grid_after_s=elapsed())
    own = own_mode(given.modes)
    if own:
        try:
            path = capture_own()
            if path is None or path is runner.eager_runner:
                raise RuntimeError(f"SGLang has made no {own} graphs here")
        except Exception as error:
            traceback.print_exc()
            report.fail(f"SGLang's {own} graphs", error)
        else:
            report.record(own_captured_after_s=elapsed())
            measurement.own(own, path, grid, end_s)
            report.record(own_after_s=elapsed())


if __name__ == "__main__":
    sys.exit(main())
