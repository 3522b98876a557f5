"""Who may ask for what, decided by a request's head alone: API keys, and how large a body each path takes."""

from __future__ import annotations

import hmac

from sglang_ext_router.client_requests import Request, RequestRefusal
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.metrics import RouterMetrics

GENERATION_PATHS = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/generate"})
TOKENISE_PATHS = frozenset({b"/v1/tokenize", b"/tokenize", b"/v1/detokenize", b"/detokenize"})
OPEN_PATHS = frozenset({b"/health", b"/healthz", b"/liveness", b"/readyz", b"/readiness"})  # for probes, without a key
_PROMPT_PATHS = GENERATION_PATHS | TOKENISE_PATHS
_WITHOUT_BODY = frozenset({b"GET", b"HEAD", b"DELETE", b"OPTIONS"})
_UNAUTHORISED = RequestRefusal(401, "missing or wrong API key", b"www-authenticate: Bearer\r\n")


class Access:
    """The router's gate, and what the control plane asks about keys."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._max_payload_bytes = config.max_payload_size
        self._max_control_bytes = min(config.max_payload_size, config.max_control_payload_size)
        self._client_key = f"Bearer {config.api_key}".encode() if config.api_key else b""
        self._admin_key = f"Bearer {config.admin_api_key}".encode() if config.admin_api_key else b""

    def check_head(self, request: Request) -> RequestRefusal | None:
        """Ask for a key where one is needed, and say how large the body may be."""
        path = request.path
        if request.method in _WITHOUT_BODY:
            request.max_body_bytes = 0
        else:
            request.max_body_bytes = self._max_payload_bytes if path in _PROMPT_PATHS else self._max_control_bytes
        if not self._client_key or path in OPEN_PATHS or self.is_client(request.header(b"authorization") or b""):
            return None
        self._metrics.count(self._metrics.refused, "unauthorized")
        return _UNAUTHORISED

    def is_client(self, authorization: bytes) -> bool:
        """Whether the value of this Authorization header is a client's or the administrator's; any is without keys."""
        if not self._client_key:
            return True
        is_client = hmac.compare_digest(authorization, self._client_key)
        return self.is_admin(authorization) or is_client

    def is_admin(self, authorization: bytes) -> bool:
        """Whether the value of this Authorization header is the administrator's."""
        return bool(self._admin_key) and hmac.compare_digest(authorization, self._admin_key)
