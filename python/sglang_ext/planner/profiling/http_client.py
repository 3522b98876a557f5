"""JSON over one kept connection to an instance; every failure is one line for the user."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class InstanceError(RuntimeError):
    """The instance cannot be measured; the text is one line for the user."""


class HttpClient:
    """Requests to one server, one at a time. InstanceError for an address that is none."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise InstanceError(f"{url}: the port is no number from 0 to 65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InstanceError(f"{url} is not an address such as http://127.0.0.1:30000")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._given = (url, api_key, timeout_s)
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self._prefix = parts.path.rstrip("/")
        self._connection = kind(parts.hostname, port, timeout=timeout_s)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def another(self) -> HttpClient:
        """A connection of its own to the same server, for a request at the same time."""
        return HttpClient(*self._given)

    def close(self) -> None:
        self._connection.close()

    def get(self, path: str) -> object:
        """The JSON of a GET. InstanceError where it fails."""
        with self._reply("GET", path, None) as reply:
            return _json(reply.read())

    def find(self, path: str) -> object | None:
        """The JSON of a GET, None where there is nothing at this path (404). InstanceError where it fails."""
        with self._reply("GET", path, None, may_be_missing=True) as reply:
            data = reply.read()
            return None if reply.status == 404 else _json(data)

    def post(self, path: str, body: object) -> object:
        """The JSON (or text) of a POST. InstanceError where it fails."""
        with self._reply("POST", path, json.dumps(body).encode()) as reply:
            return _json(reply.read())

    def stream(self, path: str, body: object) -> Iterator[bytes]:
        """The lines of a streamed answer to a POST. InstanceError where it fails."""
        with self._reply("POST", path, json.dumps(body).encode()) as reply:
            while line := reply.readline():
                yield line
            reply.read()  # the end of the body frees the connection

    @contextmanager
    def _reply(
        self, method: str, path: str, data: bytes | None, *, may_be_missing: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        try:
            reply = self._send(method, path, data)
            if reply.status >= 400 and not (may_be_missing and reply.status == 404):
                raise InstanceError(f"{self.url}{path} answered {reply.status}: {_brief(reply.read())}")
            yield reply
        except TimeoutError:
            self.close()
            raise InstanceError(f"{self.url}{path}: no answer within {self._connection.timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InstanceError(f"{self.url} cannot be reached: {reason}") from None

    def _send(self, method: str, path: str, data: bytes | None) -> http.client.HTTPResponse:
        """A kept connection may have been closed by the server meanwhile: such a request is sent once more."""
        is_kept = self._connection.sock is not None
        try:
            self._connection.request(method, self._prefix + path, data, self._headers)
            return self._connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            if not is_kept:
                raise
            self._connection.close()
            self._connection.request(method, self._prefix + path, data, self._headers)
            return self._connection.getresponse()


def is_this_machine(host: str) -> bool:
    """Return whether a host name is a loopback address."""
    try:
        return all(str(info[4][0]).startswith(("127.", "::1")) for info in socket.getaddrinfo(host, None))
    except OSError:
        return False


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", errors="replace")


def _brief(data: bytes) -> str:
    """The message of an error body, in one line."""
    content = _json(data)
    if isinstance(content, dict):
        inner = content.get("error", content)
        content = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(content).split())[:200]
