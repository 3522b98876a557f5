"""A compiled library without the GPU code that is not wanted: the host's part stays, other kernels are left out.

A library of kernels holds GPU code for several architectures, and for every head size and data type. `nvcc` puts what
it made of a source file into a container, with an ELF image for each architecture. The driver reads an image when a
kernel in it is first called (CUDA_MODULE_LOADING=LAZY, the default), so one that nothing calls may be any other: it is
replaced by the smallest of its architecture and zeros, which take next to no room in an archive.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTAINER_MAGIC = 0xBA55ED50
ELF_MAGIC = b"\x7fELF"
# GPU code before it was linked with that of other source files.
LINKED_ALREADY = "__nv_relfatbin"
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_CONTAINER_HEADER = struct.Struct("<IHHQ")
_IMAGE_HEADER = struct.Struct("<HHIQIIHHI")
# In an image's header of 64 bytes: flags, of which one for each way of compressing, and the size before compressing.
_FLAGS_AT, _FULL_BYTES_AT = 40, 56
_COMPRESSED_FLAGS = 0x2000 | 0x8000


class Image(NamedTuple):
    """One architecture's code of one source file."""

    at: int  # offset in the library
    size_bytes: int
    architecture: int  # 90: sm_90 or sm_90a
    header_at: int


_NONE = Image(0, sys.maxsize, 0, 0)


class Section(NamedTuple):
    """Of an ELF file; `at` is from its beginning."""

    name: str
    at: int
    size_bytes: int


def sections(data: bytes | mmap.mmap, start: int = 0) -> list[Section]:
    """Of a 64-bit little-endian ELF file at `start`. Raises ValueError where there is none."""
    if data[start : start + 4] != ELF_MAGIC or data[start + 4 : start + 6] != b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, start + 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", data, start + 58)
    headers = [_SECTION_HEADER.unpack_from(data, start + table + number * entry_bytes) for number in range(count)]
    names_at = start + headers[names_index][4]
    return [Section(_text(data, names_at + header[0]), header[4], header[5]) for header in headers if header[0]]


def images(data: bytes | mmap.mmap) -> Iterator[Image]:
    """All GPU code in a library, in order; images may be compressed."""
    code = next((section for section in sections(data) if section.name == ".nv_fatbin"), None)
    if code is None:
        return
    at, end = code.at, code.at + code.size_bytes
    while at + _CONTAINER_HEADER.size <= end:
        magic, _, header_bytes, content_bytes = _CONTAINER_HEADER.unpack_from(data, at)
        if magic != CONTAINER_MAGIC:
            at += 8  # between containers
            continue
        image_at, at = at + header_bytes, at + header_bytes + content_bytes
        while image_at < at:
            _, _, image_header_bytes, size_bytes, _, _, _, _, architecture = _IMAGE_HEADER.unpack_from(data, image_at)
            yield Image(image_at + image_header_bytes, size_bytes, architecture, image_at)
            image_at += image_header_bytes + size_bytes
        at += -(at - code.at) % 8


def kernels(data: bytes | mmap.mmap, image: Image) -> list[str]:
    """Mangled names of the kernels in an image; none for a compressed one."""
    if data[image.at : image.at + 4] != ELF_MAGIC:
        return []
    prefix = ".text."
    return [
        section.name.removeprefix(prefix) for section in sections(data, image.at) if section.name.startswith(prefix)
    ]


def keep_gpu_code(library: Path, architecture: int, wanted: str | None = None) -> tuple[int, int]:
    """Replace, in place, all images but those of `architecture` that hold a kernel whose name has the pattern `wanted`;
    None: but all of that architecture, compressed ones among them.

    Returns how many are kept, and their bytes. Raises ValueError where none is.
    """
    pattern = None if wanted is None else re.compile(wanted)
    kept = kept_bytes = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for section in sections(data):
            if section.name == LINKED_ALREADY:
                data[section.at : section.at + section.size_bytes] = bytes(section.size_bytes)
        found = list(images(data))
        fillers = _smallest(data, found)
        for image in found:
            if image.architecture == architecture and (
                pattern is None or any(map(pattern.search, kernels(data, image)))
            ):
                kept += 1
                kept_bytes += image.size_bytes
                continue
            filler = fillers.get(image.architecture, b"")
            if len(filler) > image.size_bytes:
                filler = b""
            elif filler:
                _mark_uncompressed(data, image)
            data[image.at : image.at + image.size_bytes] = filler.ljust(image.size_bytes, b"\0")
    if not kept:
        raise ValueError(f"{library.name}: no GPU code for {architecture}{f' with {wanted}' if wanted else ''}")
    return kept, kept_bytes


def _smallest(data: mmap.mmap, found: list[Image]) -> dict[int, bytes]:
    """Return the smallest image that is not compressed, by architecture."""
    smallest: dict[int, Image] = {}
    for image in found:
        is_plain = data[image.at : image.at + 4] == ELF_MAGIC
        if is_plain and image.size_bytes < smallest.get(image.architecture, _NONE).size_bytes:
            smallest[image.architecture] = image
    return {architecture: data[image.at : image.at + image.size_bytes] for architecture, image in smallest.items()}


def _mark_uncompressed(data: mmap.mmap, image: Image) -> None:
    (flags,) = struct.unpack_from("<Q", data, image.header_at + _FLAGS_AT)
    struct.pack_into("<Q", data, image.header_at + _FLAGS_AT, flags & ~_COMPRESSED_FLAGS)
    struct.pack_into("<Q", data, image.header_at + _FULL_BYTES_AT, 0)


def _text(data: bytes | mmap.mmap, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode()
