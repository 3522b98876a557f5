"""Decide by a request's head who may ask for what: API keys, origins, and the size of bodies by path."""

from __future__ import annotations

import hmac
import re

from sglang_ext.shared_key import bearer_key
from sglang_ext.tenants_file import TENANT_HEADER
from sglang_ext.types import DEFAULT_TENANT
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.http.api_keys import ApiKeys
from sglang_ext_router.http.instance_paths import OTHER_NAMES, PASSED_ON_PATHS, UNDIVIDED_PATHS
from sglang_ext_router.http.request_parser import Request, RequestRefusal
from sglang_ext_router.observe.metrics import RouterMetrics
from sglang_ext_router.tenants.accounts import Tenants

GENERATION_PATHS = frozenset(
    {b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/generate", b"/v1/messages"}
)
ALIVE_PATHS = ("/", "/health", "/healthz", "/liveness", "/ping")
READY_PATHS = ("/ready", "/readyz", "/readiness", "/health_generate")
PROBE_PATHS = frozenset(path.encode() for path in (*ALIVE_PATHS, *READY_PATHS))  # need no key
PAGE_PATH = b"/ui"  # the bare page: the data it shows comes from STREAM_PATH
STREAM_PATH = b"/ui/stream"
_TENANT_HEADER = TENANT_HEADER.encode()
_OPEN_PATHS = PROBE_PATHS | {PAGE_PATH}
PAGE_PATHS = frozenset({PAGE_PATH, STREAM_PATH})  # may have a port of their own
REPORT_PATHS = frozenset({b"/metrics", b"/docs", b"/openapi.json"})  # may have a port of their own
FLOW_PATHS = GENERATION_PATHS | UNDIVIDED_PATHS  # whose requests go through admission and routing
_PROMPT_PATHS = FLOW_PATHS | PASSED_ON_PATHS | frozenset(OTHER_NAMES)
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]*")
_EXPOSED = b"x-request-id, retry-after, x-sglang-ext-class, x-sglang-ext-prefill, x-sglang-ext-decode, " + (
    b"x-sglang-ext-queue-ms, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


NO_BODY = RequestRefusal(413, "this path takes no body")


def authorization_of(request: Request) -> bytes:
    """Return the request's Authorization header, or what stands for it: Anthropic's clients have one of their own."""
    own = request.header(b"x-api-key")
    return request.header(b"authorization") or (b"" if own is None else b"Bearer " + own)


class Access:
    """The gate of the port for clients; the control plane checks keys with it, too."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics, tenants: Tenants | None = None) -> None:
        """Read the keys. Raise ApiKeyFileError for a file of keys that cannot be used."""
        self._metrics = metrics
        self._tenants = tenants
        self._max_payload_bytes = config.max_payload_size
        self._max_control_bytes = min(config.max_payload_size, config.max_control_payload_size)
        self._client_key = config.api_key.encode()
        self._admin_key = config.admin_api_key.encode()
        self._named_keys = ApiKeys(config.api_keys_file) if config.api_keys_file else None
        self._needs_key = config.needs_client_key
        self._origins = frozenset(origin.encode() for origin in config.cors_origins)

    def check_head(self, request: Request) -> RequestRefusal | None:
        """Refuse a request that lacks a key it needs, and set its `max_body_bytes`."""
        path = request.path
        takes_prompts = path.rstrip(b"/") in _PROMPT_PATHS  # a slash too many is redirected
        request.max_body_bytes = self._max_payload_bytes if takes_prompts else self._max_control_bytes
        if self._origins:
            request.reply_headers = self._cors_headers(request.header(b"origin"))
        if not self._needs_key or path in _OPEN_PATHS:
            return None
        authorization = authorization_of(request)
        if self._tenants is not None:
            request.tenant = self.tenant_of(authorization)
            named = request.header(_TENANT_HEADER)
            if named is not None and (request.tenant != DEFAULT_TENANT or self.is_client(authorization)):
                return self._send_for(request, named)
            if request.tenant != DEFAULT_TENANT:
                return None
        if self.is_client(authorization):
            return None
        if self.is_preflight(request):
            return None
        self._metrics.count(self._metrics.refused, "unauthorized")
        extra = b"www-authenticate: Bearer\r\n" + request.reply_headers
        return RequestRefusal(401, "missing or wrong API key", extra)

    def _send_for(self, request: Request, named: bytes) -> RequestRefusal | None:
        """Count a request for the tenant that it names, if its own may send for others."""
        assert self._tenants is not None
        tenant = self._tenants.sender_for(request.tenant, named.decode("latin-1"))
        if tenant is None:
            self._metrics.count(self._metrics.refused, "unauthorized")
            return RequestRefusal(403, f"the tenant {request.tenant} may not send for this one", request.reply_headers)
        request.tenant = tenant
        return None

    def refuse_body(self, request: Request) -> RequestRefusal:
        """Return 413: no path here has a limit of 0."""
        return NO_BODY

    # -- keys -------------------------------------------------------------------------------------------

    def is_client(self, authorization: bytes) -> bool:
        """Return whether an Authorization header holds a client's or the administrator's key, or no key is needed."""
        if not self._needs_key:
            return True
        key = bearer_key(authorization)
        is_client = bool(self._client_key) and hmac.compare_digest(key, self._client_key)
        if not is_client and self._named_keys is not None and key:
            is_client = self._named_keys.knows(key)
        if not is_client and self._tenants is not None and key:
            is_client = self._tenants.find(key) is not None
        return is_client or self.is_admin(authorization)

    def tenant_of(self, authorization: bytes) -> str:
        """Return the tenant whose key an Authorization header holds; the default one where it is no tenant's."""
        found = None if self._tenants is None else self._tenants.find(bearer_key(authorization))
        return found or DEFAULT_TENANT

    def is_admin(self, authorization: bytes) -> bool:
        """Return whether an Authorization header holds the administrator's key."""
        return bool(self._admin_key) and hmac.compare_digest(bearer_key(authorization), self._admin_key)

    def may_view(self, authorization: bytes) -> bool:
        """Return whether an Authorization header opens the live stream: the administrator's if there is one."""
        return self.is_admin(authorization) if self._admin_key else self.is_client(authorization)

    def reload_keys(self, now_s: float) -> None:
        """Read the files of keys again if they have changed."""
        if self._named_keys is not None:
            self._named_keys.reload(now_s)
        if self._tenants is not None:
            self._tenants.reload(now_s)

    # -- origins ----------------------------------------------------------------------------------------

    def is_preflight(self, request: Request) -> bool:
        """Return whether a browser asks, without a key, if it may send a request from another origin."""
        return bool(
            self._origins
            and request.method == b"OPTIONS"
            and request.header(b"origin") is not None
            and request.header(b"access-control-request-method") is not None
        )

    def preflight_headers(self, request: Request) -> bytes:
        """Return header lines for the answer to a preflight, in addition to the request's `reply_headers`."""
        asked = request.header(b"access-control-request-headers") or b""
        if not _HEADER_NAMES.fullmatch(asked):
            asked = b"authorization, content-type"
        return (
            b"access-control-allow-methods: GET, POST, DELETE\r\naccess-control-max-age: 600\r\n"
            b"access-control-allow-headers: %b\r\n" % asked
        )

    def _cors_headers(self, origin: bytes | None) -> bytes:
        if b"*" in self._origins:
            return b"access-control-allow-origin: *\r\naccess-control-expose-headers: %b\r\n" % _EXPOSED
        if origin is None or origin not in self._origins:
            return b"vary: origin\r\n"
        return b"access-control-allow-origin: %b\r\nvary: origin\r\naccess-control-expose-headers: %b\r\n" % (
            origin,
            _EXPOSED,
        )


class PathGate:
    """The gate of a port that serves only some paths, and no bodies. Where keys are needed the paths check them."""

    def __init__(self, paths: frozenset[bytes], subject: str) -> None:
        self._paths = paths | PROBE_PATHS
        self._refusal = RequestRefusal(404, f"only {subject} served at this port")

    def check_head(self, request: Request) -> RequestRefusal | None:
        """Refuse every other path."""
        return None if request.path in self._paths else self._refusal

    def refuse_body(self, request: Request) -> RequestRefusal:
        """Return 413: the paths can only be read."""
        return NO_BODY
