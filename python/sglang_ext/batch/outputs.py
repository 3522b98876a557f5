"""Writing results: from the store into files, each written under another name and renamed when it is whole.

An export can be repeated at any time; it says what the store says. Results go into the output, failures with their
reasons into an error file next to it (in OpenAI's format, both where the output is JSONL).
"""

from __future__ import annotations

import base64
import gzip
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import orjson

from sglang_ext.batch.endpoint import count_tokens
from sglang_ext.batch.lines import Mode
from sglang_ext.batch.object_storage import ObjectPath
from sglang_ext.batch.scores import distillkit_schema, distillkit_table, score_row, score_schema, score_table
from sglang_ext.batch.store import BatchStore, StoredResult

ROWS_PER_FILE = 500_000  # where the output is a folder
_GROUP_ROWS, _GROUP_BYTES = 1000, 16 << 20  # of a row group, as it is in the store
_GENERATE_COLUMNS = (
    "custom_id",
    "prompt_token_ids",
    "completion_token_ids",
    "text",
    "finish_reason",
    "usage",
    "error",
    "embeddings",
)
# Errors of requests that were not finished when their batch ended, and the reason as it is shown.
NOT_SENT = {
    "batch_expired": "This request could not be executed before the completion window ended.",
    "batch_cancelled": "This request was not executed: the batch was cancelled.",
}
_POSITION_MASK = (1 << 40) - 1
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)  # Arrow's are among them


class OutputFormat(StrEnum):
    """The formats of the output."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    DISTILLKIT = "distillkit"


class OutputError(ValueError):
    """An output that cannot be written as asked; the text is one line that names the option."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Describes where the results go, and how."""

    path: Path | ObjectPath
    mode: Mode
    format: OutputFormat
    vocabulary: int = 0  # DistillKit: how many tokens the model knows
    is_folder: bool = False
    rows_per_file: int = ROWS_PER_FILE

    @property
    def error_path(self) -> Path | ObjectPath:
        """Return where failures go."""
        if self.is_folder:
            return self.path / "errors.jsonl"
        return self.path.with_name(f"{self.path.name}.errors.jsonl")


class Exported(NamedTuple):
    """The result of an export."""

    rows: int
    failures: int
    files: list[Path | ObjectPath]


def choose_output(
    path: Path | ObjectPath, mode: Mode, wanted: OutputFormat | None, vocabulary: int = 0
) -> OutputOptions:
    """Format and kind of output from its name: `.jsonl` (`.gz`, `.zst`), `.parquet`, or a folder (Parquet).

    OutputError where name, mode and the format wanted do not go together.
    """
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    of_name = None
    if name.endswith((".jsonl", ".ndjson", ".json")):
        of_name = OutputFormat.JSONL
    elif name.endswith(".parquet"):
        of_name = OutputFormat.PARQUET
    is_folder = path.is_dir() or of_name is None
    chosen = wanted or (OutputFormat.PARQUET if is_folder else of_name)
    assert chosen is not None
    if not is_folder and (chosen is OutputFormat.JSONL) != (of_name is OutputFormat.JSONL):
        raise OutputError(f"--output: {path} does not go with --format {chosen.value}")
    if of_name is OutputFormat.PARQUET and name != path.name.lower():
        raise OutputError(f"--output: {path}: Parquet is compressed within; leave .gz and .zst out")
    if mode is Mode.GENERATE and chosen is OutputFormat.DISTILLKIT:
        raise OutputError("--format distillkit is for --mode score")
    if chosen is OutputFormat.DISTILLKIT and vocabulary < 2:
        raise OutputError("--format distillkit needs --vocabulary: how many tokens the model knows")
    return OutputOptions(path, mode, chosen, vocabulary, is_folder)


def export(store: BatchStore, job: int, options: OutputOptions) -> Exported:
    """Write all results of a job. OSError or StorageError where a file cannot be written; what was there before is then
    unharmed.
    """
    if isinstance(options.path, Path):
        (options.path if options.is_folder else options.path.parent).mkdir(parents=True, exist_ok=True)
    has_failures_in_it = options.mode is Mode.GENERATE and options.format is OutputFormat.PARQUET
    results = store.results(job, ok=None if has_failures_in_it else True)
    files: list[Path | ObjectPath] = []
    rows = 0
    if options.is_folder:
        suffix = "jsonl" if options.format is OutputFormat.JSONL else "parquet"
        part: Iterable[StoredResult]
        for number, part in enumerate(_parts(results, options.rows_per_file)):
            path = options.path / f"part-{number:05d}.{suffix}"
            rows += _write(path, part, options)
            files.append(path)
        there: list[Path | ObjectPath] = [*options.path.glob("part-*.*")]
        for stale in set(there) - set(files):
            stale.unlink()
    else:
        rows = _write(options.path, results, options)
        files.append(options.path)
    failures = 0
    with _replacing(options.error_path) as opened:
        for result in store.results(job, ok=False):
            opened.write(error_line(result))
            failures += 1
    if failures:
        files.append(options.error_path)
    else:
        options.error_path.unlink()
    return Exported(rows, failures, files)


def _parts(results: Iterator[StoredResult], size: int) -> Iterator[Iterator[StoredResult]]:
    """Pieces of at most `size` results, each read before the next is asked for; one, empty, of no results."""
    first = next(results, None)
    if first is None:
        yield iter(())
    while first is not None:
        count = 0

        def piece(head: StoredResult) -> Iterator[StoredResult]:
            nonlocal count, first
            current: StoredResult | None = head
            while current is not None:
                yield current
                count += 1
                current = next(results, None)
                if count == size:
                    break
            first = current

        yield piece(first)


def _write(path: Path | ObjectPath, results: Iterable[StoredResult], options: OutputOptions) -> int:
    if options.format is not OutputFormat.JSONL:
        return _write_parquet(path, results, options)
    rows = 0
    as_line = score_line if options.mode is Mode.SCORE else output_line
    with _replacing(path) as opened:
        for some in _groups(results):
            opened.write(b"".join(map(as_line, some)))
            rows += len(some)
    return rows


# -- JSONL ------------------------------------------------------------------------------------------------------------


def output_line(result: StoredResult) -> bytes:
    """One line of OpenAI's output file, for a result that is ok."""
    return _line(result, result.status_code, orjson.Fragment(_one_line(result.body)), None)


def score_line(result: StoredResult) -> bytes:
    """One line with the fields of a Parquet file of scores."""
    return _escaped(orjson.dumps(score_row(result.custom_id, result.body), option=orjson.OPT_APPEND_NEWLINE))


def error_line(result: StoredResult) -> bytes:
    """One line of OpenAI's error file: the reason, and the reply where there was one."""
    reply: object = None
    if result.body:
        try:
            reply = orjson.loads(result.body)
        except orjson.JSONDecodeError:
            reply = result.body.decode("utf-8", "replace")
    code, message = "no_reply" if result.status_code is None else f"http_{result.status_code}", result.error
    if result.error in NOT_SENT:
        code, message = result.error, NOT_SENT[result.error]
    return _line(result, result.status_code, reply, {"code": code, "message": message})


def _line(result: StoredResult, status_code: int | None, body: object, error: dict[str, object] | None) -> bytes:
    line_id = f"batch_req_{result.id >> 40}_{result.id & _POSITION_MASK}"
    response = None
    if status_code is not None:
        # A server that names no request, as SGLang's refusals do not, leaves the line's own id to find it by.
        response = {"status_code": status_code, "request_id": result.request_id or line_id, "body": body}
    line = orjson.dumps(
        {
            "id": line_id,
            "custom_id": result.custom_id,
            "response": response,
            "error": error,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )
    return _escaped(line)


def _one_line(body: bytes) -> bytes:
    return body if b"\n" not in body and b"\r" not in body else orjson.dumps(orjson.loads(body))


_LINE_ENDS = ("\u0085", "\u2028", "\u2029")


def _escaped(line: bytes) -> bytes:
    """Escape what ends a line for some readers, Python's `str.splitlines` among them; in JSON it stands in strings."""
    for end in _LINE_ENDS:
        coded = end.encode()
        if coded in line:
            line = line.replace(coded, b"\\u%04x" % ord(end))
    return line


# -- Parquet ----------------------------------------------------------------------------------------------------------


def generate_schema() -> Any:
    """Columns of a Parquet file of generated text, as a pyarrow schema."""
    import pyarrow as pa

    ids, usage = pa.list_(pa.int32()), pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())])
    embeddings = pa.list_(pa.list_(pa.float32()))
    types = (pa.string(), ids, ids, pa.string(), pa.string(), usage, pa.string(), embeddings)
    return pa.schema(list(zip(_GENERATE_COLUMNS, types, strict=True)))


def generate_table(results: Sequence[StoredResult]) -> Any:
    """Results as a pyarrow table, a row each in their order. A reply that cannot be read is an error of its line."""
    import pyarrow as pa

    try:
        return pa.Table.from_pylist([generate_row(result) for result in results], schema=generate_schema())
    except _UNREADABLE as error:
        if len(results) > 1:
            return pa.concat_tables([generate_table([result]) for result in results])
        reason = " ".join(f"the reply cannot be read: {error!r}".split())
        return generate_table([results[0]._replace(is_ok=False, error=reason)])


def generate_row(result: StoredResult) -> dict[str, object]:
    """A result as a row: of several choices the first. What the reply does not name is null."""
    row: dict[str, object] = dict.fromkeys(_GENERATE_COLUMNS)
    row["custom_id"] = result.custom_id
    if not result.is_ok:
        row["error"] = result.error
        return row
    reply = orjson.loads(result.body)
    first = reply[0] if isinstance(reply, list) and reply else reply
    if not isinstance(first, dict):
        return row
    choices = first.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else first
    meta = first.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    message = choice.get("message")
    row["text"] = message.get("content") if isinstance(message, dict) else _text(choice)
    reason = choice.get("finish_reason", meta.get("finish_reason")) or first.get("stop_reason", first.get("status"))
    row["finish_reason"] = reason.get("type") if isinstance(reason, dict) else reason
    row["completion_token_ids"] = _ids(choice, "output_ids", "token_ids", "completion_token_ids")
    row["prompt_token_ids"] = _ids(choice, "prompt_token_ids") or _ids(first, "prompt_token_ids")
    if row["prompt_token_ids"] is None:
        sent = orjson.loads(result.line_body)
        row["prompt_token_ids"] = _ids(sent, "input_ids", "prompt")
    prompt_tokens, completion_tokens = count_tokens(first)
    row["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    if first.get("object") == "list" and isinstance(first.get("data"), list):
        row["embeddings"] = [_embedding(item["embedding"]) for item in first["data"]]
    return row


def _text(reply: dict[str, Any]) -> object:
    """Return the text of a reply without choices: its own, or that of a message's or a response's blocks."""
    if isinstance(reply.get("content"), list):
        return "".join(block["text"] for block in reply["content"] if block.get("type") == "text")
    if isinstance(reply.get("output"), list):
        messages = [item["content"] for item in reply["output"] if item.get("type") == "message"]
        return "".join(part["text"] for content in messages for part in content if part.get("type") == "output_text")
    return reply.get("text")


def _embedding(given: object) -> object:
    """Return the numbers of an embedding, which may come as little-endian float32 in base64."""
    return np.frombuffer(base64.b64decode(given), "<f4").tolist() if isinstance(given, str) else given


def _ids(holder: dict[str, Any], *names: str) -> list[int] | None:
    for name in names:
        value = holder.get(name)
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            return value
    return None


def _write_parquet(path: Path | ObjectPath, results: Iterable[StoredResult], options: OutputOptions) -> int:
    import pyarrow.parquet as pq

    def table(some: list[StoredResult]) -> Any:
        if options.mode is Mode.GENERATE:
            return generate_table(some)
        rows = ((item.custom_id, item.body) for item in some)
        if options.format is OutputFormat.DISTILLKIT:
            try:
                return distillkit_table(rows, options.vocabulary)
            except ValueError as error:
                raise OutputError(f"--vocabulary: {error}") from None
        return score_table(rows)

    schema = generate_schema() if options.mode is Mode.GENERATE else score_schema()
    if options.format is OutputFormat.DISTILLKIT:
        schema = distillkit_schema()
    rows = 0
    with _replacing(path) as opened, pq.ParquetWriter(opened, schema, compression="zstd") as writer:
        for some in _groups(results):
            writer.write_table(table(some))
            rows += len(some)
    return rows


def _groups(results: Iterable[StoredResult]) -> Iterator[list[StoredResult]]:
    group: list[StoredResult] = []
    size_bytes = 0
    for result in results:
        group.append(result)
        size_bytes += len(result.body)
        if len(group) >= _GROUP_ROWS or size_bytes >= _GROUP_BYTES:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


# -- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def _replacing(path: Path | ObjectPath) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when it is whole and on the disk, and is removed otherwise."""
    if isinstance(path, ObjectPath):
        with path.replacing() as raw, _compressing(path, raw) as opened:
            yield opened
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as raw, _compressing(path, raw) as opened:
            yield opened
        with partial.open("rb+") as written:  # a compressor closes what it wrote into
            os.fsync(written.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _compressing(path: Path | ObjectPath, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    name = path.name.lower()
    if name.endswith(".gz"):
        with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) as compressed:
            yield cast("IO[bytes]", compressed)
    elif name.endswith(".zst"):
        import pyarrow as pa

        with pa.CompressedOutputStream(pa.PythonFile(raw, mode="w"), "zstd") as compressed:
            yield compressed
    else:
        yield raw
