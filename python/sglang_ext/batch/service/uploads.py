"""A multipart upload, streamed to disk: what is held is one piece of it, however large it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import IO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

WRITE_BYTES = 1 << 20
MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
MAX_NAME_LENGTH = 255


class UploadError(ValueError):
    """The upload cannot be taken; `status` is the HTTP status, `param` the field."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True)
class UploadedForm:
    """The fields that came with the file; the file itself was written while it arrived."""

    fields: dict[str, str]
    filename: str
    size_bytes: int


@dataclass
class _OpenPart:
    """The part that is arriving."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    header_name: bytearray = field(default_factory=bytearray)
    header_value: bytearray = field(default_factory=bytearray)
    name: str = ""
    is_file: bool = False
    value: bytearray = field(default_factory=bytearray)


class _FormReader:
    """Takes a form's bytes; what belongs to the file collects in `pending`."""

    def __init__(self, content_type: str, max_file_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise UploadError(400, "the content type must be multipart/form-data with a boundary", "file")
        self._max_file_bytes = max_file_bytes
        self._part = _OpenPart()
        self._parts = 0
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size_bytes = 0
        self.pending = bytearray()
        self.is_complete = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
        except MultipartParseError as error:
            raise UploadError(400, f"multipart body: {error}", "file") from None

    def feed(self, data: bytes) -> None:
        """Take the next bytes; UploadError where they are wrong or too many."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise UploadError(400, f"multipart body: {error}", "file") from None

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise UploadError(400, f"a form of more than {MAX_PARTS} parts")
        self._part = _OpenPart()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]

    def _header_end(self) -> None:
        part = self._part
        part.headers[bytes(part.header_name).lower()] = bytes(part.header_value)
        part.header_name.clear()
        part.header_value.clear()

    def _headers_finished(self) -> None:
        part = self._part
        _, options = parse_options_header(part.headers.get(b"content-disposition", b""))
        part.name = options.get(b"name", b"").decode("utf-8", "replace")
        part.is_file = part.name == "file"
        if part.is_file:
            if self.filename is not None:
                raise UploadError(400, "one file at a time", "file")
            self.filename = shown_name(options.get(b"filename", b"").decode("utf-8", "replace"))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.is_file:
            self.size_bytes += end - start
            if self.size_bytes > self._max_file_bytes:
                raise UploadError(413, f"the file is larger than {self._max_file_bytes} bytes", "file")
            self.pending += data[start:end]
        elif len(part.value) + end - start > MAX_FIELD_BYTES:
            raise UploadError(400, f"a field of more than {MAX_FIELD_BYTES} bytes", part.name)
        else:
            part.value += data[start:end]

    def _part_end(self) -> None:
        if not self._part.is_file:
            self.fields[self._part.name] = self._part.value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_complete = True


async def receive_upload(
    content_type: str, body: AsyncIterator[bytes], file: IO[bytes], max_file_bytes: int
) -> UploadedForm:
    """Write the part `file` of a multipart body to `file` as it arrives and return the rest of the form.

    UploadError: not a form, no file in it, too large, cut off. What `body` and writing raise passes through.
    """
    reader = _FormReader(content_type, max_file_bytes)
    async for data in body:
        reader.feed(data)
        if len(reader.pending) >= WRITE_BYTES:
            await asyncio.to_thread(file.write, reader.pending)
            reader.pending = bytearray()
    if not reader.is_complete:
        raise UploadError(400, "the multipart body ends before its last boundary", "file")
    if reader.filename is None:
        raise UploadError(400, "the form has no part 'file'", "file")
    await asyncio.to_thread(file.write, reader.pending)
    return UploadedForm(reader.fields, reader.filename, reader.size_bytes)


def shown_name(name: str) -> str:
    """A client's file name for display: its last component, printable, of bounded length, never empty."""
    last = name.replace("\\", "/").rpartition("/")[2]
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in last)
    return printable[:MAX_NAME_LENGTH] or "upload.jsonl"
