"""An uploaded file becomes the lines of a job, or the list of what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO

import orjson

from sglang_ext.batch.lines import BatchLine, LineError, LineOptions, parse_line
from sglang_ext.batch.progress import counted
from sglang_ext.batch.service.batches import LineProblem
from sglang_ext.batch.store import BatchStore

MAX_PROBLEMS = 100
MAX_LINE_BYTES = 64 << 20
STORED_LINES, STORED_BYTES = 500, 4 << 20  # at a time
_REQUIRED = ("custom_id", "method", "url", "body")
_CODES = {"custom_id": "invalid_custom_id", "method": "invalid_method", "url": "invalid_url"}


class ValidationStoppedError(Exception):
    """The validation was cancelled."""


def read_lines(
    store: BatchStore,
    job: int,
    file: IO[bytes],
    endpoint: str,
    max_lines: int,
    model: str | None,
    is_stopped: Callable[[], bool],
) -> list[LineProblem]:
    """Put every line of `file` into the empty job `job`, in constant memory, and make the job ready.

    Returns what is wrong, at most `MAX_PROBLEMS` of it; the job is ready only where nothing is. Lines count from 1;
    empty ones are skipped. ValidationStoppedError as soon as `is_stopped()`.
    """
    problems: list[LineProblem] = []
    options = LineOptions(model=model)
    pending: list[BatchLine] = []
    pending_bytes = count = 0
    for number, raw in _numbered(file):
        if len(raw) > MAX_LINE_BYTES:
            problems.append(LineProblem("line_too_long", f"a line of more than {MAX_LINE_BYTES} bytes", number))
            break
        count += 1
        if count > max_lines:
            message = f"a batch has at most {counted(max_lines, 'line')}"
            problems.append(LineProblem("too_many_lines", message, number))
            break
        parsed = _parse(raw, number, endpoint, options)
        if isinstance(parsed, LineProblem):
            problems.append(parsed)
            if len(problems) == MAX_PROBLEMS:
                break
        else:
            pending.append(parsed)
            pending_bytes += len(raw)
        if len(pending) >= STORED_LINES or pending_bytes >= STORED_BYTES:
            if is_stopped():
                raise ValidationStoppedError
            store.add_lines(job, pending)
            pending, pending_bytes = [], 0
    if is_stopped():
        raise ValidationStoppedError
    if not count:
        problems.append(LineProblem("empty_file", "the file has no lines"))
    store.add_lines(job, pending)
    for twice in store.duplicates(job, MAX_PROBLEMS - len(problems)):
        message = f"custom_id {twice.custom_id!r} is on {twice.first}, too"
        problems.append(LineProblem("duplicate_custom_id", message, twice.second_number, "custom_id"))
    if not problems:
        store.make_ready(job)
    return problems


def _numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not empty with their numbers; of a line that is too long only its beginning."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw := raw.strip():
            yield number, raw


def _parse(raw: bytes, number: int, endpoint: str, options: LineOptions) -> BatchLine | LineProblem:
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return LineProblem("invalid_json_line", f"not valid JSON: {error}", number)
    if not isinstance(content, dict):
        return LineProblem("invalid_json_line", "must be a JSON object", number)
    for name in _REQUIRED:
        if content.get(name) is None:
            return LineProblem("missing_required_parameter", f"{name}: is missing", number, name)
    unknown = sorted(content.keys() - set(_REQUIRED))
    if unknown:
        return LineProblem("unknown_parameter", f"{unknown[0]}: a line has {', '.join(_REQUIRED)}", number, unknown[0])
    try:
        line = parse_line(content, options, "", number)
    except LineError as error:
        return LineProblem(_CODES.get(error.field, "invalid_request"), str(error), number, error.field or None)
    if line.path != endpoint:
        return LineProblem("invalid_url", f"url: is {line.path}, and the batch's endpoint is {endpoint}", number, "url")
    return line
