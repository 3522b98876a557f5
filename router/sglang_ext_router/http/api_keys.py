"""Keys of several clients: hashes in a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
HASH_PREFIX_BYTES = 8  # of a hash, to find it; all of it is then compared in constant time
_NAME = re.compile(r"[A-Za-z0-9._@-]+")
_HASH = re.compile(r"[0-9a-fA-F]{64}")


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


def read_api_keys(path: str) -> dict[str, bytes]:
    """Return the names and SHA-256 hashes of the keys in a file of lines `NAME:SHA256-HEX`.

    Blank lines and what follows `#` are skipped. Raise ApiKeyFileError for any other line, for a name or a hash that
    occurs twice, and for a file without keys.
    """
    keys: dict[str, bytes] = {}
    for number, line in enumerate(read_key_file(path).splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        name, _, digits = (part.strip() for part in entry.partition(":"))
        if not _NAME.fullmatch(name) or not _HASH.fullmatch(digits):
            raise ApiKeyFileError(f"{path}, line {number} is not of the form NAME:SHA256-HEX")
        if name in keys:
            raise ApiKeyFileError(f"{path}, line {number}: the name {name} is already used")
        if bytes.fromhex(digits) in keys.values():
            raise ApiKeyFileError(f"{path}, line {number}: {name} has the key of another name")
        keys[name] = bytes.fromhex(digits)
    if not keys:
        raise ApiKeyFileError(f"{path} holds no key")
    return keys


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


class ApiKeys:
    """The keys of one file. Its contents are never logged."""

    def __init__(self, path: str) -> None:
        """Read the file. Raise ApiKeyFileError if it cannot be used."""
        self._path = path
        self._watched = WatchedFile(path)
        self._hashes = _by_prefix(read_api_keys(path))

    def knows(self, key: bytes) -> bool:
        """Return whether the file holds this key."""
        digest = hashlib.sha256(key).digest()
        known = self._hashes.get(digest[:HASH_PREFIX_BYTES])
        return known is not None and hmac.compare_digest(known, digest)

    def reload(self, now_s: float) -> None:
        """Read the file again if it has changed; where it cannot be used the reason is logged and the keys stay."""
        if not self._watched.has_changed(now_s):
            return
        try:
            keys = read_api_keys(self._path)
        except ApiKeyFileError as error:
            logger.warning("the client keys stay what they were: %s", error)
            return
        self._hashes = _by_prefix(keys)
        logger.info("%d client keys read from %s", len(keys), self._path)


def _by_prefix(keys: dict[str, bytes]) -> dict[bytes, bytes]:
    return {digest[:HASH_PREFIX_BYTES]: digest for digest in keys.values()}
