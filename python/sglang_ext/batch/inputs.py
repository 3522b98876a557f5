"""Reading input: which files there are, their lines in constant memory, and what is wrong with them.

JSONL and Parquet, JSONL also compressed (`.gz`, `.zst`). Everything is read once, a line at a time; a bad line is noted
with its place and its field, and reading goes on, so that one pass finds all.
"""

from __future__ import annotations

import fnmatch
import glob
import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, cast

import orjson

from sglang_ext.batch.lines import BatchLine, LineError, LineOptions, parse_line
from sglang_ext.batch.object_storage import SCHEME, ObjectPath
from sglang_ext.batch.store import BatchStore

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
MAX_SHOWN = 20
MAX_LINE_BYTES = 256 << 20
_PARQUET_ROWS = 256  # decoded at a time
_ADD_LINES, _ADD_BYTES = 10_000, 16 << 20  # of one transaction


class InputError(ValueError):
    """Input that cannot be read; the text is one line that names it."""


class InputFile(NamedTuple):
    """One file of the input; `name` is what messages and made-up `custom_id`s call it."""

    path: Path | ObjectPath
    name: str


class FileIdentity(NamedTuple):
    """Size, time and digest of a file that was read, by which a change is found; of an object, its entity tag."""

    name: str
    size_bytes: int
    modified_ns: int
    sha256: str


@dataclass(slots=True)
class Findings:
    """The faults of the input: the first `MAX_SHOWN` as text, and their number."""

    shown: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, place: str, reason: str) -> None:
        """Note one finding."""
        self.count += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(f"{place}: {reason}")

    @property
    def text(self) -> str:
        """All that is shown, a line each, and the number of the others."""
        rest = self.count - len(self.shown)
        return "\n".join([*self.shown, f"and {rest} more"] if rest else self.shown)


def find_inputs(patterns: Sequence[str]) -> list[InputFile]:
    """The files that names, globs and folders stand for, in order. InputError names what stands for nothing.

    `s3://BUCKET/NAME` is an object; its name may be a glob, and one that ends in a slash is a folder.
    """
    objects = [pattern for pattern in patterns if pattern.startswith(SCHEME)]
    if not objects:
        return _find_local(patterns)
    if len(objects) != len(patterns):
        raise InputError(f"{objects[0]}: files of a run are all on {SCHEME}, or all local")
    found = list(dict.fromkeys(path for pattern in objects for path in _find_objects(ObjectPath.parse(pattern))))
    if len(found) == 1:
        return [InputFile(found[0], found[0].name)]
    names = [f"{path.bucket}/{path.key}" for path in found]
    common = os.path.commonpath([os.path.dirname(name) for name in names])
    return [InputFile(path, os.path.relpath(name, common)) for path, name in zip(found, names, strict=True)]


def _find_objects(path: ObjectPath) -> list[ObjectPath]:
    literal = re.split(r"[*?\[]", path.key, maxsplit=1)[0]
    if path.is_dir():
        found = [one for one, _ in path.listed() if _format(one) is not None]
        if not found:
            raise InputError(f"{path}: no object in it ends in {', '.join(SUFFIXES)} (.gz, .zst)")
        return found
    if literal != path.key:
        matches = re.compile(fnmatch.translate(path.key))  # a star also spans folders
        found = [one for one, _ in ObjectPath(path.bucket, literal).listed() if matches.match(one.key)]
    else:
        found = [path] if path.exists() else []
    if not found:
        raise InputError(f"{path}: no such object")
    for one in found:
        if _format(one) is None:
            raise InputError(f"{one}: its name must end in {', '.join(SUFFIXES)}, or that and .gz or .zst")
    return found


def _find_local(patterns: Sequence[str]) -> list[InputFile]:
    paths: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found = sorted(found for found in path.rglob("*") if found.is_file() and _format(found) is not None)
            if not found:
                raise InputError(f"{pattern}: no file in it ends in {', '.join(SUFFIXES)} (.gz, .zst)")
        elif path.exists():
            found = [path]
        else:
            found = sorted(Path(found) for found in glob.glob(pattern, recursive=True) if Path(found).is_file())
            if not found:
                raise InputError(f"{pattern}: no such file")
        paths += found
    unique = list({path.resolve(): path for path in paths}.values())
    for path in unique:
        if _format(path) is None:
            raise InputError(f"{path}: its name must end in {', '.join(SUFFIXES)}, or that and .gz or .zst")
    if len(unique) == 1:
        return [InputFile(unique[0], unique[0].name)]
    common = os.path.commonpath([path.resolve().parent for path in unique])
    return [InputFile(path, os.path.relpath(path.resolve(), common)) for path in unique]


def identify(file: InputFile, known: FileIdentity | None = None) -> FileIdentity:
    """Size, time and digest of a file. One of the size and time of `known` is taken for unchanged and not read.

    InputError when it cannot be read.
    """
    if isinstance(file.path, ObjectPath):
        try:
            size_bytes, modified_s, etag = file.path.status()
        except FileNotFoundError:
            raise InputError(f"{file.path}: no such object") from None
        return FileIdentity(file.name, size_bytes, int(modified_s * 1e9), etag)
    try:
        with file.path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if known and (known.size_bytes, known.modified_ns) == (status.st_size, status.st_mtime_ns):
                return known._replace(name=file.name)
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file.path}: {error.strerror}") from None
    return FileIdentity(file.name, status.st_size, status.st_mtime_ns, digest)


def read_lines(files: Sequence[InputFile], options: LineOptions, findings: Findings) -> Iterator[BatchLine]:
    """The good lines of all files, in order; what is wrong goes to `findings`. InputError for an unreadable file."""
    first: BatchLine | None = None
    for file in files:
        rows = _parquet_rows(file) if _format(file.path) == "parquet" else _json_rows(file, findings)
        try:
            for number, content in rows:
                try:
                    line = parse_line(content, options, file.name, number)
                    if first is None:
                        first = line
                    elif line.path != first.path:
                        raise LineError("url", f"is {line.path}, and {first.place} has {first.path}; one run, one url")
                except LineError as error:
                    findings.add(f"{file.name}:{number}", str(error))
                    continue
                yield line
        except (OSError, EOFError, zlib.error) as error:  # a damaged archive, too
            raise InputError(f"{file.path}: {error}") from None


def add_input(store: BatchStore, job: int, files: Sequence[InputFile], options: LineOptions, findings: Findings) -> int:
    """Read all files into a job, some thousand lines a transaction, and make it ready if nothing is wrong.

    Returns the number of good lines. InputError and StoreError as reading and the store raise them.
    """
    batch: list[BatchLine] = []
    size_bytes = total = 0
    for line in read_lines(files, options, findings):
        batch.append(line)
        size_bytes += len(line.body)
        if len(batch) >= _ADD_LINES or size_bytes >= _ADD_BYTES:
            store.add_lines(job, batch)
            total += len(batch)
            batch, size_bytes = [], 0
    store.add_lines(job, batch)
    total += len(batch)
    for duplicate in store.duplicates(job, MAX_SHOWN):
        findings.add(duplicate.second, f"custom_id: {duplicate.custom_id!r} is on {duplicate.first}, too")
    if not total and not findings.count:
        findings.add(files[0].name, "there is no line in it")
    if not findings.count:
        store.make_ready(job)
    return total


# -- formats ----------------------------------------------------------------------------------------------------------


def _format(path: Path | ObjectPath) -> str | None:
    name = path.name.lower()
    for compression in (".gz", ".zst"):
        name = name.removesuffix(compression)
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    if suffix == ".parquet":
        return "parquet" if name == path.name.lower() else None
    return None if suffix is None else "json"


def _json_rows(file: InputFile, findings: Findings) -> Iterator[tuple[int, object]]:
    """Line numbers and parsed lines; empty lines are left out."""
    with _open_text(file.path) as opened:
        number = 0
        while raw := opened.readline(MAX_LINE_BYTES):
            number += 1
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.endswith(b"\n") and len(raw) >= MAX_LINE_BYTES:
                findings.add(f"{file.name}:{number}", f"longer than {MAX_LINE_BYTES >> 20} MiB")
                while (rest := opened.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                continue
            if not raw.strip():
                continue
            try:
                yield number, orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                findings.add(f"{file.name}:{number}", f"is not valid JSON: {error}")


def _open_text(path: Path | ObjectPath) -> IO[bytes]:
    name = path.name.lower()
    if name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path.open() if isinstance(path, ObjectPath) else path, "rb"))
    if name.endswith(".zst"):
        import pyarrow as pa

        raw = pa.PythonFile(path.open(), mode="r") if isinstance(path, ObjectPath) else pa.OSFile(str(path))
        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 1 << 16)
    if isinstance(path, ObjectPath):
        return path.open()
    return path.open("rb", buffering=1 << 18)


def _parquet_rows(file: InputFile) -> Iterator[tuple[int, object]]:
    """Row numbers from 1, and rows as mappings without what is null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path.open() if isinstance(file.path, ObjectPath) else file.path) as opened:
            number = 0
            for batch in opened.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
    except pa.ArrowException as error:
        raise InputError(f"{file.path}: {' '.join(str(error).split())}") from None


def _without_nulls(value: object) -> object:
    """Null is how Parquet shows a field that a row lacks."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(item) for item in value]
    return value
