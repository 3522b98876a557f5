"""Finds the instances in Kubernetes: lists and watches the EndpointSlices of their Services.

The last known state keeps serving when the API server fails: an instance goes only when a list or an event
says so. Everything is listed again when the API server has forgotten what this process saw last (410), and now and
then in any case, as an event may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, RouterConfigError, WorkerAddress
from sglang_ext_router.decide.endpoint_slices import (
    ROLE_LABEL,
    ChangeKind,
    Endpoint,
    EndpointState,
    RoleRules,
    SliceError,
    SliceTable,
    one_of_each_pod,
    parse_selector,
    reconcile,
)
from sglang_ext_router.instances.kubernetes_api import ApiAnswerError, KubernetesApi, VersionExpiredError, own_namespace

if TYPE_CHECKING:
    from sglang_ext_router.router import Router

logger = logging.getLogger(__name__)

LIST_AGAIN_S = 300.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0


_NO_ANSWER = (ApiAnswerError, aiohttp.ClientError, OSError, TimeoutError)
_STRANGE_ANSWER = (ValueError, LookupError, TypeError, AttributeError)  # of something that is no API server


class DiscoveryState(NamedTuple):
    """The state of this process's view of the cluster."""

    is_connected: bool  # False while the API server does not answer or refuses
    sync_age_s: float | None  # since it last answered or sent an event; None before everything was listed
    endpoints: dict[EndpointState, int]  # taken over from the cluster


class Discovery:
    """Keeps the router's registry as the cluster's EndpointSlices want it; instances from other sources stay."""

    def __init__(self, config: RouterConfig, router: Router, open_api: Callable[[], KubernetesApi]) -> None:
        self._router = router
        self._open_api = open_api
        namespace = config.service_discovery_namespace or own_namespace()
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        rules = role_rules(config)
        # A slice that matches a selector need not have our label; all that have it are seen by one watch.
        selectors = [",".join(f"{k}={v}" for k, v in labels.items()) for labels, _ in rules.selectors] + [ROLE_LABEL]
        self._tables = {
            selector: SliceTable(rules, config.service_discovery_port or None) for selector in dict.fromkeys(selectors)
        }
        self._prefers_ipv6 = config.discovery_ip_family == "ipv6"
        self._held: dict[str, Endpoint] = {}  # what was taken over from the cluster
        self._tasks: list[asyncio.Task[None]] = []
        self._api: KubernetesApi | None = None
        self._listed: set[str] = set()
        self._synced_s: dict[str, float] = {}  # selector → when the API server last answered
        self._failing: set[str] = set()  # selectors whose last request failed
        self.last_error = ""

    @property
    def has_listed(self) -> bool:
        """Return whether the cluster's state has been seen once."""
        return len(self._listed) == len(self._tables)

    def state(self) -> DiscoveryState:
        """Return the state for metrics: of several watches the worst."""
        states = [endpoint.state for endpoint in self._held.values()]
        return DiscoveryState(
            is_connected=self.has_listed and not self._failing,
            sync_age_s=asyncio.get_running_loop().time() - min(self._synced_s.values()) if self.has_listed else None,
            endpoints={state: states.count(state) for state in EndpointState},
        )

    def start(self) -> None:
        self._api = self._open_api()
        self._tasks = [asyncio.create_task(self._follow(self._api, selector)) for selector in self._tables]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._api is not None:
            await self._api.close()

    # -- the API server -------------------------------------------------------------------------------------

    async def _follow(self, api: KubernetesApi, selector: str) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        version, listed_s = "", 0.0
        while True:
            began_s = loop.time()
            try:
                if not version or loop.time() - listed_s > LIST_AGAIN_S:
                    version, listed_s = await self._list(api, selector), loop.time()
                    backoff_s = FIRST_BACKOFF_S
                async for event in api.watch(self._path, selector, version, partial(self._record_answer, selector)):
                    backoff_s = FIRST_BACKOFF_S
                    self._record_answer(selector)
                    version = self._take(selector, event) or version
                    if loop.time() - listed_s > LIST_AGAIN_S:
                        break
                if loop.time() - began_s > FIRST_BACKOFF_S:
                    continue
            except VersionExpiredError as error:
                is_first, version = bool(version), ""
                if is_first and loop.time() - listed_s > FIRST_BACKOFF_S:
                    continue
                if not is_first:  # the list itself was refused
                    self._record_error(selector, str(error))
            except (*_NO_ANSWER, *_STRANGE_ANSWER) as error:
                self._record_error(
                    selector,
                    f"{type(error).__name__}: {error}" if not isinstance(error, ApiAnswerError) else str(error),
                )
            await asyncio.sleep(backoff_s * random.uniform(0.7, 1.3))
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)

    async def _list(self, api: KubernetesApi, selector: str) -> str:
        items, version = await api.list(self._path, selector)
        for error in self._tables[selector].replace(items):
            logger.warning("%s", error)
        self._listed.add(selector)
        self._record_answer(selector)
        if self.last_error:
            logger.info("discovery: the API server answers again")
            self.last_error = ""
        self._apply()
        return version

    def _take(self, selector: str, event: Mapping[str, Any]) -> str:
        """Carry out an event; its version."""
        kind, item = event.get("type"), event.get("object") or {}
        table = self._tables[selector]
        try:
            if kind in {"ADDED", "MODIFIED"}:
                table.put(item)
            elif kind == "DELETED":
                table.delete(item)
        except SliceError as error:
            logger.warning("%s", error)
        if kind != "BOOKMARK":
            self._apply()
        return str((item.get("metadata") or {}).get("resourceVersion") or "")

    def _record_answer(self, selector: str) -> None:
        self._synced_s[selector] = asyncio.get_running_loop().time()
        self._failing.discard(selector)

    def _record_error(self, selector: str, message: str) -> None:
        self._failing.add(selector)
        if message != self.last_error:  # once, not at every try
            logger.warning("discovery: %s; the last known instances go on serving", message)
        self.last_error = message

    # -- the registry -----------------------------------------------------------------------------------------

    def _apply(self) -> None:
        if not self.has_listed:
            return  # an instance that moved from one role to another is not to go meanwhile
        wanted: dict[str, Endpoint] = {}
        for table in self._tables.values():
            for url, endpoint in table.endpoints.items():
                known = wanted.get(url)
                if known is None or known.state is EndpointState.DRAINING:
                    wanted[url] = endpoint
        registry = self._router.registry
        wanted = one_of_each_pod(wanted, self._prefers_ipv6)
        for kind, endpoint in reconcile(self._held, wanted):
            worker = registry.find(endpoint.url)
            if kind is ChangeKind.ADD:
                if worker is not None:
                    continue  # given by an option or by hand, and removed by hand
                self._router.adopt_worker(address_of(endpoint))
                self._held[endpoint.url] = endpoint
                continue
            if kind is ChangeKind.REMOVE:
                del self._held[endpoint.url]
                if worker is not None:
                    self._router.lose_worker(worker)
                continue
            self._held[endpoint.url] = endpoint
            if worker is None:
                continue
            if kind is ChangeKind.PLACE:
                worker.topology = endpoint.topology
            else:
                self._router.set_draining(worker, kind is ChangeKind.DRAIN)


def address_of(endpoint: Endpoint) -> WorkerAddress:
    """The instance as the router takes it over."""
    found = endpoint
    return WorkerAddress(found.url, found.role, found.bootstrap_port, found.revision, found.topology, found.token_range)


def role_rules(config: RouterConfig) -> RoleRules:
    """Read the selector options. Raises RouterConfigError, naming the invalid one."""
    selectors = []
    for option, text, role in (
        ("--prefill-short-selector", config.prefill_short_selector, Role.SHORT),
        ("--prefill-long-selector", config.prefill_long_selector, Role.LONG),
        ("--prefill-selector", config.prefill_selector, Role.BOTH),
        ("--decode-selector", config.decode_selector, Role.DECODE),
    ):
        if text:
            try:
                selectors.append((parse_selector(text), role))
            except ValueError as error:
                raise RouterConfigError(f"{option}: {error}") from None
    return RoleRules(tuple(selectors))
