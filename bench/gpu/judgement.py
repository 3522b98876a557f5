"""Describes what a record of `bench/h200.py` shows: rows of all modes, aims, failures; and several commands' records as
one.

Pure. A record is what the result file holds: `card`, `is_dry_run` and `stages`, each with `steps` by name; a step has
what its process wrote, `seconds`, and `error` or `not_measured` where that is less than all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu.floor import Ceilings, floor_s
from gpu.model_shapes import SHAPES
from gpu.stage_plan import MODES
from gpu.verdicts import (
    Verdict,
    bucket_verdicts,
    capture_verdicts,
    figure_5_verdicts,
    figure_6_verdicts,
    kernel_verdicts,
    two_engines_verdicts,
)

# The relative error of bfloat16 logits between two orders of additions: 0.022 to 0.027 where a random decoder of 28 to
# 64 layers was computed in both on a CPU.
LOGITS_BOUND = 0.1
# In float32: on a GPU attention multiplies in tf32, in tiles of other sizes.
FLOAT32_LOGITS_BOUND = 2e-3
CPU_LOGITS_BOUND = 1e-4
# What attention of each token to itself only must at least differ by: far beyond every bound.
CONTROL_BOUND = 0.3
# Of the answers of two engines: so many may part where two tokens are nearly as good, and so many may be the same for
# another prompt with the same last token.
MOST_TIES, MOST_OF_CONTROL = 0.25, 0.25
# The only reason for which a test on the device may be skipped.
ALLOWED_SKIP = "needs two CUDA devices"

Record = Mapping[str, Any]


def join_rows(model: str, steps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a bucket: the floor, and seconds on each path that was measured; `model` is a name in `SHAPES`."""
    rows: dict[tuple[int, int, int], dict[str, Any]] = {}
    for mode in MODES:
        found = steps.get(mode, {})
        for row in found.get("rows", ()):
            bucket = row["length_tokens"], row["requests"], row["prefix_tokens"]
            ceilings = Ceilings(found["read_bytes_per_s"], found["operations_per_s"])
            joined = rows.setdefault(bucket, {})
            is_first = not joined
            joined |= {key: value for key, value in row.items() if value is not None}
            if is_first:
                joined["floor_s"] = floor_s(SHAPES[model], ceilings, *bucket)
    return [rows[bucket] for bucket in sorted(rows, key=lambda bucket: (bucket[2], bucket[:2]))]


def verdicts_of(record: Record) -> list[Verdict]:
    """Aims of all stages in it; in a dry run none is measured."""
    is_dry = record["is_dry_run"]
    found: list[Verdict] = []
    for stage, one in record["stages"].items():
        steps = one["steps"]
        if not steps:
            continue  # the card does not hold its model
        if stage.startswith("buckets"):
            rows = [] if is_dry else join_rows(one["model"], steps)
            capture = None if is_dry else steps.get("grid", {}).get("capture")
            found += [
                verdict._replace(aim=f"{one['model']}: {verdict.aim}")
                for verdict in (*bucket_verdicts(rows), *capture_verdicts(capture))
            ]
        elif stage == "figure6":
            found += figure_6_verdicts({} if is_dry else steps)
        elif stage == "figure5":
            found += figure_5_verdicts({} if is_dry else steps)
        elif stage == "kernels":
            found += kernel_verdicts({} if is_dry else steps.get("rates", {}).get("ratios", {}))
        elif stage == "two-engines":
            found += two_engines_verdicts({} if is_dry else steps)
    return found


def failures_of(record: Record) -> list[str]:
    """Return what is wrong, a line each: processes that failed, results beyond their bounds, checks that see
    nothing."""
    is_dry = record["is_dry_run"]
    found = []
    for stage, one in record["stages"].items():
        if "error" in one:
            found.append(f"{stage}: {one['error']}")
        for name, step in one.get("steps", {}).items():
            where = f"{stage}, {name}"
            if "error" in step:
                found.append(f"{where}: {step['error']}")
            found += [f"{where}: {line}" for line in _wrong(stage, name, step, is_dry)]
    return found


def _wrong(stage: str, name: str, step: Mapping[str, Any], is_dry: bool) -> Iterator[str]:
    if stage == "preflight":
        for check, result in step.get("checks", {}).items():
            if result["is_required"] and not result["ok"] and not is_dry:
                yield f"{check}: {result['detail']}"
    elif stage == "kernels-check":
        yield from (f"skipped: {line}" for line in step.get("skipped", ()) if ALLOWED_SKIP not in line)
    elif stage == "tokens" or (stage.startswith("buckets") and name == "grid"):
        exact = CPU_LOGITS_BOUND if is_dry else FLOAT32_LOGITS_BOUND
        yield from _wrong_logits(step, exact if is_dry or stage == "tokens" else LOGITS_BOUND)
        if stage == "tokens" and not step.get("tokens_equal"):
            yield "tokens with and without graphs differ"
    elif stage in ("figure5", "figure6"):
        failed = sum(level["failed"] for level in step.get("levels", ()))
        if failed:
            yield f"{failed} requests failed"
        if not is_dry and step.get("levels") and (stage == "figure5" or name == "all"):
            graphs = step["levels"][-1].get("graphs") or step.get("laps", {}).get("graphs")
            if not graphs or not sum(graphs["replays"].values()):
                yield "no prefill ran on a captured shape"
        laps_levels = step.get("levels", ()) if stage == "figure5" or name in ("all", "two-queues") else ()
        for level in laps_levels:
            if not level.get("decisions", {}).get("batches"):
                yield f"at {level.get('concurrency', level.get('rate_per_s'))} no decision was timed"
    elif stage == "two-engines":
        yield from _wrong_answers(name, step, is_dry)
    elif stage == "kernels":
        bound = 1e-4 if is_dry else 1e-2
        for block in step.get("blocks", ()):
            if "flashinfer_failed" in block:
                yield f"flashinfer at {block['tokens']} tokens: {block['flashinfer_failed']}"
            for value_name, value in block.items():
                if value_name.endswith("error") and not value < bound:
                    yield f"{value_name} at {block['tokens']} tokens is {value:.2g}"
        for prefix in step.get("prefixes", ()):
            if not prefix["split_error"] < bound:
                yield f"split_error at {prefix['shape']} is {prefix['split_error']:.2g}"


def _wrong_answers(arrangement: str, step: Mapping[str, Any], is_dry: bool) -> Iterator[str]:
    if "not_possible" in step:
        yield f"not possible: {step['not_possible']}"
        return
    if "error" in step or "not_measured" in step:
        return
    if not step.get("answers"):
        yield "no answers were compared"
        return
    for one in step["different"]:
        yield (
            f"the answer to {one['prompt_tokens']} tokens is another one from its token {one['at']} on, "
            f"which is better than the next best by {one['gap']:.2g}"
        )
    if step["ties"] > MOST_TIES * step["answers"]:
        yield f"{step['ties']} of {step['answers']} answers part at ties"
    if not step["control_equal"] <= MOST_OF_CONTROL:
        yield f"{step['control_equal']:.0%} of answers stay the same behind another prompt: this proves nothing"
    if arrangement == "pool" and not step.get("shared"):
        yield "no prompt was computed by both members"
    graphs = step.get("graphs")
    if arrangement != "pool" and not is_dry and not (graphs and sum(graphs["replays"].values())):
        yield "no prefill ran on a captured shape"


def _wrong_logits(step: Mapping[str, Any], bound: float) -> Iterator[str]:
    error, control = step.get("worst_relative_error"), step.get("control_error")
    if error is None:
        yield "no logits were compared"
        return
    if not error < bound:
        yield f"logits differ by {error:.2g}, more than {bound:g}"
    if control is None:
        yield "wrong attention was not tried, so the comparison proves nothing"
    elif not control > CONTROL_BOUND:
        yield f"attention of each token to itself only differs by {control:.2g}: the comparison would not see it"
    if not step.get("all_on_grid"):
        yield "a batch that fits a captured shape did not run on it"


def merge(records: Sequence[Record]) -> dict[str, Any]:
    """Records of several commands on one kind of device as one; of a step measured twice the later one counts.

    Raises ValueError where the devices differ, or none is given.
    """
    cards = {record["card"] for record in records}
    if len(cards) != 1:
        raise ValueError(f"results of one kind of device are wanted, not of {', '.join(sorted(cards)) or 'none'}")
    merged: dict[str, Any] = {**records[-1], "stages": {}}
    for record in records:
        for stage, one in record["stages"].items():
            before = merged["stages"].get(stage, {})
            steps = {**before.get("steps", {}), **one.get("steps", {})}
            merged["stages"][stage] = {**before, **one, "steps": steps}
    return merged
