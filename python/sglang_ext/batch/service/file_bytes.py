"""The bytes of the service's files, under their ids: in a folder, or on S3-compatible storage.

Either way they are written to a temporary file, and are under their id when they are whole. What a killed service left
unfinished is removed when it starts again.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from sglang_ext.batch.object_storage import ObjectPath

_PARTIAL = ".partial"
_OBJECT_NAME = re.compile("file-[0-9a-f]{32}")  # a bucket may hold what is not the service's


def _never() -> bool:
    return False


class FileBytes(ABC):
    """Bytes by file id. All methods block; those of an object storage wait for the network."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[IO[bytes]]:
        """Yield a new temporary file to write to; `place` keeps it, else it is removed at the block's end."""

    @abstractmethod
    def place(self, file: IO[bytes], file_id: str, is_stopped: Callable[[], bool] = _never) -> None:
        """Keep what was written under a new id, durably. InterruptedError as soon as `is_stopped()`."""

    @abstractmethod
    def open(self, file_id: str) -> IO[bytes]:
        """Open a file to read; FileNotFoundError where it was deleted."""

    @abstractmethod
    def remove(self, file_id: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def remove_unknown(self, known: Callable[[], Set[str]], before_s: float | None) -> None:
        """Remove what has no id of `known()`, asked for after looking. `before_s`: only what is older (Unix time)."""

    @abstractmethod
    def tidy(self) -> None:
        """Remove what could not be removed when it should have been."""


class FolderBytes(FileBytes):
    """Bytes in a folder, which is made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, file_id: str) -> Path:
        """Return where a file is."""
        return self._folder / file_id

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        path = self._folder / (secrets.token_hex(16) + _PARTIAL)
        try:
            with path.open("xb") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def place(self, file: IO[bytes], file_id: str, is_stopped: Callable[[], bool] = _never) -> None:
        file.flush()
        os.fsync(file.fileno())
        os.rename(file.name, self._folder / file_id)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def open(self, file_id: str) -> IO[bytes]:
        return self.path(file_id).open("rb")

    def remove(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def remove_unknown(self, known: Callable[[], Set[str]], before_s: float | None) -> None:
        paths = list(self._folder.iterdir())
        ids = known()
        for path in paths:
            if path.name not in ids:
                with suppress(FileNotFoundError):
                    if before_s is None or path.stat().st_mtime < before_s:
                        path.unlink()

    def tidy(self) -> None:
        pass


class ObjectBytes(FileBytes):
    """Bytes as objects below a folder of a bucket. StorageError where it cannot be written to."""

    def __init__(self, folder: ObjectPath) -> None:
        self._folder = ObjectPath(folder.bucket, folder.folder_key)
        self._mutex = threading.Lock()
        self._left: set[str] = set()  # ids of files that are of no use, and may be there
        (self._folder / "check").check_writable()

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as local:
            yield cast("IO[bytes]", local)

    def place(self, file: IO[bytes], file_id: str, is_stopped: Callable[[], bool] = _never) -> None:
        try:
            (self._folder / file_id).upload(file, is_stopped)
        except BaseException:
            with self._mutex:
                self._left.add(file_id)
            raise

    def open(self, file_id: str) -> IO[bytes]:
        return (self._folder / file_id).open()

    def remove(self, file_id: str) -> None:
        with self._mutex:
            self._left.add(file_id)
        (self._folder / file_id).unlink()
        with self._mutex:
            self._left.discard(file_id)

    def remove_unknown(self, known: Callable[[], Set[str]], before_s: float | None) -> None:
        found = list(self._folder.listed())
        ids = known()
        for path, written_s in found:
            is_ours = self._is_ours(path.key)
            if is_ours and path.name not in ids and (before_s is None or written_s < before_s):
                path.unlink()
        self._folder.abort_uploads(before_s, self._is_ours)

    def _is_ours(self, key: str) -> bool:
        return _OBJECT_NAME.fullmatch(key.removeprefix(self._folder.key)) is not None

    def tidy(self) -> None:
        with self._mutex:
            left = sorted(self._left)
        for file_id in left:
            (self._folder / file_id).abort_uploads()
            self.remove(file_id)


def open_bytes(place: Path | ObjectPath) -> FileBytes:
    """Return the bytes at a place. OSError and StorageError where it cannot be written to."""
    return ObjectBytes(place) if isinstance(place, ObjectPath) else FolderBytes(place)
