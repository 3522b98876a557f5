"""`sglang-ext profile`: measure a running instance, fit its costs, write the profile and its picture."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

from sglang_ext import __version__, settings
from sglang_ext.costs.engine_profile import (
    PREFILL_FIELDS,
    PipelineCosts,
    ProfileError,
    pipeline_entry,
    read_for_adding,
    sp_entry,
    write_profile,
)
from sglang_ext.planner.profiling.facts import InstanceFacts
from sglang_ext.planner.profiling.fit import Fit, FitError, FormFit, bad_forms, fit_measurements, pipeline_costs
from sglang_ext.planner.profiling.http_client import InstanceError, is_this_machine
from sglang_ext.planner.profiling.instance import HttpInstance
from sglang_ext.planner.profiling.measured_points import MeasuredPoint, Measurements, Notes, NotesError, partial_path
from sglang_ext.planner.profiling.measurement import busy_request_s, gap_s, measure
from sglang_ext.planner.profiling.points import AskedPoints, Point, PointError, choose_points
from sglang_ext.settings import Setting, SettingsError

API_KEY_VARIABLE = "SGLANG_EXT_API_KEY"
MAX_ERROR = 0.2  # relative, at one point of ten
_HAND_OVER_TOKENS = (16, 128, 1024, 4096)
_BAR = 40


_POINTS = partial(Setting, "points")
_OUTPUT = partial(Setting, "output")
SETTINGS = (
    _POINTS("new_tokens", int, None, "new tokens of a chunk (powers of two up to a chunk)", is_list=True),
    _POINTS("cached_tokens", int, None, "cached tokens before it (0 and powers of four)", is_list=True),
    _POINTS("batch_tokens", int, None, "tokens of each prompt of a batch (up to 256)", is_list=True),
    _POINTS("batch_sizes", int, None, "prompts of a batch (powers of two); 1: no batches", is_list=True),
    _POINTS("repeats", int, 5, "runs of each point, after a warm-up run"),
    _POINTS("seed", int, 0, "seed of the token ids"),
    _POINTS("timeout_s", float, 300.0, "longest time of one request", dest="timeout"),
    _OUTPUT("plot", Path, None, "the picture (PNG); default: the profile's name with .png"),
    _OUTPUT("device_name", str, None, "name of the device in the profile, such as H200"),
    _OUTPUT("accept_bad_fit", bool, False, "write the profile of a bad fit all the same"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext profile` to `parser`."""
    parser.add_argument("--url", required=True, help="the instance: plain SGLang, or a prefill instance")
    parser.add_argument("--decode", metavar="URL", help="a decode instance: the way of the KV to it is measured too")
    parser.add_argument("--model", help="name or folder of the model that must be served there")
    parser.add_argument("--api-key", help=f"key of the instance; without it, ${API_KEY_VARIABLE}")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the profile (JSON)")
    parser.add_argument(
        "--add-to",
        type=Path,
        metavar="FILE",
        help="a profile of the same model: what it has of other numbers of pipeline stages (--pp-size) is kept",
    )
    settings.add_arguments(parser, SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write. Progress goes to standard error; 2 for what cannot be done, 1 for a bad fit."""
    try:
        return _run(settings.with_settings(args, SETTINGS, args.config))
    except (SettingsError, InstanceError, PointError, NotesError, FitError, ProfileError, ProfilePictureError) as error:
        _clear_bar()
        print(f"sglang-ext profile: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        _clear_bar()
        print(f"sglang-ext profile: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _clear_bar()
        print(f"interrupted; the same command goes on from {partial_path(args.out)}", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    _check(args)
    if args.plot is not None:
        check_picture()
    instance = HttpInstance.connect(
        args.url,
        model=args.model,
        decode_url=args.decode,
        api_key=args.api_key or os.environ.get(API_KEY_VARIABLE),
        timeout_s=args.timeout,
        seed=args.seed,
    )
    facts = instance.facts
    try:
        added_to = read_for_adding(args.add_to, facts.model) if args.add_to is not None else {}
        asked = AskedPoints(args.new_tokens, args.cached_tokens, args.batch_tokens, args.batch_sizes)
        if asked.cached_tokens is None and not instance.can_cache:
            print("cached tokens are left out: a prefill instance needs --decode for them", file=sys.stderr)
            asked = asked._replace(cached_tokens=[0])
        points = choose_points(asked, facts.limits)
        longest = max(point.prompt_tokens for point in points)
        hand_overs = [tokens for tokens in _HAND_OVER_TOKENS if tokens <= longest] if args.decode else []
        notes = Notes(partial_path(args.out), facts.identity())
        may_skip = asked.new_tokens is None
        measurements = measure(
            instance,
            points,
            hand_overs,
            notes,
            args.repeats,
            may_skip=may_skip,
            on_progress=_bar(),
            is_pipeline=facts.stages > 1,
        )
    finally:
        instance.close()
    _clear_bar()
    fit = fit_measurements(measurements)
    print(_table(measurements.points, fit))
    pipeline = None
    if facts.stages > 1:
        pipeline = pipeline_costs(measurements, fit, facts.stages, facts.limits.kv_tokens)
        print(_stages_line(measurements, pipeline))
    for skipped in measurements.skipped:
        print(f"left out: {skipped.reason}")
    bad = bad_forms(fit, MAX_ERROR)
    for form in bad:
        print(_verdict(form), file=sys.stderr)
    if bad and not args.accept_bad_fit:
        print(
            "sglang-ext profile: error: the fit is bad, no profile was written; --set output.accept_bad_fit=true "
            f"writes it (the measurements are kept in {partial_path(args.out)})",
            file=sys.stderr,
        )
        return 1
    content = _content(args, facts, measurements, fit)
    write_profile(args.out, _merged(content, added_to, pipeline, measurements))
    notes.remove()
    print(f"wrote {args.out}" + _draw(args, facts, measurements.points, fit))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.repeats < 1:
        raise PointError(f"points.repeats must be at least 1, got {args.repeats}")
    if not args.timeout > 0:
        raise PointError(f"points.timeout_s must be above 0, got {args.timeout:g}")
    for option, path in (("--out", args.out), ("output.plot", args.plot)):
        if path is not None and not path.parent.is_dir():
            raise PointError(f"{option} {path}: the folder does not exist")


def _verdict(form: FormFit) -> str:
    return (
        f"bad fit of {form.name}: relative error {form.error_p90:.1%} at one point of ten (bound {MAX_ERROR:.1%}), "
        f"largest {form.error_max:.1%} for {form.worst}"
    )


def _table(points: Sequence[MeasuredPoint], fit: Fit) -> str:
    """One row per point: measured time and the error of every form."""
    names = [form.name for form in fit.forms]
    lines = [
        f"{'cached':>8} {'new':>7} {'batch':>6} {'time, ms':>10} {'spread':>7}" + "".join(f"{n:>11}" for n in names)
    ]
    for measured_point in points:
        point = measured_point.point
        cells = "".join(f"{form.errors[point]:>+11.1%}" if point in form.errors else f"{'-':>11}" for form in fit.forms)
        lines.append(
            f"{point.cached_tokens:>8} {point.new_tokens:>7} {point.requests:>6} "
            f"{1e3 * measured_point.duration_s:>10.2f} {measured_point.spread:>7.1%}{cells}"
        )
    for label, name in (("P50", "error_p50"), ("P90", "error_p90"), ("largest", "error_max")):
        lines.append(
            f"{label + ' of the relative error':>42}" + "".join(f"{getattr(f, name):>11.1%}" for f in fit.forms)
        )
    return "\n".join(lines)


def _stages_line(measurements: Measurements, pipeline: PipelineCosts) -> str:
    """Return what was measured of the stages."""
    pace, stages = measurements.pace, pipeline.stages
    assert pace is not None
    others = f", the others {stages.relative[0]:.0%} of that" if stages.relative else ""
    hop = f"{1e3 * stages.hop.fixed_s:.3g} ms and {1e6 * stages.hop.token_s:.3g} us a token"
    return (
        f"times are those of a passage through {stages.count} stages. A chunk of {pace.chunk_tokens} tokens passes in "
        f"{1e3 * median(pace.passages_s):.4g} ms; results follow each other every "
        f"{1e3 * median(pace.intervals_s):.4g} ms, so the slowest stage takes {pace.share:.1%} of a passage{others}. "
        + ("Hops cannot be derived from that." if stages.relative else f"A hop takes {hop}.")
    )


def _merged(
    content: dict[str, object],
    added_to: Mapping[str, object],
    pipeline: PipelineCosts | None,
    measurements: Measurements,
) -> Mapping[str, object]:
    """The content with other numbers of stages of the profile that it is added to.

    A pipeline's own forms are those of a passage, which no reader reckons with: its entry has what a stage takes.
    """
    entries = added_to.get("pipelines", [])
    assert isinstance(entries, list)
    if pipeline is None:
        return {**content, "pipelines": entries} if entries else content
    count, pace = pipeline.stages.count, measurements.pace
    assert pace is not None
    own = {name: content.pop(name) for name in ("fit", "points", "left_out", "hand_over", "busy", "provenance")}
    entry = {**pipeline_entry(pipeline), "pace": pace._asdict(), **own}
    pipelines = [*(known for known in entries if known["stages"] != count), entry]
    pipelines.sort(key=lambda measured_point: int(measured_point["stages"]))
    kept = {name: value for name, value in added_to.items() if name not in ("format", "version")}
    if not kept:
        common = {name: value for name, value in content.items() if name not in ("sp", "prefill", "iteration")}
        return {**common, "pipelines": pipelines, "fit": own["fit"], "provenance": own["provenance"]}
    return {**kept, "pipelines": pipelines}


def _content(args: argparse.Namespace, facts: InstanceFacts, measurements: Measurements, fit: Fit) -> dict[str, object]:
    """The profile as plain JSON values."""
    return {
        "model": facts.model,
        "device": args.device_name or _device_name(args.url, facts),
        "sp": [sp_entry(size, cost) for size, cost in fit.sp.items()],
        "prefill": {field: getattr(fit.prefill, field) for field in PREFILL_FIELDS},
        "iteration": fit.iteration._asdict(),
        "gap_s": gap_s(measurements),
        "busy_request_s": busy_request_s(measurements, fit.iteration),
        "front_end": fit.front_end._asdict(),
        "fit": {
            form.name: {"error_p50": form.error_p50, "error_p90": form.error_p90, "error_max": form.error_max}
            for form in fit.forms
        },
        "max_error": MAX_ERROR,
        "has_bad_fit": bool(bad_forms(fit, MAX_ERROR)),
        "points": [_point_entry(point, fit) for point in measurements.points],
        "hand_over": [
            {
                "prompt_tokens": hand_over.prompt_tokens,
                "before_s": list(hand_over.before_s),
                "after_s": list(hand_over.after_s),
            }
            for hand_over in measurements.hand_overs
        ],
        "busy": [run._asdict() for run in measurements.busy],
        "left_out": [{**_point(skipped.point), "reason": skipped.reason} for skipped in measurements.skipped],
        "provenance": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["sglang-ext", *_without_key(sys.argv[1:])]),
            "sglang": facts.sglang_version,
            "sglang_ext": __version__,
            "architecture": facts.architecture,
            "model_shape": dict(facts.shape) if facts.shape is not None else None,
            "server_arguments": dict(facts.arguments),
            "kv_tokens": facts.limits.kv_tokens,
            "mode": facts.mode.value,
            "measured_from": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        },
    }


def _point(point: Point) -> dict[str, int]:
    return {
        "sp": point.sp_size,
        "cached_tokens": point.cached_tokens,
        "new_tokens": point.new_tokens,
        "requests": point.requests,
    }


def _point_entry(point: MeasuredPoint, fit: Fit) -> Mapping[str, object]:
    return {
        **_point(point.point),
        "duration_s": point.duration_s,
        "durations_s": list(point.durations_s),
        "spread": point.spread,
        "error": {form.name: form.errors[point.point] for form in fit.forms if point.point in form.errors},
    }


def _draw(args: argparse.Namespace, facts: InstanceFacts, points: Sequence[MeasuredPoint], fit: Fit) -> str:
    """Draw where it can be drawn; returns what to say about it."""
    path = args.plot or args.out.with_suffix(".png")
    try:
        check_picture()
    except ProfilePictureError as error:
        return f", no picture: {error}"
    draw_profile(points, fit, f"{facts.model} on {args.device_name or _device_name(args.url, facts)}", path)
    return f" and {path}"


def _device_name(url: str, facts: InstanceFacts) -> str:
    """The processor's name where it is this machine's; else what the instance calls its device."""
    host = url.partition("://")[2].partition("/")[0].rpartition(":")[0]
    return _processor() if facts.device == "cpu" and is_this_machine(host) else facts.device


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def _without_key(arguments: Sequence[str]) -> list[str]:
    """A command line without the key in it."""
    kept: list[str] = []
    is_key = False
    for argument in arguments:
        kept.append("..." if is_key else argument)
        is_key = argument == "--api-key"
        if argument.startswith("--api-key="):
            kept[-1] = "--api-key=..."
    return kept


def _bar() -> Callable[[int, int], None]:
    """A bar on a terminal, a line at every tenth of the way elsewhere."""
    last_tenth = -1

    def show(done: int, total: int) -> None:
        nonlocal last_tenth
        if sys.stderr.isatty():
            filled = _BAR * done // total
            print(f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{total} points", end="", file=sys.stderr)
        elif 10 * done // total > last_tenth:
            last_tenth = 10 * done // total
            print(f"{done} of {total} points measured", file=sys.stderr)

    return show


def _clear_bar() -> None:
    if sys.stderr.isatty():
        print(f"\r{' ' * (_BAR + 24)}\r", end="", file=sys.stderr)


class ProfilePictureError(RuntimeError):
    """The picture cannot be drawn; the text is one line for the user."""


def check_picture() -> None:
    """ProfilePictureError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ProfilePictureError("matplotlib is not installed: pip install matplotlib") from None


def draw_profile(points: Sequence[MeasuredPoint], fit: Fit, title: str, path: Path) -> None:
    """Left: lone chunks by cached tokens; middle: batches by length; right: errors. Dots measured, lines fitted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    chunks, batches, errors = figure.subplots(1, 3)
    figure.suptitle(title)
    lone = [point for point in points if point.point.requests == 1]
    for number, cached_tokens in enumerate(sorted({measured_point.point.cached_tokens for measured_point in lone})):
        row = sorted(
            (measured_point.point.new_tokens, measured_point)
            for measured_point in lone
            if measured_point.point.cached_tokens == cached_tokens
        )
        label = f"after {cached_tokens} cached tokens"
        _dots_and_line(chunks, row, fit, f"C{number % 10}", label)
    for number, new_tokens in enumerate(
        sorted({point.point.new_tokens for point in points if point.point.requests > 1})
    ):
        row = sorted(
            (point.point.requests, point)
            for point in points
            if point.point.new_tokens == new_tokens and point.point.cached_tokens == 0
        )
        _dots_and_line(batches, row, fit, f"C{number % 10}", f"prompts of {new_tokens} tokens")
    for number, form in enumerate(fit.forms):
        ordered = sorted(abs(error) for error in form.errors.values())
        shares = [(position + 1) / len(ordered) for position in range(len(ordered))]
        errors.step(ordered, shares, where="post", color=f"C{number}", label=form.name)
    for axes, across in ((chunks, "new tokens of a chunk"), (batches, "requests of a batch")):
        axes.set(xlabel=across, ylabel="time of the iteration (s)", xscale="log", yscale="log")
    errors.set(xlabel="relative error", ylabel="share of points", ylim=(0, 1))
    for axes in (chunks, batches, errors):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path)


def _dots_and_line(axes, row, fit: Fit, color: str, label: str) -> None:  # type: ignore[no-untyped-def]  # matplotlib
    across = [value for value, _ in row]
    axes.plot(across, [measured_point.duration_s for _, measured_point in row], "o", color=color, markersize=4)
    axes.plot(
        across,
        [fit.iteration.iteration_s(measured_point.point.lengths) for _, measured_point in row],
        "-",
        color=color,
        label=label,
    )
