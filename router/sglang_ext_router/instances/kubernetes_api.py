"""The part of Kubernetes' API that the router needs: to list and watch objects of one kind, to read and write one."""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from sglang_ext_router.config import RouterConfig, RouterConfigError

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE_ITEMS = 500
WATCH_S = 240.0  # then the API server ends a watch, and the next one goes on where it was
ANSWER_TIMEOUT_S = 30.0
MAX_LINE_BYTES = 16 << 20  # an event holds a whole slice, of up to 1,000 endpoints


class ApiAnswerError(Exception):
    """The API server answers with an error."""


class VersionExpiredError(ApiAnswerError):
    """The API server does not know any more what came after the version that was seen last."""

    def __init__(self) -> None:
        super().__init__("410: what came after the version seen last is not known any more")


class KubernetesApi:
    """The API server. The token is read again for every request, as it is rotated."""

    def __init__(self, url: str, token_file: Path | None, tls: ssl.SSLContext | None) -> None:
        self._url = url
        self._token_file = token_file
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls if tls is not None else True),
            read_bufsize=MAX_LINE_BYTES // 2,
        )

    async def close(self) -> None:
        await self._session.close()

    async def list(self, path: str, label_selector: str) -> tuple[list[dict[str, Any]], str]:
        """All objects, and the version from which to watch."""
        items: list[dict[str, Any]] = []
        query = {"labelSelector": label_selector, "limit": str(PAGE_ITEMS)}
        while True:
            timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
            async with self._session.get(
                self._url + path, params=query, headers=self._headers(), timeout=timeout
            ) as reply:
                await _check(reply)
                page = orjson.loads(await reply.read())
            items += page.get("items") or ()
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion") or "")
            query["continue"] = metadata["continue"]

    async def watch(
        self, path: str, label_selector: str, version: str, on_open: Callable[[], None] = lambda: None
    ) -> AsyncIterator[dict[str, Any]]:
        """The events after `version` until the API server ends the watch; after a VersionExpiredError list again.

        `on_open` is called once the API server has accepted the watch.
        """
        query = {
            "labelSelector": label_selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(WATCH_S * random.uniform(0.8, 1.2))),  # not all routers at once
        }
        timeout = aiohttp.ClientTimeout(total=WATCH_S * 1.2 + ANSWER_TIMEOUT_S, sock_connect=ANSWER_TIMEOUT_S)
        async with self._session.get(self._url + path, params=query, headers=self._headers(), timeout=timeout) as reply:
            await _check(reply)
            on_open()
            async for line in reply.content:
                event = orjson.loads(line)
                if not isinstance(event, dict):
                    raise ValueError(f"no event of a watch: {line[:100]!r}")
                if event.get("type") == "ERROR":
                    status = event.get("object") or {}
                    if status.get("code") == 410:
                        raise VersionExpiredError
                    raise ApiAnswerError(f"a watch ended with {status.get('code')}: {status.get('message')}")
                yield event

    async def send(
        self, method: str, path: str, body: dict[str, Any] | None = None, accepted: Sequence[int] = (200,)
    ) -> tuple[int, dict[str, Any]]:
        """Send a request for one object; return status and answer. Raises ApiAnswerError unless it is `accepted`."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        data = None if body is None else orjson.dumps(body)
        headers = self._headers() | ({} if body is None else {"Content-Type": "application/json"})
        async with self._session.request(
            method, self._url + path, data=data, headers=headers, timeout=timeout
        ) as reply:
            if reply.status not in accepted:
                await _check(reply)
            answer = orjson.loads(await reply.read())
            return reply.status, answer if isinstance(answer, dict) else {}

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        return {"Authorization": f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"}


async def _check(reply: aiohttp.ClientResponse) -> None:
    if reply.status == 410:
        raise VersionExpiredError
    if reply.status == 200:
        return
    body = (await reply.read())[:1000]
    try:
        message = orjson.loads(body).get("message")
    except (orjson.JSONDecodeError, AttributeError):
        message = body.decode(errors="replace").strip()
    hint = ""
    if reply.status == 403:
        hint = "; see docs/how-to/kubernetes.md for what the service account needs"
    raise ApiAnswerError(f"{reply.status}: {message}{hint}")


def connect_kubernetes(config: RouterConfig) -> Callable[[], KubernetesApi]:
    """Return a function that connects to the API server: by options, or as a pod does. Raises RouterConfigError."""
    url = config.kubernetes_url
    if not url:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise RouterConfigError("--service-discovery outside a cluster needs discovery.kubernetes_url")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    token_file = Path(config.kubernetes_token_file or ACCOUNT_FOLDER / "token")
    has_token = token_file.exists()
    if config.kubernetes_token_file and not has_token:
        raise RouterConfigError(f"discovery.kubernetes_token_file: {token_file}: there is no such file")
    ca_file = config.kubernetes_ca_file or (
        str(ACCOUNT_FOLDER / "ca.crt") if (ACCOUNT_FOLDER / "ca.crt").exists() else ""
    )
    tls: ssl.SSLContext | None = None
    if url.startswith("https://"):
        try:
            tls = ssl.create_default_context(cafile=ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise RouterConfigError(f"discovery.kubernetes_ca_file: {ca_file}: {error}") from None
    return lambda: KubernetesApi(url.rstrip("/"), token_file if has_token else None, tls)


def own_namespace() -> str:
    """Return the namespace of the pod that this runs in; `default` outside a cluster."""
    try:
        return (ACCOUNT_FOLDER / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return "default"
