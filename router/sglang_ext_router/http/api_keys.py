"""Keys of several clients: hashes in a file that is read again when it changes."""

from __future__ import annotations

import logging
import re

from sglang_ext.key_hashes import ApiKeyFileError, KeyHashes, WatchedFile, read_key_file

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._@-]+")
_HASH = re.compile(r"[0-9a-fA-F]{64}")


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


class ApiKeys:
    """The keys of one file. Its contents are never logged."""

    def __init__(self, path: str) -> None:
        """Read the file. Raise ApiKeyFileError if it cannot be used."""
        self._path = path
        self._watched = WatchedFile(path)
        self._hashes = _hashes(read_api_keys(path))

    def knows(self, key: bytes) -> bool:
        """Return whether the file holds this key."""
        return self._hashes.find(key) is not None

    def reload(self, now_s: float) -> None:
        """Read the file again if it has changed; where it cannot be used the reason is logged and the keys stay."""
        if not self._watched.has_changed(now_s):
            return
        try:
            keys = read_api_keys(self._path)
        except ApiKeyFileError as error:
            logger.warning("the client keys stay what they were: %s", error)
            return
        self._hashes = _hashes(keys)
        logger.info("%d client keys read from %s", len(keys), self._path)


def _hashes(keys: dict[str, bytes]) -> KeyHashes:
    return KeyHashes({digest: name for name, digest in keys.items()})
