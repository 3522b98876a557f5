"""The hashes of keys, and the files that hold them, which are looked at again from time to time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

RELOAD_INTERVAL_S = 1.0
_PREFIX_BYTES = 8  # of a hash, to find it; all of it is then compared in constant time


class ApiKeyFileError(ValueError):
    """A file of keys cannot be used; the message is one line and names the file and the line."""


def read_key_file(path: str) -> str:
    """Return the text of a file of keys. Raise ApiKeyFileError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ApiKeyFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ApiKeyFileError(f"{path} is not text in UTF-8") from None


class WatchedFile:
    """A file that is looked at from time to time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._state = self._file_state()
        self._checked_s = 0.0

    def has_changed(self, now_s: float) -> bool:
        """Return whether it is another file than before; it is looked at once in `RELOAD_INTERVAL_S`."""
        if now_s - self._checked_s < RELOAD_INTERVAL_S:
            return False
        self._checked_s = now_s
        state, before = self._file_state(), self._state
        self._state = state
        return state != before

    def _file_state(self) -> tuple[int, int, int] | None:
        try:
            state = os.stat(self._path)
        except OSError:
            return None
        return state.st_mtime_ns, state.st_size, state.st_ino


class KeyHashes:
    """Whose each key is, by the SHA-256 of the keys."""

    def __init__(self, owners: Mapping[bytes, str]) -> None:
        self._by_prefix = {digest[:_PREFIX_BYTES]: (digest, owner) for digest, owner in owners.items()}

    def __len__(self) -> int:
        return len(self._by_prefix)

    def find(self, key: bytes) -> str | None:
        """Return whose key this is; None where it is not there."""
        digest = hashlib.sha256(key).digest()
        known = self._by_prefix.get(digest[:_PREFIX_BYTES])
        return known[1] if known is not None and hmac.compare_digest(known[0], digest) else None
