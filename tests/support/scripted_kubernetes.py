"""An API server for tests of discovery, with its nasty sides: expired versions, lost events, outages, refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint(address: str, *, ready: bool | None = True, terminating: bool = False, uid: str = "") -> dict[str, Any]:
    """One of a slice's."""
    conditions: dict[str, Any] = {"serving": bool(ready) or terminating, "terminating": terminating}
    if ready is not None:
        conditions["ready"] = ready and not terminating
    return {
        "addresses": [address],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": "p", "uid": uid or f"uid-{address}"},
    }


def endpoint_slice(
    name: str,
    role: str,
    *endpoints: dict[str, Any],
    port: int = 30000,
    bootstrap: int | None = None,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """As a controller writes it for a Service whose label tells the role."""
    ports = [{"name": "http", "port": port, "protocol": "TCP"}]
    if bootstrap is not None:
        ports.append({"name": "bootstrap", "port": bootstrap, "protocol": "TCP"})
    own = {"kubernetes.io/service-name": name, "sglang-ext.io/role": role} if role else {}
    return {
        "metadata": {"name": name, "namespace": "default", "labels": {**own, **(labels or {})}},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": ports,
    }


def _matches(item: dict[str, Any], selector: str) -> bool:
    labels = item["metadata"]["labels"]
    for part in selector.split(","):
        key, equals, value = part.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


class ScriptedKubernetes:
    """Objects with versions, and the events of their changes."""

    def __init__(self) -> None:
        self.version = 1
        self.items: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.forgotten = 0  # events up to this version are not known any more
        self.token = ""
        self.page_items: int | None = None
        self.refusal: tuple[int, str] | None = None
        self.lists = 0
        self.watches = 0
        self.open_watches = 0
        self.expires_by_event = False  # 410 as an event, as servers with a watch cache do
        self.port = 0
        self.leases: dict[str, dict[str, Any]] = {}
        self._changed = asyncio.Condition()
        self._cut = 0
        self._runner: web.AppRunner | None = None

    # -- what happens in the cluster --------------------------------------------------------------------------

    async def put(self, item: dict[str, Any], is_told: bool = True) -> None:
        """Write a slice; `is_told`: with the event of it."""
        name = item["metadata"]["name"]
        kind = "MODIFIED" if name in self.items else "ADDED"
        self.version += 1
        item = json.loads(json.dumps(item))
        item["metadata"]["resourceVersion"] = str(self.version)
        self.items[name] = item
        await self._tell(kind, item, is_told)

    async def delete(self, name: str, is_told: bool = True) -> None:
        self.version += 1
        item = self.items.pop(name)
        item["metadata"]["resourceVersion"] = str(self.version)
        await self._tell("DELETED", item, is_told)

    async def bookmark(self) -> None:
        """Tell all watches the version, and nothing else."""
        self.version += 1
        await self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}, True)

    async def forget(self) -> None:
        """Compact: what happened until now can only be listed."""
        self.version += 1
        self.forgotten = self.version

    async def end_watches(self, with_event: dict[str, Any] | None = None) -> None:
        self._ending = with_event
        async with self._changed:
            self._cut += 1
            self._changed.notify_all()

    async def _tell(self, kind: str, item: dict[str, Any], is_told: bool) -> None:
        if is_told:
            async with self._changed:
                self.events.append((self.version, kind, item))
                self._changed.notify_all()

    # -- the server -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(PATH, self._serve)
        app.router.add_get(LEASES + "/{name}", self._read_lease)
        app.router.add_post(LEASES, self._create_lease)
        app.router.add_put(LEASES + "/{name}", self._write_lease)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        if self.refusal is not None:
            status, message = self.refusal
            return web.json_response({"kind": "Status", "code": status, "message": message}, status=status)
        if request.query.get("watch"):
            return await self._watch(request)
        self.lists += 1
        found = [item for item in self.items.values() if _matches(item, request.query["labelSelector"])]
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if self.page_items is not None:
            start = int(request.query.get("continue") or 0)
            if start + self.page_items < len(found):
                metadata["continue"] = str(start + self.page_items)
            found = found[start : start + self.page_items]
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": found})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        version, selector = int(request.query["resourceVersion"]), request.query["labelSelector"]
        gone = {"kind": "Status", "code": 410, "message": "too old resource version", "reason": "Expired"}
        if version < self.forgotten and not self.expires_by_event:
            return web.json_response(gone, status=410)
        reply = web.StreamResponse(headers={"content-type": "application/json"})
        await reply.prepare(request)
        if version < self.forgotten:
            await reply.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return reply
        cut, sent = self._cut, 0
        self.open_watches += 1
        try:
            while self._cut == cut:
                for number, kind, item in self.events[sent:]:
                    sent += 1
                    if number > version and (kind == "BOOKMARK" or _matches(item, selector)):
                        await reply.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
                async with self._changed:
                    if self._cut == cut and sent == len(self.events):
                        await self._changed.wait()
            if self._ending is not None:
                await reply.write(json.dumps({"type": "ERROR", "object": self._ending}).encode() + b"\n")
        except ConnectionError:
            pass
        finally:
            self.open_watches -= 1
        return reply

    # -- leases -----------------------------------------------------------------------------------------------

    async def _read_lease(self, request: web.Request) -> web.Response:
        lease = self.leases.get(request.match_info["name"])
        if lease is None or self.refusal is not None:
            status, message = self.refusal or (404, "not found")
            return web.json_response({"kind": "Status", "code": status, "message": message}, status=status)
        return web.json_response(lease)

    async def _create_lease(self, request: web.Request) -> web.Response:
        lease = await request.json()
        if lease["metadata"]["name"] in self.leases:
            return web.json_response({"kind": "Status", "code": 409, "message": "already exists"}, status=409)
        return web.json_response(self._keep(lease), status=201)

    async def _write_lease(self, request: web.Request) -> web.Response:
        lease = await request.json()
        known = self.leases[request.match_info["name"]]
        if known["metadata"]["resourceVersion"] != lease["metadata"].get("resourceVersion"):
            return web.json_response({"kind": "Status", "code": 409, "message": "modified"}, status=409)
        return web.json_response(self._keep(lease))

    def _keep(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        lease["metadata"]["resourceVersion"] = str(self.version)
        self.leases[lease["metadata"]["name"]] = lease
        return lease

    _ending: dict[str, Any] | None = None
