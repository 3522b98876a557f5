"""A real Kubernetes API server with etcd behind it, both from `tools/build_kube_apiserver`, on free ports.

Version 1.20 knows EndpointSlices as v1beta1 only; their v1 is added as a custom resource. There are no controllers:
tests write slices as a cluster's own would.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import secrets
import signal
import ssl
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from sglang_ext.ports import pick_free_ports

NAMESPACE = "default"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
READY_WITHIN_S = 60.0
ROUTER = "router"  # the service account
_PARENT_DIES = ("setpriv", "--pdeathsig", "KILL")  # no server outlives the tests


BINARIES = Path.home() / ".cache/sglang-ext/kube/bin"


class ApiServer:
    """Started by `start`, ended by `stop`; requests are sent as an administrator."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._etcd_port, self._peer_port, port = pick_free_ports("127.0.0.1", 3, draw=random.SystemRandom())
        self._port = port
        self.url = f"https://127.0.0.1:{port}"
        self.ca_file = folder / "certs" / "apiserver.crt"
        self.token_file = folder / "router-token"
        self._admin_token = secrets.token_hex(16)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        with (self._folder / "tokens.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow([self._admin_token, "admin", "admin", "system:masters"])
        clients = f"http://127.0.0.1:{self._etcd_port}"
        self._run(
            "etcd",
            *("--data-dir", str(self._folder / "etcd"), "--listen-client-urls", clients),
            *("--advertise-client-urls", clients, "--listen-peer-urls", f"http://127.0.0.1:{self._peer_port}"),
        )
        self._run_api()
        await self._until_ready()
        await self._prepare()

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
        for process in self._processes.values():
            process.kill()
            process.wait()

    async def kill_and_restart(self, after_s: float = 0.0) -> None:
        """Kill the API server and start it again with the same address and data, ready when this returns."""
        process = self._processes["kube-apiserver"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        await asyncio.sleep(after_s)
        self._run_api()
        await self._until_ready()

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, accepted: Sequence[int] = (200, 201)
    ) -> dict[str, Any]:
        """One request as administrator; AssertionError for a status that is not accepted."""
        async with self._http().request(method, self.url + path, json=body, ssl=self._tls()) as reply:
            text = await reply.text()
            assert reply.status in accepted, f"{method} {path}: {reply.status} {text}"
            return dict(json.loads(text)) if text.startswith("{") else {}

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._admin_token}"})
        return self._session

    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)

    async def put_slice(self, item: Mapping[str, Any]) -> None:
        """Create or replace an EndpointSlice."""
        name = item["metadata"]["name"]
        body = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **item}
        found = await self.send("GET", f"{SLICES}/{name}", accepted=(200, 404))
        if found.get("kind") == "EndpointSlice":
            version = found["metadata"]["resourceVersion"]
            body["metadata"] = {**body["metadata"], "resourceVersion": version}
            await self.send("PUT", f"{SLICES}/{name}", body)
        else:
            await self.send("POST", SLICES, body)

    async def delete_slice(self, name: str) -> None:
        await self.send("DELETE", f"{SLICES}/{name}")

    # -- the servers ------------------------------------------------------------------------------------------

    def _run(self, name: str, *options: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*_PARENT_DIES, str(BINARIES / name), *options], stdout=log, stderr=log, cwd=self._folder
            )

    def _run_api(self) -> None:
        certs = self._folder / "certs"
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--cert-dir={certs}",
            f"--secure-port={self._port}",
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--service-cluster-ip-range=10.0.0.0/24"),
            *("--authorization-mode=RBAC", f"--token-auth-file={self._folder / 'tokens.csv'}"),
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certs / 'apiserver.key'}",
            f"--service-account-signing-key-file={certs / 'apiserver.key'}",
            "--disable-admission-plugins=ServiceAccount",  # it waits for secrets that only a controller writes
            *("--runtime-config=discovery.k8s.io/v1beta1=false", "--endpoint-reconciler-type=none"),
        )

    async def _until_ready(self) -> None:
        for _ in range(int(READY_WITHIN_S / 0.2)):
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} has ended: {self._end_of(name)}"
            try:
                async with self._http().get(f"{self.url}/readyz", ssl=self._tls()) as reply:
                    if reply.status == 200:
                        return
            except (OSError, aiohttp.ClientError):
                pass
            await asyncio.sleep(0.2)
        raise AssertionError(f"the API server is not ready: {self._end_of('kube-apiserver')}")

    def _end_of(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-500:]

    async def _prepare(self) -> None:
        """EndpointSlice v1, and a service account with the rights that `docs/how-to/kubernetes.md` asks for."""
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        await self.send(
            "POST",
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {
                    "name": "endpointslices.discovery.k8s.io",
                    "annotations": {"api-approved.kubernetes.io": "unapproved, for tests only"},
                },
                "spec": {
                    "group": "discovery.k8s.io",
                    "scope": "Namespaced",
                    "names": {
                        "plural": "endpointslices",
                        "singular": "endpointslice",
                        "kind": "EndpointSlice",
                        "listKind": "EndpointSliceList",
                    },
                    "versions": [
                        {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
                    ],
                },
            },
        )
        for _ in range(100):
            found = await self.send("GET", SLICES, accepted=(200, 404))
            if found.get("kind") == "EndpointSliceList":
                break
            await asyncio.sleep(0.1)
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        await self.send("POST", account, {"metadata": {"name": ROUTER}})
        for item in documented_rights():
            kind = f"{item['kind'].lower()}s"
            await self.send("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/{kind}", item)
        token = await self.send(
            "POST", f"{account}/{ROUTER}/token", {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        )
        self.token_file.write_text(token["status"]["token"], encoding="utf-8")


def documented_rights() -> list[dict[str, Any]]:
    """Role and binding as the documentation has them, for the service account of the tests."""
    text = (Path(__file__).parents[2] / "docs/how-to/kubernetes.md").read_text(encoding="utf-8")
    block = next(part for part in text.split("```yaml\n")[1:] if "kind: RoleBinding" in part).partition("```")[0]
    items = list(yaml.safe_load_all(block))
    for item in items:
        for subject in item.get("subjects", ()):
            subject |= {"name": ROUTER, "namespace": NAMESPACE}
    return items
