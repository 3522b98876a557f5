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
CHALLENGE_BYTES = NONCE_BYTES + CODE_BYTES
_LEAST_KEY_BYTES = 16


class KeyFileError(ValueError):
    """A file has no key; the text is one line for the user."""


class WrongKeyError(ValueError):
    """The other end of a connection does not know the key."""


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


def prove(key: bytes, side: str, *parts: bytes) -> bytes:
    """Return the code of `CODE_BYTES` by which one `side` proves that it knows the key; it holds for `parts`."""
    digest = hmac.new(key or b"\0", digestmod=hashlib.sha256)
    for part in (side.encode(), *parts):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def is_proof(code: bytes, key: bytes, side: str, *parts: bytes) -> bool:
    """Return whether `code` is what `prove` returns."""
    return hmac.compare_digest(code, prove(key, side, *parts))


class Caller:
    """The end of a connection that opens it: sends `opening`, then the `answer` to the other end's challenge.

    `protocol` names what the connection is for, and `words` is what this end says besides; the codes hold for both.
    """

    def __init__(self, key: bytes, protocol: str, words: bytes = b"") -> None:
        self.opening = secrets.token_bytes(NONCE_BYTES)
        self._key = key
        self._said = (protocol.encode(), self.opening, words)

    def answer(self, challenge: bytes, words: bytes = b"") -> bytes:
        """Return this end's proof, of `CODE_BYTES`; `words` is what the other end says besides its challenge.

        Raises WrongKeyError.
        """
        said = (*self._said, challenge[:NONCE_BYTES], words)
        if not is_proof(challenge[NONCE_BYTES:], self._key, "callee", *said):
            raise WrongKeyError
        self.session_key = prove(self._key, "session", *said)
        return prove(self._key, "caller", *said)


class Callee:
    """The end of a connection that was opened with `opening`: sends `challenge`, of `CHALLENGE_BYTES`, and checks the
    answer; see `Caller`."""

    def __init__(
        self, key: bytes, protocol: str, opening: bytes, callers_words: bytes = b"", words: bytes = b""
    ) -> None:
        self._key = key
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._said = (protocol.encode(), opening, callers_words, nonce, words)
        self.challenge = nonce + prove(key, "callee", *self._said)
        self.session_key = prove(key, "session", *self._said)

    def check(self, answer: bytes) -> None:
        """Raise WrongKeyError unless the caller knows the key."""
        if not is_proof(answer, self._key, "caller", *self._said):
            raise WrongKeyError


def bearer_key(authorization: bytes) -> bytes:
    """Return the key in an HTTP Authorization header, whose scheme has no case; empty where it holds none."""
    scheme, _, key = authorization.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
