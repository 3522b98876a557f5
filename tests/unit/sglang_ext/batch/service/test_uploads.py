"""Uploads: whatever the pieces in which a form arrives, and whatever is wrong with it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.batch.service import uploads
from sglang_ext.batch.service.uploads import UploadedForm, UploadError, receive_upload, shown_name
from support.examples import examples

BOUNDARY = "edge"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def form(content: bytes, filename: str = "a.jsonl", purpose: str = "batch", *, file_first: bool = False) -> bytes:
    file = (
        (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        + content
        + b"\r\n"
    )
    field = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'.encode()
    return (file + field if file_first else field + file) + f"--{BOUNDARY}--\r\n".encode()


async def pieces(body: bytes, sizes: list[int]) -> AsyncIterator[bytes]:
    at = 0
    for size in sizes:
        yield body[at : at + size]
        at += size
    yield body[at:]


def receive(body: bytes, sizes: list[int], limit: int = 1 << 20, kind: str = TYPE) -> tuple[UploadedForm, bytes]:
    file = io.BytesIO()
    received = asyncio.run(receive_upload(kind, pieces(body, sizes), file, limit))
    return received, file.getvalue()


@pytest.mark.slow
@given(
    content=st.one_of(st.binary(max_size=300), st.text("\r\n-edg", max_size=80).map(str.encode)),
    sizes=st.lists(st.integers(0, 40), max_size=20),
    file_first=st.booleans(),
    write_bytes=st.sampled_from([1, 7, 1 << 20]),
)
@settings(deadline=None, max_examples=examples(150))
def test_the_pieces_do_not_matter(content: bytes, sizes: list[int], file_first: bool, write_bytes: int) -> None:
    if f"\r\n--{BOUNDARY}".encode() in b"\r\n" + content:
        return
    before = uploads.WRITE_BYTES
    uploads.WRITE_BYTES = write_bytes
    try:
        received, written = receive(form(content, file_first=file_first), sizes)
    finally:
        uploads.WRITE_BYTES = before
    assert written == content
    assert received == UploadedForm({"purpose": "batch"}, "a.jsonl", len(content))


@given(cut=st.integers(0, len(form(b"content")) - 5), sizes=st.lists(st.integers(0, 40), max_size=5))
@settings(deadline=None, max_examples=examples(60))
def test_a_form_that_is_cut_off_is_refused(cut: int, sizes: list[int]) -> None:
    with pytest.raises(UploadError) as caught:
        receive(form(b"content")[:cut], sizes)
    assert caught.value.status == 400


def test_a_file_at_the_limit_and_one_byte_over() -> None:
    assert receive(form(b"x" * 100), [30] * 9, limit=100)[1] == b"x" * 100
    with pytest.raises(UploadError, match="larger than 99 bytes") as caught:
        receive(form(b"x" * 100), [30] * 9, limit=99)
    assert (caught.value.status, caught.value.param) == (413, "file")


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{}", "application/json", "must be multipart/form-data"),
        (b"", "", "must be multipart/form-data"),
        (b"", "multipart/form-data", "with a boundary"),
        (b"garbage", TYPE, "multipart body"),
        (form(b"x").replace(b'name="file"', b'name="other"'), TYPE, "no part 'file'"),
        (form(b"x")[:-10] + form(b"y"), TYPE, "one file at a time"),
        (form(b"x", purpose="p" * 5000), TYPE, "a field of more than"),
        (form(b"x").replace(b"form-data; ", b"form-data; " + b"a" * 100_000), TYPE, "multipart body"),
    ],
)
def test_what_is_no_upload_is_refused(body: bytes, kind: str, message: str) -> None:
    with pytest.raises(UploadError, match=message) as caught:
        receive(body, [], kind=kind)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("given_name", "shown"),
    [
        ("input.jsonl", "input.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("/", "upload.jsonl"),
        ("", "upload.jsonl"),
        ("a\nb\x00c.jsonl", "a\ufffdb\ufffdc.jsonl"),
        ("п" * 400, "п" * 255),
        ("\u202egnp.exe", "\ufffdgnp.exe"),
    ],
)
def test_names_are_for_display(given_name: str, shown: str) -> None:
    assert shown_name(given_name) == shown


@pytest.mark.slow
@given(st.text())
def test_any_name_is_shown_without_folders_and_controls(name: str) -> None:
    shown = shown_name(name)
    assert 0 < len(shown) <= 255
    assert "/" not in shown
    assert "\\" not in shown
    assert shown.isprintable()
