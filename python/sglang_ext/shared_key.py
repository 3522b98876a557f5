"""Proof that both ends of a connection know the same key, without sending it.

Each end sends a number used once, and a code over both numbers by which only who knows the key can answer. Nothing is
encrypted, and what is sent afterwards carries no codes: others must not be able to write into the network.
Without a key (an empty one) the same is sent and proves nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

NONCE_BYTES = 16
CODE_BYTES = hashlib.sha256().digest_size
_LEAST_KEY_BYTES = 16


class KeyFileError(ValueError):
    """A file has no key; the text is one line for the user."""


def read_key_file(path: Path | None) -> bytes:
    """The key in a file, without white space around it; an empty one where there is no file. Raises KeyFileError."""
    if path is None:
        return b""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    if len(key) < _LEAST_KEY_BYTES:
        raise KeyFileError(f"{path}: a key has at least {_LEAST_KEY_BYTES} bytes, this one has {len(key)}")
    return key


def make_nonce() -> bytes:
    """A number used once, of `NONCE_BYTES`."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, side: str, *parts: bytes) -> bytes:
    """The code of `CODE_BYTES` by which one `side` of a connection proves that it knows the key.

    `parts`: what the code holds for, the numbers of both ends among them.
    """
    digest = hmac.new(key or b"\0", digestmod=hashlib.sha256)
    for part in (side.encode(), *parts):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def is_proof(code: bytes, key: bytes, side: str, *parts: bytes) -> bool:
    """Return whether `code` is what `prove` returns."""
    return hmac.compare_digest(code, prove(key, side, *parts))


def bearer_key(authorization: bytes) -> bytes:
    """Return the key in an HTTP Authorization header, whose scheme has no case; empty where it holds none."""
    scheme, _, key = authorization.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
