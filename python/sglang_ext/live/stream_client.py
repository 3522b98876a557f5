"""Reading a router's live stream from a command: the address, the key, messages as they come, a signal that ends it."""

from __future__ import annotations

import http.client
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from urllib.parse import urlsplit

from sglang_ext.live.recording import MAX_LINE_BYTES

TIMEOUT_S = 15.0  # without a message, of which four come a second
KEY_VARIABLES = ("SGLANG_EXT_ADMIN_API_KEY", "SGLANG_EXT_API_KEY")
KEY_HELP = f"key for the stream, where the router asks for one; also read from {' or '.join(KEY_VARIABLES)}"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """Ctrl-C or SIGTERM."""


class AddressError(ValueError):
    """The address is not a router's; the text is one line."""


class LiveStreamError(RuntimeError):
    """The stream cannot be had, or has ended; the text is one line. `is_final`: trying again is of no use."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def router_address(text: str) -> str:
    """`http://HOST:PORT` of what a user wrote, with or without the scheme or the page's path. AddressError."""
    address = text if "://" in text else f"http://{text}"
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise AddressError(f"{text!r} is not of the form http://HOST:PORT")
    return address.rstrip("/").removesuffix("/ui")


def given_key(option: str) -> str:
    """The key that the option gives, else the environment; empty for none."""
    return option or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the address that the user gave, and for no other that this one names."""

    def redirect_request(self, *_: object) -> None:
        return None


def stream_messages(address: str, key: str) -> Iterator[bytes]:
    """The messages of the stream, each with its line's end; LiveStreamError when no more comes."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        reply = urllib.request.build_opener(_NoRedirect).open(
            urllib.request.Request(f"{address}/ui/stream", headers=headers), timeout=TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        error.close()
        why = {401: "a key is needed, or this one is wrong (--api-key)", 404: "it has no live page"}.get(error.code, "")
        raise LiveStreamError(f"{address} answers {error.code}{why and ': '}{why}", bool(why)) from None
    except (OSError, http.client.HTTPException) as error:
        raise LiveStreamError(f"{address} does not answer ({getattr(error, 'reason', error)})") from None
    with reply:
        while True:
            try:
                line = reply.readline(MAX_LINE_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise LiveStreamError(f"the connection was lost ({str(error) or type(error).__name__})") from None
            if not line.endswith(b"\n"):
                raise LiveStreamError("the router has ended the stream")
            if line.startswith(b"data: "):
                yield line[6:]


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise StoppedError within the block."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise StoppedError

    previous = [signal.signal(number, stop) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, previous, strict=True):
            signal.signal(number, handler)
