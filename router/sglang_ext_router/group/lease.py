"""Holds, or waits for, a `coordination.k8s.io` Lease: of several routers its holder moves instances between pools."""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any

import aiohttp

from sglang_ext_router.decide.leadership import Leadership, LeaseAction, LeaseRecord, LeaseSettings
from sglang_ext_router.instances.kubernetes_api import ApiAnswerError, KubernetesApi

logger = logging.getLogger(__name__)
_CONFLICT, _NOT_FOUND = 409, 404


class LeaseHolder:
    """One router's candidacy for the lease `name`."""

    def __init__(
        self,
        name: str,
        namespace: str,
        open_api: Callable[[], KubernetesApi],
        loop: asyncio.AbstractEventLoop,
        settings: LeaseSettings | None = None,
    ) -> None:
        self._name = name
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._open_api = open_api
        self._loop = loop
        self._leadership = Leadership(f"{socket.gethostname()}_{secrets.token_hex(4)}", settings)
        self._task: asyncio.Task[None] | None = None
        self._api: KubernetesApi | None = None
        self._was_leader = False
        self._has_turned = False
        self.last_error = ""

    @property
    def is_leader(self) -> bool:
        """Return whether this router may act for all now."""
        return self._leadership.is_leader(self._loop.time())

    @property
    def is_connected(self) -> bool:
        """Return whether the API server answered when it was last asked."""
        return self._has_turned and not self.last_error

    def start(self) -> None:
        self._api = self._open_api()
        self._task = asyncio.create_task(self._run(self._api))

    async def stop(self) -> None:
        """Release the lease, so that another router has it at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._api is None:
            return
        if self.is_leader:
            try:
                await self._turn(self._api, releases=True)
            except (ApiAnswerError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                logger.warning("lease %s was not released: %s", self._name, error)
        await self._api.close()

    async def _run(self, api: KubernetesApi) -> None:
        settings = self._leadership.settings
        while True:
            try:
                async with asyncio.timeout(settings.renew_deadline_s - settings.retry_s):
                    await self._turn(api)
                self._has_turned, self.last_error = True, ""
            except (ApiAnswerError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                message = f"{type(error).__name__}: {error}"
                if message != self.last_error:
                    logger.warning("lease %s: %s", self._name, message)
                self.last_error = message
            if self.is_leader != self._was_leader:
                self._was_leader = self.is_leader
                what = "this router" if self.is_leader else "another router, or none,"
                logger.info("lease %s: %s now moves instances between pools", self._name, what)
            await asyncio.sleep(settings.retry_s)

    async def _turn(self, api: KubernetesApi, releases: bool = False) -> None:
        path = f"{self._folder}/{self._name}"
        status, found = await api.send("GET", path, accepted=(200, _NOT_FOUND))
        item = found if status == 200 else None
        lease = None if item is None else _read(item)
        action = self._leadership.on_read(lease, self._loop.time())
        if action is LeaseAction.WAIT:
            self._leadership.on_refused()
            return
        began_s = self._loop.time()
        body = self._body(item, lease, releases)
        if action is LeaseAction.CREATE:
            status, _ = await api.send("POST", self._folder, body, accepted=(201, _CONFLICT))
        else:
            status, _ = await api.send("PUT", path, body, accepted=(200, _CONFLICT))
        if status == _CONFLICT or releases:
            self._leadership.on_refused()
        else:
            self._leadership.on_written(began_s)

    def _body(self, item: dict[str, Any] | None, lease: LeaseRecord | None, releases: bool) -> dict[str, Any]:
        own = self._leadership.candidate
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new = lease is None or lease.holder != own
        spec = dict((item or {}).get("spec") or {})
        spec["holderIdentity"] = "" if releases else own
        spec["leaseDurationSeconds"] = 1 if releases else int(self._leadership.settings.duration_s)
        spec["renewTime"] = now
        if is_new:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = (lease.transitions if lease else 0) + 1
        metadata = {"name": self._name}
        if lease is not None:
            metadata["resourceVersion"] = lease.version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }


def _read(item: dict[str, Any]) -> LeaseRecord:
    """ValueError for what is no lease."""
    try:
        spec = item.get("spec") or {}
        return LeaseRecord(
            str(spec.get("holderIdentity") or ""),
            float(spec.get("leaseDurationSeconds") or 0),
            str(spec.get("renewTime") or ""),
            str(item["metadata"]["resourceVersion"]),
            int(spec.get("leaseTransitions") or 0),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer is no lease: {error!r}") from None
