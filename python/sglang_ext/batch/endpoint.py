"""The endpoint as a run sees it: every request gets one answer, also when it fails."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Mapping
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import orjson
from yarl import URL

from sglang_ext.batch.decide.retries import FailureKind
from sglang_ext.batch.lines import PATHS, BatchLine
from sglang_ext.tenants_file import RATE_LIMIT_CODE, TENANT_HEADER, TOO_LARGE_CODE
from sglang_ext.types import DEFAULT_TENANT, LengthClass

PRIORITY_HEADER = "x-sgl-priority"
REQUEST_TIMEOUT_S = 1800.0
CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_BYTES = 2000  # of a reply that is kept as the reason
_MAX_RETRY_AFTER_S = 300.0


class AnswerKind(Enum):
    """The meaning of an answer for its line and for the endpoint."""

    OK = "ok"
    FINAL_ERROR = "final error"  # a 4xx: the request itself is wrong
    OVERLOADED = "overloaded"  # 429 or 503: later, and less at a time
    TENANT_REFUSED = "tenant refused"  # the tenant's budget is used up, or the endpoint does not know it (yet)
    FAILED = "failed"  # any other 5xx, a timeout, a connection lost on the way, a reply that cannot be read
    UNREACHABLE = "unreachable"  # no connection: the request has not reached the endpoint


class Answer(NamedTuple):
    """The answer to one request."""

    kind: AnswerKind
    status_code: int | None  # None: no reply
    body: bytes  # of the reply; valid JSON where the kind is OK
    parsed: Any  # the body's JSON where the kind is OK, else None
    request_id: str
    error: str | None  # one line, where the kind is not OK
    retry_after_s: float | None = None  # what the endpoint asks for

    @property
    def failure_kind(self) -> FailureKind:
        """Return who may be at fault, of an answer that is retryable."""
        if self.kind is AnswerKind.UNREACHABLE:
            return FailureKind.UNREACHABLE
        if self.status_code is None or self.status_code in (429, 502, 503, 504):
            return FailureKind.UNAVAILABLE
        return FailureKind.LINE


class ReportedLoad(NamedTuple):
    """The load of one length class, as the router reports it."""

    online_wait_s: float | None  # P90 of the wait of requests that are not of low priority; None: there were none
    backlog_s: float  # seconds of prefill work queued at the least loaded instance


class EndpointLoad(NamedTuple):
    """The load of the router, as it reports it (`GET /load`)."""

    length_boundary_tokens: int | None
    classes: Mapping[LengthClass, ReportedLoad]

    def of(self, name: LengthClass | None) -> ReportedLoad:
        """Return the load of one class; for None (all prompts) the longest wait and the smallest backlog."""
        reported = list(self.classes.values()) if name is None else [self.classes[name]] if name in self.classes else []
        waits = [load.online_wait_s for load in reported if load.online_wait_s is not None]
        return ReportedLoad(max(waits, default=None), min((load.backlog_s for load in reported), default=0.0))


class LoadUnknownError(Exception):
    """The endpoint has no `/load`: it is not this router."""


class EndpointClient:
    """Sends requests to one endpoint over kept connections, with the low priority class. An async context manager.

    `url` is the endpoint's root, with or without `/v1` at its end; ValueError when it is no HTTP URL.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        priority: str = "low",
    ) -> None:
        root = URL(url.rstrip("/").removesuffix("/v1"))
        if root.scheme not in ("http", "https") or not root.host:
            raise ValueError(f"must be a URL like http://127.0.0.1:30000, got {url!r}")
        self.url = str(root)
        self._root = root
        self._targets = {path: self._target(path) for path in PATHS}
        self._headers = {"Content-Type": "application/json", PRIORITY_HEADER: priority}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    def _target(self, path: str) -> URL:
        return self._root.with_path(self._root.path.rstrip("/") + path)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=self._timeout,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, line: BatchLine, tenant: str = DEFAULT_TENANT) -> Answer:
        """Send one line and wait for the answer. Never raises for what happens to the request; can be cancelled.

        The endpoint is sent the name of any tenant but the default one.
        """
        assert self._session is not None, "the client is not open"
        named = None if tenant == DEFAULT_TENANT else {TENANT_HEADER: tenant}
        try:
            async with self._session.post(self._targets[line.path], data=line.body, headers=named) as reply:
                body = await reply.read()
                status, headers = reply.status, reply.headers
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return Answer(AnswerKind.UNREACHABLE, None, b"", None, "", _reason(error))
        except TimeoutError:
            return Answer(AnswerKind.FAILED, None, b"", None, "", f"no reply within {self._timeout.total:g} s")
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            return Answer(AnswerKind.FAILED, None, b"", None, "", f"connection lost: {_reason(error)}")
        request_id = headers.get("x-request-id", "").encode("ascii", "replace").decode()
        if 200 <= status < 300:
            try:
                parsed = orjson.loads(body)
            except orjson.JSONDecodeError as error:
                reason = f"the reply is not valid JSON: {error}"
                return Answer(AnswerKind.FAILED, status, body, None, request_id, reason)
            return Answer(AnswerKind.OK, status, body, parsed, request_id or _own_id(parsed), None)
        kind = _kind(status, body, has_tenant=named is not None)
        return Answer(kind, status, body, None, request_id, _error_text(status, body), _retry_after_s(headers))

    async def load(self) -> EndpointLoad | None:
        """Return the router's load, or None when no answer came. Raises LoadUnknownError if it reports none."""
        status, parsed = await self._get("/load")
        if status is None or status >= 500 or status == 429:
            return None
        if status != 200:
            raise LoadUnknownError(f"/load: HTTP {status}")
        try:
            return _endpoint_load(parsed)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LoadUnknownError(f"/load: {error!r}") from None

    async def is_key_accepted(self) -> bool:
        """False when the endpoint refuses the API key; True when it does not, or does not answer."""
        status, _ = await self._get("/v1/models")
        return status not in (401, 403)

    async def is_reachable(self) -> bool:
        """Return whether anything answers HTTP there."""
        status, _ = await self._get("/health")
        return status is not None

    async def _get(self, path: str) -> tuple[int | None, Any]:
        assert self._session is not None, "the client is not open"
        try:
            async with self._session.get(self._target(path), timeout=aiohttp.ClientTimeout(total=5)) as reply:
                body = await reply.read()
                return reply.status, orjson.loads(body) if reply.status == 200 and body else None
        except orjson.JSONDecodeError:
            return 200, None
        except (aiohttp.ClientError, OSError, ValueError):  # a TimeoutError is an OSError
            return None, None


def count_tokens(parsed: Any) -> tuple[int, int]:
    """Return the prompt and completion tokens that a reply's JSON names, 0 where it names none."""
    if isinstance(parsed, list):
        counts = [count_tokens(entry) for entry in parsed]
        return sum(prompt for prompt, _ in counts), sum(completion for _, completion in counts)
    if not isinstance(parsed, dict):
        return 0, 0
    usage = parsed.get("usage") or parsed.get("meta_info")
    if not isinstance(usage, dict):
        return 0, 0
    if "input_tokens" in usage:  # of responses and messages; the latter count what was cached apart
        cached = _count(usage.get("cache_read_input_tokens")) + _count(usage.get("cache_creation_input_tokens"))
        return _count(usage["input_tokens"]) + cached, _count(usage.get("output_tokens"))
    return _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))


def _count(reported: object) -> int:
    return reported if type(reported) is int and 0 <= reported < 1 << 40 else 0


def _kind(status: int, body: bytes, *, has_tenant: bool) -> AnswerKind:
    if has_tenant and status in (401, 403):
        return AnswerKind.TENANT_REFUSED
    if status == 429:
        code = _error_code(body)
        if code in (RATE_LIMIT_CODE, TOO_LARGE_CODE):
            return AnswerKind.TENANT_REFUSED if code == RATE_LIMIT_CODE else AnswerKind.FINAL_ERROR
    if status in (429, 503):
        return AnswerKind.OVERLOADED
    if status >= 500 or status in (408, 425):
        return AnswerKind.FAILED
    return AnswerKind.FINAL_ERROR


def _error_code(body: bytes) -> object:
    try:
        return orjson.loads(body)["error"]["code"]
    except (orjson.JSONDecodeError, TypeError, LookupError):
        return None


def _error_text(status: int, body: bytes) -> str:
    """The endpoint's own words where it answers as OpenAI or SGLang do, else the start of what it sent."""
    text = ""
    try:
        parsed = orjson.loads(body)
        if isinstance(parsed, dict):
            error = parsed.get("error", parsed.get("detail", parsed))
            message = error.get("message") if isinstance(error, dict) else error
            text = message if isinstance(message, str) else ""
    except orjson.JSONDecodeError:
        pass
    if not text:
        text = body[:_MAX_ERROR_BYTES].decode("utf-8", "replace").strip()
    text = " ".join(text[:_MAX_ERROR_BYTES].split())
    return f"HTTP {status}: {text}" if text else f"HTTP {status}"


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """`Retry-After` as seconds from now, bounded; None without one."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        wait_s = float(value)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(max(wait_s, 0.0), _MAX_RETRY_AFTER_S) if wait_s == wait_s else None


def _own_id(parsed: Any) -> str:
    if not isinstance(parsed, dict):
        return ""
    meta = parsed.get("meta_info")
    found = parsed.get("id") or (meta.get("id") if isinstance(meta, dict) else None)
    return found if isinstance(found, str) else ""


def _endpoint_load(parsed: Any) -> EndpointLoad:
    boundary = parsed["length_boundary_tokens"]
    classes = {}
    for length_class in LengthClass:
        reported = parsed["classes"].get(length_class.value)
        if reported is not None:
            wait = reported.get("online_wait_s")
            classes[length_class] = ReportedLoad(
                None if wait is None else float(wait), float(reported.get("backlog_s") or 0.0)
            )
    return EndpointLoad(None if boundary is None else int(boundary), classes)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
